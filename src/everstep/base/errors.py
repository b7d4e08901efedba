"""The whole error tree. Operating faults derive from `EverstepError`; a broken invariant is a bug.

EverstepError
├── ConfigError            the user's request cannot be carried out; one line: expected, came, what to do
│   └── DiskUnfit          a folder that is named for large data takes no file, or has no room
├── TaskError              the user's task raised (build_model, loss, dataset, ...)
├── Uncarried              the loop changed state that no checkpoint holds; a resumed worker would lack it
│   └── Restructured       modules, hooks or groups of parameters
├── DeterminismError       the same work gave different bits
│   ├── LaneCarried        the user's code leaves something from one batch to the next
│   └── RepeatedOtherwise  a step that was told before gives another loss after a resume
├── StateTainted           the workers' states differ, so all steps since they last matched are void
├── MembershipError        the membership does not allow the request
│   ├── StaleGeneration    a message or a worker of an older generation
│   ├── Evicted            this worker is no longer a member
│   └── NoHead             nobody leads the job, for too long
├── CollectiveAborted      a transfer was cut because the generation ended or a peer died
├── Deposed                another host leads the job; this process has to become a standby
├── ProtocolError          foreign bytes on a connection: bad frame, version or token
│   ├── TokenRefused       the called process has another token
│   ├── Untrusted          the called peer's certificate is not trusted
│   └── TlsDiffers         one end of a connection uses TLS, the other does not
├── CheckpointCorrupt      stored state that does not match its hashes
├── StoreError             a directory or object store could not be read or written
│   ├── BlobMissing        the store has nothing under that name
│   ├── BlobExists         the store has something under a name that should be new
│   └── BlobForeign        the entry is no file of ours; a CheckpointCorrupt, too
└── JobFailed              the job cannot go on; the message says why
InvariantViolation         (not an EverstepError) a bug in Everstep
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable

from everstep.base.cause import Cause

_MOST_SAID = 2000
_LONG_WORD = 8
"""Letters from which a word may have two slips."""


class EverstepError(Exception):
    """Root of all operating faults. `cause`: cause of a fault of this class, as data; `exit_code`: of a job that it
    ends."""

    cause = Cause.UNKNOWN
    exit_code = 1


def did_you_mean(word: str, known: Iterable[str], form: str = "{!r}") -> str:
    """End of a message about an unknown word: the nearest known word, "" if none is near. form: how it is written."""
    near = nearest(word, known)
    return f"; did you mean {form.format(near)}?" if near is not None else ""


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that `word` was most likely meant to be, None if none is near.

    Near is a word with the same first letter and at most one slip, two if it has eight letters or more; or one of the
    two words is the beginning of the other, and at least half of it. A slip is a letter too many, too few, another, or
    swapped with its neighbour.
    """
    distances = {one: _slips(word.lower(), one.lower()) for one in known}
    near = {one: slips for one, slips in distances.items() if slips is not None}
    return min(near, key=lambda one: near[one], default=None)


def _slips(word: str, known: str) -> int | None:
    """Number of slips between two words; None if they are not near."""
    short, long = sorted((word, known), key=len)
    apart = len(long) - len(short)
    if long.startswith(short) and 2 * len(short) >= len(long):
        return apart
    most = 2 if len(known) >= _LONG_WORD else 1
    if apart > most or word[:1] != known[:1]:
        return None
    before: list[int] = []
    row = list(range(len(known) + 1))  # slips between the beginning of the word so far and each beginning of `known`
    for i, letter in enumerate(word, start=1):
        earlier, before, row = before, row, [i]
        for j, other in enumerate(known, start=1):
            slips = min(before[j] + 1, row[-1] + 1, before[j - 1] + (letter != other))
            if earlier and j > 1 and word[i - 2 : i] == other + known[j - 2]:
                slips = min(slips, earlier[j - 2] + 1)
            row.append(slips)
    return row[-1] if row[-1] <= most else None


class ConfigError(EverstepError):
    """The job cannot be started as asked."""

    cause = Cause.CONFIG
    exit_code = 2


class DiskUnfit(ConfigError):
    """A folder that is named for large data takes no file, or has no room: now, and on this host. signature: equal for
    each folder, however much room there is."""

    cause = Cause.DISK

    def __init__(self, text: str, folder: object) -> None:
        super().__init__(text)
        self.signature = f"{type(self).__name__}: {folder}"


class BuffersDiffer(ConfigError):
    """Lanes of a step left other values in a buffer, and no rule joins them. name: the buffer's in the model."""

    def __init__(self, text: str, name: str = "") -> None:
        super().__init__(text)
        self.name = name


class TaskError(EverstepError):
    """The user's code raised."""

    cause = Cause.EXCEPTION


class Misused(TaskError):
    """The user's code does something that a job cannot carry. line: where, if the traceback does not show it."""

    exit_code = 2

    def __init__(self, text: str, line: int = 0) -> None:
        super().__init__(text)
        self.line = line


class Uncarried(EverstepError):
    """The loop changed state that cannot be carried to a worker that is resumed or healed."""

    cause = Cause.CONFIG
    exit_code = 2


class Restructured(Uncarried):
    """The loop changed modules, hooks or groups of parameters, of which values alone are carried."""


class DeterminismError(EverstepError):
    """The same work, done twice, gave different bits."""

    cause = Cause.NONDETERMINISTIC


class LaneCarried(DeterminismError):
    """The user's code leaves something from one batch to the next."""

    exit_code = 2


class RepeatedOtherwise(DeterminismError):
    """A step that was done and told before, and is repeated from a checkpoint, gives another loss."""

    exit_code = 2


class NonFinite(EverstepError):
    """A step had infinities or NaN, and `on_nonfinite` is stop."""

    cause = Cause.NONFINITE


class StateTainted(EverstepError):
    """The workers' states differ before `step`, decided in `generation`; up to step `sound` they were alike.

    `signature`: names this incident.
    """

    cause = Cause.CORRUPT

    def __init__(self, message: str, step: int, generation: int, sound: int) -> None:
        super().__init__(message)
        self.step, self.generation, self.sound = step, generation, sound
        self.signature = f"tainted:{step}:{generation}:{message}"


class MembershipError(EverstepError):
    """The membership does not allow the request."""


class StaleGeneration(MembershipError):
    """A message or a worker of an older generation."""


class Evicted(MembershipError):
    """This worker is no longer a member of the job. `drained`: by request, not by a fault. `returns`: the job goes back
    to a step, which a new life of this worker loads."""

    def __init__(self, message: str, drained: bool = False, returns: bool = False) -> None:
        super().__init__(message)
        self.drained, self.returns = drained, returns


class NoHead(MembershipError):
    """Nobody that leads the job was found, for longer than this host is willing to wait."""

    cause = Cause.LEASE


class Deposed(EverstepError):
    """Another host leads the job, and no more than the agent runs here. `become`: turns this process into a standby; it
    returns an exit code if a signal has come meanwhile, and raises ConfigError or OSError. `end`: ends the agent."""

    cause = Cause.LEASE

    def __init__(self, message: str, become: Callable[[], int], end: Callable[[], None] = lambda: None) -> None:
        super().__init__(message)
        self.become, self.end = become, end


class CollectiveAborted(EverstepError):
    """A transfer was cut before its end. `accused`: ids of the workers found dead, if any."""

    cause = Cause.LINK

    def __init__(self, message: str, accused: Iterable[int] = ()) -> None:
        super().__init__(message)
        self.accused = tuple(accused)


class ProtocolError(EverstepError):
    """A connection carried bytes of another protocol, version or token."""

    cause = Cause.LINK


class TokenRefused(ProtocolError):
    """The called process has another token."""


class Untrusted(ProtocolError):
    """The called peer shows a certificate that is not trusted here, or refuses the one shown to it."""


class TlsDiffers(ProtocolError):
    """The called process is the job's, but uses TLS where this one does not, or the other way round."""


class CheckpointCorrupt(EverstepError):
    """Stored state does not match its hashes."""

    cause = Cause.CORRUPT


class StoreError(EverstepError):
    """A directory or object store could not be read or written.

    `trouble`: text that is equal for equal troubles in different files.
    """

    cause = Cause.DISK

    def __init__(self, message: str, trouble: str = "") -> None:
        super().__init__(message)
        self.trouble = trouble


class BlobMissing(StoreError):
    """A store has nothing under that name."""


class BlobExists(StoreError):
    """A store has something under a name that should be new."""


class BlobForeign(StoreError, CheckpointCorrupt):
    """The entry of a store, or a folder on the way to it, is a link, a pipe or the like, or its name is invalid."""

    cause = Cause.CORRUPT


class PartsAway(StoreError):
    """A part of a checkpoint is only on hosts that are not connected. `hosts`: their names."""

    cause = Cause.HOST_LOST

    def __init__(self, message: str, hosts: list[str]) -> None:
        super().__init__(message, "away")
        self.hosts = hosts


class JobFailed(EverstepError):
    """The job cannot go on."""


class InvariantViolation(AssertionError):
    """A bug in Everstep: something that must always hold did not."""


def cause_of(error: BaseException) -> Cause:
    """Cause of an exception. For a `TaskError` it is the cause of the error that the user's code raised."""
    root = error.__cause__ if isinstance(error, TaskError) and error.__cause__ is not None else error
    if isinstance(root, EverstepError):
        return root.cause
    if isinstance(root, MemoryError) or any(c.__name__ == "OutOfMemoryError" for c in type(root).__mro__):
        return Cause.OOM  # the error class of a device is torch's own, and torch is not imported here
    if isinstance(root, OSError) and root.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS):
        return Cause.DISK
    return Cause.EXCEPTION


def one_line(text: str) -> str:
    """Text of others, made fit for a message or event: one line, at most 2,000 characters, with replacements for
    anything that UTF-8 lacks, such as file names in another encoding."""
    line = " ".join(text.split())
    more = f"... ({len(line)} characters)" if len(line) > _MOST_SAID else ""
    return line[:_MOST_SAID].encode(errors="replace").decode() + more


def check(condition: bool, message: str) -> None:
    """Raise `InvariantViolation` unless the condition holds. Unlike `assert`, it works under `-O`."""
    if not condition:
        raise InvariantViolation(message)
