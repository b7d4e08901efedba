"""What the job's processes need of Linux: dying with the parent, pinned environments, exit statuses as text."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys

from everstep.base.cause import Cause

OUTLIVES_WORKERS = "everstep-continue"  # first word of a process that is not ended with the worker that started it
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_OWN_CRASHES = {signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE}


def own_command(module: str, *arguments: str) -> list[str]:
    """The command of a process of our own. -P: the working directory is no place to import from."""
    return [sys.executable, "-P", "-m", module, *arguments]


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel SIGKILL this process when its parent ends; exit at once if that has happened already."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)


def adopt_orphans() -> None:
    """Become the parent of what dead children leave running, so that it can be found and ended."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


def machine() -> str:
    """Names this machine and what processes can be seen from here: where a pid means the same process."""
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    return ""


def children() -> list[int]:
    """Pids of this process's direct children, zombies included. Source: /proc/PID/task/TID/children."""
    found: list[int] = []
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError), open(f"/proc/self/task/{thread}/children") as file:
            found += [int(pid) for pid in file.read().split()]
    return found


def outlives_workers(pid: int) -> bool:
    """Whether this process is called `OUTLIVES_WORKERS`."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read().split(b"\0", 1)[0] == OUTLIVES_WORKERS.encode()
    except OSError:
        return False


def thread_count() -> int:
    """Threads of this process."""
    return len(os.listdir("/proc/self/task"))


def close_descriptors(keep: set[int]) -> None:
    """Close every descriptor from 3 up, except those in `keep`."""
    limit = 3
    for fd in [*sorted(f for f in keep if f >= 3), 1 << 20]:
        os.closerange(limit, fd)
        limit = fd + 1


def raise_descriptor_limit() -> None:
    """As many descriptors as the hard limit allows."""
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def describe_status(status: int) -> str:
    """A wait status as text for people, such as 'killed by SIGKILL' or 'exit code 1'."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        try:
            return f"killed by {signal.Signals(number).name}"
        except ValueError:
            return f"killed by signal {number}"
    return f"exit code {os.waitstatus_to_exitcode(status)}"


def cause_of_status(status: int) -> Cause:
    """What a wait status says of an end."""
    if os.WIFSIGNALED(status):
        return Cause.KILLED if killed_from_outside(status) else Cause.CRASHED
    return Cause.EXITED


def killed_from_outside(status: int) -> bool:
    """Whether a signal ended it that a process does not send itself by crashing (SIGKILL, SIGTERM, ...)."""
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) not in _OWN_CRASHES


def pinned_environment(threads: int) -> dict[str, str]:
    """This process's environment with what numerics depend on fixed; `threads` is the intra-op number per worker."""
    environment = dict(os.environ)
    environment.update(
        PYTHONHASHSEED="0",
        PYTHONUNBUFFERED="1",
        OMP_NUM_THREADS=str(threads),
        MKL_NUM_THREADS=str(threads),
        NUMEXPR_NUM_THREADS=str(threads),
        OPENBLAS_NUM_THREADS="1",  # its pool starts at import, and a fork server must not have threads
        CUBLAS_WORKSPACE_CONFIG=":4096:8",
    )
    return environment
