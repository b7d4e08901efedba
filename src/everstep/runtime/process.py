"""Linux services for the job's processes: dying with the parent, pinned environments, exit codes as text, waiting."""

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
from everstep.base.config_fields import SECRET_VARIABLES
from everstep.base.given import open_given
from everstep.base.readable import readable

AGAIN = 75
"""Exit code of a worker's process that was sent away, and may come back as a new life."""
RETURNS = 76
"""Exit code of one that ends because of another one's loss, to begin again: that is none of its own restarts."""
OUTLIVES_WORKERS = "everstep-continue"
"""Marks a process that does not end with the worker that started it: it is its first word, or the first argument of our
own programs."""
END_ALONE = signal.SIGRTMIN + 5
"""Tells a job's own agent to end the job in order, since no coordinator answers; no scheduler sends it."""
LEAVE = signal.SIGRTMIN + 6
"""Tells a job's own agent to leave in order, because its host stands by for another one, and will go."""
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_OWN_CRASHES = {signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE}


def own_command(module: str, *arguments: str) -> list[str]:
    """Command that runs a module in a process of our own. -P: nothing is imported from the working directory."""
    return [sys.executable, "-P", "-m", module, *arguments]


def lasting_command(module: str, *arguments: str) -> list[str]:
    """Command as of `own_command`, for a process that `outlives_workers`."""
    return own_command(module, OUTLIVES_WORKERS, *arguments)


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel SIGKILL this process when its parent ends; exit at once if that has happened already."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)


def die_with_writer(fd: int) -> int:
    """Have the kernel SIGKILL this process when nobody has the other end of this pipe open any more, whichever parent
    it then has; exit at once if that has happened already. Nobody may ever write to the pipe.

    The descriptor is closed; the returned one has to stay open.

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
    """Become the parent of processes that dead children leave running, so that they can be found and ended."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


def machine() -> str:
    """Name of this machine and its PID namespace: where the name is the same, a pid means the same process."""
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
    """Unix time, in whole seconds, at which this process's parent was started; the present time if unknown.

    Source: proc(5): starttime in /proc/PID/stat, btime in /proc/stat.
    """
    with contextlib.suppress(OSError, ValueError, IndexError, KeyError):
        rows = dict(line.split(None, 1) for line in Path("/proc/stat").read_text().splitlines() if line)
        ticks = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[19]
        return int(rows["btime"]) + int(ticks) // os.sysconf("SC_CLK_TCK")
    return time.time()


def end_strays(known: Container[int]) -> None:
    """SIGKILL children of this process that are not `known`: dead children have left them running."""
    for pid in children():
        if pid not in known and not outlives_workers(pid):
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, os.WNOHANG)


def unreaped_status(pid: int) -> int | None:
    """Wait status of a dead process that its parent, not this process, has not reaped yet; None otherwise.

    Source: proc(5): the state, and exit_code, in /proc/PID/stat.
    """
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        return int(fields[-1]) if fields[0] == "Z" else None
    except (OSError, IndexError, ValueError):
        return None


def is_dead(pid: int) -> bool:
    """Whether this process has ended, reaped or not. Source: proc(5): the state in /proc/PID/stat."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] in "ZX"
    except (OSError, IndexError):
        return True


def is_stopped(pid: int) -> bool:
    """Whether a signal has stopped this process. Source: proc(5): the state in /proc/PID/stat."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] in "tT"
    except (OSError, IndexError):
        return False


def outlives_workers(pid: int) -> bool:
    """Whether this process is called `OUTLIVES_WORKERS`, or was started by a `lasting_command`."""
    words, told = command_words(pid), len(own_command(""))
    return OUTLIVES_WORKERS.encode() in (*words[:1], *words[told : told + 1])


def command_words(pid: int) -> list[bytes]:
    """Words of the command that started this process; none if it is gone."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read().split(b"\0")
    except OSError:
        return []


def thread_count() -> int:
    """Number of threads of this process."""
    return len(os.listdir("/proc/self/task"))


def close_descriptors(keep: set[int]) -> None:
    """Close every descriptor from 3 up, except those in `keep`."""
    limit = 3
    for fd in [*sorted(f for f in keep if f >= 3), 1 << 20]:
        os.closerange(limit, fd)
        limit = fd + 1


def raise_descriptor_limit() -> None:
    """Allow this process as many descriptors as the hard limit allows."""
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def why_ended(code: int) -> Why:
    """Meaning of an exit code, such as 'killed by SIGKILL' or 'exit code 1'; negative: by that signal."""
    if code >= 0:
        return Why(Cause.EXITED, f"exit code {code}")
    try:
        text = f"killed by {signal.Signals(-code).name}"
    except ValueError:
        text = f"killed by signal {-code}"
    return Why(Cause.KILLED if killed_from_outside(code) else Cause.CRASHED, text)


def last_line(path: Path) -> str:
    """Last line that is not empty of a text file in a folder of a run directory; '' if there is none."""
    with contextlib.suppress(OSError):
        with open_given(path, 1) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 8192))
            lines = file.read(8192).decode(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "")
    return ""


def killed_from_outside(code: int) -> bool:
    """Whether a signal ended the process that a crash does not raise by itself (SIGKILL, SIGTERM, ...)."""
    return code < 0 and -code not in _OWN_CRASHES


_FEWER_THREADS = frozenset({"OMP_THREAD_LIMIT", "OMP_MAX_ACTIVE_LEVELS"})
"""Variables with which libraries use fewer threads than torch says it has, so that sums are cut otherwise."""


def pinned_environment(threads: int) -> dict[str, str]:
    """This process's environment with fixed settings for numerics, and without secrets. threads: per worker, within an
    operation."""
    return {
        **{name: value for name, value in os.environ.items() if name not in (*_FEWER_THREADS, *SECRET_VARIABLES)},
        "OMP_DYNAMIC": "FALSE",  # else the load of the machine decides how many threads there are
        "PYTHONHASHSEED": "0",
        "PYTHONUNBUFFERED": "1",
        **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS"), str(threads)),
        "OPENBLAS_NUM_THREADS": "1",  # its pool starts at import, and a fork server must not have threads
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    }


_LATELY_S = 5.0
_ROOT = Path("/sys/fs/cgroup")


class MemoryKills:
    """Tells whether the kernel has killed for lack of memory, which SIGKILL alone does not say. It watches the counter
    of this process's control group; without one, no kill counts as one for lack of memory.

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
        """Whether a process was killed in the last seconds."""
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
    folder, first = _memory_group()
    return folder / ("memory.oom_control" if first else "memory.events")


def _memory_group() -> tuple[Path, bool]:
    """Folder of this process's control group for memory, whether it exists or not; whether it is of version 1."""
    try:
        groups = [row.split(":", 2) for row in Path("/proc/self/cgroup").read_text().splitlines()]
    except OSError:
        groups = []
    paths = {controllers: path.lstrip("/") for _, controllers, path in groups}
    if "memory" in paths:
        return _ROOT / "memory" / paths["memory"], True
    return _ROOT / paths.get("", ""), False


def available_bytes() -> int:
    """Memory that processes of this control group can still get without anything being swapped out or killed.

    Source: Linux, MemAvailable of proc(5); limit, use and inactive_file of the group and those above it, by
    admin-guide/cgroup-v2 and cgroup-v1/memory.
    """
    rows = Path("/proc/meminfo").read_text().splitlines()
    found = [int(row.split()[1]) << 10 for row in rows if row.startswith("MemAvailable:")]
    folder, first = _memory_group()
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if first else ("memory.max", "memory.current")
    while folder.is_relative_to(_ROOT):
        with contextlib.suppress(OSError, ValueError):  # a group without a limit
            limit, used = (int((folder / name).read_text()) for name in names)
            facts = dict(row.split() for row in (folder / "memory.stat").read_text().splitlines())
            found.append(limit - used + int(facts["total_inactive_file" if first else "inactive_file"]))
        folder = folder.parent
    return max(0, min(found))


def resident_bytes() -> int:
    """Physical memory that this process holds now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


T = TypeVar("T")


class Inbox(Generic[T]):
    """Queue with a descriptor. `fd` is readable while there may be something in it."""

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self.fd, self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def put(self, item: T) -> None:
        """Add an item. Any thread; also a signal handler."""
        self._items.append(item)
        with contextlib.suppress(OSError):  # full: it is readable anyway; closed: nobody waits any more
            os.write(self._wake, b"\0")

    def take(self) -> list[T]:
        """Take all items."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.fd, 4096)
        return [self._items.popleft() for _ in range(len(self._items))]

    def close(self) -> None:
        wake, self._wake = self._wake, -1
        os.close(wake)
        os.close(self.fd)


@contextlib.contextmanager
def taking_signals(numbers: Iterable[int], put: Callable[[int], None]) -> Iterator[None]:
    """Give these signals to `put` while the block lasts, if this is the main thread; no other thread can take them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, lambda found, _frame: put(found)) for number in numbers}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
