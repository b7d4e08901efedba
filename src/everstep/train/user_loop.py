"""The loop of a script over its job's steps: how it ends, early or not, and what follows.

Apart because it looks at the frames and instructions of the interpreter. Python does not say whether an exception
ended the loop, but the instruction at which the iterator is released does: a `break` or `return` is recognised. In
all other cases it is unknown whether the script goes on.
"""

from __future__ import annotations

import contextlib
import ctypes
import dis
import inspect
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any

from everstep.base.errors import Misused
from everstep.protocol.driver.operations import EndAsked
from everstep.protocol.step_phases import Phase
from everstep.train.executor import StateJumped
from everstep.train.session import Session

_LEAVING = frozenset(dis.opmap[name] for name in ("POP_TOP", "POP_ITER") if name in dis.opmap)
"""How `break` and `return` release the iterator of the loop that they leave; neither can raise."""
_AGAIN = (
    "a loop over the run was begun again, after step {step}: a job has one loop, and ends when that is left; put "
    "everything into the one, by step.number, or catch what it raises inside of it"
)
_WAITING = frozenset(dis.opmap[name] for name in ("YIELD_VALUE", "RESUME"))


class UserLoop:
    """The loop over a job's steps, from its beginning to its end, or until it is left. guard: what holds in it."""

    def __init__(self, session: Session, guard: AbstractContextManager[None]) -> None:
        self._session = session
        self._guard = guard
        self._steps: Generator[Any] | None = None

    def begin(self, steps: Generator[Any]) -> LoopIterator:
        """Begin the iterator of the loop. A loop that raises does not close what could still be saved.

        Raises: Misused if there was a loop before: the job ends with that, or is about to.
        """
        if self._steps is not None and inspect.getgeneratorstate(self._steps) != inspect.GEN_CREATED:
            raise Misused(_AGAIN.format(step=self._session.view.step))
        self._steps = steps
        return LoopIterator(steps, self._let_go)

    @property
    def begun(self) -> bool:
        """Whether it has begun, and its end has not come."""
        return self._steps is not None and inspect.getgeneratorstate(self._steps) == inspect.GEN_SUSPENDED

    @property
    def over(self) -> bool:
        """Whether the job is complete."""
        ended = self._session.view.driver.ended
        return ended is not None and ended.state == "completed"

    def end(self) -> None:
        """No more steps are wanted. Raises: StateJumped if the loop has to go on; what ends a member otherwise."""
        session, number = self._session, self._session.view.step
        left = number < session.view.order.total_steps
        metrics = {name: value for question in session.unjudged() for name, value in question.metrics.items()}
        session.profiling.end()
        session.view.link.row.set(step=number, phase="finish")
        with session.loop.moves.waiting():
            session.executor.ask(EndAsked(left, session.updates.last_states(left), number, metrics))

    def leave(self) -> None:
        """If it has begun, it was left: the job ends in order after the newest step that is done; in all workers after
        the same one. Nothing if an update has failed: then there is no state. Raises: what ends a member."""
        if not self.begun or self._session.view.driver.machine.phase is Phase.UPDATING:
            return
        with contextlib.closing(self):
            while True:
                with contextlib.suppress(StateJumped):
                    return self.end()

    def close(self) -> None:
        """The loop is over, perhaps because it raised."""
        if self._steps is not None:
            self._steps.close()

    def _let_go(self, left: bool) -> None:
        """If it was not left for certain, an exception may be on its way: whether the script goes on is known when that
        has ended."""
        try:
            self._guard.__exit__(None, None, None)
            if left:
                self.leave()
            else:
                self._session.view.link.row.set(phase="idle")
                self._session.view.link.at_exit(self.leave)
        except Exception as error:
            raise_soon(error)


class LoopIterator:
    """Passes on the values of a generator. let_go: called if the loop ends before the generator does, with whether a
    `break` or `return` certainly ended it."""

    def __init__(self, steps: Generator[Any], let_go: Callable[[bool], None]) -> None:
        self._steps = steps
        self._let_go = let_go

    def __iter__(self) -> LoopIterator:
        return self

    def __next__(self) -> Any:
        return next(self._steps)

    def __del__(self) -> None:
        if inspect.getgeneratorstate(self._steps) == inspect.GEN_SUSPENDED:
            self._let_go(was_left(sys._getframe(1)))


def was_left(frame: FrameType | None) -> bool:
    """Whether the loop in this frame, which lets go of its iterator now, is left by `break` or `return`. A generator
    between it and the user's loop (tqdm, say) is being closed itself."""
    while frame is not None and frame.f_code.co_flags & inspect.CO_GENERATOR and _instruction(frame) in _WAITING:
        frame = frame.f_back
    return frame is not None and _instruction(frame) in _LEAVING


def _instruction(frame: FrameType) -> int:
    return frame.f_code.co_code[frame.f_lasti]


def raise_soon(error: Exception) -> None:
    """Raise it in this thread, as soon as what lets go of an iterator is over: nothing can be raised from there."""

    def begin(self: Exception) -> None:
        Exception.__init__(self, *error.args)
        vars(self).update(vars(error))

    kind = type(type(error).__name__, (type(error),), {"__init__": begin})
    thread = ctypes.c_ulong(threading.get_ident())
    ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(kind))
