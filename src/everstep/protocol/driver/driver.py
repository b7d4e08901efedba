"""One worker's driver: turns messages, asks and results of operations into the next operation. Pure.

It wraps the step machine, which says when a step is decided and how a generation settles. The driver starts one
operation after the other, cuts operations when a plan comes, and answers the application.

Rules for the executor:

- One thread calls `handle`. Effects are carried out in order; an operation is the last of them, and is answered
  exactly once before the application asks anything else.
- Events that come while an operation is outstanding, or while the application has the turn, wait (`Heard` may be
  handed in at any time; it is acted on when nothing is outstanding). Only `interrupts` is called at once, by the
  receiving thread: the transfers of the generations that it names are cut, so that the operation comes back as
  `Aborted`.
- Nothing interrupts `Update`, `Adopt` and `Replay`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from everstep.protocol import messages as wire
from everstep.protocol import step_types as step
from everstep.protocol.driver import operations as do
from everstep.protocol.driver.driver_parts import DriverConfig, DriverParts
from everstep.protocol.driver.hearing import Hearing
from everstep.protocol.driver.last_save import LastSave
from everstep.protocol.driver.machine_effects import MachineEffects
from everstep.protocol.driver.machine_queue import MachineQueue
from everstep.protocol.driver.operation_ends import OperationEnds
from everstep.protocol.driver.outbox import Situation
from everstep.protocol.step_machine import StepMachine


class Driver:
    """Drives one worker's part in a job."""

    def __init__(self, config: DriverConfig, machine: StepMachine) -> None:
        self.config = config
        self.machine = machine
        self.situation = Situation()
        self._parts = parts = DriverParts(config, machine)
        self._queue = queue = MachineQueue(machine, parts.stepper)
        self._effects = effects = MachineEffects(parts, queue)
        self._hearing = hearing = Hearing(parts, queue)
        self._last_save = last_save = LastSave(parts, effects)
        self._ends = OperationEnds(parts, queue, hearing, last_save)
        self._events = self._heard_of()

    # ---- what others may look at

    @property
    def ended(self) -> wire.JobEnded | None:
        """How the job has ended; None if it has not."""
        return self._parts.application.ended

    @property
    def gathered(self) -> do.GatheredRecords:
        """Records of the decisions of the present step, by key."""
        return self._parts.gathers.known

    @property
    def fresh(self) -> bool:
        """Whether this worker was healed or resumed since all states were alike."""
        return self._parts.comparing.fresh

    def in_memory(self, number: int) -> bool:
        """Whether a member stated, when this generation settled, that it has the state of this step in memory."""
        return self._parts.settler.in_memory(number)

    def proven(self, number: int) -> int:
        """The newest step, up to `number`, whose state is known to be right."""
        return self._parts.proven(number)

    def progress(self, number: int, step_ms: float, committed_unix_ns: int = 0) -> wire.AnyMessage:
        """The job's progress, as a message of this generation."""
        at = {"step": number, "step_ms": step_ms, "committed_unix_ns": committed_unix_ns}
        return self._parts.out.signed(wire.Progress, generation=self.machine.generation, **at)

    # ---- events

    def handle(self, now_ns: int, event: object) -> list[do.Effect]:
        """Take one event. Returns the effects, to be carried out in order."""
        out, machine = self._parts.out, self.machine
        out.times.tick(now_ns)
        self._events.get(type(event), self._asked)(event)
        self._advance()
        about = (machine.step, machine.stages, machine.plan, machine.prepared, machine.settled)
        self.situation = Situation(*about, out.lasting)
        return out.drain()

    def _heard_of(self) -> dict[type, Callable[[Any], object]]:
        """Handlers for events other than asks."""
        parts, ends, feed = self._parts, self._ends, self._queue.feed
        out, keeper, saver = parts.out, parts.keeper, parts.saver
        return {
            do.Heard: self._hearing.hear,
            do.Done: lambda e: ends.done(out.answered(e.op), e.result),
            do.Aborted: lambda e: ends.aborted(out.answered(e.op), e),
            do.Tainted: lambda e: ends.tainted(out.answered(e.op), e),
            step.LaneDone: feed,
            step.Takes: feed,
            step.Holds: feed,
            do.InMemory: lambda e: feed(*keeper.there(e)),
            do.OthersKept: keeper.others_kept,
            do.NotKept: keeper.refused,
            do.PartsThere: saver.parts_there,
            do.SaveEnded: saver.ended,
            do.FollowerAsked: lambda e: parts.followers.come(e.joint),
            do.EndOrdered: lambda e: saver.ending.ask(e.why),
            do.TimePassed: lambda e: None,
        }

    def _asked(self, event: do.Ask) -> None:
        application = self._parts.application
        if isinstance(event, do.EndAsked) and isinstance(application.ask, do.StepAsked):
            self._parts.out.put(do.DropLanes())
            self._queue.feed(step.StepLeft())
        data = application.take(event)
        if data is not None:
            self._effects.gather(data)
        elif isinstance(application.ask, do.StepAsked) and self.ended is None:
            self._queue.feed(step.StepWanted())

    # ---- the next operation

    def _advance(self) -> None:
        """Do everything that is possible before the next result, ask or message."""
        while self._parts.application.ask is not None and self._parts.out.operation is None:
            if self._hearing:
                self._hearing.take()
            elif self._effects.save_last():
                return
            elif self._queue:
                self._effects.carry_out(self._queue.next())
            else:
                self._go_on()
                return

    def _go_on(self) -> None:
        parts, application = self._parts, self._parts.application
        late = None if self.ended else parts.joiner.go_on()
        if late is not None:
            self._hearing.feeds_lost(late.why)
        ordered = parts.saver.ending.asked
        if self.ended is not None or parts.out.operation is not None:
            application.go_on()
        elif self.machine.plan is None and ordered is not None:
            self._last_save.leave(ordered)
        elif self._last_save.is_agreed:
            self._last_save.begin()
        else:
            end = application.finishing
            differs = None if end is None else parts.stepper.ends(*end)
            if differs is None:
                application.go_on()
            else:
                self._effects.refuse(differs)
