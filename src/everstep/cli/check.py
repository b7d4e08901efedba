"""`everstep check`: try a script or a task out, and name what would keep a job from being exact."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from everstep.base.config import Config, numerics, read_layers
from everstep.base.errors import ConfigError
from everstep.base.leaving import temporary_folder
from everstep.cli.auto_lane import KEY, take_auto
from everstep.cli.check_jobs import CheckTarget, ShortJobs
from everstep.cli.completing import complete_task
from everstep.cli.config_file import said_layers
from everstep.cli.early_server import PRELOAD
from everstep.cli.job import Request, effective_config
from everstep.cli.probe import look
from everstep.cli.seconds import Seconds
from everstep.cli.starting import packages_of
from everstep.cli.task_loading import TaskSpec, load_task, parse_task
from everstep.runtime.host.fork_server_client import EarlyForkServer, ForkEnded
from everstep.runtime.process import own_command, pinned_environment

if TYPE_CHECKING:
    from everstep.train.rehearsal import Judgement, LifeLink, Rehearsed

_LEAST_STEPS = 2
_KEPT = {*numerics(Config()), "steps", "epochs", "eval_every", "eval_every_epochs", "verify_every", "spot_check"}
_KEPT |= {"on_nonfinite", "nonfinite_limit", "batch", "lr_rule", "lr_warmup_steps", "meta_init", "zero.stage"}
_KEPT_GROUPS = ("env", "task", "loader", "early_stop")
"""Settings of a job that hold in a check: by name, or by the group."""
_REFUSED = "a job refuses this at its start: change it"
NOT_COVERED = (
    "state in C extensions, databases, devices and other processes",
    "attributes of objects of installed packages, except modules, optimizers, schedulers and objects with state_dict",
    "code of the script after its loop",
)


@click.command()
@click.argument("target", shell_complete=complete_task)
@click.argument("argv", nargs=-1, type=click.UNPROCESSED)
@click.option("--config", "config_file", type=click.Path(path_type=Path), help="YAML file of config keys.")
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="Set a config key; may be repeated.")
@click.option("--steps", type=click.IntRange(_LEAST_STEPS), default=3, show_default=True, help="Steps of each stretch.")
@click.option(
    "--max-seconds", type=Seconds(1.0), default=120.0, show_default=True, help="Give up after this many seconds."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    target: str,
    argv: tuple[str, ...],
    config_file: Path | None,
    settings: tuple[str, ...],
    steps: int,
    max_seconds: float,
    as_json: bool,
) -> int:
    """Check TARGET before a job: a script that calls everstep.join (-- its own arguments), or a task.

    The check trains a few steps and resumes them, also around an evaluation, the end of an epoch and the last step. It
    repeats them with other clocks, ids, variables, hashes and orders of files. Then it trains on several workers and
    kills one. It compares the bits each time, and names what makes them differ, with its line. Exit code 1: it found
    something. Values that are lost on resume without harm are only listed.
    """
    spec = parse_task(target)
    if argv and spec.kind != "script":
        raise ConfigError(f"only a script takes arguments of its own, got {' '.join(argv)!r} for task {target!r}")
    kept, left_out = _settings(said_layers(config_file, settings))
    report = check(CheckTarget(spec, argv, kept), steps, max_seconds)
    if left_out:
        report["not_covered"].append(f"settings that a check leaves out: {', '.join(left_out)}")
    if as_json:
        print(json.dumps(report))
    else:
        _print(target, report)
    return int(not report["ok"])


def _settings(layers: Sequence[tuple[str, dict[str, Any]]]) -> tuple[dict[str, Any], list[str]]:
    """Settings that change what is computed, by dotted key, and the names of the others: a check has workers and
    folders of its own, and reports to nobody. Raises: ConfigError for unknown keys and bad values."""
    left_out = []
    for name in (KEY, "device"):
        layers, auto = take_auto(layers, name)
        left_out += [name] * auto
    given = read_layers(layers)
    kept = {name: given[name] for name in given if name in _KEPT or name.partition(".")[0] in _KEPT_GROUPS}
    return kept, sorted(left_out + [name for name in given if name not in kept])


def check(checked: CheckTarget, steps: int, max_seconds: float) -> dict[str, Any]:
    """Rehearse a task or script; returns `ok`, `findings`, `covered` and `not_covered`.

    Raises: ConfigError if it cannot be rehearsed.
    """
    with temporary_folder("everstep-check-") as folder:
        return _check(checked, steps, max_seconds, str(folder))


def _check(checked: CheckTarget, steps: int, max_seconds: float, folder: str) -> dict[str, Any]:
    spec, began_s = checked.spec, time.monotonic()
    question: dict[str, Any] = {"task": spec.canonical, "argv": checked.argv, "settings": checked.settings}
    question |= {"folder": folder, "steps": steps, "until_s": began_s + max_seconds}
    with closing(EarlyForkServer(1, PRELOAD)) as server:
        server.start()
        if not any(name.startswith("env.") for name in checked.settings):  # packages may read it
            server.import_packages(packages_of(spec))  # once for all lives
        try:
            said: dict[str, Any] = server.call(f"{__name__}:answer", question, began_s + max_seconds)
        except ForkEnded as error:
            raise ConfigError(f"{spec.text} cannot be rehearsed: its process ended ({error})") from None
    if said["note"]:
        output = " ".join(said["output"].split()[-40:])
        tail = f"; it printed last: ... {output}" if output else ""
        raise ConfigError(f"{spec.text} cannot be rehearsed: {said['note']}{tail}")
    report = {key: said[key] for key in ("ok", "findings", "covered", "not_covered")}
    if report["ok"]:
        jobs = ShortJobs(checked, Path(folder), min(2 * steps, said["total"]), began_s + max_seconds)
        jobs.run()
        report["findings"] += jobs.findings
        report["covered"] += jobs.covered
        report["not_covered"] += jobs.notes
        report["ok"] = not _harm(report["findings"])
    else:
        report["not_covered"].append("several workers, a kill, a resume on another size: once nothing is found here")
    return report


def answer(question: dict[str, Any]) -> dict[str, Any]:
    """Rehearse in a fork of the fork server, which has run none of the user's code."""
    from everstep.train.rehearsal import Judgement, Rehearsal
    from everstep.train.trials import Trials

    spec = parse_task(question["task"])
    try:
        what, body = life_of(question)
    except ConfigError as error:
        return _report(spec, Judgement(refused=str(error)))
    limit_s = max(1.0, question["until_s"] - time.monotonic())
    trials = Trials(what, body, lambda piece, life: _apart(question, piece, life), limit_s)
    rehearsal = Rehearsal(what, body, limit_s, deaths=trials.deaths)
    with closing(trials), closing(rehearsal):
        trials.begin()
        verdict = rehearsal.verdict(listed=True)
        more = trials.findings(verdict, rehearsal)
    if more or not (verdict.note and verdict.seen.error):
        more += trials.died()
    if more:
        verdict = replace(verdict, refused="", note="")
    named = {f.object for f in verdict.findings}
    verdict = replace(verdict, findings=(*verdict.findings, *(f for f in more if f.object not in named)))
    return _report(spec, verdict, trials.covered, trials.notes)


def life_of(question: dict[str, Any]) -> tuple[Rehearsed, Callable[[LifeLink], None]]:
    """The lives of a script or task, and what each of them does. Raises: ConfigError if the task cannot be loaded."""
    from everstep.script.watched_life import LifeWatch
    from everstep.train.join import rehearsed_with
    from everstep.train.rehearsal import Rehearsed, run_script

    spec = parse_task(question["task"])
    folder, steps, watch = question["folder"], int(question["steps"]), LifeWatch(work=True)
    request = Request((("the settings", question["settings"]),) if question["settings"] else ())
    os.environ.update({k.removeprefix("env."): v for k, v in question["settings"].items() if k.startswith("env.")})
    if spec.kind == "script":
        config = effective_config({}, request, script=True) if request.explicit else None
        said = {"explicit": request.explicit}
        script = Rehearsed(spec.where, tuple(question["argv"]), folder, steps, config, said, watch)

        def run(link: LifeLink) -> None:
            rehearsed_with(link)
            run_script(script)

        return script, run
    config = effective_config(look(question["task"], request, False).defaults, request)
    return Rehearsed(spec.where, (), folder, steps, config, watch=watch), lambda link: _train(question["task"], link)


def _apart(question: dict[str, Any], what: Rehearsed, life: str) -> int:
    """Begin a life in a process of its own, in which texts have other hashes."""
    said = json.dumps({**question, "life": life, "watch": asdict(what.watch), "parent": os.getpid()})
    command = own_command("everstep.cli.check_life", said)
    quiet = [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_RDWR, 0) for fd in range(3)]
    environment = {**pinned_environment(1), "PYTHONHASHSEED": "1"}
    return os.posix_spawn(command[0], command, environment, file_actions=quiet)


def _train(text: str, link: LifeLink) -> None:
    """Train the task in one rehearsed life, as a worker would."""
    import sys

    from everstep.train.job_parts import assemble_task
    from everstep.train.rehearsal import WatchedLoop
    from everstep.train.trainer import train

    link.fill_up(link.config)
    task = load_task(text, link.config)
    run, early_stop = assemble_task(link, task)
    roots = {"task": task, **{n: v for n, v in vars(sys.modules[type(task).__module__]).items() if n[:2] != "__"}}
    link.follow(WatchedLoop(roots=roots))
    train(task, run, early_stop)


def _report(spec: TaskSpec, verdict: Judgement, tried: Sequence[str] = (), notes: Sequence[str] = ()) -> dict[str, Any]:
    found = [
        {
            "kind": f.kind,
            "object": f.object,
            "file": os.path.basename(f.file),
            "line": f.line,
            "changed": f.changed,
            "says": f.says,
            "remedy": f.remedy,
            "refused": f.refused,
        }
        for f in verdict.findings
    ]
    if verdict.refused:
        name = os.path.basename(spec.where)
        found.append(
            {"kind": "refused", "object": name, "file": name, "line": 0, "says": verdict.refused, "remedy": _REFUSED}
        )
    seen = verdict.seen
    owners = {f.owner: f"{f.owner} ({f.type_name})" for f in seen.facts.values() if f.hard and f.kind != "training"}
    covered = ["model, optimizer, scheduler and state, as join was given them"] if seen.step else []
    covered += [owners[name] for name in sorted(owners)]
    covered += tried
    covered += [f"{len(seen.facts)} values that the loop can reach, after step {seen.step}"] if seen.step else []
    unseen = [f"{name}: {what}" for name, what in sorted(seen.unseen.items())]
    unseen += [f"{what}: its code cannot be read" for what in seen.read.notes]
    unseen += notes
    return {
        "ok": not _harm(found),
        "findings": found,
        "covered": covered,
        "not_covered": [*NOT_COVERED, *unseen],
        "note": verdict.note,
        "output": verdict.output,
        "total": seen.total,
    }


def _harm(findings: Sequence[dict[str, Any]]) -> int:
    """Number of findings that change results; the others are only listed."""
    return sum(bool(finding.get("refused", True)) for finding in findings)


def _print(target: str, report: dict[str, Any]) -> None:
    for finding in report["findings"]:
        where = f"{finding['file']}:{finding['line']}: " if finding["line"] else ""
        where += f"changed in line {finding['changed']}: " if finding.get("changed") else ""
        weight = "" if finding.get("refused", True) else " (listed only: the job starts anyway)"
        about = "" if where and finding["object"] == finding["file"] else f"{finding['object']}: "
        remedy = f"; {finding['remedy']}" if finding["remedy"] else ""
        print(f"{where}{about}{finding['says']}{remedy}{weight}")
    for said in report["covered"]:
        print(f"  covered: {said}")
    for said in report["not_covered"]:
        print(f"  not covered: {said}")
    harm = _harm(report["findings"])
    listed = f", {len(report['findings']) - harm} listed" if len(report["findings"]) > harm else ""
    print(f"{target}: {harm} found{listed}")
