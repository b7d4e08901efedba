"""What a kind of fault says of itself, and what it is given when it strikes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from everstep.chaos.fault import Fault

OnCut = Callable[[float, bool, bool], None]


@dataclass(frozen=True)
class Blow:
    """One strike. pid: of whom it strikes, this process or the coordinator. moment: for people. signature: of no other
    strike. cut_off, flip: as the injector has them."""

    fault: Fault
    pid: int
    moment: str
    signature: str
    cut_off: OnCut
    flip: Callable[[], None]


class Lasting(Protocol):
    """A fault that goes on, in one worker: asked at each phase, and from one life of its target to the next."""

    fault: Fault

    def due(self, step: int, phase: str) -> bool:
        """Whether something is to happen here, if the worker is the target."""
        ...

    def act(self) -> None:
        """Do it, unless it is over by now."""
        ...


@dataclass(frozen=True)
class FaultKind:
    """One kind. It strikes once, or makes a `Lasting`.

    name: as in a specification. about: for `everstep chaos --help`. takes: which of phase, for, from, by, until it may
    say. needs: those that it must, and why. of_coordinator: may strike that, too. at_once: in a running job it strikes
    wherever its target is. drawn: random faults are made of it. outcome: what the job does about it, where that is the
    same whatever happens.
    """

    name: str
    about: str
    strike: Callable[[Blow], None] | None = None
    lasting: Callable[[Fault, Path], Lasting] | None = None
    takes: frozenset[str] = frozenset({"phase"})
    needs: Mapping[str, str] = field(default_factory=dict)
    of_coordinator: bool = False
    at_once: bool = False
    drawn: bool = False
    outcome: str | None = None
