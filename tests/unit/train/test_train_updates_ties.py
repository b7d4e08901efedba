"""Gradients of parameters that several stages share: each member gets those of the others, from one of each pool."""

from __future__ import annotations

from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from everstep.base.plan import Member, Plan, Seat
from everstep.base.ports import Hop
from everstep.exact.reduce import Tied, TiePlace
from everstep.train import updates
from everstep.train.updates import exchange_ties

POOLS = {0: (0, 1), 1: (2, 5), 2: (3, 4, 5, 6, 7), 3: (0,)}
"""Worker 5 sits in two pools, and so does worker 0."""
USES = {"a": {0: (0,), 2: (9, 11)}, "b": {0: (1,), 1: (5,)}, "c": {1: (6,), 2: (8,)}}
"""Units that use a parameter, by its name and stage."""
ABSENT = {("c", 6), ("a", 11)}


def plan() -> Plan:
    seats = tuple(Seat(i, stage, "active", ()) for stage, pool in POOLS.items() for i in pool)
    return Plan(3, "", tuple(Member(i, 0, "host") for i in range(8)), seats, 1, stages=4)


def gradient(name: str, unit: int) -> torch.Tensor | None:
    return None if (name, unit) in ABSENT else torch.full((3,), 100.0 * ord(name) + unit)


def places(name: str, stage: int) -> tuple[TiePlace, ...]:
    """All uses of a parameter, as this stage sees them."""
    found = [TiePlace(name, unit, k, 7 if k == stage else -1) for k, units in USES[name].items() for unit in units]
    return tuple(sorted(found, key=lambda place: place.unit))


def ties(stage: int) -> list[Tied]:
    return [Tied(name, places(name, stage), nn.Parameter()) for name, uses in USES.items() if stage in uses]


class Channel:
    """Messages between all, which are sent once and received once."""

    def __init__(self, me: int, mail: Any, sent: list[tuple[int, int, int]]) -> None:
        self._me, self._mail, self._sent = me, mail, sent

    def send(self, to: int, hop: Hop, tensors: list[torch.Tensor], meta: bytes) -> None:
        self._sent.append((self._me, to, hop.part))
        assert hop[:2] == (4, "tied")
        self._mail[self._me, to, hop].put((tensors, meta))

    def recv(self, source: int, hop: Hop) -> tuple[list[torch.Tensor], bytes]:
        found: tuple[list[torch.Tensor], bytes] = self._mail[source, self._me, hop].get(timeout=60.0)
        return found


def test_every_stage_gets_what_others_have_reduced_of_the_parameters_that_it_shares(monkeypatch) -> None:
    def tied_out(there: list[Tied], stage: Any, reduced: Any) -> dict[TiePlace, torch.Tensor | None]:
        assert reduced == f"reduced {stage}"
        return {place: gradient(tied.name, place.unit) for tied in there for place in tied.own}

    monkeypatch.setattr(updates, "tied_out", tied_out)
    mail: Any = defaultdict(SimpleQueue)
    sent: list[tuple[int, int, int]] = []
    given = plan()

    def run(me: int) -> Any:
        held = given.stages_of(me)
        stages = {k: SimpleNamespace(spec=SimpleNamespace(ties=ties(k)), layout=k) for k in held}
        view: Any = SimpleNamespace(me=me, stages=stages, transport=SimpleNamespace(channel=Channel(me, mail, sent)))
        return exchange_ties(view, given, 4, {k: f"reduced {k}" for k in held})  # type: ignore[misc]

    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(run, range(8)))
    for me, told in enumerate(found):
        assert sorted(told) == [k for k in given.stages_of(me) if k != 3]
        for stage, received in told.items():
            right = {
                place: gradient(name, place.unit)
                for name, uses in USES.items()
                for place in places(name, stage)
                if stage in uses and place.entry < 0
            }
            assert received.keys() == right.keys()
            for place, there in right.items():
                mine = received[place]
                assert (mine is None) == (there is None)
                assert mine is None or there is None or torch.equal(mine, there)
    assert all(queue.empty() for queue in mail.values())
    assert not [one for one in sent if one[1] in POOLS[one[2]]], "who reduces a stage has its gradients"
    busy = [sender for sender, _, stage in sent if stage == 0]
    assert abs(busy.count(0) - busy.count(1)) <= 1, "the members of a pool take turns"
