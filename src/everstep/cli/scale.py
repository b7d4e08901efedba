"""`everstep scale`: more or fewer workers, while the job runs."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click

from everstep.base.errors import ConfigError
from everstep.cli.job import read_job
from everstep.cli.run_dir import read_digest
from everstep.runtime import commands

_PATIENCE_S = 10.0


@click.command()
@click.argument("run_dir", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--workers", type=int, required=True, help="How many workers there shall be.")
def command(run_dir: Path, workers: int) -> int:
    """Change the number of workers of the job that runs in DIR."""
    job = read_job(run_dir)
    if not job.config.min_workers <= workers <= job.config.lanes:
        raise ConfigError(
            f"--workers must be from {job.config.min_workers} (min_workers) to "
            f"{job.config.lanes} (lanes), got {workers}"
        )
    result = ask_running(run_dir, "scale", {"workers": workers})
    print(f"{run_dir}: from {result.get('before', '?')} to {workers} workers")
    return 0


def ask_running(run_dir: Path, name: str, args: dict[str, Any], timeout_s: float = _PATIENCE_S) -> dict[str, Any]:
    """Ask the job that runs in this directory; a coordinator that is being restarted gets some time.

    timeout_s: for the reply.

    Raises: ConfigError if none runs there, or if it refuses; NoAnswer if its coordinator is silent.
    """
    read_job(run_dir)
    end = time.monotonic() + _PATIENCE_S
    while True:
        try:
            return commands.ask(run_dir, name, dict(args), timeout_s)
        except commands.NoJobRunning as error:
            if not commands.is_locked(run_dir):
                ended = "; it has finished" if read_digest(run_dir) is not None else ""
                raise ConfigError(f"{error}{ended}") from None
            if time.monotonic() > end:
                raise commands.NoAnswer(f"the coordinator of {run_dir} is not there at the moment: try again") from None
        time.sleep(0.1)
