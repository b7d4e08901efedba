"""`everstep dashboard` and `everstep metrics`: the live page over runs, and the numbers of one for Prometheus."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict
from pathlib import Path

import click

from everstep.base.errors import ConfigError
from everstep.cli.beside import ANY_PORT, PUBLIC_HELP, check_installed, parse_listen
from everstep.cli.ledger import audit_run
from everstep.runtime.link.address import EVENTS_FILE, JOB_FILE, METRICS_TOKEN_FILE

TOKEN_HELP = (
    "Token that browsers need (on loopback: a new one). Others can read it here; use the variable on shared hosts."
)


@click.command()
@click.argument("run_dirs", metavar="DIR...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--host",
    default="127.0.0.1",
    help="Address to listen on (127.0.0.1); an address other than loopback needs --token.",
)
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="Port; 0: any free port (0).")
@click.option("--token", envvar="EVERSTEP_DASHBOARD_TOKEN", help=TOKEN_HELP)
@click.option("--public", is_flag=True, help=PUBLIC_HELP)
def dashboard(run_dirs: tuple[Path, ...], host: str, port: int, token: str | None, public: bool) -> int:
    """Show the jobs in DIR..., running or over, on a page in the browser. For a folder of run directories the page
    lists them, to sort and compare. Ctrl-C ends it; the jobs go on."""
    try:
        from everstep.dashboard.app import serve
    except ImportError as error:
        raise ConfigError(f"the dashboard needs {error.name}: pip install 'everstep[dashboard]'") from None
    for path in run_dirs:
        if not path.is_dir():
            raise ConfigError(f"there is no run directory {path}")
    serve(run_dirs, host, port, token, lambda path: asdict(audit_run(path)), public)
    return 0


@click.command()
@click.argument("run_dir", metavar="DIR", type=click.Path(path_type=Path))
@click.option(
    "--listen", default=ANY_PORT, metavar="HOST:PORT", help=f"Address that serves /metrics ({ANY_PORT}: any free port)."
)
@click.option("--once", is_flag=True, help="Print the metrics and exit.")
@click.option(
    "--token",
    envvar="EVERSTEP_METRICS_TOKEN",
    help=f"Bearer token that scrapers must send (on loopback: the one in DIR/{METRICS_TOKEN_FILE}).",
)
@click.option("--public", is_flag=True, help=PUBLIC_HELP)
def metrics(run_dir: Path, listen: str, once: bool, token: str | None, public: bool) -> int:
    """Serve the metrics of the job in DIR, running or over, to Prometheus. Ctrl-C ends it; the job goes on."""
    host, port = parse_listen("--listen", listen)
    if not run_dir.is_dir():
        raise ConfigError(f"there is no run directory {run_dir}")
    if not any((run_dir / name).is_file() for name in (EVENTS_FILE, JOB_FILE)):
        raise ConfigError(f"{run_dir} is no run directory: expected {JOB_FILE} or {EVENTS_FILE} in it")
    check_installed("everstep metrics")
    if once:
        sys.stdout.write(_text(run_dir))
        return 0
    from everstep.dashboard.app import serve_metrics

    serve_metrics(run_dir, host, port, token, public)
    return 0


def _text(run_dir: Path) -> str:
    from everstep.report.history import History
    from everstep.report.prometheus import device_families, expose, families

    history = History(run_dir).load()
    if history.trouble:
        raise ConfigError(f"{run_dir / EVENTS_FILE} cannot be read: {history.trouble}")
    found = families(history, history.running(), None, time.time_ns())
    return expose([*found, *device_families()])[0].decode()
