"""What a simulated job could go back to: snapshots in the workers' memories, and checkpoints on disk.

A pool's leader takes them when a step is released while its state still stands there, so no effect of a step is ever
skipped by going to a snapshot of it. One copy of a stage is kept by a worker of another pool.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from everstep.base.plan import Plan
from everstep.protocol.step_types import Record, SnapshotsKept
from everstep.sim.world import MS

if TYPE_CHECKING:
    from everstep.sim.worker import SimWorker

_KEPT_PER_STAGE = 2

Kept = tuple[int, Mapping[int, Record]]  # a stage's state, and the records by which it was decided


class Disk:
    """Checkpoints, by step and stage. `hosts`: who sees the directory; everybody if None."""

    def __init__(self, stages: int, hosts: frozenset[str] | None) -> None:
        self.stages = stages
        self.hosts = hosts
        self.parts: dict[int, dict[int, int]] = {}
        self.damaged: set[int] = set()

    def write(self, stage: int, step: int, state: int) -> None:
        """One stage's part is on disk; the last one completes the checkpoint."""
        self.parts.setdefault(step, {})[stage] = state
        self.damaged.discard(step)

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


class Keeper:
    """One worker's snapshots, and what it says of them."""

    def __init__(self, worker: SimWorker) -> None:
        self.worker = worker
        self.kept: dict[tuple[int, int], Kept] = {}

    def _say(self) -> None:
        self.worker.handle(SnapshotsKept(tuple(sorted(self.kept))))

    def released(self, step: int, plan: Plan) -> None:
        """The effects of a step are out: take what is due, if the state still stands there."""
        worker, job, me = self.worker, self.worker.job, self.worker.me.worker_id
        state = worker.state
        if state.at != step:
            return
        for stage in plan.stages_of(me):
            if plan.leader(stage) != me or stage not in state.stages:
                continue
            value = state.stages[stage]
            if job.keep_every and step % job.keep_every == 0:
                self.keep(stage, step, value, state.records)
                other = plan.leader((stage + 1) % plan.stages)
                if other != me:
                    worker.mesh.send_snapshot(other, stage, step, value, state.records)
            if job.write_every and step % job.write_every == 0:
                worker.later(worker.world.between(MS, 60 * MS), worker.site.disk.write, stage, step, value)

    def keep(self, stage: int, step: int, state: int, records: Mapping[int, Record]) -> None:
        """One snapshot more; the oldest of the stage goes."""
        self.kept[stage, step] = (state, records)
        for old in sorted(s for k, s in self.kept if k == stage)[:-_KEPT_PER_STAGE]:
            del self.kept[stage, old]
        self._say()

    def condemn(self, sound: int) -> None:
        """Later snapshots count for nothing."""
        self.kept = {key: kept for key, kept in self.kept.items() if key[1] <= sound}
        self._say()
