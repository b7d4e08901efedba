"""`everstep plan time`: how long a step and a job take, by part."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from everstep.base.errors import ConfigError
from everstep.base.pipeline.schedule_table import KINDS, check_possible
from everstep.cli.plan_inputs import Question, check_split, json_option, question_options, read_question, say, table
from everstep.cost.models import RECOMPUTE
from everstep.cost.quantities import count_words, time_words
from everstep.cost.step_time import ParallelSplit, StepTime, micro_batches_of, step_time
from everstep.placement.schedules import bubble_fraction, schedule, timeline

SOURCE = "roofline and alpha-beta model; matmul and passes calibrated, see stack"
MOST_PLAYED = 100_000
"""Operations of a pipeline that is played through."""


def split_options(command: Any) -> Any:
    """Options for one split of the devices."""
    count = click.IntRange(1, 10**5)
    for option in reversed(
        (
            click.option("--tp", type=count, default=1, show_default=True, help="Devices of tensor parallelism."),
            click.option("--pp", type=count, default=1, show_default=True, help="Stages of the pipeline."),
            click.option("--micro-batch", type=count, default=1, show_default=True, help="Sequences of a micro-batch."),
            click.option("--zero", type=click.IntRange(0, 3), default=0, show_default=True, help="Stage of ZeRO."),
            click.option("--schedule", type=click.Choice(tuple(KINDS)), default="1f1b", show_default=True),
            click.option("--chunks", type=count, default=1, show_default=True, help="Chunks of the model per stage."),
            click.option("--recompute", type=click.Choice(RECOMPUTE), default="none", show_default=True),
            click.option("--sp", "sequence_parallel", is_flag=True, help="Sequence parallelism beside --tp."),
        )
    ):
        command = option(command)
    return command


def read_split(question: Question, asked: dict[str, Any]) -> tuple[ParallelSplit, int]:
    """The split that options ask for, all other devices data parallel, and the batch: one that was not given is made
    to fit. Raises: ConfigError, one line."""
    tp, pp = asked["tp"], asked["pp"]
    dp = max(1, question.fleet.count // (tp * pp))
    keys = ("micro_batch", "zero", "schedule", "chunks", "recompute", "sequence_parallel")
    split = ParallelSplit(tp, pp, dp, **{key: asked[key] for key in keys})
    check_split(question.shape, question.fleet, split)
    each, batch = dp * split.micro_batch, question.batch
    if not question.batch_given:
        batch = max(1, round(batch / each)) * each
    if not micro_batches_of(batch, split):
        raise ConfigError(f"--batch: expected a multiple of {each} (data parallel x --micro-batch), got {batch}")
    check_possible(split.schedule, pp, micro_batches_of(batch, split), split.chunks, called="micro-batches")
    return split, batch


@click.command("time")
@question_options
@split_options
@json_option
def command(as_json: bool, **asked: Any) -> int:
    """Show how long a step takes, by part, and a job of so many tokens."""
    question = read_question(asked)
    split, batch = read_split(question, asked)
    found = step_time(question.shape, question.fleet, split, batch, question.dtype, question.stack)
    played = None
    if split.pp * found.micro_batches * split.chunks <= MOST_PLAYED:
        ops = schedule(split.schedule, split.pp, found.micro_batches, split.chunks)
        played = bubble_fraction(timeline(ops, 1, 3 if split.recompute == "full" else 2))
    result: dict[str, Any] = {
        "kind": "time",
        **question.described(),
        "batch": batch,
        "split": asdict(split),
        **asdict(found),
        "tflops": found.model_flops / 1e12,
        "tflops_with_recomputation": found.hardware_flops / 1e12,
        "bubble_played": played,
        **job_figures(question, found),
        "source": SOURCE,
    }
    say(result, as_json, _lines(result))
    return 0


def job_figures(question: Question, found: StepTime) -> dict[str, float | None]:
    """Days and dollars of the whole job, None without --tokens."""
    if question.tokens is None:
        return {"days": None, "dollars": None}
    seconds = question.tokens / found.tokens_per_s
    return {"days": seconds / 86400, "dollars": seconds / 3600 * question.fleet.device.price * question.fleet.count}


def _lines(result: dict[str, Any]) -> list[str]:
    split = result["split"]
    parts = ("matrices_s", "traffic_s", "tensor_s", "stages_s", "bubble_s", "gradients_s", "update_s")
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
        *(f"assumed: {one}" for one in result["assumed"]),
        f"source: {result['source']}",
    ]
