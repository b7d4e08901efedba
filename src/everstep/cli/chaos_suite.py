"""Runs scenarios one after the other, each a real `everstep run`, and judges how they ended."""

from __future__ import annotations

import json
import shlex
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from everstep.base.errors import EverstepError, JobFailed
from everstep.chaos.account import FaultAccount, account, missing
from everstep.chaos.scenarios import Scenario
from everstep.cli.ledger import audit_run
from everstep.cli.run_dir import read_digest
from everstep.cli.verify import compare
from everstep.observe.events import read_events
from everstep.runtime.address import EVENTS_FILE, JOB_FILE
from everstep.runtime.process import own_command

UNDISTURBED = "undisturbed"
LIMIT_S = 120.0
_TOPOLOGY_OPTIONS = ("--workers", "--stages", "--pool", "--redundancy", "--spares", "--min-workers")
_TOPOLOGY_KEYS = ("workers", "stages", "pool", "redundancy", "map", "cut", "spares", "min_workers", "chaos")
_TITLE = (
    f"{'scenario':22} {'ends':12} {'faults':>6} {'evicted':>7} {'healed':>6} {'recovery s':>16} {'redone':>6} {'s':>6}"
)

StartCase = Callable[[list[str], Path], int]
"""Runs `everstep ARGV`, its output into a file beside the run directory; returns the exit code."""


@dataclass
class Result:
    """How a scenario ended. `wrong`: what is not as it should be; `again`: the command that does it again."""

    name: str
    account: FaultAccount
    wrong: list[str] = field(default_factory=list)
    equal: bool | None = None
    wall_s: float = 0.0
    again: str = ""
    seed: int = 0
    chaos: str = ""

    @property
    def passed(self) -> bool:
        return not self.wrong

    def to_dict(self) -> dict[str, Any]:
        """As `--json` says it."""
        return {
            "kind": "scenario",
            "name": self.name,
            "passed": self.passed,
            "bitwise_equal": self.equal,
            "wrong": self.wrong,
            **self.account.to_dict(),
            "wall_s": round(self.wall_s, 2),
            "command": self.again,
            "seed": self.seed,
            "chaos": self.chaos,
        }


class Suite:
    """Runs of one task under `base`; the undisturbed one is made once.

    config: keys that all runs share. options: further ones of `everstep run`, for all of them; those that say how many
    workers there are do not reach the undisturbed run. start: runs the command.
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
        """Run and judge a scenario. bare: set nothing but its faults."""
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
            path.write_text(json.dumps(structured) + "\n")
            argv += ["--config", str(path)]
        for key, value in config.items():
            if key not in structured:
                argv += ["--set", f"{key}={value}"]
        return argv


def undisturbed_options(options: Sequence[str]) -> list[str]:
    """The same options for one worker: without those that say how many there are and where they sit."""
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


def run_everstep(argv: list[str], run_dir: Path) -> int:
    """As a process of its own; its output goes to RUN_DIR.log. A job that does not end in time is ended."""
    with open(run_dir.with_suffix(".log"), "wb") as log:
        process = subprocess.Popen(
            own_command("everstep", *argv), stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
        )
        try:
            return process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            return _end(process)
        except BaseException:
            _end(process)
            raise


def _end(process: subprocess.Popen[bytes]) -> int:
    for patience_s in (5.0, 5.0):
        process.terminate()
        try:
            return process.wait(patience_s) or 1
        except subprocess.TimeoutExpired:
            continue
    process.kill()
    return process.wait() or 1


def judge(run_dir: Path, undisturbed: Path | None, scenario: Scenario | None) -> Result:
    """What a run came to, from its directory.

    undisturbed: what it is to be equal to; None: nothing is compared. scenario: what has to have happened.
    """
    found = account(read_events(run_dir / EVENTS_FILE))
    result = Result(run_dir.name, found)
    result.seed, result.chaos = _job_facts(run_dir)
    if scenario is not None and scenario.fails is not None:
        result.wrong += missing(scenario, found)
        if found.state != "failed" or found.cause is not scenario.fails:
            got = f"{found.state}, {found.cause}: {found.reason or 'no reason was reported'}"
            result.wrong.append(f"expected it to fail for the cause {scenario.fails}, got {got}")
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
        config = json.loads((run_dir / JOB_FILE).read_text())["config"]
        return int(config["seed"]), str(config["chaos"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0, ""


def command_line(argv: Sequence[str]) -> str:
    """What to type to have it once more."""
    return shlex.join(["everstep", *argv])


def _last_line(run_dir: Path) -> str:
    try:
        lines = [line for line in run_dir.with_suffix(".log").read_text(errors="replace").splitlines() if line.strip()]
    except OSError:
        return "no output"
    return lines[-1].strip() if lines else "no output"


def print_title() -> None:
    """Names of the columns of `print_result`."""
    print(_TITLE, flush=True)


def print_result(result: Result) -> None:
    """One row; below it what is wrong and how to see it again."""
    found = result.account
    ends = "bits equal" if result.equal else "NOT EQUAL" if result.equal is False else found.state
    stated = result.passed and found.state == "failed"
    ends = "says why" if stated else ends
    took = "-"
    if found.recoveries_s:
        took = f"{found.median_s:.2f} (max {max(found.recoveries_s):.2f})"
    counts = found.counts
    print(
        f"{result.name:22} {ends if result.passed else 'FAILED':12} {len(found.struck):6} "
        f"{counts.get('worker_evicted', 0):7} {counts.get('worker_healed', 0):6} {took:>16} {found.steps_redone:6} "
        f"{result.wall_s:6.1f}",
        flush=True,
    )
    for line in [found.reason] if stated else result.wrong:
        print(f"    {line}")
    if result.wrong:
        print(f"    seed {result.seed}, faults: {result.chaos}\n    again: {result.again}", flush=True)
