"""The first process of a part that is not the head's, of a worker that spans hosts: it passes the head's commands on to
the limbs of its host, is one of them itself, and has the memory that they share."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from everstep.base.config import Config
from everstep.base.errors import CollectiveAborted, check
from everstep.parallel.cell_memory import CellMemory
from everstep.parallel.mapping import PAGE
from everstep.runtime.host.board import Board
from everstep.runtime.host.cell import MOST_BYTES, Head, Limb, command_in
from everstep.runtime.host.cell_doors import CellPlan, PartLines
from everstep.runtime.host.cell_search import CellSearch
from everstep.runtime.link.context import WorkerContext
from everstep.runtime.link.peer import PeerConnection
from everstep.runtime.process import RETURNS
from everstep.train.cell_limb import be_limb
from everstep.train.cell_stage import ATTACH
from everstep.train.task import Task

_LOOK_S = 0.02
_END_S = 10.0


def run_deputy(
    context: WorkerContext, plan: CellPlan, search: CellSearch, load: Callable[[Config], Task] | None
) -> int:
    """Serve until the head goes; returns the exit code: 0 once the job is over, else that of a life which begins again.
    load: as of `run_limb`."""
    deputy = Deputy(context, plan, search)
    try:
        be_limb(deputy, context, load)
    except CollectiveAborted:
        time.sleep(_END_S)  # the head has gone: who knows why ends this process
    finally:
        deputy.close()
    return 0 if search.over.wait(_END_S) else RETURNS


class Deputy(Limb):
    """Obeys the head, as any limb, and has the limbs of its host obey, too."""

    def __init__(self, context: WorkerContext, plan: CellPlan, search: CellSearch) -> None:
        self.row = Board.attach(context.board_fd).row(context.worker_id)
        self._context, self._plan, self._search = context, plan, search
        self._limbs = Head(context, self.row.tick)
        self._memories: dict[int, CellMemory] = {}

    def serve(self, act: Mapping[str, Callable[..., Any]]) -> None:
        """Carry out the head's commands, here and at the limbs, until the head lets go. Raises: CollectiveAborted if it
        has gone."""
        self.row.set(phase="idle")
        self._limbs.meet()
        head = self._commander()
        while head is not None and (data := self._next(head)):
            command = command_in(data)
            arguments = command.arguments
            if command.name == ATTACH:
                arguments = self._attached(**arguments)
            self.row.set(phase="reduce")  # from here a limb that stands still is noticed; one of an idle worker may
            self._limbs.begin(command.name, **arguments)
            said = [act[command.name](**arguments)]
            self.row.set(phase="reduce")  # the act has left it idle
            said += self._limbs.answers()
            self.row.set(phase="idle")
            head.send_bytes([msgspec.msgpack.encode(said)])

    def _commander(self) -> PeerConnection | None:
        while not self._search.ended:
            self.row.tick()
            found = self._search.door.commander(_LOOK_S)
            if found is not None:
                return found
        return None

    def _next(self, head: PeerConnection) -> bytes:
        while not head.readable(_LOOK_S):
            self.row.tick()
        self.row.tick()
        return bytes(head.recv_bytes(MOST_BYTES))

    def _attached(self, **told: Any) -> dict[str, Any]:
        """Make the memory for a stage, with the head's parameters if it has made them, before this host's processes
        attach to it."""
        stage, size, note, parts = told["stage"], told["size"], told["note"], told["parts"]
        name, doors, _ = parts
        check(name == self._plan.name and tuple(doors) == self._plan.doors, f"this is a part of {self._plan.name}")
        if stage in self._memories:
            self._memories.pop(stage).close()
        memory = self._memories[stage] = CellMemory.create(size, self._plan.part * self._plan.each)
        lines = PartLines(self._plan, stage, self._context.call_peer)
        wanted = [(PAGE, note), *([] if told["blank"] else [told["extent"]])]
        with memoryview(memory.memory) as whole:
            for offset, count in wanted:
                with whole[offset : offset + count] as into:
                    lines.read(0, offset, into)
                self.row.tick()
        lines.close()
        self._search.door.show(stage, memory)
        return {**told, "path": memory.path, "parts": [name, doors, self._plan.part]}

    def close(self) -> None:
        """Let go of the limbs, and of the others."""
        self._search.door.close()
        self._limbs.close()
        for memory in self._memories.values():
            memory.close()
