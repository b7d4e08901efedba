"""Optimizers of every kind, and members of a pool that divide their state: whether they end with the bits of one.

As a program: looks at all of them in this process, and prints what came as JSON; for other instruction sets.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn, optim

from divided_members import exchange, plan_of
from everstep.base.extents import Extents, Runs
from everstep.base.plan import Divides, Plan
from everstep.exact.dealt import Dealt
from everstep.exact.layout import BLOCK_ELEMENTS, GradientLayout, align_parameters
from everstep.exact.pieces import PieceUpdate
from everstep.exact.seeding import seed_all
from everstep.exact.state import ModelState
from everstep.train.optimizer_kind import OptimizerKind, expected_kind, kind_of

Make = Callable[[list[nn.Parameter]], optim.Optimizer]
STEPS = 4


class Own(optim.Optimizer):
    """An optimizer as people write them: parameter by parameter."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, self.state[p], group)

    def update(self, p: Any, state: Any, group: Any) -> None:
        """One parameter."""
        raise NotImplementedError


class Lion(Own):
    """Element by element."""

    def update(self, p: Any, state: Any, group: Any) -> None:
        momentum = state.setdefault("momentum", torch.zeros_like(p))
        p.sub_(torch.sign(momentum * 0.9 + p.grad * 0.1), alpha=group["lr"])
        momentum.lerp_(p.grad, 0.01)


class Lamb(Own):
    """Scales the change of each parameter by norms of that parameter."""

    def update(self, p: Any, state: Any, group: Any) -> None:
        state["step"] = state.get("step", 0) + 1
        mean, square = (state.setdefault(key, torch.zeros_like(p)) for key in ("exp_avg", "exp_avg_sq"))
        mean.lerp_(p.grad, 0.1)
        square.mul_(0.99).addcmul_(p.grad, p.grad, value=0.01)
        change = mean / (1 - 0.9 ** state["step"]) / (square.sqrt() + 1e-6)
        p.sub_(change * (p.norm() / (change.norm() + 1e-6)), alpha=group["lr"])


class Mixed(Lamb):
    """Keeps other things for matrices than for the rest, as Muon with Adam beside it does."""

    def update(self, p: Any, state: Any, group: Any) -> None:
        if p.dim() != 2:
            super().update(p, state, group)
            return
        momentum = state.setdefault("momentum", torch.zeros_like(p)).mul_(0.9).add_(p.grad)
        p.sub_(momentum / (momentum.norm() + 1e-6), alpha=group["lr"])


class Factored(Own):
    """Keeps something like the parameter, and something else besides: of this no part is an element's."""

    def update(self, p: Any, state: Any, group: Any) -> None:
        rows = state.setdefault("rows", torch.zeros(len(p) if p.dim() else 1))
        momentum = state.setdefault("momentum", torch.zeros_like(p)).mul_(0.9).add_(p.grad)
        rows.add_(p.grad.float().reshape(len(rows), -1).square().sum(1).sqrt())
        p.sub_(momentum / (rows.sum() + 1e-6), alpha=group["lr"])


class Global(Own):
    """Divides by the norm of all gradients together."""

    def update(self, p: Any, state: Any, group: Any) -> None:
        norm = torch.stack([q.grad.float().norm() for q in group["params"] if q.grad is not None]).norm()
        p.sub_(p.grad / norm, alpha=group["lr"])


class Noisy(Own):
    """Draws random numbers."""

    def update(self, p: Any, state: Any, group: Any) -> None:
        p.sub_(p.grad + 0.01 * torch.randn_like(p), alpha=group["lr"])


_HOW: dict[str, dict[str, Any]] = {"": {}, " foreach": {"foreach": True}, " loop": {"foreach": False}}
_FUSED: dict[str, dict[str, Any]] = {
    "SGD": {"fused": True, "momentum": 0.0, "nesterov": False},  # with momentum torch needs all gradients in all steps
    **{name: {"fused": True} for name in ("Adam", "AdamW", "Adagrad")},
}
"""Those that torch has for CPUs."""
_OPTIONS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    "Adam": {"amsgrad": True},
    "AdamW": {"maximize": True},
    "RMSprop": {"centered": True, "momentum": 0.5},
    "Adagrad": {"lr_decay": 0.1},
    "NAdam": {"decoupled_weight_decay": True, "weight_decay": 0.1},
    "RAdam": {},
    "Adamax": {"weight_decay": 0.1},
    "Adadelta": {},
    "Rprop": {},
    "ASGD": {"t0": 2},
}
ELEMENTS: dict[str, Make] = {
    "SGD plain": lambda ps: optim.SGD(ps, lr=0.1),
    "AdamW groups": lambda ps: optim.AdamW([{"params": ps[::2], "lr": 0.5}, {"params": ps[1::2], "amsgrad": True}]),
    "Lion": Lion,
    **{
        f"{name}{how}": partial(getattr(optim, name), **{**options, **more})
        for name, options in _OPTIONS.items()
        for how, more in (*_HOW.items(), *([(" fused", _FUSED[name])] if name in _FUSED else []))
    },
}
MATRICES: dict[str, Make] = {
    "Muon": lambda ps: optim.Muon([p for p in ps if p.dim() == 2], lr=0.02, ns_steps=2),
    "Adafactor": lambda ps: optim.Adafactor(ps),
    "Adafactor foreach": lambda ps: optim.Adafactor(ps, foreach=True),
    "Lamb": Lamb,
    "Mixed": Mixed,
    "Factored": Factored,
}
_SOME = ("AdamW groups", "Adam fused", "SGD foreach", "NAdam", "Muon", "Lamb")
REFUSED: dict[str, Make] = {"Global": Global, "Noisy": Noisy}
ALL = ELEMENTS | MATRICES | REFUSED


class Model(nn.Module):
    """Parameters of more than a block, small and narrow ones, a scalar, a tied, a frozen and an unused one."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.head = nn.Embedding(300, 260), nn.Linear(260, 300, bias=False)
        self.head.weight = self.token.weight
        self.wide, self.norm = nn.Linear(250, 540), nn.LayerNorm(700)
        self.conv = nn.Conv2d(3, 16, 5).to(memory_format=torch.channels_last)
        self.narrow = nn.Linear(300, 20, dtype=torch.bfloat16)
        self.scale, self.frozen = nn.Parameter(torch.tensor(1.5)), nn.Linear(30, 40)
        self.frozen.requires_grad_(False)
        self.unused, self.last = nn.Linear(50, 60), nn.Linear(70, 80)


class Pooled:
    """One member, with its copy of a model."""

    def __init__(self, make: Make, divides: Divides) -> None:
        seed_all(3)
        self.model = Model()
        align_parameters(self.model)
        self.optimizer = make(list(self.model.parameters()))
        self.state = ModelState(self.model, self.optimizer, units=[self.model], divides=divides)
        self.layout = GradientLayout.build(self.model, [self.model])

    def gradients(self, step: int) -> None:
        """Other ones in each step; now and then there is none."""
        generator = torch.Generator().manual_seed(step)
        for number, (name, parameter) in enumerate(self.model.named_parameters()):
            gradient = torch.randn(parameter.shape, generator=generator)
            absent = not parameter.requires_grad or "unused" in name or (number + step) % 4 == 0
            parameter.grad = None if absent else torch.empty_like(parameter).copy_(gradient)

    def lose_gradients(self, but: Runs) -> None:
        """Only these blocks of the gradient were taken."""
        there = {block for run in but for block in range(*run)}
        for entry in (self.layout.entries[i] for i in self.layout.params):
            gradient = self.model.get_parameter(entry.name).grad
            for block in range(entry.offset // BLOCK_ELEMENTS, -(-entry.stop // BLOCK_ELEMENTS)):
                if gradient is not None and block not in there:
                    first, stop = (n * BLOCK_ELEMENTS - entry.offset for n in (block, block + 1))
                    gradient.view(-1)[max(first, 0) : stop] = torch.nan

    def update(self, step: int, plan: Plan | None, me: int, *, first: bool) -> Dealt | None:
        """first: the first update is divided, too."""
        self.gradients(step)
        seed_all(step)
        known = bool(self.optimizer.state)
        present = frozenset(p for p in self.model.parameters() if p.grad is not None)
        dealt = Dealt(self.state, plan, 0, me, present) if plan is not None and (first or known) else None
        if dealt is None:
            self.optimizer.step()
        else:
            if known:
                self.lose_gradients(dealt.takers(self.layout)[me])
            PieceUpdate(self.optimizer).make([dealt.updates()])
            assert dealt.strange() is None
        for parameter in self.model.parameters():
            parameter.grad = None
        return dealt

    def blocks(self, there: Extents) -> dict[int, bytes]:
        """Blocks of the state."""
        image = self.state.image()
        return {n: bytes(image.read_block(n)) for lo, hi in there.spans(image.outline.sizes) for n in range(lo, hi)}


def found(make: Make) -> list[OptimizerKind]:
    """Its kind before the first update, at it, and after it."""
    one = Pooled(make, "elements")
    kinds = [expected_kind(one.optimizer, 3)]
    for step in range(2):
        one.gradients(step)
        kinds.append(kind_of(one.optimizer, 3, dealt=True))
        one.optimizer.step()
    return kinds


def ends_alike(make: Make, kind: OptimizerKind, members: int, copies: int, steps: int = STEPS) -> bool:
    """Whether members that divide the state have in each step, each in its blocks, the bits of one that has all."""
    divides = kind.divides if kind.follows else "nothing"
    alone, pool = Pooled(make, divides), [Pooled(make, divides) for _ in range(members)]
    plan, alike = plan_of(members, copies), True
    for step in range(steps):
        alone.update(step, None, 0, first=False)
        dealt = [one.update(step, plan, me, first=kind.uniform) for me, one in enumerate(pool)]
        there = [one for one in dealt if one is not None]
        exchange(there)
        right = alone.blocks(Extents(whole=True))
        for me, one in enumerate(pool):
            held = dealt[me].spread() if there else Extents(whole=True)  # type: ignore[union-attr]
            alike &= all(right[n] == data for n, data in one.blocks(held).items())
            if there:
                dealt[me].release()  # type: ignore[union-attr]
        alike &= all(one.state.shape.sizes == alone.state.shape.sizes for one in pool)
    return alike


def main() -> None:
    """Looks at all, and has some divided, with two threads, too."""
    said: dict[str, Any] = {}
    for name, make in ALL.items():
        kinds, alike = list[OptimizerKind](), True
        for threads in (1, 2) if name in _SOME else (1,):
            torch.set_num_threads(threads)
            kinds += found(make)
            alike &= name not in _SOME or ends_alike(make, kinds[0], 2, 1)
        said[name] = [sorted({kind.divides for kind in kinds}), alike]
    print(json.dumps([torch.backends.cpu.get_cpu_capability(), said]))


if __name__ == "__main__":
    main()
