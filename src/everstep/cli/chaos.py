"""`everstep chaos`: break a job on purpose, and compare it with the one in which nothing happened."""

from __future__ import annotations

import json
import shlex
import time
from pathlib import Path
from typing import Any

import click

from everstep.base.config import parse_set
from everstep.base.errors import ConfigError
from everstep.chaos.account import account
from everstep.chaos.kinds import KINDS
from everstep.chaos.scenarios import SCENARIOS, TASK, TINY, Scenario, named
from everstep.chaos.spec import parse, parse_now
from everstep.cli.chaos_suite import UNDISTURBED, Result, Suite, judge, print_result, print_title, undisturbed_options
from everstep.cli.run_dir import in_runs
from everstep.cli.scale import ask_running
from everstep.observe.events import read_events
from everstep.runtime.address import EVENTS_FILE

_HELP = """Break jobs on purpose, and compare them with the undisturbed run, byte by byte.

    \b
    A specification is "FAULT; FAULT; ...", a fault KIND:KEY=VALUE,KEY=VALUE.
    {kinds}
    random      p=P,seed=N,after_step=N: at each step, with probability P, one

    \b
    target  worker:2, worker:1+worker:3, leader:1, backups:1 and stage:1 (all of
            stage 1), coordinator, random
    at      the step that is being computed, or the first later one that fits
    phase   load, forward, backward, reduce, agree, update: of a step;
            settle: while a new generation finds out where it stands (at: the
            last step done); heal: while a worker copies the state (at: the step
            it heals to); finish: while final/ is made (at: the last step)

    \b
    Example: "kill:target=leader:0,at=9,phase=reduce; stop:target=random,at=12,for=3"
    """
_KINDS = "\n    ".join(f"{kind.name:11} {kind.about}" for kind in KINDS.values())


@click.group(help=_HELP.format(kinds=_KINDS), context_settings={"help_option_names": ["-h", "--help"]})
def command() -> None:
    """The commands below it; its help is above, with the kinds of faults."""


@command.command()
@click.argument("names", nargs=-1, metavar="[NAME]...")
@click.option("--task", help=f"What is trained ({TASK}, made small); it must have units for three stages.")
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="Set a config key in all runs.")
@click.option("--run-dir", type=click.Path(path_type=Path), help="Where all runs are kept (runs/chaos-<time>).")
@click.option("--list", "only_list", is_flag=True, help="Show the scenarios, and run none.")
@click.option("--json", "as_json", is_flag=True, help="One object per scenario, and last a summary.")
def suite(
    names: tuple[str, ...],
    task: str | None,
    settings: tuple[str, ...],
    run_dir: Path | None,
    only_list: bool,
    as_json: bool,
) -> int:
    """Run the failure suite, or the scenarios that are named. Exit code 0: all of them passed."""
    chosen = named(names)
    if only_list:
        _list(chosen, as_json)
        return 0
    given = dict(parse_set(text) for text in settings)
    config: dict[str, Any] = {**(TINY if task is None else {}), **given}
    base = run_dir or in_runs("chaos")
    runs = Suite(base, task or TASK, config)
    began = time.monotonic()
    if not as_json:
        print(f"the undisturbed run, on one worker: {runs.undisturbed}", flush=True)
    runs.make_undisturbed()
    if not as_json:
        print_title()
    results = []
    for scenario in chosen:
        result = runs.run(scenario)
        results.append(result)
        if as_json:
            print(json.dumps(result.to_dict()), flush=True)
        else:
            print_result(result)
    return _conclude(results, base, time.monotonic() - began, as_json)


def _list(scenarios: tuple[Scenario, ...], as_json: bool) -> None:
    for scenario in scenarios:
        if as_json:
            print(json.dumps({"name": scenario.name, "about": scenario.about, "config": scenario.config()}))
        else:
            print(f"{scenario.name:22} {scenario.about}\n{'':22} {scenario.chaos}")


def _conclude(results: list[Result], base: Path, wall_s: float, as_json: bool) -> int:
    failed = [result.name for result in results if not result.passed]
    if as_json:
        counts = {"scenarios": len(results), "passed": len(results) - len(failed), "failed": failed}
        print(json.dumps({"kind": "summary", **counts, "wall_s": round(wall_s, 1), "run_dir": str(base)}))
    elif failed:
        print(f"\n{len(failed)} of {len(results)} failed: {', '.join(failed)}; all runs are in {base}")
    else:
        equal = sum(result.equal is True for result in results)
        print(f"\nall {len(results)} passed in {wall_s:.0f} s, {equal} bitwise equal to the undisturbed run; in {base}")
    return 1 if failed else 0


@command.command(context_settings={"ignore_unknown_options": True})
@click.argument("task")
@click.argument("options", nargs=-1, type=click.UNPROCESSED, metavar="[OPTIONS OF everstep run]...")
@click.option("--chaos", required=True, help='Scripted faults, e.g. "kill:target=leader:1,at=9,phase=reduce".')
@click.option("--run-dir", type=click.Path(path_type=Path), help="Where both runs are kept (runs/chaos-<time>).")
@click.option("--json", "as_json", is_flag=True, help="One object.")
def run(task: str, options: tuple[str, ...], chaos: str, run_dir: Path | None, as_json: bool) -> int:
    """Train TASK with faults, and on one worker without; compare. Takes the options of `everstep run`."""
    parse(chaos)
    base = run_dir or in_runs("chaos")
    runs = Suite(base, task, {}, tuple(options))
    if not as_json:
        print(f"1. undisturbed, on one worker: {runs.undisturbed}\n     {shlex.join(undisturbed_options(options))}")
        print(f"2. with these faults: {base / 'disturbed'}")
        for fault in parse(chaos):
            print(f"     {fault}")
        print(flush=True)
    runs.make_undisturbed()
    result = runs.run(Scenario("disturbed", "", chaos, {}, {}, never=()), bare=True)
    if as_json:
        print(json.dumps(result.to_dict()))
    else:
        print_faults(base / "disturbed")
        print_title()
        print_result(result)
    return 0 if result.passed else 1


@command.command()
@click.argument("run_dir", metavar="DIR", type=click.Path(path_type=Path))
@click.argument("fault")
def inject(run_dir: Path, fault: str) -> int:
    """Let FAULT strike the job that runs in DIR, at once: kill:target=worker:2, stop:target=leader:1,for=5."""
    result = ask_running(run_dir, "chaos", parse_now(fault).request())
    print(f"{run_dir}: {result.get('fault')} is on its way; events.jsonl tells whom it strikes")
    return 0


@command.command()
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="One object per run.")
def report(directory: Path, as_json: bool) -> int:
    """What was injected into the runs of DIRECTORY (of a suite, of `chaos run`, or one run), and what came of it."""
    reference = directory / UNDISTURBED
    several = reference.is_dir()
    folders = [path.parent for path in directory.glob(f"*/{EVENTS_FILE}")] if several else [directory]
    folders = sorted(
        (f for f in folders if f != reference and (f / EVENTS_FILE).exists()), key=lambda f: (f.stat().st_mtime, f.name)
    )
    if not folders:
        raise ConfigError(f"{directory} holds no run: there is no {EVENTS_FILE}")
    results = [
        judge(folder, reference if several else None, _known(folder.name) if several else None) for folder in folders
    ]
    if as_json:
        for result in results:
            print(json.dumps(result.to_dict()))
    else:
        for folder in folders:
            print_faults(folder)
        print_title()
        for result in results:
            print_result(result)
    return 0 if all(result.passed for result in results) else 1


def _known(name: str) -> Scenario | None:
    return next((scenario for scenario in SCENARIOS if scenario.name == name), None)


def print_faults(folder: Path) -> None:
    """One line per strike: what, whom, when, and what the job did about it."""
    found = account(read_events(folder / EVENTS_FILE))
    print(f"{folder.name}: {found.state} at step {found.steps}{', ' + found.reason if found.reason else ''}")
    for one in found.struck:
        who = "coordinator" if one.worker_id is None else f"worker {one.worker_id}"
        took = "" if one.recovery_s is None else f", next step committed after {one.recovery_s:.2f} s"
        meant = "" if one.target.endswith(f":{one.worker_id}") and "+" not in one.target else f" ({one.target})"
        print(f"  step {one.step:4} {one.phase:9} {one.fault:10} {who}{meant}: {one.outcome}{took}")
    print(flush=True)
