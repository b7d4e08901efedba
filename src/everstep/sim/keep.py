"""What a simulated job could go back to: snapshots in the workers' memories, and checkpoints on disk.

What is taken, stated and let go is the driver's to say.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from everstep.base.cause import Cause, Why
from everstep.protocol.driver import operations as do
from everstep.sim.world import MS

if TYPE_CHECKING:
    from everstep.sim.worker import SimWorker


NO_ROOM = Why(Cause.CONFIG, "there is no room")


class Disk:
    """Checkpoints, by step and stage. `hosts`: who sees the directory; everybody if None."""

    def __init__(self, stages: int, hosts: frozenset[str] | None) -> None:
        self.stages = stages
        self.hosts = hosts
        self.parts: dict[int, dict[int, int]] = {}
        self.damaged: set[int] = set()
        self._asking: dict[int, Callable[[], None]] = {}

    def ask(self, step: int, complete: Callable[[], None]) -> None:
        """Call `complete` when the parts of all stages are there."""
        self._asking = {step: complete}

    def write(self, stage: int, step: int, state: int) -> None:
        """One stage's part is on disk; the last one completes the checkpoint."""
        self.parts.setdefault(step, {})[stage] = state
        self.damaged.discard(step)
        if len(self.parts[step]) == self.stages and step in self._asking:
            self._asking.pop(step)()

    def newest(self, host: str, limit: int | None) -> tuple[int, ...]:
        """Steps of the newest two checkpoints that a host can read, up to the limit."""
        if self.hosts is not None and host not in self.hosts:
            return ()
        whole = (step for step, parts in self.parts.items() if len(parts) == self.stages)
        return tuple(sorted(step for step in whole if limit is None or step <= limit)[-2:])

    def damage(self) -> None:
        """The newest complete checkpoint cannot be read any more."""
        self.damaged.update(sorted(step for step, parts in self.parts.items() if len(parts) == self.stages)[-1:])

    def read(self, stage: int, step: int) -> int | None:
        """A stage's state, or None if the checkpoint turns out to be damaged: then it is set aside."""
        if step in self.damaged or step not in self.parts:
            self.parts.pop(step, None)
            return None
        return self.parts[step][stage]

    def condemn(self, sound: int) -> None:
        """Later checkpoints are set aside."""
        self.parts = {step: parts for step, parts in self.parts.items() if step <= sound}


class Memory:
    """One worker's snapshots: states by stage and step."""

    def __init__(self, worker: SimWorker) -> None:
        self.worker = worker
        self.kept: dict[tuple[int, int], int] = {}

    def keep(self, effect: do.Keep) -> None:
        """Of the state as it is; some of it is handed to other pools, and may get lost on the way."""
        worker, number = self.worker, effect.step
        if worker.world.rng.random() < 0.05:
            worker.handle(do.NotKept(number, NO_ROOM))
            return
        for stage, value in worker.state.stages.items():
            self.kept[stage, number] = value
        self._say()
        for stage, member in effect.to.items():
            if stage in worker.state.stages:
                value = worker.state.stages[stage]
                worker.mesh.send_snapshot(member.worker_id, stage, number, value, effect.records)
        if effect.to:
            done = worker.world.rng.random() < 0.9
            worker.later(worker.world.between(MS, 40 * MS), worker.handle, do.HandedOver(number, done))

    def take(self, stage: int, number: int, value: int, records: do.Records) -> None:
        """Another pool's."""
        self.kept.setdefault((stage, number), value)
        self.worker.handle(do.InMemory(tuple(sorted(self.kept)), {number: records}))

    def retire(self, effect: do.RetireKept) -> None:
        """What is older than a complete one goes, but for the newest that is proven."""
        older = {number for _, number in self.kept if number <= effect.proven}
        self.kept = {k: v for k, v in self.kept.items() if k[1] >= effect.step or k[1] == max(older, default=-1)}
        self._say()

    def forget(self, effect: do.ForgetKept) -> None:
        """Later ones count for nothing."""
        self.kept = {key: value for key, value in self.kept.items() if key[1] <= effect.after}
        self._say()

    def _say(self) -> None:
        self.worker.handle(do.InMemory(tuple(sorted(self.kept))))
