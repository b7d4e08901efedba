"""The kinds of transports: properties, parts and inputs of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
from torch._C._distributed_c10d import Store

from everstep.base.errors import InvariantViolation, StaleGeneration
from everstep.base.plan import WorkerKey
from everstep.base.ports import Channel, OnTick, Transport
from everstep.exact.layout import GradientLayout
from everstep.parallel.channel import GroupChannel, SharedMemoryChannel
from everstep.parallel.either import EitherChannel, EitherTransport, NodeFlats
from everstep.parallel.group import GroupTransport
from everstep.parallel.shared_memory import NodeSlots, SharedMemoryTransport
from everstep.parallel.two_tiers import TieredTransport
from everstep.runtime.link.tls import Tls

NO_GRADIENTS = GradientLayout((), (), 0)


@dataclass(frozen=True)
class Site:
    """One worker, as its transports know it. store: where groups meet, for kinds that need one; key: the token of the
    role `peer`, for the same kinds, and `tls` the certificates for connections that need TLS. device: of gradients and
    received tensors. machine: its name; members with the same one can share memory. folder: for gradients in a file,
    where members of a host share memory."""

    me: WorkerKey
    n_lanes: int
    tick: OnTick
    device: torch.device
    store: Store | None = None
    key: bytes = b""
    tls: Tls | None = None
    machine: str = ""
    folder: Path | None = None

    def group(
        self,
        layout: GradientLayout,
        name: str,
        device: torch.device | str,
        *,
        slots: NodeSlots | None = None,
    ) -> GroupTransport:
        """A group of that name, for gradients on that device. slots: memory of the nodes, if not its own."""
        if self.store is None or not self.key:
            raise InvariantViolation("a store and the peers' token were looked for that nobody gave")
        return GroupTransport(
            *(self.me, layout, self.n_lanes, self.store, self.tick, device),
            key=self.key,
            tls=self.tls,
            name=name,
            flats=None if slots is None else NodeFlats(layout.numel, slots),
        )


@dataclass(frozen=True)
class TransportKind:
    """One kind. devices: types of devices that have it. meets: it needs a store. meet: makes the transport of all
    members' records, and their channel. pool: makes the transport that reduces the gradients of one stage's pool, with
    a unique name."""

    name: str
    devices: tuple[str, ...]
    meets: bool
    meet: Callable[[Site], tuple[Transport, Channel]]
    pool: Callable[[Site, GradientLayout, str], Transport]


def _shm_pool(site: Site, layout: GradientLayout, name: str) -> SharedMemoryTransport:
    return SharedMemoryTransport(site.me, layout, site.n_lanes, site.tick, folder=site.folder)


def _shm_meet(site: Site) -> tuple[Transport, Channel]:
    return _shm_pool(site, NO_GRADIENTS, ""), SharedMemoryChannel(site.me, site.tick, device=site.device)


def _either_pool(site: Site, layout: GradientLayout, name: str) -> EitherTransport:
    near = _shm_pool(site, layout, name)

    def tiers() -> TieredTransport:
        carrier = site.group(NO_GRADIENTS, f"{name}/tiers", "cpu")
        return TieredTransport(site.me.worker_id, layout, site.n_lanes, near, carrier)

    beyond = tiers if layout.entries else None
    return EitherTransport(site.machine, near, lambda slots: site.group(layout, name, "cpu", slots=slots), beyond)


def _either_meet(site: Site) -> tuple[Transport, Channel]:
    records = _either_pool(site, NO_GRADIENTS, "")
    near = SharedMemoryChannel(site.me, site.tick, device=site.device)
    return records, EitherChannel(site.machine, near, lambda: GroupChannel(site.me, records.far, device=site.device))


def _meet(site: Site) -> tuple[Transport, Channel]:
    """Records and single messages, through host memory wherever the tensors are."""
    records = site.group(NO_GRADIENTS, "", "cpu")
    return records, GroupChannel(site.me, records, device=site.device)


KINDS: dict[str, TransportKind] = {
    kind.name: kind
    for kind in (
        # by the plan of each generation: as "shm" inside a machine, as "sockets" between machines
        TransportKind("auto", ("cpu", "cuda"), True, _either_meet, _either_pool),
        # for members of one host
        TransportKind("shm", ("cpu", "cuda"), False, _shm_meet, _shm_pool),
        # for members on any hosts, with gradients in host memory
        TransportKind("sockets", ("cpu",), True, _meet, lambda site, layout, name: site.group(layout, name, "cpu")),
        # for members on any hosts, with gradients on the device; records and single messages go over sockets
        TransportKind("nccl", ("cuda",), True, _meet, lambda site, layout, name: site.group(layout, name, site.device)),
    )
}


SetKey = Callable[[str, bytes], None]
GetKeys = Callable[[list[str]], list[bytes] | None]


class ControlStore(Store):
    """A `torch.distributed.Store` over three callables: keys over the control connection, given up when the plan is
    superseded.

    Apart from torch's own stores because those block for their whole timeout if a peer dies before it says where it
    listens. Raising in `wait` or `get` frees the group's constructor at once. Source: measured on torch 2.13: 4 ms,
    against the timeout of the group.

    set_key(key, value) returns at once. get_keys(keys) blocks until all keys are set and returns their values, or None
    as soon as the caller has been superseded; it lets go of the interpreter lock while it blocks. superseded() says
    whether the generation that uses the store has ended.
    """

    def __init__(self, set_key: SetKey, get_keys: GetKeys, superseded: Callable[[], bool]) -> None:
        super().__init__()
        self._set_key = set_key
        self._get_keys = get_keys
        self._superseded = superseded

    def set(self, key: str, value: bytes | str) -> None:
        """Raises: StaleGeneration when superseded."""
        self._refuse_stale([key])
        self._set_key(key, value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        """Blocks until the key is set. Raises: StaleGeneration when superseded."""
        return self.multi_get([key])[0]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Blocks until all keys are set. Raises: StaleGeneration when superseded."""
        self._refuse_stale(keys)
        values = self._get_keys(list(keys))
        if values is None:
            raise StaleGeneration(f"the plan was superseded while {keys} were waited for")
        return values

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:  # type: ignore[override]
        """Blocks until all keys are set, however long: the plan ends the wait, not the clock.

        Raises: StaleGeneration when superseded.
        """
        self.multi_get(keys)

    def _refuse_stale(self, keys: list[str]) -> None:
        if self._superseded():
            raise StaleGeneration(f"the plan was superseded before {keys} were asked for")
