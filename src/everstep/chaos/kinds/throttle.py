"""A process that gets a tenth of the time, as in a container that is over its CPU quota.

All of its threads stand still for nine tenths of each period, in the middle of whatever they do: unlike `slow` it is
late with everything, and unlike `stop` it is never away for long. Source: the periods of 100 ms are those of cgroups'
cpu.max.
"""

from __future__ import annotations

from everstep.chaos.beside import run_beside
from everstep.chaos.kinds.kind import Blow, FaultKind

_PERIOD_S = 0.1
_SHARE = 0.1


def _strike(blow: Blow) -> None:
    periods = round((blow.fault.for_s or 0.0) / _PERIOD_S)
    away_s, there_s = _PERIOD_S * (1 - _SHARE), _PERIOD_S * _SHARE
    run_beside(
        f"n={periods}; while [ $((n -= 1)) -ge 0 ] && kill -STOP {blow.pid}; "
        f"do sleep {away_s:.3f}; kill -CONT {blow.pid}; sleep {there_s:.3f}; done"
    )


KIND = FaultKind(
    "throttle",
    "for=S: it gets a tenth of the time, as one over its CPU quota",
    _strike,
    takes=frozenset({"phase", "for"}),
    needs={"for": "after which it has all of the time again"},
    of_coordinator=True,
    at_once=True,
)
