"""One worker in the simulation, put together: on an abstract state it carries out what the driver of production says.

Who carries out what is said by each part's `handlers`.
"""

from __future__ import annotations

from typing import get_args

from everstep.base.extents import Extents
from everstep.protocol.driver import operations as do
from everstep.protocol.driver.driver import Driver
from everstep.protocol.step_types import BlocksLost
from everstep.sim.client import FindServer
from everstep.sim.copying import SimDonor
from everstep.sim.fetching import Fetcher
from everstep.sim.following import Follower
from everstep.sim.keep import Memory
from everstep.sim.lanes import SimLanes
from everstep.sim.life import UNINTERRUPTED, Exited, Life, SimSite
from everstep.sim.loop import Loop
from everstep.sim.membership import Decisions, SimMembership
from everstep.sim.mesh import Mesh
from everstep.sim.reduction import Reduction
from everstep.sim.saving import SimSaver
from everstep.sim.taking import KNOWN as COPIES
from everstep.sim.ties import Ties
from everstep.sim.world import MS, SimConnection

KNOWN = (
    *(("operations", f"{kind.__name__} done") for kind in do.Operation.__subclasses__()),
    *(("effects", kind.__name__) for kind in get_args(do.Effect) if kind is not do.Operation),
    *COPIES,
)
"""What a driver may say, as `World.seen` counts it."""


class SimWorker:
    """One life of one slot, and what it needs of the world."""

    def __init__(self, site: SimSite, host: str, server: FindServer, driver: Driver, exited: Exited) -> None:
        life = self.life = Life(site, host, driver, exited)
        mesh = Mesh(life)
        lanes, memory = SimLanes(life, mesh), Memory(life, mesh)
        donor, fetcher, follower = SimDonor(life, memory), Fetcher(life, memory), Follower(life)
        reduction = Reduction(life, mesh, lanes)
        self.ties = Ties(life, server, mesh)
        self.loop = Loop(life, lanes)
        both = SimMembership(life, mesh, lanes, reduction), Decisions(life, self.ties, mesh, donor, follower)
        parts = (mesh, lanes, memory, donor, fetcher, follower, reduction, SimSaver(life), self.ties, self.loop, *both)
        for part in parts:
            life.install(part.handlers())
        self._memory, self._donor = memory, donor
        self._users = (self.ties, mesh, donor, fetcher, follower)
        life.world.log(life.name, "STARTED", f"pid {life.pid} on {life.host}")
        life.later(life.world.between(5 * MS, 40 * MS), self.ties.connect, self.loop.begin)

    @property
    def can_flip(self) -> bool:
        """Whether it is a member between two updates."""
        return self.life.driver.machine.settled and not isinstance(self.life.operation, UNINTERRUPTED)

    @property
    def holdings(self) -> list[tuple[int, int]]:
        """(stage, step) of the whole snapshots in its memory."""
        return sorted(key for key, value in self._memory.kept.items() if None not in value)

    def lose(self, stage: int, lost: Extents) -> None:
        """Blocks of a stage's state are gone, and it has noticed."""
        life = self.life
        life.state.lose(stage, lost)
        self._donor.lose(stage, lost)
        life.handle(BlocksLost(stage, lost))

    def lose_kept(self, stage: int, step: int, lost: Extents) -> None:
        """Blocks of a snapshot are gone, and it has noticed."""
        self._memory.lose(stage, step, lost)

    def uses(self, connection: SimConnection) -> bool:
        """Whether something may still be sent or expected here."""
        return any(part.uses(connection) for part in self._users)
