"""Events and effects of the coordinator's machine, and its settings. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from everstep.base.plan import Divides, Plan, WorkerKey
from everstep.base.pool_wish import PoolWish
from everstep.base.strikes import Strike
from everstep.protocol.identity import Code, Kernels
from everstep.protocol.messages import AnyMessage


@dataclass(frozen=True)
class Alike:
    """Facts that must be alike in all workers, as far as they are known. kernels, code: the job's; before: the code of
    an earlier run of it; divides: how the optimizer's state of a stage is divided; warns: other kernels are told, not
    refused."""

    kernels: Kernels | None = None
    code: Code = field(default_factory=Code)
    before: Code = field(default_factory=Code)
    warns: bool = False
    divides: Mapping[int, Divides] = field(default_factory=dict)


@dataclass(frozen=True)
class HostRules:
    """How patient the coordinator is with hosts, and what they have. Times in nanoseconds.

    grace_ns: so long the agents and workers of a journal may take to come back. reconnect_ns: so long a host may that
    has lost all its connections. return_ns: after so long slots move to hosts that have fewer than others; None: never.
    device: of the workers; devices: of those that have another one, by worker id.
    least: hosts that have to be there before the job begins; named: where the map wants workers, by worker id; wait_ns:
    how long it waits for all of them. strikes: scripted faults of hosts and links. hang_first_ns: how long workers may
    stand still where they may compile.
    term: of the coordinator among those that may take each other's place; 0 where there is but one. alike: what their
    workers have to have alike.
    """

    grace_ns: int = 2_000_000_000
    reconnect_ns: int = 1_000_000_000
    return_ns: int | None = None
    device: str = "cpu"
    devices: Mapping[int, str] = field(default_factory=dict)
    least: int = 1
    named: Mapping[int, str] = field(default_factory=dict)
    wait_ns: int = 600_000_000_000
    strikes: tuple[Strike, ...] = ()
    term: int = 0
    hang_first_ns: int = 600_000_000_000
    alike: Alike = field(default_factory=Alike)

    def gpu(self, worker_id: int) -> str:
        """The GPU of a worker, as its host calls it; "" if it has none."""
        kind, _, index = self.devices.get(worker_id, self.device).partition(":")
        return "" if kind == "cpu" else index or "0"


@dataclass(frozen=True)
class CoordinatorConfig:
    """The part of the job's config that the coordinator needs. Times in nanoseconds.

    save_ns: time for a checkpoint before a job ends that fails; 0 without checkpoints. lasting_ns: how long another
    placement must have promised much shorter steps before lanes, or a worker, are moved for it; it is looked at every
    look_ns. slots: with how many the job begins, for the coordinator to share out; 0: as its agents start them.
    """

    lanes: int
    stages: int
    workers: int
    min_workers: int
    on_failure: str
    hang_limit_ns: int | None
    heartbeat_floor_ns: int
    heartbeat_ceiling_ns: int
    heartbeat_interval_ns: int | None
    quorum_wait_ns: int
    hosts: HostRules = HostRules()
    wish: PoolWish = field(default_factory=PoolWish)
    slots: int = 0
    save_ns: int = 0
    lasting_ns: int = 30_000_000_000

    @property
    def look_ns(self) -> int:
        """Every 5 s, and often enough to see a gain last."""
        return min(5_000, self.lasting_ns // 2_000_000 + 10) * 1_000_000

    @property
    def room(self) -> int:
        """How many members there is room for."""
        return max(self.lanes * self.stages, self.workers)


# ---- events


class Connected(NamedTuple):
    """A connection proved a token. `connection` names it; role: one of `protocol.roles`; who: in that role, as it has
    proved (see `roles.refusal`)."""

    connection: str
    role: str
    who: str | None = None


class Disconnected(NamedTuple):
    """A connection ended."""

    connection: str


class Received(NamedTuple):
    """A message came over a connection. permitted: `Coordinator.refusal` was asked just now, and had nothing against
    it; else it is asked by `handle`."""

    connection: str
    message: AnyMessage
    permitted: bool = False


class Tick(NamedTuple):
    """Time has passed; also sent when `next_deadline_ns` is reached."""


class Knocked(NamedTuple):
    """A kernel's answer about a worker's port. listens: whether anybody listens there; None: there was no answer."""

    key: WorkerKey
    listens: bool | None


CoordinatorEvent = Connected | Disconnected | Received | Tick | Knocked

# ---- effects


class Persist(NamedTuple):
    """Append to the journal and sync, before any later effect of the same list."""

    entry: dict[str, Any]


class Send(NamedTuple):
    """Send over a connection; a connection that is gone is no error."""

    connection: str
    message: AnyMessage


class Close(NamedTuple):
    """End a connection. foul: because of what came over it, which people are told of."""

    connection: str
    reason: str
    foul: bool = False


class Knock(NamedTuple):
    """Look whether anybody listens where this worker does; answered by `Knocked`, or not."""

    key: WorkerKey
    address: str


class Report(NamedTuple):
    """For events.jsonl: `kind` and the fields of an event (cause, reason, worker_id, incarnation, pid, step, ...)."""

    kind: str
    fields: dict[str, Any]


class Remember(NamedTuple):
    """Put these facts of the job into job.json."""

    facts: dict[str, Any]


class Knows(NamedTuple):
    """The other end of a connection has this plan: if none was told over it yet, it counts as told."""

    connection: str
    plan: Plan


CoordinatorEffect = Persist | Send | Close | Report | Remember | Knows | Knock
