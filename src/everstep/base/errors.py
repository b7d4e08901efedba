"""The whole error tree. Operating faults derive from `EverstepError`; a broken invariant is a bug.

EverstepError
├── ConfigError            what the user asked for cannot be done; one line: expected, came, what to do
├── TaskError              the user's task raised (build_model, loss, dataset, ...)
├── Uncarried              the loop has changed what no checkpoint holds, so that a resumed worker would lack it
├── DeterminismError       the same work gave different bits
├── StateTainted           the workers' states differ, and so all steps since they last matched count for nothing
├── MembershipError        the membership does not allow what was asked
│   ├── StaleGeneration    a message or a worker of an older generation
│   ├── Evicted            this worker is no longer a member
│   └── QuorumLost         too few workers, for too long
├── CollectiveAborted      a transfer was left because the generation ended or a peer died
├── ProtocolError          bytes on a connection that are not ours: bad frame, version or token
│   ├── TokenRefused       whoever was called has another token
│   └── Untrusted          the called peer's certificate is not trusted
├── CheckpointCorrupt      stored state that does not match its hashes
├── StoreError             a directory or object store could not be read or written
│   ├── BlobMissing        it has nothing under that name
│   ├── BlobExists         it has something under a name that was to be new
│   └── BlobForeign        it has something there that is no file of ours; a CheckpointCorrupt, too
└── JobFailed              the job cannot go on; the message says why
InvariantViolation         (not an EverstepError) a bug in Everstep
"""

from __future__ import annotations

import errno
from collections.abc import Iterable

from everstep.base.cause import Cause

_MOST_SAID = 2000


class EverstepError(Exception):
    """Root of all operating faults. `cause`: what a fault of this class is, as data."""

    cause = Cause.UNKNOWN


def did_you_mean(word: str, known: Iterable[str], form: str = "{!r}") -> str:
    """The end of a message about an unknown word: the nearest known one, if any is near. form: how it is written."""
    import difflib  # not for every command that makes no mistake

    close = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {form.format(close[0])}?" if close else ""


class ConfigError(EverstepError):
    """The job cannot be started as asked."""

    cause = Cause.CONFIG


class TaskError(EverstepError):
    """The user's code raised."""

    cause = Cause.EXCEPTION


class Uncarried(EverstepError):
    """The loop has changed what cannot be carried to a worker that is resumed or healed."""

    cause = Cause.CONFIG


class DeterminismError(EverstepError):
    """The same work, done twice, gave different bits."""

    cause = Cause.NONDETERMINISTIC


class NonFinite(EverstepError):
    """A step had infinities or NaN, and the job is to stop then."""

    cause = Cause.NONFINITE


class StateTainted(EverstepError):
    """The workers' states differ before `step`, decided in `generation`; up to `sound` they were alike.

    `signature`: of this incident alone.
    """

    cause = Cause.CORRUPT

    def __init__(self, message: str, step: int, generation: int, sound: int) -> None:
        super().__init__(message)
        self.step, self.generation, self.sound = step, generation, sound
        self.signature = f"tainted:{step}:{generation}:{message}"


class MembershipError(EverstepError):
    """The membership does not allow what was asked."""


class StaleGeneration(MembershipError):
    """Something of an older generation."""


class Evicted(MembershipError):
    """This worker is no longer a member of the job; `drained`: by request, not by fault."""

    def __init__(self, message: str, drained: bool = False) -> None:
        super().__init__(message)
        self.drained = drained


class QuorumLost(MembershipError):
    """Too few workers, for longer than the job is willing to wait."""

    cause = Cause.QUORUM


class CollectiveAborted(EverstepError):
    """A transfer was left before its end; `accused` are the worker ids found dead, if any."""

    cause = Cause.LINK

    def __init__(self, message: str, accused: Iterable[int] = ()) -> None:
        super().__init__(message)
        self.accused = tuple(accused)


class ProtocolError(EverstepError):
    """A connection spoke something else."""

    cause = Cause.LINK


class TokenRefused(ProtocolError):
    """Whoever was called has another token."""


class Untrusted(ProtocolError):
    """The called peer shows a certificate that is not trusted here, or refuses the one shown to it."""


class CheckpointCorrupt(EverstepError):
    """Stored state does not match its hashes."""

    cause = Cause.CORRUPT


class StoreError(EverstepError):
    """A directory or object store could not be read or written.

    `trouble`: the same wherever the same thing is wrong, whichever file it befalls.
    """

    cause = Cause.DISK

    def __init__(self, message: str, trouble: str = "") -> None:
        super().__init__(message)
        self.trouble = trouble


class BlobMissing(StoreError):
    """A store has nothing under that name."""


class BlobExists(StoreError):
    """A store has something under a name that was to be new."""


class BlobForeign(StoreError, CheckpointCorrupt):
    """What a store has under that name, or on the way to it, is a link, a pipe or the like, or the name is none."""

    cause = Cause.CORRUPT


class PartsAway(StoreError):
    """A part of a checkpoint is on hosts that are not there. `hosts`: their names."""

    cause = Cause.HOST_LOST

    def __init__(self, message: str, hosts: list[str]) -> None:
        super().__init__(message, "away")
        self.hosts = hosts


class JobFailed(EverstepError):
    """The job cannot go on."""


class InvariantViolation(AssertionError):
    """A bug in Everstep: something that must always hold did not."""


def cause_of(error: BaseException) -> Cause:
    """What an exception comes down to; of a `TaskError`, what the user's code raised."""
    root = error.__cause__ if isinstance(error, TaskError) and error.__cause__ is not None else error
    if isinstance(root, EverstepError):
        return root.cause
    if isinstance(root, MemoryError) or any(c.__name__ == "OutOfMemoryError" for c in type(root).__mro__):
        return Cause.OOM  # a device's is torch's own class, which is not known here
    if isinstance(root, OSError) and root.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS):
        return Cause.DISK
    return Cause.EXCEPTION


def one_line(text: str) -> str:
    """What a message and an event can bear of what others have written: in one line, 2,000 characters at most, and
    with a replacement for what no UTF-8 has, such as a file's name in bytes of another encoding."""
    line = " ".join(text.split())
    more = f"... ({len(line)} characters)" if len(line) > _MOST_SAID else ""
    return line[:_MOST_SAID].encode(errors="replace").decode() + more


def check(condition: bool, message: str) -> None:
    """Raise `InvariantViolation` unless the condition holds. Unlike `assert`, it stays under `-O`."""
    if not condition:
        raise InvariantViolation(message)
