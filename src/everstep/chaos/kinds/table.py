"""The kinds of faults there are, by name. Random faults are drawn by their order here."""

from __future__ import annotations

from everstep.chaos.kinds import disconnect, exception, flip, kill, partition, slow, stop, throttle
from everstep.chaos.kinds.kind import FaultKind

KINDS: dict[str, FaultKind] = {
    room.KIND.name: room.KIND for room in (kill, stop, exception, partition, disconnect, slow, flip, throttle)
}
