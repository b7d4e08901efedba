"""Which snapshots in memory are taken, stated and let go, for pools that die as a whole. Pure.

Taken right after an update, by all members alike, when the job's leader's record of the step says so; each stage's
leader has its own handed to another pool. A snapshot is stated only once its step has been released, so that going to
it skips no effect; the newest that is complete in all stages stays until a newer one is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from everstep.base.cause import Cause, Why
from everstep.base.extents import Extents
from everstep.base.plan import Member, Plan
from everstep.protocol.driver import operations as do
from everstep.protocol.driver.outbox import Outbox
from everstep.protocol.driver.records import StepOutcome
from everstep.protocol.step_machine import StepMachine
from everstep.protocol.step_types import Record, SnapshotsKept


class Keeper:
    """One worker's snapshots. proven: after so many steps, the newest whose state is known to be right."""

    def __init__(self, machine: StepMachine, out: Outbox, proven: Callable[[int], int]) -> None:
        self._machine = machine
        self._out = out
        self._proven = proven
        self._there: tuple[tuple[int, int], ...] = ()
        self._parts: Mapping[tuple[int, int], Extents] = {}
        self._records: dict[int, Mapping[int, Record]] = {}
        self._begun = self._handed = 0
        self._skipping = False
        self._released = 0
        self._stated = SnapshotsKept()

    @property
    def complete(self) -> int:
        """The newest step of which all that this worker is to do has been done; 0 if it is not done yet."""
        return self._begun if self._handed == self._begun else 0

    def records_of(self, number: int) -> Mapping[int, Record]:
        """Of the decision of a step that something is kept of; none if they are not known."""
        return self._records.get(number, {})

    # ---- around an update

    def updated(self, outcome: StepOutcome, records: Mapping[int, Record]) -> None:
        """The state is that of this step, and the application has not gone on yet."""
        if outcome.kept:
            self._out.put(do.RetireKept(outcome.kept, self._proven(outcome.kept)))
            there = {number for _, number in (*self._there, *self._parts)}
            self._records = {n: r for n, r in self._records.items() if n >= outcome.kept or n in there}
        plan = self._machine.plan
        if "memory" in outcome.save[0] and plan is not None:
            self._take(plan, outcome.step, records)

    def _take(self, plan: Plan, number: int, records: Mapping[int, Record]) -> None:
        if self._handed != self._begun:
            self._skip(number, Why(Cause.BUSY, f"that of step {self._begun} is still on its way to another worker"))
            return
        me = self._machine.me.worker_id
        mine = [stage for stage in plan.stages_of(me) if plan.pool(stage)[0].worker_id == me]
        to = {stage: member for stage in mine if (member := target(plan, stage)) is not None}
        self._begun, self._handed = number, 0 if to else number
        self._records[number] = records
        self._out.put(do.Keep(number, records, to))

    def refused(self, event: do.NotKept) -> None:
        """A snapshot could not be taken."""
        self._begun = self._handed = 0
        self._skip(event.step, event.why)

    def _skip(self, number: int, why: Why) -> None:
        self._out.put(do.Skipped(number, why, tell=not self._skipping))
        self._skipping = True

    # ---- what there is

    def handed_over(self, event: do.HandedOver) -> None:
        """Other pools have what they are to keep of a step; or it failed, and the next one may succeed."""
        if event.step == self._begun:
            self._begun = self._handed = event.step if event.done else 0

    def there(self, event: do.InMemory) -> Iterable[SnapshotsKept]:
        """What is held here has changed."""
        self._there, self._parts = event.snapshots, event.parts
        self._skipping &= all(number != self._begun for _, number in event.snapshots)
        for number, records in event.records.items():
            self._records.setdefault(number, records)
        return self._state()

    def released(self, number: int) -> Iterable[SnapshotsKept]:
        """All members have gone beyond this step."""
        self._released = max(self._released, number)
        return self._state()

    def went_back(self, number: int) -> Iterable[SnapshotsKept]:
        """Steps after this one are done again."""
        self._out.put(do.ForgetKept(number))
        self._there = tuple(key for key in self._there if key[1] <= number)
        self._parts = {key: part for key, part in self._parts.items() if key[1] <= number}
        self._records = {n: r for n, r in self._records.items() if n <= number}
        self._begun = self._handed = min(self._begun, number) if self._handed == self._begun else 0
        return self._state()

    def _state(self) -> Iterable[SnapshotsKept]:
        stated = SnapshotsKept(
            snapshots=tuple(key for key in self._there if self._counts(key[1])),
            parts={key: part for key, part in self._parts.items() if self._counts(key[1])},
        )
        if stated == self._stated:
            return ()
        self._stated = stated
        return [stated]

    def _counts(self, number: int) -> bool:
        return number <= self._released and number in self._records


def target(plan: Plan, stage: int) -> Member | None:
    """Who keeps a stage for its pool: the first member of the pools that follow who is on another host than all of the
    pool, else the first outside it; None if nobody is outside."""
    inside = {seat.worker_id for seat in plan.pool(stage)}
    hosts = {plan.member(worker_id).host for worker_id in inside}
    following = [seat.worker_id for k in range(1, plan.stages) for seat in plan.pool((stage + k) % plan.stages)]
    outside = [plan.member(worker_id) for worker_id in following if worker_id not in inside]
    return next((member for member in outside if member.host not in hosts), outside[0] if outside else None)
