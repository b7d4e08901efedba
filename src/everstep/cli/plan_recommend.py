"""`everstep plan recommend`: the best ways to divide a model over devices, and a config of what jobs can run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from everstep.base.below import write_atomically
from everstep.base.errors import ConfigError, check
from everstep.cli.completing import complete_task
from everstep.cli.plan_inputs import (
    Question,
    json_option,
    model_or_task,
    mtbf_hours,
    question_options,
    read_question,
    recovery_times,
    say,
    source_lines,
    table,
)
from everstep.cli.plan_picture import check_picture, picture_lines, write_picture
from everstep.cli.plan_runs import how_it_runs
from everstep.cli.plan_splits import rounded, whole_batch
from everstep.cli.plan_time import SOURCE as TIME_SOURCE
from everstep.cli.plan_time import job_figures, time_sources
from everstep.cost import failures, split_memory
from everstep.cost.catalogue import CATALOGUE, NODE_MTBF
from everstep.cost.goodput import Cluster, closed_form, recovery_policies
from everstep.cost.quantities import count_words, time_words
from everstep.cost.split_search import (
    RankedSplit,
    best_of_each,
    devices_needed,
    pareto_front,
    planned_splits,
    ranked_splits,
    why_better,
)
from everstep.cost.step_time import Fleet, ParallelSplit, micro_batches_of

SHOWN = 10
_SEARCHED = "all possible splits, everstep plan recommend"
_LEAST = 1e-6
"""Goodput with which no job ends."""
_OURS = "float32, data parallel and stages, by the layout of this product's memory"


@click.command("recommend")
@click.argument("task", required=False, shell_complete=complete_task)
@question_options
@click.option("--mtbf", help="Mean time between failures of a node (100000h).")
@click.option("--write", type=click.Path(path_type=Path), help="Write a config of the best split that jobs can run.")
@click.option("--picture", type=click.Path(path_type=Path), help="Draw memory against time as a PNG.")
@json_option
def command(
    task: str | None, mtbf: str | None, write: Path | None, picture: Path | None, as_json: bool, **asked: Any
) -> int:
    """Show the ten best ways to divide a model over devices. Each has its memory, time, cost, failures and reason.

    A TASK is counted on torch's meta device; it is divided data parallel and into stages, as jobs can run it. For each
    number of tensor parallel devices and stages the table has the best settings. Exit code 1: nothing fits, or with
    --write, nothing that jobs can run.
    """
    task = model_or_task(task, asked)
    if write is not None and write.exists():
        raise ConfigError(f"--write: {write} exists: name another file, or remove it")
    if write is not None and not write.parent.is_dir():
        raise ConfigError(f"--write: there is no folder {write.parent}: make it first")
    if task is not None:
        if mtbf is not None:
            raise ConfigError("--mtbf: failures are not planned for a TASK: everstep plan failures shows them")
        if picture is not None:
            raise ConfigError("--picture: a TASK's few splits are not drawn: leave it out")
        from everstep.cli.plan_task import recommend_for_task

        return recommend_for_task(task, write, as_json, asked)
    question = read_question(asked)
    if picture is not None:
        check_picture(picture)
    batch = whole_batch(question)
    result = _recommended(question, batch, mtbf)
    if picture is not None:
        write_picture(picture, result["pareto"], result["best"])
    said = [] if write is None else _write(question, batch, write, result)
    say(result, as_json, [*_lines(result), *said])
    return 0 if result["fits"] and (write is None or result["written"]) else 1


def _recommended(question: Question, batch: int, mtbf: str | None) -> dict[str, Any]:
    """The result, before anything is written. Raises: ConfigError for a batch that no split divides."""
    fleet = question.fleet
    device_mtbf_h, failed, words = _mtbf(fleet, mtbf)
    planned = planned_splits(question.shape, fleet, batch, question.dtype, question.stack)
    found = best_of_each(planned)
    if not found:
        raise ConfigError(
            f"--batch: expected a multiple of the data parallel devices of some split, such as {fleet.count}, "
            f"got {batch}"
        )
    best = [_described(question, batch, one, device_mtbf_h) for one in found[:SHOWN]]
    for described, one, other in zip(best, found, found[1:], strict=False):
        described["why"] = why_better(one, other)
    assumed = [*rounded(question, batch), *words]
    assumed.append(f"harms as in {failures.LLAMA3.source}; a repair takes 4 h, a checkpoint 10 s of training")
    return {
        "kind": "recommend",
        **question.described(),
        "batch": batch,
        "assumed": [*question.assumed, *assumed],
        "device_mtbf_h": device_mtbf_h,
        "fits": found[0].fits,
        "memory_bytes": round(fleet.device.memory_gb * 1e9),
        "best": best,
        "pareto": [
            {"split": asdict(one.split), "total_bytes": round(one.memory.total), "step_s": one.time.step_s}
            for one in pareto_front(planned)
        ],
        "needed": None if found[0].fits else _least(question, batch, found[0]),
        "written": None,
        "source": f"{TIME_SOURCE}; {split_memory.SOURCE}",
        "sources": _sources(question, failed),
    }


def _sources(question: Question, mtbf: str) -> dict[str, str]:
    """Sources of all figures, by key. mtbf: of the time between failures."""
    found = time_sources(question) | dict.fromkeys(("device_mtbf_h", "failures", "failures_per_day"), mtbf)
    found |= dict.fromkeys(("per_device_bytes", "pareto"), split_memory.SOURCE)
    found |= {"goodput": "closed forms for the policy ours; everstep plan goodput simulates"}
    return found | {"split": _SEARCHED, "runs_with": "keys of a job's config, by its own checks"}


def _mtbf(fleet: Fleet, given: str | None) -> tuple[float, str, list[str]]:
    """Hours between failures of a device, their source, and what is assumed: 100,000 h for a node, unless --mtbf or a
    device of the user's own says more."""
    device, nodes = fleet.device, fleet.per_node
    if given is not None:
        return mtbf_hours(given) * nodes, "given", []
    if device != CATALOGUE.get(device.name):
        return device.mtbf_h, device.sources["mtbf_h"], []
    each = f"a failure of each node of {nodes} per {failures.DEFAULT_MTBF_H:,.0f} h"
    seen = f"the catalogue has {device.mtbf_h / nodes:,.0f} h ({device.sources['mtbf_h']}): --mtbf takes another"
    return failures.DEFAULT_MTBF_H * nodes, NODE_MTBF, [f"{each}; {seen}"]


def _least(question: Question, batch: int, one: RankedSplit) -> dict[str, Any]:
    """What would be needed, where nothing fits: the split that needs the least memory, and devices that would do."""
    more = devices_needed(question.shape, question.fleet, batch, question.dtype, question.stack)
    return {
        "least_bytes": round(one.memory.total),
        "split": asdict(one.split),
        "devices": more,
        "source": split_memory.SOURCE,
    }


def _described(question: Question, batch: int, one: RankedSplit, device_mtbf_h: float) -> dict[str, Any]:
    """A split with all its figures; those of the whole job are None without --tokens."""
    fleet = question.fleet
    states = sum(one.memory.device[kind] for kind in ("parameters", "gradients", "optimizer"))
    cluster = Cluster(
        fleet.count,
        device_mtbf_h * 3600,
        per_node=fleet.per_node,
        step_s=one.time.step_s,
        state_bytes=states,
        link=fleet.network,
        shares=failures.LLAMA3.shares,
    )
    goodput = closed_form(recovery_policies(recovery_times(())[0], cluster)[0], cluster)
    whole = job_figures(question, one.time)
    figures = {key: None if value is None or goodput < _LEAST else value / goodput for key, value in whole.items()}
    hours = None if figures["days"] is None else figures["days"] * 24
    return {
        "split": asdict(one.split),
        "per_device_bytes": {kind: round(size) for kind, size in one.memory.device.items()},
        "total_bytes": round(one.memory.total),
        "fits": one.fits,
        **how_it_runs(one.split, micro_batches_of(batch, one.split), question.dtype, cpu=False).about(),
        "time": asdict(one.time),
        "step_s": one.time.step_s,
        "mfu": one.time.mfu,
        "goodput": goodput,
        **figures,
        "failures": None if hours is None else fleet.count * hours / device_mtbf_h,
        "failures_per_day": fleet.count * 24 / device_mtbf_h,
        "micro_batches": micro_batches_of(batch, one.split),
        "why": "",
    }


def _write(question: Question, batch: int, path: Path, result: dict[str, Any]) -> list[str]:
    """Write the config of the best split that jobs can run; what to say about it."""
    fleet = question.fleet
    ranked = ranked_splits(question.shape, fleet, batch, "fp32", question.stack, ours=True)
    if not ranked or not ranked[0].fits:
        more = devices_needed(question.shape, fleet, batch, "fp32", question.stack, ours=True)
        least = f"at least {ranked[0].memory.total / 1e9:.3g} GB per device" if ranked else "another batch"
        return [f"not written: what jobs can run ({_OURS}) needs {least}; {_would_do(more)}"]
    one = ranked[0]
    count = micro_batches_of(batch, one.split)
    found = how_it_runs(one.split, count, cpu=False)
    check(found.config is not None, f"expected a split that jobs run, got {one.split}: {found.why_not}")
    config = {**(found.config or {}), "device": "auto"}
    header = (
        f"# everstep plan recommend: {count_words(question.shape.parameters)} parameters on {fleet.count} x "
        f"{fleet.device.name}, {_OURS}\n"
        f"# planned: {one.memory.total / 1e9:.3g} GB per device, {time_words(one.time.step_s)} per step\n"
    )
    text = header + "".join(f"{key}: {str(value).lower()}\n" for key, value in config.items())
    write_atomically(path, text, None)
    result["written"] = {"path": os.fspath(path), "config": config, "step_s": one.time.step_s, "source": _OURS}
    return [f"written: {path}, what jobs can run: {_words(one.split)}, {time_words(one.time.step_s)} per step, float32"]


def _words(split: ParallelSplit | dict[str, Any]) -> str:
    one = asdict(split) if isinstance(split, ParallelSplit) else split
    words = [f"{one['tp']} tensor x {one['pp']} pipeline x {one['dp']} data"]
    words[0] += f" x {one['cp']} context" * (one["cp"] > 1) + f", experts by {one['ep']}" * (one["ep"] > 1)
    words += [f"ZeRO {one['zero']}"] * bool(one["zero"]) + [f"micro-batch {one['micro_batch']}"]
    words += [f"{one['schedule']}, {one['chunks']} chunks"] * (one["chunks"] > 1)
    words += [f"recompute {one['recompute']}"] * (one["recompute"] != "none")
    return ", ".join(words)


def _lines(result: dict[str, Any]) -> list[str]:
    rows = [["split", "GB", "step", "MFU", "days", "dollars", "goodput", "failures", "before the next, because"]]
    rows += [
        [
            _words(one["split"]) + ("" if one["fits"] else " (does not fit)"),
            f"{one['total_bytes'] / 1e9:.3g}",
            time_words(one["step_s"]),
            f"{one['mfu']:.1%}",
            *("" if one[key] is None else f"{one[key]:,.3g}" for key in ("days", "dollars")),
            f"{one['goodput']:.2%}",
            f"{one['failures_per_day']:.2g} a day" if one["failures"] is None else f"{one['failures']:.3g}",
            one["why"],
        ]
        for one in result["best"]
    ]
    needed = result["needed"]
    return [
        f"{count_words(result['parameters'])} parameters on {result['devices']} x {result['device']} "
        f"({result['memory_bytes'] / 1e9:g} GB), batch {result['batch']}, {result['dtype']}",
        *table(rows),
        *picture_lines(result["pareto"], [one for one in result["best"] if one["fits"]]),
        *(() if needed is None else _needed(needed)),
        *(f"assumed: {one}" for one in result["assumed"]),
        *source_lines(result["sources"]),
    ]


def _needed(needed: dict[str, Any]) -> Sequence[str]:
    least = needed["least_bytes"] / 1e9
    return [f"nothing fits: at least {least:.3g} GB per device are needed; {_would_do(needed['devices'])}"]


def _would_do(devices: int | None) -> str:
    return "no number of them would do" if devices is None else f"{devices} of these devices would do"
