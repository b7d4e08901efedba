"""A simulated worker that spans hosts: each life of a slot looks for others, the first of those that find each other is
the worker, and when one ends, all end. What their processes exchange inside a step is not simulated."""

from __future__ import annotations

from collections.abc import Callable

from everstep.base.cause import Cause
from everstep.base.plan import WorkerKey
from everstep.protocol import messages as wire
from everstep.protocol.messages_base import CellFormed, CellPart, CellSought
from everstep.sim.life import Life
from everstep.sim.mesh import Dial, SimControlClient
from everstep.sim.promises import require
from everstep.sim.world import MS, SimConnection

SEEN, ANEW = ("cells", "formed"), ("cells", "formed anew")


class SpanningPart:
    """One life's part in a worker."""

    def __init__(self, life: Life, dial: Dial, begin: Callable[[], None]) -> None:
        """begin: has this life be the worker."""
        self._life, self._begin = life, begin
        self._cell: list[CellPart] = []
        self.client = SimControlClient(life, dial, f"worker {life.me}", self._said, self._heard, lambda: None)

    @property
    def stands(self) -> WorkerKey:
        """The life among the worker's parts that stands still; this one, if there is none."""
        lives = self._life.site.lives
        return next((part.key for part in self._cell if lives[part.key].frozen_ns is not None), self._life.me)

    def uses(self, connection: SimConnection) -> bool:
        """Whether the connection may still carry something for this."""
        return self.client.connection is connection

    def _said(self) -> list[wire.AnyMessage]:
        me, address = self._life.me, f"{self._life.host}:1"
        return [CellSought(worker_id=me.worker_id, incarnation=me.incarnation, address=address, cell=self._cell)]

    def _heard(self, message: wire.AnyMessage) -> None:
        life = self._life
        if isinstance(message, CellFormed) and not self._cell and life.me in (part.key for part in message.cell):
            self._cell = message.cell
            hosts = [life.site.lives[part.key].host for part in self._cell]
            require(len({*hosts}) == len(hosts), "P3", f"{life.me} has two parts on a host: {hosts}")
            life.site.world.seen[SEEN] += 1
            life.site.world.seen[ANEW] += any(part.key.incarnation for part in self._cell)
            life.later(0, self._watch, [part.key for part in self._cell])
            if self._cell[0].key == life.me:
                self.client.close()
                self._begin()
        elif isinstance(message, wire.JobEnded):
            life.end(Cause.EXITED, "the job is over", restart=False, in_order=True)
        elif isinstance(message, wire.Dismissed):
            life.end(Cause.EXITED, message.reason)

    def _watch(self, others: list[WorkerKey]) -> None:
        """End soon after one of the others, or after the network between them is cut."""
        life, world = self._life, self._life.world
        there = (life.site.lives[key] for key in others)
        if all(one.alive and world.reachable(life.host, one.host) for one in there):
            life.later(10 * MS, self._watch, others)
        else:
            life.soon(MS, 500 * MS, life.end, Cause.EXITED, "a part of its worker has gone")
