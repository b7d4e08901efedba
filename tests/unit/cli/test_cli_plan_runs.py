"""Which splits jobs run: those that a job's own config takes, with these keys."""

from __future__ import annotations

from typing import Any

import pytest

from everstep.base.config import load_config
from everstep.cli.plan_runs import how_it_runs
from everstep.cost.step_time import ParallelSplit

TP = {"cell.tp": 2, "cell.shards": 2, "device": "cpu"}


@pytest.mark.parametrize(
    ("split", "keys", "workers"),
    [
        (ParallelSplit(dp=4), {}, 4),
        (ParallelSplit(dp=4, zero=1), {"zero.stage": 1, "device": "cpu"}, 4),
        (ParallelSplit(pp=2, dp=2, zero=2), {"zero.stage": 2, "device": "cpu"}, 4),
        (ParallelSplit(dp=8, zero=3), {"cell.fsdp": 8, "device": "cpu"}, 1),
        (ParallelSplit(tp=2, dp=4, zero=3), {"cell.fsdp": 4, **TP}, 1),
        (ParallelSplit(tp=2, dp=4), TP, 4),
        (ParallelSplit(tp=2, dp=4, sequence_parallel=True), {**TP, "cell.sp": True}, 4),
        (ParallelSplit(tp=2, pp=4, dp=2), TP, 8),
        (ParallelSplit(tp=2, dp=4, zero=1), {**TP, "zero.stage": 1}, 4),
        (ParallelSplit(tp=2, pp=2, sequence_parallel=True), {**TP, "cell.sp": True}, 2),
        (ParallelSplit(pp=4, dp=2, recompute="full"), {"recompute": True}, 8),
        (ParallelSplit(pp=4, schedule="interleaved", chunks=2), {"chunks": 2, "schedule": "interleaved"}, 4),
    ],
)
def test_what_runs(split: ParallelSplit, keys: dict[str, Any], workers: int) -> None:
    found = how_it_runs(split, 4)
    assert found.config is not None and not found.why_not and keys.items() <= found.config.items()
    config = load_config([("here", found.config)])
    assert (config.workers, config.stages, config.lanes) == (workers, split.pp, 4 * split.dp)
    assert found.words.startswith("yes") and ("on CPUs" in found.words) == ("device" in keys)
    assert (how_it_runs(split, 4, cpu=False).config is None) == ("device" in keys), "GPUs alone"


@pytest.mark.parametrize(
    ("split", "why"),
    [
        (ParallelSplit(dp=64, zero=3), "cell.fsdp: "),
        (ParallelSplit(tp=2, pp=2, chunks=2, schedule="interleaved"), "chunks"),
        (ParallelSplit(dp=2, cp=2), "context parallelism"),
        (ParallelSplit(dp=2, ep=2), "experts"),
        (ParallelSplit(dp=2, recompute="selective"), "all activations again, or none"),
        (ParallelSplit(dp=2, recompute="full"), "in stages alone"),
    ],
)
def test_what_does_not_run_says_why(split: ParallelSplit, why: str) -> None:
    found = how_it_runs(split, 4)
    assert found.config is None and why in found.why_not and found.words == "no"


def test_offload_and_types_of_numbers() -> None:
    whole = how_it_runs(ParallelSplit(dp=2), zero={"zero.offload": "cpu"}).config
    assert whole is not None and whole["zero.offload"] == "cpu" and "device" not in whole
    divided = how_it_runs(ParallelSplit(dp=2, zero=1), zero={"zero.offload": "/disk"}).config
    assert divided is not None and divided["zero.offload"] == "/disk" and divided["zero.stage"] == 1
    assert "float32" in how_it_runs(ParallelSplit(dp=2), dtype="bf16").why_not
