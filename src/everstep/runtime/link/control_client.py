"""The client's end of a control connection: a daemon thread that reconnects for ever.

Workers and agents share it because both need the same: sending must never hold up training, messages survive a
coordinator that is away, and every new connection begins with a hello that states the whole truth again.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from everstep.base.doors import at_port
from everstep.base.errors import EverstepError, ProtocolError
from everstep.base.plan import Plan
from everstep.base.readable import readable
from everstep.protocol.lease.terms import Terms
from everstep.protocol.messages import AnyMessage, Heartbeat, JobEnded, Progress, TermBegun, decode, encode
from everstep.protocol.telling import Listener
from everstep.runtime.link.address import read_address
from everstep.runtime.link.handshake import Seals
from everstep.runtime.link.interfaces import found_at
from everstep.runtime.link.silence import CONTROL_SILENT_S, notice_silence
from everstep.runtime.link.tls import Tls
from everstep.runtime.link.wire import HANDSHAKE_TIMEOUT_S, FrameReader, frame, handshake_client, sealed, secured
from everstep.runtime.link.word_of_head import HeadReached
from everstep.runtime.process import Inbox

log = logging.getLogger(__name__)

FIRST_BACKOFF_S = 0.02
MAX_BACKOFF_S = 1.0
MAX_QUEUED = 10_000
SAY_EVERY_S = 10.0
_RECEIVE_BYTES = 1 << 18
_LOOK_MS = 500
_PASSING = (Progress, Heartbeat)


CoordinatorPlace = str | os.PathLike[str] | tuple[str, int]
"""Place of the coordinator: the path of coordinator.json, or a fixed (host, port)."""
FirstWords = AnyMessage | tuple[AnyMessage, Plan | None]
"""First message; a worker's comes with the plan that it names, so that the next plan can be sent as a change of it."""


class Unheard:
    """Says now and then that a worker waits for a coordinator and none is there. Pure."""

    def __init__(self) -> None:
        self._since_s: float | None = None
        self._said_s = 0.0

    def look(self, connected: bool, now_s: float) -> str:
        """Words to log while waiting, "" for none."""
        if connected:
            self._since_s = None
            return ""
        if self._since_s is None:
            self._since_s = self._said_s = now_s
        if now_s - self._said_s < SAY_EVERY_S:
            return ""
        self._said_s = now_s
        away_s = now_s - self._since_s
        return f"no coordinator has answered for {away_s:.0f} s: this worker waits for one to decide how to go on"


class AnnouncedPlace:
    """Address of the coordinator: a fixed (host, port), or the content of a file, which is read when it has changed.
    tried: the address that was read last, "" before."""

    def __init__(self, said: CoordinatorPlace) -> None:
        self._said = said
        self._seen = (0, 0)
        self.tried = ""

    def follow(self, path: str | os.PathLike[str]) -> None:
        """Read the address from this file from now on. Thread-safe."""
        self._said = path

    def read(self) -> tuple[str, int]:
        """The present address. Raises: OSError, ProtocolError if there is none."""
        place = self._said if isinstance(self._said, tuple) else self._in_file(Path(self._said))
        self.tried = at_port(*place)
        return place

    def _in_file(self, path: Path) -> tuple[str, int]:
        self._seen = self._signature()
        found = read_address(path)
        return found.host, found.port

    def changed(self) -> bool:
        """Whether the file was written since it was read last."""
        return self._signature() != self._seen

    def look(self, peer: tuple[str, int]) -> None:
        """Compare the address with the other end's. Raises: EverstepError if another coordinator has announced itself;
        the one at the other end may be frozen, or not know that it was deposed."""
        if not self.changed() or self._signature() == (0, 0):
            return
        with contextlib.suppress(OSError, ProtocolError):
            where = self.read()
            if where != peer:
                raise _Replaced(f"the coordinator is at {at_port(*where)} now")

    def _signature(self) -> tuple[int, int]:
        if isinstance(self._said, tuple):
            return self._seen
        try:
            found = os.stat(self._said)
        except OSError:
            return (0, 0)
        return (found.st_ino, found.st_mtime_ns)


class _Replaced(EverstepError):
    """Another coordinator has taken the place of this one."""


class FrameQueue:
    """Frames that wait until a connection takes them, and how much of the first one it has taken. Not thread-safe."""

    def __init__(self) -> None:
        self._queue: deque[tuple[bytes, bool]] = deque()  # (frame, passing)
        self._leaving = b""  # the first frame, as this connection is taking it
        self._offset = 0  # number of its bytes already taken

    def __len__(self) -> int:
        return len(self._queue)

    def add(self, data: bytes, passing: bool) -> None:
        """Add a frame. A full queue drops a passing frame that has not begun to leave, or this one if it passes."""
        if len(self._queue) < MAX_QUEUED or self._make_room() or not passing:
            self._queue.append((data, passing))

    def pump(self, sock: socket.socket, seals: Seals) -> None:
        """Hand the kernel as many bytes as it takes at once."""
        while self._queue:
            self._leaving = self._leaving or sealed(seals, self._queue[0][0])
            try:
                self._offset += sock.send(memoryview(self._leaving)[self._offset :])
            except OSError:
                return  # it is full, or broken: the thread sees that when it reads
            if self._offset < len(self._leaving):
                return
            self._leaving, self._offset = b"", 0
            self._queue.popleft()

    def lost(self) -> None:
        """The connection has ended: passing frames are dropped, the others wait for the next connection."""
        self._leaving, self._offset = b"", 0
        self._queue = deque(item for item in self._queue if not item[1])

    def _make_room(self) -> bool:
        for index, (_data, passing) in enumerate(self._queue):
            if passing and (index > 0 or not self._leaving):
                del self._queue[index]
                return True
        return False


class Ear:
    """Passes on messages of one connection after the other, unless a deposed coordinator sent them. `ended`: a message
    said that the job is over. `refused`: this connection's coordinator was deposed. `heard_s`: time of the last
    message, monotonic."""

    def __init__(self, on_message: Callable[[AnyMessage], None]) -> None:
        self._on_message = on_message
        self._terms = Terms()
        self.ended = self.refused = False
        self.heard_s = time.monotonic()

    @property
    def term(self) -> int:
        """The newest term in which any coordinator has spoken."""
        return self._terms.term

    def connected(self) -> None:
        """Another connection begins."""
        self._terms.connected()
        self.refused = False

    def hear(self, message: AnyMessage) -> None:
        """Pass on a message. Raises: ProtocolError if its sender was deposed."""
        self.heard_s = time.monotonic()
        refused = self._terms.refusal(message)
        if refused:
            self.refused = True
            raise ProtocolError(f"this coordinator was deposed: {refused}")
        if isinstance(message, TermBegun):
            return
        self.ended = self.ended or isinstance(message, JobEnded)
        try:
            self._on_message(message)
        except Exception:
            log.exception("handling %s failed", type(message).__name__)


@dataclass(frozen=True)
class _Hearing:
    """The incoming side of one connection."""

    sock: socket.socket
    reader: FrameReader
    heard: Listener
    ear: Ear

    def take(self) -> None:
        """Pass on what has come. Raises: BlockingIOError if nothing has; ProtocolError at the end."""
        data = self.sock.recv(_RECEIVE_BYTES)
        if not data:
            raise ProtocolError("the coordinator ended the connection")
        for body in self.reader.feed(data):
            message = self.heard.take(decode(body))
            if message is not None:
                self.ear.hear(message)

    def take_rest(self) -> None:
        """The connection is broken: what the other end said before counts, for example why it sends this one away."""
        with contextlib.suppress(OSError, EverstepError):
            while True:
                self.take()


class ControlClient:
    """A control connection to the coordinator that is renewed whenever it breaks.

    address: place of the coordinator; a file is read again at each attempt. key: the role's token. hello: called in the
    client's thread at each connect; its message goes out before all others. on_message: called in the client's thread
    for each message that arrives; it must not block for long. An exception in it is logged and does not end the
    connection. on_connected: called in the client's thread with True after each hello, with False when the connection
    is lost. tls: certificate for a coordinator whose connections need TLS.

    Messages that could not be sent wait. Passing ones (Progress, Heartbeat) are dropped when the connection is lost and
    when the queue is full; the others are kept. Messages already handed to a connection that then broke may be lost:
    the hello has to state everything that matters.
    """

    def __init__(
        self,
        address: CoordinatorPlace,
        key: bytes,
        role: str,
        name: str,
        hello: Callable[[], FirstWords],
        on_message: Callable[[AnyMessage], None],
        on_connected: Callable[[bool], None] | None = None,
        tls: Tls | None = None,
    ) -> None:
        self._where = AnnouncedPlace(address)
        self._own = (key, role, name)
        self._tls = tls
        self._hello = hello
        self._ear = Ear(on_message)
        self._on_connected = on_connected
        self._outbox = FrameQueue()
        self._drained = threading.Condition(threading.Lock())  # protects the outbox, the line, the waker's end
        self._line: tuple[socket.socket, Seals] | None = None
        self._closing = False
        self._connected = threading.Event()
        self._cut = (0.0, False)  # end of the fault, and whether it ends the connection
        self._waker: Inbox[None] = Inbox()
        self.connects = 0
        self._thread = threading.Thread(target=self._run, name=f"control-{role}-{name}", daemon=True)
        self._thread.start()

    @property
    def connected(self) -> bool:
        """Whether a connection stands and has said hello."""
        return self._connected.is_set()

    @property
    def tried(self) -> str:
        """The address that was tried last, as "host:port"; "" if none is known yet."""
        return self._where.tried

    @property
    def term(self) -> int:
        """The newest term in which any coordinator has spoken."""
        return self._ear.term

    @property
    def heard_s(self) -> float:
        """Time of the coordinator's last message, monotonic; before the first, that of this client's start."""
        return self._ear.heard_s

    @property
    def head(self) -> HeadReached | None:
        """The head that is connected, None if none is. Thread-safe."""
        with self._drained, contextlib.suppress(OSError):
            if self._line is not None:
                host, port = self._line[0].getpeername()[:2]
                return HeadReached(host, port, self.term)
        return None

    def wait_connected(self, timeout_s: float) -> bool:
        """Returns False if there is no connection after `timeout_s`."""
        return self._connected.wait(timeout_s)

    def send(self, message: AnyMessage) -> None:
        """Send now if the socket takes it, else keep the message for the client's thread. Never blocks. Thread-safe."""
        data = frame(encode(message), deflate=True)
        passing = isinstance(message, _PASSING)
        with self._drained:
            if self._closing or (passing and self._line is None):
                return
            self._outbox.add(data, passing)
            self._pump()
            waiting = len(self._outbox) > 0
        if waiting:
            self._wake()

    def follow(self, path: str | os.PathLike[str]) -> None:
        """Read the coordinator's address from this file from now on, and look at it now. Thread-safe."""
        self._where.follow(path)
        self._wake()

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything queued was handed to the kernel. Returns False after `timeout_s`."""
        with self._drained:
            return self._drained.wait_for(lambda: not self._outbox or self._closing, timeout_s)

    def cut(self, for_s: float, breaks: bool) -> None:
        """A scripted fault: for so many seconds nothing passes in either direction. Thread-safe.

        breaks: the connection ends, and none can be made meanwhile; else it falls silent, and goes on afterwards.
        """
        with self._drained:
            self._cut = (time.monotonic() + for_s, breaks)
        self._wake()

    def _cut_s(self) -> float:
        """Seconds that the scripted fault still lasts; not above 0 if there is none."""
        return self._cut[0] - time.monotonic() if self._cut[0] else 0.0

    def close(self, flush_s: float = 1.0) -> None:
        """End the connection, after giving queued messages `flush_s` to leave."""
        if flush_s > 0 and threading.current_thread() is not self._thread:
            self.flush(flush_s)
        with self._drained:
            self._closing = True
            if self._line is not None:
                with contextlib.suppress(OSError):
                    self._line[0].shutdown(socket.SHUT_RDWR)
            self._drained.notify_all()
        self._wake()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=5.0)

    # ---- the client's thread

    def _run(self) -> None:
        backoff_s, complained = FIRST_BACKOFF_S, ""
        while not self._closing:
            if self._cut_s() > 0:
                self._pause(self._cut_s())
                continue
            try:
                sock, seals, heard = self._connect()
            except (OSError, EverstepError) as error:
                complained = _complain(error, complained)
                self._pause(backoff_s)
                backoff_s = min(MAX_BACKOFF_S, backoff_s * 2)
                continue
            complained = ""
            self._ear.connected()
            hearing = _Hearing(sock, FrameReader(seals), heard, self._ear)
            try:
                self._talk(sock, seals, hearing.take)
            except (OSError, EverstepError) as error:
                if isinstance(error, OSError) and self._cut_s() <= 0:
                    hearing.take_rest()
                if not self._ear.ended:  # after the end of the job that is right
                    log.info("control connection lost: %s", error)
            finally:
                self._disconnect(sock)
            backoff_s = min(MAX_BACKOFF_S, backoff_s * 2) if self._ear.refused else FIRST_BACKOFF_S
            if not self._closing:
                self._pause(backoff_s)
        with self._drained:
            self._waker.close()

    def _connect(self) -> tuple[socket.socket, Seals, Listener]:
        sock = _called(self._where.read(), lambda: self._closing or self._where.changed())
        if sock.getsockname() == sock.getpeername():
            sock.close()
            raise ProtocolError("connected to itself: no process listens there")
        sock = secured(sock, self._tls)
        try:
            notice_silence(sock, CONTROL_SILENT_S)
            seals = handshake_client(sock, *self._own)
            said = self._hello()
            message, plan = said if isinstance(said, tuple) else (said, None)
            sock.sendall(sealed(seals, frame(encode(message), deflate=True)))
            sock.setblocking(False)
        except BaseException:
            sock.close()
            raise
        return sock, seals, Listener(plan)

    def _talk(self, sock: socket.socket, seals: Seals, hear: Callable[[], None]) -> None:
        with self._drained:
            self._line = (sock, seals)
            self._pump()
        self.connects += 1
        self._connected.set()
        if self._on_connected is not None:
            self._on_connected(True)
        poller = select.poll()
        poller.register(self._waker.fd, select.POLLIN)
        while not self._closing:
            if self._cut_s() > 0:
                if self._cut[1]:
                    raise ProtocolError("cut by a scripted fault")
                self._pause(self._cut_s())
                continue
            wants_out = select.POLLOUT if self._outbox else 0
            poller.register(sock, select.POLLIN | wants_out)
            poller.poll(_LOOK_MS)
            self._waker.take()
            self._where.look(sock.getpeername()[:2])
            with self._drained:
                self._pump()
            if self._cut_s() > 0:
                continue
            with contextlib.suppress(BlockingIOError):
                hear()

    def _disconnect(self, sock: socket.socket) -> None:
        with self._drained:
            self._line = None
            self._outbox.lost()
            self._drained.notify_all()
        sock.close()
        if self._connected.is_set():
            self._connected.clear()
            if self._on_connected is not None:
                self._on_connected(False)

    def _pump(self) -> None:
        """With the lock held: hand the kernel as many bytes as it takes at once."""
        if self._line is not None and self._cut_s() <= 0:
            self._outbox.pump(*self._line)
        if not self._outbox:
            self._drained.notify_all()

    # ---- waking and waiting

    def _wake(self) -> None:
        with self._drained:
            self._waker.put(None)

    def _pause(self, seconds: float) -> None:
        """Wait, unless closing or a new address ends it; a message that is queued meanwhile does not."""
        end = time.monotonic() + seconds
        while not self._closing and (left := end - time.monotonic()) > 0:
            readable([self._waker.fd], min(left, FIRST_BACKOFF_S))
            self._waker.take()
            if self._where.changed():
                return


def _called(place: tuple[str, int], unwanted: Callable[[], bool]) -> socket.socket:
    """A blocking connection to this place. unwanted: whether another place is to be tried by now; the kernel of a lost
    host does not refuse. Raises: OSError."""
    end_s, (*others, last) = time.monotonic() + HANDSHAKE_TIMEOUT_S, found_at(*place)
    for one in others:  # a name may have addresses at which the head does not listen
        with contextlib.suppress(OSError):
            return _called_at(*one, unwanted, end_s)
    return _called_at(*last, unwanted, end_s)


def _called_at(
    family: socket.AddressFamily, address: tuple[str, int], unwanted: Callable[[], bool], end_s: float
) -> socket.socket:
    sock = socket.socket(family)
    try:
        sock.setblocking(False)
        error = sock.connect_ex(address)
        if error == errno.EINPROGRESS:
            poller = select.poll()
            poller.register(sock, select.POLLOUT)
            while not poller.poll(FIRST_BACKOFF_S * 1000):
                if unwanted() or time.monotonic() > end_s:
                    raise TimeoutError(errno.ETIMEDOUT, "timed out")
            error = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            raise OSError(error, os.strerror(error))
        sock.settimeout(HANDSHAKE_TIMEOUT_S)
    except BaseException:
        sock.close()
        raise
    return sock


def _complain(error: Exception, before: str) -> str:
    """Log that there is no connection, unless `before` is the same complaint. Returns the complaint."""
    text = f"{type(error).__name__}: {error}"
    if text != before:
        level = logging.WARNING if isinstance(error, EverstepError) else logging.INFO
        log.log(level, "no control connection yet: %s", error)
    return text
