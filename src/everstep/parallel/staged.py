"""The transport of a model that is split into stages: an exchange among all, a reduction per pool, and a channel.

It is made of the transports for one stage. Records go through one without gradients, over all members. Each stage that
this worker holds has a transport of its own, over the plan restricted to the stage's pool. It lives while the worker
keeps the stage, so the promises of the one-stage transport about results and lane sums hold here, too, for each stage.
A stage that is given away takes its memory with it, except for the memory of results that were handed out.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import msgspec
import torch
from torch._C._distributed_c10d import Store

from everstep.base.errors import ConfigError, check
from everstep.base.plan import Plan, WorkerKey
from everstep.base.ports import Channel, Node, OnFinal, OnTick, Reduced, Tag, Transport
from everstep.exact.layout import GradientLayout
from everstep.parallel.fence import Fence
from everstep.parallel.group import Reaper
from everstep.parallel.transport_kinds import KINDS, Site
from everstep.placement.shards import Takers
from everstep.runtime.link.tls import Tls

_OPEN = "open"


class StagedTransport:
    """Moves gradients, records and activations among the members of one generation, of all stages.

    kind: a name of `kinds`. store: where groups meet, for kinds that need one; key: the token of the role `peer`, for
    the same kinds; tls: certificates for connections that need TLS. machine: its name; members with the same one can
    share memory. device: of gradients and received tensors. folder: for gradients in a file, where members share
    memory. channel: for single messages between any two members; opened, aborted and closed with the transport.

    One thread calls all methods but `abort`. Blocking calls raise `CollectiveAborted` within a few milliseconds after
    `abort(generation)` was called for theirs, and when a peer is found dead (`accused` names it). They call `tick()` at
    least every 20 ms while they wait.

    Raises: ConfigError for another kind, or one that the device does not have.
    """

    def __init__(
        self,
        me: WorkerKey,
        n_lanes: int,
        tick: OnTick,
        *,
        kind: str = "shm",
        store: Store | None = None,
        key: bytes = b"",
        tls: Tls | None = None,
        machine: str = "",
        device: torch.device | str = "cpu",
        folder: Path | None = None,
    ) -> None:
        if kind not in KINDS:
            raise ConfigError(f"expected one of the transports {', '.join(KINDS)}, got {kind!r}")
        self._kind = KINDS[kind]
        self._site = Site(me, n_lanes, tick, torch.device(device), store, key, tls, machine, folder)
        if self._site.device.type not in self._kind.devices:
            raise ConfigError(f"expected transport {kind} with {' or '.join(self._kind.devices)}, got {device}")
        if self._kind.meets and store is None:
            raise ConfigError(f"transport {kind} needs a store through which its groups meet")
        self._fence = Fence()
        self._lock = threading.Lock()
        self._reaper = Reaper()
        self._pools: dict[int, Transport] = {}
        self._layouts: dict[int, str] = {}
        self._records, self.channel = self._kind.meet(self._site)

    @property
    def segment(self) -> str:
        """Text for `Member.segment`, with which peers attach; they learn the rest when they meet."""
        return self._records.segment

    def open(self, plan: Plan, layouts: Mapping[int, GradientLayout]) -> None:
        """Regroup: meet the members of the plan, and those of the pools of the own stages.

        layouts: of the stages in which this worker has a seat, and no others. A stage with the layout that it had
        before keeps its memory: lane sums and results stay. Waits for the other members.

        Raises: CollectiveAborted if members are dead, or the generation ends before all are there; MembershipError if
        a segment is not that of a member, or a stage has another layout there.
        """
        me = self._site.me
        check(plan.has(me), f"{me} is no member of generation {plan.generation}")
        seats = {s.stage for s in plan.seats if s.worker_id == me.worker_id}
        check(seats == set(layouts), f"expected layouts of the stages {sorted(seats)}, got {sorted(layouts)}")
        self._fence.enter(plan.generation)
        self._records.open(plan)
        self._renew(layouts)
        told = self._tell_segments(plan.generation)
        self.channel.open(_at_segments(plan, {w: segments[""] for w, segments in told.items()}))
        for stage, pool in self._pools.items():
            part = plan.of_pool(stage)
            pool.open(_at_segments(part, {w: told[w][str(stage)] for w in part.worker_ids}))

    def node(self, stage: int, step: int, node: Node) -> torch.Tensor:
        """The flat tensor, `layout.numel` elements, 64-byte aligned, that the caller fills with the node's sum.

        The same (stage, step, node) gives the same memory for as long as the worker keeps the stage, so results survive
        a change of generation. Calling with a new step frees those of the stage's step before.
        """
        flat: torch.Tensor = self._pools[stage].node(step, node)
        return flat

    def divide(self, stage: int, step: int, takes: Takers | None, *, frees: bool = False) -> None:
        self._pools[stage].divide(step, takes, frees=frees)

    def given_back(self, stage: int, step: int) -> frozenset[Node]:
        return self._pools[stage].given_back(step)

    def offering(self, stage: int, step: int) -> OnFinal | None:
        """Takes blocks of this step's nodes as they become final; None where nothing would leave before `reduce`."""
        return self._pools[stage].offering(step)

    def reduce(self, stage: int, step: int, presence: Mapping[Node, bytes]) -> Reduced:
        """Offer the filled nodes of this step, wait for those of all members of the stage's pool, and finish the tree.

        Workers with several stages in common must reduce them in the same order: ascend. The result stays valid and
        unchanged until this stage's step is reduced again, or step + 2 is, even if its owner dies or the worker gives
        the stage away.
        """
        return self._pools[stage].reduce(step, presence)

    def exchange(self, tag: Tag, payload: bytes) -> dict[int, bytes]:
        """All-gather of small records over all members of all stages, by worker id, this one's included."""
        found = self._records.exchange(tag, payload)
        for pool in self._pools.values():
            pool.settled()  # a member that wrote a record has left the reductions before it
        return found

    def abort(self, generation: int) -> None:
        with self._lock:
            self._fence.abort(generation)
            for part in self._parts():
                part.abort(generation)

    def close(self) -> None:
        """Release everything. Tensors that were handed out stay valid while they are referred to."""
        self.abort(1 << 62)
        with self._lock:
            parts, self._pools = self._parts(), {}
        for part in parts:
            part.close()
        self._reaper.close()

    # ---- inside

    def _parts(self) -> tuple[Transport | Channel, ...]:
        return (self.channel, *self._pools.values(), self._records)

    def _renew(self, layouts: Mapping[int, GradientLayout]) -> None:
        """Close the transports of stages that are gone, make those of stages that are new, keep the others."""
        prints = {stage: layouts[stage].fingerprint() for stage in sorted(layouts)}
        kept = {s: pool for s, pool in self._pools.items() if s in prints and prints[s] == self._layouts.get(s)}
        gone = [pool for s, pool in self._pools.items() if s not in kept]
        fresh = {s: self._kind.pool(self._site, layouts[s], f"stage{s}") for s in prints if s not in kept}
        with self._lock:
            for pool in fresh.values():
                pool.abort(self._fence.aborted)
            self._pools = {s: kept.get(s) or fresh[s] for s in prints}
            self._layouts = prints
        while gone:
            self._reaper.take(gone.pop().close)

    def _tell_segments(self, generation: int) -> dict[int, dict[str, str]]:
        """All members' texts for attaching to their channels ("") and pools (the stage), by worker id."""
        own = {"": self.channel.segment, **{str(stage): pool.segment for stage, pool in self._pools.items()}}
        records = self._records.exchange(Tag(_OPEN, generation, 0), msgspec.msgpack.encode(own))
        return {w: msgspec.msgpack.decode(record, type=dict[str, str]) for w, record in records.items()}


def _at_segments(plan: Plan, segments: Mapping[int, str]) -> Plan:
    members = tuple(replace(m, segment=segments[m.worker_id]) for m in plan.members)
    return replace(plan, members=members)
