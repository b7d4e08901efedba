"""One simulated worker as a member: generations that begin and end, decisions, and what follows from them."""

from __future__ import annotations

from typing import Any

from everstep.protocol.driver import operations as do
from everstep.protocol.step_types import Key, Release
from everstep.sim.copying import SimDonor
from everstep.sim.following import Follower
from everstep.sim.lanes import SimLanes
from everstep.sim.life import Life, SimHandlers
from everstep.sim.mesh import Mesh
from everstep.sim.promise import freed
from everstep.sim.reduction import Reduction
from everstep.sim.ties import Ties
from everstep.sim.world import MS


class SimMembership:
    """What concerns several parts."""

    def __init__(self, life: Life, mesh: Mesh, lanes: SimLanes, reduction: Reduction) -> None:
        self.life = life
        self.mesh = mesh
        self.lanes = lanes
        self.reduction = reduction

    def handlers(self) -> SimHandlers:
        """What it carries out."""
        return {do.Open: self._open}

    def _open(self, operation: do.Open) -> None:
        self.life.state.build()
        self.reduction.clear()
        self.mesh.open(operation, self._opened)

    def _opened(self, operation: do.Open) -> None:
        """All members have been reached."""
        if self.life.operation is operation:
            lost = self.lanes.open(operation.plan, operation.step)
            disk = self.life.site.disk.newest(self.life.host, operation.limit) if operation.disk else ()
            self.life.done(operation, do.Opened(lost, disk))


class Decisions:
    """What is decided, and what leaves the worker for it."""

    def __init__(self, life: Life, ties: Ties, mesh: Mesh, donor: SimDonor, follower: Follower) -> None:
        self.life = life
        self.ties = ties
        self.mesh = mesh
        self.donor = donor
        self.follower = follower

    def handlers(self) -> SimHandlers:
        """What it carries out."""
        return {
            do.Cut: self._cut,
            do.Decided: self._decided,
            do.EnteredPlan: self._entered,
            do.Update: self._update,
            Release: self._release,
        }

    def _cut(self, effect: do.Cut) -> None:
        self.life.cut(effect.generation)
        self.mesh.leave(effect.generation)
        self.donor.cut(effect.generation)

    def _decided(self, effect: do.Decided) -> None:
        """With records of this generation's exchange, or with some that were handed over."""
        life, made = self.life, self.life.finished
        own = isinstance(made, do.Exchange) and Key(made.tag.step, made.tag.seq) == effect.key
        machine = life.driver.machine
        if machine.position != effect.key:
            raise AssertionError(f"{life.me} decided {effect.key} and is at {machine.position}")
        freed(life.me, "its shelf, beyond a decision", self.donor.shelf)
        generation = made.generation if own and made is not None else effect.generation
        life.site.checks.decision(generation, effect.key, machine.records, not own)

    def _entered(self, effect: do.EnteredPlan) -> None:
        life = self.life
        held = life.state.stages if life.state.at == effect.step else {}
        life.site.checks.entered(life.me, effect.plan.generation, effect.step, held)
        freed(life.me, "feeds, as a member", self.follower.feeds)

    def _update(self, operation: do.Update) -> None:
        life = self.life
        life.site.checks.taint.applies(life.me, operation.step, operation.records)
        gradients = life.state.gradient(operation.step)
        gradients = {k: gradients[k] for k in operation.stages}
        self.donor.feed(operation.step, operation.records, gradients)
        slow = life.world.rng.random() < 0.15  # long enough for plans to come in the middle
        took = life.world.between(MS // 2, 25 * MS if slow else 3 * MS)
        life.later(took, self._updated, operation, gradients)

    def _updated(self, operation: do.Update, gradients: dict[int, Any]) -> None:
        self.life.state.apply(operation.step, operation.records, gradients)
        self.life.done(operation, self.life.world.now_ns)

    def _release(self, effect: Release) -> None:
        driver = self.life.driver
        position, machine = driver.position, driver.machine
        if machine.sound >= 0 and effect.step == position.step:  # the decision that shows it was not carried out
            position = Key(effect.step + 1, 0)
        self.life.state.release(effect.step, position)
        if driver.plan is not None and driver.plan.leader(0) == self.life.me.worker_id:
            self.ties.tell(driver.progress(effect.step, 10.0))
