from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.base.pipeline.schedule_table import KINDS
from everstep.base.plan import Member, Plan, Seat
from everstep.placement.routes import holder, ops, turns
from everstep.placement.schedules import PipeOp, schedule
from sampling import examples


def plan_of(seats, lanes, stages) -> Plan:
    ids = sorted({s.worker_id for s in seats})
    return Plan(1, "", tuple(Member(i, 0, "h") for i in ids), tuple(seats), lanes, stages)


@st.composite
def plans(draw):
    """Any distribution at all: workers may sit in several stages, lanes are spread at random in each."""
    lanes, stages = draw(st.integers(1, 9)), draw(st.integers(1, 5))
    workers = draw(st.integers(1, 7))
    seats = []
    for stage in range(stages):
        owners = draw(st.lists(st.integers(0, workers - 1), min_size=lanes, max_size=lanes))
        for worker_id in sorted(set(owners)):
            own = tuple(lane for lane in range(lanes) if owners[lane] == worker_id)
            seats.append(Seat(worker_id, stage, "active", own))
    return plan_of(seats, lanes, stages)


kinds = st.sampled_from([(k.name, c) for k in KINDS.values() for c in ((2, 3) if k.unlooped else (1,))])


def play(lists: dict[int, tuple[PipeOp, ...]], parts: int, lanes_of=lambda worker_id, op: (op.lane,)) -> list[str]:
    """The dumb oracle: everybody goes on as far as it can, again and again. Returns who is stuck."""
    at = dict.fromkeys(lists, 0)
    done: set[tuple[str, int, int]] = set()
    moved = True
    while moved:
        moved = False
        for worker_id, own in lists.items():
            while at[worker_id] < len(own):
                op = own[at[worker_id]]
                needs, turn = [], lanes_of(worker_id, op)
                if op.kind == "forward" and op.part > 0:
                    needs += [("forward", op.part - 1, lane) for lane in turn]
                if op.kind != "forward":
                    needs += [("forward", op.part, lane) for lane in turn]
                if op.kind == "backward" and op.part + 1 < parts:
                    needs += [("backward", op.part + 1, lane) for lane in turn]
                if not all(need in done for need in needs):
                    break
                done.update((op.kind, op.part, lane) for lane in turn)
                at[worker_id] += 1
                moved = True
    return [f"{i} at {own[at[i]]}" for i, own in lists.items() if at[i] < len(own)]


@given(plans(), kinds, st.booleans(), st.data())
@settings(max_examples=examples(400))
def test_nobody_waits_for_ever_and_all_is_done_once(plan, kind_chunks, recompute, data):
    kind, chunks = kind_chunks
    lanes = sorted(data.draw(st.sets(st.integers(0, plan.lanes - 1))))
    lists = {
        i: ops(plan, i, data.draw(st.permutations(lanes)), kind=kind, chunks=chunks, recompute=recompute)
        for i in plan.worker_ids
    }
    parts = plan.stages * chunks
    assert play(lists, parts) == []
    passes = Counter((op.kind, op.part, op.lane) for own in lists.values() for op in own if op.kind != "recompute")
    wanted = {(k, part, lane) for k in ("forward", "backward") for part in range(parts) for lane in lanes}
    assert set(passes) == wanted and set(passes.values()) <= {1}
    for worker_id, own in lists.items():
        assert all(op.stage == op.part % plan.stages and holder(plan, op.part, op.lane) == worker_id for op in own)
        for part in range(parts):
            for passed in ("forward", "backward"):
                order = [op.lane for op in own if op.part == part and op.kind == passed]
                assert order == sorted(order)
        for before, op in zip((None, *own), own, strict=False):
            again = before is not None and before.kind == "recompute" and before[1:] == op[1:]
            own_forward = before == op._replace(kind="forward")
            if op.kind == "backward":
                assert own_forward or again == recompute


@given(plans(), kinds, st.integers(2, 4), st.sets(st.integers(0, 8)))
@settings(max_examples=examples(200))
def test_workers_that_do_several_lanes_at_a_time_do_not_wait_for_ever(plan, kind_chunks, at_once, wanted):
    kind, chunks = kind_chunks
    lanes = sorted(lane for lane in wanted if lane < plan.lanes)
    lists = {i: ops(plan, i, lanes, kind=kind, chunks=chunks, at_once=at_once) for i in plan.worker_ids}
    together = {i: turns(plan, i, lanes, at_once) for i in plan.worker_ids}
    parts = plan.stages * chunks
    assert play(lists, parts, lambda worker_id, op: together[worker_id][op.stage, op.lane]) == []
    for stage in range(plan.stages):
        found = [lane for own in together.values() for (at, _), turn in own.items() if at == stage for lane in turn]
        assert sorted(found) == lanes
    passes = Counter((i, op.kind, op.part, op.lane) for i, own in lists.items() for op in own)
    assert set(passes.values()) <= {1} and sum(passes.values()) == 2 * chunks * sum(map(len, together.values()))


@given(st.integers(1, 6), st.integers(1, 4), kinds, st.booleans())
def test_one_worker_per_stage_with_all_lanes_follows_the_published_table(stages, groups, kind_chunks, recompute):
    kind, chunks = kind_chunks
    lanes = stages * groups
    plan = plan_of([Seat(k, k, "active", tuple(range(lanes))) for k in range(stages)], lanes, stages)
    table = schedule(kind, stages, lanes, chunks, recompute)
    for stage in range(stages):
        expected = tuple(PipeOp(o.kind, o.chunk * stages + o.stage, o.stage, o.micro_batch) for o in table[stage])
        assert ops(plan, stage, range(lanes), kind=kind, chunks=chunks, recompute=recompute) == expected


@given(st.integers(2, 5), st.integers(2, 4), st.sampled_from(["gpipe", "1f1b"]), st.data())
def test_aligned_pools_are_pipelines_side_by_side(stages, members, kind, data):
    """However the lanes are spread over the paths: each is scheduled as if it were alone."""
    lanes = 2 * members
    paths = data.draw(st.permutations(range(lanes)))
    own = [tuple(sorted(paths[m::members])) for m in range(members)]
    seats = [Seat(stage * members + m, stage, "active", own[m]) for stage in range(stages) for m in range(members)]
    plan = plan_of(seats, lanes, stages)
    for m in range(members):
        table = schedule(kind, stages, len(own[m]))
        for stage in range(stages):
            expected = tuple(PipeOp(o.kind, stage, stage, own[m][o.micro_batch]) for o in table[stage])
            assert ops(plan, stage * members + m, range(lanes), kind=kind) == expected


@given(st.integers(1, 4), st.integers(1, 6))
def test_a_worker_that_holds_everything_finishes_lane_by_lane(stages, lanes):
    plan = plan_of([Seat(3, k, "active", tuple(range(lanes))) for k in range(stages)], lanes, stages)
    once = [*range(stages), *reversed(range(stages))]
    assert [(op.lane, op.part) for op in ops(plan, 3, range(lanes))] == [(a, p) for a in range(lanes) for p in once]
    assert [holder(plan, part, 0) for part in range(stages)] == [3] * stages


def test_lists_that_would_wait_for_each_other_are_mended():
    """Stage 0 keeps lane 3 behind the backward pass of lane 0; a worker of stage 1 wants lane 3 before it."""
    seats = [
        Seat(0, 0, "active", (0, 1, 2, 3)),
        Seat(1, 1, "active", (0, 3)),
        Seat(2, 1, "active", (1, 2)),
        Seat(3, 2, "active", (0, 1, 2, 3)),
    ]
    plan = plan_of(seats, 4, 3)
    assert play({i: ops(plan, i, range(4)) for i in plan.worker_ids}, 3) == []
    assert [f"{op.kind[0]}{op.lane}" for op in ops(plan, 1, range(4))] == ["f0", "f3", "b0", "b3"]
