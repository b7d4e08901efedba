"""`everstep plan`: what a job will need, before it is started."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import click

from everstep.base.config import Config
from everstep.base.errors import ConfigError
from everstep.cost import device_memory, quantities
from everstep.cost.memory import (
    GB,
    JOB_BYTES,
    RUNS,
    STAGES,
    WORKER_BYTES,
    Model,
    Split,
    StageMemory,
    answers_by_paper,
    answers_of_ours,
)
from everstep.placement.tree import cover
from everstep.report.words import aligned

_PAPER = "ZeRO paper (arXiv 1910.02054): 2 + 2 + 12 bytes per parameter, one copy"
_OURS = "float32, by the layout of this product's memory"
_ADAM_BYTES = 8


@click.group()
def command() -> None:
    """Plan a job before it is started."""


@command.command(epilog=f"Devices known to --gpu: {', '.join(device_memory.MEMORY_GB)}.")
@click.argument("task", required=False)
@click.option("--params", metavar="N", help="Number of parameters in place of a task: 125M, 7.5B, 1.5T.")
@click.option("--workers", type=click.IntRange(min=1), help="Number of workers in total (1, or the task's).")
@click.option("--hosts", type=click.IntRange(min=1), default=1, show_default=True, help="Hosts that they are on.")
@click.option(
    "--zero",
    "stage",
    type=click.IntRange(0, 3),
    default=0,
    show_default=True,
    help="Stage of ZeRO: 1 divides the optimizer's state among the workers, 2 gradients too, 3 everything.",
)
@click.option("--copies", type=click.IntRange(min=1), help="Workers that hold each divided part (2).")
@click.option("--offload", metavar="none|cpu|DIR", default="none", help="Where the optimizer's state lies (none).")
@click.option("--gpu", metavar="NAME", help="Device that each worker has.")
@click.option("--memory", "memory_text", metavar="SIZE", help="Memory of each worker's device in its place: 80GiB.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def memory(
    task: str | None,
    params: str | None,
    workers: int | None,
    hosts: int,
    stage: int,
    copies: int | None,
    offload: str,
    gpu: str | None,
    memory_text: str | None,
    as_json: bool,
) -> int:
    """Show how much memory a worker needs to train TASK, or a model with so many parameters.

    Nothing is allocated: the model is counted on torch's meta device. Exit code: 0; 1 if it does not fit into the
    memory of the device that was named.
    """
    if (task is None) == (params is None):
        raise ConfigError("expected a TASK or --params, and not both: everstep plan memory --params 7.5B --workers 64")
    if gpu is not None and memory_text is not None:
        raise ConfigError("expected --gpu or --memory, got both")
    room = device_memory.memory_bytes(gpu) if gpu is not None else None
    room = quantities.parse_bytes(memory_text, "--memory") if memory_text is not None else room
    if task is None:
        count = quantities.parse_count(params or "", "--params")
        model, config, assumed = Model(count, 4.0 * count, _ADAM_BYTES * count), Config(), ["an optimizer like Adam"]
        workers = workers or 1
        assumed.append(f"{max(config.lanes, workers)} lanes")
    else:
        model, config, assumed = _counted(task, workers)
        workers = config.workers
    if copies is not None and copies > workers:
        raise ConfigError(f"--copies: expected at most one per worker ({workers}), got {copies}")
    split = _split(workers, max(config.lanes, workers), copies or 2, offload != "none", hosts)
    ours = answers_of_ours(model, split, room)
    paper = answers_by_paper(model.parameters, workers, split.offload, room)
    asked: dict[str, Any] = {"parameters": model.parameters, "workers": workers, "hosts": hosts, "zero": stage}
    asked |= {"copies": split.copies, "offload": offload, "lanes": split.lanes, "memory_bytes": room}
    first, second = (ours, paper) if task is not None else (paper, ours)
    if offload == "cpu":
        assumed.append("a device with memory of its own: on a CPU, offload=cpu changes nothing")
    if as_json:
        print(json.dumps(_to_dict(asked, first, second, paper is first, stage, assumed)))
    else:
        _print(asked, ours, paper, paper is first, assumed)
    return 1 if first[stage].fits is False else 0


def _counted(task: str, workers: int | None) -> tuple[Model, Config, list[str]]:
    """The task's model as the meta device counts it, with its config, and what was assumed."""
    from everstep.cli.job import Request, effective_config
    from everstep.cli.task_loading import make_task, parse_task
    from everstep.train.counted import count_task

    spec = parse_task(task)
    if spec.kind == "script":
        raise ConfigError(f"task {task!r} is a script: expected file.py:Class, module:Class, a ready task or --params")
    made = make_task(spec)
    layers = (("--workers", {"workers": workers}),) if workers is not None else ()
    config = made.config = effective_config(made.defaults, Request(layers))
    found = count_task(made, config.micro_batch)
    model = Model(
        found.parameters,
        found.parameter_bytes,
        found.optimizer_bytes,
        found.buffer_bytes,
        found.activation_bytes,
        WORKER_BYTES + JOB_BYTES / config.workers,
    )
    return model, config, [*found.assumed, "no checkpoints kept in memory"]


def _split(workers: int, lanes: int, copies: int, offload: bool, hosts: int) -> Split:
    runs = (range(k * lanes // workers, (k + 1) * lanes // workers) for k in range(workers))
    return Split(workers, lanes, max(len(cover(run, lanes)) for run in runs), copies, offload, hosts).checked()


def _to_dict(
    asked: dict[str, Any],
    first: Mapping[int, StageMemory],
    second: Mapping[int, StageMemory],
    paper_first: bool,
    stage: int,
    assumed: list[str],
) -> dict[str, Any]:
    """Results of one table, and those of the other below `ours` or `paper`."""

    def one(answers: Mapping[int, StageMemory], source: str) -> dict[str, Any]:
        stages = {str(k): asdict(found) for k, found in answers.items()}
        return {**stages[str(stage)], "source": source, "stages": stages}

    names = ((_PAPER, "ours", _OURS), (_OURS, "paper", _PAPER))
    source, other, its = names[0] if paper_first else names[1]
    return {"kind": "memory", **asked, **one(first, source), other: one(second, its), "assumed": assumed}


def _print(
    asked: Mapping[str, Any],
    ours: Mapping[int, StageMemory],
    paper: Mapping[int, StageMemory],
    paper_first: bool,
    assumed: list[str],
) -> None:
    workers = asked["workers"]
    print(
        f"{quantities.count_words(asked['parameters'])} parameters on {workers} worker{'s' * (workers > 1)}: "
        "memory of each in GB (10^9 bytes), by stage of ZeRO"
    )
    tables = [(_PAPER, paper), (f"{_OURS}, copies of divided parts: {asked['copies']}", ours)]
    for title, answers in tables if paper_first else reversed(tables):
        print()
        print(title)
        for line in aligned(_rows(answers)):
            print(line)
        print(f"data parallel, nothing offloaded: {answers[0].baseline_memory_gb:.4g}")
    print()
    print(f"jobs can run with stage {', '.join(map(str, RUNS))} today")
    for one in assumed:
        print(f"assumed: {one}")


def _rows(answers: Mapping[int, StageMemory]) -> list[list[str]]:
    first = answers[0]
    rows = [["", *(f"stage {k}" for k in STAGES)]]
    for kind in first.per_worker_bytes:
        if any(found.per_worker_bytes[kind] for found in answers.values()):
            rows.append([kind, *(f"{found.per_worker_bytes[kind] / GB:.3g}" for found in answers.values())])
    for kind in first.host_bytes:
        rows.append([f"{kind} (host)", *(f"{found.host_bytes[kind] / GB:.3g}" for found in answers.values())])
    rows.append(["together", *(f"{found.zero_memory_gb:.4g}" for found in answers.values())])
    rows.append(["times less", *(f"{found.memory_reduction_factor:.2f}" for found in answers.values())])
    if first.fits is not None:
        rows.append(["fits", *("yes" if found.fits else "no" for found in answers.values())])
        largest = (found.max_model_size_with_zero for found in answers.values())
        rows.append(["largest model", *(quantities.count_words(size or 0) for size in largest)])
    return rows
