"""`everstep checkpoint`: a checkpoint of a running job, now; returns when it is durable."""

from __future__ import annotations

import json
from pathlib import Path

import click

from everstep.cli.scale import ask_running


@click.command()
@click.argument("run_dir", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--timeout", "timeout_s", type=float, default=600.0, show_default=True, help="Seconds to wait for it.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def command(run_dir: Path, timeout_s: float, as_json: bool) -> int:
    """Take a checkpoint of the job that runs in DIR after its present step, and say where it is."""
    result = ask_running(run_dir, "checkpoint", {}, timeout_s)
    if as_json:
        print(json.dumps(result))
    else:
        print(f"checkpoint of step {result.get('step')} in {result.get('path')}")
    return 0
