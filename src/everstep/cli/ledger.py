"""`everstep ledger`: was every sample of every epoch used exactly once, by exactly the steps that were committed."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import click

from everstep.base.errors import ConfigError
from everstep.cli.job import Job, read_job
from everstep.cli.run_dir import read_digest
from everstep.observe.events import last_committed_step
from everstep.order.cursor import SampleOrder
from everstep.order.ledger import LedgerReport, LedgerRow, audit, decode_rows
from everstep.runtime.address import EVENTS_FILE

_SHOWN = 20


@click.command()
@click.argument("run_dir", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def command(run_dir: Path, as_json: bool) -> int:
    """Check the ledger of the job in DIR. Exit code 0: clean; 1: not."""
    report = audit_run(run_dir)
    if as_json:
        print(json.dumps(to_dict(report)))
    else:
        _print(report)
    return 0 if report.clean else 1


def audit_run(run_dir: Path) -> LedgerReport:
    """Audit the union of all workers' rows against the order that the job's config defines.

    Raises: ConfigError if DIR is no run directory, or its ledger cannot be read.
    """
    if not run_dir.is_dir():
        raise ConfigError(f"there is no run directory {run_dir}")
    job = read_job(run_dir)
    if job.config.batch != "constant":
        raise ConfigError(
            f"the ledger of {run_dir} cannot be checked: with batch={job.config.batch} the batch followed the workers"
        )
    digest = read_digest(run_dir)
    upto = int(digest["step"]) if digest is not None else last_committed_step(run_dir / EVENTS_FILE)
    ended, after = digest is not None, job.begins_after
    return audit(read_rows(run_dir), sample_order(run_dir, job), upto, ended=ended, after=after)


def sample_order(run_dir: Path, job: Job) -> SampleOrder:
    """The order of samples that the job's config defines.

    Raises: ConfigError if the size of the dataset is not known.
    """
    if job.dataset_size is None:
        raise ConfigError(f"{run_dir} does not say how large the dataset is: the job ended before its workers had it")
    config = job.config
    epochs = config.epochs if config.steps is not None or config.epochs is not None else 1  # as `join` does
    return SampleOrder(config.seed, job.dataset_size, config.lanes, config.micro_batch, config.steps, epochs)


def read_rows(run_dir: Path) -> list[LedgerRow]:
    """The rows of all workers' files; torn last lines are passed over."""
    folder = run_dir / "ledger"
    if not folder.is_dir():
        raise ConfigError(f"{run_dir} has no ledger: no step was committed there")
    rows: list[LedgerRow] = []
    for path in sorted(folder.iterdir()):
        try:
            rows.extend(decode_rows(path.read_bytes()))
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror or error}") from None
    return rows


def to_dict(report: LedgerReport) -> dict[str, Any]:
    """The report as JSON-able data."""
    return dataclasses.asdict(report)


def _print(report: LedgerReport) -> None:
    data = to_dict(report)
    for epoch in data["epochs"]:
        print("  ".join(f"{name} {value}" for name, value in epoch.items()))
    for problem in report.problems[:_SHOWN]:
        print(f"problem: {problem}")
    if len(report.problems) > _SHOWN:
        print(f"and {len(report.problems) - _SHOWN} more problems")
    verdict = (
        "clean: every sample counted exactly once" if report.clean else f"not clean: {len(report.problems)} problems"
    )
    print(f"{report.steps} steps, {verdict}")
