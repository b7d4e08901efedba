"""Transport and channel that choose by place: shared memory inside a machine, sockets between machines.

The choice is made for each generation and each pool, from the plan alone: a member's segment names its machine, too. So
all members choose alike, and a job may grow from one host to three and shrink again. Lane sums lie in the worker's own
shared memory in any case, so they outlive the change, and the tree is the same, so the bits are.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from everstep.base.plan import Plan
from everstep.base.ports import Hop, Node, OnFinal, Portion, Reduced, Tag
from everstep.parallel.channel import GroupChannel, SharedMemoryChannel
from everstep.parallel.group import GroupTransport
from everstep.parallel.reduction import Flats
from everstep.parallel.shared_memory import NodeSlots, SharedMemoryTransport
from everstep.parallel.two_tiers import TieredTransport
from everstep.placement.shards import Takers


class NodeFlats(Flats):
    """Nodes in shared memory, for a transport that moves them over sockets."""

    def __init__(self, numel: int, slots: NodeSlots) -> None:
        super().__init__(numel, torch.device("cpu"))
        self._slots = slots

    def tensor(self, step: int, node: Node) -> torch.Tensor:
        return self._slots.tensor(step, node)

    def begun(self, step: int) -> bool:
        return self._slots.begun(step)

    def held(self, step: int, node: Node) -> torch.Tensor:
        self._slots.index(step, node)
        return self._slots.tensor(step, node)

    def give_back(self, step: int, node: Node, first: int, last: int) -> None:
        self._slots.give_back(step, first, last, [node])

    def lose(self) -> None:
        self._slots.lose()

    def lost(self, step: int) -> frozenset[Node]:
        return self._slots.lost(step)


class EitherTransport:
    """`everstep.base.ports.Transport` for members on any hosts.

    machine: its name, without a "/". near: for generations of one machine. far: makes the transport for generations in
    which each machine has one member, when the first of them begins; tiers: makes the one for generations in which a
    machine has several (None: `far` serves them, too).
    """

    def __init__(
        self,
        machine: str,
        near: SharedMemoryTransport,
        far: Callable[[NodeSlots], GroupTransport],
        tiers: Callable[[], TieredTransport] | None = None,
    ) -> None:
        self._machine = machine
        self._near = near
        self._make_far = far
        self._far: GroupTransport | None = None
        self._make_tiers = tiers
        self._tiers: TieredTransport | None = None
        self._current: SharedMemoryTransport | GroupTransport | TieredTransport = near
        self._lock = threading.Lock()
        self._aborted = 0

    @property
    def segment(self) -> str:
        return f"{self._machine}/{self._near.segment}"

    @property
    def far(self) -> GroupTransport:
        """The transport between machines."""
        with self._lock:
            if self._far is None:
                self._far = self._make_far(self._near.slots)
                self._far.abort(self._aborted)
            return self._far

    def open(self, plan: Plan) -> None:
        """Begin a generation with the transport that serves it. Raises: its errors."""
        machines = machines_of(plan)
        if self._tiers is not None:
            self._tiers.leave()  # it writes to the memory that is used from here on
        if set(machines.values()) == {self._machine}:
            self._current = self._near
            self._near.open(_on(self._machine, plan))
        elif self._make_tiers is None or len(set(machines.values())) == len(machines):
            self._current = self.far
            self._near.rest()
            self.far.open(plan)
        else:
            with self._lock:
                if self._tiers is None:
                    self._tiers = self._make_tiers()
                    self._tiers.abort(self._aborted)
                self._current = self._tiers
            self._near.open(_on(self._machine, plan))
            self._tiers.open(plan, machines)

    def node(self, step: int, node: Node) -> torch.Tensor:
        """Node in the own segment, float32 [layout.numel]."""
        return self._near.node(step, node)

    def divide(self, step: int, takes: Takers | None, *, frees: bool = False) -> None:
        self._current.divide(step, takes, frees=frees)

    def given_back(self, step: int) -> frozenset[Node]:
        return self._near.given_back(step)

    def offering(self, step: int) -> OnFinal | None:
        """Receiver of blocks before `reduce`, if they have to go to another machine."""
        return self._current.offering(step)

    def exchange(self, tag: Tag, payload: bytes) -> dict[int, bytes]:
        found = self._current.exchange(tag, payload)
        self._leave_sockets()
        return found

    def reduce(self, step: int, presence: Mapping[Node, bytes]) -> Reduced:
        """Offer own nodes, finish the tree."""
        return self._current.reduce(step, presence)

    def settled(self) -> None:
        self._current.settled()
        self._leave_sockets()

    def abort(self, generation: int) -> None:
        """Thread-safe."""
        with self._lock:
            self._aborted = max(self._aborted, generation)
            self._near.abort(generation)
            for beyond in (self._far, self._tiers):
                if beyond is not None:
                    beyond.abort(generation)

    def close(self) -> None:
        """Release everything; tensors that were handed out stay valid while they are referred to."""
        for beyond in (self._far, self._tiers):
            if beyond is not None:
                beyond.close()
        self._near.close()

    def _leave_sockets(self) -> None:
        """All members are known to have left the generation before: its sockets are not needed any more."""
        for beyond in (self._far, self._tiers):
            if beyond is not None and beyond is not self._current:
                beyond.rest()


class EitherChannel:
    """`everstep.base.ports.Channel` for members on any hosts. machine: as in `EitherTransport`. near: for messages to
    members of this machine; far: makes the channel to other machines, when there are any for the first time."""

    def __init__(self, machine: str, near: SharedMemoryChannel, far: Callable[[], GroupChannel]) -> None:
        self._machine = machine
        self._near = near
        self._make_far = far
        self._far: GroupChannel | None = None
        self._machines: dict[int, str] = {}
        self._elsewhere: frozenset[int] = frozenset()
        self._lock = threading.Lock()
        self._aborted = 0

    @property
    def segment(self) -> str:
        return f"{self._machine}/{self._near.segment}"

    def open(self, plan: Plan) -> None:
        """Begin a generation with the channels that serve it. Raises: their errors."""
        self._machines = machines_of(plan)
        self._elsewhere = frozenset(w for w, machine in self._machines.items() if machine != self._machine)
        self._near.open(_on(self._machine, plan))
        if not self._elsewhere:
            return
        with self._lock:
            if self._far is None:
                self._far = self._make_far()
                self._far.abort(self._aborted)
        self._far.open(plan)

    def send(self, to: int, key: Hop, tensors: Sequence[torch.Tensor], meta: bytes = b"") -> None:
        self._way(to).send(to, key, tensors, meta)

    def expect(self, source: int, key: Hop) -> None:
        self._way(source).expect(source, key)

    def recv(self, source: int, key: Hop) -> tuple[list[torch.Tensor], bytes]:
        return self._way(source).recv(source, key)

    def spread(self, step: int, stage: int, portions: Sequence[Portion]) -> None:
        """Once to each other machine, to a member there that passes it on. Raises: CollectiveAborted."""
        if self._far is None or not self._elsewhere:
            self._near.spread(step, stage, portions)
            return
        ways = ways_of(portions, self._machines, self._machine)
        self._far.spread(step, stage, ways.far, lambda: self._near.spread(step, stage, ways.near))
        self._near.spread(step, stage, ways.relayed, relayed=True)

    def forget(self, step: int) -> None:
        """Messages of steps up to this one may be overwritten."""
        self._near.forget(step)
        if self._far is not None:
            self._far.forget(step)

    def abort(self, generation: int) -> None:
        """Thread-safe."""
        with self._lock:
            self._aborted = max(self._aborted, generation)
            self._near.abort(generation)
            if self._far is not None:
                self._far.abort(generation)

    def close(self) -> None:
        if self._far is not None:
            self._far.close()
        self._near.close()

    def _way(self, worker_id: int) -> SharedMemoryChannel | GroupChannel:
        """Channel to a member; that channel refuses a worker that is none."""
        return self._far if self._far is not None and worker_id in self._elsewhere else self._near


class Ways(NamedTuple):
    """Portions as they go within this machine, between machines, and from those who got them so to the rest of this
    machine."""

    near: list[Portion]
    far: list[Portion]
    relayed: list[Portion]


def ways_of(portions: Sequence[Portion], machines: Mapping[int, str], machine: str) -> Ways:
    """How portions reach their takers, as the members of one machine see it. machines: of all members, by worker id.
    The takers of a machine get portions of another one in turn."""
    ways = Ways([], [], [])
    for number, one in enumerate(portions):
        home, takers = machines[one.source], dict[str, list[int]]()
        for taker in one.takers:
            takers.setdefault(machines[taker], []).append(taker)
        first = {at: ids[number % len(ids)] for at, ids in takers.items() if at != home}
        here = tuple(w for w in takers.get(machine, ()) if w != first.get(machine))
        if first:
            ways.far.append(replace(one, takers=tuple(sorted(first.values()))))
        if here and home == machine:
            ways.near.append(replace(one, takers=here))
        elif here:
            ways.relayed.append(replace(one, source=first[machine], takers=here))
    return ways


def machines_of(plan: Plan) -> dict[int, str]:
    """Machine of each member, by worker id."""
    return {member.worker_id: member.segment.partition("/")[0] for member in plan.members}


def _on(machine: str, plan: Plan) -> Plan:
    """The plan's part on one machine, with the segments as the transports there name them."""
    here = [m for m in plan.members if m.segment.startswith(f"{machine}/")]
    members = tuple(replace(m, segment=m.segment.partition("/")[2]) for m in here)
    # If members are elsewhere, the members here finish nothing among themselves.
    return replace(plan, members=members, shards=plan.shards if len(here) == len(plan.members) else ())
