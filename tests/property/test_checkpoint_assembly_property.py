"""Reports of parts, in any order and of any blocks, beside what plain sets say of them."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from everstep.base.extents import Runs
from everstep.checkpoint.manifest import PartFile
from everstep.checkpoint.manifest_assembly import Assembly
from everstep.checkpoint.part import NOT_HELD, PartReport, entries_within
from everstep.exact.image import BLOCK_BYTES, Outline, StateEntry, block_count

STEP, GENERATION = 7, 3
FACTS = {"what it consists of": "a", "values": "b"}
DATA_AT = 512


def digest(kind: int, number: int) -> str:
    return f"{kind:016x}{number:016x}"


@st.composite
def states(draw: st.DrawFn) -> tuple[StateEntry, ...]:
    """Tensors of less than a block, of one, of several, and empty ones; some begin blocks of their own."""
    at, entries = 0, []
    for k in range(draw(st.integers(1, 6))):
        at = -(-at // BLOCK_BYTES) * BLOCK_BYTES if draw(st.booleans()) else at
        size = draw(st.sampled_from([0, 64, BLOCK_BYTES - 64, BLOCK_BYTES, 2 * BLOCK_BYTES + 64]))
        entries.append(StateEntry(f"model/t{k}", "uint8", (size,), at, size))
        at += size
    return tuple(entries)


def runs_of(blocks: list[int]) -> Runs:
    return tuple((k, k + 1) for k in blocks)


def reports_of(
    draw: st.DrawFn, stage: int, entries: tuple[StateEntry, ...], writers: int
) -> tuple[list[PartReport], list[list[int]]]:
    """What the writers of one stage report, each of some blocks, in files that leave out old ones; and which these
    are."""
    owners = [draw(st.integers(0, writers - 1)) for _ in range(block_count(entries))]
    told, new = [], []
    for me in range(writers):
        mine = [k for k, owner in enumerate(owners) if owner == me]
        fresh = [k for k in mine if draw(st.booleans())]
        file = PartFile(f"s{stage}w{me}", DATA_AT + len(fresh) * BLOCK_BYTES, DATA_AT, "", "") if fresh else None
        new.append(fresh)
        told.append(
            PartReport(
                *(STEP, GENERATION, stage, me, runs_of(mine)),
                digests="".join(digest(stage, k) for k in mine),
                entry_digests="".join(digest(9, k) for k in entries_within(entries, runs_of(mine))),
                written=[(k, 1) for k in fresh],
                file=file,
                sha256="a" * 63 + str(me) if file else "",
                entries=None if me else entries,
                values=None if me else {},
                outline=None if me else Outline(),
            )
        )
    return told, new


@given(st.data())
def test_a_state_is_whole_once_all_have_reported_whatever_the_order(data: Any) -> None:
    draw, entries, writers, stages = data.draw, data.draw(states()), data.draw(st.integers(1, 3)), data.draw(st.just(2))
    parts = [reports_of(draw, stage, entries, writers) for stage in range(stages)]
    told = [report for reports, _ in parts for report in reports]
    expected = [(report.stage, report.worker_id) for report in told]
    assembly = Assembly(STEP, GENERATION, stages, expected)
    order = draw(st.permutations([*told, draw(st.sampled_from(told))]))  # one comes twice
    came: set[tuple[int, int]] = set()
    for report in order:
        fields: dict[str, int] = draw(st.sampled_from([{"step": 6}, {"generation": 4}, {"stage": 2}, {"stage": -1}]))
        strange = PartReport(
            fields.get("step", STEP), fields.get("generation", GENERATION), fields.get("stage", report.stage), 0
        )
        assert not assembly.add(strange)
        assert assembly.add(report)
        came.add((report.stage, report.worker_id))
        assert set(assembly.reports) == came
        there = {(r.stage, k) for r in told if (r.stage, r.worker_id) in came for run in r.runs for k in range(*run)}
        whole = {(stage, k) for stage in range(stages) for k in range(block_count(entries))}
        laid_out = {stage for stage, worker_id in came if worker_id == 0}
        assert (assembly.missing() == "") == (there == whole and len(laid_out) == stages and came == set(expected))
        unknown = [stage for stage in range(stages) if stage not in laid_out]
        gaps = sorted(whole - there)
        if unknown and (not gaps or unknown[0] <= gaps[0][0]):
            assert assembly.missing() == f"the layout of stage {unknown[0]}"
        elif gaps:
            stage, first = gaps[0]
            last = next(k for k in range(first, block_count(entries) + 1) if (stage, k) not in gaps) - 1
            assert assembly.missing() == f"blocks {first} to {last} of stage {stage}"
    files = {report.file.name: report.sha256 for report in told if report.file is not None}
    assert sorted(assembly.files()) == sorted(files) and assembly.sums() == files
    for stage, (reports, new) in enumerate(parts):
        said = assembly.stage_manifest(stage)
        assert said["blocks"] == [digest(stage, k) for k in range(block_count(entries))]
        assert [d == digest(9, k) for k, d in enumerate(said["digests"])] == [bool(e.nbytes) for e in entries]
        places = {
            k: (r.file, DATA_AT + n * BLOCK_BYTES) for r, fresh in zip(reports, new, strict=True)
            for n, k in enumerate(fresh)
        }  # fmt: skip
        assert assembly.written(stage) == places


@given(st.data())
def test_states_differ_if_two_that_hold_a_block_say_different_things_of_it(data: Any) -> None:
    draw, entries = data.draw, data.draw(states())
    n, writers = block_count(entries), draw(st.integers(1, 3))
    holds = [[draw(st.booleans()) for _ in range(n)] for _ in range(writers)]
    says = [[draw(st.sampled_from([1, 1, 1, 1, 2])) for _ in range(n)] for _ in range(writers)]
    facts = [{**FACTS, "values": draw(st.sampled_from(["b", "b", "b", "c"]))} for _ in range(writers)]
    assembly = Assembly(STEP, GENERATION, 1)
    for me in range(writers):
        checks = b"".join(says[me][k].to_bytes(8, "little") if holds[me][k] else NOT_HELD for k in range(n))
        assembly.add(PartReport(STEP, GENERATION, 0, me, checks=checks, facts=facts[me], entries=entries))
    odd = {k for k in range(n) if len({says[me][k] for me in range(writers) if holds[me][k]}) > 1}
    unlike = n > 0 and len({one["values"] for one in facts}) > 1  # who has no blocks compares nothing
    said = assembly.differing()
    assert (said == "") == (not odd and not unlike)
    names = ["values"] * unlike + [e.name.removeprefix("model/") for e in entries if odd & set(e.blocks)]
    if said:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        assert said.endswith(f"step {STEP}, in the blocks of {', '.join(names[:3])}{more}")
        assert said.startswith(f"workers {', '.join(map(str, range(writers)))} hold different states")
