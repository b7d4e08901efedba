"""Members that divide the optimizer's state: promises hold, and mistakes about whose parts are where are noticed."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from everstep.base.plan import Plan
from everstep.protocol.driver import operations as do
from everstep.protocol.driver.operation_ends import OperationEnds
from everstep.protocol.step_types import Holds
from everstep.sim import computing, life, sim_worker
from everstep.sim.computing import SimLanes, Spreading
from everstep.sim.faults import SimFault
from everstep.sim.model import Blocks, SimJob
from everstep.sim.scenario import simulate
from everstep.sim.setups import Setup
from sampling import seeds

SEEDS = seeds(60)
TELLING = range(12)


def test_the_promises_hold_and_parameters_are_given() -> None:
    seen: Counter[tuple[str, str]] = Counter()
    for seed in SEEDS:
        outcome = simulate(seed, sharded=True)
        assert outcome.ok, f"{outcome}\nreplay: everstep sim --seed {seed} --sharded --trace"
        seen.update(outcome.seen)
    assert seen["faults", "kill"] and seen["faults", "holder"] > len(SEEDS) // 3, seen


class OfAnyStep(Spreading):
    """Parts of the step before count."""

    def _on_block(self, step: int, stage: int, block: int, given: Blocks) -> None:
        super()._on_block(step, stage, block, given)
        self._came[step + 1, stage, block] = given


def test_parts_of_another_step_that_count_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sim_worker, "Spreading", OfAnyStep)
    assert not all(simulate(seed, sharded=True).ok for seed in TELLING)


class Kept(SimLanes):
    """Sums whose memory was given back are offered as they are now: zeros."""

    def open(self, plan: Plan, step: int) -> tuple[tuple[int, int], ...]:
        before = {stage: dict(sums) for stage, sums in self.held.get(step, {}).items()}
        super().open(plan, step)
        for stage, sums in before.items():
            gone = sums.keys() - self.held[step][stage].keys()
            self.held[step][stage] |= {node: tuple(tuple(0 for _ in block) for block in sums[node]) for node in gone}
        return ()


def test_sums_that_were_given_back_and_are_offered_again_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sim_worker, "SimLanes", Kept)
    assert not all(simulate(seed, sharded=True).ok for seed in TELLING)


def test_a_holder_that_skips_its_part_of_an_update_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    made = life.SimState.apply

    def apply(state: life.SimState, outcome: Any, records: Any, gradients: Any, takes: Any = ()) -> None:
        before = state.stages
        made(state, outcome, records, gradients, takes or {})
        if state.me.worker_id == 1 and takes:
            state.stages = {
                stage: tuple(old if new is not None else None for old, new in zip(before[stage], blocks, strict=True))
                for stage, blocks in state.stages.items()
            }

    monkeypatch.setattr(life.SimState, "apply", apply)
    assert not all(simulate(seed, sharded=True).ok for seed in TELLING)


def test_what_a_reduction_took_in_an_older_plan_says_nothing_of_the_next() -> None:
    """A worker that has left a stage is not to update what it still has of it."""
    faults = (
        SimFault(kind="scale", at_ms=43, for_ms=1388),
        SimFault(kind="pool", at_ms=95, phase="updating", for_ms=40),
        SimFault(kind="save", at_ms=103, for_ms=2359),
        SimFault(kind="pool", at_ms=468, for_ms=1),
    )
    job = SimJob(steps=4, lanes=3, gather_every=2, stages=3, keep_every=3, write_every=3, copies=1)
    setup = Setup(workers=6, spares=0, hosts=3, min_workers=1, on_failure="shrink", job=job, faults=faults)
    outcome = simulate(5004375, setup=setup)
    assert outcome.ok, outcome


def test_a_newcomer_that_takes_nothing_of_a_step_does_not_have_its_stage() -> None:
    """It has the state of the step before as its standby, and no gradient."""
    faults = (
        SimFault(kind="host", at_ms=8, phase="settling", pick=39, for_ms=122),
        SimFault(kind="fork_server", at_ms=167, phase="fetching", pick=75, for_ms=540),
        SimFault(kind="last_words", at_ms=194, phase="settling", for_ms=3134, same=True),
        SimFault(kind="drop_control", at_ms=243, pick=85, for_ms=201),
    )
    job = SimJob(steps=5, lanes=3, gather_every=4, stages=3, keep_every=2, write_every=3, copies=1)
    setup = Setup(workers=6, spares=1, hosts=2, min_workers=1, on_failure="replace", job=job, faults=faults)
    outcome = simulate(5001345, setup=setup)
    assert outcome.ok, outcome


def test_a_block_of_the_gradient_that_a_holder_does_not_get_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    made = computing.takers

    def fewer(plan: Plan, stage: int, step: int, early: bool) -> Any:
        found = made(plan, stage, step, early)
        most = max(found, key=lambda i: sum(hi - lo for lo, hi in found[i]))
        others = {block for i, runs in found.items() if i != most for run in runs for block in range(*run)}
        return {i: tuple(run for run in runs if i != most or run[0] not in others) for i, runs in found.items()}

    monkeypatch.setattr(computing, "takers", fewer)
    assert not all(simulate(seed, sharded=True).ok for seed in TELLING)


LATE = Setup(
    workers=4,
    spares=0,
    hosts=2,
    min_workers=1,
    on_failure="replace",
    job=SimJob(steps=6, lanes=4, write_every=1, copies=1, late=(3, -1)),
    faults=(),
)
"""In step 3 a part of the optimizer's state comes, which moves segments."""


def test_state_that_comes_late_moves_segments() -> None:
    outcome = simulate(1, setup=LATE)
    assert outcome.ok, outcome
    assert "Fetch done" in {name for (_, name), n in outcome.seen.items() if n}, "members get their new segments"


def test_a_job_is_resumed_where_the_state_of_one_stage_has_yet_to_come() -> None:
    job = SimJob(7, 4, stages=3, write_every=1, copies=3, late=(7, 1))
    outcome = simulate(1, setup=Setup(3, 0, 1, 1, "replace", job, (SimFault("launcher", 481, for_ms=139),)))
    assert outcome.ok, outcome


def test_blocks_that_nobody_needs_are_lost_after_a_record() -> None:
    """A member that holds no segment of the optimizer's state has contributed, and loses what it does not update."""
    one = Setup(5, 0, 2, 1, "replace", SimJob(10, 5, copies=3), (SimFault("lose", 353, "agreeing", pick=78),))
    failed = [str(outcome) for outcome in (simulate(seed, setup=one) for seed in range(20)) if not outcome.ok]
    assert not failed, failed[0]


def test_a_member_that_follows_a_prepared_plan_is_not_taken_for_a_broken_link() -> None:
    """On a slow network a record came after the end of the other connection between the two, at each switch: the hosts
    were given up again and again, with the only copy of each segment."""
    faults = (
        SimFault("kill", 0, "ending", 3, 97, 1, 483, same=True),
        SimFault("holders", 77, "spreading", 3, 4892, 31, 1, same=True),
        SimFault("lose_all", 87, "updating", 2, 153, 64, 187),
        SimFault("link", 87, "heal", 1, 0, 37, 122),
        SimFault("last_words", 151, "updating", 3, 522, 63, 26),
        SimFault("coordinator", 151, "settling", 2, 4623, 48, 261, same=True),
        SimFault("scale", 246, "gathering", 2, 0, 69, 1545),
        SimFault("cut_control", 246, "settling", 1, 0, 53, 1469, same=True),
        SimFault("kill", 525, "reducing", 3, 0, 79, 3),
    )
    job = SimJob(11, 8, 4, copies=1, frees=True, late=(6, -1))
    outcome = simulate(101010130, setup=Setup(4, 0, 2, 1, "wait", job, faults, save_ms=300, donors=2))
    assert outcome.ok, outcome


def test_a_checkpoint_of_moved_segments_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def spread(ends: OperationEnds, operation: do.Spread, result: Holds) -> None:
        ends._queue.feed(result)
        ends._apply(whole=True)

    monkeypatch.setattr(OperationEnds, "_spread", spread)
    outcome = simulate(1, setup=LATE)
    assert "P5" in outcome.problem, outcome
