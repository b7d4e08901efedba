"""How the first process of a part finds the other parts of its worker, on other hosts: the coordinator knows all."""

from __future__ import annotations

import threading
from collections.abc import Callable

from everstep.base.config import Config
from everstep.base.plan import WorkerKey
from everstep.protocol import messages as wire
from everstep.protocol.messages_base import CellFormed, CellPart, CellSought
from everstep.runtime.host.cell_doors import CellDoor, CellPlan
from everstep.runtime.link.context import WorkerContext
from everstep.runtime.link.control_client import ControlClient

_LOOK_S = 0.02


class CellSearch:
    """Looks for the others, and goes on telling the coordinator which it has found. over: the job has ended; dismissed:
    this life is not wanted any more."""

    def __init__(self, context: WorkerContext, config: Config) -> None:
        self.door = CellDoor(context.address or config.network.address, context.peer_token_bytes(), context.tls_shown())
        self.over, self.dismissed = threading.Event(), threading.Event()
        self._me, self._each = context.key, config.cell.ranks // config.cell.hosts
        self._cell: list[CellPart] = []
        self._client = ControlClient(
            context.coordinator_file,
            context.token_bytes(),
            "worker",
            str(context.key),
            hello=self._said,
            on_message=self._heard,
            tls=context.tls_shown(),
        )

    def find(self, tick: Callable[[], None]) -> CellPlan | None:
        """Wait for the others; None if there are to be none any more. tick: called every few milliseconds."""
        while not self._cell and not self.ended:
            tick()
            self.over.wait(_LOOK_S)
        if not self._cell:
            return None
        keys = [part.key for part in self._cell]
        self.door.belong(str(keys[0]))
        doors = tuple(part.address for part in self._cell)
        return CellPlan(str(keys[0]), keys.index(self._me), doors, self._each)

    @property
    def ended(self) -> bool:
        return self.over.is_set() or self.dismissed.is_set()

    def leave(self) -> None:
        self._client.close()

    def _said(self) -> wire.AnyMessage:
        me: WorkerKey = self._me
        return CellSought(
            worker_id=me.worker_id, incarnation=me.incarnation, address=self.door.address, cell=self._cell
        )

    def _heard(self, message: wire.AnyMessage) -> None:
        if isinstance(message, CellFormed) and self._me in [part.key for part in message.cell]:
            self._cell = self._cell or message.cell
        elif isinstance(message, wire.JobEnded):
            self.over.set()
        elif isinstance(message, wire.Dismissed):
            self.dismissed.set()
