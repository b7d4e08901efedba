"""What a kind of transport says of itself, and what it is given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch._C._distributed_c10d import Store

from everstep.base.errors import InvariantViolation
from everstep.base.plan import WorkerKey
from everstep.base.ports import Channel, OnTick, Transport
from everstep.exact.layout import GradientLayout

NO_GRADIENTS = GradientLayout((), (), 0)


@dataclass(frozen=True)
class Site:
    """One worker, as its transports know it. store: where groups meet, for kinds that need one. device: where gradients
    and received tensors are. bind_host: as for `GroupTransport`."""

    me: WorkerKey
    n_lanes: int
    tick: OnTick
    device: torch.device
    store: Store | None = None
    bind_host: str | None = None

    @property
    def meeting_place(self) -> Store:
        if self.store is None:
            raise InvariantViolation("a store was looked for that nobody gave")
        return self.store


@dataclass(frozen=True)
class TransportKind:
    """One kind. devices: types on which it is to be had. meets: it needs a store.

    meet: makes what carries the records of all members, and their channel. pool: what reduces the gradients of one
    stage's pool, with a name that no other pool has.
    """

    name: str
    devices: tuple[str, ...]
    meets: bool
    meet: Callable[[Site], tuple[Transport, Channel]]
    pool: Callable[[Site, GradientLayout, str], Transport]
