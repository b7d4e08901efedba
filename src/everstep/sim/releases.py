"""The promises about what steps lead to: what leaves a worker, and when; what applications are told of a gather."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from everstep.base.plan import WorkerKey
from everstep.protocol.driver.records import gathered
from everstep.protocol.step_types import Key, Record
from everstep.sim.promises import PromiseBroken, require


class Effects:
    """P2: the effects of every step leave exactly once, and only effects of committed steps.

    floor: the newest step whose effects have left, and that was not found tainted since.
    """

    def __init__(self) -> None:
        self.effects: dict[int, int] = {}
        self.released: dict[WorkerKey, int] = {}
        self.committed = 0
        self.floor = 0

    def commit(self, step: int) -> None:
        self.committed = max(self.committed, step)

    def back(self, step: int) -> None:
        """States after the step were tainted."""
        self.floor = min(self.floor, step)

    def release(self, who: WorkerKey, position: Key, step: int, effect: int) -> None:
        """The effects of a step leave a worker that has decided `position`."""
        if not (position > Key(step, 0)):
            raise PromiseBroken(f"P2: {who} released step {step} at {position}: others may lack it")
        known = self.effects.setdefault(step, effect)
        require(known == effect, "P2", f"{who} released other effects of step {step}")
        require(step <= self.committed, "P2", f"{who} released step {step}, which nobody had committed")
        require(step > self.released.get(who, 0), "P2", f"{who} released step {step} twice or out of order")
        self.released[who] = step
        self.floor = max(self.floor, step)


class GatherAnswers:
    """P1 for gathers: applications that go on from one are told the same of it, and of no other one."""

    def __init__(self) -> None:
        self._told: dict[WorkerKey, dict[Key, Mapping[int, Record]]] = {}

    def stands(self, who: WorkerKey, step: int) -> None:
        """An application is told of its step: it will ask for that step's gathers, and knows those of earlier ones."""
        self._told[who] = {key: records for key, records in self._told.get(who, {}).items() if key.step == step - 1}

    def told(
        self, who: WorkerKey, key: Key, records: Mapping[int, Record], question: str, living: Iterable[WorkerKey]
    ) -> None:
        """An application is told what members gave; question: how the data of each has to end."""
        other = [data for data in gathered(records).values() if not data.endswith(question.encode())]
        require(not other, "P1", f"{who} asks for {key}, and is told {other}")
        for one in living:
            known = self._told.get(one, {}).get(key, records)
            require(known == records, "P1", f"{who} is told other data of {key} than {one}, which has gone on")
        self._told.setdefault(who, {})[key] = records
