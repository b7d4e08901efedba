"""`everstep dashboard`: the live page over one or several runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from everstep.base.errors import ConfigError
from everstep.cli.beside import PUBLIC_HELP
from everstep.cli.ledger import audit_run, to_dict

TOKEN_HELP = "The token (made up on loopback; the variable, unlike this, is not in the list of processes)."


@click.command()
@click.argument("run_dirs", metavar="DIR...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--host", default="127.0.0.1", help="Where to listen (127.0.0.1); others than loopback need --token.")
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="Port, 0 for any that is free (0).")
@click.option("--token", envvar="EVERSTEP_DASHBOARD_TOKEN", help=TOKEN_HELP)
@click.option("--public", is_flag=True, help=PUBLIC_HELP)
def command(run_dirs: tuple[Path, ...], host: str, port: int, token: str | None, public: bool) -> int:
    """Show the jobs in DIR..., running or over, on a page in the browser. Ctrl-C ends it; the jobs go on."""
    try:
        from everstep.dashboard.serve import serve
    except ImportError as error:
        raise ConfigError(f"the dashboard needs {error.name}: pip install 'everstep[dashboard]'") from None
    for path in run_dirs:
        if not path.is_dir():
            raise ConfigError(f"there is no run directory {path}")
    serve(run_dirs, host, port, token, _audit, lambda address: print(address, flush=True), public)
    return 0


def _audit(run_dir: Path) -> dict[str, Any]:
    return to_dict(audit_run(run_dir))
