"""The ledger: which samples each committed step used, and the proof that each was used exactly once. Pure.

One row per step, equal from every writer. Rows are keyed by step and idempotent, so every worker may write its own
copy, and a step that was redone after a restart gives an equal row. A row does not list samples but carries, for every
lane, a digest of the samples that were really loaded; the audit computes what they should have been.
"""

from __future__ import annotations

import contextlib
import struct
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice, pairwise
from typing import Annotated

import msgspec

from everstep.order.cursor import SampleOrder

_START = b'{"step":'
_MOST_PROBLEMS = 1000
_PIECE = 1 << 16


@dataclass(frozen=True)
class LaneUse:
    """Samples that one lane of a step used. count: number of samples; digest: `use_digest` of them, 64 bits."""

    lane: int
    worker_id: int
    count: int
    digest: int


@dataclass(frozen=True)
class LedgerRow:
    """One committed step; `generation` is the one in which it was committed."""

    step: int
    generation: int
    lanes: tuple[LaneUse, ...]


@dataclass(frozen=True)
class EpochReport:
    """Use of the samples of one epoch (from 0), as far as the audited steps go.

    samples: number that the steps should have used. counted: number of different samples that they used. missing:
    samples - counted. duplicated: uses beyond the first of a sample.
    """

    epoch: int
    samples: int
    counted: int
    missing: int
    duplicated: int


@dataclass(frozen=True)
class LedgerReport:
    """Result of an audit.

    clean: every sample was used exactly once. complete: every audited step has a row, right or wrong. A complete ledger
    that is not clean shows an error; an incomplete one proves nothing. steps: number of audited steps that have a row.
    problems: one line each (1000 at most).
    """

    clean: bool
    complete: bool
    problems: tuple[str, ...]
    steps: int
    epochs: tuple[EpochReport, ...]


def use_digest(samples: Iterable[tuple[int, int]]) -> int:
    """64-bit digest of (epoch, index) pairs, in the order in which they were loaded."""
    flat = [number for sample in samples for number in sample]
    return int.from_bytes(blake2b(struct.pack(f"<{len(flat)}Q", *flat), digest_size=8).digest(), "little")


def encode_row(row: LedgerRow) -> bytes:
    """One line of text, its line feed included."""
    lanes = [[use.lane, use.worker_id, use.count, f"{use.digest:016x}"] for use in row.lanes]
    body = {"step": row.step, "generation": row.generation, "lanes": lanes}
    return msgspec.json.encode(body) + b"\n"


def decode_rows(data: bytes) -> list[LedgerRow]:
    """Rows of a file. Unreadable lines are skipped: a torn last line, or a torn one that others were appended to.

    Skipping cannot make a ledger look better than it is, because the audit wants a row for every step.
    """
    rows: list[LedgerRow] = []
    for line in _lines(data):
        uses = tuple(LaneUse(lane, worker_id, count, int(use, 16)) for lane, worker_id, count, use in line.lanes)
        rows.append(LedgerRow(line.step, line.generation, uses))
    return rows


def steps_of(data: bytes) -> Iterator[int]:
    """Steps of the rows in a file, for callers that need nothing else."""
    return (line.step for line in _lines(data))


_Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
_Digest = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{16}\Z")]


class _Line(msgspec.Struct):
    step: _Count
    generation: _Count
    lanes: list[tuple[_Count, _Count, _Count, _Digest]]


_decode = msgspec.json.Decoder(_Line).decode


def _lines(data: bytes) -> Iterator[_Line]:
    for text in data.split(b"\n"):
        begin = text.rfind(_START)
        if begin >= 0:
            with contextlib.suppress(ValueError, RecursionError):
                yield _decode(text[begin:])


# ---- audit


def audit(
    rows: Iterable[LedgerRow], order: SampleOrder, upto_step: int, *, ended: bool = True, after: int = 0
) -> LedgerReport:
    """Check that the rows show that steps 1..upto_step used exactly the samples that they should have.

    Rows may come in any order and repeat. upto_step: the last committed step. ended: the job has ended there, so a row
    of a later step is a problem; in a running job it is only newer than `upto_step`. after: step of another job's
    checkpoint that this job began with; the rows up to it are in the other's ledger, and count as clean.

    The time grows with the number of rows and epochs, not with the number of steps.
    """
    problems = _Problems()
    by_step = _by_step(rows, problems)
    last = upto_step if ended else max(upto_step, order.total_steps)
    for step in sorted(by_step):
        if not 1 <= step <= last:
            problems.add(f"step {step} has a row, but the steps are 1..{last}")
    if upto_step > order.total_steps:
        problems.add(f"step {upto_step} was committed, but the job ends at step {order.total_steps}")
    counts = _Counts(order)
    final_step = min(upto_step, order.total_steps)
    there = [step for step in sorted(by_step) if 1 <= step <= final_step]
    absent: list[tuple[int, int]] = []
    for before, step in pairwise((0, *there, max(0, final_step) + 1)):
        first, final = before + 1, step - 1  # without a row
        if first <= min(final, after):
            counts.trust(order.samples_before(first), order.samples_before(min(final, after) + 1))
        if max(first, after + 1) <= final:
            absent.append((max(first, after + 1), final))
        if step <= final_step:
            _audit_row(by_step[step], order, counts, problems)
            counts.close_before(order.epoch_of(step + 1))
    for first, final in absent:
        problems.add(f"step {first} has no row" if first == final else f"steps {first}..{final} have no row")
    epochs = counts.report(order.samples_before(min(upto_step, order.total_steps) + 1))
    for epoch in epochs:
        if epoch.missing or epoch.duplicated:
            problems.add(
                f"epoch {epoch.epoch}: {epoch.missing} of {epoch.samples} samples not counted, "
                f"{epoch.duplicated} counted again"
            )
    return LedgerReport(not problems.found, not absent, problems.lines(), len(there), epochs)


class _Problems:
    """Problems found; only the first ones are kept as text."""

    def __init__(self) -> None:
        self.found = 0
        self._lines: list[str] = []

    def add(self, line: str, count: int = 1) -> None:
        """Add a problem. count: number of problems that the line stands for."""
        self.found += count
        if self.found < _MOST_PROBLEMS:
            self._lines.append(line)

    def lines(self) -> tuple[str, ...]:
        left = self.found - len(self._lines)
        return (*self._lines, f"and {left} more problems") if left else tuple(self._lines)


def _by_step(rows: Iterable[LedgerRow], problems: _Problems) -> dict[int, LedgerRow]:
    """One row per step. Rows of one step must agree on the samples; workers and generations may differ."""
    by_step: dict[int, LedgerRow] = {}
    for row in rows:
        kept = by_step.setdefault(row.step, row)
        if kept is not row and _samples_of(kept) != _samples_of(row):
            problems.add(f"step {row.step} has conflicting rows (generations {kept.generation} and {row.generation})")
    return by_step


def _samples_of(row: LedgerRow) -> list[tuple[int, int, int]]:
    return sorted((use.lane, use.count, use.digest) for use in row.lanes)


def _audit_row(row: LedgerRow, order: SampleOrder, counts: _Counts, problems: _Problems) -> None:
    seen: set[int] = set()
    for use in row.lanes:
        where = f"step {row.step}, lane {use.lane} (worker {use.worker_id})"
        if not 0 <= use.lane < order.lanes:
            problems.add(f"{where}: there are only lanes 0..{order.lanes - 1}")
            continue
        if use.lane in seen:
            problems.add(f"{where}: counted twice")
        seen.add(use.lane)
        samples = order.samples(row.step, use.lane)
        if use.count != len(samples):
            problems.add(f"{where}: expected {len(samples)} samples, got {use.count}")
        elif use.digest != use_digest(samples):
            problems.add(f"{where}: used other samples than its {len(samples)}")
        else:
            counts.add(samples)
    due = order.samples_before(row.step + 1) - order.samples_before(row.step)
    lanes = min(order.lanes, -(-due // order.micro_batch))
    lacking = lanes - sum(lane < lanes for lane in seen)
    for lane in islice((lane for lane in range(lanes) if lane not in seen), min(lacking, _MOST_PROBLEMS)):
        problems.add(f"step {row.step}, lane {lane}: not in the row")
    if lacking > _MOST_PROBLEMS:
        problems.add(f"step {row.step}: {lacking - _MOST_PROBLEMS} more lanes are not in the row", lacking)


def ranges(steps: list[int]) -> list[tuple[int, int]]:
    """Ascending steps as runs (first, last)."""
    runs: list[tuple[int, int]] = []
    for step in steps:
        if runs and runs[-1][1] == step - 1:
            runs[-1] = (runs[-1][0], step)
        else:
            runs.append((step, step))
    return runs


class _Counts:
    """Samples used, by epoch: one byte per sample of each open epoch in which any was used."""

    def __init__(self, order: SampleOrder) -> None:
        self._size = order.dataset_size
        self._open: dict[tuple[int, int], bytearray] = {}
        self._duplicated: Counter[int] = Counter()
        self._counted: Counter[int] = Counter()

    def add(self, samples: Iterable[tuple[int, int]]) -> None:
        for epoch, index in samples:
            where = epoch, index // _PIECE
            used = self._open.get(where)
            if used is None:
                used = self._open[where] = bytearray(_PIECE)
            (self._duplicated if used[index % _PIECE] else self._counted)[epoch] += 1
            used[index % _PIECE] = 1

    def trust(self, first: int, stop: int) -> None:
        """Count these samples, numbered over all epochs, as used, without noting which they are."""
        while first < stop:
            epoch, position = divmod(first, self._size)
            count = min(stop - first, self._size - position)
            self._counted[epoch] += count
            first += count

    def close_before(self, epoch: int) -> None:
        """Drop the samples of earlier epochs: no more uses of them will come."""
        for done in [where for where in self._open if where[0] < epoch]:
            del self._open[done]

    def report(self, total: int) -> tuple[EpochReport, ...]:
        """`total`: samples that should have been used, over all epochs."""
        reports = []
        for epoch in range(-(-total // self._size)):
            due = min(self._size, total - epoch * self._size)
            counted = self._counted[epoch]
            reports.append(EpochReport(epoch, due, counted, due - counted, self._duplicated[epoch]))
        return tuple(reports)
