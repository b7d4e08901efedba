"""Bases of the messages, and structs that several messages share. Also the messages by which files go between hosts.
Pure.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from everstep.base.domains import LABEL_NAME, LABEL_VALUE, LABELS
from everstep.base.plan import WorkerKey

_Label = Annotated[str, msgspec.Meta(pattern=LABEL_NAME)]
_Domain = Annotated[str, msgspec.Meta(max_length=63, pattern=LABEL_VALUE)]
Labels = Annotated[dict[_Label, _Domain], msgspec.Meta(max_length=len(LABELS))]
"""Failure domains of a host, by label."""
_Short = Annotated[str, msgspec.Meta(max_length=100)]
_Path = Annotated[str, msgspec.Meta(max_length=200)]
_Count = Annotated[int, msgspec.Meta(ge=0)]


class AnyMessage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """Base of every message on a control connection. reason: for people; cause: the same for programs."""


class FromAgent(AnyMessage, frozen=True, kw_only=True):
    """Base of an agent's messages."""

    agent_id: str


class OfLife(AnyMessage, frozen=True, kw_only=True):
    """Base of messages by, or about, one life of a worker."""

    worker_id: int
    incarnation: int


# ---- the parts of a worker that spans hosts: worker -> coordinator, and its answer


class CellPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One of them, by the life of a slot. address: of its door, for the others."""

    worker_id: int
    incarnation: int
    address: _Path

    @property
    def key(self) -> WorkerKey:
        return WorkerKey(self.worker_id, self.incarnation)


class CellSought(OfLife, frozen=True, kw_only=True):
    """This life looks for others on other hosts, to be one worker; or, after a reconnect, it has found them. address:
    of its door; cell: all parts, the head first, as it was told."""

    address: _Path
    cell: Annotated[list[CellPart], msgspec.Meta(max_length=64)] = []


class CellFormed(AnyMessage, frozen=True, kw_only=True):
    """These lives are one worker. cell: the head first."""

    cell: list[CellPart]


# ---- agent (one per host) -> coordinator


class LoopLeft(OfLife, frozen=True, kw_only=True):
    """The application has left its loop after this step, which is not the last one: all workers have to leave it
    there."""

    generation: int
    step: int


class WorkerDone(OfLife, frozen=True, kw_only=True):
    """The worker has finished the last step. From the leader it also means that final/ is written."""

    generation: int
    step: int
    final_written: bool


class WorkerLife(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One live worker, as its agent knows it. pid: of the head of its cell; limbs: the PIDs of its limbs, if it has
    any."""

    worker_id: int
    incarnation: int
    pid: int
    limbs: tuple[int, ...] = ()


class WorkerPulse(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A worker's progress, read by its agent from shared memory.

    still_ms: time since the counter last moved. compute_ms_per_lane: recent time of a lane's forward and backward
    passes, without waiting; 0 if unknown. slowest: rank of the cell whose counter this is. While the counter stands
    still: waited_ms: share of `still_ms` that it waited for a processor; lifeless_ms: time since it last showed
    life, -1 if unknown; stopped: by a signal; at: the innermost line of the user's code seen. cold: its present work
    may compile.
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
    """From an agent, for all its workers. seq: ascends; rtt_ms: the agent's last measured round trip. waited_ms:
    time that the agent has waited for a processor since the last heartbeat."""

    seq: int
    rtt_ms: float
    workers: list[WorkerPulse]
    waited_ms: int = 0


# ---- the files of one host's directory, for another host's


class FilePiece(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bytes of a file, from byte `at` on; without data the sender asks how many bytes the receiver has. version:
    another version replaces the file. size: of a file that counts only when complete; its version is its digest
    (BLAKE2b, 32 hex digits)."""

    path: _Path
    version: _Short
    at: _Count
    data: bytes = b""
    size: _Count = 0


class FilePieces(AnyMessage, frozen=True, kw_only=True):
    """News of a directory: from an agent to the head, or from the head to a host that stands by. source: the id of
    the directory; copies of two directories are never mixed. rest: more follows."""

    source: _Short
    number: _Count
    pieces: list[FilePiece] = []
    rest: bool = False


class FilesHeld(AnyMessage, frozen=True, kw_only=True):
    """Answer to `FilePieces` of that number; 0: nothing was stored. held: bytes stored of each file; the sender asks
    again about a file that is not named. told: the job's events cover all steps up to this one; 0: none, or unknown.
    refused: why a file cannot be stored, if that is not for want of room."""

    number: _Count
    held: dict[_Path, _Count] = {}
    told: _Count = 0
    refused: dict[_Path, _Short] = {}

    def has_all(self, sent: FilePieces) -> bool:
        """Whether the files are complete with these pieces."""
        pieces = all(self.held.get(p.path) == p.at + len(p.data) for p in sent.pieces)
        return pieces and not sent.rest and self.number == sent.number


class StandbyHello(AnyMessage, frozen=True, kw_only=True):
    """First message of a host that stands by without the job's directory: it asks for the directory's files."""

    host: _Short


class HostsProbed(FromAgent, frozen=True, kw_only=True):
    """Answer to `ProbeHosts`. silent: hosts that did not answer at all."""

    number: int
    silent: list[str]
