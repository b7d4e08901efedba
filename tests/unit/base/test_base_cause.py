"""The causes there are, how they are read, and what an exception comes down to."""

from __future__ import annotations

import errno

import pytest

from everstep.base.cause import Cause
from everstep.base.errors import (
    CheckpointCorrupt,
    CollectiveAborted,
    ConfigError,
    EverstepError,
    StateTainted,
    StoreError,
    TaskError,
    cause_of,
)

CONTRACT = "killed exited hung silent host_lost link corrupt nonfinite oom preempted drained slow disk config unknown"


def test_what_scripts_rely_on_is_there() -> None:
    assert set(CONTRACT.split()) <= set(Cause)
    assert len({cause.meaning for cause in Cause}) == len(Cause)
    assert all(cause.meaning and cause == str(cause) == f"{cause}" for cause in Cause)


def test_what_is_none_reads_as_unknown() -> None:
    assert all(Cause.read(str(cause)) is cause for cause in Cause)
    assert {Cause.read(value) for value in (None, "", "KILLED", "someday", 3, ["killed"], {})} == {Cause.UNKNOWN}


class OutOfMemoryError(RuntimeError):
    """As torch's own is called."""


def _of_the_task(error: Exception) -> TaskError:
    try:
        raise TaskError("Mine.loss raised something") from error
    except TaskError as found:
        return found


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (ValueError("boom"), Cause.EXCEPTION),
        (TaskError("the loss has no gradient"), Cause.EXCEPTION),
        (_of_the_task(KeyError("label")), Cause.EXCEPTION),
        (MemoryError(), Cause.OOM),
        (OutOfMemoryError("CUDA out of memory"), Cause.OOM),
        (_of_the_task(OutOfMemoryError("CUDA out of memory")), Cause.OOM),
        (OSError(errno.ENOSPC, "No space left on device"), Cause.DISK),
        (FileNotFoundError(errno.ENOENT, "mine.txt"), Cause.EXCEPTION),
        (ConfigError("lanes: expected ..."), Cause.CONFIG),
        (StoreError("cannot write it"), Cause.DISK),
        (CheckpointCorrupt("a block differs"), Cause.CORRUPT),
        (StateTainted("they differ", 3, 1, 2), Cause.CORRUPT),
        (CollectiveAborted("left", [1]), Cause.LINK),
        (EverstepError("something"), Cause.UNKNOWN),
    ],
)
def test_what_an_exception_comes_down_to(error: BaseException, cause: Cause) -> None:
    assert cause_of(error) is cause
