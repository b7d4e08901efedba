"""Which transport a job uses: shared memory on one host, gloo or NCCL between hosts."""

from __future__ import annotations

import torch

from everstep.parallel.kinds import KINDS, ControlStore
from everstep.parallel.staged import StagedTransport
from everstep.train.link import WorkerLink
from everstep.train.rendezvous import Rendezvous


def open_transport(link: WorkerLink, rendezvous: Rendezvous, device: torch.device) -> StagedTransport:
    """As the config's `transport` says; 'auto' takes shared memory, since a job's workers are on one machine.

    Raises: ConfigError if it is not to be had on this device.
    """
    kind = "shm" if link.config.transport == "auto" else link.config.transport
    meets = KINDS[kind].meets
    store = ControlStore(rendezvous.set_key, rendezvous.get_keys, rendezvous.over) if meets else None

    def tick() -> None:
        link.row.tick()

    return StagedTransport(link.me, link.config.lanes, tick, kind=kind, store=store, device=device)
