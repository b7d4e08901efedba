"""Lanes of a model that is split into stages, in workers of several processes: the head's side.

The processes of a worker go through its list of passes together, several lanes at a time. The head alone talks to other
workers. It receives what the lanes of a pass need, leaves it in the memory that all share, and only then opens the gate
before the pass: so nobody waits for another worker inside a pass. When a generation ends, the head leaves its wait, and
the gate stays shut: limbs wait at gates alone, so they are free at once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import msgspec

from everstep.base.config import Config
from everstep.base.errors import CollectiveAborted, check
from everstep.exact.buffers import BufferReport
from everstep.exact.trees import Bundle
from everstep.placement.probes import Trial
from everstep.placement.schedules import PipeOp
from everstep.protocol.driver.operations import Compute
from everstep.protocol.driver.records import LaneReport
from everstep.protocol.step_types import LaneSaid
from everstep.runtime.host.cell import Head
from everstep.train.cell_course import PASSES, CellCourse, CellTurn
from everstep.train.cell_stage import CellStage, raise_first
from everstep.train.cell_store import CAME, GOES
from everstep.train.replica import StageReplica
from everstep.train.step_lanes import Lanes, Passes
from everstep.train.view import WorkerView


class CellStages:
    """The head of a cell, and the stages that it holds."""

    def __init__(self, head: Head, config: Config, tick: Callable[[], None]) -> None:
        self._head, self._config, self._tick = head, config, tick
        self.seats, self.degree = config.cell.fsdp, config.cell.tp
        self._commands = 0
        self._stages: dict[int, CellStage] = {}

    def attach(self, replica: StageReplica) -> None:
        """A stage was built: limbs build it, too. Raises: ConfigError for what a cell cannot train."""
        number = replica.spec.stage
        self._let_go(self._stages.keys() - {number})
        stage = self._stages[number] = CellStage(self._head, replica, self._config, self._tick)
        replica.lanes.passes[number].share(stage.shared.sums)

    def begin(self, step: int, scale: float, turns: Sequence[CellTurn], held: Mapping[int, StageReplica]) -> None:
        """Have the limbs go through these passes, of the stages that are held."""
        self._let_go(held)
        self._commands += 1
        beside = {str(number): stage.begin_lanes(step) for number, stage in self._stages.items()}
        counted: dict[str, list[int]] = {}
        for number, stage in self._stages.items():
            backward = [turn for turn in turns if turn.stage == number and turn.kind == "backward"]
            lanes = sorted(lane for turn in backward for lane in turn.summed if lane is not None)
            counted[str(number)] = lanes
            stage.shared.restart(self._commands)
            stage.shared.sums.begin(lanes, fresh=beside[str(number)] is not None)
        points = {str(number): stage.point for number, stage in self._stages.items()}
        course = CellCourse(step, scale, tuple(turns), beside, points, counted)
        at = turns[0].stage
        note = self._stages[at].store.write_note(msgspec.to_builtins(course))
        self._head.begin(PASSES, stage=at, note=note, command=self._commands, held=sorted(self._stages))

    def of(self, turn: CellTurn) -> CellStage:
        return self._stages[turn.stage]

    def leave(self) -> None:
        for stage in self._stages.values():
            stage.leave()

    def take(self, turns: Sequence[CellTurn]) -> list[tuple[int, int, LaneSaid]]:
        """All ranks are through with these passes: the stages have their results. Returns what limbs say of lanes that
        others compute, too: (lane, part, digests)."""
        said: list[tuple[int, int, LaneSaid]] = []
        at = self._stages[turns[0].stage]
        for rank, answer in enumerate(raise_first(self._head.answers()), 1):
            note = at.store.read_note(rank, answer["note"])
            for number, found in note["stages"].items():
                stage = self._stages[int(number)]
                lanes = stage.replica.lanes
                reports = [LaneReport(*report) for report in found["reports"]]
                if rank % self.degree:
                    stage.compare(rank, reports)
                    continue
                for report in reports:
                    lanes.note(report)
                for part, report in found["buffers"].items():
                    lanes.passes[int(part)].guard.note_elsewhere(rank, BufferReport.decode(report))
            if not rank % self.degree:
                said += [(lane, part, LaneSaid(*one)) for lane, part, one in note["said"]]
        for stage in self._stages.values():
            for node, row, flat in stage.shared.sums.results():
                stage.replica.lanes.passes[stage.number].accumulator.take(node, row, flat)
        return said

    def _let_go(self, held: Collection[int]) -> None:
        for number in set(self._stages).difference(held):
            self._stages.pop(number).close()

    def close(self) -> None:
        self._let_go(())


class CellPasses(Passes):
    """The passes of a step's lanes through this worker, of which each limb computes its own lanes."""

    def __init__(
        self,
        lanes: Lanes,
        view: WorkerView,
        operation: Compute,
        full: Sequence[int],
        trials: Sequence[Trial],
        cell: CellStages,
    ) -> None:
        """Arguments as of `Passes`."""
        super().__init__(lanes, view, operation, full, trials, at_once=cell.seats)
        self._cell = cell
        self._done = 0
        self._fault: CollectiveAborted | None = None
        self._inside = False
        self._course = self._turned()

    def _turned(self) -> list[CellTurn]:
        found: list[CellTurn] = []
        probed: set[int] = set()
        for k, op in enumerate(self._ops):
            turn, lanes = tuple(self._turn(op)), self._view.stages[op.stage].lanes
            missing = lanes.missing
            counted = tuple(lane not in self._repeated and lane in missing for lane in turn)
            first = op.kind == "forward" and counted[0] and op.part not in probed and lanes.passes[op.part].will_probe()
            if first:
                probed.add(op.part)
            repeats = tuple(self._repeated.get(lane, lane) for lane in turn)
            told = tuple(lane in self._is_told for lane in repeats)
            found.append(CellTurn(op.kind, op.part, op.stage, self._keeps(k), turn, repeats, told, counted, first))
        return found

    def run(self) -> None:
        """Do all passes. Raises: as of `Passes`; what a limb has raised."""
        if not self._course:
            return
        cell, scale = self._cell, self._view.stages.any.lanes.scaler.scale
        for replica in self._view.stages.values():
            replica.lanes.drop()
        cell.begin(self._step, scale, self._course, self._view.stages)
        whole = False
        try:
            try:
                super().run()
            except CollectiveAborted as fault:
                self._fault = self._fault or fault
            if self._done < len(self._course):
                cell.of(self._course[self._done]).gate(opens=False)
            whole = True
        finally:
            if not whole:
                cell.leave()
        self._end()
        if self._fault is not None:
            raise self._fault

    def _end(self) -> None:
        """All ranks have done as many passes as this one: their results count."""
        view, lanes = self._view, self._lanes
        for lane, part, said in self._cell.take(self._course):
            lanes.note(self._step, lane, part, said)
        for turn in self._course[: self._done]:
            if turn.kind == "backward":
                for lane in turn.lanes[1:]:
                    if lane not in self._repeated:
                        self._finish(turn.stage, lane)
        view.tick()

    # ---- one pass: all of it lies between the gate and the point after it

    def _perform(self, op: PipeOp, *, keep: bool) -> None:
        turn = self._course[self._done]
        stage = self._cell.of(turn)
        with stage.shared.together():
            try:
                super()._perform(op, keep=keep)
            except CollectiveAborted as fault:  # before the pass, or as its result was sent
                if not self._inside:
                    raise
                self._fault = fault
        self._inside = False
        stage.store.others.end_passes()
        stage.skip(stage.shared.sums.points)
        stage.meet()
        self._done += 1
        if turn.goes(self._parts):
            for seat, lane in enumerate(turn.lanes[1:], 1):
                self._give(op._replace(lane=lane), stage.store.take_hop(seat, GOES))
        if self._fault is not None:
            raise self._fault

    def _take(self, op: PipeOp) -> Bundle | None:
        turn = self._course[self._done]
        stage, own = self._cell.of(turn), None
        if turn.comes(self._parts):
            for seat, lane in enumerate(turn.lanes):
                came = super()._take(op._replace(lane=lane))
                if seat or self._cell.degree > 1:
                    check(came is not None, f"{turn} needs something")
                    stage.store.put_hop(seat, CAME, came)  # type: ignore[arg-type]
                own = came if seat == 0 else own
        stage.gate(opens=True)
        self._inside = True
        if turn.kind == "backward":
            stage.shared.sums.round(turn.summed, stage.point)
        return own

    def _expect(self, ops: Sequence[PipeOp]) -> None:
        super()._expect([op._replace(lane=lane) for op in ops for lane in self._turn(op)])
