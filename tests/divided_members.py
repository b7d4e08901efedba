"""Members of a pool that divide an optimizer's state, each with its copy of a small model."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import AdamW

from everstep.base.plan import SEGMENTS, Member, Plan, Seat
from everstep.exact.dealt import Dealt
from everstep.exact.layout import align_parameters
from everstep.exact.pieces import PieceUpdate
from everstep.exact.seeding import seed_all
from everstep.exact.state import ModelState
from everstep.placement.shards import segment_shards, spread


def plan_of(members: int, copies: int) -> Plan:
    who = range(members)
    shards = segment_shards(0, spread(SEGMENTS, copies, who, {}), who)
    people = tuple(Member(i, 0, "here") for i in who)
    return Plan(1, "", people, tuple(Seat(i, 0, "active", ()) for i in who), 8, shards=shards)


def exchange(dealt: list[Dealt]) -> None:
    """All that members give each other."""
    for of_all in zip(*(one.portions() for one in dealt), strict=True):
        assert len({(one.source, one.takers, one.data.shape) for one in of_all}) == 1
        for taker in of_all[0].takers:
            of_all[taker].data.copy_(of_all[of_all[0].source].data)


class DividedMember:
    """A member with its copy of the model, large enough for several blocks of each unit. late: the first parameter has
    no gradient yet."""

    late = False

    def __init__(self, make: Any = AdamW, divides: str = "elements") -> None:
        seed_all(3)
        self.model = nn.Sequential(nn.Linear(500, 400), nn.BatchNorm1d(400), nn.Conv2d(3, 64, 5), nn.Linear(300, 700))
        self.model[2].to(memory_format=torch.channels_last)
        self.model[3].bias.requires_grad_(False)
        align_parameters(self.model)
        self.optimizer = make([p for p in self.model.parameters() if p.requires_grad])
        self.state = ModelState(self.model, self.optimizer, units=list(self.model), divides=divides)

    def gradients(self, step: int) -> None:
        generator = torch.Generator().manual_seed(step)
        for parameter in self.model.parameters():
            gradient = torch.randn(parameter.shape, generator=generator)
            if parameter.requires_grad and not (self.late and parameter is self.model[0].weight):
                parameter.grad = torch.empty_like(parameter).copy_(gradient)

    @property
    def with_gradients(self) -> frozenset[nn.Parameter]:
        return frozenset(p for p in self.model.parameters() if p.grad is not None)

    def clear(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = None

    def whole(self, step: int) -> None:
        self.gradients(step)
        self.optimizer.step()
        self.clear()

    def part(self, step: int, plan: Plan, me: int) -> Dealt:
        self.gradients(step)
        dealt = Dealt(self.state, plan, 0, me, self.with_gradients)
        PieceUpdate(self.optimizer).make([dealt.updates()])
        self.clear()
        return dealt
