"""A limb's part in the passes of a model that is split into stages.

It meets the other ranks at the gate before each pass and at the point after it. What its lanes need of other workers is
in the memory that all share once the gate is open, and what they give goes there: the head sends it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import torch

from everstep.base.config import Config
from everstep.base.errors import check
from everstep.data.batch import to_device
from everstep.data.loader import LaneLoader
from everstep.exact.trees import Bundle
from everstep.order.ledger import use_digest
from everstep.protocol.step_types import LaneSaid
from everstep.runtime.host.board import Row
from everstep.runtime.host.cell_doors import PartLines
from everstep.train.cell_beside import take_beside
from everstep.train.cell_course import CellCourse, CellTurn
from everstep.train.cell_lanes import SharedLanes
from everstep.train.cell_stage import fill, spread
from everstep.train.cell_store import CAME, GOES, CellStore
from everstep.train.cell_update import CellUpdate
from everstep.train.elastic import AnyOrder
from everstep.train.part_pass import Lane
from everstep.train.replica import StageReplica
from everstep.train.stage_lanes import batch_digest


class StageAtLimb:
    """A limb's part of one stage."""

    def __init__(
        self, replica: StageReplica, store: CellStore, config: Config, lines: PartLines | None, *, made: bool
    ) -> None:
        """lines: to the other parts of a worker that spans hosts. made: its head has made the parameters, else all do
        so."""
        self.replica, self.store = replica, store
        optimizer = replica.parts.optimizer
        self.update = CellUpdate(optimizer, store, config.cell.ranks, replica.spec.tied)
        if lines is not None:
            spread(store, lines, self.update, replica, config, made=made)
        if not made:
            fill(replica, store, self.update, config)
        self.shared = SharedLanes(replica, config, store)

    def begin_lanes(self, step: int, scale: float, beside: Mapping[str, Any]) -> None:
        """The step's lanes begin. beside: what they may read beside tensors, at the head."""
        self.store.others.hold(beside["version"])
        self.replica.abandon()
        take_beside(self.replica, beside)
        self.store.take_buffers(self.replica.parts.model)
        self.replica.begin_lanes(step, scale)


class LimbPasses:
    """The passes of one command. held: the stages, by number."""

    def __init__(
        self,
        held: Mapping[int, StageAtLimb],
        loader: LaneLoader,
        order: AnyOrder,
        device: torch.device,
        config: Config,
        row: Row,
    ) -> None:
        self._held, self._loader, self._order, self._device, self._row = held, loader, order, device, row
        self._ranks, self._parts = range(config.cell.ranks), config.stages * config.chunks
        self._done: dict[int, list[int]] = {number: [] for number in held}
        self._said: list[tuple[int, int, LaneSaid]] = []

    def run(self, course: CellCourse) -> None:
        """Go through the passes until the head says that the next one is not made. Raises: PassBroken."""
        points = {int(number): point for number, point in course.points.items()}
        ends = {
            turn.repeats[seat] for turn in course.turns if (seat := self._seat(turn)) is not None and self._ends(turn)
        }
        self._loader.schedule(course.step, sorted(ends))
        for turn in course.turns:
            one = self._held[turn.stage]
            gate = points[turn.stage] + 1
            one.store.meet(gate, self._ranks)
            if not one.store.memory.go:
                return
            if turn.kind == "backward":
                one.shared.sums.round(turn.summed, gate)
            seat = self._seat(turn)
            if seat is not None:
                with one.shared.together():
                    self._pass(course.step, turn, seat)
                one.store.others.end_passes()
            points[turn.stage] = gate + one.shared.sums.points + 1
            one.store.meet(points[turn.stage], self._ranks)

    def answer(self) -> dict[str, Any]:
        """What the lanes gave, beside their sums."""
        stages = {}
        for number, one in self._held.items():
            lanes = one.replica.lanes
            reports = lanes.reports(self._done[number])
            said = zip(lanes.passes, lanes.buffer_reports(), strict=True)
            stages[str(number)] = {
                "reports": [[r.lane, r.loss, r.weight, r.count, r.use] for r in reports],
                "buffers": {str(part): report for part, report in said},
            }
        return {"stages": stages, "said": msgspec.to_builtins(self._said)}

    def _seat(self, turn: CellTurn) -> int | None:
        """This rank's seat, if it has a lane of the turn."""
        seat = self._held[turn.stage].shared.seat
        return seat if seat < len(turn.lanes) else None

    def _ends(self, turn: CellTurn) -> bool:
        """Whether the pass reads a batch."""
        return turn.kind == "forward" and turn.part in (0, self._parts - 1)

    def _pass(self, step: int, turn: CellTurn, seat: int) -> None:
        held = self._held[turn.stage]
        lanes, store, lane = held.replica.lanes, held.store, turn.lanes[seat]
        came = store.take_hop(seat, CAME) if turn.comes(self._parts) else None
        gave: Bundle | None = None
        if turn.kind == "forward":
            gave = self._forward(step, turn, seat, came)
        elif turn.kind == "recompute":
            self._row.set(phase="forward")
            lanes.recompute(step, turn.part, lane)
        else:
            self._row.set(phase="backward")
            gave = lanes.backward(step, turn.part, lane, came)
            said = lanes.said(turn.part)
            if said is not None:
                self._said.append((turn.repeats[seat], turn.part, said))
        if turn.goes(self._parts) and held.shared.rank == 0:
            check(gave is not None, f"{turn} gives something")
            store.put_hop(seat, GOES, gave)  # type: ignore[arg-type]

    def _forward(self, step: int, turn: CellTurn, seat: int, came: Bundle | None) -> Bundle | None:
        lanes, number, repeated = self._held[turn.stage].replica.lanes, turn.lanes[seat], turn.repeats[seat]
        batch, samples = None, tuple[tuple[int, int], ...]()
        if self._ends(turn):
            self._row.set(step=step - 1, phase="load")
            batch, samples = self._loader.batch(step, repeated)
            batch = to_device(batch, self._device)
        self._row.set(phase="forward")
        if turn.first and seat == 0:
            lanes.passes[turn.part].probe_next()
        said = LaneSaid(data="" if batch is None else batch_digest(batch)) if turn.told[seat] else None
        repeats = repeated if repeated != number else None
        lane = Lane(came, batch, len(samples) / self._order.micro_batch, turn.keep, repeats=repeats, said=said)
        given = lanes.forward(step, turn.part, number, lane, len(samples), use_digest(samples))
        if given is None and repeats is None:
            self._done[turn.stage].append(number)
        return given
