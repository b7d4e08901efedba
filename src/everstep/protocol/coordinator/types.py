"""Events and effects of the coordinator's machine, and its settings. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from everstep.base.plan import Divides, Plan, WorkerKey
from everstep.base.pool_wish import PoolWish
from everstep.base.strikes import Strike
from everstep.placement.cell_shapes import CellShape
from everstep.protocol.identity import Code, Kernels
from everstep.protocol.messages import AnyMessage


@dataclass(frozen=True)
class Alike:
    """Facts that all workers must share, as far as they are known. kernels, code: the job's; before: the code of an
    earlier run of the job; divides: how the optimizer's state of a stage is divided; warns: other kernels are reported,
    not refused."""

    kernels: Kernels | None = None
    code: Code = field(default_factory=Code)
    before: Code = field(default_factory=Code)
    warns: bool = False
    divides: Mapping[int, Divides] = field(default_factory=dict)


@dataclass(frozen=True)
class HostRules:
    """The coordinator's patience with hosts, and facts about them. Times in nanoseconds.

    grace_ns: time for the agents and workers of a journal to come back. reconnect_ns: time for a host that has lost
    all its connections. return_ns: time after which slots move to hosts that have fewer than others; None: never.
    device: of the workers; devices: of those that have another one, by worker id. least: hosts that must join before
    the job begins; named: hosts that the map names, by worker id; wait_ns: time to wait for all of them. strikes:
    scripted faults of hosts and links. hang_first_ns: time that workers may stand still while they may compile.
    term: of the coordinator, where several can take each other's place; 0 otherwise. alike: facts that workers must
    share. cells: shapes that a worker's cell may have, the largest first; none: one process. span: hosts that each
    worker is on, with a slot on each.
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
    cells: tuple[CellShape, ...] = ()
    span: int = 1

    def gpu(self, worker_id: int) -> str:
        """The GPU of a worker, as its host numbers it; "" if it has none."""
        kind, _, index = self.devices.get(worker_id, self.device).partition(":")
        return "" if kind == "cpu" else index or "0"


@dataclass(frozen=True)
class CoordinatorConfig:
    """The part of the job's config that the coordinator needs. Times in nanoseconds.

    save_ns: time for a checkpoint before a failing job ends; 0 without checkpoints. lasting_ns: time for which
    another placement must have promised much shorter steps before lanes, or a worker, move; checked every look_ns.
    slots: number at the start, for the coordinator to share out; 0: as the agents start them.
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
        """Interval of the checks: 5 s, or less so that several fall into lasting_ns."""
        return min(5_000, self.lasting_ns // 2_000_000 + 10) * 1_000_000

    @property
    def room(self) -> int:
        """Number of members there is room for."""
        return max(self.lanes * self.stages, self.workers)


# ---- events


class Connected(NamedTuple):
    """A client has proved a token. connection: its name; role: one of `protocol.roles`; who: its proven name in that
    role (see `roles.refusal`)."""

    connection: str
    role: str
    who: str | None = None


class Disconnected(NamedTuple):
    """A connection ended."""

    connection: str


class Received(NamedTuple):
    """A message came over a connection. permitted: `Coordinator.refusal` has accepted it just now; else `handle`
    asks."""

    connection: str
    message: AnyMessage
    permitted: bool = False


class Tick(NamedTuple):
    """Time has passed; also sent when `next_deadline_ns` is reached."""


class PortProbed(NamedTuple):
    """A kernel's answer about a worker's port. listens: whether the port is open; None: there was no answer."""

    key: WorkerKey
    listens: bool | None


CoordinatorEvent = Connected | Disconnected | Received | Tick | PortProbed

# ---- effects


class Persist(NamedTuple):
    """Append to the journal and sync, before any later effect of the same list."""

    entry: dict[str, Any]


class Send(NamedTuple):
    """Send over a connection; a connection that is gone is no error."""

    connection: str
    message: AnyMessage


class Close(NamedTuple):
    """End a connection. foul: because of a bad message, which is reported to people."""

    connection: str
    reason: str
    foul: bool = False


class ProbePort(NamedTuple):
    """Check whether this worker's port is open; answered by `PortProbed`, or not at all."""

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
    """The other end of a connection has this plan: if no plan was sent over it yet, this counts as sent."""

    connection: str
    plan: Plan


CoordinatorEffect = Persist | Send | Close | Report | Remember | Knows | ProbePort
