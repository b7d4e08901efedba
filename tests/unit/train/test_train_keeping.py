"""Snapshots in memory that another pool hands over: what is kept of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from checkpoint_saving import make_state
from everstep.base.config_keys import CheckpointConfig
from everstep.exact.state import ModelState
from everstep.protocol.driver.operations import ForgetKept, InMemory
from everstep.protocol.driver.records import encode
from everstep.protocol.step_types import Record
from everstep.train.keeping import SnapshotKeeper

RECORDS = {1: Record(0, b"of the step")}


class HandingOver:
    """The connection over which a snapshot comes. before_last: happens when all but its last block is there."""

    def __init__(self, state: ModelState, before_last: Any = lambda: None) -> None:
        self._state, self._before_last = state, before_last
        self._next = 0
        self.answers: list[Any] = []

    def recv_json(self) -> Any:
        return self._state.manifest()

    def recv_into(self, block: memoryview) -> None:
        self._next += 1
        if self._next == self._state.n_blocks:
            self._before_last()
        found = self._state.read_block(self._next - 1)
        block[: len(found)] = found

    def send_json(self, answer: Any) -> None:
        self.answers.append(answer)


def take(keeper: SnapshotKeeper, connection: HandingOver, step: int) -> None:
    request = {"kind": "keep", "stage": 1, "step": step, "records": encode(RECORDS).hex()}
    keeper.take(connection, request)  # type: ignore[arg-type]


def test_a_snapshot_that_comes_while_all_go_back_does_not_take_the_place_of_what_its_step_comes_to_then() -> None:
    notes: list[Any] = []
    view: Any = SimpleNamespace(config=SimpleNamespace(checkpoint=CheckpointConfig()))
    keeper, spoilt, right = SnapshotKeeper(view, notes.append), make_state(1), make_state(2)
    take(keeper, HandingOver(spoilt), 10)
    assert notes == [InMemory(((1, 10),), {10: RECORDS})]
    late = HandingOver(spoilt, lambda: keeper.forget(ForgetKept(10)))
    take(keeper, late, 20)
    assert late.answers == [{"kind": "kept"}] and len(notes) == 1 and not keeper.held(20)
    take(keeper, HandingOver(right), 20)
    assert keeper.held(20)[1][0].manifest() == right.manifest()
    keeper.close()
