"""`everstep logs`: all logs of a job as one stream, filtered."""

from __future__ import annotations

import time
from pathlib import Path

import click

from everstep.base.errors import ConfigError
from everstep.report.logfiles import LEVELS, LogFiles, LogLine
from everstep.runtime import commands

_POLL_S = 0.2


@click.command()
@click.argument("run_dir", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--follow", "-f", is_flag=True, help="Go on until the job is over.")
@click.option("--worker", type=int, help="Only of this worker.")
@click.option("--level", type=click.Choice(LEVELS), default="info", help="This level and graver ones (info).")
@click.option("--steps", is_flag=True, help="Show every committed step, too.")
@click.option("--lines", "-n", type=click.IntRange(0), help="Only so many of the lines that are there already.")
def command(run_dir: Path, follow: bool, worker: int | None, level: str, steps: bool, lines: int | None) -> int:
    """Print the logs of the job in DIR: workers, coordinator, events, by time."""
    if not run_dir.is_dir():
        raise ConfigError(f"there is no run directory {run_dir}")
    files = LogFiles(run_dir)

    def wanted() -> list[LogLine]:
        found = files.read(steps)
        return [line for line in found if line.at_least(level) and (worker is None or line.worker_id == worker)]

    _show(wanted() if lines is None else wanted()[-lines:] if lines else wanted()[:0])
    while follow:
        running = commands.is_locked(run_dir)
        fresh = wanted()
        _show(fresh)
        if not running and not fresh:
            break
        time.sleep(_POLL_S)
    return 0


def _show(lines: list[LogLine]) -> None:
    for line in lines:
        print(line)
    if lines:
        print(end="", flush=True)
