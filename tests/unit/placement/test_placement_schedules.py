"""Pipeline schedules against the published tables, the published formulas and torch's own schedules."""

from __future__ import annotations

import re
from functools import cache
from itertools import pairwise
from types import SimpleNamespace

import pytest

from everstep.base.errors import ConfigError, InvariantViolation
from everstep.base.pipeline.schedule_table import KINDS
from everstep.placement.schedules import (
    Op,
    Schedule,
    Timeline,
    TimelineSlot,
    bubble_fraction,
    cells,
    expected_bubble_fraction,
    inputs,
    peak_activations,
    peak_in_flight,
    timeline,
)
from everstep.placement.schedules import (
    schedule as compute_schedule,
)
from everstep.placement.tree import cover


def combinations() -> list[tuple[str, int, int, int]]:
    """Most (kind, stages, micro-batches, chunks) of 1..8, 1..16, 1..4 that are possible."""
    return [
        (kind.name, k, m, c)
        for kind in KINDS.values()
        for k in (1, 2, 3, 4, 6, 8)
        for m in (1, 2, 3, 4, 5, 6, 7, 8, 12, 16)
        for c in ((2, 3, 4) if kind.unlooped else (1,))
        if kind.fits(k, m) is None
    ]


COMBINATIONS = combinations()
schedule = cache(compute_schedule)


def words(ops: tuple[Op, ...], letters: str = "") -> str:
    """F0 B0 ...; with letters for the chunks, F0a B0a ..."""
    return " ".join(f"{op.kind[0].upper()}{op.micro_batch}{letters[op.chunk] if letters else ''}" for op in ops)


def drawn(played: Timeline) -> list[str]:
    """The rows as in the papers' figures; `=` goes on, `.` is idle."""
    return [
        " ".join(
            "." if op is None else f"{op.kind[0].upper()}{op.micro_batch}" if starts else "="
            for op, starts in cells(row, played.length)
        )
        for row in played.rows
    ]


def test_gpipe_of_the_paper():
    """arXiv:1811.06965, figure 2(c): 4 stages, 4 micro-batches (backward passes in lane order, see the module)."""
    assert drawn(timeline(schedule("gpipe", 4, 4))) == [
        "F0 F1 F2 F3 . . . . . . B0 B1 B2 B3",
        ". F0 F1 F2 F3 . . . . B0 B1 B2 B3 .",
        ". . F0 F1 F2 F3 . . B0 B1 B2 B3 . .",
        ". . . F0 F1 F2 F3 B0 B1 B2 B3 . . .",
    ]


def test_gpipe_of_megatron():
    """arXiv:2104.04473, figure 3: 4 stages, 8 micro-batches, a backward pass takes as long as two forward passes."""
    assert drawn(timeline(schedule("gpipe", 4, 8), backward=2)) == [
        "F0 F1 F2 F3 F4 F5 F6 F7" + " ." * 9 + " B0 = B1 = B2 = B3 = B4 = B5 = B6 = B7 =",
        ". F0 F1 F2 F3 F4 F5 F6 F7" + " ." * 6 + " B0 = B1 = B2 = B3 = B4 = B5 = B6 = B7 =" + " ." * 2,
        ". . F0 F1 F2 F3 F4 F5 F6 F7" + " ." * 3 + " B0 = B1 = B2 = B3 = B4 = B5 = B6 = B7 =" + " ." * 4,
        ". . . F0 F1 F2 F3 F4 F5 F6 F7 B0 = B1 = B2 = B3 = B4 = B5 = B6 = B7 =" + " ." * 6,
    ]


def test_1f1b_of_megatron():
    """arXiv:2104.04473, figure 4, top: 4 stages, 8 micro-batches."""
    plan = schedule("1f1b", 4, 8)
    assert [words(ops) for ops in plan] == [
        "F0 F1 F2 F3 B0 F4 B1 F5 B2 F6 B3 F7 B4 B5 B6 B7",
        "F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5 B6 B7",
        "F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 F6 B5 F7 B6 B7",
        "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7",
    ]
    top = drawn(timeline(plan, backward=2))
    assert top[0] == "F0 F1 F2 F3 . . . . . . B0 = F4 B1 = F5 B2 = F6 B3 = F7 B4 = . B5 = . B6 = . B7 ="
    assert top[3] == ". . . F0 B0 = F1 B1 = F2 B2 = F3 B3 = F4 B4 = F5 B5 = F6 B6 = F7 B7 = . . . . . ."


def test_1f1b_with_equal_times():
    assert drawn(timeline(schedule("1f1b", 4, 4))) == [
        "F0 F1 F2 F3 . . . B0 . B1 . B2 . B3",
        ". F0 F1 F2 . . B0 F3 B1 . B2 . B3 .",
        ". . F0 F1 . B0 F2 B1 F3 B2 . B3 . .",
        ". . . F0 B0 F1 B1 F2 B2 F3 B3 . . .",
    ]


def test_interleaved_of_megatron():
    """arXiv:2104.04473, figure 4, bottom: 4 stages of 2 chunks, 8 micro-batches."""
    plan = schedule("interleaved", 4, 8, chunks=2)
    assert words(plan[0], "ab") == (
        "F0a F1a F2a F3a F0b F1b F2b F3b F4a F5a F6a B0b F7a B1b F4b B2b F5b B3b F6b B0a F7b B1a "
        "B2a B3a B4b B5b B6b B7b B4a B5a B6a B7a"
    )
    assert words(plan[3], "ab") == (
        "F0a F1a F2a F3a F0b B0b F1b B1b F2b B2b F3b B3b F4a B0a F5a B1a F6a B2a F7a B3a "
        "F4b B4b F5b B5b F6b B6b F7b B7b B4a B5a B6a B7a"
    )


def test_interleaved_equals_torchs():
    """torch.distributed.pipelining's tables, worker by worker, wherever both allow the combination."""
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    for _, k, m, c in [case for case in COMBINATIONS if case[0] == "interleaved"]:
        theirs = SimpleNamespace(n_local_stages=c, pp_group_size=k, _n_microbatches=m, microbatches_per_round=k)
        for stage, ops in enumerate(schedule("interleaved", k, m, c)):
            rank_ops = schedules.ScheduleInterleaved1F1B._calculate_single_rank_operations(theirs, stage)
            assert [torchs_name(op, k) for op in ops] == [str(op) for op in rank_ops if op is not None], (k, m, c)


def test_looped_breadth_first_equals_torchs_but_for_the_order_of_backward_passes():
    """torch's take the micro-batches in reverse; here they go in lane order, chunk by chunk as there."""
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    for _, k, m, c in [case for case in COMBINATIONS if case[0] == "looped_bfs"]:
        theirs = SimpleNamespace(_stages=[None] * c, pp_group_size=k, _n_microbatches=m)
        for stage, ops in enumerate(schedule("looped_bfs", k, m, c)):
            printed = schedules.ScheduleLoopedBFS._calculate_single_rank_operations(theirs, stage)
            table = [str(op) for op in printed if op is not None]
            for i in range(m * c, 2 * m * c, m):
                table[i : i + m] = reversed(table[i : i + m])
            assert [torchs_name(op, k) for op in ops] == table, (k, m, c)


@pytest.mark.parametrize(("kind", "name"), [("gpipe", "ScheduleGPipe"), ("1f1b", "Schedule1F1B")])
def test_schedules_of_one_chunk_equal_torchs(kind: str, name: str):
    """torch's printed 1F1B counts the last stage's micro-batches from 1 and breaks below K of them: left out here."""
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    for k in range(1, 9):
        for m in range(k, 17):
            theirs = SimpleNamespace(_num_stages=k, _n_microbatches=m)
            table = getattr(schedules, name)._get_pipeline_order(theirs)
            for stage, ops in enumerate(schedule(kind, k, m)):
                if kind == "1f1b" and stage == k - 1:
                    continue
                printed = [str(op) for op in table[stage] if op is not None]
                assert [torchs_name(op, k) for op in ops] == [op for op in printed if "REDUCE" not in op], (k, m)


def torchs_name(op: Op, stages: int) -> str:
    return f"{op.chunk * stages + op.stage}{op.kind[0].upper()}{op.micro_batch}"


@pytest.mark.parametrize("recompute", [False, True])
def test_every_pass_once_and_after_its_inputs(recompute: bool):
    for kind, k, m, c in COMBINATIONS:
        plan = schedule(kind, k, m, c, recompute)
        assert len(plan) == k
        for stage, ops in enumerate(plan):
            assert len(set(ops)) == len(ops)
            everything = {
                Op(way, stage, chunk, i) for way in ("forward", "backward") for chunk in range(c) for i in range(m)
            }
            assert {op for op in ops if op.kind != "recompute"} == everything
        played = timeline(plan, 1, 2)  # raises if the workers wait for each other
        slots = {slot.op: slot for row in played.rows for slot in row}
        assert tuple(tuple(slot.op for slot in row) for row in played.rows) == plan
        for op, slot in slots.items():
            assert all(slots[other].end <= slot.start for other in naive_inputs(op, k, c)), (kind, k, m, c, op)
        for row in played.rows:
            assert all(one.end <= two.start for one, two in pairwise(row))


@cache
def line_of_parts(stages: int, chunks: int) -> tuple[list[tuple[str, int, int]], dict[tuple[str, int, int], int]]:
    """All parts, forward then backward, and the place of each in that line."""
    line = [("forward", s, c) for c in range(chunks) for s in range(stages)]
    line += [("backward", s, c) for _, s, c in reversed(line)]
    return line, {part: at for at, part in enumerate(line)}


def naive_inputs(op: Op, stages: int, chunks: int) -> set[Op]:
    """The model as one line of parts, forward then backward; a pass needs the one before it in that line."""
    if op.kind == "recompute":
        return {op._replace(kind="forward")}
    line, places = line_of_parts(stages, chunks)
    at = places[op.kind, op.stage, op.chunk]
    found = {Op(*line[at - 1], op.micro_batch)} if at else set()  # type: ignore[arg-type]
    return found | ({op._replace(kind="forward")} if op.kind == "backward" else set())


def test_inputs_are_those_of_the_line_of_parts():
    for k, c in [(1, 1), (1, 3), (4, 1), (3, 2)]:
        for kind in ("forward", "backward", "recompute"):
            for stage in range(k):
                for chunk in range(c):
                    op = Op(kind, stage, chunk, 5)  # type: ignore[arg-type]
                    assert set(inputs(op, stages=k, chunks=c)) == naive_inputs(op, k, c)
    with pytest.raises(InvariantViolation, match="outside 2 stages"):
        inputs(Op("forward", 2, 0, 0), stages=2)


def test_recomputation_comes_directly_before_its_backward_pass_and_not_after_its_forward_pass():
    for kind, k, m, c in COMBINATIONS:
        without = schedule(kind, k, m, c)
        for ops, plain in zip(schedule(kind, k, m, c, recompute=True), without, strict=True):
            assert tuple(op for op in ops if op.kind != "recompute") == plain
            for before, op in pairwise(ops):
                if op.kind == "backward":
                    assert before in (op._replace(kind="recompute"), op._replace(kind="forward"))
                if op.kind == "recompute":
                    assert before != op._replace(kind="forward")
    assert words(schedule("1f1b", 3, 3, recompute=True)[1]) == "F0 F1 R0 B0 F2 R1 B1 R2 B2"
    assert words(schedule("1f1b", 3, 3, recompute=True)[2]) == "F0 B0 F1 B1 F2 B2"


@pytest.mark.parametrize("backward", [1, 2, 3])
def test_bubble_is_that_of_the_formula(backward: int):
    """(K-1)/(M+K-1), interleaved (K-1)/(C*M+K-1): arXiv:2104.04473, section 2.2."""
    for kind, k, m, c in COMBINATIONS:
        played = timeline(schedule(kind, k, m, c), 1, backward)
        assert bubble_fraction(played) == (k - 1) / (c * m + k - 1) == expected_bubble_fraction(k, m, c)
        assert played.length == (c * m + k - 1) * (1 + backward)
        assert {played.idle(stage) for stage in range(k)} == {(k - 1) * (1 + backward)}


def test_recomputation_costs_time_and_fills_bubbles():
    plain, again = (timeline(schedule("1f1b", 4, 8, recompute=on), 1, 2) for on in (False, True))
    assert plain.length < again.length
    assert bubble_fraction(again) < bubble_fraction(plain)
    dear = timeline(schedule("gpipe", 2, 2, recompute=True), 1, 1, recompute=5)
    assert [slot.end - slot.start for slot in dear.rows[1]] == [1, 1, 5, 1, 5, 1]


def test_micro_batches_in_flight():
    for kind, k, m, c in COMBINATIONS:
        peak = peak_in_flight(schedule(kind, k, m, c))
        if kind in ("gpipe", "looped_bfs"):
            assert peak == (c * m,) * k
        elif kind == "1f1b":
            assert peak == tuple(min(k - stage, m) for stage in range(k))
        elif (
            kind == "interleaved"
        ):  # chunks of the first stage: K (1 + (K-1)/(K C)) micro-batches' worth, arXiv:2205.05198, section 4.2.3
            assert peak[0] == min(k * c + k - 1, c * m)
            assert all(one >= two for one, two in pairwise(peak))


def test_activations_held():
    for kind, k, m, c in COMBINATIONS:
        plain, again = schedule(kind, k, m, c), schedule(kind, k, m, c, recompute=True)
        assert peak_activations(plain) == peak_in_flight(plain) == peak_in_flight(again)
        assert peak_activations(again) == (1,) * k


def test_backward_passes_of_a_chunk_come_in_lane_order():
    for kind, k, m, c in COMBINATIONS:
        for ops in schedule(kind, k, m, c):
            for chunk in range(c):
                order = [op.micro_batch for op in ops if op.kind == "backward" and op.chunk == chunk]
                assert order == list(range(m))
                assert max(len(cover(order[: i + 1], m)) for i in range(m)) <= m.bit_length()


def test_what_is_impossible_is_refused_in_one_line():
    cases = [
        (("1fib", 4, 8), "one of gpipe, 1f1b, interleaved, looped_bfs, got '1fib'; did you mean '1f1b'?"),
        (("gpipe", 0, 8), "at least 1 of stages, got 0"),
        (("gpipe", 4, -1), "at least 1 of micro-batches, got -1"),
        (("interleaved", 4, 8, 0), "at least 1 of chunks, got 0"),
        (("1f1b", 4, 8, 2), "chunks: expected 1 with schedule 1f1b, got 2: set schedule=interleaved or looped_bfs"),
        (
            ("interleaved", 4, 8),
            "chunks: expected at least 2 with schedule interleaved, got 1: set chunks=2, or schedule=1f1b",
        ),
        (
            ("interleaved", 4, 10, 2),
            "a multiple of the 4 stages with schedule interleaved, got 10: use 8 or 12, or schedule=1f1b",
        ),
        (
            ("interleaved", 4, 3, 2),
            "micro-batches: expected a multiple of the 4 stages with schedule interleaved, got 3: use 4, or",
        ),
        (
            ("looped_bfs", 4, 3, 2),
            "micro-batches: expected at least the 4 stages with schedule looped_bfs, got 3: use 4, or",
        ),
    ]
    for arguments, message in cases:
        with pytest.raises(ConfigError, match=re.escape(message)) as caught:
            schedule(*arguments)
        assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="backward takes at least 1 time step, got 0"):
        timeline(schedule("gpipe", 1, 1), backward=0)


def test_a_schedule_that_cannot_go_on_is_a_bug():
    forward, backward = Op("forward", 0, 0, 0), Op("backward", 0, 0, 0)
    upside_down: Schedule = ((backward, forward),)
    with pytest.raises(InvariantViolation, match="cannot go on: waiting are worker 0"):
        timeline(upside_down)
    with pytest.raises(InvariantViolation, match="worker 1 was given"):
        timeline(((), (forward,)))


def test_cells_show_starts_and_what_goes_on():
    op = Op("backward", 0, 0, 0)
    assert list(cells((TimelineSlot(op, 1, 3),), 4)) == [(None, False), (op, True), (op, False), (None, False)]
    assert Timeline(()).length == 0
    assert bubble_fraction(Timeline(())) == 0.0
