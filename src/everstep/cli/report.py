"""`everstep report` and `everstep compare`: one job, or several on top of each other, as HTML and pictures."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

import click

from everstep.base.below import write_atomically
from everstep.base.errors import ConfigError, EverstepError
from everstep.cli.job import read_job
from everstep.cli.ledger import audit_run
from everstep.cli.verify import compare
from everstep.report.figures import figures
from everstep.report.history import History
from everstep.report.page import Proof, compare_page, report_page
from everstep.report.style import can_draw, write_pictures
from everstep.runtime.link.address import EVENTS_FILE

REPORT_FILE = "report.html"


@click.command()
@click.argument("run_dir", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), help=f"File to write (DIR/{REPORT_FILE}).")
@click.option("--reference", type=click.Path(path_type=Path), help="Undisturbed run to compare the final bits with.")
def report_command(run_dir: Path, out: Path | None, reference: Path | None) -> int:
    """Write a report on the job in DIR: one HTML file, with its figures as PNGs beside it."""
    history = open_run(run_dir)
    running = history.running()
    page = report_page(history, prove(run_dir, reference), running)
    target = out if out is not None else run_dir / REPORT_FILE
    write_page(target, page, named=out is not None)
    print(target)
    if can_draw():
        folder = target.with_name(f"{target.stem}-figures")
        for path in write_pictures(folder, figures(history, running), 1 if out is None else None):
            print(path)
    else:
        print("no pictures: pip install 'everstep[report]' draws the figures as PNGs, too")
    _refuse_untold([history])
    return 0


def open_run(run_dir: Path) -> History:
    """All facts of a run.

    Raises: ConfigError if DIR is no run directory.
    """
    if not run_dir.is_dir():
        raise ConfigError(f"there is no run directory {run_dir}")
    read_job(run_dir)
    return History(run_dir).load()


def prove(run_dir: Path, reference: Path | None) -> Proof:
    """The ledger's audit, and the comparison with a reference.

    Raises: ConfigError if the reference cannot be read.
    """
    ledger, note = None, ""
    try:
        ledger = asdict(audit_run(run_dir))
    except EverstepError as error:
        note = str(error)
    if reference is None:
        return Proof(ledger, note)
    return Proof(ledger, note, str(reference), compare(reference, run_dir))


def write_page(path: Path, page: str, *, named: bool = True) -> None:
    """Write an HTML file. named: the user named this very file, which may be a link or a device. Raises: ConfigError if
    it cannot be written."""
    try:
        if not named:
            write_atomically(path, page)
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from None


@click.command()
@click.argument("run_dirs", metavar="DIR...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--out", type=click.Path(path_type=Path), default=Path("compare.html"), help="File to write (compare.html)."
)
def compare_command(run_dirs: tuple[Path, ...], out: Path) -> int:
    """Overlay the runs in DIR... in one HTML file."""
    if len(run_dirs) < 2:
        raise click.UsageError("expected two runs or more to compare, got one; everstep report DIR shows a single one")
    histories = [open_run(path) for path in run_dirs]
    write_page(out, compare_page(histories))
    print(out)
    _refuse_untold(histories)
    return 0


def _refuse_untold(histories: Iterable[History]) -> None:
    """Refuse events that cannot be read, or with impossible numbers, after all files are written. Raises:
    ConfigError."""
    for history in histories:
        if history.trouble:
            raise ConfigError(f"{history.run_dir / EVENTS_FILE} cannot be read: {history.trouble}")
        if history.absurd:
            raise ConfigError(history.absurd)
