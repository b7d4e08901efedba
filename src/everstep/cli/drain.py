"""`everstep drain`: one worker leaves in order, its lanes move to the others."""

from __future__ import annotations

from pathlib import Path

import click

from everstep.cli.scale import ask_running


@click.command()
@click.argument("run_dir", metavar="DIR", type=click.Path(path_type=Path))
@click.argument("worker_id", type=int)
def command(run_dir: Path, worker_id: int) -> int:
    """Let WORKER_ID of the job that runs in DIR leave in order, for good."""
    result = ask_running(run_dir, "drain", {"worker_id": worker_id})
    print(f"{run_dir}: worker {worker_id} is leaving, {result.get('workers', '?')} stay")
    return 0
