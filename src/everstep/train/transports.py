"""Which transport a job uses: shared memory on one host, gloo or NCCL between hosts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from everstep.base.errors import check
from everstep.base.plan import Plan
from everstep.base.ports import Channel, Node, Reduced, Tag, Transport
from everstep.exact.layout import GradientLayout
from everstep.parallel.group import GroupTransport
from everstep.parallel.shared_memory import SharedMemoryTransport
from everstep.parallel.staged import StagedTransport
from everstep.parallel.store import ControlStore
from everstep.train.link import Link
from everstep.train.rendezvous import Rendezvous
from everstep.train.stages import Stages


class JobTransport(Protocol):
    """What a session needs, with one stage or several: see `StagedTransport`."""

    @property
    def segment(self) -> str: ...

    @property
    def channel(self) -> Channel: ...

    def open(self, plan: Plan, layouts: Mapping[int, GradientLayout]) -> None: ...

    def node(self, stage: int, step: int, node: Node) -> torch.Tensor: ...

    def reduce(self, stage: int, step: int, presence: Mapping[Node, bytes]) -> Reduced: ...

    def exchange(self, tag: Tag, payload: bytes) -> dict[int, bytes]: ...

    def abort(self, generation: int) -> None: ...

    def close(self) -> None: ...


class OneStage:
    """The transport of an unsplit job, in the shape of one for stages; nothing comes between."""

    def __init__(self, inner: Transport) -> None:
        self._inner = inner
        self.exchange = inner.exchange
        self.abort = inner.abort
        self.close = inner.close

    @property
    def segment(self) -> str:
        return self._inner.segment

    @property
    def channel(self) -> Channel:
        check(False, "nothing is handed from worker to worker in an unsplit job")
        raise AssertionError

    def open(self, plan: Plan, layouts: Mapping[int, GradientLayout]) -> None:
        self._inner.open(plan)

    def node(self, stage: int, step: int, node: Node) -> torch.Tensor:
        return self._inner.node(step, node)  # type: ignore[no-any-return]

    def reduce(self, stage: int, step: int, presence: Mapping[Node, bytes]) -> Reduced:
        return self._inner.reduce(step, presence)


def open_transport(link: Link, stages: Stages, rendezvous: Rendezvous, device: torch.device) -> JobTransport:
    """As the config's `transport` says; 'auto' takes shared memory, since a launcher's workers are on one host. Of a
    split model the layouts are given when a generation is opened.

    Raises: ConfigError if it is not to be had on this device.
    """
    kind, lanes = link.config.transport, link.config.lanes
    shared = kind in ("auto", "shm")

    def tick() -> None:
        link.row.tick()

    store = None if shared else ControlStore(rendezvous.set_key, rendezvous.get_keys, rendezvous.over)
    if stages.split:
        return StagedTransport(link.me, lanes, tick, kind="shm" if shared else kind, store=store, device=device)
    layout = stages.only.layout
    if store is None:
        return OneStage(SharedMemoryTransport(link.me, layout, lanes, tick))
    return OneStage(GroupTransport(link.me, layout, lanes, store, tick, backend=kind, device=device))
