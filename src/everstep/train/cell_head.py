"""The head of a cell: has its limbs take part in the lanes and in the update of each step.

The head drives, saves, heals and talks like any worker, since all of the state lies in its memory. What its limbs do is
two operations: they compute lanes (with cell.tp, several ranks the same one, each some of the model's shards), and they
update parts (`cell_stage`). Here are the lanes of a model that is not split, which the loop computes; those of stages
are `cell_passes`'. A generation that ends is noticed at the gate before each pass.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from everstep.base.config import Config
from everstep.placement.ranks import rounds
from everstep.protocol.driver.records import LaneReport
from everstep.protocol.step_types import LaneSaid
from everstep.runtime.host.cell import Head
from everstep.train.cell_stage import CellStage, raise_first
from everstep.train.replica import StageReplica

LANES = "lanes"


class CellHead:
    """The head's view of its cell, of a model that is not split."""

    def __init__(self, head: Head, replica: StageReplica, config: Config, tick: Callable[[], None]) -> None:
        """Waits for the limbs. Raises: ConfigError for what a cell cannot train."""
        self._head, self._replica, self._cell = head, replica, config.cell
        self._stage = CellStage(head, replica, config, tick)
        self._shared = self._stage.shared
        self._commands = 0
        self._finished: list[tuple[LaneReport, Any]] = []
        replica.loop.use(self._shared.sums)

    def own(self, lanes: Sequence[int]) -> Sequence[int]:
        """The lanes among these that the head itself computes."""
        return lanes[:: self._cell.fsdp]

    def passes(
        self, step: int, lanes: Sequence[int], told: Collection[int], over: Callable[[], bool], *, due: bool
    ) -> Iterator[int]:
        """Hand out the head's own lanes, in rounds in which each limb computes one, too. Once all are done, or `over`
        says so before a round, the sums are the replica's. told: lanes whose results other workers compare; due: a lane
        is to be computed twice.

        Raises: what the passes of a limb have raised.
        """
        stage, replica, sums, seats = self._stage, self._replica, self._shared.sums, self._cell.fsdp
        beside = stage.begin_lanes(step)
        scale = replica.lanes.scaler.scale
        note = stage.store.write_note(beside) if beside is not None else 0
        about = {"step": step, "lanes": list(lanes), "told": sorted(told), "scale": scale, "due": due, "note": note}
        self._commands += 1
        self._shared.restart(self._commands)
        self._head.begin(LANES, point=stage.point, command=self._commands, **about)
        sums.begin(lanes, fresh=note > 0)
        whole, done = False, len(lanes)
        try:
            for number, turn in enumerate(rounds(lanes, seats)):
                if not stage.gate(opens=not over()):
                    done = number * seats
                    break
                sums.round(turn, stage.point)
                with self._shared.together():
                    yield turn[0]
                stage.store.others.end_passes()
                stage.skip(sums.points)
            whole = True
        finally:
            if not whole:
                stage.leave()
        self._take(lanes[:done])

    def _take(self, lanes: Sequence[int]) -> None:
        """All ranks are through with these lanes."""
        loop = self._replica.loop
        for rank, answer in enumerate(raise_first(self._head.answers()), 1):
            note = self._stage.store.read_note(rank, answer["note"])
            reports = [LaneReport(*report) for report in note["reports"]]
            if rank % self._cell.tp:
                self._stage.compare(rank, reports)
                continue
            for report in reports:
                self._replica.lanes.note(report)
            loop.note_buffers(rank, note["buffers"])
            self._finished += [(report, note["said"].get(str(report.lane))) for report in reports]
        for node, row, flat in self._shared.sums.results():
            loop.take(node, row, flat)

    def gather_gradients(self) -> None:
        """Inside a pass: the lane's gradients, of which each rank has a part, are to be compared with others'."""
        self._shared.sums.gather()

    def took(self) -> list[tuple[LaneReport, LaneSaid | None]]:
        """Reports of the lanes that limbs have computed since the last call, and what is to be compared of them."""
        finished, self._finished = self._finished, []
        return [(report, None if said is None else LaneSaid(data=said[0], gave=said[1])) for report, said in finished]

    def close(self) -> None:
        self._stage.close()
