"""Plans beside published figures, misses included, in Markdown: `make plan-tables`. docs/planning.md holds the same.

What was recalled rather than read says so.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from everstep.cli.plan_failures import llama3_time_lost
from everstep.cli.plan_inputs import recovery_times
from everstep.cost import failures
from everstep.cost.catalogue import CATALOGUE
from everstep.cost.goodput import OOBLECK_SLOWDOWN, Cluster, recovery_policies, simulate
from everstep.cost.memory import by_paper
from everstep.cost.models import PUBLISHED, ModelShape
from everstep.cost.quantities import time_words
from everstep.cost.split_memory import CONTEXT_BYTES, split_memory
from everstep.cost.step_time import STACKS, Fleet, ParallelSplit, StepTime, micro_batches_of, step_time

MEGATRON_SOURCE = (
    "arXiv 2104.04473, table 1; recalled, then checked: shapes up to 310.1B and the last row confirmed elsewhere, all "
    "rows by the paper's formulas"
)
TITAN_SOURCE = "torchtitan, benchmarks/llama3_h100_202412_torchtitan.md at 31a17bf"


class MegatronRow(NamedTuple):
    """One row: billions of parameters, devices, global batch, TFLOP/s per device (recomputation counts)."""

    billions: float
    heads: int
    hidden: int
    layers: int
    tp: int
    pp: int
    gpus: int
    batch: int
    tflops: float

    @property
    def shape(self) -> ModelShape:
        """Vocabulary and sequence are the same in all rows."""
        return ModelShape(self.layers, self.hidden, self.heads)

    @property
    def split(self) -> ParallelSplit:
        """Interleaved, as section 5.1 says, with the fewest chunks that divide a stage's layers; micro-batches of 1.
        Neither of the latter stands in the table."""
        each = self.layers // self.pp
        chunks = next(chunks for chunks in range(2, each + 1) if each % chunks == 0) if self.pp > 1 else 1
        schedule = "interleaved" if chunks > 1 else "1f1b"
        dp = self.gpus // (self.tp * self.pp)
        return ParallelSplit(self.tp, self.pp, dp, 1, 0, schedule, chunks, "full")


MEGATRON = (
    MegatronRow(1.7, 24, 2304, 24, 1, 1, 32, 512, 137),
    MegatronRow(3.6, 32, 3072, 30, 2, 1, 64, 512, 138),
    MegatronRow(7.5, 32, 4096, 36, 4, 1, 128, 512, 142),
    MegatronRow(18.4, 48, 6144, 40, 8, 1, 256, 1024, 135),
    MegatronRow(39.1, 64, 8192, 48, 8, 2, 512, 1536, 138),
    MegatronRow(76.1, 80, 10240, 60, 8, 4, 1024, 1792, 140),
    MegatronRow(145.6, 96, 12288, 80, 8, 8, 1536, 2304, 148),
    MegatronRow(310.1, 128, 16384, 96, 8, 16, 1920, 2160, 155),
    MegatronRow(529.6, 128, 20480, 105, 8, 35, 2520, 2520, 163),
    MegatronRow(1008.0, 160, 25600, 128, 8, 64, 3072, 3072, 163),
)
MEGATRON_CALIBRATED = (1.7, 1008.0)
"""Rows that the stack megatron-2021 was fitted to."""


class ZeroRow(NamedTuple):
    """One row: billions of parameters, devices, GB of stages 1, 2 and 3."""

    billions: float
    devices: int
    sizes: tuple[float, float, float]


ZERO_SOURCE = "ZeRO, arXiv 1910.02054, table 1: recalled; its formulas 4P + 12P/N, 2P + 14P/N, 16P/N"
ZERO = (
    ZeroRow(7.5, 1, (120, 120, 120)),
    ZeroRow(7.5, 4, (52.5, 41.25, 30)),
    ZeroRow(7.5, 16, (35.62, 21.56, 7.5)),
    ZeroRow(7.5, 64, (31.41, 16.64, 1.875)),
    ZeroRow(7.5, 256, (30.35, 15.41, 0.469)),
    ZeroRow(7.5, 1024, (30.09, 15.1, 0.117)),
    ZeroRow(128, 1, (2048, 2048, 2048)),
    ZeroRow(128, 4, (896, 704, 512)),
    ZeroRow(128, 16, (608, 368, 128)),
    ZeroRow(128, 64, (536, 284, 32)),
    ZeroRow(128, 256, (518, 263, 8)),
    ZeroRow(128, 1024, (513.5, 257.75, 2)),
    ZeroRow(1000, 1, (16000, 16000, 16000)),
    ZeroRow(1000, 4, (7000, 5500, 4000)),
    ZeroRow(1000, 16, (4750, 2875, 1000)),
    ZeroRow(1000, 64, (4187.5, 2218.75, 250)),
    ZeroRow(1000, 256, (4046.88, 2054.69, 62.5)),
    ZeroRow(1000, 1024, (4011.72, 2013.67, 15.625)),
)


class TitanRow(NamedTuple):
    """One row: tokens per second and device, GiB of a device. Rows in fp8 are reported only."""

    model: str
    devices: int
    split: ParallelSplit
    batch: int
    dtype: str
    stack: str
    tokens: float
    memory_gib: float
    what: str
    calibrated: bool = False


_COMPILE, _EAGER = "torchtitan-compile", "torchtitan-eager"
_8B, _70B, _405B = "llama3-8b", "llama3-70b", "llama3-405b"


def _fsdp(devices: int) -> ParallelSplit:
    return ParallelSplit(dp=devices, micro_batch=2, zero=3, recompute="alternate")


_TP8 = ParallelSplit(8, 1, 32, 16, 3, recompute="full", sequence_parallel=True)
_PP8 = ParallelSplit(8, 8, 8, 4, 3, "1f1b", 1, "full", True)
_PP8_TWICE = ParallelSplit(8, 8, 8, 4, 3, "interleaved", 2, "full", True)
TITAN = (
    TitanRow(_8B, 8, _fsdp(8), 16, "bf16", _EAGER, 5762, 82.4, "8B, 8 FSDP", True),
    TitanRow(_8B, 8, _fsdp(8), 16, "bf16", _COMPILE, 6667, 77.0, "8B, 8 FSDP, compiled", True),
    TitanRow(_8B, 128, _fsdp(128), 256, "bf16", _EAGER, 5605, 67.0, "8B, 128 FSDP"),
    TitanRow(_8B, 128, _fsdp(128), 256, "bf16", _COMPILE, 6514, 62.0, "8B, 128 FSDP, compiled"),
    TitanRow(_8B, 8, _fsdp(8), 16, "fp8", _COMPILE, 8532, 76.8, "8B, 8 FSDP, compiled, fp8"),
    TitanRow(_8B, 128, _fsdp(128), 256, "fp8", _COMPILE, 8380, 61.8, "8B, 128 FSDP, compiled, fp8"),
    TitanRow(_70B, 256, _TP8, 512, "fp8", _COMPILE, 829, 71.9, "70B, 32 FSDP x 8 TP, compiled, fp8"),
    TitanRow(_70B, 256, _TP8, 512, "fp8", _COMPILE, 876, 67.6, "the same, sums of TP overlapped (not modelled)"),
    TitanRow(_405B, 512, _PP8, 256, "fp8", _COMPILE, 100, 82.5, "405B, 8 FSDP x 8 TP x 8 PP, 1F1B, fp8"),
    TitanRow(_405B, 512, _PP8_TWICE, 256, "fp8", _COMPILE, 128, 72.7, "the same, interleaved"),
)
"""Tables 1, 3, 4 and 5 there; tables 4 and 5 are of fp8 throughout. The 405B has as many micro-batches
as stages, torchtitan's default then (pipelining_utils.py at 9dec370); its chunks are assumed."""
_SHAPES = {model.name: model.shape for model in PUBLISHED}


def of_megatron(row: MegatronRow) -> float:
    """TFLOP/s per device as planned, what is computed again included."""
    fleet = Fleet(CATALOGUE["a100-80"], row.gpus, 8, 25e9)
    found = step_time(row.shape, fleet, row.split, row.batch, "fp16", STACKS["megatron-2021"])
    return found.hardware_flops / 1e12


def of_titan(row: TitanRow) -> StepTime:
    """The step as planned."""
    fleet = Fleet(CATALOGUE["h100hbm2e-96"], row.devices, 8, 50e9)
    return step_time(_SHAPES[row.model], fleet, row.split, row.batch, row.dtype, STACKS[row.stack])


def _table(head: list[str], rows: list[list[str]]) -> Iterator[str]:
    for row in (head, ["---"] * len(head), *rows):
        yield f"| {' | '.join(row)} |"
    yield ""


def _off(ours: float, published: float) -> str:
    return f"{ours / published - 1:+.1%}"


def megatron_lines() -> Iterator[str]:
    """Megatron's table, and the best constant beside it."""
    rows, errors = [], []
    for row in MEGATRON:
        ours, fitted = of_megatron(row), row.billions in MEGATRON_CALIBRATED
        errors += [] if fitted else [(row.tflops, abs(ours / row.tflops - 1))]
        split = f"{row.tp} x {row.pp} x {row.gpus // row.tp // row.pp}"
        note = "fitted" if fitted else ""
        rows.append([f"{row.billions:g}B", split, f"{row.tflops:g}", f"{ours:.1f}", _off(ours, row.tflops), note])
    yield f"**Time of a step**: {MEGATRON_SOURCE}. TFLOP/s per A100."
    yield ""
    yield from _table(["model", "tensor x pipeline x data", "published", "ours", "off", ""], rows)
    mean = sum(error for _, error in errors) / len(errors)
    worst = max(error for _, error in errors)
    of_ten, of_eight = (
        constant_error(rates) for rates in ([row.tflops for row in MEGATRON], [one for one, _ in errors])
    )
    yield (
        f"The eight others: mean error {mean:.1%}, worst {worst:.1%}. The best constant for all ten: {of_ten:.1%} of "
        f"these ten; for these eight: {of_eight:.1%}."
    )
    yield ""


def constant_error(rates: Sequence[float]) -> float:
    """Mean error of the constant that is best for these rates."""
    return min(sum(abs(c / 10 / rate - 1) for rate in rates) for c in range(1200, 1700)) / len(rates)


def of_zero(row: ZeroRow) -> list[float]:
    """GB of stages 1, 2 and 3 as planned."""
    return [by_paper(round(row.billions * 1e9), row.devices, stage).total / 1e9 for stage in (1, 2, 3)]


def zero_lines() -> Iterator[str]:
    """ZeRO's table."""
    yield f"**Memory of states**, GB: {ZERO_SOURCE}."
    yield ""
    rows = []
    for row in ZERO:
        ours = of_zero(row)
        pairs = [f"{published:g} / {size:.6g}" for published, size in zip(row.sizes, ours, strict=True)]
        worst = max(abs(size / published - 1) for published, size in zip(row.sizes, ours, strict=True))
        rows.append([f"{row.billions:g}B", str(row.devices), *pairs, f"{worst:.1%}"])
    yield from _table(["model", "devices", "stage 1: published / ours", "stage 2", "stage 3", "off at most"], rows)


def of_titan_gib(row: TitanRow) -> float:
    """GiB of the fullest device as planned."""
    count = micro_batches_of(row.batch, row.split)
    return split_memory(_SHAPES[row.model], row.split, count).total / 2**30


def titan_lines() -> Iterator[str]:
    """torchtitan's rows."""
    rows = []
    for row in TITAN:
        ours = of_titan(row).tokens_per_s / row.devices
        note = "fitted" if row.calibrated else "fp8: reported only" if row.dtype == "fp8" else ""
        rows.append([row.what, f"{row.tokens:,g}", f"{ours:,.0f}", _off(ours, row.tokens), note])
    yield f"**Tokens per second and device**: {TITAN_SOURCE}. H100 of 96 GB at 500 W."
    yield ""
    yield from _table(["job", "published", "ours", "off", ""], rows)
    yield "**Their memory**, GiB. What is computed again and what FSDP keeps is as in its code at 9dec370."
    yield ""
    rows = []
    for row in TITAN:
        gib = of_titan_gib(row)
        note = "missed" if abs(gib / row.memory_gib - 1) > 0.1 else ""
        rows.append([row.what, f"{row.memory_gib:g}", f"{gib:.1f}", _off(gib, row.memory_gib), note])
    yield from _table(["job", "published", "ours", "off", ""], rows)


TRACKED = (("none", 27.1), ("full", 10.1))
"""What is computed again, and GiB of the peak."""


def tracked_gib(recompute: str, shape: ModelShape | None = None) -> float:
    """GiB as planned, of what FSDPMemTracker ran; a device's context, which it does not see, left out."""
    shape = shape or replace(_SHAPES["llama2-13b"], sequence=2048)
    usage = split_memory(shape, ParallelSplit(dp=32, zero=3, recompute=recompute), 1)
    return (usage.total - CONTEXT_BYTES) / 2**30


def tracker_lines() -> Iterator[str]:
    """Torch's tracker of FSDP's memory on a fake mesh."""
    yield "**FSDP's memory as torch tracks it**, GiB: FSDPMemTracker, a 13B on 32 ranks of a fake mesh, measured with"
    yield "torch 2.13: 1 x 2048 tokens, bf16, AdamW, foreach=False; without a device's context, which it does not see."
    yield ""
    rows = []
    for recompute, gib in TRACKED:
        ours = tracked_gib(recompute)
        rows.append([f"recompute {recompute}", f"{gib:g}", f"{ours:.1f}", _off(ours, gib), ""])
    yield from _table(["job", "tracked", "ours", "off", ""], rows)


def failure_lines() -> Iterator[str]:
    """Llama 3's counts, and times to failure by size."""
    llama = failures.LLAMA3
    yield f"**Failures**: {llama.source}: {len(llama.counts)} counts, {llama.total} in all (published: 419), one per"
    yield f"{time_words(llama.mttf_s(llama.devices))}. Times to failure by {failures.TIMES_SOURCE}:"
    yield f"{failures.TWO_RATES}."
    yield ""
    rows = []
    for one in failures.TIMES_TO_FAILURE:
        ours_s, published_s = one.rate.mttf_s(one.gpus), one.hours * 3600
        others = (failures.OBSERVED, failures.PROJECTED, failures.LLAMA3)
        rows.append(
            [
                *(f"{one.gpus:,} GPUs", time_words(published_s), time_words(ours_s), _off(ours_s, published_s)),
                *(time_words(rate.mttf_s(one.gpus)) for rate in others),
                "both fitted to one rate" if one.rate is failures.OBSERVED else "",
            ]
        )
    rates = ("by the observed rate", "by the projected", "by Llama 3's", "")
    head = ["time to failure", "published", "ours", "off", *rates]
    yield from _table(head, rows)
    lost = llama3_time_lost()
    yield f"Time lost on 16,384 GPUs: published at most {lost['published_at_most']:.0%} (recalled), by our model of"
    yield f"restarts {lost['restarts']:.1%}. Nodes that fail once in 100,000 h, beside the lecture's formula:"
    yield ""
    cases = [(case, failures.forecast(case.nodes, case.hours)) for case in failures.SCENARIOS]
    told = [(f"{one.probability:.2%}", f"{one.lecture:.3g}", f"{one.expected:.3g}") for _, one in cases]
    rows = [[case.name, str(case.nodes), f"{case.hours:g}", *said] for (case, _), said in zip(cases, told, strict=True)]
    yield from _table(["", "nodes", "hours", "at least one", failures.LECTURE, "ours: expected"], rows)


TORCHFT = Cluster(300, 300 * 60.0, per_node=10, replica=10)
"""A failure every 60 s, 300 GPUs in 30 replicas (the latter recalled). Not known to us: the length of a step, 10 s
here, and the time until a replica is back, as measured with small processes."""


FT_HSDP = (
    ("100,000 GPUs, synchronous, 10 min per failure", 600.0, 0.44),
    ("100,000 GPUs, FT-HSDP, 3 min", 180.0, 0.80),
)
"""Stall of a failure and share of effective time. Source: abstract of arXiv 2602.00277."""
ELASWAVE_DEVICES, ELASWAVE_GAIN = 96, 1.60
"""Throughput relative to torchft's after failures. Source: abstract of arXiv 2510.00606."""


def ft_hsdp_share(stall_s: float) -> float:
    """Effective time by the projected rate of arXiv 2410.21680, each failure's stall counted in full, also where
    failures meet: both figures of the abstract follow from it. Our simulation lets such stalls overlap."""
    return 1 - stall_s / failures.PROJECTED.mttf_s(100_000)


def torchft_goodput(step_s: float, away_s: float | None = None) -> float:
    """torchft's case by simulation. away_s: until a replica is back, None: as measured with small processes."""
    cluster = replace(TORCHFT, step_s=step_s)
    times = recovery_times(())[0]
    policies = recovery_policies(times if away_s is None else times | {"torchft_replacement": away_s}, cluster)
    policy = next(one for one in policies if one.name == "torchft")
    return simulate(policy, cluster, 6 * 3600.0, 20, random.Random(0).random).goodput


def left_after_a_node(replicas: int) -> float:
    """Throughput without a node of eight, relative to a job that loses one of so many replicas with it."""
    return (1 - 8 / ELASWAVE_DEVICES) / (1 - 1 / replicas)


def endured_share(copies: int) -> float:
    """Failures that randomly placed copies endure, relative to replication in groups of as many: the expected number
    until some part has lost all copies is G (1 + 1/r) N^(1 - 1/r), in N / r groups r^(1/r) times that."""
    return float(copies ** (-1 / copies))


def goodput_lines() -> Iterator[str]:
    """Recovery policies against what their authors state."""
    policies = {policy.name: policy for policy in recovery_policies(recovery_times(())[0], TORCHFT)}
    gemini = policies["gemini"]
    broken_s = gemini.stall_s[1] + (gemini.provision_s or 0)
    yield "**Goodput and recovery**. torchft: how long its steps are and a replica is away is not known to us; 10 s"
    yield "and what we measured with small processes are taken first, then what would give the published figure."
    yield "GEMINI (SOSP 2023): its totals beside the sum of its parts, recalled. Oobleck: fitted to ReCycle's abstract."
    yield "FT-HSDP: 1 - stall / time between failures, by the projected rate. ElasWave: a replica's size is not known."
    yield ""
    recycle, oobleck = 1 - 0.1, 1 - 0.1 * OOBLECK_SLOWDOWN
    timed = (
        ("torchft, one failure per 60 s", torchft_goodput(10.0), "missed: step, time away assumed"),
        ("the same, replicas back after 60 s", torchft_goodput(10.0, 60.0), "assumed"),
        ("the same, steps of 15 s", torchft_goodput(15.0, 60.0), "assumed"),
    )
    rows = [[what, "82 %", f"{ours:.1%}", _off(ours, 0.82), note] for what, ours, note in timed]
    rows += [
        ["GEMINI, software failure", "7 min", time_words(gemini.stall_s[0]), _off(gemini.stall_s[0], 420), "recalled"],
        ["GEMINI, with a replacement", "12 min", time_words(broken_s), _off(broken_s, 720), "recalled"],
        ["ReCycle to Oobleck, at most", "1.46", f"{recycle / oobleck:.2f}", _off(recycle / oobleck, 1.46), "fitted"],
    ]
    for what, stall_s, share in FT_HSDP:
        ours = ft_hsdp_share(stall_s)
        rows.append([what, f"{share:.0%}", f"{ours:.1%}", _off(ours, share), ""])
    for replicas in (2, 3):
        ours = left_after_a_node(replicas)
        what = f"ElasWave to torchft, 96 NPUs, a node lost, {replicas} replicas"
        rows.append([what, f"{ELASWAVE_GAIN:.2f}", f"{ours:.2f}", _off(ours, ELASWAVE_GAIN), "replicas assumed"])
    least, most = (f"{endured_share(copies):.0%}" for copies in (3, 10))
    rows.append(["SPARe, failures endured, of replication's", "comparable", f"{least} to {most}", "", "3 to 10 copies"])
    yield from _table(["what", "published", "ours", "off", ""], rows)
    yield "Not compared: ElasWave's 1.35 over ReCycle: ours has ReCycle as its paper does, as fast as the devices that"
    yield "are left, so nothing can be faster. SPARe's 40 to 50 % shorter training at 600,000 GPUs: its abstract (arXiv"
    yield "2603.00357) has no rate of failures and no time of a restart. Failures that copies endure: our own count."
    yield ""


TABLES = (failure_lines, zero_lines, megatron_lines, titan_lines, tracker_lines, goodput_lines)


def all_lines() -> list[str]:
    """Every comparison."""
    return [line for table in TABLES for line in table()]


if __name__ == "__main__":
    print("\n".join(all_lines()))
