"""`everstep plan time TASK` and `plan recommend TASK`: a task is counted on torch's meta device, one lane of it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from everstep.base.below import write_atomically
from everstep.base.config import Config, load_config
from everstep.base.errors import ConfigError
from everstep.base.pipeline.schedule_table import check_possible
from everstep.cli.plan_inputs import (
    ASKED,
    COUNTED,
    SIZES,
    choose_stack,
    device_sources,
    read_fleet,
    say,
    source_lines,
    table,
)
from everstep.cli.plan_splits import refuse_split_of_task
from everstep.cost import quantities
from everstep.cost.memory import WORKER_BYTES, Model
from everstep.cost.quantities import count_words, time_words
from everstep.cost.split_memory import CONTEXT_BYTES
from everstep.cost.step_time import Fleet, SoftwareStack
from everstep.cost.task_time import CountedWork, TaskSplit, task_memory, task_step

SHOWN = 10
_PARTS = ("compute", "bubble", "exchange", "alone")
SOURCE = "operations and activations of one lane, counted on torch's meta device; roofline and alpha-beta model"
_MEMORY = "the layout of this product's memory; a device's context and worker's memory are assumed"
_LAUNCHES = "nothing for launches of kernels: lanes of less than a millisecond take longer"
_PRECISIONS = ("fp32", "bf16", "fp16")
"""Types of matrix products that jobs have."""
_MODEL_OPTIONS = ("params", "model_name", *SIZES, "tokens")


@dataclass(frozen=True)
class TaskQuestion:
    """A task that was counted, and the devices. samples: of the whole job, None if they are not known."""

    name: str
    work: CountedWork
    units: int
    config: Config
    fleet: Fleet
    dtype: str
    stack: SoftwareStack
    samples: int | None
    assumed: tuple[str, ...]


def read_task_question(task: str, asked: Mapping[str, Any]) -> TaskQuestion:
    """Raises: ConfigError, one line."""
    given = [name for name in _MODEL_OPTIONS if asked[name] is not None]
    if given:
        option = f"--{given[0].removesuffix('_name').replace('_', '-')}"
        if option == "--tokens":
            raise ConfigError("--tokens: a TASK has samples: give --samples")
        raise ConfigError(f"expected a TASK, or a model by {option}, got both")
    from everstep.cli.job import Request, effective_config
    from everstep.cli.task_loading import make_task, parse_task
    from everstep.train.counted import count_task

    spec = parse_task(task)
    if spec.kind == "script":
        raise ConfigError(f"task {task!r} is a script: expected file.py:Class, module:Class or a ready task")
    assumed: list[str] = []
    fleet, made = read_fleet(asked, assumed), make_task(spec)
    config = made.config = effective_config(made.defaults, Request(()))
    if asked["batch"] is not None:
        lanes, rest = divmod(asked["batch"], config.micro_batch)
        if rest or not lanes:
            raise ConfigError(f"--batch: expected a multiple of the micro-batch {config.micro_batch}")
        config = made.config = effective_config(made.defaults, Request((("--batch", {"lanes": lanes}),)))
    found = count_task(made, config.micro_batch)
    if not found.forward_flops:
        raise ConfigError(f"the operations of {task} cannot be counted: {'; '.join(found.assumed) or 'there are none'}")
    dtype = config.passes if asked["dtype"] is None else asked["dtype"]
    if dtype not in fleet.device.peak:
        raise ConfigError(
            f"--dtype: expected one of {', '.join(fleet.device.peak)} on {fleet.device.name}, got {dtype[:40]!r}"
        )
    model = Model(
        *(found.parameters, found.parameter_bytes, found.optimizer_bytes, found.buffer_bytes, found.activation_bytes),
        CONTEXT_BYTES + WORKER_BYTES,
    )
    stack = choose_stack(asked["stack_name"], fleet.device, assumed)
    samples = quantities.parse_count(asked["samples"], "--samples") if asked["samples"] is not None else None
    work = CountedWork(found.forward_flops, config.micro_batch, model)
    return TaskQuestion(
        task, work, found.units, config, fleet, dtype, stack, samples, (*assumed, *found.assumed, _LAUNCHES)
    )


def show_task_time(task: str, as_json: bool, asked: Mapping[str, Any]) -> int:
    """Print how long a step of a task takes, by part."""
    question = read_task_question(task, asked)
    refuse_split_of_task(asked, ("pp", "schedule", "chunks"))
    split = _split(question, asked["pp"], asked["chunks"])
    check_possible(asked["schedule"], split.stages, -(-split.lanes // split.pool), split.chunks, called="micro-batches")
    result: dict[str, Any] = {"kind": "time", **_described(question), **_row(question, split)}
    say(result, as_json, [*_head(result), *_parts(result), *_tail(result)])
    return 0 if result["fits"] else 1


def recommend_for_task(task: str, write: Path | None, as_json: bool, asked: Mapping[str, Any]) -> int:
    """Print the ways to divide a task's devices into stages, the fastest that fits first."""
    question = read_task_question(task, asked)
    count = question.fleet.count
    stages = [n for n in range(1, min(count, question.units) + 1) if count % n == 0]
    splits = [_split(question, n) for n in stages if count // n <= question.config.lanes]
    if not splits:
        raise ConfigError(
            f"--gpus: expected at most {question.config.lanes * question.units} ({question.config.lanes} lanes x "
            f"{question.units} units), got {count}"
        )
    rows = [_row(question, split) for split in splits]
    rows.sort(key=lambda row: (not row["fits"], row["step_s"] if row["fits"] else row["total_bytes"]))
    for row, other in pairwise(rows):
        row["why"] = _why(row, other)
    result: dict[str, Any] = {"kind": "recommend", **_described(question), "fits": rows[0]["fits"]}
    result |= {"best": rows[:SHOWN], "written": None}
    said = [] if write is None or not rows[0]["fits"] else _write(question, rows[0], write, result)
    say(result, as_json, [*_head(result), *_ranking(result), *_tail(result), *said])
    return 0 if rows[0]["fits"] and (write is None or result["written"]) else 1


def _split(question: TaskQuestion, stages: int, chunks: int = 1) -> TaskSplit:
    count, lanes = question.fleet.count, question.config.lanes
    if stages * chunks > question.units:
        raise ConfigError(
            f"--pp: expected at most one part for each of the {question.units} units of the task, got {stages} stages "
            f"of {chunks} chunk{'s' * (chunks > 1)}"
        )
    if count % stages:
        raise ConfigError(f"expected a multiple of --pp ({stages}) devices, got {count}")
    if count // stages > lanes:
        raise ConfigError(
            f"--gpus: expected at most one device of each stage per lane ({lanes}), got {count // stages}"
        )
    return TaskSplit(count // stages, stages, lanes, chunks)


def _row(question: TaskQuestion, split: TaskSplit) -> dict[str, Any]:
    fleet, work = question.fleet, question.work
    parts, usage = task_step(work, fleet, split, question.dtype, question.stack), task_memory(work, split)
    batch = split.lanes * work.samples
    rate = batch / parts.step_s
    flops = work.flops * split.lanes / parts.step_s / fleet.count
    seconds = None if question.samples is None else question.samples / rate
    return {
        "split": asdict(split),
        **asdict(parts),
        "step_s": parts.step_s,
        "samples_per_s": rate,
        "tflops": flops / 1e12,
        "mfu": flops / fleet.device.peak[question.dtype],
        "per_device_bytes": {kind: round(size) for kind, size in usage.device.items()},
        "total_bytes": round(usage.total),
        "fits": usage.total <= fleet.device.memory_gb * 1e9,
        "days": None if seconds is None else seconds / 86400,
        "dollars": None if seconds is None else seconds / 3600 * fleet.device.price * fleet.count,
        "runs": question.dtype in _PRECISIONS,
        "why": "",
    }


def _described(question: TaskQuestion) -> dict[str, Any]:
    fleet = question.fleet
    return {
        "task": question.name,
        "parameters": question.work.model.parameters,
        "forward_flops_per_lane": question.work.forward_flops,
        "units": question.units,
        "device": fleet.device.name,
        "devices": fleet.count,
        "memory_bytes": round(fleet.device.memory_gb * 1e9),
        "device_sources": dict(fleet.device.sources),
        "batch": question.config.lanes * question.work.samples,
        "dtype": question.dtype,
        "stack": asdict(question.stack),
        "samples": question.samples,
        "assumed": list(question.assumed),
        "source": SOURCE,
        "sources": _sources(question),
    }


def _sources(question: TaskQuestion) -> dict[str, str]:
    """Sources of all figures, by key."""
    names = ("devices", "batch", "samples", "split", "lanes", "micro_batch")
    found = dict.fromkeys(names, ASKED) | {"stack": question.stack.calibrated, "runs_with": ASKED}
    found |= dict.fromkeys(("parameters", "units", "forward_flops_per_lane"), COUNTED)
    times = (*(f"{part}_s" for part in (*_PARTS, "step")), "samples_per_s", "tflops", "mfu", "days", "time")
    found |= dict.fromkeys(times, SOURCE) | dict.fromkeys(("total_bytes", "per_device_bytes", "memory"), _MEMORY)
    return found | device_sources(question.fleet.device)


def _why(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    if one["fits"] != other["fits"]:
        return f"it fits: the next needs {other['total_bytes'] / 1e9:.3g} GB"
    if not one["fits"]:
        return f"it needs {(other['total_bytes'] - one['total_bytes']) / 1e9:.3g} GB less"
    gains = {part: other[f"{part}_s"] - one[f"{part}_s"] for part in _PARTS}
    part = max(gains, key=lambda name: gains[name])
    return f"{1 - one['step_s'] / other['step_s']:.1%} shorter, most of it in: {part}"


def _write(question: TaskQuestion, row: Mapping[str, Any], path: Path, result: dict[str, Any]) -> list[str]:
    """Write the config with which jobs run the best split, if they have such products; what to say about it."""
    split = row["split"]
    if not row["runs"]:
        return [f"not written: jobs have matrix products in {', '.join(_PRECISIONS)}, not in {question.dtype}"]
    config = {"workers": question.fleet.count, "stages": split["stages"], "lanes": split["lanes"], "device": "auto"}
    if question.dtype != question.config.precision:
        config["precision"] = question.dtype
    load_config([(os.fspath(path), config | {"device": "cuda"})])
    header = f"# everstep plan recommend {question.name}: {question.fleet.count} x {question.fleet.device.name}\n"
    write_atomically(path, header + "".join(f"{key}: {value}\n" for key, value in config.items()), None)
    result["written"] = {"path": os.fspath(path), "config": config, "step_s": row["step_s"], "source": SOURCE}
    return [f"written: {path}"]


def _head(result: Mapping[str, Any]) -> list[str]:
    return [
        f"{result['task']}: {count_words(result['parameters'])} parameters on {result['devices']} x "
        f"{result['device']}, batch {result['batch']}, {result['dtype']}"
    ]


def _parts(row: Mapping[str, Any]) -> list[str]:
    split, seconds = row["split"], {part: row[f"{part}_s"] for part in _PARTS}
    rows = [[part, time_words(each), f"{each / row['step_s']:.1%}"] for part, each in seconds.items()]
    return [
        f"{split['pool']} data parallel x {split['stages']} stage{'s' * (split['stages'] > 1)}, {split['lanes']} lanes",
        f"a step takes {time_words(row['step_s'])}: {row['samples_per_s']:,.0f} samples per second, "
        f"MFU {row['mfu']:.1%}",
        *table(rows),
        "days and dollars: give --samples"
        if row["days"] is None
        else f"{row['days']:.3g} days, {row['dollars']:,.0f} dollars",
        f"{'fits' if row['fits'] else 'does not fit'}: {row['total_bytes'] / 1e9:.3g} GB per device",
    ]


def _ranking(result: Mapping[str, Any]) -> list[str]:
    rows: list[Sequence[str]] = [["data x stages", "GB", "step", "MFU", "days", "dollars", "before the next, because"]]
    for one in result["best"]:
        name = f"{one['split']['pool']} x {one['split']['stages']}" + ("" if one["fits"] else " (does not fit)")
        job = ("" if one[key] is None else f"{one[key]:,.3g}" for key in ("days", "dollars"))
        rows.append(
            [name, f"{one['total_bytes'] / 1e9:.3g}", time_words(one["step_s"]), f"{one['mfu']:.1%}", *job, one["why"]]
        )
    return table(rows)


def _tail(result: Mapping[str, Any]) -> list[str]:
    return [
        *(f"assumed: {one}" for one in result["assumed"]),
        *source_lines(result["sources"]),
    ]
