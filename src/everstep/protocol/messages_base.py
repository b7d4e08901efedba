"""What messages have in common: their bases, and what several of them say of a worker. Also those by which hosts that
stand by get the job's files. Pure.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from everstep.base.domains import LABEL_NAME, LABEL_VALUE, LABELS

_Label = Annotated[str, msgspec.Meta(pattern=LABEL_NAME)]
_Domain = Annotated[str, msgspec.Meta(max_length=63, pattern=LABEL_VALUE)]
Labels = Annotated[dict[_Label, _Domain], msgspec.Meta(max_length=len(LABELS))]
"""In which failure domains a host is, by label."""
_Short = Annotated[str, msgspec.Meta(max_length=100)]
_Path = Annotated[str, msgspec.Meta(max_length=200)]
_Count = Annotated[int, msgspec.Meta(ge=0)]


class AnyMessage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """Base of everything that crosses a control connection. `reason`: for people; `cause`: the same for programs."""


class FromAgent(AnyMessage, frozen=True, kw_only=True):
    """What an agent says."""

    agent_id: str


class OfLife(AnyMessage, frozen=True, kw_only=True):
    """What is said by, or about, one life of a worker."""

    worker_id: int
    incarnation: int


# ---- agent (one per host) -> coordinator


class LoopLeft(OfLife, frozen=True, kw_only=True):
    """The application has left its loop after this step, which is not the last one: all are to do the same."""

    generation: int
    step: int


class WorkerDone(OfLife, frozen=True, kw_only=True):
    """The worker has finished the last step; from the leader it also means that final/ is written."""

    generation: int
    step: int
    final_written: bool


class WorkerLife(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One live worker, as its agent knows it. `pid`: of the head of its cell; `limbs`: of the others, if it has any."""

    worker_id: int
    incarnation: int
    pid: int
    limbs: tuple[int, ...] = ()


class WorkerPulse(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A worker's progress, read by its agent from shared memory. `still_ms`: how long the counter has not moved.

    compute_ms_per_lane: what a lane's forward and backward passes took of late, waiting excluded; 0 if not known.
    slowest: of a cell of several, the rank whose counter that is. While it stands still: waited_ms: so much of
    `still_ms` it waited for a processor; lifeless_ms: for how long it has shown no life, -1 if nobody knows; stopped:
    by a signal; at: the innermost line of the user's code that it was seen in. cold: what it does may compile.
    """

    worker_id: int
    incarnation: int
    step: int
    phase: str
    still_ms: int
    samples_per_s: float
    compute_ms_per_lane: float = 0.0
    slowest: int | None = None
    waited_ms: int = 0
    lifeless_ms: int = -1
    stopped: bool = False
    cold: bool = False
    at: Annotated[str, msgspec.Meta(max_length=400)] = ""


class Heartbeat(FromAgent, frozen=True, kw_only=True):
    """From an agent, for all its workers. `seq` ascends; `rtt_ms` is the agent's last measured round trip. waited_ms:
    for how long the agent has waited for a processor since the last one."""

    seq: int
    rtt_ms: float
    workers: list[WorkerPulse]
    waited_ms: int = 0


# ---- between the head and a host that stands by with a replica of the job's directory


class ReplicaHello(AnyMessage, frozen=True, kw_only=True):
    """First message of a host that stands by. place: the directory that its files are of (`JobFacts.place`), "" if
    it has none. held: of each file its version, as the head called it, and how many bytes there are."""

    host: _Short
    place: _Short = ""
    held: dict[_Path, tuple[_Short, _Count]] = {}


class ReplicaPiece(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bytes of a file of the job's directory, at byte `at`. version: another one replaces what has come of it.

    size, digest: of a file that counts once it is whole (BLAKE2b, 32 hex digits); without a digest it grows by lines.
    """

    path: _Path
    version: _Short
    at: _Count
    data: bytes = b""
    size: _Count = 0
    digest: _Short = ""


class ReplicaPieces(AnyMessage, frozen=True, kw_only=True):
    """To a host that stands by: what it lacks. place: the directory that it is of; a replica of another one begins
    anew. rest: it lacks more than this; else it has all that there was a moment ago."""

    place: _Short
    number: _Count
    pieces: list[ReplicaPiece] = []
    rest: bool = False


class ReplicaHeld(AnyMessage, frozen=True, kw_only=True):
    """Answer to `ReplicaPieces` of that number. lacking: of files of which a piece had no effect, how much is there."""

    number: _Count
    lacking: dict[_Path, _Count] = {}
