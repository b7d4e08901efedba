"""`everstep chaos`: break a job on purpose, and compare it with an undisturbed run.

Scenarios run one after the other. Each is a real `everstep run`, judged by how it ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import click

from everstep.base.below import ANEW, open_below, write_atomically
from everstep.base.config import parse_set
from everstep.base.errors import ConfigError, EverstepError, JobFailed
from everstep.base.given import read_json
from everstep.base.leaving import before_leaving
from everstep.chaos.fault_account import FaultAccount, account, missing
from everstep.chaos.fault_kinds import KINDS
from everstep.chaos.scenarios import SCENARIOS, TASK, TINY, Scenario, named
from everstep.chaos.spec import parse, parse_now
from everstep.cli.completing import complete_task
from everstep.cli.ledger import audit_run
from everstep.cli.run_dir import in_runs, read_digest
from everstep.cli.running import ask_running
from everstep.cli.seconds import Seconds
from everstep.cli.verify import compare
from everstep.observe.events import read_events
from everstep.report.words import reason_text
from everstep.runtime import commands
from everstep.runtime.files.run_lock import is_locked
from everstep.runtime.link.address import EVENTS_FILE, JOB_FILE
from everstep.runtime.process import last_line, own_command

_HELP = """Break jobs on purpose, and compare them with the undisturbed run, byte by byte.

    \b
    A specification is "FAULT; FAULT; ...". A fault is KIND:KEY=VALUE,KEY=VALUE.
    {kinds}
    random      p=P,seed=N,after_step=N: a fault at each step with probability P

    \b
    target  worker:2, worker:1+worker:3, leader:1, backups:1 and stage:1 (all of
            stage 1), coordinator, random; host:NAME (its agent and workers, or
            all its packets) and link:NAME-NAME (of hosts with several)
    at      the step that is being computed, or the first later step that fits
    phase   load, forward, backward, reduce, agree, update: phases of a step;
            settle: while a new generation agrees on its state (at: the last
            step done); heal: while a worker copies the state (at: the step it
            heals to); finish: while final/ is written (at: the last step)

    \b
    Example: "kill:target=leader:0,at=9,phase=reduce; stop:target=random,at=12,for=3"
    """
_KINDS = "\n    ".join(f"{kind.name:11} {kind.about}" for kind in KINDS.values())
UNDISTURBED = "undisturbed"
_TOPOLOGY_OPTIONS = ("--workers", "--stages", "--pool", "--redundancy", "--spares", "--min-workers")
_TOPOLOGY_KEYS = ("workers", "stages", "pool", "redundancy", "map", "cut", "spares", "min_workers", "chaos")
_TITLE = (
    f"{'scenario':22} {'ends':12} {'faults':>6} {'evicted':>7} {'healed':>6} {'recovery s':>16} {'redone':>6} {'s':>6}"
)
StartCase = Callable[[list[str], Path], int]
"""Runs `everstep ARGV`, with its output in a file beside the run directory; returns the exit code."""


@click.group(help=_HELP.format(kinds=_KINDS), context_settings={"help_option_names": ["-h", "--help"]})
def command() -> None:
    """Group of the commands below; its help, with the kinds of faults, is _HELP."""


@command.command()
@click.argument("names", nargs=-1, metavar="[NAME]...")
@click.option("--task", help=f"Task to train ({TASK}, made small); it needs units for three stages.")
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="Set a config key in all runs.")
@click.option("--run-dir", type=click.Path(path_type=Path), help="Directory for all runs (runs/chaos-<time>).")
@click.option(
    "--max-seconds", type=Seconds(1.0), default=120.0, show_default=True, help="Stop a run after this many seconds."
)
@click.option("--list", "only_list", is_flag=True, help="List the scenarios and run none.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object per scenario, then a summary.")
def suite(
    names: tuple[str, ...],
    task: str | None,
    settings: tuple[str, ...],
    run_dir: Path | None,
    max_seconds: float,
    only_list: bool,
    as_json: bool,
) -> int:
    """Run the failure suite, or only the named scenarios. Exit code 0: all passed."""
    chosen = named(names)
    if only_list:
        _list(chosen, as_json)
        return 0
    given = dict(parse_set(text) for text in settings)
    config: dict[str, Any] = {**(TINY if task is None else {}), **given}
    base = run_dir or in_runs("chaos")
    runs = Suite(base, task or TASK, config, start=partial(run_everstep, limit_s=max_seconds))
    began = time.monotonic()
    if not as_json:
        print(f"the undisturbed run, on one worker: {runs.undisturbed}", flush=True)
    runs.make_undisturbed()
    if not as_json:
        print(_TITLE, flush=True)
    results = []
    for scenario in chosen:
        results.append(runs.run(scenario))
        print_result(results[-1], as_json)
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
@click.argument("task", shell_complete=complete_task)
@click.argument("options", nargs=-1, type=click.UNPROCESSED, metavar="[OPTIONS OF everstep run]...")
@click.option("--chaos", required=True, help='Scripted faults, e.g. "kill:target=leader:1,at=9,phase=reduce".')
@click.option("--run-dir", type=click.Path(path_type=Path), help="Directory for both runs (runs/chaos-<time>).")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def run(task: str, options: tuple[str, ...], chaos: str, run_dir: Path | None, as_json: bool) -> int:
    """Train TASK with faults, and compare with a run without. Takes the options of `everstep run`."""
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
    if not as_json:
        print_faults(base / "disturbed")
        print(_TITLE, flush=True)
    print_result(result, as_json)
    return 0 if result.passed else 1


@command.command()
@click.argument("run_dir", metavar="DIR", type=click.Path(path_type=Path))
@click.argument("fault")
def inject(run_dir: Path, fault: str) -> int:
    """Inject FAULT into the running job in DIR now. Examples: kill:target=worker:2, stop:target=leader:1,for=5."""
    request, begin_ns = parse_now(fault).request(), time.time_ns()
    try:
        ask_running(run_dir, "chaos", request, once=True)
    except commands.GoneUnanswered:
        if not _has_struck(run_dir, begin_ns):
            raise
    print(f"{run_dir}: {request['fault']} is sent; events.jsonl says which processes it hits")
    return 0


def _has_struck(run_dir: Path, begin_ns: int) -> bool:
    """Whether a fault was told of since: a coordinator that is struck may die before it answers."""
    events = read_events(run_dir / EVENTS_FILE)
    return any(e["kind"] == "fault_injected" and int(e["time_unix_ns"]) >= begin_ns for e in events)


@command.command()
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object per run.")
def report(directory: Path, as_json: bool) -> int:
    """Show the faults injected into runs, and their outcomes. DIRECTORY: a suite's, a `chaos run`'s or one run's."""
    reference = directory / UNDISTURBED
    several = reference.is_dir()
    folders = [path.parent for path in directory.glob(f"*/{EVENTS_FILE}")] if several else [directory]
    folders = sorted(
        (f for f in folders if f != reference and (f / EVENTS_FILE).exists()), key=lambda f: (f.stat().st_mtime, f.name)
    )
    if not folders:
        raise ConfigError(f"{directory} holds no run: there is no {EVENTS_FILE}")
    known = {scenario.name: scenario for scenario in SCENARIOS} if several else {}
    results = [judge(folder, reference if several else None, known.get(folder.name)) for folder in folders]
    if not as_json:
        for folder in folders:
            print_faults(folder)
        print(_TITLE, flush=True)
    for result in results:
        print_result(result, as_json)
    return 0 if all(result.passed for result in results) else 1


def account_of(run_dir: Path) -> FaultAccount:
    """Account of a run's faults; without a word of its end it is running, or nobody holds its directory."""
    held = is_locked(run_dir)  # looked at before its events are: they tell how it ended
    found = account(read_events(run_dir / EVENTS_FILE))
    if found.state == "not over":
        found.state = "running" if held else "interrupted"
        found.reason = "" if held else "the process of the job died without a word"
    return found


def print_faults(folder: Path) -> None:
    """One line per strike: kind, target, time, and the job's reaction."""
    found = account_of(folder)
    why = f", {reason_text(found.reason)}" if found.reason else ""
    print(f"{folder.name}: {found.state} at step {found.steps}{why}")
    for one in found.hits:
        place = one.target.startswith(("host:", "link:"))
        who = one.target if place else "coordinator" if one.worker_id is None else f"worker {one.worker_id}"
        took = "" if one.recovery_s is None else f", next step committed after {one.recovery_s:.2f} s"
        meant = (
            ""
            if place
            or one.target == "coordinator"
            or (one.target.endswith(f":{one.worker_id}") and "+" not in one.target)
            else f" ({one.target})"
        )
        print(f"  step {one.step:4} {one.phase:9} {one.fault:10} {who}{meant}: {one.outcome}{took}")
    print(flush=True)


@dataclass
class Result:
    """Result of a scenario. `wrong`: the deviations from the expected result; `again`: the command that repeats it;
    `running`: it has not ended, and nothing is wrong so far."""

    name: str
    account: FaultAccount
    wrong: list[str] = field(default_factory=list)
    equal: bool | None = None
    wall_s: float = 0.0
    again: str = ""
    seed: int = 0
    chaos: str = ""
    running: bool = False

    @property
    def passed(self) -> bool:
        return not self.wrong

    def to_dict(self) -> dict[str, Any]:
        return {
            "kind": "scenario",
            "name": self.name,
            "passed": self.passed,
            "running": self.running,
            "bitwise_equal": self.equal,
            "wrong": self.wrong,
            **self.account.to_dict(),
            "wall_s": round(self.wall_s, 2),
            "command": self.again,
            "seed": self.seed,
            "chaos": self.chaos,
        }


class Suite:
    """Runs of one task under `base`; the undisturbed run is made once.

    config: keys that all runs share. options: further options of `everstep run` for all runs; those that set the number
    of workers do not reach the undisturbed run. start: runs the command.
    """

    def __init__(
        self,
        base: Path,
        task: str,
        config: Mapping[str, Any],
        options: Sequence[str] = (),
        start: StartCase | None = None,
    ) -> None:
        self.base = base
        self.undisturbed = base / UNDISTURBED
        self._task = task
        self._config = dict(config)
        self._options = tuple(options)
        self._start = start or run_everstep

    def make_undisturbed(self) -> None:
        """One worker, no faults. Raises: JobFailed."""
        self.base.mkdir(parents=True, exist_ok=True)
        config = {k: v for k, v in self._config.items() if k not in _TOPOLOGY_KEYS}
        argv = self._argv(self.undisturbed, {**config, "workers": 1}, undisturbed_options(self._options))
        if self._start(argv, self.undisturbed):
            raise JobFailed(f"the undisturbed run failed: {_last_line(self.undisturbed)}; run {command_line(argv)}")

    def run(self, scenario: Scenario, *, bare: bool = False) -> Result:
        """Run and judge a scenario. bare: set only its faults, none of its other config."""
        run_dir = self.base / scenario.name
        config = {"chaos": scenario.chaos} if bare else {**self._config, **scenario.config()}
        argv = self._argv(run_dir, config, self._options)
        begin = time.monotonic()
        code = self._start(argv, run_dir)
        result = judge(run_dir, self.undisturbed, scenario)
        if code and scenario.fails is None:
            result.wrong.insert(0, f"everstep run ended with exit code {code}: {_last_line(run_dir)}")
        result.wall_s, result.again = time.monotonic() - begin, command_line(argv)
        return result

    def _argv(self, run_dir: Path, config: Mapping[str, Any], options: Sequence[str]) -> list[str]:
        argv = ["run", self._task, "--run-dir", str(run_dir), "--fresh", *options]
        structured = {key: value for key, value in config.items() if isinstance(value, list | dict)}
        if structured:  # JSON is YAML, and more than --set can say
            path = run_dir.with_suffix(".yaml")
            write_atomically(path, json.dumps(structured) + "\n")
            argv += ["--config", str(path)]
        return argv + [word for key in config if key not in structured for word in ("--set", f"{key}={config[key]}")]


def undisturbed_options(options: Sequence[str]) -> list[str]:
    """The same options for one worker: without those that set the number of workers and their places."""
    kept: list[str] = []
    words = iter(options)
    for word in words:
        name, equals, _ = word.partition("=")
        if name in _TOPOLOGY_OPTIONS:
            if not equals:
                next(words, None)
        elif word == "--set":
            setting = next(words, "")
            if setting.partition("=")[0].strip() not in _TOPOLOGY_KEYS:
                kept += [word, setting]
        else:
            kept.append(word)
    return kept


def run_everstep(argv: list[str], run_dir: Path, limit_s: float | None = None) -> int:
    """Run the command as a process of its own; its output is in RUN_DIR.log. After `limit_s` it is stopped."""
    with os.fdopen(open_below(run_dir.with_suffix(".log"), ANEW), "wb") as log:
        process = subprocess.Popen(
            own_command("everstep", *argv), stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
        )
        try:
            with before_leaving(process.terminate):
                return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = _end(process)
            log.write(f"stopped after {limit_s:g} s: give a slow machine --max-seconds\n".encode())
            return code


def _end(process: subprocess.Popen[bytes]) -> int:
    for end in (process.terminate, process.terminate, process.kill):
        end()
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(5.0) or 1
    return process.wait() or 1


def judge(run_dir: Path, undisturbed: Path | None, scenario: Scenario | None) -> Result:
    """Judge a run by its directory.

    undisturbed: the run that it must equal; None: nothing is compared. scenario: the events that must have happened.
    """
    found = account_of(run_dir)
    result = Result(run_dir.name, found)
    result.seed, result.chaos = _job_facts(run_dir)
    if scenario is not None and scenario.fails is not None:
        result.wrong += missing(scenario, found)
        if found.state != "failed" or found.cause is not scenario.fails:
            got = f"{found.state}, {found.cause}: {found.reason or 'no reason was reported'}"
            result.wrong.append(f"expected it to fail for the cause {scenario.fails}, got {got}")
        return result
    if found.state == "running":
        result.running = True
        return result
    if found.state != "completed":
        result.wrong.append(f"the job is {found.state}: {found.reason or 'no reason was reported'}")
        return result
    if undisturbed is not None:
        try:
            different = compare(undisturbed, run_dir)
            digests = [read_digest(path) or {} for path in (undisturbed, run_dir)]
            ledger = audit_run(run_dir)
        except EverstepError as error:
            result.wrong.append(str(error))
            return result
        result.equal = not different and digests[0] == digests[1]
        if not result.equal:
            result.wrong.append("NOT bitwise equal: " + "; ".join(different[:3]))
        if not ledger.clean:
            result.wrong.append("the ledger is not clean: some sample was not used exactly once")
    if scenario is not None:
        result.wrong += missing(scenario, found)
    return result


def _job_facts(run_dir: Path) -> tuple[int, str]:
    """Seed and faults of a job."""
    try:
        config = read_json(run_dir / JOB_FILE)["config"]
        return int(config["seed"]), str(config["chaos"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0, ""


def command_line(argv: Sequence[str]) -> str:
    """The shell command that repeats this run."""
    return shlex.join(["everstep", *argv])


def _last_line(run_dir: Path) -> str:
    return last_line(run_dir.with_suffix(".log")) or "no output"


def print_result(result: Result, as_json: bool = False) -> None:
    """One row; below it what is wrong and how to see it again. as_json: one object."""
    if as_json:
        print(json.dumps(result.to_dict()), flush=True)
        return
    found = result.account
    stated = result.passed and found.state == "failed"
    ends = "says why" if stated else "bits equal" if result.equal else "running" if result.running else found.state
    took = f"{found.median_s:.2f} (max {max(found.recoveries_s):.2f})" if found.recoveries_s else "-"
    counts = found.counts
    print(
        f"{result.name:22} {ends if result.passed else 'FAILED':12} {len(found.hits):6} "
        f"{counts.get('worker_evicted', 0):7} {counts.get('worker_healed', 0):6} {took:>16} {found.steps_redone:6} "
        f"{result.wall_s:6.1f}",
        flush=True,
    )
    for line in [found.reason] if stated else result.wrong:
        print(f"    {reason_text(line)}")
    if result.wrong:
        told = [f"seed {result.seed}, faults: {result.chaos}"] if result.chaos else []
        told += [f"again: {result.again}"] if result.again else []
        print(*(f"    {line}" for line in told), sep="\n", end="\n" * bool(told), flush=True)
