"""The fork server: a process that has imported torch once and forks a worker per request in milliseconds, as a cell of
one process or more.

`python -m everstep.runtime.host.fork_server --fd N --board-fd M --preload a,b,c`. It starts no threads and does no
tensor work, so what it forks is as good as fresh. Over the inherited socket it speaks JSON lines with its agent:

    <- {"op": "start", "entry": "module:function", "context": {...}}
                                              with two descriptors per rank, which become its stdout and stderr, and
                                              the end of a pipe: when the other is closed, the worker is killed
    <- {"op": "call", "entry": "module:function", "question": ...}     also before it is ready
    <- {"op": "packages", "names": ["module:", "module:name", ...]}    imported, too; sent before a call, and unheard
                                              once it is ready
    <- {"op": "ping"}
    <- {"op": "log", "path"}                                           where its own output goes from now on
    -> {"op": "ready", "seconds", "threads", "skipped": [...]}
    -> {"op": "pong"}
    -> {"op": "answer", "answer": ...}                                 from the fork that was called
    -> {"op": "called", "status": wait status}                         that fork has ended
    -> {"op": "started", "worker_id", "incarnation", "pids": the head's first}
    -> {"op": "exited", "worker_id", "incarnation", "cell_rank", "status": wait status, "unix_ns"}
                                              once per worker, when none of its ranks is left; whose death ended it

The death of one rank ends the others of its cell; what dead workers leave running, it ends. The end of the socket ends
the server, and its children with it. If it dies itself, its workers go on: they are their agent's.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import io
import json
import logging
import os
import pkgutil
import random
import select
import signal
import socket
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from everstep.base.below import APPEND, open_below
from everstep.base.cause import Why
from everstep.base.cell_keys import MAX_RANKS
from everstep.base.errors import cause_of, one_line
from everstep.runtime.host.board import Board
from everstep.runtime.host.stacks import show_on_signal
from everstep.runtime.link.context import WorkerContext
from everstep.runtime.process import (
    adopt_orphans,
    children,
    close_descriptors,
    die_with_parent,
    die_with_writer,
    outlives_workers,
    own_command,
    thread_count,
)

log = logging.getLogger(__name__)


def preload(names: list[str], between: Callable[[], None] = lambda: None) -> list[str]:
    """Import modules that workers will need, and call `between` after each. Returns failures with reasons.

    "module:name" imports a name of it, "module:" the module. The garbage collector leaves alone what they make: looking
    for garbage there took a fifth of the time.
    """
    skipped = []
    for name in names:
        gc.disable()
        try:
            module, _, part = name.partition(":")
            if part and not hasattr(importlib.import_module(module), part):
                module = f"{module}.{part}"
            importlib.import_module(module)
        except (Exception, SystemExit) as error:
            skipped.append(f"{name}: {type(error).__name__}: {error}")
        gc.freeze()
        gc.enable()
        between()
    return skipped


class ForkServer:
    """The single-threaded loop around the agent's socket and SIGCHLD."""

    def __init__(self, sock: socket.socket, board_fd: int, again: Callable[[bytes], None]) -> None:
        """again: begins this process anew, without packages and with what it has heard but not done."""
        self._sock = sock
        self._board_fd = board_fd
        self._again = again
        self._children: dict[int, ForkedCell] = {}
        self._called: set[int] = set()
        self._ready = self._over = False
        self._lines: deque[bytes] = deque()
        self._buffer = b""
        self._skipped: list[str] = []
        self._outputs: deque[int] = deque()
        self._signal_r, self._signal_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._poller = select.poll()
        for readable in (sock.fileno(), self._signal_r):
            self._poller.register(readable, select.POLLIN)
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        signal.set_wakeup_fd(self._signal_w, warn_on_full_buffer=False)

    def tell(self, **message: Any) -> None:
        self._sock.sendall(json.dumps(message).encode() + b"\n")

    def ready(self, seconds: float, skipped: list[str]) -> None:
        """All is imported, except for these: from now on workers may be asked for."""
        self._ready = True
        self.tell(op="ready", seconds=round(seconds, 3), threads=thread_count(), skipped=[*skipped, *self._skipped])

    def run(self) -> None:
        """Serve until the agent's end of the socket closes."""
        while not self._over:
            self._serve(None)

    def between_imports(self) -> None:
        """Serve calls between imports: they need not wait for all imports, and import their own modules."""
        self._serve(0)
        if self._over:
            raise ConnectionError("the agent has gone")

    def _serve(self, timeout_ms: int | None) -> None:
        for fd, _events in self._poller.poll(timeout_ms):
            if fd == self._signal_r:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._signal_r, 4096)
                self._reap()
            elif not self._over:
                self._over = not self._requests()

    def end_children(self) -> None:
        """SIGKILL all children that still run, and wait for their end."""
        while pids := children():
            _kill_all(pids)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(-1, 0)

    def _requests(self) -> bool:
        data, fds, _, _ = socket.recv_fds(self._sock, 1 << 16, 2 * MAX_RANKS + 1, socket.MSG_CMSG_CLOEXEC)
        self._outputs.extend(fds)
        self.take(data)
        return bool(data)

    def take(self, data: bytes) -> None:
        """Do what is asked for."""
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        self._lines.extend(lines)
        while self._lines:
            request = json.loads(self._lines.popleft())
            if request["op"] == "start":
                self._start(request)
            elif request["op"] == "call":
                self._call(request)
            elif request["op"] == "packages":
                self.import_packages(request["names"])
            elif request["op"] == "ping":
                self.tell(op="pong")
            elif request["op"] == "log":
                redirect_output(Path(request["path"]))

    def import_packages(self, names: list[str]) -> None:
        """Import packages that the user's code begins with. If they leave a thread or an open file behind, which no
        fork may share, or draw random numbers, this process begins anew without them."""
        if self._ready or not names:
            return
        while self._called and not self._over:
            self._serve(None)
        before = _traces()
        self._skipped = preload(names)
        if _traces() != before:
            self._again(b"\n".join([*self._lines, self._buffer]))

    def _call(self, request: dict[str, Any]) -> None:
        pid = os.fork()
        if pid == 0:
            self._answer(request)
        self._called.add(pid)

    def _start(self, request: dict[str, Any]) -> None:
        context = WorkerContext(**request["context"])
        size = context.cell_size
        outputs = [(self._outputs.popleft(), self._outputs.popleft()) for _ in range(size)]
        lifeline = self._outputs.popleft()
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(size - 1)]
        ends = [[ours.fileno() for ours, _ in pairs], *([theirs.fileno()] for _, theirs in pairs)]
        ranks: dict[int, int] = {}
        for cell_rank in range(size):
            pid = os.fork()
            if pid == 0:
                own = replace(context, cell_rank=cell_rank, cell_fds=ends[cell_rank])
                self._become_worker(request["entry"], own, outputs[cell_rank], lifeline)
            ranks[pid] = cell_rank
        for end in (end for pair in pairs for end in pair):
            end.close()
        for fd in (lifeline, *(fd for pair in outputs for fd in pair)):
            os.close(fd)
        cell = ForkedCell(context.worker_id, context.incarnation, ranks)
        self._children.update(dict.fromkeys(ranks, cell))
        self.tell(op="started", worker_id=context.worker_id, incarnation=context.incarnation, pids=list(ranks))

    def _reap(self) -> None:
        dead: dict[int, dict[int, int]] = {}
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            if pid in self._called:
                self._called.remove(pid)
                self.tell(op="called", status=status)
            elif pid in self._children:  # otherwise an adopted orphan
                dead.setdefault(id(self._children[pid]), {})[pid] = status
        for statuses in dead.values():
            self._bury(statuses)
        if dead:
            self._end_orphans()

    def _bury(self, statuses: dict[int, int]) -> None:
        """Take in deaths in one cell: end the rest of it, or report that nothing is left."""
        *_, cell = (self._children.pop(pid) for pid in statuses)
        _kill_all(cell.died(statuses, time.time_ns()))
        if not cell.ranks:
            self.tell(op="exited", **{name: value for name, value in vars(cell).items() if name != "ranks"})

    def _end_orphans(self) -> None:
        known = self._children.keys() | self._called
        _kill_all(pid for pid in children() if pid not in known and not outlives_workers(pid))

    def _answer(self, request: dict[str, Any]) -> None:
        """In a child: call the entry point with the question, send back what it returns, and never return."""
        code = 1
        try:
            _leave_server_behind()
            redirect_output(Path(os.devnull))
            self.tell(op="answer", answer=pkgutil.resolve_name(request["entry"])(request["question"]))
            code = 0
        finally:
            os._exit(code)

    def _become_worker(self, entry: str, context: WorkerContext, outputs: tuple[int, int], lifeline: int) -> None:
        """In the child: leave the server's state behind, run the entry point, and never return."""
        code = 1
        try:
            _reset_signals()
            lifeline = die_with_writer(lifeline)
            for number, fd in enumerate(outputs, 1):
                os.dup2(fd, number)
            if isinstance(sys.stdout, io.TextIOWrapper):
                sys.stdout.reconfigure(line_buffering=True, write_through=False)  # each print is one write
            close_descriptors({self._board_fd, lifeline, *context.cell_fds})
            show_on_signal(2)
            code = run_entry(entry, context)
            Board.attach(self._board_fd).row(context.worker_id, context.cell_rank).leave(code)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)


def _traces() -> tuple[Any, ...]:
    """What an import may leave behind in the process: threads, open files, random numbers that were drawn."""
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    drawn = random.getstate(), numpy and repr(numpy.random.get_state()), torch and torch.get_rng_state().tolist()
    return thread_count(), os.listdir("/proc/self/fd"), *drawn


def _kill_all(pids: Iterable[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


_SERVER_PID = os.getpid()


def _leave_server_behind() -> None:
    die_with_parent(_SERVER_PID)
    _reset_signals()


def _reset_signals() -> None:
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


def redirect_output(path: Path) -> None:
    """Append stdout and stderr to a file; if the disk refuses, drop them."""
    try:
        fd = open_below(path, APPEND, 1, make=True)
    except OSError:
        fd = os.open(os.devnull, os.O_WRONLY)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)


def run_entry(entry: str, context: WorkerContext) -> int:
    """Call "module:function" with the context. Returns the exit code; an exception goes to the log and last words."""
    try:
        result = pkgutil.resolve_name(entry)(context)
        code = result if isinstance(result, int) else 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else (0 if error.code is None else 1)
    except BaseException as error:
        text = one_line(f"{type(error).__name__}: {error}")
        log.critical("%s", text, exc_info=True)
        with contextlib.suppress(OSError):
            if not context.last_words_path.exists():  # otherwise the worker has said something better itself
                context.write_last_words(Why(cause_of(error), text))
        code = 1
    _leave_in_order()
    return code


def _leave_in_order() -> None:
    # os._exit skips the usual end of a process: flush, and end the helpers that multiprocessing started.
    multiprocessing_util = sys.modules.get("multiprocessing.util")
    end_helpers = getattr(multiprocessing_util, "_exit_function", lambda: None)
    for act in (end_helpers, logging.shutdown, sys.stdout.flush, sys.stderr.flush):
        with contextlib.suppress(Exception):
            act()


def main(argv: list[str] | None = None) -> int:
    """Entry point of the process."""
    parser = argparse.ArgumentParser(prog="everstep.runtime.host.fork_server")
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--board-fd", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--preload", required=True)
    parser.add_argument("--heard", type=int, default=-1)
    arguments = parser.parse_args(argv)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # the agent decides when it ends
    die_with_parent(arguments.parent)
    adopt_orphans()
    sock = socket.socket(fileno=arguments.fd)
    sock.set_inheritable(False)
    start = time.monotonic()
    names = [name for name in arguments.preload.split(",") if name]
    own, environment = [name for name in names if ":" not in name], dict(os.environ)

    def again(heard: bytes) -> None:
        kept = os.memfd_create("heard")
        os.write(kept, heard)
        options = {**vars(arguments), "preload": ",".join(own), "heard": kept}
        words = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
        for fd in (arguments.fd, arguments.board_fd, kept):
            os.set_inheritable(fd, True)
        command = own_command("everstep.runtime.host.fork_server", *words)
        os.execve(command[0], command, environment)

    fork_server = ForkServer(sock, arguments.board_fd, again)
    try:
        if arguments.heard >= 0:
            with open(arguments.heard, "rb") as heard:
                heard.seek(0)
                fork_server.take(heard.read())
        skipped = preload(own, fork_server.between_imports)
        fork_server.import_packages([name for name in names if name not in own])
        fork_server.ready(time.monotonic() - start, skipped)
        fork_server.run()
    except ConnectionError:
        pass
    fork_server.end_children()  # the agent is gone, or wants the workers ended; else they go on
    return 0


# ---- the death that ends a cell: the order in which ranks are found dead does not show who is to blame


#
@dataclass
class ForkedCell:
    """One life of a worker. ranks: by pid, the processes that have not been waited for.

    cell_rank, status, unix_ns: of the death that ended the cell; status None before. A limb that ends in order does not
    end the cell: it ends when its head lets go of it.
    """

    worker_id: int
    incarnation: int
    ranks: dict[int, int]
    cell_rank: int = 0
    status: int | None = None
    unix_ns: int = 0

    def died(self, statuses: Mapping[int, int], unix_ns: int) -> list[int]:
        """Take in processes found dead at once: wait statuses by pid. Returns the pids to kill because of that."""
        found = {self.ranks.pop(pid): status for pid, status in statuses.items()}
        if self.status is None:
            cell_rank = first_to_go(found)
            if cell_rank is None:
                return []
            self.cell_rank, self.status, self.unix_ns = cell_rank, found[cell_rank], unix_ns
        return list(self.ranks)


def first_to_go(statuses: Mapping[int, int]) -> int | None:
    """Rank that drew the others along, of ranks found dead at once (by wait status); None if none did.

    A head that leaves in order needs its limbs no more. Otherwise a death by signal is no reaction to another death; a
    head may raise because a limb has gone, while limbs leave quietly.
    """
    if statuses.get(0) == 0:
        return 0
    failed = sorted(cell_rank for cell_rank, status in statuses.items() if status != 0)
    signalled = [cell_rank for cell_rank in failed if os.WIFSIGNALED(statuses[cell_rank])]
    limbs = [cell_rank for cell_rank in failed if cell_rank > 0]
    return next(iter(signalled or limbs or failed), None)


if __name__ == "__main__":
    sys.exit(main())
