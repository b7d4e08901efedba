"""Output, logs and resource use of workers, in files of bounded size: logs/worker-<id>.jsonl and metrics/<host>.jsonl.

Each worker's stdout and stderr are pipes that end here, in a thread of the agent's. So every line is kept, also from C
libraries and from killed workers. One thread alone writes and rotates the files, whichever life of a worker adds to
them. A full disk costs lines, which are counted, and never a worker's time.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from everstep.base.below import APPEND, open_below
from everstep.observe.logs import RECORD, WorkerLog
from everstep.protocol.messages import WorkerLife
from everstep.runtime.host.board import OPERATIONS, PHASES, Board, Pulse
from everstep.runtime.host.stacks import StackReader

PRINTED_LEVEL = {"stdout": "info", "stderr": "warning"}
_READ_BYTES = 1 << 16
_MOST_LINE_BYTES = 1 << 16
_MOST_RECORD_BYTES = 1 << 20
_LAST_WAIT_S = 2.0


class LineFile:
    """A file of lines, in a folder of the run directory, that is rotated: `x.jsonl`, then `x.1.jsonl` to
    `x.<keep>.jsonl`. Never raises because of the file.

    dropped: lines that could not be written since the last one that could.
    """

    def __init__(self, path: Path, most_bytes: int, keep: int) -> None:
        self.dropped = 0
        self._path = path
        self._most_bytes = most_bytes
        self._keep = keep
        self._fd = -1
        self._size = 0
        self._torn = False

    def write(self, lines: bytes) -> bool:
        """Append whole lines. Returns whether all were written."""
        data, written = lines, 0
        with contextlib.suppress(OSError):
            self._make_room(len(lines))
            data = b"\n" + lines if self._torn else lines  # ends the half line that a full disk left behind
            written = os.write(self._fd, data)
        self._size += written
        if written == len(data):
            self._torn = False
            return True
        self._torn = self._torn or written > 0
        self.dropped += lines.count(b"\n")
        self.close()  # the file may have been replaced, or the mount is back: open it again next time
        return False

    def close(self) -> None:
        """Give the descriptor back; a later write opens the file again."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _make_room(self, n_bytes: int) -> None:
        if self._fd < 0:
            self._open()
        if self._size and self._size + n_bytes > self._most_bytes:
            self.close()
            if self._keep:
                rotate(self._path, self._keep + 1)
            else:
                self._path.unlink(missing_ok=True)
            self._open()

    def _open(self) -> None:
        self._fd = open_below(self._path, APPEND, 1, make=True)
        self._size = os.fstat(self._fd).st_size
        self._torn = self._torn and self._size > 0


@dataclass
class _Pipe:
    """One of the two pipes of a process. rest: the beginning of a line whose end has not come."""

    source: str
    cell_rank: int
    context: WorkerLog
    file: LineFile
    rest: bytes = b""
    stacks: StackReader = field(default_factory=StackReader)


class Collector:
    """Reads until it is closed. folder: of the files. `open` is called by one thread."""

    def __init__(self, folder: Path, board: Board, most_bytes: int, keep: int) -> None:
        self._folder = folder
        self._board = board
        self._most_bytes = most_bytes
        self._keep = keep
        self._files: dict[int, LineFile] = {}
        self._pipes: dict[int, _Pipe] = {}
        self._seen: dict[int, tuple[int, str]] = {}
        self._epoll = select.epoll()
        self._closing_s: float | None = None
        self._wake_r, self._wake_w = os.pipe2(os.O_CLOEXEC)
        self._epoll.register(self._wake_r, select.EPOLLIN)
        self._thread = threading.Thread(target=self._run, name="everstep-collector", daemon=True)
        self._thread.start()

    def path(self, worker_id: int) -> Path:
        """File with the output and logs of a worker."""
        return self._folder / f"worker-{worker_id}.jsonl"

    def open(self, worker_id: int, incarnation: int, cell_rank: int = 0) -> tuple[int, int]:
        """Make the stdout and stderr of a process in a new life of a worker; the caller hands the descriptors on and
        closes its own."""
        file = self._files.get(worker_id)
        if file is None:
            path = self.path(worker_id)
            file = self._files[worker_id] = LineFile(path, self._most_bytes, self._keep)
        context = WorkerLog(worker_id, incarnation)
        context.pid = 0
        ends = []
        for source in ("stdout", "stderr"):
            ours, theirs = os.pipe2(os.O_CLOEXEC)
            os.set_blocking(ours, False)
            self._pipes[ours] = _Pipe(source, cell_rank, context, file)
            self._epoll.register(ours, select.EPOLLIN)
            ends.append(theirs)
        return ends[0], ends[1]

    def seen_at(self, worker_id: int, since_ns: int) -> str:
        """Innermost place in the user's code by the stacks that this worker has written since then (monotonic); "" if
        it has written none. Any thread."""
        seen_ns, where = self._seen.get(worker_id, (0, ""))
        return where if seen_ns >= since_ns else ""

    def close(self) -> None:
        """Take in the rest of the pipes, and end; a process that keeps on writing is not waited for."""
        if self._closing_s is None:
            self._closing_s = time.monotonic() + _LAST_WAIT_S
            os.close(self._wake_w)
            self._thread.join(_LAST_WAIT_S + 1.0)

    # ---- the thread

    def _run(self) -> None:
        while True:
            closing_s = self._closing_s
            ready = [fd for fd, _ in self._epoll.poll(None if closing_s is None else 0) if fd != self._wake_r]
            for fd in ready:
                self._read(fd)
            if closing_s is not None and (not ready or time.monotonic() > closing_s):
                break
        for fd in list(self._pipes):
            self._end(fd)
        for worker_id, file in self._files.items():
            if file.dropped:
                file.write(_said_of_dropped(WorkerLog(worker_id, 0), file.dropped, time.time_ns()))
            file.close()
        self._epoll.close()
        os.close(self._wake_r)

    def _read(self, fd: int) -> None:
        pipe = self._pipes[fd]
        try:
            data = os.read(fd, _READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._end(fd)
            return
        self._look(pipe.context, pipe.cell_rank)
        *lines, rest = (pipe.rest + data).split(b"\n")
        longest = _MOST_RECORD_BYTES if RECORD in rest else _MOST_LINE_BYTES
        if len(rest) > longest:
            lines.append(rest)
            rest = b""
        pipe.rest = rest
        for line in lines if pipe.source == "stderr" else ():
            where = pipe.stacks.take(line)
            if where:
                self._seen[pipe.context.worker_id] = time.monotonic_ns(), where
        self._write(pipe, lines)

    def _end(self, fd: int) -> None:
        pipe = self._pipes.pop(fd)
        self._write(pipe, [pipe.rest])
        with contextlib.suppress(OSError):
            self._epoll.unregister(fd)
        os.close(fd)

    def _write(self, pipe: _Pipe, lines: list[bytes]) -> None:
        now_ns = time.time_ns()
        found = b"".join(
            record for line in lines if line for record in records(line, pipe.source, pipe.context, now_ns)
        )
        if not found:
            return
        file = pipe.file
        dropped, file.dropped = file.dropped, 0
        if dropped:
            found = _said_of_dropped(pipe.context, dropped, now_ns) + found
        if not file.write(found) and dropped:
            file.dropped += dropped - 1

    def _look(self, context: WorkerLog, cell_rank: int) -> None:
        """Read the worker's present state from its row; if a later life has the row, keep the last state."""
        pulse = self._board.row(context.worker_id).read()
        if pulse.incarnation == context.incarnation:
            own = pulse if cell_rank == 0 else self._board.row(context.worker_id, cell_rank).read()
            context.pid, context.generation, context.step = own.pid, pulse.generation, pulse.step
            context.stage, context.role = pulse.stage, pulse.role


def _said_of_dropped(context: WorkerLog, count: int, now_ns: int) -> bytes:
    text = f"{count} lines could not be written here: the disk was full or missing"
    return context.line("warning", "everstep", text, time_ns=now_ns)


def records(line: bytes, source: str, context: WorkerLog, now_ns: int) -> list[bytes]:
    """Records of one line of a worker: printed text becomes a record; a record stays as it is."""
    printed, mark, record = line.partition(RECORD)
    if mark and not (record.startswith(b'{"time_unix_ns":') and record.endswith(b"}")):
        printed, record = line.replace(RECORD, b""), b""
    found = []
    text = printed.decode(errors="replace").rstrip("\r").rpartition("\r")[2]
    if text:
        found.append(context.line(PRINTED_LEVEL[source], source, text, source, time_ns=now_ns))
    if record:
        found.append(record + b"\n")
    return found


# ---- resource use

MOST_BYTES = 64 << 20
MOST_FILES = 4
_GROUPS = {"heal": "recover", "settle": "recover", "idle": "other", "starting": "other", "evaluate": "other"}
_GROUPS |= {"finish": "other"}
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_OWN_S = 10.0
"""Between two looks at what a worker has of its memory for itself, which take the kernel some milliseconds."""


class Sampler:
    """Writes metrics/<host>.jsonl, one line per interval, from the board and from /proc, until it is closed.

    It has a thread of the agent's, so that a slow disk delays no heartbeat. Workers only add to counters in shared
    memory for it. The lines only inform: those that cannot be written are dropped, and the next one says how many
    (`dropped`). lives: thread-safe, the processes that run now.
    """

    def __init__(
        self, folder: Path, host: str, board: Board, lives: Callable[[], Iterable[WorkerLife]], interval_s: float
    ) -> None:
        self._file = LineFile(folder / f"{host}.jsonl", MOST_BYTES, MOST_FILES - 1)
        self._host = host
        self._board = board
        self._lives = lives
        self._interval_s = interval_s
        self._own: dict[int, tuple[float, int]] = {}
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="everstep-sampler", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._thread.join(2.0)

    def line(self, now_unix_ns: int) -> dict[str, Any]:
        """Sample of all workers now. Counters grow within a life (incarnation), seconds and bytes alike."""
        lives = list(self._lives())
        self._own = {pid: self._own[pid] for life in lives for pid in (life.pid, *life.limbs) if pid in self._own}
        rows = [self._row(life) for life in lives]
        about = {"t": now_unix_ns, "host": self._host, "cpus": len(os.sched_getaffinity(0))}
        return {**about, "workers": [row for row in rows if row]}

    def _row(self, life: WorkerLife) -> dict[str, Any] | None:
        pulse = self._board.read(life.worker_id)
        usage = process_usage(life.pid)
        limbs = [found for pid in life.limbs if (found := process_usage(pid)) is not None]
        if pulse.incarnation != life.incarnation or usage is None:
            return None
        seconds: dict[str, float] = {}
        for phase, spent_ns in zip(PHASES, pulse.spent_ns, strict=True):
            group = _GROUPS.get(phase, phase)
            seconds[group] = seconds.get(group, 0.0) + spent_ns / 1e9
        return {
            "worker_id": life.worker_id,
            "incarnation": life.incarnation,
            "pid": life.pid,
            **({"pids": [life.pid, *life.limbs]} if life.limbs else {}),
            "step": pulse.step,
            "generation": pulse.generation,
            "phase": pulse.phase,
            "samples": pulse.samples,
            "passes": pulse.lanes,
            "rss_bytes": sum(rss_bytes for _, rss_bytes in (usage, *limbs)),
            **self._own_memory((life.pid, *life.limbs)),
            **_device_memory(pulse),
            "cpu_s": sum(cpu_s for cpu_s, _ in (usage, *limbs)),
            "seconds": {group: round(spent, 6) for group, spent in seconds.items() if spent},
            "bytes": {name: sent for name, sent in zip(OPERATIONS, pulse.sent_bytes, strict=True) if sent},
        }

    def _own_memory(self, pids: Sequence[int]) -> dict[str, int]:
        """Memory of these processes, shared pages divided among those who share them; from half of `_OWN_S` on."""
        now_s = time.monotonic()
        for pid in pids:
            due_s, size = self._own.get(pid, (now_s + _OWN_S / 2, 0))
            self._own[pid] = (now_s + _OWN_S, own_memory(pid) or size) if due_s <= now_s else (due_s, size)
        sizes = [self._own[pid][1] for pid in pids]
        return {"pss_bytes": sum(sizes)} if all(sizes) else {}

    def _run(self) -> None:
        due_s = time.monotonic()
        closed = False
        while not closed:
            self._write()
            due_s = max(due_s + self._interval_s, time.monotonic())
            closed = self._closed.wait(max(0.0, due_s - time.monotonic()))
        self._write()

    def _write(self) -> None:
        line, file = self.line(time.time_ns()), self._file
        if line["workers"]:
            if file.dropped:
                line["dropped"] = file.dropped
            if file.write(json.dumps(line, separators=(",", ":")).encode() + b"\n"):
                file.dropped = 0
            file.close()


def _device_memory(pulse: Pulse) -> dict[str, int]:
    if not pulse.reserved_bytes:
        return {}
    return {"device_allocated_bytes": pulse.allocated_bytes, "device_reserved_bytes": pulse.reserved_bytes}


def rotate(path: Path, most_files: int) -> None:
    """Rename `x.jsonl` to `x.1.jsonl`, that to `x.2.jsonl`, and so on; the oldest goes. Raises: OSError."""
    names = [path] + [path.with_name(f"{path.stem}.{k}{path.suffix}") for k in range(1, most_files)]
    for older, newer in zip(reversed(names), reversed(names[:-1]), strict=False):
        with contextlib.suppress(FileNotFoundError):
            newer.rename(older)


def own_memory(pid: int) -> int:
    """Bytes that a process has, each shared page divided by the number of those who share it (PSS); 0 if unknown."""
    try:
        rows = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except (OSError, ValueError):
        return 0
    return next((int(row.split()[1]) * 1024 for row in rows if row.startswith("Pss:")), 0)


def process_usage(pid: int) -> tuple[float, int] | None:
    """(CPU seconds, resident bytes) of a process; None if it is gone. Linux, from /proc; see proc(5)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (OSError, ValueError):
        return None
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S, int(fields[21]) * _PAGE_BYTES
