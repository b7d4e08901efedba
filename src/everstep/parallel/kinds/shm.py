"""Shared memory, for members of one host."""

from __future__ import annotations

from everstep.base.ports import Channel, Transport
from everstep.exact.layout import GradientLayout
from everstep.parallel.channel import SharedMemoryChannel
from everstep.parallel.kinds.kind import NO_GRADIENTS, Site, TransportKind
from everstep.parallel.shared_memory import SharedMemoryTransport


def _pool(site: Site, layout: GradientLayout, name: str) -> Transport:
    return SharedMemoryTransport(site.me, layout, site.n_lanes, site.tick)


def _meet(site: Site) -> tuple[Transport, Channel]:
    return _pool(site, NO_GRADIENTS, ""), SharedMemoryChannel(site.me, site.tick, device=site.device)


KIND = TransportKind("shm", ("cpu", "cuda"), False, _meet, _pool)
