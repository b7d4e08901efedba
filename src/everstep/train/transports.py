"""Which transport a job uses: shared memory on one host, gloo or NCCL between hosts."""

from __future__ import annotations

import torch

from everstep.base.ports import Tick, Transport
from everstep.exact.layout import GradientLayout
from everstep.parallel.group import GroupTransport
from everstep.parallel.shared_memory import SharedMemoryTransport
from everstep.parallel.staged import StagedTransport
from everstep.parallel.store import ControlStore
from everstep.train.link import Link
from everstep.train.rendezvous import Rendezvous


def open_transport(
    link: Link, layout: GradientLayout, tick: Tick, rendezvous: Rendezvous, device: torch.device
) -> Transport:
    """As the config's `transport` says; 'auto' takes shared memory, since a launcher's workers are on one host.

    Raises: ConfigError if it is not to be had on this device.
    """
    kind = link.config.transport
    if kind in ("auto", "shm"):
        return SharedMemoryTransport(link.me, layout, link.config.lanes, tick)
    store = ControlStore(rendezvous.set_key, rendezvous.get_keys, rendezvous.over)
    return GroupTransport(link.me, layout, link.config.lanes, store, tick, backend=kind, device=device)


def open_staged(link: Link, tick: Tick, rendezvous: Rendezvous, device: torch.device) -> StagedTransport:
    """The same choice for a model that is split into stages; layouts are given when a generation is opened.

    Raises: ConfigError if it is not to be had on this device.
    """
    kind = link.config.transport
    if kind in ("auto", "shm"):
        return StagedTransport(link.me, link.config.lanes, tick, device=device)
    store = ControlStore(rendezvous.set_key, rendezvous.get_keys, rendezvous.over)
    return StagedTransport(link.me, link.config.lanes, tick, kind=kind, store=store, device=device)
