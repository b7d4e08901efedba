"""`everstep plan`: what a job will need, before it is started."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click
from click.core import ParameterSource

from everstep.base.config import Config, load_config, parse_set
from everstep.base.config_keys import OFFLOAD, ZeroConfig
from everstep.base.errors import ConfigError, nearest
from everstep.cli import plan_failures, plan_goodput, plan_recommend, plan_time, plan_usual
from everstep.cli.completing import complete_task
from everstep.cli.plan_config_dir import is_config_dir, shape_of_config
from everstep.cli.plan_inputs import ASKED, COUNTED, MOST_GPUS, NOT_NEAR, json_option, known_devices, snapshots_of
from everstep.cli.plan_runs import HowItRuns, how_it_runs
from everstep.cli.plan_splits import (
    asked_line,
    refuse_split_of_task,
    split_lines,
    split_options,
    splits_of,
    splits_something,
)
from everstep.cost import quantities
from everstep.cost.catalogue import CATALOGUE, device_named
from everstep.cost.memory import (
    GB,
    JOB_BYTES,
    STAGES,
    WORKER_BYTES,
    CellMemoryUse,
    Model,
    Split,
    StageMemory,
    answers_by_paper,
    answers_of_ours,
    most_nodes,
    of_cell,
)
from everstep.cost.split_memory import CONTEXT_BYTES
from everstep.cost.step_time import STACKS, ParallelSplit
from everstep.cost.task_time import part_of_model
from everstep.placement.cell_shapes import CellShape
from everstep.placement.ranks import most_slots
from everstep.report.words import aligned

if TYPE_CHECKING:
    from everstep.train.optimizer_kind import OptimizerKind

_PAPER = "ZeRO paper (arXiv 1910.02054): 2 + 2 + 12 bytes per parameter, one copy"
_OURS = "float32, by the layout of this product's memory"
_BY = {"paper": "by the ZeRO paper", "ours": "in this product"}
_ADAM_BYTES = 8
FEWEST = 1000
"""Parameters: a smaller number lacks its unit."""
_DIVIDES = {
    "elements": "can be divided anywhere: its updates of pieces give the bits of the whole",
    "matrices": "can be divided between parameters, not within one",
    "nothing": "cannot be divided",
}


_ZERO_OPTIONS = (
    ("--zero", "stage", "stage"),
    ("--copies", "copies", "copies"),
    ("--offload", "offload", "offload"),
    ("--offload-params", "offload_params", "offload_params"),
)
"""Options of `plan memory`, their names there, and keys of `zero` that say the same."""


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
    help="Run directory: compare the plan with the job's measurements.",
)
@json_option
@click.pass_context
def command(context: click.Context, run_dir: Path | None, as_json: bool) -> int:
    """Plan a job before it is started; with --from, compare a job that runs or ran with its plan.

    Without a command it does what `plan recommend` does: everstep plan --params 13B --gpus 32.
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
@click.argument("task", required=False, shell_complete=complete_task)
@click.option("--params", metavar="N", help="Number of parameters in place of a task: 125M, 7.5B, 1.5T.")
@click.option("--workers", type=click.IntRange(1, MOST_GPUS), help="Number of workers in total (1, or the task's).")
@click.option("--lanes", type=click.IntRange(1, MOST_GPUS), help="Lanes of the global batch (the task's, or 8).")
@click.option(
    "--hosts", type=click.IntRange(min=1), default=1, show_default=True, help="Hosts that the workers are on."
)
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
@click.option("--offload-params", is_flag=True, help="Parameters and gradients lie in that folder, too.")
@click.option("--staging", metavar="SIZE", help="Memory of each worker to stage a checkpoint: 512MiB (the task's).")
@click.option("--gpu", metavar="NAME", help="Device that each worker has.")
@click.option("--catalogue", type=click.Path(path_type=Path), help="YAML file of more devices.")
@click.option(
    "--memory", "memory_text", metavar="SIZE", help="Memory of each worker's device, instead of --gpu: 80GiB."
)
@click.option(
    "--set", "settings", multiple=True, metavar="KEY=VALUE", help="A config key of the job, e.g. cell.fsdp=4."
)
@split_options
@click.option("--stack", "stack_name", help=f"Program whose attention is assumed: {', '.join(STACKS)}.")
@json_option
def memory(task: str | None, as_json: bool, **asked: Any) -> int:
    """Show how much memory a worker needs. TASK may be a Hugging Face directory; --params N replaces it.

    No parameter is allocated: the model is counted on torch's meta device. With --pp, a TASK is cut into stages of
    equal length. Exit code 1: the model does not fit into the memory of the named device. With options of a split,
    such as --tp, the answer is that split's, with its activations.
    """
    named, task = _named(task, asked["params"])
    if re.fullmatch(OFFLOAD, asked["offload"]) is None:
        raise ConfigError(f"--offload: expected none, cpu or a folder, got {asked['offload'][:40]!r}")
    room, assumed = _room(asked)
    known = _counted(task, asked) if task is not None else _given(named, asked)
    asked |= _of_zero(asked, known.config.zero)
    split = _split(known, asked)
    assumed += known.assumed
    checkpoint = known.config.checkpoint
    if checkpoint.enabled and checkpoint.staging_mb is None and asked["staging"] is None:
        assumed.append(
            "nothing for checkpoints that wait for the disk, which may take half of what is free (--staging)"
        )
    if asked["offload"] == "cpu":
        assumed.append("a device with memory of its own: on a CPU, offload=cpu changes nothing")
    stage, parameters = asked["stage"], known.model.parameters
    said: dict[str, Any] = {"parameters": parameters, "workers": known.workers, "hosts": asked["hosts"], "zero": stage}
    said |= {"copies": split.copies, "offload": asked["offload"], "lanes": known.lanes, "memory_bytes": room}
    said |= {"optimizer": _said_of(known.optimizer), "pp": known.stages}
    part = part_of_model(known.model, known.stages, -(-known.lanes // split.workers))
    paper = _Table("paper", _PAPER, answers_by_paper(part.parameters, split.workers, split.offload, room))
    ours = _Table("ours", _OURS, answers_of_ours(part, split, room))
    tables = (ours, paper) if task is not None else (paper, ours)
    splits = splits_of(named, known.workers, asked, room) if named else None
    mine = splits if splits_something(asked) else None
    if named and splits is None and splits_something(asked):
        raise ConfigError(f"--params: {NOT_NEAR} for a split, got {known.model.parameters}: leave the split out")
    runs = _runs(known, split, asked)
    cell = _cell(part, split, known, stage)
    if as_json:
        about = None if cell is None else {**asdict(cell), "total_bytes": cell.total, "source": _OURS}
        print(json.dumps({**_to_dict(said, *tables, runs, assumed, mine), "usual": splits, "cell": about}))
    else:
        if mine is not None:
            print(asked_line(mine))
        _print(said, tables, runs, assumed)
        for line in _cell_lines(cell, known.config, room) if cell is not None else ():
            print(line)
        for line in split_lines(splits) if splits is not None else ():
            print(line)
    if cell is not None and room is not None:
        return 0 if cell.total <= room else 1
    return 1 if (tables[0].stages[stage].fits if mine is None else mine["asked"]["fits"]) is False else 0


def _named(task: str | None, params: str | None) -> tuple[dict[str, str], str | None]:
    """How the model is named by numbers, empty if it is not; and the task. Raises: ConfigError for none and for two."""
    if (task is None) == (params is None):
        raise ConfigError("expected a TASK or --params, and not both: everstep plan memory --params 7.5B --workers 64")
    if params is not None:
        return {"params": params}, None
    return ({"model_name": task}, None) if task is not None and is_config_dir(task) else ({}, task)


def _of_zero(asked: Mapping[str, Any], zero: ZeroConfig) -> dict[str, Any]:
    """Options that the job's own `zero.*` give in the place of those that are left out. Raises: ConfigError where both
    are given, and differ."""
    found, plain, context = dict[str, Any](), ZeroConfig(), click.get_current_context()
    for option, name, key in _ZERO_OPTIONS:
        value = getattr(zero, key)
        if value == getattr(plain, key):
            continue
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE and asked[name] != value:
            raise ConfigError(f"{option}: expected {value}, as the job's zero.{key}, got {asked[name]}: drop either")
        found[name] = value
    return found


def _split(known: _Known, asked: Mapping[str, Any]) -> Split:
    """How the workers of one stage divide its work. Raises: ConfigError."""
    workers, lanes, copies = known.workers // known.stages, known.lanes, asked["copies"]
    for option, number in (("--copies", copies or 1), ("--hosts", asked["hosts"])):
        if number > workers:
            raise ConfigError(f"{option}: expected at most one per worker ({workers}), got {number}")
    if lanes > MOST_GPUS:
        raise ConfigError(f"lanes: expected at most {MOST_GPUS}, got {lanes}")
    offload, staging, all_of_it = asked["offload"] != "none", asked["staging"], asked["offload_params"]
    if all_of_it and (asked["offload"] in ("none", "cpu") or asked["stage"]):
        raise ConfigError("--offload-params: expected a folder as --offload, and --zero 0: no other job can run so")
    staged = known.staging if staging is None else quantities.parse_bytes(staging, "--staging")
    copies, apart = copies or min(2, workers), asked["gpu"] is not None
    nodes, kept = most_nodes(workers, lanes), snapshots_of(known.config)
    return Split(workers, lanes, nodes, copies, offload, asked["hosts"], staged, kept, apart, all_of_it)


def _runs(known: _Known, split: Split, asked: Mapping[str, Any]) -> dict[int, HowItRuns]:
    """Whether jobs run each stage of ZeRO."""
    plain, given = asdict(ZeroConfig(offload="none")), {key: asked[name] for _, name, key in _ZERO_OPTIONS[1:]}
    zero = {f"zero.{key}": value for key, value in given.items() if value not in (None, plain[key])}
    stages = {k: ParallelSplit(pp=known.stages, dp=split.workers, zero=k) for k in STAGES}
    each = -(-split.lanes // split.workers)
    found = {k: how_it_runs(one, each, zero=zero) for k, one in stages.items()}
    return {k: _with_optimizer(how, k, known.optimizer) for k, how in found.items()}


def _said_of(kind: OptimizerKind | None) -> dict[str, str] | None:
    if kind is None:
        return None
    stateless = kind.divides == "elements" and not kind.state_bytes
    why = (
        "but it keeps nothing for its parameters: in stages 1 and 2 each worker updates all" if stateless else kind.why
    )
    return {"divides": kind.divides, "why": why}


def _with_optimizer(how: HowItRuns, stage: int, kind: OptimizerKind | None) -> HowItRuns:
    """As the job's workers refuse optimizers whose state they cannot divide as a stage needs it."""
    needed = ((), ("elements", "matrices"), ("elements", "matrices"), ("elements",))[stage]
    if how.config is None or kind is None or not needed:
        return how
    if kind.divides not in needed:
        return HowItRuns(None, f"the optimizer {_DIVIDES[kind.divides]} ({kind.why})")
    if stage == 3 and not kind.follows:
        return HowItRuns(None, "the optimizer keeps nothing for a parameter of no elements, as a process may have one")
    if stage == 3 and kind.at_once:
        return HowItRuns(None, "the optimizer's updates change its groups or attributes")
    return how


def _cell(model: Model, split: Split, known: _Known, stage: int) -> CellMemoryUse | None:
    """Memory of each process at a stage of ZeRO, for workers of several processes; None for others."""
    cell, lanes = known.config.cell, split.lanes
    if cell.ranks == 1:
        return None
    runs = [range(k * lanes // split.workers, (k + 1) * lanes // split.workers) for k in range(split.workers)]
    sums = max(most_slots(run, lanes, cell.fsdp) for run in runs)
    whole = not cell.reshard_after_forward or cell.shards > 1
    gathered = round(model.parameter_bytes) if whole else known.unit
    shape = cell.tp, known.shards, cell.hosts, gathered
    return of_cell(model, split, cell.ranks, known.exchanged, sums, *shape, stage)


def _cell_lines(cell: CellMemoryUse, config: Config, room: int | None) -> list[str]:
    rows = [[kind, f"{size / GB:.3g}"] for kind, size in cell.per_rank_bytes.items() if size]
    rows.append(["together", f"{cell.total / GB:.4g}"])
    rows += [["fits", "yes" if cell.total <= room else "no"]] if room is not None else []
    shape, hosts = CellShape(config.cell.fsdp, config.cell.tp), config.cell.hosts
    where = f" on {hosts} hosts, of those on its head's" if hosts > 1 else ""
    return ["", f"each of the {cell.ranks} processes of a worker ({shape}){where}, in GB", *aligned(rows)]


class _Table(NamedTuple):
    """Memory of each stage by one way to count."""

    name: str
    source: str
    stages: Mapping[int, StageMemory]


def _room(asked: Mapping[str, Any]) -> tuple[int | None, list[str]]:
    """Bytes of each worker's device, None if none was named; what was assumed."""
    gpu, memory_text, known = asked["gpu"], asked["memory_text"], known_devices(asked["catalogue"])
    if gpu is not None and memory_text is not None:
        raise ConfigError("expected --gpu or --memory, got both")
    if memory_text is not None:
        return quantities.parse_bytes(memory_text, "--memory"), []
    if gpu is None:
        return None, []
    device = device_named(gpu, known)
    return round(device.memory_gb * GB), [f"{device.memory_gb:g} GB on each {gpu} ({device.sources['memory_gb']})"]


class _Known(NamedTuple):
    """A model and its job. optimizer: what it can update apart, None if unknown. staging: bytes for checkpoints that
    are not written yet. exchanged: bytes that the processes of one worker exchange at once. stages: of equal length,
    each with as many workers. shards: bytes of the largest tensor of all shards that ranks exchange. unit: of the
    largest unit's parameters."""

    model: Model
    workers: int
    lanes: int
    optimizer: OptimizerKind | None
    assumed: list[str]
    staging: int
    config: Config
    exchanged: int
    stages: int = 1
    shards: int = 0
    unit: int = 0


def _given(named: Mapping[str, str], asked: Mapping[str, Any]) -> _Known:
    """A model of so many parameters, or of a Hugging Face directory."""
    if "params" in named:
        count = quantities.parse_count(named["params"], "--params")
        if count < FEWEST:
            raise ConfigError(
                f"--params: expected at least {FEWEST}, with its unit (13B), got {named['params'][:40]!r}"
            )
    else:
        count = shape_of_config(named["model_name"])[0].parameters
    workers = asked["workers"] or 1
    lanes = asked["lanes"] or max(Config().lanes, workers)
    assumed = ["an optimizer like Adam", *([] if asked["lanes"] else [f"{lanes} lanes"])]
    config = load_config((("--workers", {"workers": workers, "lanes": lanes}), *_set_by(asked)))
    if config.stages > 1:
        raise ConfigError(
            f"--set stages: expected 1 without a TASK, got {config.stages}: only the units of a task say what a stage "
            "has; name a TASK, or use --pp"
        )
    if config.cell.fsdp > 1 and config.cell.least is None:
        assumed.append("a model of one unit, whose gradients are exchanged at once: give --set cell.wrap=N for smaller")
    model, exchanged = Model(count, 4.0 * count, _ADAM_BYTES * count), 4 * min(count, config.cell.least or count)
    return _Known(
        model, config.workers, config.lanes, None, assumed, _staging(config), config, exchanged, unit=4 * count
    )


def _set_by(asked: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Layers of a config: what --set says."""
    return [("--set", dict([parse_set(text)])) for text in asked["settings"]]


def _counted(task: str, asked: Mapping[str, Any]) -> _Known:
    """The task's model as the meta device counts it. Raises: ConfigError."""
    from everstep.cli.job import Request, effective_config
    from everstep.cli.task_loading import make_task, parse_task
    from everstep.train.counted import count_task

    spec = parse_task(task)
    if spec.kind == "script":
        raise ConfigError(f"task {task!r} is a script: expected file.py:Class, module:Class, a ready task or --params")
    refuse_split_of_task(asked, ("pp", "zero"))
    if asked["stack_name"] is not None:
        raise ConfigError("--stack: a task's activations are counted: leave it out")
    made, stages = make_task(spec), asked["pp"] if asked["pp"] > 1 else None
    options = (
        ("--workers", "workers", asked["workers"]),
        ("--lanes", "lanes", asked["lanes"]),
        ("--pp", "stages", stages),
    )
    layers = tuple((option, {key: value}) for option, key, value in options if value is not None)
    layers += tuple(_set_by(asked))
    config = made.config = effective_config(made.defaults, Request(layers))
    if config.workers % config.stages:
        raise ConfigError(f"--workers: expected a multiple of the {config.stages} stages, got {config.workers}")
    found = count_task(made, config.micro_batch)
    if config.stages > found.units:
        raise ConfigError(f"--pp: expected at most one stage for each of the {found.units} units, got {config.stages}")
    sizes = (found.parameter_bytes, found.optimizer_bytes, found.buffer_bytes, found.activation_bytes)
    beside = CONTEXT_BYTES if asked["gpu"] is not None else JOB_BYTES / config.workers
    model = Model(found.parameters, *sizes, WORKER_BYTES + beside, *found.undivided)
    assumed = [*found.assumed, *(["no checkpoints kept in memory"] if not snapshots_of(config) else [])]
    assumed += ["stages of equal length"] * (config.stages > 1)
    return _Known(
        model,
        config.workers,
        config.lanes,
        found.optimizer,
        assumed,
        _staging(config),
        config,
        found.exchanged_bytes,
        config.stages,
        found.shard_bytes,
        found.unit_bytes,
    )


def _staging(config: Config) -> int:
    """Bytes that a worker is allowed for parts of checkpoints that are not written yet."""
    return (config.checkpoint.staging_mb or 0) * 2**20 if config.checkpoint.enabled else 0


def _to_dict(
    asked: dict[str, Any],
    first: _Table,
    second: _Table,
    runs: Mapping[int, HowItRuns],
    assumed: list[str],
    split: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Results of one table, and those of the other below its name. split: `splits_of`, if a split was asked for,
    which is the answer then."""

    def one(table: _Table) -> dict[str, Any]:
        stages = {
            str(k): {**asdict(found), "total_bytes": sum(found.per_worker_bytes.values()), **runs[k].about()}
            for k, found in table.stages.items()
        }
        return {**stages[str(asked["zero"])], "source": table.source, "stages": stages}

    found = one(first)
    sources = dict.fromkeys((*found, "stages"), first.source) | dict.fromkeys(asked, ASKED)
    sources |= {"parameters": COUNTED if first.source == _OURS else ASKED}
    if split is not None:
        found |= {**split["asked"], "source": split["source"]}
        sources |= dict.fromkeys(split["asked"], split["source"])
    result = {"kind": "memory", **asked, **found, second.name: one(second), "assumed": assumed}
    return result | {"sources": {key: source for key, source in sources.items() if key in result}}


def _print(
    asked: Mapping[str, Any], tables: Sequence[_Table], runs: Mapping[int, HowItRuns], assumed: list[str]
) -> None:
    workers = asked["workers"]
    stages = f", {asked['pp']} stages of a pipeline" * (asked["pp"] > 1)
    print(
        f"{quantities.count_words(asked['parameters'])} parameters on {workers} worker{'s' * (workers > 1)}{stages}: "
        "memory of each in GB (10^9 bytes), by stage of ZeRO"
    )
    print(_headline(asked, tables))
    for table in tables:
        print()
        print(table.source + (f", copies of divided parts: {asked['copies']}" if table.source == _OURS else ""))
        for line in aligned(_rows([*table.stages.values()])):
            print(line)
        if table.stages[0].host_bytes:
            print(f"data parallel, nothing offloaded: {table.stages[0].baseline_memory_gb:.4g}")
    print()
    for k, how in runs.items():
        print(f"jobs run stage {k}: {how.words}" + (f": {how.why_not}" if how.why_not else ""))
    kind = asked["optimizer"]
    if kind is not None:
        print(f"its optimizer {_DIVIDES[kind['divides']]}" + (f" ({kind['why']})" * bool(kind["why"])))
    for one in assumed:
        print(f"assumed: {one}")


def _headline(asked: Mapping[str, Any], tables: Sequence[_Table]) -> str:
    stage, words = asked["zero"], []
    for table in tables:
        found = table.stages[stage]
        less = f", {found.memory_reduction_factor:.2f} times less than in stage 0" * (stage > 0)
        fits = "" if found.fits is None else ", which fits" if found.fits else ", which does not fit"
        aside = "" if found.per_worker_bytes.get("activations") else " (activations aside)"
        words.append(f"{found.zero_memory_gb:.4g} GB {_BY[table.name]}{aside}{less}{fits}")
    return f"stage {stage}: " + "; ".join(words)


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
    if any(found.recovery_bytes for found in stages):
        more = (f"{found.recovery_bytes / GB:.3g}" for found in stages)
        rows.append(["more while one is replaced, of all workers", *more])
    if stages[0].fits is not None:
        rows.append(["fits", *("yes" if found.fits else "no" for found in stages)])
        rows.append(["largest model", *(quantities.count_words(one.max_model_size_with_zero or 0) for one in stages)])
    return rows
