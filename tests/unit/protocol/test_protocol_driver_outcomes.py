"""What all conclude from the records of a step, whoever computed what."""

from __future__ import annotations

import struct
from itertools import chain
from typing import Any

from driver_harness import gather_records, plan, records_of

from everstep.base.cause import Cause
from everstep.base.extents import Runs
from everstep.protocol.driver.comparing import Comparing, Statements
from everstep.protocol.driver.records import (
    AgreePayload,
    LaneReport,
    StageSection,
    conclude,
    encode,
    gathered,
)
from everstep.protocol.step_types import Record


def record(
    losses: dict[int, float],
    owned: Runs = (),
    norms: tuple[float, ...] = (),
    ties: list[float] | None = None,
    settings: bytes = b"",
    **more: Any,
) -> Record:
    lanes = [LaneReport(lane, loss, 1.0, 2, 0) for lane, loss in losses.items()]
    packed = struct.pack(f"{len(norms)}d", *norms)
    section = StageSection(0, lanes, tuple(chain.from_iterable(owned)), packed, ties or [], [b"b"], "", {}, settings)
    return Record(0, encode(AgreePayload([section], **more)))


def test_the_loss_is_folded_by_lanes_and_not_by_workers() -> None:
    losses = {0: 1e16, 1: 1.0, 2: -1e16, 3: 1.0}
    assert sum(losses.values()) == 1.0
    alone = conclude(1, 4, {0: record(losses)})
    assert alone.loss == ((1e16 + 1.0) + (-1e16 + 1.0)) / 4 == 0.0
    shared = conclude(1, 4, {0: record({1: 1.0, 2: -1e16}), 1: record({0: 1e16, 3: 1.0})})
    assert shared.loss == alone.loss and shared.samples == 8
    assert shared.workers == {0: 1, 1: 0, 2: 0, 3: 1}


def test_what_is_kept_is_what_all_have_kept() -> None:
    assert conclude(9, 2, {0: record({0: 1.0}, kept=8), 1: record({1: 1.0}, kept=4)}).kept == 4


def test_tied_parameters_count_in_the_norm_once() -> None:
    one = record({0: 1.0}, ((0, 1),), (2.0,), ties=[3.0, 0.5])
    two = record({1: 1.0}, ((1, 2),), (4.0,), ties=[3.0, 0.5])
    assert conclude(1, 2, {0: one, 1: two}).sumsq == 9.5


def test_the_one_who_leads_says_what_is_saved_and_why() -> None:
    due = record({1: 1.0}, save=(("disk",), "every 5 steps"), save_cause=Cause.SCALED)
    outcome = conclude(5, 2, {0: record({0: 1.0}), 1: due})
    assert (outcome.save, outcome.save_cause) == ((("disk",), "every 5 steps"), Cause.SCALED)
    none = conclude(5, 1, {0: record({0: 1.0})})
    assert (none.save, none.save_cause) == (((), ""), Cause.UNKNOWN)


def test_states_are_compared_if_the_one_who_leads_says_so() -> None:
    for tiers, compares, ends in ((("compare",), True, False), (("disk",), False, False), (("end",), False, True)):
        outcome = conclude(5, 1, {0: record({0: 1.0}, save=(tiers, "why"), save_cause=Cause.SCALED)})
        assert (outcome.compares, outcome.ends) == (compares, ends)


def test_of_how_many_stages_records_are() -> None:
    for given in (plan(1, (0, 1)), plan(1, (0,), (1,)), plan(1, (2,), (0, 2), (1,))):
        assert len(conclude(1, 4, records_of(given)).buffers) == given.stages


def test_digests_and_buffers_are_sorted_by_stage_and_worker() -> None:
    outcome = conclude(2, 4, records_of(plan(1, (0, 1), (0,)), {0: {0: "a", 1: "b"}, 1: "c"}))
    assert outcome.digests == {0: {0: "a", 1: "c"}, 1: {0: "b"}}
    assert outcome.buffers == {0: ((b"",), (b"",)), 1: ((b"",),)}


def test_data_of_a_gather_by_worker() -> None:
    assert gathered(gather_records(plan(1, (0, 1)), w1=b"x")) == {0: b"", 1: b"x"}


def test_a_model_that_one_worker_has_set_otherwise_is_a_state_that_differs() -> None:
    """In the step in which it is, whether states are compared before it or not; old records say nothing of it."""
    alike, other = b"aaaabbbbccccddddeeee", b"aaaabbbbccccDDDDeeee"
    said = [alike, other, alike]
    records = {k: record({k: 1.0}, settings=settings) for k, settings in enumerate(said)}
    found = judged(3, records)
    assert found is not None and found.outvoted == {1} and not found.drift
    assert "how the script has set the model (hyperparameters) differs among the workers before step 7" in found.reason
    assert "(modes)" not in found.reason and "worker 1 (stage 0) deviates" in found.reason
    two = judged(2, {k: record({k: 1.0}, settings=said[k]) for k in range(2)})
    assert two is not None and not two.outvoted and "no copy is outvoted" in two.reason
    assert judged(2, {0: record({0: 1.0}, settings=alike), 1: record({1: 1.0})}) is None


def judged(n_lanes: int, records: dict[int, Record]) -> Any:
    return Comparing(0, 0).judge(Statements.before(conclude(7, n_lanes, records)))
