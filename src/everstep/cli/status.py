"""`everstep status`: asks the coordinator while the job runs, and reads the directory when it does not."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import click

from everstep.base.config import Config
from everstep.base.errors import ConfigError
from everstep.base.stage_map import devices_of, parse_map
from everstep.cli.job import read_job
from everstep.cli.run_dir import checkpoint_dir, read_digest
from everstep.cli.terminal import paragraph
from everstep.report.crew import MEMBERS
from everstep.report.facts import Facts
from everstep.report.headline import step_of
from everstep.report.history import History, step_seen
from everstep.report.job_condition import ENDED
from everstep.report.raised import raised_lines
from everstep.report.words import aligned, number_text, rate_text, shortened
from everstep.runtime import commands
from everstep.runtime.files.run_lock import is_locked
from everstep.runtime.link.address import COORDINATOR_FILE, read_address

_PATIENCE_S = 5.0
_LAST_INCIDENTS = 20
_SHOWN_INCIDENTS = 6


@click.command()
@click.argument("run_dir", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(run_dir: Path, as_json: bool) -> int:
    """Show what the job in DIR is doing, or how it ended."""
    status = read_status(run_dir)
    if as_json:
        print(json.dumps(status))
    else:
        _print(run_dir, status)
    return 0


def read_status(run_dir: Path) -> dict[str, Any]:
    """The object that `status --json` prints.

    Raises: ConfigError if DIR is no run directory.
    """
    if not run_dir.is_dir():
        raise ConfigError(f"there is no run directory {run_dir}")
    job = read_job(run_dir)
    running = is_locked(run_dir)
    asked = True
    try:
        live = commands.ask(run_dir, "status", timeout_s=_PATIENCE_S)
        answer: dict[str, Any] | None = {**live}
        live["coordinator"] = {"pid": read_address(run_dir / COORDINATOR_FILE).pid}
    except (commands.NoJobRunning, commands.NoAnswer, commands.NotAllowed, FileNotFoundError) as error:
        live, answer, asked = {}, None, not isinstance(error, commands.NotAllowed)
    running = running or (answer is not None and answer.get("state") not in ENDED)  # a lock may not be seen from here
    history = History(run_dir).load()  # after the answer, so that the sentence is not older than the numbers
    if answer is not None:  # the coordinator hears of steps only a few times a second
        live["state"] = history.told_state(running, live)
        live["step"] = step_of(history.facts, history.now(running, answer))
        for worker in live["workers"]:
            worker["step"] = max(worker["step"], live["step"] if worker["lanes"] else 0)
    live = live or _from_files(run_dir, history, running)
    if live["state"] in ENDED:  # nothing computes, or has these process ids
        for worker in live["workers"]:
            worker.update(pid=None, pids=[None] * len(worker.get("pids", ())), samples_per_s=0.0)
    folder = checkpoint_dir(run_dir, job)
    step = step_seen(folder)
    newest = {"step": step, "path": f"{folder}/step-{step:010d}"} if step else None
    said = history.headline(running, answer, asked=asked)
    incidents = [
        {
            "time_unix_ns": one.begin_ns,
            "end_unix_ns": one.end_ns,
            "cause": one.cause,
            "step": one.step,
            "sentence": one.line(),
        }
        for one in history.incidents(running)[-_LAST_INCIDENTS:]
    ]
    course, members = history.facts.course, history.facts.crew.members
    headline = {"level": said.level, "text": said.text, "more": said.more}
    return {
        **live,
        "workers": [{**worker, "cell": _cell_of(worker, job.config)} for worker in live["workers"]],
        "steps_total": history.total_steps,
        "logged": history.facts.logged.finite(),
        "task": job.task,
        "checkpoint": newest,
        "headline": headline,
        "raised": raised_lines(run_dir, history.facts),
        "incidents": incidents,
        "efficiency": {
            "measured": course.efficiency(),
            "left_out": course.left_out(),
            "text": course.efficiency_text(members),
        },
    }


def _from_files(run_dir: Path, history: History, running: bool) -> dict[str, Any]:
    """Status of a job without an answering coordinator: over, starting, or recovering from the coordinator's loss. The
    workers of a job that is over are listed as they were at its end; without a word of that end nobody knows them."""
    facts, digest, begins = history.facts, read_digest(run_dir), history.begins(running)
    return {
        "state": "starting" if running and not facts.course.step else history.state(running),
        "generation": facts.crew.generation,
        "step": max(facts.course.step, 0 if digest is None or running else int(digest["step"])),
        "workers": workers_of(facts) if not begins and history.lost_launcher(running) is None else [],
        "coordinator": {"pid": None},
        "cause": facts.condition.cause,
        "reason": facts.condition.reason,
    }


def _cell_of(worker: dict[str, Any], config: Config) -> list[dict[str, Any]]:
    device = devices_of(parse_map(config.map, config.stages)).get(worker["worker_id"], config.device)
    pids = worker.get("pids", ())
    hosts = worker.get("hosts") or [worker["host"]] * len(pids)
    return [
        {"cell_rank": rank, "pid": pid, "device": device, "host": host}
        for rank, (pid, host) in enumerate(zip(pids, hosts, strict=False))
    ]


def workers_of(facts: Facts) -> list[dict[str, Any]]:
    """The living workers, by the last events. Nobody measures their speed now; a member is as far as the job."""
    return [
        {
            "worker_id": i,
            "incarnation": worker.incarnation,
            "pid": worker.pid,
            "pids": list(worker.pids),
            "host": worker.host or "unknown",
            **({"hosts": list(worker.hosts)} if worker.hosts else {}),
            "stage": worker.stages[0] if worker.stages else None,
            "stages": list(worker.stages),
            "role": "joining" if worker.role == "healing" else worker.role,
            "step": facts.course.step if worker.role in MEMBERS else 0,
            "lanes": list(worker.lanes),
            "samples_per_s": 0.0,
            "segments": None,
        }
        for i, worker in sorted(facts.crew.workers.items())
        if worker.state not in ("dead", "left")
    ]


def _print(run_dir: Path, status: dict[str, Any]) -> None:
    headline = status["headline"]
    print(f"{run_dir}: {status['task']}")
    said, _, again = f"{headline['text']} {headline['more']}".strip().partition(" To go on: ")
    print(paragraph(said, sys.stdout))
    for line in status["raised"][1:]:
        print(paragraph(f"  {line}", sys.stdout, "    "))
    if again:
        print(f"To go on: {again}")
    print(f"{status['state']}, step {status['step']}, generation {status['generation']}")
    values = {k: number_text(v, "g") for k, v in status["logged"].items()}
    if values:
        print(paragraph(", ".join(f"{name} {value}" for name, value in values.items()), sys.stdout, "  "))
    if (saved := status["checkpoint"]) is not None:
        print(paragraph(f"newest checkpoint: step {saved['step']} in {saved['path']}", sys.stdout, "  "))
    if status["efficiency"]["text"]:
        print(paragraph(f"scaling: {status['efficiency']['text']}", sys.stdout, "  "))
    _print_incidents(status["incidents"])
    if not status["workers"]:
        return
    lines = [("worker", "role", "stage", "lanes", "step", "samples/s", "pid", "host")]
    for w in status["workers"]:
        lanes = shortened(",".join(str(lane) for lane in w["lanes"]) or "-", 24, ",")
        stage = ",".join(map(str, w["stages"])) or "-"
        name = f"{w['worker_id']}.{w['incarnation']}"
        speed = rate_text(w["samples_per_s"]) if w["samples_per_s"] else "-"
        lines.append((name, w["role"], stage, lanes, str(w["step"]), speed, str(w["pid"] or "-"), w["host"]))
        for one in w["cell"][1:] if w.get("hosts") else ():
            of_limb = f"{w['worker_id']}/{one['cell_rank']}", "limb", *"----"
            lines.append((*of_limb, str(one["pid"] or "-"), one["host"]))
    for line in aligned(lines):
        print(paragraph(line, sys.stdout, "  "))


def _print_incidents(incidents: list[dict[str, Any]]) -> None:
    """Print the incidents, a line each, the newest last."""
    shown = incidents[-_SHOWN_INCIDENTS:]
    for one in shown:
        clock = time.strftime("%H:%M:%S", time.localtime(one["time_unix_ns"] / 1e9))
        print(paragraph(f"{clock}  {one['sentence']}", sys.stdout, " " * 10))
