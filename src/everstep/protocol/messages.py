"""Messages on control connections: versioned, strict, without pickle. Pure.

A frame is a 4-byte big-endian length and a msgpack body. `encode` and `decode` are the only way in or out; a body that
does not fit the schema raises `ProtocolError`. The runtime proves knowledge of a token before the first frame.
"""

# ruff: noqa: RUF012 (msgspec copies defaults that can change)
from __future__ import annotations

from typing import Annotated, Any, Literal, Union

import msgspec

from everstep.base.cause import Cause
from everstep.base.errors import InvariantViolation, ProtocolError
from everstep.base.plan import Divides, Member, Plan, Shard
from everstep.base.strikes import Strike
from everstep.protocol.columns import PlanTold as PlanTold
from everstep.protocol.following import PlanName
from everstep.protocol.identity import Code, Kernels
from everstep.protocol.messages_base import AnyMessage as AnyMessage
from everstep.protocol.messages_base import FilePiece as FilePiece
from everstep.protocol.messages_base import FilePieces as FilePieces
from everstep.protocol.messages_base import FilesHeld as FilesHeld
from everstep.protocol.messages_base import FromAgent as FromAgent
from everstep.protocol.messages_base import Heartbeat as Heartbeat
from everstep.protocol.messages_base import HostsProbed as HostsProbed
from everstep.protocol.messages_base import Labels as Labels
from everstep.protocol.messages_base import LoopLeft as LoopLeft
from everstep.protocol.messages_base import OfLife as OfLife
from everstep.protocol.messages_base import StandbyHello as StandbyHello
from everstep.protocol.messages_base import WorkerDone as WorkerDone
from everstep.protocol.messages_base import WorkerLife as WorkerLife
from everstep.protocol.messages_base import WorkerPulse as WorkerPulse

VERSION = 11
MAX_FRAME_BYTES = 64 << 20
_Short = Annotated[str, msgspec.Meta(max_length=100)]


class AgentHello(FromAgent, frozen=True, kw_only=True):
    """First message of an agent, also after a reconnect: all its live workers.

    slots: how many it will keep filled; 0: it waits to be told which. room: how many it can fill, 0: no limit.
    process: names this process of the host's agent; another process has other workers. lost: slots that it has given
    up; failed: why it can do nothing more for the job; leaving: its host wants to leave in order. (A coordinator
    that died may have been told these before.) about: facts for people. domains: failure domains, by label.
    """

    host: str
    workers: list[WorkerLife]
    slots: int
    room: int = 0
    process: str = ""
    lost: list[SlotLost] = []
    failed: HostFailed | None = None
    leaving: bool = False
    about: Annotated[dict[_Short, _Short], msgspec.Meta(max_length=16)] = {}
    domains: Labels = {}


class WorkerStarted(FromAgent, frozen=True, kw_only=True):
    """An agent started a process for a slot (it says hello itself later)."""

    worker: WorkerLife


class WorkerExited(FromAgent, frozen=True, kw_only=True):
    """An agent saw a death by waitpid. died_unix_ns: the time of death; reason: such as 'killed by SIGKILL'.
    The exit code says in_order: the work was done; again: the next life goes on. step: the last that it had applied."""

    worker_id: int
    incarnation: int
    reason: str
    died_unix_ns: int
    in_order: bool = False
    again: bool = False
    step: int = 0
    cause: Cause = Cause.UNKNOWN


class SlotLost(FromAgent, frozen=True, kw_only=True):
    """An agent gave up on a slot (crash loop): it is not restarted as it was. ranks: processes that its lives had."""

    worker_id: int
    reason: str
    ranks: int = 1
    cause: Cause = Cause.UNKNOWN


class HostFailed(FromAgent, frozen=True, kw_only=True):
    """From an agent: no restart on its host can help the job any further."""

    reason: str
    cause: Cause = Cause.UNKNOWN


class HostRefused(FromAgent, frozen=True, kw_only=True):
    """This host stays out, because it does not fit the job. `reason`: one line for people."""

    reason: str
    cause: Cause = Cause.CONFIG


class HostLeaving(FromAgent, frozen=True, kw_only=True):
    """From an agent: its host wants to leave in order, as after `everstep drain`."""


class HostEmptied(FromAgent, frozen=True, kw_only=True):
    """From an agent whose host was drained: nothing runs there, and nothing will be started."""


class AgentNotice(FromAgent, frozen=True, kw_only=True):
    """A line about the agent's work for people. The job's process shows it; the coordinator only hands it on."""

    kind: str
    fields: dict[str, Any]


class HostPlace(FromAgent, frozen=True, kw_only=True):
    """Where a host keeps its files. apart: not in the job's directory; around: that is around its own. disk: names its
    checkpoint directory, alike where hosts share it; address: where peers find it, or "". domains: as in AgentHello."""

    apart: bool
    disk: _Short
    address: _Short = ""
    domains: Labels = {}
    around: bool = False


class HostTold(FromAgent, frozen=True, kw_only=True):
    """Answer to `HostAsk`. logs: number and size of each file by name; data: of the file that was asked for."""

    request: int
    logs: dict[str, tuple[int, int]] = {}
    data: bytes = b""


# ---- the job's process -> coordinator


class Ping(AnyMessage, frozen=True, kw_only=True):
    """A question whether the coordinator still answers."""

    seq: int


# ---- worker -> coordinator


class WorkerHello(AnyMessage, frozen=True, kw_only=True):
    """First message of a worker, also after a reconnect.

    follows: names its newest plan, None if it has none; a worker without a plan has no state newer than step 0.
    prepared: generation of the newest plan that it holds and does not follow yet, 0 if none. stages: those whose
    state at `step` it has completely. state_bytes: size of the state that it would have to copy to become a member,
    -1 if unknown. lanes: of its job, which a script says when it joins; 0 if it does not say. kernels, code: numerics
    fingerprint, and code imported so far. settled: in the plan it follows.
    """

    member: Member
    step: int
    follows: PlanName | None = None
    prepared: Annotated[int, msgspec.Meta(ge=0, le=1 << 62)] = 0
    stages: tuple[int, ...] = ()
    state_bytes: int = -1
    lanes: Annotated[int, msgspec.Meta(ge=0, le=1 << 20)] = 0
    kernels: Kernels | None = None
    code: Code | None = None
    settled: bool = False


class Imported(OfLife, frozen=True, kw_only=True):
    """A worker has imported more code since its hello. code: only the new imports."""

    code: Code


class Divided(OfLife, frozen=True, kw_only=True):
    """A worker has found out how the optimizer's state of these stages can be divided."""

    stages: Annotated[dict[Annotated[int, msgspec.Meta(ge=0, le=1 << 20)], Divides], msgspec.Meta(max_length=1 << 12)]


class WorkerHealed(OfLife, frozen=True, kw_only=True):
    """A joiner follows the members' steps closely enough to become a member. joining: the ticket of `Heal`."""

    ticket: int
    step: int


class HealFailed(OfLife, frozen=True, kw_only=True):
    """A joiner lost its donor; it waits for another `Heal`."""

    ticket: int
    reason: str
    cause: Cause = Cause.UNKNOWN


class GenerationEntered(OfLife, frozen=True, kw_only=True):
    """A worker has settled in a generation and computes `step` next. phases_ms: time of each phase of recovery. loop:
    "left" if its application has left its loop after the step before, "on" if it goes on; "" if unknown."""

    generation: int
    step: int
    phases_ms: dict[str, float]
    loop: Literal["", "left", "on"] = ""


class Progress(OfLife, frozen=True, kw_only=True):
    """From the leader, a few times per second at most: the newest step whose effects left the process. Sent once
    more, with step_ms 0, at the first commit of a generation, which completes a recovery; committed_unix_ns: its."""

    generation: int
    step: int
    step_ms: float
    committed_unix_ns: int = 0


class PeerFault(OfLife, frozen=True, kw_only=True):
    """A worker's transfers with `accused` failed."""

    generation: int
    accused: list[int]
    reason: str
    cause: Cause = Cause.LINK


class WorkerFailed(OfLife, frozen=True, kw_only=True):
    """The worker's own last words.

    signature: equal for equal errors. fatal: no restart can help. generation: in which it failed, 0 if in none.
    exit_code: of the job, if this ends it; 2 if the job's request cannot be fulfilled. holds: its state is whole,
    and it stays until it is dismissed or the job ends. sound: states after this step are tainted, as it found before
    the step `tainted` (in `generation`); -1 if none is.
    """

    step: int
    reason: str
    signature: str
    fatal: bool
    generation: int = 0
    exit_code: int = 1
    holds: bool = False
    cause: Cause = Cause.UNKNOWN
    sound: int = -1
    tainted: int = 0


class SettleAgain(OfLife, frozen=True, kw_only=True):
    """The statement of a worker that settled is wrong (a damaged checkpoint, for example): all members have to
    settle again.

    tainted: the step before which the workers' states were found to differ, as decided in `decided_in`; 0 if that is
    not the reason. sound: states after this step are tainted. drift: the script itself makes states differ. lane:
    lane of the step `tainted` that gave `workers` different results; -1 if that is not the reason. odd: the workers
    whose state or lane is wrong, empty if unknown; ends: it will stay unknown, so the job ends.
    """

    generation: int
    reason: str
    tainted: int = 0
    decided_in: int = 0
    cause: Cause = Cause.UNKNOWN
    sound: int = -1
    drift: bool = False
    lane: int = -1
    workers: list[int] = []
    odd: list[int] = []
    ends: bool = False


class Saved(OfLife, frozen=True, kw_only=True):
    """From the leader: how a requested checkpoint ended. where: its place, or `reason`: why there is none."""

    step: int
    ok: bool
    where: str = ""
    reason: str = ""


class StrikeDue(OfLife, frozen=True, kw_only=True):
    """From a worker that has reached the point of a scripted fault that others have to inject. index: the fault's
    place in the job's specification, or the number of a requested one."""

    index: int
    generation: int
    step: int
    phase: _Short


class Profiled(OfLife, frozen=True, kw_only=True):
    """The worker's trace for the profile of this name is written, or why there is none."""

    name: str
    ok: bool
    reason: str = ""


class ClaimFault(OfLife, frozen=True, kw_only=True):
    """A host that does not see the job's directory claims the scripted fault of this name, which is about to strike.
    text: the answer for hosts that claim it later."""

    request: int
    name: _Short
    text: Annotated[str, msgspec.Meta(max_length=4096)]


# ---- coordinator -> worker


class FaultClaimed(AnyMessage, frozen=True, kw_only=True):
    """Answer to a claim. first: no other host had claimed it; text: the text of the first claim."""

    request: int
    first: bool
    text: str


class ProfileNow(AnyMessage, frozen=True, kw_only=True):
    """Record this many steps from `first_step` on, write the trace into profiles/<name>, and report it (`Profiled`).
    memory: record allocations, too; stacks: Python's stacks, too."""

    name: str
    first_step: int
    steps: int
    memory: bool = False
    stacks: bool = False


class SaveNow(AnyMessage, frozen=True, kw_only=True):
    """To the leader: take a checkpoint after the present step, and report it (`Saved`)."""

    reason: str
    cause: Cause = Cause.UNKNOWN


class InjectFault(AnyMessage, frozen=True, kw_only=True):
    """To all workers: inject this fault as soon as it fits. number: names it among faults of the running job."""

    fault: str
    number: int


class PlanNow(AnyMessage, frozen=True, kw_only=True):
    """Leave the old generation at once and settle in this one."""

    plan: Plan


class PlanPrepared(AnyMessage, frozen=True, kw_only=True):
    """Hold this plan; switch to it after the first agree in which all members hold it."""

    plan: Plan


class Heal(AnyMessage, frozen=True, kw_only=True):
    """To a joiner: copy the state of `stages` (those of its future seats), then follow. donors: who holds any of them;
    holders: of each of `stages`, their ids; both in order of preference. shards: its probable parts of divided ones."""

    ticket: int
    plan: Plan
    donors: list[Member]
    stages: list[int] = msgspec.field(default_factory=lambda: [0])
    holders: list[list[int]] = []
    shards: list[Shard] = []


class Dismissed(AnyMessage, frozen=True, kw_only=True):
    """This worker is not wanted, or no longer: leave. drained: by request, not because of a fault."""

    reason: str
    drained: bool
    cause: Cause = Cause.UNKNOWN


class JobEnded(AnyMessage, frozen=True, kw_only=True):
    """To all agents and workers: the job is over. state: 'completed', 'failed' or 'interrupted'. exit_code: of the
    job's process; workers do not read it."""

    state: str
    reason: str
    exit_code: int = 0
    cause: Cause = Cause.UNKNOWN


# ---- coordinator -> every client


class TermBegun(AnyMessage, frozen=True, kw_only=True):
    """First message of a coordinator: its term; 0 without a lease, until the job is taken over."""

    term: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


# ---- coordinator -> the job's process


class AgentCount(AnyMessage, frozen=True, kw_only=True):
    """The agents that are connected now. place: word of the directory in which the job is led, "" if none is there."""

    agent_ids: list[str]
    place: str = ""


# ---- coordinator -> agent


class JobFacts(AnyMessage, frozen=True, kw_only=True):
    """Answer to each hello of an agent: all that it needs to start workers of the job.

    config: made by `base.config.to_dict`. coordinator_file: file with the coordinator's address, on hosts that share
    the run directory. job_pid: process whose end is the job's end, on the machine of this name. versions: those that
    must be equal on all hosts. strikes: scripted faults of hosts and links.
    """

    task: str
    argv: list[str]
    config: dict[str, Any]
    run_dir: str
    coordinator_file: str
    job_pid: int
    machine: str
    versions: dict[str, str] = {}
    strikes: list[Strike] = []
    place: str = ""
    job: dict[str, Any] = {}


class AgentRefused(AnyMessage, frozen=True, kw_only=True):
    """This agent cannot take part. `reason`: one line for the user."""

    reason: str
    cause: Cause = Cause.UNKNOWN


class ProbeHosts(AnyMessage, frozen=True, kw_only=True):
    """Look whether these hosts answer at these addresses ("host:port"), by host. number: unique."""

    number: int
    addresses: dict[str, str]


class HostDismissed(AnyMessage, frozen=True, kw_only=True):
    """This host was drained, and its workers have left: leave."""

    reason: str
    cause: Cause = Cause.DRAINED


class HostKept(AnyMessage, frozen=True, kw_only=True):
    """This host cannot leave. `reason`: one line for the user."""

    reason: str
    cause: Cause = Cause.CONFIG


class StrikeNow(AnyMessage, frozen=True, kw_only=True):
    """A fault on purpose, as in `base.strikes.Strike`. An agent gets the faults of its host, or of packets to and
    from the address `peer` ("": of all). A job's process gets the faults of its own coordinator. number: unique."""

    number: int
    kind: str
    peer: str = ""
    for_s: float = 0.0
    by_s: float = 0.0
    mbit: float = 0.0
    share: float = 1.0


class HostsThere(AnyMessage, frozen=True, kw_only=True):
    """To all agents: what each host said about its place, by name."""

    places: dict[str, HostPlace]


class JobPage(AnyMessage, frozen=True, kw_only=True):
    """To agents: the present content of a small file of the job's directory that workers of all hosts read."""

    name: str
    text: str


class HostAsk(AnyMessage, frozen=True, kw_only=True):
    """A command asks for this host's logs: the bytes of one from `start` on or, without a name, the list."""

    request: int
    name: _Short = ""
    start: int = 0


class KillWorker(OfLife, frozen=True, kw_only=True):
    """SIGKILL this life if it still runs. again: it ends with another part of its worker, and is no loss of its own."""

    reason: str
    cause: Cause = Cause.UNKNOWN
    again: bool = False


class ShowStacks(OfLife, frozen=True, kw_only=True):
    """Have this life write the Python stacks of all its threads to its log, and report its position in its pulses."""


class SetSlots(AnyMessage, frozen=True, kw_only=True):
    """Keep these worker ids running; start missing ones, dismiss none. first: the least incarnation of each id's
    next life. The agent counts on from there by itself; the slot may have had lives elsewhere, whose incarnations
    are fenced. ranks: processes of each id's next life, none: as the job says. A slot that was given up with more of
    them is filled again. drained: start nothing any more, and answer with `HostEmptied` once nothing runs."""

    worker_ids: list[int]
    first: list[int] = []
    ranks: list[int] = []
    drained: bool = False


class Pong(AnyMessage, frozen=True, kw_only=True):
    """Answer to a heartbeat or a ping."""

    seq: int


# ---- the store of a generation's connections and groups, over the control connection


class StoreSet(AnyMessage, frozen=True, kw_only=True):
    """Set a key of a generation's store."""

    generation: int
    key: str
    value: bytes


class StoreGet(AnyMessage, frozen=True, kw_only=True):
    """Ask for keys of a generation's store; answered by `StoreValues` once all are set."""

    request: int
    generation: int
    keys: list[str]


class StoreValues(AnyMessage, frozen=True, kw_only=True):
    """Answer to `StoreGet`; `values` None if the generation has been superseded."""

    request: int
    values: list[bytes] | None


# ---- commands from the CLI


class Command(AnyMessage, frozen=True, kw_only=True):
    """name: 'status', 'scale', 'drain', 'checkpoint', 'chaos', 'profile' or 'stop'; `args` by name: {"workers": 3}."""

    request: int
    name: str
    args: dict[str, Any]


class CommandReply(AnyMessage, frozen=True, kw_only=True):
    """ok False: `error` is one line for the user."""

    request: int
    ok: bool
    error: str
    result: dict[str, Any]


class JobHello(AnyMessage, frozen=True, kw_only=True):
    """First message of the job's process, also after a reconnect. asked: its unanswered requests."""

    asked: list[Command] = []


class Goodbye(AnyMessage, frozen=True, kw_only=True):
    """The job's process leaves for good, however the job ended. The coordinator tells all agents, then answers."""

    cause: Cause
    reason: str


KINDS: tuple[type[AnyMessage], ...] = tuple(
    kind for base in (AnyMessage, FromAgent, OfLife) for kind in base.__subclasses__() if not kind.__subclasses__()
)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(Union[KINDS])  # noqa: UP007


def encode(message: AnyMessage) -> bytes:
    """The frame's body."""
    return _encoder.encode(message)


def decode(body: bytes) -> AnyMessage:
    """Raises: ProtocolError if the body is not one of our messages."""
    try:
        return _decoder.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError, InvariantViolation) as error:
        raise ProtocolError(f"expected an Everstep message of version {VERSION}: {str(error)[:200]!a}") from None
