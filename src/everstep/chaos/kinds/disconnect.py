"""A control connection that breaks and cannot be made again for a while; the worker's agent still sees it."""

from __future__ import annotations

from everstep.chaos.kinds.kind import Blow, FaultKind


def _strike(blow: Blow) -> None:
    blow.cut_off(blow.fault.for_s or 0.0, True, blow.fault.peers)


KIND = FaultKind(
    "disconnect",
    "for=S: its connection to the coordinator breaks",
    _strike,
    takes=frozenset({"phase", "for"}),
    needs={"for": "after which the link is whole again"},
    drawn=True,
)
