"""What a simulated job could go back to: snapshots in the workers' memories.

What is taken, stated and let go is the driver's to say.
"""

from __future__ import annotations

from collections.abc import Mapping

from everstep.base.cause import Cause, Why
from everstep.base.extents import Extents
from everstep.protocol.driver import operations as do
from everstep.sim.life import Life, SimHandlers, nothing
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
        mesh.on("snapshot", self._take)

    def handlers(self) -> SimHandlers:
        """What it carries out."""
        return {do.Keep: self._keep, do.RetireKept: self._retire, do.ForgetKept: self._forget, do.DropLanes: nothing}

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
            life.later(life.world.between(MS, 40 * MS), life.handle, do.HandedOver(number, done))

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
