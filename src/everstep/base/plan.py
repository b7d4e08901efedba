"""Decisions of the coordinator that all processes follow: members, seats, the plan of one generation. Pure data.

A *member* is a worker: a process, or a *cell* of several. The first of a cell, the *head*, alone decides and talks; the
others are its *limbs*. A *seat* is a member's place in one stage's pool, with the lanes that placement gave it. Members
and seats are apart because one worker may hold seats in several stages.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import groupby
from operator import attrgetter, itemgetter
from typing import Literal

from everstep.base.cause import Cause
from everstep.base.domains import Domains, ordered
from everstep.base.errors import InvariantViolation, check
from everstep.base.extents import WHOLE, Extents, Runs

Role = Literal["active", "standby"]

Divides = Literal["elements", "matrices", "nothing"]
"""How members may divide an optimizer's state among them: any elements of it, or that of whole parameters."""
SEGMENTS = 256
"""Parts that the optimizer's state of a stage is dealt out in."""


@dataclass(frozen=True, order=True)
class WorkerKey:
    """One life of one slot: `worker_id` is the slot's, `incarnation` counts its lives from 0."""

    worker_id: int
    incarnation: int

    def __str__(self) -> str:
        return f"{self.worker_id}.{self.incarnation}"


@dataclass(frozen=True)
class Rank:
    """One process of a cell. address, segment: of none so far, as the head alone speaks with other workers."""

    pid: int = 0
    address: str = ""
    segment: str = ""


@dataclass(frozen=True)
class Member:
    """A worker that takes part in a generation, and how its peers reach it.

    `address` is "host:port" of the worker's peer server (healing); `segment` is an opaque string with which members on
    the same host attach to its shared memory ("" if it has none). These and `pid` are the head's; `limbs` are the other
    ranks of its cell, from rank 1 on. `domains`: its failure domains apart from its host, as far as the coordinator
    knows.
    """

    worker_id: int
    incarnation: int
    host: str
    pid: int = 0
    address: str = ""
    segment: str = ""
    limbs: tuple[Rank, ...] = ()
    domains: Domains = ()

    @cached_property
    def key(self) -> WorkerKey:
        return WorkerKey(self.worker_id, self.incarnation)

    @property
    def all_domains(self) -> Domains:
        return ordered(dict(self.domains), self.host)

    @property
    def pids(self) -> tuple[int, ...]:
        """PIDs of all ranks of the cell."""
        return (self.pid, *(rank.pid for rank in self.limbs))


@dataclass(frozen=True)
class Seat:
    """A member's place in the pool of one stage; `lanes` ascend, and are empty for a standby."""

    worker_id: int
    stage: int
    role: Role
    lanes: tuple[int, ...]


@dataclass(frozen=True)
class Shard:
    """The part of its stage that a seat holds, if not all: blocks of the state and of the reduced gradient.

    segments: numbers of those of the optimizer's state that it holds, of `SEGMENTS`; which blocks these are follows
    from the planes that there are by then (`placement.shards.share`). None: all, and `state` says what else.
    """

    worker_id: int
    stage: int
    state: Extents = WHOLE
    gradient: Extents = WHOLE
    segments: Runs | None = None

    def __post_init__(self) -> None:
        ends = [end for run in self.segments or () for end in run]
        check(ends == sorted(set(ends)) and ends[:1] >= [0] * bool(ends), f"expected runs of segments, got {ends}")
        check(ends[-1:] <= [SEGMENTS], f"expected segments below {SEGMENTS}, got {ends[-1:]}")
        for held in (self.state, self.gradient):
            if not held.whole and held != Extents.part(held.of, held.runs):
                raise InvariantViolation(f"expected a shard of blocks, got {held!r:.200}")


@lru_cache(maxsize=1 << 14)
def _all_of(worker_id: int, stage: int) -> Shard:
    return Shard(worker_id, stage)


@dataclass(frozen=True)
class Plan:
    """One generation: who takes part, who does what, and why.

    `members` ascend by worker_id. `speeds` (samples per second, by worker_id) and `previous` (generation whose seats
    were repaired, 0 if none) are the inputs of placement. `prepared`: members switch to this plan after the first agree
    in which all of the previous generation hold it; otherwise at once. `joining`: worker ids that were not members of
    the generation before. `leaders`: by stage, if the config names one that is a member; None or nothing: the first in
    id order. `save`: why a checkpoint is taken as soon as all have settled, before the job ends; "" if none is. `cause`
    and `reason`: why the generation began; the cause is unknown in plans of older versions. `sound`: states after this
    step are tainted, as the coordinator heard; -1 if there is no doubt. `term`: lease term of the coordinator that made
    it (create revision); 0 without a lease. `alike`: (step, stage, digest of its state) of the newest steps at which
    all members were found alike. `shards`: the holdings of seats that do not hold all of their stage. `voided`: the
    newest generation before this one that was entered with a `sound`, 0 if none: the state of a worker that has it from
    an older one, and was not there, does not count.
    """

    generation: int
    reason: str
    members: tuple[Member, ...]
    seats: tuple[Seat, ...]
    lanes: int
    stages: int = 1
    speeds: tuple[tuple[int, float], ...] = ()
    previous: int = 0
    prepared: bool = False
    joining: tuple[int, ...] = ()
    leaders: tuple[int | None, ...] = ()
    save: str = ""
    cause: Cause = Cause.UNKNOWN
    sound: int = -1
    term: int = 0
    alike: tuple[tuple[int, int, str], ...] = ()
    shards: tuple[Shard, ...] = ()
    voided: int = 0

    def __post_init__(self) -> None:
        ids = [m.worker_id for m in self.members]
        check(ids == sorted(set(ids)), f"members must be distinct and ascend, got {ids}")

    @cached_property
    def worker_ids(self) -> tuple[int, ...]:
        return tuple(m.worker_id for m in self.members)

    @cached_property
    def divided_stages(self) -> frozenset[int]:
        """Stages whose optimizer's state is divided among their members."""
        return frozenset(shard.stage for shard in self.shards if shard.segments is not None)

    @cached_property
    def _by_id(self) -> dict[int, Member]:
        # A coordinator of a thousand workers asks a thousand times per message.
        return {m.worker_id: m for m in self.members}

    @cached_property
    def _by_place(self) -> dict[tuple[int, int], Seat]:
        return {(s.worker_id, s.stage): s for s in self.seats}

    @cached_property
    def _shares(self) -> dict[tuple[int, int], Shard]:
        return {(s.worker_id, s.stage): s for s in self.shards}

    @cached_property
    def _by_lane(self) -> dict[tuple[int, int], int]:
        return {(s.stage, lane): s.worker_id for s in self.seats for lane in s.lanes}

    @cached_property
    def _pools(self) -> dict[int, tuple[Seat, ...]]:
        seats = sorted(self.seats, key=attrgetter("stage", "worker_id"))
        return {stage: tuple(pool) for stage, pool in groupby(seats, key=attrgetter("stage"))}

    @cached_property
    def _stages_of(self) -> dict[int, tuple[int, ...]]:
        places = groupby(sorted((s.worker_id, s.stage) for s in self.seats), key=itemgetter(0))
        return {worker_id: tuple(stage for _, stage in held) for worker_id, held in places}

    def member(self, worker_id: int) -> Member:
        """The member with this id. Raises: KeyError if there is none."""
        return self._by_id[worker_id]

    def of_pool(self, stage: int) -> Plan:
        """The plan as the pool of one stage sees it, without all other workers."""
        seats = self.pool(stage)
        ids = {seat.worker_id for seat in seats}
        members = tuple(m for m in self.members if m.worker_id in ids)
        joining = tuple(w for w in self.joining if w in ids)
        shards = tuple(share for share in self.shards if share.stage == stage)
        return replace(self, members=members, seats=seats, joining=joining, shards=shards)

    def has(self, key: WorkerKey) -> bool:
        member = self._by_id.get(key.worker_id)
        return member is not None and member.incarnation == key.incarnation

    def pool(self, stage: int) -> tuple[Seat, ...]:
        """The seats of one stage, in id order."""
        return self._pools.get(stage, ())

    def leader(self, stage: int) -> int:
        """worker_id of the stage's leader: the one that the config names, if a member, else the first in id order."""
        named = self.leaders[stage] if stage < len(self.leaders) else None
        return self.pool(stage)[0].worker_id if named is None else named

    def seat(self, worker_id: int, stage: int = 0) -> Seat:
        """The worker's seat in a stage. Raises: KeyError if it has none."""
        return self._by_place[worker_id, stage]

    def shard(self, worker_id: int, stage: int) -> Shard:
        """The part of the stage that the worker's seat holds."""
        return self._shares.get((worker_id, stage)) or _all_of(worker_id, stage)

    def stages_of(self, worker_id: int) -> tuple[int, ...]:
        """Stages in which the worker has a seat, ascending; empty if it is not a member."""
        return self._stages_of.get(worker_id, ())

    def seats_of(self, worker_id: int) -> tuple[Seat, ...]:
        """The worker's seats, by stage."""
        return tuple(self.seat(worker_id, stage) for stage in self.stages_of(worker_id))

    def role_of(self, worker_id: int) -> str:
        """leader (of any stage), active or standby; "" if the worker is not a member."""
        seats = self.seats_of(worker_id)
        if any(self.leader(seat.stage) == worker_id for seat in seats):
            return "leader"
        return "" if worker_id not in self._by_id else "active" if any(seat.lanes for seat in seats) else "standby"

    def lanes_of(self, worker_id: int, stage: int = 0) -> tuple[int, ...]:
        """Lanes that the worker computes in a stage, ascending. Raises: KeyError if it has no seat there."""
        return self.seat(worker_id, stage).lanes

    def holder(self, stage: int, lane: int) -> int:
        """worker_id of the worker that computes the lane in the stage. Raises: KeyError if there is none."""
        return self._by_lane[stage, lane]
