"""A loader process: forked from the training process, it makes batches ahead of time and dies with its parent.

Forked, not started afresh, because datasets need not be picklable and nothing has to be imported or read again. The
parent has other threads, so a fork may catch a lock in a bad moment: the child proves that it works before it counts,
and is replaced if it does not.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import os
import pickle
import signal
import socket
import stat
import struct
import sys
import traceback
import warnings
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from everstep.base.errors import ConfigError, EverstepError, TaskError
from everstep.base.readable import readable
from everstep.data.batch import pack, unpack
from everstep.exact.seeding import seed_all

_ASK, _CANCEL, _ASK_LAST = 0, 1, 2
_REQUEST = struct.Struct("<BQqq")
"""A request: kind (ask or cancel), ticket, step, lane."""
_REPLY = struct.Struct("<BQqq")
"""A reply: whether it failed, ticket, size in bytes, offset of the pickle; the batch's file descriptor comes along."""
_READY_TICKET = 0
_READY_LIMIT_S = 10.0
_ATTEMPTS = 3
_PR_SET_PDEATHSIG = 1

_libc = ctypes.CDLL(None, use_errno=True)


class Failure(NamedTuple):
    """A batch that could not be made: one line for the user, and the traceback in the loader process. refused: the
    dataset is not one that a job can be trained on."""

    message: str
    trace: str
    refused: bool = False

    def error(self) -> EverstepError:
        error = ConfigError(self.message) if self.refused else TaskError(self.message)
        error.add_note(f"In a loader process:\n{self.trace}")
        return error


class LoaderDied(Exception):
    """The process is gone; `how` says what ended it."""

    def __init__(self, how: str) -> None:
        super().__init__(how)
        self.how = how


class LoaderProcess:
    """One forked process that answers requests in order. `load(step, lane)` runs there and returns a batch.

    It must be created by a thread that lives as long as the loader is needed: the process ends with that thread.

    Raises: TaskError if three processes in a row do not come up.
    """

    def __init__(self, load: Callable[[int, int], Any]) -> None:
        self.pid = 0
        for _ in range(_ATTEMPTS):
            self._start(load)
            if readable([self._socket.fileno()], _READY_LIMIT_S):
                try:
                    self.receive()
                    return
                except LoaderDied:
                    continue
            self.close()
        raise TaskError(f"{_ATTEMPTS} loader processes did not come up: set loader.workers=0 to load without them")

    def _start(self, load: Callable[[int, int], Any]) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sys.stdout.flush()
        sys.stderr.flush()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            parent, pid = os.getpid(), os.fork()
        if pid == 0:
            _run_child(parent, theirs, load)
        theirs.close()
        self.pid, self._socket = pid, ours

    def fileno(self) -> int:
        """Descriptor that is readable when a reply is there or the process has died."""
        return self._socket.fileno()

    def ask(self, ticket: int, step: int, lane: int, *, last: bool = False) -> None:
        """Request a batch. last: the process ends once it has answered; the answer stays. Raises: LoaderDied."""
        self._send(_REQUEST.pack(_ASK_LAST if last else _ASK, ticket, step, lane))

    def cancel(self, ticket: int) -> None:
        """Withdraw a request; the batch may still come. Raises: LoaderDied."""
        self._send(_REQUEST.pack(_CANCEL, ticket, 0, 0))

    def _send(self, message: bytes) -> None:
        try:
            self._socket.sendall(message)
        except OSError as error:
            raise LoaderDied(self._reap()) from error

    def receive(self) -> tuple[int, Any]:
        """Wait for a reply: (ticket, batch or `Failure`). Raises: LoaderDied."""
        try:
            message, descriptors, _, _ = socket.recv_fds(self._socket, _REPLY.size, 1)
        except OSError as error:
            raise LoaderDied(self._reap()) from error
        if not message:
            raise LoaderDied(self._reap())
        failed, ticket, size, start = _REPLY.unpack(message)
        result = unpack(descriptors[0], size, start)
        return ticket, Failure(*result) if failed else result

    def _reap(self) -> str:
        self._socket.close()
        pid, self.pid = self.pid, 0
        try:
            _, status = os.waitpid(pid, 0)
        except ChildProcessError:
            return "an unknown cause"
        code = os.waitstatus_to_exitcode(status)
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    def close(self) -> None:
        """End the process at once."""
        if self.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            self._reap()


def _run_child(parent: int, channel: socket.socket, load: Callable[[int, int], Any]) -> None:
    code = 1
    try:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() == parent:
            _serve(channel, load, _detach(channel.fileno()))
        code = 0
    except ConnectionError:
        pass  # the parent is gone, or wants nothing more
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _detach(keep: int) -> dict[int, int]:
    """Let go of the parent's signals, and of its sockets and pipes, whose other ends wait for them to close. Returns
    its places in files, by descriptor.

    Their numbers stay taken (by the null device): Python objects of the parent that know them may still be collected
    here, and would close a new file of the same number.
    """
    with contextlib.suppress(ValueError):
        signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_DFL)
    null, places = os.open(os.devnull, os.O_RDWR), {}
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        descriptor = int(name)
        if descriptor <= 2 or descriptor in (keep, null):
            continue
        with contextlib.suppress(OSError):  # it is that of the listing
            mode = os.fstat(descriptor).st_mode
            if stat.S_ISSOCK(mode) or stat.S_ISFIFO(mode):
                os.dup2(null, descriptor)
            elif stat.S_ISREG(mode):
                places[descriptor] = os.lseek(descriptor, 0, os.SEEK_CUR)
    gc.freeze()
    return places


def _open_anew(descriptor: int, place: int) -> None:
    """Give a file that is read a place of its own: else whichever process reads moves both."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    if flags & os.O_ACCMODE == os.O_WRONLY:
        return
    path = f"/proc/self/fd/{descriptor}"
    try:
        try:
            own = os.open(path, flags & (os.O_ACCMODE | os.O_APPEND | os.O_DIRECT))
        except OSError:
            own = os.open(path, flags & os.O_DIRECT)
    except OSError as error:
        print(f"a loader process shares its place in {os.readlink(path)} with its parent: {error}", file=sys.stderr)
        return
    try:
        os.lseek(own, place, os.SEEK_SET)
        os.dup2(own, descriptor, os.get_inheritable(descriptor))
    finally:
        os.close(own)


def _serve(channel: socket.socket, load: Callable[[int, int], Any], places: dict[int, int]) -> None:
    torch.set_num_threads(1)
    seed_all(0)
    _reply(channel, _READY_TICKET, torch.zeros(1), failed=False)
    for descriptor, place in places.items():  # that of thousands of files on a network disk takes long
        with contextlib.suppress(OSError):  # it cannot be moved, as some that the system makes up
            _open_anew(descriptor, place)
    queue: deque[tuple[int, int, int]] = deque()
    last = False
    while queue or not last:
        while not queue or readable([channel.fileno()], 0.0):
            message = channel.recv(_REQUEST.size)
            if not message:
                return
            what, ticket, step, lane = _REQUEST.unpack(message)
            if what == _CANCEL:
                queue = deque(job for job in queue if job[0] != ticket)
                continue
            last = last or what == _ASK_LAST
            queue.append((ticket, step, lane))
        ticket, step, lane = queue.popleft()
        _answer(channel, ticket, load, step, lane)


def _answer(channel: socket.socket, ticket: int, load: Callable[[int, int], Any], step: int, lane: int) -> None:
    try:
        result = load(step, lane)
    except Exception as error:
        known = isinstance(error, TaskError | ConfigError)
        message = str(error) if known else f"{type(error).__name__}: {error}"
        _reply(channel, ticket, (message, traceback.format_exc(), isinstance(error, ConfigError)), failed=True)
        return
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    try:
        _reply(channel, ticket, result, failed=False)
    except (pickle.PicklingError, TypeError, AttributeError, ValueError, RecursionError) as error:
        message = f"a batch cannot be sent from a loader process ({error}): set loader.workers=0, or change collate"
        _reply(channel, ticket, (message, traceback.format_exc()), failed=True)


def _reply(channel: socket.socket, ticket: int, result: Any, *, failed: bool) -> None:
    descriptor, size, start = pack(result)
    try:
        socket.send_fds(channel, [_REPLY.pack(failed, ticket, size, start)], [descriptor])
    finally:
        os.close(descriptor)
