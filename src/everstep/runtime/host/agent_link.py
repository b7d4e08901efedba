"""An agent's connection to the coordinator: heartbeats with progress, births and deaths. It starts nothing itself."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterable
from secrets import token_hex
from statistics import median
from typing import Any, NamedTuple

from everstep.base.cause import Why
from everstep.protocol.messages import (
    AgentHello,
    AgentNotice,
    AnyMessage,
    Heartbeat,
    HostEmptied,
    HostFailed,
    HostLeaving,
    HostRefused,
    HostsProbed,
    Pong,
    SlotLost,
    WorkerExited,
    WorkerLife,
    WorkerPulse,
    WorkerStarted,
)
from everstep.protocol.patience import Figures, Vitals
from everstep.protocol.roles import AGENT
from everstep.runtime.host.board import Board
from everstep.runtime.link.context import Joining
from everstep.runtime.link.control_client import ControlClient
from everstep.runtime.link.handshake import role_token
from everstep.runtime.link.tls import Shown, Tls
from everstep.runtime.process import is_dead
from everstep.runtime.process_figures import figures_of
from everstep.runtime.versions import versions

FIRST_INTERVAL_S = 0.2
MIN_INTERVAL_S = 0.2
MAX_INTERVAL_S = 5.0
UNHEARD_S = 1.0
RTT_FACTOR = 10.0
_RATE_WINDOW_S = 2.0
_STILL_MS = 500
"""Least stillness after which the kernel is asked about a worker."""


class Rate:
    """Samples per second over the last seconds, from the counter of one life."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()

    def update(self, now_s: float, samples: int) -> float:
        """Take the counter's present value; returns the rate."""
        self._seen.append((now_s, samples))
        while len(self._seen) > 2 and now_s - self._seen[1][0] >= _RATE_WINDOW_S:
            self._seen.popleft()
        first_s, first = self._seen[0]
        return (samples - first) / (now_s - first_s) if now_s > first_s else 0.0


class LaneTime:
    """Milliseconds of computing per lane over the last lanes, from the counters of one life."""

    def __init__(self) -> None:
        self._seen: tuple[float, int, int] | None = None
        self._ms = 0.0

    def update(self, now_s: float, compute_ns: int, lanes: int) -> float:
        """Take the counters' present values; returns the time per lane, 0 while none is known."""
        since_s, before_ns, before = self._seen = self._seen or (now_s, compute_ns, lanes)
        if lanes > before and now_s - since_s >= _RATE_WINDOW_S:
            self._ms = (compute_ns - before_ns) / (lanes - before) / 1e6
            self._seen = (now_s, compute_ns, lanes)
        return self._ms


class Stillness:
    """A worker's chances to compute while its counter has not moved."""

    def __init__(self) -> None:
        self._vitals = Vitals()
        self._waited_s = 0.0

    def update(self, now_s: float, still_ms: int, look: Callable[[], Figures | None]) -> dict[str, Any]:
        """Fields of its next pulse. still_ms: time since it moved; look: asks the kernel about it."""
        if still_ms < _STILL_MS:
            self._vitals, self._waited_s = Vitals(), 0.0
            return {}
        self._waited_s += self._vitals.look(now_s, look())
        lifeless_s = self._vitals.lifeless_s
        return {
            "waited_ms": int(1000 * self._waited_s),
            "lifeless_ms": -1 if lifeless_s is None else int(1000 * lifeless_s),
            "stopped": self._vitals.stopped,
        }


class Pulses:
    """Pulses of one host's workers, from the board. seen_at: as `Workers` has it."""

    def __init__(self, board: Board, seen_at: Callable[[int, int], str] = lambda worker_id, since_ns: "") -> None:
        self._board = board
        self._seen_at = seen_at
        self._paces: dict[tuple[int, int], tuple[Rate, LaneTime, Stillness]] = {}

    def step(self, worker_id: int, incarnation: int) -> int:
        """The newest step that this life has applied, 0 if none."""
        pulse = self._board.read(worker_id)
        return pulse.step if pulse.incarnation == incarnation else 0

    def of(self, lives: Iterable[WorkerLife], now_s: float) -> Iterable[WorkerPulse]:
        """Pulses of these lives now."""
        now_ns = time.monotonic_ns()
        there = {(life.worker_id, life.incarnation): life for life in lives}
        self._paces = {key: self._paces.get(key) or (Rate(), LaneTime(), Stillness()) for key in there}
        for key, (rate, lane_time, stillness) in self._paces.items():
            worker_id, incarnation = key
            pulse = self._board.read(worker_id)
            if pulse.incarnation != incarnation or self._board.row(worker_id).hidden(now_ns):
                continue
            if any(map(is_dead, (there[key].pid, *there[key].limbs))):
                continue  # a pulse says that it lives
            still_ms = pulse.still_ms(now_ns)
            pid = (there[key].pid, *there[key].limbs)[pulse.slowest or 0]
            yield WorkerPulse(
                worker_id=worker_id,
                incarnation=incarnation,
                step=pulse.step,
                phase=pulse.phase,
                still_ms=still_ms,
                samples_per_s=rate.update(now_s, pulse.samples),
                compute_ms_per_lane=lane_time.update(now_s, pulse.compute_ns, pulse.lanes),
                slowest=pulse.slowest,
                cold=pulse.cold,
                **stillness.update(now_s, still_ms, lambda pid=pid: figures_of(pid, whole=True)),  # type: ignore[misc]
                at=self._seen_at(worker_id, pulse.beat_ns) if still_ms else "",
            )


class Secrets(NamedTuple):
    """Proofs that a host belongs to the job. token: the job's. shown: its TLS certificate, None without TLS."""

    token: bytes
    shown: Shown | None


class AgentLink:
    """Speaks for the workers of one host.

    lives: called (from any thread) for the processes that run now; slots: called so, too, for the number of slots to
    keep filled. on_message: called in the connection's thread for the coordinator's messages.
    """

    def __init__(
        self,
        joining: Joining,
        secrets: Secrets,
        pulses: Pulses,
        lives: Callable[[], list[WorkerLife]],
        slots: Callable[[], int],
        on_message: Callable[[AnyMessage], None],
    ) -> None:
        self.agent_id = joining.host
        self._joining = joining
        self._about = {**versions(), "address": joining.own or joining.host, "node": os.uname().nodename}
        self._process = f"{os.getpid()}-{token_hex(4)}"
        self._pulses = pulses
        self._lives = lives
        self._slots = slots
        self._on_message = on_message
        self._interval_s: float | None = None
        self._seq = 0
        self._sent: tuple[int, float] = (0, 0.0)
        self._rtts_ms: deque[float] = deque(maxlen=31)
        self._own_waits_s = 0.0
        self._next_s = 0.0
        self._lost: dict[int, SlotLost] = {}
        self._failed: HostFailed | None = None
        self.leaving = False
        key, tls = role_token(secrets.token, AGENT), Tls.of(secrets.shown)
        self.client = ControlClient(joining.where(), key, AGENT, self.agent_id, self._hello, self._receive, tls=tls)

    def misses_head(self) -> bool:
        """Whether no coordinator is connected, or the one that is answers no heartbeats. Any thread."""
        unheard_s = time.monotonic() - self.client.heard_s
        return not self.client.connected or unheard_s > max(UNHEARD_S, 3 * self.interval())

    # ---- heartbeats

    def due_in(self, now_s: float) -> float:
        return max(0.0, self._next_s - now_s)

    def interval(self) -> float:
        """Seconds between heartbeats."""
        if self._interval_s is not None:
            return self._interval_s
        if not self._rtts_ms:
            return FIRST_INTERVAL_S
        return min(MAX_INTERVAL_S, max(MIN_INTERVAL_S, RTT_FACTOR * median(self._rtts_ms) / 1000))

    def beat(self, now_s: float) -> None:
        """Send a heartbeat if one is due. `now_s` is monotonic."""
        if now_s < self._next_s:
            return
        self._next_s = now_s + self.interval()
        if not self.client.connected:
            return
        self._seq += 1
        rtt_ms = self._rtts_ms[-1] if self._rtts_ms else 0.0
        workers = list(self._pulses.of(self._lives(), now_s))
        own = figures_of(os.getpid())
        before_s, self._own_waits_s = self._own_waits_s, 0.0 if own is None else own.waited_s
        waited_ms = int(1000 * max(0.0, self._own_waits_s - (before_s or self._own_waits_s)))
        self._sent = (self._seq, time.monotonic())
        self.client.send(
            Heartbeat(agent_id=self.agent_id, seq=self._seq, rtt_ms=rtt_ms, workers=workers, waited_ms=waited_ms)
        )

    def beat_every(self, interval_s: float | None) -> None:
        """Seconds between heartbeats; None: ten median round trips within 0.2 to 5 s."""
        self._interval_s = interval_s

    # ---- births and deaths

    def worker_started(self, life: WorkerLife) -> None:
        self._lost.pop(life.worker_id, None)
        self.client.send(WorkerStarted(agent_id=self.agent_id, worker=life))

    def worker_exited(
        self, worker_id: int, incarnation: int, why: Why, died_unix_ns: int, in_order: bool = False, again: bool = False
    ) -> None:
        """Report that a process is dead. again: it ended to be started again."""
        self.client.send(
            WorkerExited(
                agent_id=self.agent_id,
                worker_id=worker_id,
                incarnation=incarnation,
                **vars(why),
                died_unix_ns=died_unix_ns,
                in_order=in_order,
                again=again,
                step=self._pulses.step(worker_id, incarnation),
            )
        )

    def slot_lost(self, worker_id: int, why: Why, ranks: int = 1) -> None:
        """Report that a slot was given up, whose lives have had so many processes."""
        self._lost[worker_id] = SlotLost(agent_id=self.agent_id, worker_id=worker_id, ranks=ranks, **vars(why))
        self.client.send(self._lost[worker_id])

    def host_failed(self, why: Why) -> None:
        """Report that no restart on this host can help."""
        self._failed = HostFailed(agent_id=self.agent_id, **vars(why))
        self.client.send(self._failed)

    def stay_out(self, why: Why) -> None:
        """Report that this host does not take part."""
        self.client.send(HostRefused(agent_id=self.agent_id, **vars(why)))

    def probed(self, number: int, silent: list[str]) -> None:
        """Answer a request to probe hosts. Any thread."""
        self.client.send(HostsProbed(agent_id=self.agent_id, number=number, silent=silent))

    def ask_to_leave(self) -> None:
        """Ask for this host to leave in order."""
        self.leaving = True
        self.client.send(HostLeaving(agent_id=self.agent_id))

    def emptied(self) -> None:
        """Answer the order to start nothing: nothing runs."""
        self.client.send(HostEmptied(agent_id=self.agent_id))

    def stay(self) -> None:
        """Stop asking to leave: the coordinator has refused."""
        self.leaving = False

    def notice(self, kind: str, fields: dict[str, Any]) -> None:
        """Tell observers of the job about an event."""
        self.client.send(AgentNotice(agent_id=self.agent_id, kind=kind, fields=fields))

    def close(self, flush_s: float = 0.5) -> None:
        self.client.close(flush_s)

    # ---- in the connection's thread

    def _hello(self) -> AnyMessage:
        return AgentHello(
            agent_id=self.agent_id,
            host=self.agent_id,
            workers=self._lives(),
            slots=self._slots(),
            room=self._joining.room,
            process=self._process,
            lost=list(self._lost.values()),
            failed=self._failed,
            leaving=self.leaving,
            about=self._about,
            domains=self._joining.domains,
        )

    def _receive(self, message: AnyMessage) -> None:
        seq, sent_s = self._sent
        if not isinstance(message, Pong):
            self._on_message(message)
        elif message.seq == seq:
            self._rtts_ms.append((time.monotonic() - sent_s) * 1000)
