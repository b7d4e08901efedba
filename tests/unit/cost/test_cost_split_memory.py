"""Memory of any split, by kind: ZeRO's formulas, activations, what schedules hold, properties."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.base.pipeline.schedule_table import KINDS
from everstep.cost.models import PUBLISHED, RECOMPUTE, ModelShape
from everstep.cost.split_memory import in_flight, split_memory, usual_splits
from everstep.cost.step_time import ParallelSplit
from everstep.placement.schedules import peak_in_flight, schedule

sys.path.append(str(Path(__file__).parents[3] / "bench"))
from plan_tables import TITAN, TRACKED, ZERO, TitanRow, ZeroRow, of_titan_gib, of_zero, tracked_gib

SHAPE = ModelShape(24, 2048, 16)
MIXTRAL = next(one.shape for one in PUBLISHED if one.name == "mixtral-8x7b")
STATES = ("parameters", "gradients", "optimizer")


@pytest.mark.parametrize("row", ZERO, ids=lambda row: f"{row.billions}-{row.devices}")
def test_the_rows_of_the_zero_paper(row: ZeroRow) -> None:
    """The formulas exactly; the table within its rounding."""
    whole, devices = row.billions, row.devices
    formulas = [4 * whole + 12 * whole / devices, 2 * whole + 14 * whole / devices, 16 * whole / devices]
    assert of_zero(row) == pytest.approx(formulas, rel=1e-12)
    assert of_zero(row) == pytest.approx(row.sizes, rel=0.003)


@pytest.mark.parametrize(
    ("zero", "per"), [(0, (2, 2, 12)), (1, (2, 2, 0.75)), (2, (2, 0.125, 0.75)), (3, (0.125, 0.125, 0.75))]
)
def test_states_of_a_split(zero: int, per: tuple[float, ...]) -> None:
    found = split_memory(SHAPE, ParallelSplit(2, 4, 16, zero=zero), 8).device
    assert [found[kind] for kind in STATES] == [one * SHAPE.parameters / 8 for one in per]
    wide = split_memory(SHAPE, ParallelSplit(2, 4, 16, zero=0), 8, "fp32").device
    assert [wide[kind] for kind in STATES] == [one * SHAPE.parameters / 8 for one in (4, 4, 8)]


def test_activations_by_their_paper() -> None:
    """arXiv 2205.05198: sbh (34 + 5as/h), (10 + 24/t + 5as/ht), (34 + 5as/h)/t; selective 34, full 2 sbh."""
    s, h, a = SHAPE.sequence, SHAPE.hidden, SHAPE.heads
    scores = 5 * a * s / h
    assert SHAPE.activation_bytes() == h * (34 + scores)
    assert SHAPE.activation_bytes(8) == h * (10 + 24 / 8 + scores / 8)
    assert SHAPE.activation_bytes(8, True) == h * (34 + scores) / 8
    assert SHAPE.kept_bytes("selective") == SHAPE.activation_bytes(fused_attention=True) == 34 * h
    assert SHAPE.kept_bytes("alternate") == (4 + 4 + 2 + 8) * h
    assert SHAPE.kept_bytes("alternate", 2) == (4 + 7) * h and SHAPE.kept_bytes("alternate", 2, True) == 9 * h
    grouped = replace(SHAPE, kv_heads=4, ffn=3 * h, gated=True)
    assert grouped.kept_bytes("alternate") == (4 + 4 + 2 / 4 + 6) * h
    assert SHAPE.kept_bytes("full") == 2 * h and SHAPE.kept_bytes("full", 8, True) == h / 4
    assert SHAPE.kept_bytes("none") == SHAPE.activation_bytes() and SHAPE.kept_bytes("none", fused=True) == 34 * h


@pytest.mark.parametrize("row", [row for row in TITAN if row.model == "llama3-8b"], ids=lambda row: row.what)
def test_memory_of_torchtitans_8b(row: TitanRow) -> None:
    assert of_titan_gib(row) == pytest.approx(row.memory_gib, rel=0.10)


def test_activations_of_a_device() -> None:
    plain, full = ParallelSplit(micro_batch=2), ParallelSplit(micro_batch=2, recompute="full")
    tokens = 2 * SHAPE.sequence
    assert split_memory(SHAPE, plain, 4).device["activations"] == 24 * tokens * 34 * 2048
    assert split_memory(SHAPE, full, 4).device["activations"] == 24 * tokens * 2 * 2048 + tokens * 32 * 2048
    assert split_memory(SHAPE, plain, 4, "fp32").device["activations"] == 2 * 24 * tokens * 34 * 2048
    assert split_memory(SHAPE, plain, 4).device["output"] == 12 * tokens * 51200
    assert split_memory(SHAPE, plain, 4, fused=False).device["activations"] > 24 * tokens * 34 * 2048


def test_the_fullest_stage_counts() -> None:
    """The first holds most micro-batches, the last the output."""
    deep = split_memory(SHAPE, ParallelSplit(pp=4), 8).device
    assert deep["output"] == 0 and deep["activations"] == 4 * 6 * SHAPE.sequence * 34 * 2048
    wide = split_memory(replace(SHAPE, vocab=10**6), ParallelSplit(pp=4), 8).device
    assert wide["output"] > 0 and wide["activations"] == 6 * SHAPE.sequence * 34 * 2048


@pytest.mark.parametrize("name", KINDS)
def test_as_many_micro_batches_are_held_as_the_schedule_holds(name: str) -> None:
    for stages in (1, 2, 4):
        for count in (4, 8, 16):
            for chunks in (2, 3) if KINDS[name].unlooped else (1,):
                split = ParallelSplit(pp=stages, schedule=name, chunks=chunks)
                held = [in_flight(split, count, stage) * chunks for stage in range(stages)]
                assert held == pytest.approx(list(peak_in_flight(schedule(name, stages, count, chunks))))


def test_what_is_offloaded_and_kept_is_the_hosts() -> None:
    found = split_memory(SHAPE, ParallelSplit(dp=4, zero=1), 1, offload=True, snapshots=2)
    states = SHAPE.parameters
    assert found.device["optimizer"] == 0
    assert found.host == {"optimizer": 3 * states, "snapshots": 2 * (2 * states + 3 * states)}
    assert not split_memory(SHAPE, ParallelSplit(), 1).host


def test_the_wire_of_gathered_layers_of_buckets_and_of_nobody() -> None:
    assert split_memory(SHAPE, ParallelSplit(dp=4, zero=3), 1).device["wire"] == 3 * 2 * SHAPE.layer_weights
    deep = ParallelSplit(pp=4, dp=4, zero=3)
    assert split_memory(SHAPE, deep, 4).device["wire"] == 6 * SHAPE.parameters / 4
    assert split_memory(SHAPE, deep, 4, "fp32").device["wire"] == 2 * SHAPE.parameters
    assert split_memory(SHAPE, ParallelSplit(dp=4), 1).device["wire"] == 2 * 25 * 2**20
    assert split_memory(SHAPE, ParallelSplit(tp=4), 1).device["wire"] == 0


def test_usual_splits_use_all_devices_and_divide_what_can_be_divided() -> None:
    for shape in (SHAPE, ModelShape(3, 60, 6), *(one.shape for one in PUBLISHED)):
        for devices in (1, 6, 32):
            for split, _ in usual_splits(shape, ParallelSplit(dp=devices)).values():
                assert split.devices == devices and shape.heads % split.tp == 0 and split.pp <= shape.layers
    assert list(usual_splits(SHAPE, ParallelSplit(2, 2, 8))) == [
        *("ddp", "zero1", "zero2", "zero3", "fsdp+recompute", "ddp+offload", "zero1+offload", "cp8+zero1")
    ]
    assert "ep8+zero1" in usual_splits(MIXTRAL, ParallelSplit(dp=8))


def test_a_divided_sequence_keeps_a_part_of_the_activations_and_all_parameters() -> None:
    whole, part = (split_memory(SHAPE, ParallelSplit(dp=8 // cp, cp=cp), 1).device for cp in (1, 4))
    assert part["activations"] == whole["activations"] / 4 and part["output"] == whole["output"] / 4
    assert part["parameters"] == whole["parameters"]
    assert part["wire"] == whole["wire"] + 4.0 * SHAPE.sequence / 4 * 2 * SHAPE.hidden  # keys and values of one other
    states = [
        sum(split_memory(SHAPE, ParallelSplit(dp=8 // cp, cp=cp, zero=3), 1).device[kind] for kind in STATES)
        for cp in (1, 4)
    ]
    assert states[0] == states[1] == 16 * SHAPE.parameters / 8


def test_divided_experts() -> None:
    """Each device holds its part of the experts and all else; the states of both are divided among those alike."""
    split = ParallelSplit(dp=16, ep=8)
    experts, rest = MIXTRAL.expert_parameters, MIXTRAL.parameters - MIXTRAL.expert_parameters
    assert split_memory(MIXTRAL, split, 1).device["parameters"] == 2 * (rest + experts / 8)
    found = split_memory(MIXTRAL, replace(split, zero=1), 1).device
    assert found["optimizer"] == pytest.approx(12 * (rest / 16 + experts / 8 / 2))
    moved = 4.0 * MIXTRAL.sequence * 2 * MIXTRAL.hidden
    assert found["wire"] == 2 * 25 * 2**20 + moved


@pytest.mark.parametrize(("recompute", "gib"), TRACKED)
def test_memory_that_torch_tracks_for_fsdp(recompute: str, gib: float) -> None:
    assert tracked_gib(recompute) == pytest.approx(gib, rel=0.15)


@given(
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([1, 2, 8]),
    st.integers(0, 2),
    st.sampled_from(RECOMPUTE),
    st.integers(1, 64),
)
def test_what_is_divided_or_computed_again_never_needs_more(
    tp: int, pp: int, dp: int, zero: int, recompute: str, count: int
) -> None:
    split = ParallelSplit(tp, pp, dp, 1, zero, recompute=recompute)
    base = split_memory(SHAPE, split, count)
    states = sum(base.device[kind] for kind in STATES)
    more = split_memory(SHAPE, replace(split, zero=zero + 1), count).device
    assert sum(more[kind] for kind in STATES) <= states
    assert split_memory(SHAPE, replace(split, tp=2 * tp), count).total < base.total
    assert split_memory(SHAPE, replace(split, sequence_parallel=True), count).total <= base.total
    assert split_memory(SHAPE, replace(split, micro_batch=2), count).total > base.total
    room = base.total * 1.5
    assert base.largest(2 * room, SHAPE.parameters) >= base.largest(room, SHAPE.parameters)
