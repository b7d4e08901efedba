"""`everstep plan usual`: the questions that most people ask, answered by the formulas of the other commands."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any, NamedTuple

import click

from everstep.cli.plan_inputs import json_option, recovery_times, say
from everstep.cost import failures
from everstep.cost.catalogue import CATALOGUE
from everstep.cost.goodput import Cluster, recovery_policies
from everstep.cost.memory import STAGES, answers_by_paper
from everstep.cost.mixed import equal_speed, lanes_by_speed, mixed_speed
from everstep.cost.models import PUBLISHED, ModelShape
from everstep.cost.quantities import count_words, time_words
from everstep.cost.split_memory import SOURCE as MEMORY_SOURCE
from everstep.cost.split_search import RankedSplit, ranked_splits
from everstep.cost.step_time import STACKS, Fleet, ParallelSplit, step_time

_SHAPES = {model.name: model.shape for model in PUBLISHED}
_STACK = STACKS["megatron-2021"]
_A100 = CATALOGUE["a100-80"]
_FOUR_NODES = Fleet(_A100, 32, 8, _A100.network)
_BATCH = 1024
_GB, _DAY_S = 1e9, 86400.0
SAVE_RATE = 232e6
"""Bytes per second that one worker writes of a checkpoint. Source: bench/README.md, 928 MB/s with four workers on one
disk of a 2-core machine."""
_TIME = f"everstep plan time, efficiency of {_STACK.name} ({_STACK.calibrated})"


class UsualAnswer(NamedTuple):
    """A question, its answer in words, the figures in it (bytes and seconds), and where they come from."""

    question: str
    answer: str
    figures: dict[str, Any]
    source: str


@click.command("usual")
@json_option
def command(as_json: bool) -> int:
    """Answer the usual questions. They are about 13B on 32 A100s, 175B on 1,024, checkpoints and recovery."""
    answers = usual_answers()
    result: dict[str, Any] = {
        "kind": "usual",
        "answers": [one._asdict() for one in answers],
        "fits": answers[0].figures["fits"],
        "source": "the formulas of everstep plan memory, time, recommend and goodput",
        "assumed": [
            f"sequences of {_SHAPES['gpt3-13b'].sequence}, a batch of {_BATCH}, bf16, {_A100.network * 8 / 1e9:g} Gb/s "
            "between nodes",
            "shapes of GPT-3 (arXiv 2005.14165, recalled)",
        ],
    }
    say(result, as_json, usual_lines(answers))
    return 0


def usual_lines(answers: list[UsualAnswer]) -> list[str]:
    """Answers for people."""
    lines = []
    for one in answers:
        lines += [one.question, f"  {one.answer}", f"  ({one.source})"]
    return lines


def usual_answers() -> list[UsualAnswer]:
    """All answers, in the order in which they are shown."""
    best = ranked_splits(_SHAPES["gpt3-13b"], _FOUR_NODES, _BATCH, "bf16", _STACK)
    return [
        _fits(best),
        _arithmetic(),
        _days(best[0]),
        _efficiency(),
        _checkpoint(),
        _recovery(best[0]),
        _twice(),
        _large(),
        _mixed(),
    ]


def _words(one: RankedSplit) -> str:
    split = one.split
    parts = [f"{split.tp} tensor x {split.pp} pipeline x {split.dp} data parallel"]
    parts += [f"ZeRO {split.zero}"] * bool(split.zero) + [f"recompute {split.recompute}"] * (split.recompute != "none")
    return ", ".join(parts)


def _fits(best: list[RankedSplit]) -> UsualAnswer:
    one = best[0]
    return UsualAnswer(
        "Does a 13B model train on 4 nodes of 8 A100-80?",
        f"{'Yes' if one.fits else 'No'}: {_words(one)} needs {one.memory.total / _GB:.3g} of 80 GB and is the fastest; "
        f"plain data parallelism would need {16 * _SHAPES['gpt3-13b'].parameters / _GB:.3g} GB for its states alone.",
        {"fits": one.fits, "split": asdict(one.split), "total_bytes": round(one.memory.total)},
        MEMORY_SOURCE,
    )


def _arithmetic() -> UsualAnswer:
    count = 13 * 10**9
    return UsualAnswer(
        "How much memory do the states of 13B parameters take?",
        f"In float32 4 bytes each for parameter and gradient and 8 for Adam: {16 * count / _GB:.0f} GB. In mixed "
        f"precision 2 + 2 + 12 bytes: {16 * count / _GB:.0f} GB, too. Over 32 devices with ZeRO 3 it is "
        f"{16 * count / 32 / _GB:.3g} GB each.",
        {"float32_bytes": 16 * count, "mixed_bytes": 16 * count, "zero3_bytes_per_device": 16 * count / 32},
        "ZeRO paper (arXiv 1910.02054), section 3",
    )


def _days(best: RankedSplit) -> UsualAnswer:
    small = _SHAPES["gpt3-6.7b"]
    alone = step_time(small, Fleet(_A100, 1, 1, _A100.network), ParallelSplit(), 64, "bf16", _STACK)
    three_weeks = 21 * _DAY_S * alone.tokens_per_s
    tokens = 5 * _DAY_S * best.time.tokens_per_s
    return UsualAnswer(
        "How many tokens in under 5 days, beside a 7B model on one device for 3 weeks?",
        f"{count_words(tokens)} tokens of the 13B in 5 days ({best.time.tokens_per_s:,.0f} per second). "
        f"One device does {count_words(three_weeks)} of the 7B in 3 weeks, and cannot hold its "
        f"{16 * small.parameters / _GB:.3g} GB of states without offloading; "
        f"the 13B sees as many in {time_words(three_weeks / best.time.tokens_per_s)}.",
        {
            "tokens": tokens,
            "tokens_per_s": best.time.tokens_per_s,
            "one_device_tokens": three_weeks,
            "same_tokens_s": three_weeks / best.time.tokens_per_s,
        },
        _TIME,
    )


def _efficiency() -> UsualAnswer:
    shape = _SHAPES["gpt3-6.7b"]

    def rate(count: int) -> float:
        fleet = Fleet(_A100, count, min(8, count), _A100.network)
        split = ParallelSplit(1, 1, count, zero=3 if count > 1 else 0)
        return step_time(shape, fleet, split, 8 * count, "bf16", _STACK).tokens_per_s / count

    shares = {count: rate(count) / rate(1) for count in (2, 8, 32)}
    said = ", ".join(f"{share:.0%} with {count}" for count, share in shares.items())
    return UsualAnswer(
        "How efficient are 2, 8 and 32 devices?",
        f"7B, ZeRO 3, 8 sequences per device and step: {said}, nothing overlapped. 90 % is asked for "
        f"8, 80 % for 32: {'both hold' if shares[8] >= 0.9 and shares[32] >= 0.8 else 'not both hold'}.",
        {str(count): share for count, share in shares.items()},
        _TIME,
    )


def _checkpoint() -> UsualAnswer:
    size = 14 * _SHAPES["gpt3-13b"].parameters
    seconds = size / SAVE_RATE / 32
    return UsualAnswer(
        "How long does a checkpoint of the 13B take?",
        f"{size / _GB:.0f} GB (parameters and Adam's states) by 32 workers that write "
        f"{SAVE_RATE / 1e6:.0f} MB/s each: {time_words(seconds)}, {'under' if seconds < 120 else 'over'} 2 minutes. "
        "Training goes on meanwhile.",
        {"size_bytes": size, "seconds": seconds, "bytes_per_s_per_worker": SAVE_RATE},
        "bench/README.md: 928 MB/s with four workers",
    )


def _recovery(best: RankedSplit) -> UsualAnswer:
    states = sum(best.memory.device[kind] for kind in ("parameters", "gradients", "optimizer"))
    cluster = Cluster(
        32,
        _A100.mtbf_h * 3600,
        step_s=best.time.step_s,
        state_bytes=states,
        link=_A100.network,
        shares=failures.LLAMA3.shares,
    )
    policy = recovery_policies(recovery_times(())[0], cluster)[0]
    worst = max(policy.stall_s)
    return UsualAnswer(
        "How long does a recovery take?",
        f"{time_words(policy.stall_s[0])} after a process dies, {time_words(worst)} after a host, most of it the "
        f"step of {time_words(best.time.step_s)} that is computed again; a restarted worker is back after "
        f"{time_words(policy.back_s)}: {'under' if worst < 300 else 'over'} 5 minutes.",
        {"process_s": policy.stall_s[0], "host_s": worst, "back_s": policy.back_s, "step_s": best.time.step_s},
        policy.source,
    )


def _twice() -> UsualAnswer:
    room = round(_A100.memory_gb * _GB)
    found = answers_by_paper(13 * 10**9, 32, False, room)
    largest = {stage: found[stage].max_model_size_with_zero or 0 for stage in STAGES}
    said = ", ".join(f"stage {stage} {count_words(size)}" for stage, size in largest.items())
    least = next(stage for stage in STAGES if largest[stage] >= 2 * largest[0])
    return UsualAnswer(
        "Can the model be twice as large with ZeRO?",
        f"Yes: largest model on 32 devices of 80 GB, states alone: {said}. Stage {least} is more than twice stage 0.",
        {str(stage): size for stage, size in largest.items()},
        "ZeRO paper (arXiv 1910.02054): 2 + 2 + 12 bytes per parameter",
    )


def _large() -> UsualAnswer:
    shape: ModelShape = _SHAPES["gpt3-175b"]
    best = ranked_splits(shape, replace(_FOUR_NODES, count=1024), 1536, "bf16", _STACK)[0]
    days = 300e9 / best.time.tokens_per_s / _DAY_S
    return UsualAnswer(
        "And 175B on 1,024?",
        f"{_words(best)}: {best.memory.total / _GB:.3g} GB each, {time_words(best.time.step_s)} per step of 1,536 "
        f"sequences, {best.time.model_flops / 1e12:.0f} TFLOP/s per device, 300B tokens in {days:.0f} days.",
        {"fits": best.fits, "split": asdict(best.split), "step_s": best.time.step_s, "days": days},
        _TIME,
    )


def _mixed() -> UsualAnswer:
    fast, slow, lanes = _A100.peak["fp16"], CATALOGUE["v100-32"].peak["fp16"], 256
    speeds = [fast] * 16 + [slow] * 16
    shared = lanes_by_speed(speeds, lanes)
    gain = mixed_speed(speeds, shared) / equal_speed(speeds, lanes)
    return UsualAnswer(
        "What do 16 A100 and 16 V100 in one job reach?",
        f"With {lanes} lanes by speed an A100 takes {max(shared)} and a V100 {min(shared)}: {gain:.2f} times as fast "
        "as with equal shares. The bits are those of the job with equal shares only if all devices compute the same "
        "bits, which different types do not.",
        {"lanes_fast": max(shared), "lanes_slow": min(shared), "gain": gain},
        f"peaks of the catalogue ({_A100.sources['peak']})",
    )
