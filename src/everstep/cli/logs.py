"""`everstep logs`: all logs of a job as one stream, filtered."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path

import click

from everstep.base.errors import ConfigError
from everstep.base.leaving import until_ctrl_c
from everstep.cli.main import complain
from everstep.cli.run_dir import refuse_no_run
from everstep.observe.logs import LEVELS
from everstep.report.history import History
from everstep.report.logfiles import LogFiles, LogLine
from everstep.report.pulled import hosts_apart, pull_logs
from everstep.report.words import as_dict, whole_number
from everstep.runtime.files.run_lock import is_locked

_POLL_S = 0.2


@click.command()
@click.argument("run_dir", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--follow", "-f", is_flag=True, help="Follow until the job is over, or Ctrl-C.")
@click.option("--worker", type=int, help="Only this worker.")
@click.option("--host", help="Only workers of this host, which keeps its logs itself.")
@click.option("--level", type=click.Choice(LEVELS), default="info", help="Only lines of this level or higher (info).")
@click.option("--since-step", type=click.IntRange(0), help="Only lines after this step was done.")
@click.option("--grep", metavar="TEXT", help="Only lines with this text, tracebacks included.")
@click.option("--steps", is_flag=True, help="Show every committed step, too.")
@click.option("--lines", "-n", type=click.IntRange(0), help="Only the last N of the lines so far.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object per line.")
def command(
    run_dir: Path,
    follow: bool,
    worker: int | None,
    host: str | None,
    level: str,
    since_step: int | None,
    grep: str | None,
    steps: bool,
    lines: int | None,
    as_json: bool,
) -> int:
    """Print the output and logs of the workers of the job in DIR, and the job's events, by time."""
    refuse_no_run(run_dir)
    for problem in pull_logs(run_dir, host):
        complain(problem)
    files = LogFiles(run_dir, events=host is None, steps=steps or since_step is not None, host=host)
    if worker is not None:
        _check_worker(run_dir, files, worker)
    begun = not since_step

    def wanted() -> Iterator[LogLine]:
        nonlocal begun
        for line in files.read():
            begun = begun or (line.step or 0) >= (since_step or 0)
            if not begun or (not steps and line.fields.get("kind") == "step_committed"):
                continue
            if line.at_least(level) and (worker is None or line.worker_id == worker) and line.has(grep or ""):
                yield line

    with until_ctrl_c() if follow else contextlib.nullcontext():
        _show(wanted() if lines is None else deque(wanted(), maxlen=lines), as_json)
        while follow:
            running = is_locked(run_dir)
            pull_logs(run_dir, host if host in hosts_apart(run_dir) else None)
            if not _show(wanted(), as_json) and not running:
                break
            time.sleep(_POLL_S)
    if files.absurd:
        raise ConfigError(files.absurd)
    return 0


def _check_worker(run_dir: Path, files: LogFiles, worker: int) -> None:
    """Raises: ConfigError if the job has never had such a worker."""
    history = History(run_dir)
    config = as_dict(history.job.get("config"))
    known = files.worker_ids | set(range(sum(whole_number(config.get(name)) for name in ("workers", "spares"))))
    if worker not in known:
        known |= history.load().facts.crew.workers.keys()
    if worker not in known:
        listed = ", ".join(map(str, sorted(known))) or "none"
        raise ConfigError(f"--worker: expected one that {run_dir} has ({listed}), got {worker}")


def _show(lines: Iterable[LogLine], as_json: bool) -> int:
    count = 0
    for line in lines:
        print(line.json() if as_json else line)
        count += 1
    if count:
        print(end="", flush=True)
    return count
