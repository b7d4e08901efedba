"""`everstep plan`: what a job will need, before it is started."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import click

from everstep.base.config import Config, load_config, parse_set
from everstep.base.config_keys import OFFLOAD
from everstep.base.errors import ConfigError, nearest
from everstep.cli import plan_failures, plan_goodput, plan_recommend, plan_time, plan_usual
from everstep.cli.plan_config_dir import is_config_dir, shape_of_config
from everstep.cli.plan_inputs import json_option
from everstep.cli.plan_splits import split_lines, split_options, splits_of
from everstep.cost import quantities
from everstep.cost.catalogue import CATALOGUE, device_named
from everstep.cost.memory import (
    GB,
    JOB_BYTES,
    RUNS,
    STAGES,
    WORKER_BYTES,
    CellMemoryUse,
    Model,
    Split,
    StageMemory,
    answers_by_paper,
    answers_of_ours,
    of_cell,
)
from everstep.placement.ranks import most_slots
from everstep.placement.tree import cover
from everstep.report.words import aligned

_PAPER = "ZeRO paper (arXiv 1910.02054): 2 + 2 + 12 bytes per parameter, one copy"
_OURS = "float32, by the layout of this product's memory"
_ADAM_BYTES = 8
_DIVIDES = {
    "elements": "can be divided anywhere: its updates of pieces give the bits of the whole",
    "matrices": "can be divided between parameters, not within one",
    "nothing": "cannot be divided",
}


class _Plan(click.Group):
    """`plan` recommends: options of `plan recommend`, or its TASK, may follow at once."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        own = {one.partition("=")[0] for one in args} & {"--from", "--help", "-h"}
        known = args[:1] and (args[0] in self.commands or nearest(args[0], self.commands) is not None)
        if args and not own and not known and args != ["--json"]:
            args = ["recommend", *args]
        return super().parse_args(ctx, args)


@click.group(cls=_Plan, invoke_without_command=True)
@click.option(
    "--from",
    "run_dir",
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="Run directory: show the plan beside what the job measured.",
)
@json_option
@click.pass_context
def command(context: click.Context, run_dir: Path | None, as_json: bool) -> int:
    """Plan a job before it is started; with --from, compare a job that runs or ran with its plan.

    Without a command it recommends: everstep plan --params 13B --gpus 32.
    """
    if context.invoked_subcommand is not None:
        if run_dir is not None or as_json:
            raise ConfigError(f"expected --from, or {context.invoked_subcommand} with its own options, and not both")
        return 0
    if run_dir is None:
        if as_json:
            raise ConfigError("expected --from DIR or a command: everstep plan --from runs/mine --json")
        print(context.get_help())
        return 0
    from everstep.cli.plan_online import show_run

    return show_run(run_dir, as_json)


command.add_command(plan_failures.command)
command.add_command(plan_goodput.command)
command.add_command(plan_time.command)
command.add_command(plan_recommend.command)
command.add_command(plan_usual.command)


@command.command(epilog=f"Devices known to --gpu: {', '.join(CATALOGUE)}.")
@click.argument("task", required=False)
@click.option("--params", metavar="N", help="Number of parameters in place of a task: 125M, 7.5B, 1.5T.")
@click.option("--workers", type=click.IntRange(min=1), help="Number of workers in total (1, or the task's).")
@click.option("--lanes", type=click.IntRange(min=1), help="Lanes of the global batch (the task's, or 8).")
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
@click.option("--staging", metavar="SIZE", help="What each worker may stage of a checkpoint: 512MiB (the task's).")
@click.option("--gpu", metavar="NAME", help="Device that each worker has.")
@click.option("--memory", "memory_text", metavar="SIZE", help="Memory of each worker's device in its place: 80GiB.")
@click.option(
    "--set", "settings", multiple=True, metavar="KEY=VALUE", help="A key of the job: cell.fsdp=4, for workers of four."
)
@split_options
@json_option
def memory(
    task: str | None,
    params: str | None,
    workers: int | None,
    lanes: int | None,
    hosts: int,
    stage: int,
    copies: int | None,
    offload: str,
    staging: str | None,
    gpu: str | None,
    memory_text: str | None,
    settings: tuple[str, ...],
    as_json: bool,
    **asked_split: Any,
) -> int:
    """Show how much memory a worker needs to train TASK, the model of a Hugging Face directory, or one of so many
    parameters.

    No parameter is allocated: the model is counted on torch's meta device. Exit code: 0; 1 if it does not fit into the
    memory of the device that was named.
    """
    named = {"params": params} if params is not None else {}
    if task is not None and params is None and is_config_dir(task):
        shape, _ = shape_of_config(task)
        named, task, params = {"model_name": task}, None, str(shape.parameters)
    if (task is None) == (params is None):
        raise ConfigError("expected a TASK or --params, and not both: everstep plan memory --params 7.5B --workers 64")
    if re.fullmatch(OFFLOAD, offload) is None:
        raise ConfigError(f"--offload: expected none, cpu or a folder, got {offload[:40]!r}")
    room, assumed = _room(gpu, memory_text)
    known = (
        _counted(task, workers, lanes, settings)
        if task is not None
        else _given(params or "", workers or 1, lanes, settings)
    )
    model, workers, lanes, kind, more, staged, config, exchanged = known
    if staging is not None:
        staged = quantities.parse_bytes(staging, "--staging")
    for option, number in (("--copies", copies or 1), ("--hosts", hosts)):
        if number > workers:
            raise ConfigError(f"{option}: expected at most one per worker ({workers}), got {number}")
    runs = (range(k * lanes // workers, (k + 1) * lanes // workers) for k in range(workers))
    nodes = max(len(cover(run, lanes)) for run in runs)
    split = Split(workers, lanes, nodes, copies or min(2, workers), offload != "none", hosts, staged, gpu is not None)
    if offload == "cpu":
        more.append("a device with memory of its own: on a CPU, offload=cpu changes nothing")
    asked: dict[str, Any] = {"parameters": model.parameters, "workers": workers, "hosts": hosts, "zero": stage}
    asked |= {"copies": split.copies, "offload": offload, "lanes": lanes, "memory_bytes": room, "optimizer": kind}
    paper = _Table("paper", _PAPER, answers_by_paper(model.parameters, workers, split.offload, room))
    ours = _Table("ours", _OURS, answers_of_ours(model, split, room))
    tables = (ours, paper) if task is not None else (paper, ours)
    splits = splits_of(named, workers, asked_split, room) if named else None
    cell = _cell(model, split, config, exchanged)
    if as_json:
        about = None if cell is None else {"ranks": cell.ranks, "per_rank_bytes": cell.per_rank_bytes}
        print(json.dumps({**_to_dict(asked, *tables, [*assumed, *more]), "usual": splits, "cell": about}))
    else:
        _print(asked, tables, [*assumed, *more])
        for line in _cell_lines(cell, room) if cell is not None else ():
            print(line)
        for line in split_lines(splits) if splits is not None else ():
            print(line)
    if cell is not None and room is not None:
        return 0 if cell.total <= room else 1
    return 1 if tables[0].stages[stage].fits is False else 0


def _cell(model: Model, split: Split, config: Config, exchanged: int) -> CellMemoryUse | None:
    """What each process of a worker of several needs; None of workers of one."""
    ranks, lanes = config.cell.fsdp, split.lanes
    if ranks == 1:
        return None
    runs = [range(k * lanes // split.workers, (k + 1) * lanes // split.workers) for k in range(split.workers)]
    return of_cell(model, split, ranks, exchanged, max(most_slots(run, lanes, ranks) for run in runs))


def _cell_lines(cell: CellMemoryUse, room: int | None) -> list[str]:
    rows = [[kind, f"{size / GB:.3g}"] for kind, size in cell.per_rank_bytes.items() if size]
    rows.append(["together", f"{cell.total / GB:.4g}"])
    rows += [["fits", "yes" if cell.total <= room else "no"]] if room is not None else []
    return ["", f"each of the {cell.ranks} processes of a worker (cell.fsdp={cell.ranks}), in GB", *aligned(rows)]


class _Table(NamedTuple):
    """Memory of each stage by one way to count."""

    name: str
    source: str
    stages: Mapping[int, StageMemory]


def _room(gpu: str | None, memory_text: str | None) -> tuple[int | None, list[str]]:
    """Bytes of each worker's device, None if none was named; what was assumed."""
    if gpu is not None and memory_text is not None:
        raise ConfigError("expected --gpu or --memory, got both")
    if memory_text is not None:
        return quantities.parse_bytes(memory_text, "--memory"), []
    if gpu is None:
        return None, []
    device = device_named(gpu)
    return round(device.memory_gb * GB), [f"{device.memory_gb:g} GB on each {gpu} ({device.sources['memory_gb']})"]


_Known = tuple[Model, int, int, dict[str, str] | None, list[str], int, Config, int]
"""A model, workers, lanes, what the optimizer can update apart (None if unknown), what was assumed, bytes for staging
checkpoints, the config, and bytes of what processes of one worker exchange at once."""


def _given(params: str, workers: int, lanes: int | None, settings: Sequence[str]) -> _Known:
    """A model of so many parameters."""
    count = quantities.parse_count(params, "--params")
    lanes = lanes or max(Config().lanes, workers)
    assumed = ["an optimizer like Adam", f"{lanes} lanes"]
    base = (("--workers", {"workers": workers, "lanes": lanes}), *(("--set", dict([parse_set(s)])) for s in settings))
    config, model = load_config(base), Model(count, 4.0 * count, _ADAM_BYTES * count)
    if config.cell.fsdp > 1 and config.cell.least is None:
        assumed.append("a model of one unit, whose gradients are exchanged at once: give --set cell.wrap=N for smaller")
    exchanged = 4 * min(count, config.cell.least or count)
    return model, config.workers, config.lanes, None, assumed, 0, config, exchanged


def _counted(task: str, workers: int | None, lanes: int | None, settings: Sequence[str]) -> _Known:
    """The task's model as the meta device counts it."""
    from everstep.cli.job import Request, effective_config
    from everstep.cli.task_loading import make_task, parse_task
    from everstep.train.counted import count_task

    spec = parse_task(task)
    if spec.kind == "script":
        raise ConfigError(f"task {task!r} is a script: expected file.py:Class, module:Class, a ready task or --params")
    made = make_task(spec)
    asked = (("--workers", "workers", workers), ("--lanes", "lanes", lanes))
    layers = tuple((option, {key: value}) for option, key, value in asked if value is not None)
    layers += tuple(("--set", dict([parse_set(text)])) for text in settings)
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
    kind = found.optimizer and {"divides": str(found.optimizer.divides), "why": found.optimizer.why}
    staged = (config.checkpoint.staging_mb or 0) * 2**20 if config.checkpoint.enabled else 0
    more = [*found.assumed, "no checkpoints kept in memory"]
    return model, config.workers, config.lanes, kind, more, staged, config, found.exchanged_bytes


def _to_dict(asked: dict[str, Any], first: _Table, second: _Table, assumed: list[str]) -> dict[str, Any]:
    """Results of one table, and those of the other below its name."""

    def one(table: _Table) -> dict[str, Any]:
        stages = {str(k): asdict(found) for k, found in table.stages.items()}
        return {**stages[str(asked["zero"])], "source": table.source, "stages": stages}

    return {"kind": "memory", **asked, **one(first), second.name: one(second), "assumed": assumed}


def _print(asked: Mapping[str, Any], tables: Sequence[_Table], assumed: list[str]) -> None:
    workers = asked["workers"]
    print(
        f"{quantities.count_words(asked['parameters'])} parameters on {workers} worker{'s' * (workers > 1)}: "
        "memory of each in GB (10^9 bytes), by stage of ZeRO"
    )
    for table in tables:
        print()
        print(table.source + (f", copies of divided parts: {asked['copies']}" if table.source == _OURS else ""))
        for line in aligned(_rows([*table.stages.values()])):
            print(line)
        if table.stages[0].host_bytes:
            print(f"data parallel, nothing offloaded: {table.stages[0].baseline_memory_gb:.4g}")
    print()
    print(f"jobs can run with stage {', '.join(map(str, RUNS))} today")
    kind = asked["optimizer"]
    if kind is not None:
        print(f"its optimizer {_DIVIDES[kind['divides']]}" + (f" ({kind['why']})" * bool(kind["why"])))
    for one in assumed:
        print(f"assumed: {one}")


def _rows(stages: Sequence[StageMemory]) -> list[list[str]]:
    rows = [["", *(f"stage {k}" for k in STAGES)]]
    for kind in stages[0].per_worker_bytes:
        sizes = [found.per_worker_bytes[kind] for found in stages]
        if any(sizes):
            rows.append([kind, *(f"{size / GB:.3g}" for size in sizes)])
    for kind in stages[0].host_bytes:
        rows.append([f"{kind} (host)", *(f"{found.host_bytes[kind] / GB:.3g}" for found in stages)])
    rows.append(["together", *(f"{found.zero_memory_gb:.4g}" for found in stages)])
    rows.append(["times less", *(f"{found.memory_reduction_factor:.2f}" for found in stages)])
    if stages[0].fits is not None:
        rows.append(["fits", *("yes" if found.fits else "no" for found in stages)])
        rows.append(["largest model", *(quantities.count_words(one.max_model_size_with_zero or 0) for one in stages)])
    return rows
