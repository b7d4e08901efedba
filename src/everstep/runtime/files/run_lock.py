"""The lock of a run directory: one job at a time runs there."""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
from collections.abc import Iterator
from pathlib import Path

from everstep.base.below import keep_to, leave, open_below
from everstep.base.errors import ConfigError
from everstep.base.given import open_given
from everstep.runtime.files.private import refuse_foreign, sweep_drafts
from everstep.runtime.link.address import LOCK_FILE

_FLOCK = struct.Struct("hhqqi4x")  # struct flock of 64-bit Linux: type, whence, start, length, pid


def is_locked(run_dir: Path) -> bool:
    """Whether a job holds the directory, and so is running. It asks without taking the lock, so a reader is never in
    the way of a job that starts."""
    try:
        with open_given(run_dir / LOCK_FILE) as file:
            return _lock(file.fileno(), fcntl.F_OFD_GETLK, fcntl.F_RDLCK) != fcntl.F_UNLCK
    except OSError:
        return False


@contextlib.contextmanager
def run_lock(run_dir: Path) -> Iterator[None]:
    """Hold the directory's lock, which ends with this process at the latest.

    Raises: ConfigError if another process holds it, if the directory cannot be made or written, or if it is a link
    elsewhere.
    """
    held = f"a job is still running in {run_dir}: wait for it, stop it, or choose another --run-dir"
    with sole_holder(run_dir, LOCK_FILE, held):
        refuse_foreign(run_dir)
        sweep_drafts(run_dir)
        keep_to(run_dir)
        try:
            yield
        finally:
            leave(run_dir)


@contextlib.contextmanager
def sole_holder(run_dir: Path, name: str, held: str) -> Iterator[None]:
    """Hold a lock file of a run directory, made with its folder if need be; the lock ends with this process at the
    latest.

    The lock belongs to the open file (F_OFD_SETLK). It can be queried without being taken, and a stranger's shared or
    exclusive flock does not touch it. The file names the process that holds it.

    Raises: ConfigError, with `held` and the holder's process, if another holds it; or if the directory cannot be made
    or written, or is another user's.
    """
    path = run_dir / name
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        fd = open_below(path, os.O_RDWR | os.O_CREAT, name.count("/"), make=True)
    except OSError as error:
        raise ConfigError(f"the run directory {run_dir} cannot be written to: {error.strerror or error}") from None
    try:
        try:
            _lock(fd, fcntl.F_OFD_SETLK, fcntl.F_WRLCK)
        except (BlockingIOError, PermissionError):
            pid = os.pread(fd, 20, 0).strip()
            raise ConfigError(f"{held} (process {pid.decode()})" if pid.isdigit() else held) from None
        except OSError as error:
            raise ConfigError(f"cannot lock {path}: {error.strerror or error}") from None
        with contextlib.suppress(OSError):  # on a full disk the next process is not told the holder
            os.ftruncate(fd, 0)
            os.pwrite(fd, b"%d\n" % os.getpid(), 0)
        yield
    finally:
        os.close(fd)


def _lock(fd: int, command: int, kind: int) -> int:
    """One fcntl call about a lock over the whole file. Returns the kind of lock in the kernel's answer."""
    answer = fcntl.fcntl(fd, command, _FLOCK.pack(kind, os.SEEK_SET, 0, 0, 0))
    return int(_FLOCK.unpack(answer)[0])
