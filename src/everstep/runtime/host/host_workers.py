"""The workers of a host: slots, their lives (each of one or more processes), and the fork server that makes them."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any, Literal

from everstep.base.cause import Cause, Why
from everstep.base.cell_keys import MAX_RANKS
from everstep.base.config import Config
from everstep.base.errors import check
from everstep.protocol.messages import WorkerLife
from everstep.runtime.host.agent_link import AgentLink
from everstep.runtime.host.board import Board
from everstep.runtime.host.collector import Collector
from everstep.runtime.host.fork_server_client import ForkServerClient
from everstep.runtime.host.stacks import SHOW_STACKS
from everstep.runtime.host.worker_processes import Running
from everstep.runtime.link.context import Joining, WorkerContext
from everstep.runtime.process import AGAIN, RETURNS, MemoryKills, end_strays, killed_from_outside, why_ended

_COMPUTING = ("load", "forward", "backward", "reduce", "agree", "update", "evaluate")


class Workers:
    """All slots of this host. One thread calls the methods; `lives` and `wanted_slots` may be called by any.

    make_context: (worker_id, incarnation) -> context of the worker. link: tells the coordinator; notify: tells
    observers. collector: takes the output and logs of workers. `alone`: they end the job by themselves. `hopeless`: why
    no restart can help, None while there is no such reason.
    """

    def __init__(
        self,
        joining: Joining,
        config: Config,
        board: Board,
        make_context: Callable[[int, int], WorkerContext],
        link: AgentLink,
        notify: Callable[..., None],
        collector: Collector,
    ) -> None:
        ranks = max(joining.ranks, config.cell.ranks // config.cell.hosts)
        check(1 <= ranks <= MAX_RANKS, f"a worker has 1 to {MAX_RANKS} ranks, asked for {ranks}")
        self._board = board
        self._entry = joining.entry
        self._config = config
        self._make_context = make_context
        self._link = link
        self._notify = notify
        self._collector = collector
        self._ranks = ranks
        self._slots: dict[int, Slot] = {}
        self._running: dict[int, Running] = {}
        self._lives: tuple[WorkerLife, ...] = ()
        self._jitter = random.Random()
        self._server: ForkServerClient | None = None
        self._server_pids: set[int] = set()
        self._stopping = False
        self.alone = False
        self.hopeless: Why | None = None
        self._memory_kills = MemoryKills()
        self._crashes = StepCrashes()

    # ---- questions

    def lives(self) -> list[WorkerLife]:
        """Workers that run now. Thread-safe."""
        return list(self._lives)

    def wanted_slots(self) -> int:
        """Number of slots to keep filled. Thread-safe."""
        return len(self.wanted_ids())

    def wanted_ids(self) -> list[int]:
        """Slots to keep filled, ascending. Thread-safe."""
        return sorted(slot.worker_id for slot in list(self._slots.values()) if slot.wanted)

    @property
    def slots(self) -> list[Slot]:
        return [slot for _, slot in sorted(self._slots.items())]

    def none_live(self) -> bool:
        """Whether no process runs or is about to start."""
        return not any(slot.state in ("starting", "running") for slot in self._slots.values())

    def none_coming(self) -> bool:
        """Whether nothing runs, and nothing will be started unless the coordinator asks for it."""
        return not any(slot.state in ("empty", "starting", "running", "resting") for slot in self._slots.values())

    # ---- slots

    def use(self, server: ForkServerClient) -> None:
        """Let this fork server make the workers from now on."""
        self._server = server
        self._server_pids = {server.pid}

    def stop(self) -> None:
        self._stopping = True

    def end_alone(self) -> None:
        """Start nothing any more, and have the running workers save and leave by themselves."""
        self.stop()
        self.alone = True
        for slot in self.slots:
            if slot.state in ("starting", "running"):
                self._board.row(slot.worker_id).ask_end()

    def want(self, worker_ids: Sequence[int], first: Sequence[int] = (), ranks: Sequence[int] = ()) -> None:
        """Keep these slots filled and let the others end; missing workers start at the next `start_due`.

        first: the least incarnation that the next life of each may have. ranks: processes of that life; none: as the
        job says.
        """
        now_s, least = time.monotonic(), dict(zip(worker_ids, first, strict=False))
        sizes = dict(zip(worker_ids, ranks, strict=False))
        for worker_id in worker_ids:
            if not 0 <= worker_id < self._board.rows:
                text = f"no room for more than {self._board.rows} workers"
                self._notify("warning", Why(Cause.CONFIG, text), worker_id=worker_id)
                continue
            slot = self._slots.setdefault(worker_id, Slot(worker_id, ranks=self._ranks))
            if slot.state == "left" or (slot.state == "lost" and not slot.wanted):
                slot.state, slot.restart_at_s = "resting", now_s
            slot.wanted, slot.first = True, least.get(worker_id, slot.first)
            slot.resize(min(sizes.get(worker_id, self._ranks), self._ranks), now_s)
        for worker_id, slot in self._slots.items():
            slot.wanted = worker_id in worker_ids
            if not slot.wanted and slot.state in ("resting", "empty"):
                slot.state = "left"

    def due_in(self, now_s: float) -> float:
        """Seconds until a slot has to be started; endless if none waits or none can be started now."""
        if self._stopping or self._server is None or not self._server.ready:
            return inf
        waiting = (slot.restart_at_s for slot in self._slots.values() if slot.state in ("empty", "resting"))
        return max(0.0, min(waiting, default=inf) - now_s)

    def start_due(self, now_s: float) -> None:
        """Start every slot whose time has come."""
        self._memory_kills.look(now_s)
        if self._server is None or self.due_in(now_s) > 0.0:
            return
        for slot in self.slots:
            if slot.state in ("empty", "resting") and slot.restart_at_s <= now_s:
                incarnation = slot.begin(now_s)
                context = replace(self._make_context(slot.worker_id, incarnation), cell_size=slot.ranks)
                with contextlib.suppress(OSError):
                    context.last_words_path.unlink(missing_ok=True)
                self._board.begin(slot.worker_id, incarnation, slot.ranks)
                ends = [self._collector.open(slot.worker_id, incarnation, rank) for rank in range(slot.ranks)]
                theirs, ours = os.pipe()
                self._running[slot.worker_id] = Running(ours)
                self._server.start(self._entry, context, ends, theirs)

    def kill(self, worker_id: int, incarnation: int, *, again: bool = False) -> bool:
        """SIGKILL all processes of this life. Returns False if it does not run. again: to begin another one."""
        slot = self._slots.get(worker_id)
        if slot is None or slot.incarnation != incarnation:
            return False
        slot.end(again=again)
        running = self._running.get(worker_id)
        return running is not None and running.kill()

    def go_on(self) -> None:
        """SIGCONT all workers: the process that would continue a stopped one may be gone."""
        for running in self._running.values():
            running.send(signal.SIGCONT)

    def show_stacks(self, worker_id: int, incarnation: int) -> None:
        """Have this life write its stacks to its log, unless it is still starting: the signal would kill it."""
        slot, running = self._slots.get(worker_id), self._running.get(worker_id)
        there = slot is not None and slot.incarnation == incarnation
        if running is not None and there and self._board.read(worker_id).phase != "starting":
            running.send(SHOW_STACKS)

    def seen_at(self, worker_id: int, since_ns: int) -> str:
        """Place in the user's code where stacks showed this worker since then (monotonic); "" if none did."""
        return self._collector.seen_at(worker_id, since_ns)

    def kill_all(self) -> None:
        for running in self._running.values():
            running.kill()

    def end_all(self) -> None:
        """SIGKILL all workers, and wait for their ends."""
        for slot in self.slots:
            if slot.state in ("starting", "running"):
                self._running[slot.worker_id].end()
                why = Why(Cause.KILLED, "killed by SIGKILL, because its agent ended")
                self._exited(slot.worker_id, slot.incarnation, -signal.SIGKILL, why, time.time_ns())

    # ---- messages of the fork server

    def heard(self, message: dict[str, Any]) -> None:
        if message["op"] == "started":
            self._started(message["worker_id"], message["incarnation"], message["pids"])
        elif message["op"] == "exited":
            self._died(message["worker_id"], message["incarnation"], message["status"], message)

    def _died(self, worker_id: int, incarnation: int, status: int, about: Mapping[str, Any], unseen: str = "") -> None:
        code = os.waitstatus_to_exitcode(status)
        why = why_ended(code)
        if code == -signal.SIGKILL and self._memory_kills.lately(time.monotonic()):
            why = Why(Cause.OOM, f"{why.reason}: the kernel ran out of memory")
        if self._slots[worker_id].ranks > 1:
            how = "was" if code < 0 else "ended with"
            why = Why(why.cause, f"its rank {about['cell_rank']} {how} {why.reason}")
        self._exited(worker_id, incarnation, code, Why(why.cause, why.reason + unseen), about["unix_ns"])

    # ---- without a fork server

    def server_died(self) -> None:
        """Take in that the fork server is dead. Its workers go on; unconfirmed starts are repeated."""
        self._server = None
        for slot in self.slots:
            running = self._running.get(slot.worker_id)
            if running is not None and slot.state == "running":
                running.adopt(slot.worker_id, slot.incarnation, slot.pids)
            elif slot.state == "starting":
                why = Why(Cause.KILLED, "killed while it was started, because its fork server died")
                self._exited(slot.worker_id, slot.incarnation, -signal.SIGKILL, why, time.time_ns())

    @property
    def orphan_fds(self) -> list[int]:
        """Descriptors, each readable when a worker of a dead fork server has ended."""
        return [fd for running in self._running.values() for fd in running.fds]

    def look_at_orphans(self) -> None:
        """Take in the ends of workers of a dead fork server, and end processes that they leave running."""
        for worker_id, running in list(self._running.items()):
            cell = running.look(lambda cell_rank, worker_id=worker_id: self._board.row(worker_id, cell_rank))  # type: ignore[misc]
            if cell is not None and cell.status is not None:
                unseen = " (presumably: its fork server was dead, so nothing saw its end)" if running.unseen else ""
                self._died(worker_id, cell.incarnation, cell.status, vars(cell), unseen)
                end_strays({pid for slot in self.slots for pid in slot.pids} | self._server_pids)

    def _started(self, worker_id: int, incarnation: int, pids: list[int]) -> None:
        slot = self._slots[worker_id]
        slot.started(*pids)
        running = self._running[worker_id]
        running.started(pids)
        for cell_rank, pid in enumerate(pids):
            self._board.row(worker_id, cell_rank).set_pid(pid)
        self._lives = self._list_lives()
        self._link.worker_started(_life(slot))
        cell = {"pids": pids} if len(pids) > 1 else {}
        self._notify("worker_started", worker_id=worker_id, incarnation=incarnation, pid=slot.pid, **cell)
        if self._stopping:
            running.kill()

    def _exited(self, worker_id: int, incarnation: int, code: int, why: Why, unix_ns: int) -> None:
        slot, pulse = self._slots[worker_id], self._board.read(worker_id)
        # for example os._exit(0) in the middle of a step: it neither left nor was let go.
        torn_off = pulse.phase in _COMPUTING and self._board.row(worker_id).exit_code is None
        in_order = code == 0 and not torn_off
        about = {"worker_id": worker_id, "incarnation": incarnation, "pid": slot.pid, "in_order": in_order}
        words = self._make_context(worker_id, incarnation).read_last_words()
        if words is not None and not in_order:
            why = Why(words.cause, f"{why.reason}: {words.reason}")
        now_s = time.monotonic()
        ready = pulse.incarnation == incarnation and pulse.phase != "starting"
        killed, random = killed_from_outside(code), self._jitter.random()
        returns = code == RETURNS or (killed and slot.returns)
        again = code == AGAIN or returns
        how = {"in_order": in_order, "ready": ready, "killed": killed, "again": again, "returns": returns}
        lost = slot.exited(now_s, self._config, why, **how, random=random)
        self._lives = self._list_lives()
        self._link.worker_exited(worker_id, incarnation, why, unix_ns, in_order, again)
        running = self._running.pop(worker_id, None)
        if running is not None:
            running.close()
        self._notify("worker_exited", why, **about)
        if self._stopping:
            return
        if ready and not words and not killed and not again and not in_order and pulse.phase in _COMPUTING:
            self._judge_crash(worker_id, pulse.step, code, why.reason)
        if lost is not None:
            self._link.slot_lost(worker_id, lost, slot.ranks)
            self._notify("slot_lost", lost, worker_id=worker_id)
        elif slot.state == "resting" and slot.restart_at_s > now_s:
            delay_s = slot.restart_at_s - now_s
            later = Why(why.cause, f"starts again in {delay_s:.1f} s")
            self._notify("worker_restarting", later, worker_id=worker_id, delay_s=delay_s)

    def _judge_crash(self, worker_id: int, step: int, code: int, reason: str) -> None:
        """Judge a worker that ended by itself without a reason: its code, or a library, has ended the process."""
        furthest = max(self._board.read(slot.worker_id).step for slot in self.slots)
        if furthest > step:
            return  # others are ahead of it: its host may be faulty
        why = self._crashes.observe(step + 1, why_ended(code).reason, furthest, max(1, self.wanted_slots()))
        if why:
            log = self._collector.path(worker_id)
            text = f"crash loop: {why}, last worker {worker_id}: {reason}; its output is in {log}"
            self.hopeless = Why(Cause.CRASH_LOOP, text)

    def _list_lives(self) -> tuple[WorkerLife, ...]:
        return tuple(_life(slot) for slot in self.slots if slot.live)


def _life(slot: Slot) -> WorkerLife:
    return WorkerLife(worker_id=slot.worker_id, incarnation=slot.incarnation, pid=slot.pid, limbs=slot.pids[1:])


# ---- restarts of dead workers, and giving up slots; time and random numbers are passed in

HEALTHY_S = 60.0
HOUR_S = 3600.0
LOOP_OWN = 3
LOOP_KILLED = 10

SlotState = Literal["empty", "starting", "running", "resting", "left", "lost"]


@dataclass
class Slot:
    """One worker slot of this host and its lives.

    state: 'empty' (never started), 'starting' (asked for), 'running', 'resting' (waits for its restart), 'left' (ended
    in order), 'lost' (given up). pids: of the present life's processes, the head's first. first: the least incarnation
    that a next life may have; ranks: its processes.
    """

    worker_id: int
    wanted: bool = True
    state: SlotState = "empty"
    incarnation: int = -1
    pids: tuple[int, ...] = ()
    restart_at_s: float = 0.0
    started_s: float = 0.0
    attempt: int = 0
    early_own: int = 0
    early_killed: int = 0
    restarts_s: deque[float] = field(default_factory=deque)
    returns: bool = False
    returns_s: deque[float] = field(default_factory=deque)
    first: int = 0
    ranks: int = 1

    @property
    def live(self) -> bool:
        return self.state == "running"

    @property
    def pid(self) -> int:
        """PID of the present life's head, 0 if there is none."""
        return self.pids[0] if self.pids else 0

    def begin(self, now_s: float) -> int:
        """Begin a new life. Returns its incarnation."""
        self.incarnation = max(self.incarnation + 1, self.first)
        self.state, self.pids, self.started_s, self.returns = "starting", (), now_s, False
        return self.incarnation

    def started(self, *pids: int) -> None:
        self.state, self.pids = "running", pids

    def end(self, *, again: bool) -> None:
        """The present life is about to be killed. again: as `returns` of `exited`."""
        self.returns = self.returns or again

    def resize(self, ranks: int, now_s: float) -> None:
        """Give the next life so many processes; a slot that was given up with more of them begins again."""
        if self.state == "lost" and ranks < self.ranks:
            self.state, self.restart_at_s, self.attempt = "resting", now_s, 0
            self.early_own = self.early_killed = 0
            self.restarts_s.clear()
            self.returns_s.clear()
        if self.state not in ("starting", "running"):
            self.ranks = ranks

    def exited(
        self,
        now_s: float,
        config: Config,
        why: Why,
        *,
        in_order: bool,
        ready: bool,
        killed: bool,
        random: float,
        again: bool = False,
        returns: bool = False,
    ) -> Why | None:
        """End the present life. Returns the reason if the slot is lost; else it has left, or rests.

        in_order: exit code 0. ready: it got beyond its start-up. killed: by a signal from outside. again: it ended to
        be started again. returns: it did because of another's loss: that is no restart of its own, and its limit is
        beyond the one of all others together. random: in [0, 1).
        """
        self.pids = ()
        if in_order or not self.wanted:
            self.state = "left"
            return None
        self.state = "lost"
        if config.on_failure == "shrink" and config.cell.hosts == 1 and not again:
            rest = ", so it is not started again" if self.ranks == 1 else ""
            return Why(why.cause, f"{why.reason}; on_failure is 'shrink'{rest}")
        if ready:
            self.early_own = self.early_killed = 0
        elif not returns:
            self.early_killed += killed
            self.early_own += not killed
        if self.early_own >= LOOP_OWN or self.early_killed >= LOOP_KILLED:
            times = max(self.early_own, self.early_killed)
            text = f"crash loop: it died {times} times in a row before it was ready, last: {why.reason}"
            return Why(Cause.CRASH_LOOP, text)
        begun_s, most, what = self.restarts_s, config.max_restarts, "restarts"
        if returns:
            others = max(LOOP_KILLED, (config.workers + config.spares) * config.cell.hosts)
            begun_s, most, what = self.returns_s, others * (most + 1), "restarts because of others"
        while begun_s and now_s - begun_s[0] >= HOUR_S:
            begun_s.popleft()
        if len(begun_s) >= most:
            limit = f"{most} {what} within an hour are the limit (max_restarts={config.max_restarts})"
            return Why(Cause.CRASH_LOOP, f"{limit}, last: {why.reason}")
        delay_s = 0.0 if returns else self._delay_s(now_s, config, ready, random)
        self.state, self.restart_at_s = "resting", now_s + delay_s
        begun_s.append(now_s)
        return None

    def _delay_s(self, now_s: float, config: Config, ready: bool, random: float) -> float:
        """Delay of the next start: none at first, then longer and longer, until a life has been healthy."""
        most_s, delay_s = config.backoff.max_s, 0.0
        if ready and now_s - self.started_s >= HEALTHY_S:
            self.attempt = 0
        if self.attempt > 0:
            delay_s = min(most_s, config.backoff.initial_s * 2 ** (self.attempt - 1)) * (0.5 + random)
        self.attempt += 1
        return min(delay_s, most_s)


@dataclass
class StepCrashes:
    """Counts crashes that workers of all slots caused themselves, and tells whether they block the job.

    Three alike at one step make that step hopeless; three of each worker without a new step make the job hopeless.
    """

    at: tuple[int, str] = (-1, "")
    alike: int = 0
    furthest: int = -1
    fruitless: int = 0

    def observe(self, step: int, how: str, furthest: int, workers: int) -> str:
        """Take in a crash, of this kind, of a worker at `step`; `furthest`: the newest step that any has committed.

        Returns the reason to give up, "" while there is hope.
        """
        if furthest > self.furthest:
            self.at, self.alike, self.furthest, self.fruitless = (-1, ""), 0, furthest, 0
        self.alike = self.alike + 1 if (step, how) == self.at else 1
        self.at = (step, how)
        self.fruitless += 1
        if self.alike >= LOOP_OWN:
            return f"workers ended themselves {self.alike} times in a row while they computed step {step}"
        if self.fruitless >= LOOP_OWN * workers:
            return f"workers ended themselves {self.fruitless} times without getting beyond step {self.furthest}"
        return ""
