"""The head of a cell: has its limbs take part in the lanes and in the update of each step.

The head drives, saves, heals and talks like any worker, since all of the state lies in its memory. What its limbs do is
two operations: they compute lanes (with cell.tp, several ranks the same one, each some of the model's shards), and they
update parts. The parameters and the optimizer's state are the same memory for all of them; the head tells the rest that
changes from step to step (`cell_beside`). A generation that ends is noticed at the gate before each pass.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from everstep.base import errors
from everstep.base.config import Config
from everstep.base.errors import ConfigError, DeterminismError, EverstepError, TaskError
from everstep.base.ports import Piece, Reduced
from everstep.exact.extra_state import has_extra_state
from everstep.exact.pieces import Ranges
from everstep.parallel.cell_memory import CellMemory, PassBroken
from everstep.placement.ranks import rounds
from everstep.protocol.driver.records import LaneReport
from everstep.protocol.step_types import LaneSaid
from everstep.runtime.host.cell import Head
from everstep.train.cell_beside import beside_lanes, groups_of
from everstep.train.cell_lanes import SharedLanes, places_of
from everstep.train.cell_store import CellStore
from everstep.train.cell_update import CellUpdate
from everstep.train.optimizer_update import refuse_in_cell
from everstep.train.replica import StageReplica

ATTACH, LANES, UPDATE, ADOPT = "attach", "lanes", "update", "adopt"


class CellHead:
    """The head's view of its cell. count: called with the samples that limbs have trained on."""

    def __init__(self, head: Head, replica: StageReplica, config: Config, tick: Callable[[], None]) -> None:
        """Waits for the limbs, and moves the model to where they find it.

        Raises: ConfigError for what a cell cannot train.
        """
        parts = replica.parts
        refuse_in_cell(parts.optimizer, config.seed)
        _refuse_model(parts.model)
        self._head, self._replica, self._cell = head, replica, config.cell
        self._ranks, self._seats = config.cell.ranks, config.cell.fsdp
        places = places_of(replica, config)
        self._store = CellStore(CellMemory.create(places.size), places, tick, self._look)
        self._store.move_in(parts.model)
        self._update = CellUpdate(parts.optimizer, self._store, self._ranks)
        self._shared = SharedLanes(replica, config, self._store)
        self._sums = self._shared.sums
        self._point = self._commands = 0
        self._finished: list[tuple[LaneReport, Any]] = []
        self._told: tuple[int, int] | None = None
        _raise_first(head.command(ATTACH, path=self._store.memory.path, size=places.size, likeness=places.likeness))
        replica.loop.use(self._sums)
        replica.share_updates(self)

    # ---- lanes

    def own(self, lanes: Sequence[int]) -> Sequence[int]:
        """Those of these lanes that the head itself computes."""
        return lanes[:: self._seats]

    def passes(
        self, step: int, lanes: Sequence[int], told: Collection[int], over: Callable[[], bool], *, due: bool
    ) -> Iterator[int]:
        """Hand out the head's own lanes, in rounds in which each limb computes one, too. Once all are done, or `over`
        says so before a round, the sums are the replica's. told: lanes whose results other workers compare; due: a lane
        is to be computed twice.

        Raises: what the passes of a limb have raised.
        """
        memory, replica, sums = self._store.memory, self._replica, self._sums
        key = step, replica.lanes.discarded
        fresh, self._told = key != self._told, key
        memory.mend()
        if fresh:
            replica.lanes.settle_buffers()  # another worker's lane may have been computed on trial
            self._store.give_buffers(replica.parts.model)
        scale = replica.loop.loss_scale
        note = self._store.write_note(beside_lanes(replica)) if fresh else 0
        about = {"step": step, "lanes": list(lanes), "told": sorted(told), "scale": scale, "due": due, "note": note}
        self._commands += 1
        self._shared.restart(self._commands)
        self._head.begin(LANES, point=self._point, command=self._commands, **about)
        sums.begin(lanes, fresh=fresh)
        whole, done = False, len(lanes)
        try:
            for number, turn in enumerate(rounds(lanes, self._seats)):
                memory.open_gate(not over())
                self._point += 1
                self._store.meet(self._point, range(self._ranks))
                if not memory.go:
                    done = number * self._seats
                    break
                sums.round(turn, self._point)
                with self._shared.together():
                    yield turn[0]
                self._point += sums.points
            whole = True
        finally:
            if not whole:  # the loop has raised, or a limb has
                sums.leave()
                memory.break_pass()
                self._point += sums.points
                self._told = None
        self._take(lanes[:done])

    def _take(self, lanes: Sequence[int]) -> None:
        """All ranks are through with these lanes."""
        loop = self._replica.loop
        for rank, answer in enumerate(_raise_first(self._head.answers()), 1):
            note = self._store.read_note(rank, answer["note"])
            reports = [LaneReport(*report) for report in note["reports"]]
            if rank % self._cell.tp:
                self._compare(rank, reports)
                continue
            for report in reports:
                self._replica.lanes.note(report)
            loop.note_buffers(rank, note["buffers"])
            self._finished += [(report, note["said"].get(str(report.lane))) for report in reports]
        for node, row, flat in self._sums.results():
            loop.take(node, row, flat)

    def _compare(self, rank: int, reports: Sequence[LaneReport]) -> None:
        """A rank has computed these lanes together with the first one of its seat. Raises: DeterminismError."""
        mine = {report.lane: report for report in self._replica.lanes.reports([report.lane for report in reports])}
        for report in reports:
            theirs = mine[report.lane].loss
            if report.loss.hex() != theirs.hex():
                raise DeterminismError(
                    f"cell.tp: rank {rank} of this worker has a loss of {report.loss!r} in lane {report.lane}, and the "
                    f"rank that computed it, too, has {theirs!r}: the loss depends on the process, or memory is damaged"
                )

    def gather_gradients(self) -> None:
        """Inside a pass: the lane's gradients, of which each rank has a part, are to be compared with others'."""
        self._shared.gather_gradients()

    def took(self) -> list[tuple[LaneReport, LaneSaid | None]]:
        """Reports of the lanes that limbs have computed since the last call, and what is to be compared of them."""
        finished, self._finished = self._finished, []
        return [(report, None if said is None else LaneSaid(data=said[0], gave=said[1])) for report, said in finished]

    def _look(self) -> None:
        """A limb has left the pass: raise what it has raised."""
        _raise_first(self._head.answers())

    # ---- updates

    def begin_update(self, step: int, factor: float, reduced: Reduced) -> Ranges:
        """Have the limbs update their parts with this gradient, times `factor`; returns the head's part."""
        gradient = self._store.slot(0)
        with torch.no_grad():
            for piece in reduced.pieces:
                gradient[piece.start : piece.stop].copy_(piece.data)
        update = self._update
        note = {
            "presence": reduced.presence,
            "groups": groups_of(self._replica.parts.optimizer),
            "kept": update.describe(),
        }
        self._head.begin(UPDATE, step=step, factor=factor, note=self._store.write_note(note))
        return update.pieces

    def end_update(self) -> None:
        """Wait until all parts are updated. Raises: what an update of a limb has raised."""
        _raise_first(self._head.answers())
        kept = self._update.new()
        if kept is not None:
            _raise_first(self._head.command(ADOPT, note=self._store.write_note(kept)))

    def close(self) -> None:
        """Let go of the memory."""
        self._store.close()


def limb_gradient(store: CellStore, step: int, presence: bytes, numel: int) -> Reduced:
    """The gradient that the head has left for an update."""
    return Reduced(step, (Piece(0, numel, store.slot(0)),), presence, ())


def _raise_first(answers: list[Any]) -> list[Any]:
    """The answers. Raises: what a limb has raised, under its own name where that is one of ours."""
    failed = [answer["error"] for answer in answers if "error" in answer]
    for name, text in sorted(failed, key=lambda one: one[0] == PassBroken.__name__):
        kind = getattr(errors, name, TaskError)
        raise kind(text) if isinstance(kind, type) and issubclass(kind, EverstepError) else TaskError(text)
    return answers


def _refuse_model(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if has_extra_state(module):
            raise ConfigError(
                "cell.fsdp: expected modules whose state is parameters and buffers, got extra state in "
                f"{name or 'the model'} ({type(module).__name__}): set cell.fsdp=1"
            )
