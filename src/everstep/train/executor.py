"""The executor: carries out the driver's operations, one after the other, in the training thread.

Other threads only put events into its inbox, and cut the transfers of generations that are over.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from everstep.base.cause import Cause, Why
from everstep.base.errors import (
    CollectiveAborted,
    DeterminismError,
    EverstepError,
    Evicted,
    JobFailed,
    NonFinite,
    StateTainted,
)
from everstep.protocol import messages as wire
from everstep.protocol.driver import operations as do
from everstep.protocol.driver.driver import Driver
from everstep.protocol.driver.hearing import interrupts
from everstep.protocol.step_types import LaneDone, StepEvent
from everstep.runtime.link.peer import PeerConnection

_WAIT_S = 0.02
END_ALONE = Why(Cause.INTERRUPTED, "the job was interrupted while its coordinator did not answer")
_ANSWERS = (do.Arrived, do.Stepped, do.GatherDone, do.Evaluated, do.JobOver, do.Released)


class StateJumped(EverstepError):
    """The state has jumped to that of another step: the application leaves its present work, and goes on from there."""


class Unusable(EverstepError):
    """A state that was to be taken on must not be used: all settle again. torn: it was partly written. odd: members
    whose state is wrong."""

    def __init__(self, why: Why, torn: bool, odd: tuple[int, ...] = ()) -> None:
        super().__init__(why.reason)
        self.why = why
        self.torn = torn
        self.odd = odd


class Cutter:
    """Ends the waits of an operation once its generation is over. Thread-safe.

    Two threads meet here: the training thread waits on transports and connections, the control thread hears that it
    need not.
    """

    def __init__(self, abort: Callable[[int], None]) -> None:
        """abort: of the transport, for this generation and older ones."""
        self._abort = abort
        self._lock = threading.Lock()
        self._newest = -1
        self._open: dict[PeerConnection, int] = {}

    def cut(self, generation: int) -> None:
        """This generation is over, and all before it: end all waits in them."""
        with self._lock:
            self._newest = max(self._newest, generation)
            over = [connection for connection, bound in self._open.items() if bound <= generation]
        for connection in over:
            connection.abort()
        self._abort(generation)

    def over(self, generation: int) -> bool:
        """Whether nothing more is to be done for this generation."""
        return generation <= self._newest

    def guard(self, connection: PeerConnection, generation: int) -> None:
        """End the connection with the generation, or by `close`."""
        with self._lock:
            self._open[connection] = generation
            over = self.over(generation)
        if over:
            connection.abort()

    def close(self, connection: PeerConnection) -> None:
        """The conversation is over."""
        with self._lock:
            self._open.pop(connection, None)
        connection.close()


Handlers = Mapping[type, Callable[[Any], Any]]


class Executor:
    """Executor between the application's requests and the driver's answers.

    handlers: by type, functions that carry out an operation (and return its result) or an effect. If `Compute` has no
    handler, the caller gets it in place of an answer, and reports its end.
    """

    def __init__(
        self,
        driver: Driver,
        cutter: Cutter,
        tick: Callable[[], None],
        end_asked: Callable[[], bool] = lambda: False,
        waits: Callable[[], None] = lambda: None,
    ) -> None:
        """end_asked: whether this worker's host ends the job, while no coordinator answers. waits: called again and
        again while the executor waits for an event."""
        self._driver = driver
        self._cutter = cutter
        self._tick = tick
        self._end_asked, self._waits = end_asked, waits
        self._end_told = False
        self._handlers: dict[type, list[Callable[[Any], Any]]] = {}
        self._inbox: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._effects: deque[do.Effect] = deque()
        self._handed: do.Compute | None = None
        self.jumped = False

    def install(self, handlers: Handlers) -> None:
        """Add handlers. An effect may have several."""
        for kind, act in handlers.items():
            others = [] if issubclass(kind, do.Operation) else self._handlers.get(kind, [])
            self._handlers[kind] = [*others, act]

    # ---- from any thread

    def deliver(self, message: wire.AnyMessage) -> None:
        """Take a message of the coordinator. One that ends a generation frees this worker from all its waits."""
        self._inbox.put(do.Heard(message, time.monotonic_ns()))
        generation = interrupts(message)
        if generation is not None:
            self._cutter.cut(generation)

    def note(self, event: object) -> None:
        self._inbox.put(event)

    @property
    def news(self) -> bool:
        """Whether an event has come that the driver does not know yet."""
        return not self._inbox.empty()

    # ---- the training thread

    def arrived(self) -> bool:
        """Whether the state has jumped since the last call (true the first time): go on from there."""
        jumped, self.jumped = self.jumped, False
        return jumped

    def ask(self, event: do.Ask) -> do.Answer | do.Compute:
        """Wait for the answer, or for lanes to compute.

        Raises: StateJumped, Evicted, JobFailed, NonFinite, StateTainted: what ends what the application was doing.
        """
        while self._handed is not None or self._effects:  # its present work was left in the middle
            self._give_back(left=True)
            self._carry_out()
        self._handle(event)
        return self._until_answered()

    def lane_done(self, number: int, stage: int, lane: int) -> None:
        """During an operation that computes lanes: a stage has finished one. Messages that follow are sent now, because
        lanes may take long; other effects come only after the operation."""
        self._handle(LaneDone(number, stage, lane))
        self._carry_out()

    def said(self, event: StepEvent) -> None:
        """During an operation: hand an event to the step machine. Its effects come after the operation."""
        self._handle(event)

    def computed(self) -> do.Answer | do.Compute:
        """The lanes handed out have been computed, or were left as their generation is over. Returns and raises as
        `ask`."""
        self._give_back(left=False)
        return self._until_answered()

    def _give_back(self, left: bool) -> None:
        operation, self._handed = self._handed, None
        if operation is not None:
            left = left or self._cutter.over(operation.generation)
            self._handle(do.Aborted(operation.op) if left else do.Done(operation.op))

    def _until_answered(self) -> do.Answer | do.Compute:
        while (answer := self._carry_out()) is None:
            self._tick()
            try:
                event = self._inbox.get(timeout=_WAIT_S)
            except queue.Empty:
                event = do.TimePassed()
                self._waits()
            self._check_end_asked()
            self._effects.extend(self._driver.handle(time.monotonic_ns(), event))
        return answer

    def _carry_out(self) -> do.Answer | do.Compute | None:
        """Carry out all effects, and those that follow from them, up to an answer."""
        while self._effects:
            effect = self._effects.popleft()
            self.jumped |= isinstance(effect, do.Arrived | do.WentBack)
            if isinstance(effect, do.WentBack):
                raise StateJumped(f"the state is that of step {effect.step} now")
            if isinstance(effect, do.Exit):
                if effect.failed:
                    raise JobFailed(effect.reason)
                raise Evicted(effect.reason, effect.drained, effect.returns)
            if isinstance(effect, do.Outvoted):
                raise StateTainted(effect.reason, effect.step, effect.generation, effect.sound)
            if isinstance(effect, do.EndsJob):
                raise NonFinite(effect.reason)
            if isinstance(effect, do.Refused):
                raise DeterminismError(effect.reason)
            if isinstance(effect, _ANSWERS):
                return effect
            if isinstance(effect, do.Compute) and do.Compute not in self._handlers:
                self._handed = effect
                return effect
            if isinstance(effect, do.Operation):
                self._operate(effect)
            else:
                for act in self._handlers[type(effect)]:
                    act(effect)
        return None

    def _operate(self, operation: do.Operation) -> None:
        event: object = do.Aborted(operation.op)
        try:
            (act,) = self._handlers[type(operation)]
            event = do.Done(operation.op, act(operation))
        except CollectiveAborted as fault:
            event = do.Aborted(operation.op, tuple(fault.accused), Why(fault.cause, str(fault)))
        except Unusable as found:
            event = do.Tainted(operation.op, found.why, found.torn, found.odd)
        finally:
            self._handle(event)

    def _handle(self, event: object) -> None:
        """Give the driver an event, after those that have come before; during an operation it waits there."""
        self._check_end_asked()
        while self.news:
            self._effects.extend(self._driver.handle(time.monotonic_ns(), self._inbox.get()))
        self._effects.extend(self._driver.handle(time.monotonic_ns(), event))

    def _check_end_asked(self) -> None:
        if not self._end_told and self._end_asked():
            self._end_told = True
            self._effects.extend(self._driver.handle(time.monotonic_ns(), do.EndOrdered(END_ALONE)))
