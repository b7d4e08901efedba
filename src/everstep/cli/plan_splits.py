"""Splits of the devices for the commands of `everstep plan`: options, and the memory that usual splits need."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import click

from everstep.base.errors import ConfigError
from everstep.base.pipeline.schedule_table import KINDS, check_possible
from everstep.cli.plan_inputs import SIZES, Question, read_shape, read_stack, table
from everstep.cli.plan_runs import HowItRuns, how_it_runs
from everstep.cost.memory import GB
from everstep.cost.models import RECOMPUTE, ModelShape, nearest_model, shape_of
from everstep.cost.quantities import parse_count
from everstep.cost.split_memory import SOURCE, split_memory, usual_splits
from everstep.cost.split_search import ranked_splits
from everstep.cost.step_time import ParallelSplit, micro_batches_of

SPLIT_NAMES = ("tp", "pp", "micro_batch", "schedule", "chunks", "recompute", "sequence_parallel", "ep", "cp", "zero")
"""Parameters of the options that say how to split."""
zero_option = click.option("--zero", type=click.IntRange(0, 3), default=0, show_default=True, help="Stage of ZeRO.")


def split_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Options for one split of the devices, that of ZeRO aside."""
    count = click.IntRange(1, 10**5)
    for option in reversed(
        (
            click.option("--tp", type=count, default=1, show_default=True, help="Devices of tensor parallelism."),
            click.option("--pp", type=count, default=1, show_default=True, help="Stages of the pipeline."),
            click.option("--micro-batch", type=count, default=1, show_default=True, help="Sequences of a micro-batch."),
            click.option("--schedule", type=click.Choice(tuple(KINDS)), default="1f1b", help="Order of passes (1f1b)."),
            click.option("--chunks", type=count, default=1, show_default=True, help="Chunks of the model per stage."),
            click.option(
                "--recompute", type=click.Choice(RECOMPUTE), default="none", help="Activations computed again."
            ),
            click.option("--ep", type=count, default=1, show_default=True, help="Devices that divide the experts."),
            click.option("--cp", type=count, default=1, show_default=True, help="Devices that divide each sequence."),
            click.option("--sp", "sequence_parallel", is_flag=True, help="Sequence parallelism, with --tp."),
        )
    ):
        command = option(command)
    return command


def refuse_split_of_task(asked: Mapping[str, Any], known: Sequence[str]) -> None:
    """Raises: ConfigError for an option of a split, other than these, that is not as it is by default: jobs divide a
    task among workers and into stages, and the task says the rest."""
    plain = asdict(ParallelSplit())
    for name in SPLIT_NAMES:
        if name not in known and asked[name] != plain[name]:
            option = "--sp" if name == "sequence_parallel" else f"--{name.replace('_', '-')}"
            raise ConfigError(f"{option}: a task is planned data parallel and in stages (--pp): leave it out")


def splits_something(asked: Mapping[str, Any]) -> bool:
    """Whether an option of a split, ZeRO's stage aside, is not as it is by default."""
    plain = asdict(ParallelSplit())
    return any(asked[name] != plain[name] for name in SPLIT_NAMES if name != "zero")


def read_split(question: Question, asked: Mapping[str, Any]) -> tuple[ParallelSplit, int, tuple[str, ...]]:
    """The split that options ask for, all other devices data parallel, the batch, and what is assumed: a batch that was
    not given is made to fit. Raises: ConfigError, one line."""
    tp, pp = asked["tp"], asked["pp"]
    dp = max(1, question.fleet.count // (tp * pp * asked["cp"]))
    keys = ("micro_batch", "zero", "schedule", "chunks", "recompute", "sequence_parallel", "ep", "cp")
    split = ParallelSplit(tp, pp, dp, **{key: asked[key] for key in keys})
    _check_split(question.shape, question.fleet.count, split)
    each, batch = dp * split.micro_batch, question.batch
    if not question.batch_given:
        batch = max(1, round(batch / each)) * each
    if not micro_batches_of(batch, split):
        raise ConfigError(f"--batch: expected a multiple of {each} (data parallel x --micro-batch), got {batch}")
    check_possible(split.schedule, pp, micro_batches_of(batch, split), split.chunks, called="micro-batches")
    return split, batch, (*question.assumed, *rounded(question, batch))


def fastest_split(question: Question) -> tuple[ParallelSplit, int, tuple[str, ...]] | None:
    """The split that `plan recommend` shows first, its batch, and what is assumed with it; None if there is none."""
    batch = whole_batch(question)
    found = ranked_splits(question.shape, question.fleet, batch, question.dtype, question.stack)
    if not found:
        return None
    what = "the fastest split that fits" if found[0].fits else "the split that needs the least memory"
    return found[0].split, batch, (*question.assumed, *rounded(question, batch), f"{what}, as plan recommend finds it")


def whole_batch(question: Question) -> int:
    """The batch; one that was not given is a multiple of the devices."""
    if question.batch_given:
        return question.batch
    return max(1, round(question.batch / question.fleet.count)) * question.fleet.count


def rounded(question: Question, batch: int) -> list[str]:
    """The assumption about a batch that was made to fit; empty if it fitted."""
    if batch == question.batch:
        return []
    return [f"the batch rounded to {batch}, whole micro-batches of all data parallel devices"]


def _check_split(shape: ModelShape, devices: int, split: ParallelSplit) -> None:
    """Raises: ConfigError, one line, if the model or the devices cannot be divided so."""
    if split.sequence_parallel and split.tp == 1:
        raise ConfigError("--sp: expected --tp of at least 2 with it, got 1: the devices of --tp divide the sequence")
    if split.tp > 1 and shape.heads % split.tp:
        raise ConfigError(f"--tp: expected a divisor of the {shape.heads} heads, got {split.tp}")
    if split.pp * split.chunks > shape.layers:
        raise ConfigError(
            f"--pp: expected at most one part for each of the {shape.layers} layers, got {split.pp} stages of "
            f"{split.chunks} chunk{'s' * (split.chunks > 1)}"
        )
    if split.devices != devices:
        names, each = "--tp x --pp" + " x --cp" * (split.cp > 1), split.tp * split.pp * split.cp
        raise ConfigError(f"expected a multiple of {names} ({each}) devices, got {devices}")
    if shape.sequence % split.cp:
        raise ConfigError(f"--cp: expected a divisor of the sequence's {shape.sequence} tokens, got {split.cp}")
    if split.ep > 1 and (not shape.experts or shape.experts % split.ep):
        has = f"a divisor of the {shape.experts} experts" if shape.experts else "1 for a model without --experts"
        raise ConfigError(f"--ep: expected {has}, got {split.ep}")
    if split.replicas % split.ep:
        raise ConfigError(f"--ep: expected a divisor of the {split.replicas} data parallel devices, got {split.ep}")


def splits_of(
    named: Mapping[str, str], workers: int, asked: Mapping[str, Any], room: int | None
) -> dict[str, Any] | None:
    """Memory of a device for usual splits of a model, in mixed precision, with the options of `split_options`. named:
    `params`, or `model_name`, a Hugging Face directory. room: bytes of a device, None if unknown. `asked` in the
    result: the split that the options ask for. None: no published model is near. Raises: ConfigError, one line."""
    wanted = parse_count(named["params"], "--params") if "params" in named else None
    if wanted is not None and shape_of(wanted, nearest_model(wanted)) is None:
        return None
    assumed: list[str] = []
    given = dict.fromkeys(("params", "model_name", *SIZES))
    shape, near = read_shape({**given, **named}, assumed)
    keys = ("micro_batch", "schedule", "chunks", "recompute", "sequence_parallel", "ep", "cp")
    tp, pp, cp = asked["tp"], asked["pp"], asked["cp"]
    base = ParallelSplit(tp, pp, max(1, workers // (tp * pp * cp)), **{key: asked[key] for key in keys})
    _check_split(shape, workers, base)
    check_possible(base.schedule, pp, pp, base.chunks, called="micro-batches")
    fused = _keeps_no_scores(asked["stack_name"], assumed)
    assumed.append("one snapshot of the state in the host's memory")
    assumed.append(f"a batch of {near.batch} sequences, as {near.name}, or one micro-batch for each device")

    def needs(split: ParallelSplit, offload: bool) -> dict[str, Any]:
        count = max(1, round(near.batch / (split.dp * split.micro_batch)))
        usage = split_memory(shape, split, count, fused=fused, offload=offload, snapshots=1)
        return {
            "split": asdict(split),
            "per_worker_bytes": {kind: round(size) for kind, size in usage.device.items()},
            "host_bytes": {kind: round(size) for kind, size in usage.host.items()},
            "total_bytes": round(usage.total),
            "fits": None if room is None else usage.total <= room,
            "max_model_size": None if room is None else usage.largest(room, shape.parameters),
            **how_it_runs(split, count, zero={"zero.offload": "cpu"} if offload else {}).about(),
        }

    found = {name: needs(split, offload) for name, (split, offload) in usual_splits(shape, base).items()}
    mine = needs(replace(base, zero=asked["stage"]), asked["offload"] != "none")
    return {"splits": found, "asked": mine, "source": SOURCE, "assumed": assumed, "parameters": shape.parameters}


def _keeps_no_scores(stack: str | None, assumed: list[str]) -> bool:
    """Whether the attention of a stack keeps no scores. Raises: ConfigError."""
    if stack is None:
        assumed.append("an attention that keeps no scores; give --stack as for plan time, to see the same memory")
        return True
    return read_stack(stack).fused_attention


def asked_line(result: Mapping[str, Any]) -> str:
    """The split that was asked for, in one sentence."""
    one = result["asked"]
    split = one["split"]
    words = f"{split['tp']} tensor x {split['pp']} pipeline x {split['dp']} data parallel"
    words += "".join(f", {key}{split[key]}" for key in ("cp", "ep") if split[key] > 1)
    words += f", ZeRO {split['zero']}, micro-batch {split['micro_batch']}"
    fits = "" if one["fits"] is None else ", which fits" if one["fits"] else ", which does not fit"
    return f"the split asked for ({words}): {one['total_bytes'] / GB:.4g} GB with activations{fits}"


def split_lines(result: Mapping[str, Any]) -> list[str]:
    """`splits_of` for people."""
    found = result["splits"]
    kinds = list(next(iter(found.values()))["per_worker_bytes"])
    asked = next(iter(found.values()))["split"]
    given = " x ".join(f"{key}{asked[key]}" for key in ("tp", "pp", "cp", "ep") if asked[key] > 1)
    rows = [["GB, mixed precision", *kinds, "together", "host", "fits", "jobs run it, in float32"]]
    for name, one in found.items():
        sizes = [one["per_worker_bytes"][kind] for kind in kinds]
        host = sum(one["host_bytes"].values())
        fits = "" if one["fits"] is None else "yes" if one["fits"] else "no"
        runs = HowItRuns(one["runs_with"]).words
        rows.append(
            [
                f"{given} {name}".strip(),
                *(f"{size / GB:.3g}" for size in (*sizes, one["total_bytes"], host)),
                fits,
                runs,
            ]
        )
    return [
        *table(rows),
        *(f"jobs do not run {name}: {one['runs_not']}" for name, one in found.items() if one["runs_not"]),
        *(f"assumed: {one}" for one in result["assumed"]),
        f"source: {result['source']}",
    ]
