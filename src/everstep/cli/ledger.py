"""`everstep ledger`: checks that the committed steps used every sample of every epoch exactly once.

A ledger is complete if each of those steps has its row in at least one worker's file. They are the steps from the first
of the job (after a checkpoint of another job, if it began with one) to its last. For a job that is not over, or ended
badly, they end with the last step that is known to have been committed. Rows that still wait for a full disk are
missing until they are written.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import click

from everstep.base.errors import ConfigError
from everstep.base.given import open_given, portions
from everstep.cli.job import JobFile, read_job
from everstep.cli.run_dir import read_digest
from everstep.observe.events import Lines, last_committed_step
from everstep.order.cursor import SampleOrder
from everstep.order.ledger import LedgerReport, LedgerRow, audit, decode_rows, steps_of
from everstep.runtime.link.address import EVENTS_FILE

_SHOWN = 20
_NAMED = 3
_MOST_STEPS = 1 << 31
_MOST_EPOCHS = 1 << 18
_MOST_SAMPLES = 1 << 24


@click.command()
@click.argument("run_dir", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(run_dir: Path, as_json: bool) -> int:
    """Check the ledger of the job in DIR. Exit code 0: clean and complete; 1: not."""
    report = audit_run(run_dir)
    if as_json:
        print(json.dumps(asdict(report)))
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
    if digest is None and not (run_dir / EVENTS_FILE).is_file():
        raise ConfigError(
            f"the ledger of {run_dir} cannot be checked: neither {EVENTS_FILE} nor final/digest.json is there to say "
            "which steps were committed"
        )
    ended, after, order = digest is not None, job.begins_after, sample_order(run_dir, job)
    epochs = order.epoch_of(min(upto, order.total_steps) + 1)
    if epochs > _MOST_EPOCHS or order.global_batch > _MOST_SAMPLES:
        raise ConfigError(
            f"{run_dir} says {epochs} epochs and {order.global_batch} samples per step: expected at most "
            f"{_MOST_EPOCHS} and {_MOST_SAMPLES}"
        )
    return audit(read_rows(run_dir), order, upto, ended=ended, after=after)


def sample_order(run_dir: Path, job: JobFile) -> SampleOrder:
    """The order of samples that the job's config defines.

    Raises: ConfigError if the size of the dataset is not known.
    """
    if job.dataset_size is None:
        raise ConfigError(
            f"{run_dir} does not record the size of the dataset: the job ended before its workers knew it"
        )
    config = job.config
    epochs = config.epochs if config.steps is not None or config.epochs is not None else 1  # as `join` does
    length = config.steps, epochs, config.shuffle and not job.streamed
    return SampleOrder(config.seed, job.dataset_size, config.lanes, config.micro_batch, *length)


def read_rows(run_dir: Path) -> list[LedgerRow]:
    """The rows of all workers' files; torn last lines are passed over."""
    folder = run_dir / "ledger"
    if not folder.is_dir():
        raise ConfigError(f"{run_dir} has no ledger: no step was committed there")
    rows: list[LedgerRow] = []
    for path in sorted(folder.iterdir()):
        try:
            rows += [row for lines in _lines(path) for row in decode_rows(lines)]
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror or error}") from None
    return rows


def _lines(path: Path) -> Iterator[bytes]:
    """Whole lines of a file, in portions; a torn last line comes last. Raises: OSError."""
    lines = Lines()
    with open_given(path, 1) as file:
        yield from map(lines.whole, portions(file))
    yield lines.rest


def missing_rows(run_dir: Path, reached: int = 0) -> str:
    """Rows that the ledger of an ended job lacks, and the remedy, as a sentence; "" if it is complete.

    Reads only as much as needed, in portions. reached: a step known to have been committed, for a job that did not get
    to its end.

    Raises: ConfigError if job.json or the ledger cannot be read.
    """
    digest, after = read_digest(run_dir), read_job(run_dir, joined=False).begins_after
    last = int(digest["step"]) if digest is not None else max(last_committed_step(run_dir / EVENTS_FILE), reached)
    runs = _absent(run_dir / "ledger", after, last)
    if not runs:
        return ""
    n_absent = sum(final - first + 1 for first, final in runs)
    named = ", ".join(str(first) if first == final else f"{first}..{final}" for first, final in runs[:_NAMED])
    more = f" and {len(runs) - _NAMED} more ranges" if len(runs) > _NAMED else ""
    return (
        f"the ledger lacks the rows of {n_absent} of {last - after} steps ({named}{more}): {run_dir / 'ledger'} "
        "could not be written, and no remaining worker has them; the result is not affected, but nothing proves that "
        "these steps used each sample once: free some space and, if you need the proof, run the job again with --fresh"
    )


def _absent(folder: Path, after: int, last: int) -> list[tuple[int, int]]:
    """Steps of after+1..last without a row, as runs (first, last). Most often the largest file has all rows."""
    if last - after > _MOST_STEPS:
        raise ConfigError(f"{folder.parent} says that it is at step {last}: expected at most {_MOST_STEPS} steps")
    seen = bytearray(max(0, last - after) + 1)
    left = last - after
    try:
        files = sorted(folder.iterdir(), key=lambda path: path.stat().st_size, reverse=True) if folder.is_dir() else []
        for path in files:
            for lines in _lines(path) if left > 0 else ():
                for step in steps_of(lines):
                    if after < step <= last and not seen[step - after]:
                        seen[step - after] = 1
                        left -= 1
                if left <= 0:
                    break
    except OSError as error:
        raise ConfigError(f"cannot read {error.filename or folder}: {error.strerror or error}") from None
    runs, at = list[tuple[int, int]](), 1
    while left > 0 and (at := seen.find(0, at)) >= 0:
        stop = seen.find(1, at)
        stop = stop if stop >= 0 else len(seen)
        runs.append((after + at, after + stop - 1))
        at = stop
    return runs


def _print(report: LedgerReport) -> None:
    for epoch in asdict(report)["epochs"]:
        print("  ".join(f"{name} {value}" for name, value in epoch.items()))
    for problem in report.problems[:_SHOWN]:
        print(f"problem: {problem}")
    if len(report.problems) > _SHOWN:
        print(f"and {len(report.problems) - _SHOWN} more problems")
    verdict = (
        "clean: every sample counted exactly once" if report.clean else f"not clean: {len(report.problems)} problems"
    )
    rows = "" if report.complete else "; incomplete: committed steps have no row"
    print(f"{report.steps} steps, {verdict}{rows}")
