"""What leaves the process once a step can no longer be undone: ledger rows, events, metrics.

Apart because of one rule: nothing here runs before every member is known to have committed the step. Rows are keyed by
step and idempotent, so every worker writes its own file and a reader takes the union.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from everstep.base.plan import WorkerKey
from everstep.observe.events import EventLog, last_committed_step, told_lately
from everstep.order.ledger import LaneUse, LedgerRow, encode_row
from everstep.protocol.driver.records import Outcome
from everstep.runtime.address import EVENTS_FILE

_Held = tuple[Outcome, int, dict[str, Any]]
_REPORTS = 4  # the newest ones: of the last step or two
_UNTOLD = 16  # a new leader tells what the old one may have left: a step or two


class Publisher:
    """Holds the outcomes of decided steps until they are released, then writes them.

    `run_dir` None: nothing is written (a job without a directory).
    """

    def __init__(self, run_dir: Path | None, me: WorkerKey, log_every: int) -> None:
        self.me = me
        self.log_every = log_every
        self.run_dir = run_dir
        self.events: EventLog | None = None
        self._pending: dict[int, _Held] = {}
        self._untold: dict[int, _Held] = {}
        self._committed_ns: dict[int, int] = {}
        self._ledger: int | None = None
        self._leading = False
        self._reported_through = 0
        self._reports: dict[tuple[str, int], dict[str, Any]] = {}
        if run_dir is not None:
            (run_dir / "ledger").mkdir(parents=True, exist_ok=True)
            self.events = EventLog(
                run_dir / EVENTS_FILE, worker_id=me.worker_id, incarnation=me.incarnation, pid=os.getpid()
            )
            path = run_dir / "ledger" / f"worker-{me.worker_id}-{me.incarnation}.jsonl"
            self._ledger = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self.failed_writes = 0

    def hold(self, outcome: Outcome, generation: int, extra: dict[str, Any]) -> None:
        """A step has been committed, reduced in this generation; `extra` goes into its event."""
        self._pending[outcome.step] = (outcome, generation, extra)

    def committed(self, step: int, unix_ns: int) -> None:
        """When the first worker committed the step."""
        if unix_ns:
            self._committed_ns[step] = unix_ns

    def release(self, step: int, leads: bool) -> None:
        """Write everything up to this step. The leader tells the world, also of what the one before left."""
        for number in sorted(n for n in self._pending if n <= step):
            held = self._untold[number] = self._pending.pop(number)
            self._write_ledger(*held[:2])
        if leads:
            if not self._leading:
                self._repeat_reports()
            self._report_untold()
        for number in sorted(self._untold)[: -_UNTOLD or None]:
            del self._untold[number]
            self._committed_ns.pop(number, None)
        self._leading = leads

    def _report_untold(self) -> None:
        if not self._leading and self.run_dir is not None:
            self._reported_through = last_committed_step(self.run_dir / EVENTS_FILE)
        for number in sorted(self._untold):
            if number > self._reported_through:
                self._report(*self._untold[number])
        self._reported_through = max(self._reported_through, max(self._untold, default=0))
        self._untold.clear()
        self._committed_ns = {n: t for n, t in self._committed_ns.items() if n > self._reported_through}

    def report(self, kind: str, step: int, leads: bool, fields: dict[str, Any]) -> None:
        """An event that all workers know of and one tells: the leader, or the next one if that died meanwhile.

        One per kind and step.
        """
        self._reports[kind, step] = fields
        for old in list(self._reports)[:-_REPORTS]:
            del self._reports[old]
        if leads and self._leading:
            self.emit(kind, step=step, **fields)
        elif leads:
            self._repeat_reports()

    def _repeat_reports(self) -> None:
        """A new leader: what the one before has not told. It may have told some of it."""
        if self.run_dir is None or not self._reports:
            return
        told = told_lately(self.run_dir / EVENTS_FILE)
        for (kind, step), fields in self._reports.items():
            if (kind, step) not in told:
                self.emit(kind, step=step, **fields)

    def emit(self, kind: str, **fields: Any) -> None:
        """An event of this worker's."""
        if self.events is not None:
            self.events.write(kind, **fields)

    def _write_ledger(self, outcome: Outcome, generation: int) -> None:
        if self._ledger is None:
            return
        uses = tuple(LaneUse(r.lane, outcome.workers[r.lane], r.count, r.use) for r in outcome.lanes)
        row = encode_row(LedgerRow(outcome.step, generation, uses))
        try:
            os.write(self._ledger, row if isinstance(row, bytes) else (row + "\n").encode())
        except OSError as error:
            self.failed_writes += 1
            if self.failed_writes == 1:
                self.emit("warning", step=outcome.step, reason=f"ledger row not written: {error}; free some space")

    def _report(self, outcome: Outcome, generation: int, extra: dict[str, Any]) -> None:
        if self.events is None:
            return
        self.events.write(
            "step_committed",
            time_unix_ns=self._committed_ns.get(outcome.step) or time.time_ns(),
            generation=generation,
            step=outcome.step,
            loss=outcome.loss,
            samples=outcome.samples,
            **extra,
        )
