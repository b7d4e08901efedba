"""`everstep compare`: several runs over each other, as one HTML file."""

from __future__ import annotations

from pathlib import Path

import click

from everstep.cli.report import open_run, write_page
from everstep.report.page import compare_page


@click.command()
@click.argument("run_dirs", metavar="DIR...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), default=Path("compare.html"), help="The file (compare.html).")
def command(run_dirs: tuple[Path, ...], out: Path) -> int:
    """Overlay the runs in DIR... in one HTML file."""
    if len(run_dirs) < 2:
        raise click.UsageError("expected two runs or more to compare, got one; everstep report DIR shows a single one")
    write_page(out, compare_page([open_run(path) for path in run_dirs]))
    print(out)
    return 0
