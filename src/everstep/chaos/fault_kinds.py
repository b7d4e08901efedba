"""The kinds of faults: the properties of each, and how it strikes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from everstep.base.cause import Cause
from everstep.base.errors import EverstepError
from everstep.chaos.fault import Fault
from everstep.observe.events import read_events
from everstep.runtime.host.undoing import stop, throttle

OnCut = Callable[[float, bool, bool], None]
_LOOK_S = 0.05


@dataclass(frozen=True)
class Blow:
    """One strike. pid: of the process that it strikes, this one or the coordinator. moment: for people. signature:
    unique to the strike. cut_off, flip: as in the injector."""

    fault: Fault
    pid: int
    moment: str
    signature: str
    cut_off: OnCut
    flip: Callable[[], None]


class ChaosError(EverstepError):
    """The exception of a `raise` fault.

    `signature` differs from fault to fault, so that the coordinator never takes it for an error of the user's task that
    every restart would repeat.
    """

    cause = Cause.EXCEPTION

    def __init__(self, message: str, signature: str) -> None:
        super().__init__(message)
        self.signature = signature


class Lasting:
    """A fault that goes on, in one worker: asked at each phase, and carried from one life of its target to the next.

    Forward passes take longer, for a while or until something has been reported. events: the job's events.jsonl.
    """

    def __init__(self, fault: Fault, events: Path) -> None:
        self.fault = fault
        self._events = events
        self._end_s: float | None = None
        self._look_s = 0.0
        self._over = False

    def due(self, step: int, phase: str) -> bool:
        """Whether this pass is slow if the worker is the target."""
        return phase == "forward" and step >= self.fault.at and not self._over

    def act(self) -> None:
        """Take longer, unless the fault is over by now."""
        now_s = time.monotonic()
        if self.fault.for_s is not None:
            self._end_s = self._end_s or now_s + self.fault.for_s
            self._over = now_s >= self._end_s
        if self.fault.until is not None and not self._over and now_s >= self._look_s:
            self._look_s = now_s + _LOOK_S
            kind, count = self.fault.until
            self._over = sum(event["kind"] == kind for event in read_events(self._events)) >= count
        if not self._over:
            time.sleep(self.fault.by_s)


@dataclass(frozen=True)
class FaultKind:
    """One kind. It strikes once, or is `Lasting`.

    name: as in a specification. about: for `everstep chaos --help`. takes: the allowed keys among phase, for, from, by,
    until. needs: the required keys, and why. by_signal: may strike the coordinator or one rank, too, and in a running
    job wherever its target is. drawn: random faults may be of this kind. outcome: the job's reaction, if it is always
    the same. on: possible targets: workers, a host, the link between two.
    """

    name: str
    about: str
    strike: Callable[[Blow], None] | None
    takes: frozenset[str] = frozenset({"phase"})
    needs: Mapping[str, str] = field(default_factory=dict)
    by_signal: bool = False
    drawn: bool = False
    outcome: str | None = None
    on: frozenset[str] = frozenset({"worker"})


def _send(blow: Blow, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):  # a coordinator that is dead already cannot die again
        os.kill(blow.pid, number)


def _stop(blow: Blow) -> None:
    stop(blow.pid, blow.fault.for_s, itself=blow.pid == os.getpid())


def _raise(blow: Blow) -> None:
    raise ChaosError(f"chaos fault {str(blow.fault)!r} raised in {blow.moment}", blow.signature)


def _cut(blow: Blow, breaks: bool) -> None:
    blow.cut_off(blow.fault.for_s or 0.0, breaks, blow.fault.peers)


_PLACES = frozenset({"host", "link"})
_FOR, _WHOLE = frozenset({"phase", "for"}), {"for": "after which the link is whole again"}
KINDS: dict[str, FaultKind] = {
    kind.name: kind
    for kind in (  # the order here decides random draws
        FaultKind(
            "kill",
            "SIGKILL",
            lambda blow: _send(blow, signal.SIGKILL),
            drawn=True,
            by_signal=True,
            on=frozenset({"worker", "host"}),
        ),
        FaultKind("stop", "SIGSTOP, with for=S until SIGCONT", _stop, _FOR, drawn=True, by_signal=True),
        FaultKind("raise", "an exception", _raise, drawn=True),
        FaultKind(
            "partition",
            "for=S: cut off from the coordinator; from=peers: from all others",
            lambda blow: _cut(blow, breaks=False),  # also hidden from its agent
            _FOR | {"from"},
            _WHOLE,
            drawn=True,
        ),
        FaultKind(
            "disconnect",
            "for=S: its connection to the coordinator breaks",
            lambda blow: _cut(blow, breaks=True),  # its agent still sees it
            _FOR,
            _WHOLE,
            drawn=True,
        ),
        FaultKind(
            "slow",
            "by=S: each forward pass, or packet, takes longer, for=S or until=EVENT*COUNT",
            None,
            frozenset({"for", "by", "until"}),
            {"by": "by which each forward pass takes longer"},
            outcome="slowed down",
            on=_PLACES | {"worker"},
        ),
        FaultKind("flip", "one bit of its state changes", lambda blow: blow.flip()),  # as a damaged memory cell would
        FaultKind(
            "throttle",
            "for=S: it gets a tenth of the CPU time, as if over its quota",
            lambda blow: throttle(blow.pid, blow.fault.for_s or 0.0),
            _FOR,
            {"for": "after which it has all of the time again"},
            by_signal=True,
        ),
        FaultKind("cut", "for=S: no packets pass, from or to a host, or between two", None, _FOR, _WHOLE, on=_PLACES),
        FaultKind(
            "oneway",
            "for=S: packets that a host sends are lost; with link:A-B, those from A to B",
            None,
            _FOR,
            _WHOLE,
            on=_PLACES,
        ),
        FaultKind(
            "drop",
            "for=S,p=P: share P of a host's or link's packets is lost",
            None,
            _FOR | {"p"},
            {**_WHOLE, "p": "the share of packets that is lost"},
            on=_PLACES,
        ),
        FaultKind(
            "narrow",
            "for=S,mbit=N: bandwidth is limited to N Mbit/s",
            None,
            _FOR | {"mbit"},
            {**_WHOLE, "mbit": "the bandwidth that is left"},
            outcome="slowed down",
            on=_PLACES,
        ),
    )
}
