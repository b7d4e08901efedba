"""Messages from the coordinator, and the report of a joiner whose feed has ended. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from everstep.base.cause import Why
from everstep.protocol import messages as wire
from everstep.protocol import step_types as step
from everstep.protocol.driver import operations as do
from everstep.protocol.driver.driver_parts import DriverParts
from everstep.protocol.driver.machine_queue import MachineQueue

FOREVER = 1 << 62


def interrupts(message: wire.AnyMessage) -> int | None:
    """The newest generation whose operations this message ends; None if the message can wait."""
    if isinstance(message, wire.PlanNow | wire.Heal):
        return message.plan.generation - 1
    if isinstance(message, wire.JobEnded | wire.Dismissed):
        return FOREVER
    return None


class Hearing:
    """Messages that wait until the driver can act on them; true if there are any."""

    def __init__(self, parts: DriverParts, queue: MachineQueue) -> None:
        self._parts = parts
        self._queue = queue
        self._news: deque[do.Heard] = deque()
        self._table = self._told()

    def __bool__(self) -> bool:
        return bool(self._news)

    def hear(self, heard: do.Heard) -> None:
        self._news.append(heard)

    def take(self) -> None:
        """Act on the next message; messages that the table lacks are for other threads."""
        heard = self._news.popleft()
        message = heard.message
        if isinstance(message, wire.PlanNow):
            self._parts.out.times.plan_arrived(message.plan.generation, heard.arrived_ns)
        if type(message) in self._table:
            self._table[type(message)](message)

    def _told(self) -> dict[type, Callable[[Any], object]]:
        """The table of what each message does."""
        application, saver, queue = self._parts.application, self._parts.saver, self._queue
        return {
            wire.PlanNow: lambda m: queue.feed(step.PlanArrived(m.plan)),
            wire.PlanPrepared: lambda m: queue.feed(step.PreparedArrived(m.plan)),
            wire.Heal: self._heal,
            wire.SaveNow: lambda m: saver.request(Why(m.cause, m.reason)),
            wire.Dismissed: lambda m: application.answer(do.Exit(m.reason, drained=m.drained)),
            wire.JobEnded: application.end,
        }

    def _heal(self, ticket: wire.Heal) -> None:
        plan, joiner = self._parts.machine.plan, self._parts.joiner
        if plan is None:
            joiner.stop()
            self._parts.out.forget_lasting()
            joiner.begin(ticket)
        elif ticket.plan.generation > plan.generation:
            reason = (
                f"it followed a switch to generation {plan.generation}, but the others went on without it as "
                f"generation {ticket.plan.generation}; it has to restart"
            )
            self._parts.application.answer(do.Exit(reason))

    def feeds_lost(self, why: Why) -> None:
        """A feed has ended: report that healing failed, unless a newer message makes that void."""
        ticket = self._parts.joiner.stop()
        if ticket is not None and all(interrupts(heard.message) is None for heard in self._news):
            reason = f"healing stopped: {why.reason}"
            self._parts.out.tell(wire.HealFailed, ticket=ticket.ticket, cause=why.cause, reason=reason)
