"""`everstep plan time`: how long a step and a job take, by part."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any

import click
from click.core import ParameterSource

from everstep.cli.completing import complete_task
from everstep.cli.plan_inputs import (
    ASKED,
    Question,
    json_option,
    model_or_task,
    question_options,
    read_question,
    say,
    source_lines,
    table,
)
from everstep.cli.plan_splits import SPLIT_NAMES, fastest_split, read_split, split_options, zero_option
from everstep.cost.quantities import count_words, time_words
from everstep.cost.split_memory import SOURCE as MEMORY_SOURCE
from everstep.cost.split_memory import split_memory
from everstep.cost.step_time import StepTime, step_time
from everstep.placement.schedules import bubble_fraction, schedule, timeline

SOURCE = "roofline and alpha-beta model; matmul and passes calibrated, see stack"
MOST_PLAYED = 100_000
"""Operations of a pipeline that is played through."""


@click.command("time")
@click.argument("task", required=False, shell_complete=complete_task)
@question_options
@split_options
@zero_option
@json_option
def command(task: str | None, as_json: bool, **asked: Any) -> int:
    """Show how long a step and a job take. Times are by part; the last lines say whether the split fits into memory.

    A TASK is counted on torch's meta device; without TASK, options describe the model. Without a split, the fastest
    that fits is shown. Exit code 1: the model does not fit.
    """
    task = model_or_task(task, asked)
    if task is not None:
        from everstep.cli.plan_task import show_task_time

        return show_task_time(task, as_json, asked)
    question = read_question(asked)
    best = fastest_split(question) if _splits_nothing(click.get_current_context()) else None
    split, batch, assumed = best or read_split(question, asked)
    found = step_time(question.shape, question.fleet, split, batch, question.dtype, question.stack)
    played = None
    if split.pp * found.micro_batches * split.chunks <= MOST_PLAYED:
        ops = schedule(split.schedule, split.pp, found.micro_batches, split.chunks)
        played = bubble_fraction(timeline(ops, 1, 2))
    room = round(question.fleet.device.memory_gb * 1e9)
    usage = split_memory(
        question.shape, split, found.micro_batches, question.dtype, fused=question.stack.fused_attention
    )
    result: dict[str, Any] = {
        "kind": "time",
        **question.described(),
        "batch": batch,
        "assumed": list(assumed),
        "split": asdict(split),
        **asdict(found),
        "tflops": found.model_flops / 1e12,
        "tflops_with_recomputation": found.hardware_flops / 1e12,
        "bubble_played": played,
        **job_figures(question, found),
        "total_bytes": round(usage.total),
        "memory_bytes": room,
        "fits": usage.total <= room,
        "source": SOURCE,
        "sources": time_sources(question),
    }
    say(result, as_json, _lines(result))
    return 0 if result["fits"] else 1


def time_sources(question: Question) -> dict[str, str]:
    """Sources of all figures, by key."""
    times = (*(one.name for one in fields(StepTime)), "tflops", "tflops_with_recomputation", "days", "time")
    found = dict.fromkeys(times, SOURCE) | {"bubble_played": "the schedule of such a job, operation by operation"}
    return found | {"split": ASKED} | dict.fromkeys(("total_bytes", "memory"), MEMORY_SOURCE) | question.sources()


def _splits_nothing(context: click.Context) -> bool:
    """Whether no option says how to split."""
    return all(context.get_parameter_source(name) is ParameterSource.DEFAULT for name in SPLIT_NAMES)


def job_figures(question: Question, found: StepTime) -> dict[str, float | None]:
    """Days and dollars of the whole job, None without --tokens."""
    if question.tokens is None:
        return {"days": None, "dollars": None}
    seconds = question.tokens / found.tokens_per_s
    return {"days": seconds / 86400, "dollars": seconds / 3600 * question.fleet.device.price * question.fleet.count}


def _lines(result: dict[str, Any]) -> list[str]:
    split = result["split"]
    parts = (
        "matrices_s",
        "traffic_s",
        "tensor_s",
        "stages_s",
        "experts_s",
        "context_s",
        "bubble_s",
        "gradients_s",
        "update_s",
        "straggler_s",
    )
    played = result["bubble_played"]
    whole = (
        f"{count_words(result['tokens'])} tokens: {result['days']:.3g} days, {result['dollars']:,.0f} dollars"
        if result["tokens"]
        else "days and dollars: give --tokens"
    )
    return [
        f"{count_words(result['parameters'])} parameters on {result['devices']} x {result['device']}: "
        f"{split['tp']} tensor x {split['pp']} pipeline x {split['dp']} data parallel, batch {result['batch']}",
        f"a step takes {time_words(result['step_s'])}: {result['tflops']:.0f} TFLOP/s per device, "
        f"MFU {result['mfu']:.1%}, {result['tokens_per_s']:,.0f} tokens per second",
        *table(
            [
                [key.removesuffix("_s"), time_words(result[key]), f"{result[key] / result['step_s']:.1%}"]
                for key in parts
            ]
        ),
        f"bubble {result['bubble']:.1%} by the formula" + ("" if played is None else f", {played:.1%} played through"),
        whole,
        f"{'fits' if result['fits'] else 'does not fit'}: {result['total_bytes'] / 1e9:.3g} of "
        f"{result['memory_bytes'] / 1e9:g} GB per device" + (": plan recommend finds a split" * (not result["fits"])),
        *(f"assumed: {one}" for one in result["assumed"]),
        *source_lines(result["sources"]),
    ]
