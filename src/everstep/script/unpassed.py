"""A scheduler that drives the job's optimizer and that `join` was not given: found before anything is trained."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence
from types import FrameType
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from everstep.script.reachable import loop_frames, variables

_DEEP = 2


def unpassed_scheduler(
    optimizer: Optimizer, given: Iterable[Any], ignored: Sequence[Any], frame: FrameType | None
) -> tuple[str, str] | None:
    """Its name in the code of these frames, and its type; None if there is none.

    given: the scheduler and the state that `join` has. ignored: as in `join`. frame: the caller of `join`, or what it
    called.
    """
    if not hasattr(optimizer.step, "_wrapped_by_lr_sched"):  # torch marks an optimizer that has a scheduler
        return None
    given = [thing for thing in given if thing is not None]
    if any(getattr(thing, "optimizer", None) is optimizer for thing in given):
        return None  # if there is another one, the rehearsal finds it
    known = _with_parts(given)
    schedulers = [s for s in gc.get_objects() if issubclass(type(s), LRScheduler)]
    driving = [s for s in schedulers if getattr(s, "optimizer", None) is optimizer]
    inner = _with_parts(driving, without_themselves=True)
    lost = [s for s in driving if id(s) not in known and id(s) not in inner and not _is_ignored(s, ignored)]
    names = _names(lost, loop_frames(frame))
    found = [(names.get(id(s), "scheduler"), type(s).__name__) for s in lost]
    return next((one for one in found if one[0] not in ignored), None)


def _with_parts(things: Iterable[Any], without_themselves: bool = False) -> set[int]:
    """Ids of these, and of the schedulers among what they hold (`SequentialLR` holds several)."""
    found: set[int] = set()
    layer = [thing for thing in things if thing is not None]
    for depth in range(_DEEP + 1):
        if depth or not without_themselves:
            found.update(map(id, layer))
        values = [v for thing in layer for v in getattr(thing, "__dict__", {}).values()]
        layer = [v for value in values for v in (value if isinstance(value, list | tuple) else (value,))]
        layer = [v for v in layer if not isinstance(v, Optimizer)]
    return found


def _is_ignored(scheduler: LRScheduler, ignored: Sequence[Any]) -> bool:
    return any(scheduler is given for given in ignored)


def _names(lost: Sequence[LRScheduler], frames: Sequence[FrameType]) -> dict[int, str]:
    found: dict[int, str] = {}
    wanted = {id(s) for s in lost}
    for name, value in variables(frames):
        if id(value) in wanted:
            found.setdefault(id(value), name)
        for attribute, inner in getattr(value, "__dict__", {}).items() if not isinstance(value, type) else ():
            if id(inner) in wanted:
                found.setdefault(id(inner), f"{name}.{attribute}")
    return found
