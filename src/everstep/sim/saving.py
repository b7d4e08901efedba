"""Snapshots in memory, checkpoints on disk and the result at the end, as one simulated worker writes them.

What is taken, stated and let go is the driver's to say.
"""

from __future__ import annotations

from collections.abc import Mapping

from everstep.base.cause import Cause, Why
from everstep.base.extents import Extents
from everstep.protocol.driver import operations as do
from everstep.protocol.driver.operations import AbandonSave, Save, SaveEnded
from everstep.sim.life import Life, nothing
from everstep.sim.mesh import Mesh
from everstep.sim.model import Blocks, present, without
from everstep.sim.world import MS

NO_ROOM = Why(Cause.CONFIG, "there is no room")


class Memory:
    """One worker's snapshots: states by stage and step."""

    def __init__(self, life: Life, mesh: Mesh) -> None:
        self.life = life
        self.mesh = mesh
        self.kept: dict[tuple[int, int], Blocks] = {}
        life.install({do.Keep: self._keep, do.RetireKept: self._retire, do.ForgetKept: self._forget})
        life.install({do.DropLanes: nothing, ("message", "snapshot"): self._take})

    def lose(self, stage: int, number: int, lost: Extents) -> None:
        """Blocks of a snapshot are gone."""
        self.kept[stage, number] = without(self.kept[stage, number], lost)
        self._say()

    def _keep(self, effect: do.Keep) -> None:
        """Of the state as it is; some of it is handed to other pools, and may get lost on the way."""
        life, number = self.life, effect.step
        if life.world.rng.random() < 0.05:
            life.handle(do.NotKept(number, NO_ROOM))
            return
        for stage, value in life.state.stages.items():
            self.kept[stage, number] = value
        self._say()
        for stage, member in effect.to.items():
            if stage in life.state.stages:
                value = life.state.stages[stage]
                self.mesh.send(member.worker_id, "snapshot", stage, number, value, effect.records)
        if effect.to:
            done = life.world.rng.random() < 0.9
            life.soon(MS, 40 * MS, life.handle, do.HandedOver(number, done))

    def _take(self, stage: int, number: int, value: Blocks, records: do.Records) -> None:
        """Another pool's."""
        self.kept.setdefault((stage, number), value)
        self._say({number: records})

    def _retire(self, effect: do.RetireKept) -> None:
        """What is older than a complete one goes, but for the newest that is proven."""
        older = {number for _, number in self.kept if number <= effect.proven}
        self.kept = {k: v for k, v in self.kept.items() if k[1] >= effect.step or k[1] == max(older, default=-1)}
        self._say()

    def _forget(self, effect: do.ForgetKept) -> None:
        """Later ones count for nothing."""
        self.kept = {key: value for key, value in self.kept.items() if key[1] <= effect.after}
        self._say()

    def _say(self, records: Mapping[int, do.Records] | None = None) -> None:
        there = {key: part for key, value in sorted(self.kept.items()) if (part := present(value))}
        whole = tuple(key for key, part in there.items() if part.whole)
        parts = {key: part for key, part in there.items() if not part.whole}
        self.life.handle(do.InMemory(whole, records or {}, parts))


_GRACE_NS = 500 * MS


class SimSaver:
    """Writes this worker's parts."""

    def __init__(self, life: Life) -> None:
        self.life = life
        life.install({Save: self._save, AbandonSave: nothing, do.Invalidate: self._invalidate})
        life.install({do.SaveLast: self._save_last, do.Finish: self._finish})
        life.install({do.Linger: lambda operation: life.soon(10 * MS, 2000 * MS, life.done, operation)})

    def _save(self, effect: Save) -> None:
        """Each stage's leader writes its part; the job's leader hears when the last one is there."""
        life, number = self.life, effect.step
        me, disk = life.me.worker_id, life.site.disk
        if effect.plan.leader(0) == me:
            disk.ask(number, lambda: life.later(0, life.handle, SaveEnded(number, True, "", "disk")))
        for stage in effect.plan.stages_of(me):
            if effect.plan.leader(stage) == me:
                state = life.state.stages[stage]
                life.soon(MS, 60 * MS, self._written, effect.plan.generation, stage, number, state)

    def _written(self, generation: int, stage: int, number: int, state: Blocks) -> None:
        """What is not complete when its generation ends, or when it is invalidated, is abandoned."""
        driver = self.life.driver
        sound = driver.machine.sound
        if driver.generation == generation and (sound < 0 or number <= sound):
            self.life.site.disk.write(stage, number, state)

    def _invalidate(self, effect: do.Invalidate) -> None:
        self.life.site.checks.taint.invalidated(self.life.me, effect.sound)
        self.life.site.disk.invalidate(effect.sound)

    # ---- the end

    def _save_last(self, operation: do.SaveLast) -> None:
        """The job's leader waits until all parts are there, for as long as it may."""
        life = self.life
        if operation.save is not None:
            self._save(operation.save)
        if operation.plan.leader(0) == life.me.worker_id:
            life.later(_GRACE_NS, life.done, operation, "")
            self._saved(operation)
        else:
            life.soon(MS, 60 * MS, life.done, operation, "")

    def _saved(self, operation: do.SaveLast) -> None:
        life, disk = self.life, self.life.site.disk
        if len(disk.parts.get(operation.step, ())) < life.job.stages:
            life.during(operation, 5 * MS, self._saved)
            return
        life.site.checks.exact.saved(operation.step, disk.parts[operation.step])
        life.done(operation, "disk")

    def _finish(self, operation: do.Finish) -> None:
        if operation.save is not None and self.life.job.write_every:
            self._save(operation.save)
        self.life.during(operation, self.life.world.between(0, 3 * MS), self._finished)

    def _finished(self, operation: do.Finish) -> None:
        life = self.life
        leads = operation.plan.leader(0) == life.me.worker_id
        if leads:
            life.site.checks.exact.final(life.me, life.state.at, life.state.stages)
        life.done(operation, leads)
