"""What follows when an operation ends: done, cut, or with data that must not be used. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from everstep.base.cause import Cause, Why
from everstep.base.errors import check
from everstep.base.extents import Extents
from everstep.protocol import messages as wire
from everstep.protocol import step_types as step
from everstep.protocol.driver import operations as do
from everstep.protocol.driver.driver_parts import DriverParts
from everstep.protocol.driver.hearing import Hearing
from everstep.protocol.driver.last_save import LastSave
from everstep.protocol.driver.machine_queue import MachineQueue
from everstep.protocol.driver.records import AgreePayload
from everstep.protocol.driver.settler import SETTLE
from everstep.protocol.step_phases import Phase

_Events = Iterable[step.StepEvent]


class OperationEnds:
    """Tells the parts and the step machine how an operation ended."""

    def __init__(self, parts: DriverParts, queue: MachineQueue, hearing: Hearing, last: LastSave) -> None:
        self._parts = parts
        self._queue = queue
        self._hearing = hearing
        self._last = last
        self._made: tuple[do.Update, int] | None = None  # and not told the machine yet
        self._table = self._followed_by()

    def _followed_by(self) -> dict[type, Callable[[Any, Any], _Events | None]]:
        """The table of what follows when an operation has been done, from its result."""
        settler, joiner = self._parts.settler, self._parts.joiner
        return {
            do.Open: settler.opened,
            do.Exchange: self._exchanged,
            do.Reduce: self._reduced,
            do.Update: self._updated,
            do.Spread: self._spread,
            do.Fetch: settler.fetched,
            do.Restore: self._restored,
            do.OpenFeeds: joiner.opened,
            do.Watch: joiner.saw,
            do.Adopt: self._adopted,
            do.Replay: self._replayed,
            do.Evaluate: lambda operation, result: self._parts.application.answer(do.Evaluated()),
            do.SaveLast: self._last.taken,
            do.Finish: self._finished,
            do.Compute: lambda operation, result: self._parts.stepper.computed(operation),
            do.Linger: self._last.lingered,
        }

    def done(self, operation: do.Operation, result: Any) -> None:
        self._queue.feed(*(self._table[type(operation)](operation, result) or ()))

    def aborted(self, operation: do.Operation, event: do.Aborted) -> None:
        """A transfer was cut or failed: report the accused members, and wait for the coordinator's plan."""
        if isinstance(operation, do.OpenFeeds | do.Watch):
            self._hearing.feeds_lost(event.why)
            return
        if event.accused:
            accused, generation = sorted(event.accused), operation.generation
            cause, reason = event.why.cause, event.why.reason
            self._parts.out.tell(wire.PeerFault, generation=generation, accused=accused, cause=cause, reason=reason)
        self._queue.drop_transfers()
        if isinstance(operation, do.Spread):
            self._apply(whole=False)
        if isinstance(operation, do.Evaluate):
            self._parts.application.answer(do.Evaluated())

    def tainted(self, operation: do.Operation, event: do.Tainted) -> None:
        """All members settle again with the data that is left; a worker that cannot mend its state restarts."""
        if event.torn:
            self._parts.application.answer(do.Exit(f"{event.why.reason}; this worker restarts"))
        else:
            self._parts.settler.settle_again(event.why, odd=event.odd)

    # ---- done

    def _exchanged(self, operation: do.Exchange, payloads: Mapping[int, bytes]) -> _Events:
        if operation.tag == SETTLE:
            return self._unless_refused(self._parts.settler.all_stated(operation, payloads))
        return self._parts.stepper.all_contributed(operation, payloads)

    def _reduced(self, operation: do.Reduce, payload: AgreePayload) -> _Events:
        parts = self._parts
        kept, due, saved = parts.keeper.complete, parts.saver.due(operation.step), parts.saver.newest
        return parts.stepper.reduced(operation, payload, kept, due, saved, parts.followers.tickets)

    def _updated(self, operation: do.Update, began_unix_ns: int) -> _Events:
        self._made = operation, began_unix_ns
        if self._parts.stepper.spreads(operation.outcome):
            return ()
        plan = self._parts.machine.plan
        self._apply(whole=plan is None or not plan.divided_stages or self._complete)
        return ()

    def _spread(self, operation: do.Spread, result: step.Holds) -> None:
        self._queue.feed(result)
        self._apply(whole=not result.moved and self._complete)

    @property
    def _complete(self) -> bool:
        """Whether all of this worker's share of the state is here."""
        machine = self._parts.machine
        return set(machine.updating) <= set(machine.stages)

    def _apply(self, *, whole: bool) -> None:
        """The step has been applied. whole: all members have their share of it; else all have to settle."""
        check(self._made is not None, "expected an update to have been made")
        (operation, began_unix_ns), self._made = self._made, None  # type: ignore[misc]
        self._parts.saver.updated(operation.outcome, operation.records, whole=whole)
        self._parts.keeper.updated(operation.outcome, operation.records, whole=whole)
        self._queue.feed(*self._parts.stepper.updated(operation, began_unix_ns))
        if self._parts.machine.phase is Phase.LACKING:
            self._parts.settler.settle_again(
                Why(Cause.REBALANCED, f"it has not all of its share of step {operation.step}")
            )

    def _adopted(self, operation: do.Adopt, result: do.Copied) -> _Events:
        self._parts.comparing.copied()
        return self._parts.joiner.adopted(operation, result)

    def _replayed(self, operation: do.Replay, held: Mapping[int, Extents] | None) -> _Events:
        self._parts.saver.ending.decided(operation.outcome)
        self._parts.keeper.updated(operation.outcome, operation.records)
        self._parts.stepper.concluded(operation.outcome)
        return self._parts.joiner.replayed(operation, held)

    def _finished(self, operation: do.Finish, written: bool) -> None:
        at = operation.step
        self._parts.out.tell(wire.WorkerDone, generation=operation.generation, step=at, final_written=bool(written))

    def _restored(self, operation: do.Restore, result: do.Copied) -> _Events:
        if self._parts.machine.position != operation.position:  # else the application is where it should be
            self._parts.application.went_back()
        return self._unless_refused(self._parts.settler.restored(operation, result))

    def _unless_refused(self, events: _Events) -> _Events:
        """The events, or none if this worker was refused."""
        refused = self._parts.settler.refused
        if refused:
            self._parts.application.answer(do.Refused(refused))
        return () if refused else events
