"""What the job's processes need of Linux: dying with the parent, pinned environments, exit codes as text, waiting."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import resource
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator
from pathlib import Path
from typing import Generic, TypeVar

from everstep.base.cause import Cause, Why
from everstep.base.given import open_given
from everstep.base.readable import readable

OUTLIVES_WORKERS = "everstep-continue"
"""First word, or what a program of ours is told first, of a process that does not end with the worker that has started
it."""
END_ALONE = signal.SIGRTMIN + 5
"""Tells a job's own agent to end the job in order, since no coordinator answers; no scheduler sends it."""
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_OWN_CRASHES = {signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE}


def own_command(module: str, *arguments: str) -> list[str]:
    """The command of a process of our own. -P: the working directory is no place to import from."""
    return [sys.executable, "-P", "-m", module, *arguments]


def lasting_command(module: str, *arguments: str) -> list[str]:
    """The same of one that `outlives_workers`."""
    return own_command(module, OUTLIVES_WORKERS, *arguments)


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel SIGKILL this process when its parent ends; exit at once if that has happened already."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)


def die_with_writer(fd: int) -> int:
    """Have the kernel SIGKILL this process when nobody has the other end of this pipe open any more, whoever is its
    parent by then; exit at once if that has happened already. Nobody may ever write to it.

    The descriptor is closed; the one that is returned has to stay open.

    Source: fcntl(2): F_SETOWN and F_SETSIG belong to an open file, so every process needs one of its own.
    """
    own = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    os.close(fd)
    fcntl.fcntl(own, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(own, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(own, fcntl.F_SETFL, fcntl.fcntl(own, fcntl.F_GETFL) | os.O_ASYNC)
    if readable([own], 0.0):
        os._exit(1)
    return own


def adopt_orphans() -> None:
    """Become the parent of what dead children leave running, so that it can be found and ended."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
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


def parent_began_s() -> float:
    """Unix time at which this process's parent was started, of seconds; now, if nobody says.

    Source: proc(5): starttime in /proc/PID/stat, btime in /proc/stat.
    """
    with contextlib.suppress(OSError, ValueError, IndexError, KeyError):
        rows = dict(line.split(None, 1) for line in Path("/proc/stat").read_text().splitlines() if line)
        ticks = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[19]
        return int(rows["btime"]) + int(ticks) // os.sysconf("SC_CLK_TCK")
    return time.time()


def end_strays(known: Container[int]) -> None:
    """SIGKILL this process's children that it does not know: what the dead have left running."""
    for pid in children():
        if pid not in known and not outlives_workers(pid):
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, os.WNOHANG)


def unreaped_status(pid: int) -> int | None:
    """The wait status of a dead process whose parent, not this one, has yet to wait for it; None if it is none.

    Source: proc(5): the state, and exit_code, in /proc/PID/stat.
    """
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        return int(fields[-1]) if fields[0] == "Z" else None
    except (OSError, IndexError, ValueError):
        return None


def is_stopped(pid: int) -> bool:
    """Whether a signal has stopped this process. Source: proc(5): the state in /proc/PID/stat."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] in "tT"
    except (OSError, IndexError):
        return False


def outlives_workers(pid: int) -> bool:
    """Whether this process is called `OUTLIVES_WORKERS`, or `lasting_command` has started it."""
    words, told = command_words(pid), len(own_command(""))
    return OUTLIVES_WORKERS.encode() in (*words[:1], *words[told : told + 1])


def command_words(pid: int) -> list[bytes]:
    """With what this process was started; none if it is gone."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read().split(b"\0")
    except OSError:
        return []


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


def why_ended(code: int) -> Why:
    """What an exit code says, such as 'killed by SIGKILL' or 'exit code 1'; negative: by that signal."""
    if code >= 0:
        return Why(Cause.EXITED, f"exit code {code}")
    try:
        text = f"killed by {signal.Signals(-code).name}"
    except ValueError:
        text = f"killed by signal {-code}"
    return Why(Cause.KILLED if killed_from_outside(code) else Cause.CRASHED, text)


def last_line(path: Path) -> str:
    """The last line of a text file, in a folder of a run directory, that is not empty, '' if there is none."""
    with contextlib.suppress(OSError):
        with open_given(path, 1) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 8192))
            lines = file.read(8192).decode(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "")
    return ""


def killed_from_outside(code: int) -> bool:
    """Whether a signal ended it that a process does not send itself by crashing (SIGKILL, SIGTERM, ...)."""
    return code < 0 and -code not in _OWN_CRASHES


def pinned_environment(threads: int) -> dict[str, str]:
    """This process's environment with what numerics depend on fixed; `threads` is the intra-op number per worker."""
    return {
        **os.environ,
        "PYTHONHASHSEED": "0",
        "PYTHONUNBUFFERED": "1",
        **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS"), str(threads)),
        "OPENBLAS_NUM_THREADS": "1",  # its pool starts at import, and a fork server must not have threads
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    }


_LATELY_S = 5.0
_ROOT = Path("/sys/fs/cgroup")


class MemoryKills:
    """Whether the kernel has killed for want of memory: what SIGKILL alone does not say. Watches the counter of this
    process's control group; where there is none, no kill was for want of memory.

    Source: Linux, admin-guide/cgroup-v2: `oom_kill` in memory.events (memory.oom_control in version 1) counts the
    processes of the group that any kind of out-of-memory killer has killed; it rises before the signal is sent.
    """

    def __init__(self, events: Path | None = None) -> None:
        self._events = _counter() if events is None else events
        self._count = self._read()
        self._rose_s: float | None = None

    def look(self, now_s: float) -> None:
        """Take note of the counter, so that a later death is not ascribed to an older kill. `now_s` is monotonic."""
        count = self._read()
        if count > self._count:
            self._rose_s = now_s
        self._count = count

    def lately(self, now_s: float) -> bool:
        """Whether somebody was killed in the last seconds."""
        self.look(now_s)
        return self._rose_s is not None and now_s - self._rose_s <= _LATELY_S

    def _read(self) -> int:
        try:
            rows = dict(line.split() for line in self._events.read_text().splitlines() if line)
            return int(rows.get("oom_kill", 0))
        except (OSError, ValueError):
            return 0


def _counter() -> Path:
    """The file with the counter of this process's control group, whether it exists or not."""
    try:
        groups = [row.split(":", 2) for row in Path("/proc/self/cgroup").read_text().splitlines()]
    except OSError:
        groups = []
    paths = {controllers: path.lstrip("/") for _, controllers, path in groups}
    if "memory" in paths:
        return _ROOT / "memory" / paths["memory"] / "memory.oom_control"
    return _ROOT / paths.get("", "") / "memory.events"


T = TypeVar("T")


class Inbox(Generic[T]):
    """A queue and a descriptor. `fd` is readable while there may be something in it."""

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self.fd, self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def put(self, item: T) -> None:
        """Any thread; also a signal handler."""
        self._items.append(item)
        with contextlib.suppress(OSError):  # full: it is readable anyway; closed: nobody waits any more
            os.write(self._wake, b"\0")

    def take(self) -> list[T]:
        """All that is there."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.fd, 4096)
        return [self._items.popleft() for _ in range(len(self._items))]

    def close(self) -> None:
        """Give the descriptors back."""
        wake, self._wake = self._wake, -1
        os.close(wake)
        os.close(self.fd)


@contextlib.contextmanager
def taking_signals(numbers: Iterable[int], put: Callable[[int], None]) -> Iterator[None]:
    """Have these signals given to `put`, where this is the main thread; elsewhere nobody can have them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, lambda found, _frame: put(found)) for number in numbers}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
