"""Why something happened, as data for metrics, alerts and programs, beside the sentence for people. Pure.

The process that knows the fact names the cause: the agent that read a wait status, the detector that missed a
heartbeat, the command that was given. Other processes pass it on. Nothing derives a cause from a sentence.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Self


class Cause(StrEnum):
    """A cause and its meaning. `is_fault`: something went wrong; false for something intended.

    An unknown word reads as UNKNOWN: journals and events of other versions stay readable.
    """

    meaning: str
    is_fault: bool

    def __new__(cls, value: str, meaning: str, is_fault: bool = True) -> Self:
        member = str.__new__(cls, value)
        member._value_ = value
        member.meaning = meaning
        member.is_fault = is_fault
        return member

    KILLED = "killed", "a signal from outside ended the process"
    CRASHED = "crashed", "the process ended itself by a signal, such as SIGSEGV or SIGABRT"
    EXITED = "exited", "the process ended with an exit code, or its end was not seen"
    EXCEPTION = "exception", "the code that was run raised an exception"
    OOM = "oom", "there was not enough memory, on the host or on a device"
    HUNG = "hung", "the process lives, but its progress stands still"
    SILENT = "silent", "the worker no longer answers, though its host may live"
    HOST_LOST = "host_lost", "the heartbeats of the whole host have stopped"
    LINK = "link", "transfers between processes that live have failed"
    CORRUPT = "corrupt", "stored or computed state differs from what it must be"
    NONFINITE = "nonfinite", "a number that must be finite is infinite or NaN"
    NONDETERMINISTIC = "nondeterministic", "the same work gave different bits"
    DISK = "disk", "a file could not be read or written"
    STORE = "store", "the object store failed, was not reached, or refused"
    CONFIG = "config", "the config or the command line does not allow it"
    CRASH_LOOP = "crash_loop", "processes died again and again, so that no restart helps"
    LEFT = "left", "one worker left its loop while the others went on"
    QUORUM = "quorum", "too few workers are present or can still come"
    REPLACED = "replaced", "a newer life of the same slot has taken its place"
    JOURNAL = "journal", "the coordinator's journal did not hold what the workers knew"
    LEASE = "lease", "the coordinator lost its lease, or its host, to another coordinator"
    REFUSED = "refused", "a connection did not prove that it belongs to the job"
    SINK = "sink", "a sink such as TensorBoard did not accept the data"
    UNKNOWN = "unknown", "no cause was given, as in events of older versions"

    SLOW = "slow", "something takes longer than the others can wait for", False
    CLOCK = "clock", "the clock of a host was set", False
    INJECTED = "injected", "a fault was injected on purpose", False
    STARTED = "started", "the job starts, or goes on from a checkpoint", False
    JOINED = "joined", "a worker is ready, or holds the state and takes part", False
    REBALANCED = "rebalanced", "the work was distributed again", False
    SCALED = "scaled", "the number of workers was changed by request", False
    DRAINED = "drained", "a worker was asked to leave in order", False
    REQUESTED = "requested", "a person or a program asked for it", False
    PREEMPTED = "preempted", "the scheduler announced that it takes the machine away", False
    INTERRUPTED = "interrupted", "the job was asked to end, or ended, before it was done", False
    SCHEDULED = "scheduled", "the config says that it is due", False
    BUSY = "busy", "the previous one is not finished yet", False
    REGROUPED = "regrouped", "the membership changed in the middle of it", False
    EARLY_STOP = "early_stop", "an evaluation met the condition of early_stop", False
    COMPLETED = "completed", "the work is done", False

    @property
    def skips_checkpoint(self) -> bool:
        """Whether a checkpoint was left out for this cause without a failure: it was only not its turn."""
        return self in (Cause.BUSY, Cause.REGROUPED)

    @classmethod
    def _missing_(cls, value: object) -> Cause:
        return cls.UNKNOWN

    @classmethod
    def read(cls, value: object) -> Cause:
        """The cause that a file or a message names."""
        return cls(value)  # type: ignore[call-arg, arg-type]


@dataclass(frozen=True)
class Why:
    """A cause and its sentence."""

    cause: Cause
    reason: str


UNSAID = Why(Cause.UNKNOWN, "")
