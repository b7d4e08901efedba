"""A worker cut off from the coordinator, its agent's sight of it included, and with from=peers from the others too."""

from __future__ import annotations

from everstep.chaos.kinds.kind import Blow, FaultKind


def _strike(blow: Blow) -> None:
    blow.cut_off(blow.fault.for_s or 0.0, False, blow.fault.peers)


KIND = FaultKind(
    "partition",
    "for=S: cut off from the coordinator; from=peers: from all others",
    _strike,
    takes=frozenset({"phase", "for", "from"}),
    needs={"for": "after which the link is whole again"},
    drawn=True,
)
