"""Number of faults of a job, by its events: one that was injected, and what follows from it, are one fault. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from everstep.base.cause import Cause
from everstep.report.words import Event, cause, known, one_line

ORDERLY = (Cause.DRAINED, Cause.SCALED, Cause.COMPLETED, Cause.INTERRUPTED, Cause.REBALANCED)
"""Causes for which a worker leaves without a fault."""
COORDINATOR = "coordinator"
_FOLLOWS_NS = 60_000_000_000


def struck_by(event: Event) -> str:
    """The victim of an injected fault: worker 2, coordinator, host b, link a~b."""
    worker_id, target = known(event.get("worker_id")), one_line(event.get("target"), 80)
    if worker_id is not None:
        return f"worker {worker_id}"
    return target.replace(":", " ", 1) if is_place(target.replace(":", " ", 1)) else COORDINATOR


def is_place(victim: str) -> bool:
    """Whether a victim is a host or a link."""
    return victim.startswith(("host ", "link "))


@dataclass
class FaultCount:
    """Takes in events in file order. number: of faults; workers that raise what another one has raised are no more."""

    number: int = 0
    _injected: dict[str, int] = field(default_factory=dict)

    def take(self, event: Event, time_ns: int, again: bool, opens: bool = False) -> None:
        """Take in the next event. again: a worker raised what another one has raised; opens: it is a trouble of its
        own, and follows from none that is known."""
        kind = event["kind"]
        if kind == "fault_injected":
            self._injected[struck_by(event)] = time_ns
            self.number += 1
        elif kind == "worker_evicted" and cause(event) not in ORDERLY:
            worker = f"worker {known(event.get('worker_id'))}"
            self.number += not again and not any(self._follows(who, time_ns) for who in (worker, *self._places()))
        elif kind == "fallback" and opens:  # nobody is named, so any injected fault may be its reason
            self.number += all(time_ns - struck_ns >= _FOLLOWS_NS for struck_ns in self._injected.values())
        elif kind == "coordinator_killed":
            self.number += not self._follows(COORDINATOR, time_ns)
            self._injected[COORDINATOR] = time_ns  # its restart is told, too
        elif kind == "coordinator_restarted":
            self.number += not self._follows(COORDINATOR, time_ns)

    def launcher_lost(self) -> None:
        """The job was started again without a word of its end."""
        self.number += 1

    def _places(self) -> list[str]:
        return [who for who in self._injected if is_place(who)]

    def _follows(self, who: str, time_ns: int) -> bool:
        """Whether a fault was injected there lately; each is followed once."""
        struck_ns = self._injected.pop(who, None)
        return struck_ns is not None and time_ns - struck_ns < _FOLLOWS_NS
