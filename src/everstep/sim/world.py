"""The simulated world: a virtual clock, processes that crash and freeze, and a network that is slow and breaks.

Apart from its inhabitants. Everything that happens comes from one heap of events and one seeded random generator, so a
seed replays exactly. Connections are like TCP: in order, without loss while they last. They may stall and break, and
messages under way are then lost. Different connections overtake each other freely.
"""

from __future__ import annotations

import heapq
import random
import zlib
from collections import Counter
from collections.abc import Callable
from math import inf
from typing import Any

US = 1_000
MS = 1_000_000
SECOND = 1_000_000_000

Act = Callable[..., None]


class World:
    """Virtual time, randomness, the trace, and broken links between hosts."""

    def __init__(self, seed: int, tracing: bool = False) -> None:
        self.rng = random.Random(seed)
        self.now_ns = 0
        self.tracing = tracing
        self.lines: list[str] = []
        self.events = 0
        self.digest = 0  # CRC-32 of all messages and reports, with their times
        self.slow_network = self.rng.random() < 0.25
        self._heap: list[tuple[int, int, Act, tuple[Any, ...]]] = []
        self._count = 0
        self._cuts: dict[tuple[str, str], int] = {}
        self._one_way: set[tuple[str, str]] = set()
        self._bad: dict[tuple[str, str], int] = {}
        self.connections: list[SimConnection] = []
        self.seen: Counter[tuple[str, str]] = Counter()  # counts by group and name

    def later(self, delay_ns: int, act: Act, *args: Any) -> None:
        self._count += 1
        at_ns = self.now_ns + delay_ns if delay_ns > 0 else self.now_ns
        heapq.heappush(self._heap, (at_ns, self._count, act, args))

    def run(self, until_ns: int, stop: Callable[[], bool]) -> bool:
        """Let time pass. Returns whether `stop` became true by then."""
        heap = self._heap
        while heap and heap[0][0] <= until_ns:
            self.now_ns, _, act, args = heapq.heappop(heap)
            self.events += 1
            act(*args)
            if stop():
                return True
        self.now_ns = max(self.now_ns, until_ns)
        return stop()

    def pending(self) -> list[Act]:
        """Calls that are still to come."""
        return [entry[2] for entry in self._heap]

    def log(self, who: str, what: str, *details: Any) -> None:
        if self.tracing:
            said = " ".join(str(d) for d in details)
            self.lines.append(f"{self.now_ns / MS:11.3f} {who:<12} {what} {said}".rstrip())

    def note(self, said: Any) -> None:
        """Add a message or a report to the digest."""
        self.digest = zlib.crc32(repr((self.now_ns, said)).encode(), self.digest)

    # ---- time

    def between(self, low_ns: int, high_ns: int) -> int:
        """A whole number, as `randint` draws it: without that function's checks, which cost more than the draw."""
        count = high_ns - low_ns + 1
        bits = count.bit_length()
        drawn = self.rng.getrandbits(bits)
        while drawn >= count:
            drawn = self.rng.getrandbits(bits)
        return low_ns + drawn

    def latency_ns(self) -> int:
        """Latency of one message: mostly a fraction of a millisecond, now and then very long."""
        draw = self.rng.random()
        if draw < 0.01 or (self.slow_network and draw < 0.05):
            return self.between(10 * MS, 60 * MS)
        return self.between(50 * US, (5 if self.slow_network else 1) * MS)

    # ---- the network

    def cut(self, a: str, b: str) -> None:
        """Let no packet pass between two hosts until `mend`."""
        self.log("network", "cut", a, b)
        self._cuts[_pair(a, b)] = self._cuts.get(_pair(a, b), 0) + 1

    def mend(self, a: str, b: str) -> None:
        pair = _pair(a, b)
        if pair not in self._cuts:
            return
        self._cuts[pair] -= 1
        if self._cuts[pair] <= 0:
            del self._cuts[pair]
            self.log("network", "mended", a, b)
            for connection in list(self.connections):
                connection.flush()

    def cut_one_way(self, a: str, b: str) -> None:
        """Lose packets from one host to another until `mend_one_way`."""
        self.log("network", "cut one way", a, b)
        self._one_way.add((a, b))

    def mend_one_way(self, a: str, b: str) -> None:
        if (a, b) in self._one_way:
            self.log("network", "mended one way", a, b)
            self._one_way.discard((a, b))
            for connection in list(self.connections):
                connection.flush()

    def passes(self, a: str, b: str) -> bool:
        """Whether packets from one host to another arrive."""
        if a == b or not (self._cuts or self._one_way):
            return True
        return not (_pair(a, b) in self._cuts or (a, b) in self._one_way)

    def reachable(self, a: str, b: str) -> bool:
        """Whether packets pass both ways: a connection needs that."""
        if a == b or not (self._cuts or self._one_way):
            return True
        return self.passes(a, b) and self.passes(b, a)

    def spoil(self, a: str, b: str) -> None:
        """Break every connection between two processes (by name), and each new one, until `unspoil`."""
        self.log("network", "bad link", a, b)
        self._bad[_pair(a, b)] = self._bad.get(_pair(a, b), 0) + 1
        for connection in list(self.connections):
            if connection.pair == _pair(a, b):
                connection.fail()

    def unspoil(self, a: str, b: str) -> None:
        if _pair(a, b) in self._bad:
            self.log("network", "good link", a, b)
            del self._bad[_pair(a, b)]

    def spoiled(self, a: str, b: str) -> bool:
        return _pair(a, b) in self._bad

    def mend_all(self) -> None:
        self._bad.clear()
        for a, b in sorted(self._one_way):
            self.mend_one_way(a, b)
        for a, b in list(self._cuts):
            self._cuts[(a, b)] = 1
            self.mend(a, b)


def _pair(a: str, b: str) -> tuple[str, str]:
    return (a, b) if a <= b else (b, a)


class Process:
    """A program that runs on a host, until it dies. While frozen it does nothing, and does all of it afterwards: a
    signal has stopped it, or (`starved`) it waits for a processor, or (`stuck`) for a lock. waited_ns: how long it has
    waited for a processor; thawed_ns: when it last went on."""

    def __init__(self, world: World, name: str, host: str) -> None:
        self.world = world
        self.name = name
        self.host = host
        self.alive = True
        self.died_ns = 0
        self.frozen_ns: int | None = None
        self.starved = self.stuck = False
        self.waited_ns = 0
        self.thawed_ns: float = -inf
        self._backlog: list[tuple[Act, tuple[Any, ...]]] = []

    def later(self, delay_ns: int, act: Act, *args: Any) -> None:
        self.world.later(delay_ns, self.wake, act, args)

    def soon(self, low_ns: int, high_ns: int, act: Act, *args: Any) -> None:
        """Set a timer that rings at a random time in between."""
        self.later(self.world.between(low_ns, high_ns), act, *args)

    def wake(self, act: Act, args: tuple[Any, ...]) -> None:
        if not self.alive:
            return
        if self.frozen_ns is not None:
            self._backlog.append((act, args))
        else:
            act(*args)

    @property
    def letter(self) -> str:
        """Its state letter, as in the kernel."""
        return "S" if self.frozen_ns is None or self.stuck else "R" if self.starved else "T"

    def freeze(self, *, starved: bool = False, stuck: bool = False) -> None:
        if self.alive and self.frozen_ns is None:
            self.world.log(self.name, "STARVED" if starved else "STUCK" if stuck else "FROZEN")
            self.frozen_ns, self.starved, self.stuck = self.world.now_ns, starved, stuck

    def thaw(self) -> None:
        if not self.alive or self.frozen_ns is None:
            return
        self.world.log(self.name, "THAWED")
        self.waited_ns += self.world.now_ns - self.frozen_ns if self.starved else 0
        self.frozen_ns, self.starved, self.stuck = None, False, False
        self.thawed_ns = self.world.now_ns
        backlog, self._backlog = self._backlog, []
        for act, args in backlog:
            self.wake(act, args)

    def die(self, reason: str) -> None:
        """End now; every connection breaks, and the other sides see it."""
        if not self.alive:
            return
        self.world.log(self.name, "DIED", reason)
        self.alive, self.died_ns = False, self.world.now_ns
        for connection in list(self.world.connections):
            if connection.ends[0] is self or connection.ends[1] is self:
                connection.close(self)


class SimConnection:
    """A connection between two processes. Each side gives callbacks for messages and for the end; the latter is called
    once.

    `timeout_ns`: a message that cannot be delivered for so long ends it.
    """

    def __init__(self, world: World, a: Process, b: Process, timeout_ns: int = SECOND) -> None:
        self.world = world
        self.ends = (a, b)
        self.pair = _pair(a.name, b.name)
        self.timeout_ns = timeout_ns
        self.open = True
        self.closing = False  # one side has ended it; the other has not seen that yet
        self._receive: list[Callable[[Any], None] | None] = [None, None]
        self._lost: list[Callable[[], None] | None] = [None, None]
        self._due = [0, 0]
        self._held: tuple[list[Any], list[Any]] = ([], [])
        self._sent = [0, 0]
        self._came = [0, 0]  # numbers up to which all messages have been received
        self._early: tuple[dict[int, Any], dict[int, Any]] = ({}, {})  # by number, messages that have overtaken others
        world.connections.append(self)

    def listen(self, side: Process, receive: Callable[[Any], None], lost: Callable[[], None]) -> None:
        """Set the callbacks of `side` for messages and for the end."""
        index = self.ends.index(side)
        self._receive[index], self._lost[index] = receive, lost

    def send(self, side: Process, message: Any) -> None:
        """Send a message from one side to the other."""
        if not self.open:
            return
        self.world.note(message)
        to = int(side is self.ends[0])
        self._sent[to] += 1
        numbered = (self._sent[to], message)
        if self._held[to] or not self._reachable:
            self._hold(to, numbered)
        else:
            self._transmit(to, numbered)

    def _transmit(self, to: int, message: tuple[int, Any]) -> None:
        self._due[to] = max(self._due[to], self.world.now_ns + self.world.latency_ns())
        self.world.later(self._due[to] - self.world.now_ns, self._deliver, to, message)

    def _hold(self, to: int, message: tuple[int, Any]) -> None:
        if not self._held[to]:
            self.world.later(self.timeout_ns, self._stuck, to, message)
        self._held[to].append(message)

    def _stuck(self, to: int, message: tuple[int, Any]) -> None:
        if self.open and self._held[to] and self._held[to][0] is message:
            self.fail()

    def _passes(self, to: int) -> bool:
        return self.world.passes(self.ends[1 - to].host, self.ends[to].host)

    @property
    def _reachable(self) -> bool:
        return self.world.reachable(self.ends[0].host, self.ends[1].host)

    @property
    def stuck(self) -> bool:
        """Whether a message waits for the hosts to reach each other again."""
        return any(self._held)

    def flush(self) -> None:
        """Send held messages: the hosts may reach each other again."""
        for to in (0, 1):
            if self.open and self._passes(to):
                held = self._held[to][:]
                self._held[to].clear()
                for message in held:
                    self._transmit(to, message)

    def _deliver(self, to: int, message: tuple[int, Any]) -> None:
        """Deliver in order: a message that waited for lost packets comes after later ones, and is received before
        them."""
        if not self.open:
            return
        if not self._passes(to):
            self._hold(to, message)
            return
        early, (number, content) = self._early[to], message
        if number != self._came[to] + 1:
            early[number] = content
            return
        self._came[to] = number
        self.ends[to].wake(self._received, (to, content))
        while self.open and (number := self._came[to] + 1) in early:
            self._came[to] = number
            self.ends[to].wake(self._received, (to, early.pop(number)))

    def _received(self, to: int, message: Any) -> None:
        receive = self._receive[to]
        if receive is not None:
            receive(message)

    def close(self, side: Process) -> None:
        """End the connection from one side: messages that it had sent still arrive, unless the connection broke on the
        way. That side hears nothing more of it, though it may have failed already."""
        to = 1 - self.ends.index(side)
        self._lost[1 - to] = self._receive[1 - to] = None
        if not self.open:
            return
        self.closing = True
        waits = self._held[to] or not self._reachable
        delay = self.timeout_ns if waits else max(self._due[to] - self.world.now_ns, self.world.latency_ns())
        self.world.later(delay, self.fail)

    def fail(self) -> None:
        """End the connection for both sides; messages under way are lost."""
        if not self.open:
            return
        self.open = False
        self.world.connections.remove(self)
        for index in (0, 1):
            if self._lost[index] is not None:
                self.ends[index].later(0, self._ended, index)

    def _ended(self, side: int) -> None:
        lost = self._lost[side]
        if lost is not None:
            lost()


def connect(world: World, a: Process, b: Process | None, timeout_ns: int = SECOND) -> SimConnection | None:
    """A connection from `a` to `b`; None if `b` cannot be reached (the caller waits before trying again)."""
    if b is None or not b.alive or not world.reachable(a.host, b.host) or world.spoiled(a.name, b.name):
        return None
    return SimConnection(world, a, b, timeout_ns)
