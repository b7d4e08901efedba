"""Two coordinators that stand by for each other, and their faults.

Lease, journal and order of effects are the machines of production; this file replaces the runtime. A coordinator may go
on talking after it has lost the lease: frozen, or with a clock that stands still.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

from everstep.protocol import messages as wire
from everstep.protocol.coordinator.types import Connected, CoordinatorEvent, Persist, Tick
from everstep.protocol.lease.candidate import Candidate
from everstep.protocol.lease.held import HeldEffects
from everstep.protocol.lease.requests import Depose, Load, Loaded, StoreAnswer
from everstep.protocol.lease.writer import Writer
from everstep.sim.control import CONTROL_HOST, Control, SimCoordinator
from everstep.sim.faults import SimFault, SimInjector, draw_one
from everstep.sim.lease_store import STORE_HOST, SimStore
from everstep.sim.promises import freed, require
from everstep.sim.sim_worker import SimWorker
from everstep.sim.world import MS, SECOND, World

TTL_S = 1
_HOSTS = (CONTROL_HOST, "control1")
_COMPACT_EVERY = 7
_MOST_BYTES = 1500


class SimCandidate(SimCoordinator):
    """One life of a coordinator that decides only while it holds the lease. `serves`: it does, as far as it knows."""

    def __init__(self, world: World, control: LeasedControl, number: int) -> None:
        self.number = number
        self.serves = False
        self.unaware = False  # its clock stands still: it does not see that its lease is over
        self._store = control.store
        self.where = {"number": number, "life": control.lives()}
        self._candidate = Candidate(f"job{number}", self.where, TTL_S)
        self._writer: Writer | None = None
        self._order = HeldEffects()
        self._writing = False
        self._leased = control
        super().__init__(world, control, "coordinator" if number == 0 else f"coordinator{number}", _HOSTS[number])

    @property
    def term(self) -> int:
        """Term of the lease that it holds, or has held."""
        return self._candidate.term

    def begin(self) -> None:
        self.world.log(self.name, "STANDS BY")
        self._turn()

    def stop_clock(self, stopped: bool) -> None:
        """Stop its clock, so that it does not see that its lease is over; or start it again."""
        self.unaware = stopped

    # ---- the lease

    def _turn(self) -> None:
        now = self.world.now_ns
        if self._candidate.deposed(now) and not self.unaware:
            self._stand_down("its lease is over")
            return
        self._probe_holder()
        request = self._candidate.request(now)
        if request is not None:
            self.world.seen["lease", "deposed"] += isinstance(request, Depose)
            self._store.ask(self, request, self._lease_answered)
        else:
            self.later(max(MS, self._candidate.due_ns - now), self._turn)

    def _probe_holder(self) -> None:
        """Check whether anybody listens at the holder's address."""
        holder = self._candidate.holder
        if holder is not None and not self.serves:
            self._candidate.port_probed(self.world.now_ns, holder.where, self._leased.listens(self.host, holder.where))

    def _lease_answered(self, answer: StoreAnswer) -> None:
        self._candidate.answered(self.world.now_ns, answer)
        if (
            self._candidate.term
            and not self.serves
            and self._writer is None
            and self._candidate.holds(self.world.now_ns)
        ):
            self._writing = True
            self._writer = Writer(self._candidate.term, 0, ())
            self._load()
        self._turn()

    def _load(self) -> None:
        self._store.ask(self, Load(), self._loaded)

    def _loaded(self, answer: StoreAnswer) -> None:
        if not isinstance(answer, Loaded):
            self._load()
            return
        term = self._candidate.term
        self._writer = Writer(term, answer.number, answer.entries, _COMPACT_EVERY, _MOST_BYTES)
        self._writing = False
        self.machine = self.control.make(answer.entries, self.control.size, term)
        self.world.log(self.name, "LEADS in term", term, f"journal of {len(answer.entries)}")
        self.world.seen["lease", "taken"] += 1
        self.serves = True
        self._leased.leads(self)
        self.feed(Tick())

    def _stand_down(self, reason: str) -> None:
        self.world.seen["lease", "lost"] += self.serves
        self.die(reason)
        self.world.later(20 * MS, self._leased.start, self.number)

    # ---- events and effects

    def feed(self, event: CoordinatorEvent) -> None:
        """Give the machine one event, if it may still decide."""
        if not self.serves or not self.alive:
            return
        candidate, now = self._candidate, self.world.now_ns
        require(candidate.holds(now) == (now < candidate.until_ns), "P3", f"{self.name} relies on what is over")
        if not candidate.holds(now) and not self.unaware:
            self._stand_down("its lease is over")
            return
        if isinstance(event, Connected) and event.connection in self.peers:
            self.peers[event.connection].send(self, [wire.encode(wire.TermBegun(term=self._candidate.term))])
        super().feed(event)

    def _perform(self) -> None:
        """Carry out the machine's effects since the last time, which are in the queue."""
        said, self._queue = self._queue, []
        entries, self._queue = self._order.take(said)
        if self._writer is not None:
            self._writer.put(entries)
        self._act_all()
        self._write()

    def _act_all(self) -> None:
        ready, self._queue = self._queue, []
        for effect in ready:
            if self._crash_after is not None:
                self._crash_after -= 1
                if self._crash_after < 0:
                    self.die("in the middle of its effects")
            if self.alive and not isinstance(effect, Persist):
                self._act(effect)

    def _write(self) -> None:
        request = None if self._writer is None or self._writing or not self.alive else self._writer.request()
        if request is not None:
            self._writing = True
            self._store.ask(self, request, self._written)

    def _written(self, answer: StoreAnswer) -> None:
        self._writing = False
        if self._writer is None:
            return
        count = self._writer.answered(answer)
        if self._writer.fenced:
            self.world.seen["lease", "fenced"] += 1
            self._stand_down(self._writer.fenced)
            return
        self._queue = self._order.written(count)
        self._act_all()
        self._write()
        if self._writer is not None and not self._writer.waiting:
            freed(self.name, f"effects, though all before number {self._writer.number} is written", len(self._order))


class LeasedControl(Control):
    """The control plane with two coordinators; `coordinator` is the one that was the last to begin to decide."""

    def first_coordinator(self) -> SimCoordinator:
        """Start both coordinators; returns the first."""
        self.store, self._lives, self._refuses = SimStore(self.world, self.wrote), 0, False
        self.candidates = [SimCandidate(self.world, self, number) for number in range(len(_HOSTS))]
        return self.candidates[0]

    def lives(self) -> int:
        """Count one more life of a coordinator; returns its number."""
        self._lives += 1
        return self._lives

    def leads(self, candidate: SimCandidate) -> None:
        """The candidate decides from now on."""
        self.coordinator = candidate
        self.began(candidate)

    def answering(self) -> SimCoordinator | None:
        """The coordinator that holds the lease; now and then another that still talks."""
        serving = [c for c in self.candidates if c.alive and c.serves]
        holder = self.store.holder
        known = [c for c in serving if holder is not None and c.number == holder.where["number"]]
        if serving and (not known or self.world.rng.random() < 0.2):
            return self.world.rng.choice(serving)
        return known[0] if known else None

    def refuse(self, refuses: bool) -> None:
        """From now on the network answers that nobody listens anywhere; or stops doing so."""
        self._refuses = refuses

    def listens(self, host: str, where: dict[str, int]) -> bool | None:
        """Answer for a caller on this host that knocks at a coordinator's address."""
        there = self.candidates[where["number"]]
        if not self.world.reachable(host, there.host):
            return None
        return there.alive and there.serves and there.where == where and not self._refuses

    def start(self, number: int) -> None:
        """Start this candidate's next life, if it is dead."""
        if not self.candidates[number].alive and not self.fallen:
            self.candidates[number] = SimCandidate(self.world, self, number)

    def start_coordinator(self) -> None:
        """Start the next lives of dead candidates."""
        for number in range(len(self.candidates)):
            self.start(number)

    def fall(self) -> None:
        super().fall()
        for candidate in self.candidates:
            candidate.die("its job is gone")

    def resume(self, size: int, stages: int) -> None:
        """Resume the job, with an empty journal."""
        if self.fallen and not self.fate.ended:
            self.store.clear()
        super().resume(size, stages)

    def mend(self) -> None:
        """End all troubles of coordinators and store."""
        self.store.mend()
        self.refuse(False)
        for candidate in self.candidates:
            candidate.stop_clock(False)
            candidate.crash_after(None)
            candidate.thaw()


# ---- faults


def draw_leases(rng: Random, horizon_ms: int) -> tuple[SimFault, ...]:
    """Faults of coordinators and store; often two at once."""
    faults: list[SimFault] = []
    for _ in range(rng.choice((0, 1, 1, 2, 2, 3))):
        one = draw_one(rng, rng.randint(5, 3 * horizon_ms))
        kinds = (*_NAMES, "coordinator", "coordinator_freeze", "coordinator_mid_effects")
        faults.append(replace(one, kind=rng.choice(kinds)))
        if rng.random() < 0.5:  # and then something must be decided
            faults.append(replace(draw_one(rng, one.at_ms + rng.randint(0, 1500)), phase=""))
    return tuple(faults)


def draw_small(rng: Random, horizon_ms: int) -> tuple[SimFault, ...]:
    """Now and then the store takes only small requests for a while."""
    small = replace(draw_one(rng, rng.randint(0, horizon_ms)), kind="store_small")
    return (small,) if rng.random() < 0.2 else ()


def strike(injector: SimInjector, fault: SimFault, worker: SimWorker | None) -> None:
    """Carry out one of these faults."""
    control = injector.control
    if not isinstance(control, LeasedControl):
        raise AssertionError(f"{fault} where there is no lease")
    leading, lasts_ns = control.coordinator, (fault.for_ms + 500) * MS
    if fault.kind.startswith("store_"):
        control.store.trouble(fault.kind.removeprefix("store_"), lasts_ns)
    elif fault.kind == "lease_refused":
        control.refuse(True)
        injector.world.later(lasts_ns, control.refuse, False)
    elif fault.kind == "lease_cut":
        injector.world.cut(leading.host, STORE_HOST)
        injector.world.later(lasts_ns, injector.world.mend, leading.host, STORE_HOST)
    elif isinstance(leading, SimCandidate):  # it talks on after its lease has ended
        leading.stop_clock(True)
        injector.world.cut(leading.host, STORE_HOST)
        injector.world.later(lasts_ns + SECOND, injector.world.mend, leading.host, STORE_HOST)


_NAMES = ("store_down", "store_mute", "store_slow", "store_late", "lease_cut", "lease_unaware", "lease_refused")
LEASE_FAULTS = dict.fromkeys((*_NAMES, "store_small"), strike)
"""Strikes by kind."""
