"""Time, bytes and memory that workers use, from the samples in metrics/*.jsonl. Pure.

Samples hold counters that only grow within a life of a worker; the difference to the one before on the same host
counts. Files of several hosts may come in any order: differences are added up in buckets of time, which double in width
once there are many.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from everstep.report.spent import Spent, spent_between
from everstep.report.tally import STEP_BOUNDS_S, Histogram
from everstep.report.words import as_dict, number, one_line, whole_number

STEP_PHASES = ("load", "forward", "backward", "transfer", "reduce", "agree", "update", "stall")
PHASES = (*STEP_PHASES, "recover", "other")
_BUCKETS = 2048
_FEWEST = 8
_STEPS_EACH = 3
_MOST_OPERATIONS = 24
_MOST_WORKERS = 8192
_NOT_STEPPING = ("idle", "starting", "heal")


Amounts = defaultdict[str, float]


def _amounts() -> Amounts:
    return defaultdict(float)


@dataclass
class Bucket:
    """One stretch of time: sums over all workers."""

    seconds: Amounts = field(default_factory=_amounts)
    sent_bytes: Amounts = field(default_factory=_amounts)
    steps: float = 0.0

    def merge(self, other: Bucket) -> None:
        for mine, theirs in ((self.seconds, other.seconds), (self.sent_bytes, other.sent_bytes)):
            for name, value in theirs.items():
                mine[name] += value
        self.steps += other.steps


@dataclass
class Newest:
    """The newest sample of a worker, and its speed since the one before. step_row: the sample in which it reached its
    present step; None while it takes no part in steps. spent: use since the sample before."""

    time_ns: int
    row: Mapping[str, Any]
    samples_per_s: float | None = None
    cpu_share: float | None = None
    step_row: Mapping[str, Any] | None = None
    spent: Spent | None = None


class Usage:
    """Takes in lines of metrics files. `workers`: the newest of each; `total_s`: seconds by phase of all workers;
    `step_seconds`: by phase, seconds per step of each worker; `cpu_us`: processor time of all workers' lives; `cpus`:
    processors that a host lets its workers use, by host."""

    def __init__(self, width_s: float = 1.0) -> None:
        self.width_s = width_s
        self.version = 0
        self.workers: dict[int, Newest] = {}
        self.buckets: dict[int, Bucket] = {}
        self.total_s: Amounts = _amounts()
        self.total_bytes: Amounts = _amounts()
        self.step_seconds = {phase: Histogram(STEP_BOUNDS_S) for phase in STEP_PHASES}
        self.cpu_us = 0
        self.cpus: dict[str, int] = {}
        self.lines = 0
        self._rows: dict[tuple[str, int], Newest] = {}

    def take(self, line: Mapping[str, Any]) -> None:
        """Take in one line: all workers of a host at one moment."""
        time_ns = whole_number(line.get("t"))
        rows = line.get("workers")
        if not time_ns or not isinstance(rows, list):
            return
        self.lines += 1
        host, cpus = str(line.get("host")), whole_number(line.get("cpus"))
        if cpus > 0 and (host in self.cpus or len(self.cpus) < _MOST_WORKERS):
            self.cpus[host] = cpus
        key = int(time_ns / 1e9 / self.width_s)
        bucket = self.buckets.setdefault(key, Bucket())
        for row in rows:
            if isinstance(row, dict) and isinstance(row.get("worker_id"), int):
                self._worker(row, host, time_ns, bucket)
        if len(self.buckets) > _BUCKETS:
            self._widen()

    def columns(self, most: int = _BUCKETS) -> dict[str, Any]:
        """Columns for charts: x (end of a bucket, s since 1970), seconds per worker and step by phase, bytes per
        second.

        most: neighbours are merged until there are no more buckets than this, and until a worker does a few steps in
        each, because a step spends time in earlier buckets than the one it ends in. `width_s` is the length of each.
        """
        width_s, buckets = self.width_s, self.buckets
        enough = sum(bucket.steps for bucket in buckets.values()) / (_STEPS_EACH * max(1, len(self.workers)))
        while len(buckets) > min(most, max(_FEWEST, enough)):
            width_s, buckets = 2 * width_s, _halved(buckets)
        keys = sorted(buckets)
        found = [buckets[key] for key in keys]
        phases = [p for p in PHASES if self.total_s.get(p)]
        return {
            "width_s": width_s,
            "x": [(key + 1) * width_s for key in keys],
            "seconds": {p: [b.seconds.get(p, 0.0) / b.steps if b.steps else None for b in found] for p in phases},
            "bytes_per_s": {
                op: [b.sent_bytes.get(op, 0.0) / width_s for b in found] for op in sorted(self.total_bytes)
            },
        }

    def _worker(self, row: dict[str, Any], host: str, time_ns: int, bucket: Bucket) -> None:
        worker_id = row["worker_id"]
        before = self._rows.get((host, worker_id))
        if before.time_ns >= time_ns if before is not None else len(self._rows) >= _MOST_WORKERS:
            return
        newest = Newest(time_ns, row)
        same = before if before is not None and _life(before.row) == _life(row) else None
        old: Mapping[str, Any] = same.row if same is not None else {}
        cpu_s = max(0.0, number(row.get("cpu_s")) - number(old.get("cpu_s")))
        if same is not None:
            passed_s = (time_ns - same.time_ns) / 1e9
            samples = max(0.0, number(row.get("samples")) - number(old.get("samples")))
            newest.samples_per_s = samples / passed_s
            newest.cpu_share = cpu_s / passed_s
            newest.spent = spent_between(old, row, passed_s)
            if old.get("phase") not in _NOT_STEPPING:
                bucket.steps += max(0.0, number(row.get("step")) - number(old.get("step")))
            if not row.get("rss_bytes"):  # the worker is just leaving
                newest.row = {**row, "rss_bytes": old.get("rss_bytes")}
        self.cpu_us += round(1e6 * cpu_s)
        recent = bucket if before is not None else Bucket()  # otherwise it is unknown since when
        stepping = old.get("phase") not in _NOT_STEPPING  # a spare's waiting is no part of a step
        _add(row.get("seconds"), old.get("seconds"), recent.seconds if stepping else _amounts(), self.total_s)
        _add(row.get("bytes"), old.get("bytes"), recent.sent_bytes, self.total_bytes)
        self._steps(newest, same.step_row if same is not None else None)
        self._rows[host, worker_id] = newest
        shown = self.workers.get(worker_id)
        if shown is None or shown.time_ns < time_ns:
            self.workers[worker_id] = newest

    def _steps(self, newest: Newest, since: Mapping[str, Any] | None) -> None:
        """When a worker has reached another step: its time per step since it reached the one before."""
        row = newest.row
        if row.get("phase") in _NOT_STEPPING:  # a healing worker jumps to the others' step without having done theirs
            return
        newest.step_row = row
        if since is None:
            return
        steps = whole_number(row.get("step")) - whole_number(since.get("step"))
        if steps == 0:
            newest.step_row = since
        if steps <= 0:
            return
        spent, before = row.get("seconds"), since.get("seconds")
        if isinstance(spent, dict) and isinstance(before, dict):
            for phase, histogram in self.step_seconds.items():
                grown = number(spent.get(phase)) - number(before.get(phase))
                histogram.add(max(0.0, grown) / steps, steps)

    def _widen(self) -> None:
        self.width_s *= 2
        self.version += 1
        self.buckets = _halved(self.buckets)


def _life(row: Mapping[str, Any]) -> tuple[Any, Any]:
    """Key of a life: a job that is started again counts its incarnations from 0 again."""
    return row.get("incarnation"), row.get("pid")


def _halved(buckets: Mapping[int, Bucket]) -> dict[int, Bucket]:
    """The sums in half as many buckets."""
    found: dict[int, Bucket] = {}
    for key in sorted(buckets):
        found.setdefault(key // 2, Bucket()).merge(buckets[key])
    return found


def _add(new: Any, old: Any, *sums: Amounts) -> None:
    """Add the growth of the counters to each of the sums."""
    before = as_dict(old)
    for name, value in as_dict(new).items():
        grown = number(value) - number(before.get(name))
        key = one_line(name, 40)
        for total in sums:
            if grown > 0 and (key in total or len(total) < _MOST_OPERATIONS):
                total[key] += grown
