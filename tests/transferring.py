"""A worker with real stages and stand-ins for all who look at them, for what moving state does to it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from everstep.base.config import load_config
from everstep.base.extents import Extents
from everstep.base.plan import Member, Plan, Seat
from everstep.checkpoint.vault import StageState
from everstep.protocol.step_types import Key, Record
from everstep.train.heal import Held
from everstep.train.replica import StageReplica
from everstep.train.stage import Parts
from everstep.train.transfers import Transfers
from everstep.train.view import Stages

ME = 1
AT = Key(4, 0)
RECORDS = {7: Record(0, b"of the step")}
OTHERS = {8: Record(0, b"of another decision")}
PLAN = Plan(3, "because", tuple(Member(i, 0, "host") for i in (0, 1)), (Seat(1, 0, "active", (0,)),), 1, stages=3)


class Count:
    """State of a user's loop."""

    def __init__(self) -> None:
        self.value = 0

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


class Recorder:
    """Remembers what was called with which arguments, in a list that several share; `answers`: by name."""

    def __init__(self, calls: list[tuple[Any, ...]], name: str, **answers: Any) -> None:
        self._calls, self._name, self._answers = calls, name, answers

    def __getattr__(self, name: str) -> Any:
        def called(*args: Any, **more: Any) -> Any:
            self._calls.append((f"{self._name}.{name}", *args, *more.values()))
            answer = self._answers.get(name)
            return answer(*args, **more) if callable(answer) else answer

        return called


class Stage(StageReplica):
    """One that remembers what becomes of it."""

    def __init__(self, number: int, seed: int, calls: list[tuple[Any, ...]]) -> None:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        config = load_config([("test", {"lanes": 8, "micro_batch": 4, "steps": 3})])
        self.count, self._number, self._calls = Count(), number, calls
        super().__init__(Parts(model, optimizer, None, [model], {"count": self.count}), config, torch.device("cpu"))

    def abandon(self) -> None:
        self._calls.append(("abandon", self._number))
        super().abandon()

    def prove_update(self) -> None:
        self._calls.append(("prove", self._number))
        super().prove_update()

    def copied(self) -> StageState:
        """Its state, as it arrives from another worker."""
        manifest = self.state.manifest()
        return StageState(manifest, [memoryview(bytes(self.state.read_block(n))) for n in range(self.state.n_blocks)])

    def weights(self) -> torch.Tensor:
        return torch.cat([p.detach().flatten() for p in self.parts.model.parameters()])


class Mover:
    """A worker at a step. calls: what its parts were told, in order; kept: its snapshots, by step and stage; restored:
    the checkpoint that it reads; recorded: what that says of its step. past: the step after which its loop has changed
    tensors."""

    def __init__(self, at: Key = AT, stages: tuple[int, ...] = (0, 1), **held: Extents) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.kept: dict[int, dict[int, Held]] = {}
        self.stages = Stages(3, lambda number: Stage(number, number, self.calls))  # type: ignore[arg-type]
        self.stages.want(stages)
        blocks = {int(name[1:]): extents for name, extents in held.items()}
        self.machine = SimpleNamespace(position=at, held=blocks, generation=2)
        config = SimpleNamespace(outcome=lambda number, records: ("outcome", number, records))
        self.in_memory = False
        self.view: Any = SimpleNamespace(
            me=ME,
            step=at.step,
            stages=self.stages,
            driver=SimpleNamespace(machine=self.machine, config=config, in_memory=lambda number: self.in_memory),
            publisher=Recorder(self.calls, "publisher"),
            phase=lambda *about: self.calls.append(("phase", *about)),
            tick=lambda: self.calls.append(("tick",)),
        )
        self.view.publisher.untold = SimpleNamespace(packed=lambda: b"untold")
        self.updates = Recorder(self.calls, "updates", strange=lambda outcome: {"strange": outcome[1]})
        self.past = -1
        answers = {
            "told": lambda n: b"loop %d" % n,
            "going_on": lambda n: b"on %d" % n,
            "changed": lambda: ("changed",),
        }
        self.loop = Recorder(self.calls, "loop", **answers)
        self.loop.moves = SimpleNamespace(past=lambda number: number == self.past, loaded=lambda: None, astray="")
        self.donor = Recorder(self.calls, "donor")
        self.keeper = Recorder(self.calls, "keeper", held=lambda step: self.kept.get(step, {}))
        self.restored: Any = None
        self.recorded = OTHERS
        answers = {"restore": lambda *_: self.restored, "records_of": lambda manifest: self.recorded}
        self.restorer = Recorder(self.calls, "restorer", **answers)
        parts: list[Any] = [self.updates, self.donor, self.keeper, self.restorer, self.loop]
        self.transfers = Transfers(self.view, *parts)

    def names(self, *but: str) -> list[str]:
        """What was called, without its arguments; but: beginnings of what is of no interest."""
        return [call[0] for call in self.calls if not call[0].startswith(but or ("phase", "tick", "keeper"))]

    def said(self, name: str) -> list[tuple[Any, ...]]:
        """The arguments of all calls of this name."""
        return [call[1:] for call in self.calls if call[0] == name]
