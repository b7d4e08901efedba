"""The kinds of transports there are, by name."""

from __future__ import annotations

from everstep.parallel.kinds import gloo, nccl, shm
from everstep.parallel.kinds.kind import TransportKind

KINDS: dict[str, TransportKind] = {room.KIND.name: room.KIND for room in (shm, gloo, nccl)}
