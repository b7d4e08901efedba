"""Which faults happen when: drawn from the seed, at a time or aimed at a phase of the protocol, as readable data.

A fault aimed at a phase strikes when any worker enters it. Faults come in twos often enough that the second hits the
first one's recovery; so settling, fetching, healing and switching get their share.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random
from typing import TYPE_CHECKING

from everstep.protocol import messages as wire
from everstep.sim.world import MS, SECOND

if TYPE_CHECKING:
    from everstep.sim.scenario import Simulation
    from everstep.sim.worker import SimWorker

PHASES = ("settling", "fetching", "heal", "computing", "reducing", "agreeing", "updating", "gathering")
_WEIGHTS = {
    "kill": 8,
    "freeze": 3,
    "coordinator": 3,
    "coordinator_mid_effects": 3,
    "cut_workers": 2,
    "cut_control": 2,
    "isolate": 1,
    "link": 2,
    "bad_link": 1,
    "host": 1,
    "drop_control": 2,
    "scale": 3,
    "drain": 2,
    "coordinator_freeze": 1,
    "agent_freeze": 1,
    "last_words": 2,
    "stale_plan": 2,
    "raises": 2,
    "damage": 1,
    "stop": 1,
}
_KINDS = tuple(_WEIGHTS)
KNOWN = tuple(("faults", kind) for kind in (*_KINDS, "pool"))


@dataclass(frozen=True)
class Fault:
    """One fault. After `at_ms` it strikes at once (`phase` ""), or `delay_us` after the `count`-th time that a worker
    enters the phase. `pick`: which of the possible targets. `for_ms`: how long it lasts (0: does not end by itself).
    """

    kind: str
    at_ms: int
    phase: str = ""
    count: int = 1
    delay_us: int = 0
    pick: int = 0
    for_ms: int = 0
    same: bool = False  # aimed at the worker that entered the phase

    def __str__(self) -> str:
        when = f"at {self.at_ms} ms"
        if self.phase:
            when += f", {self.delay_us} us after '{self.phase}' number {self.count}{' there' if self.same else ''}"
        lasts = f" for {self.for_ms} ms" if self.for_ms else ""
        return f"{self.kind}[{self.pick}]{lasts} {when}"


def draw(rng: Random, horizon_ms: int) -> tuple[Fault, ...]:
    """A schedule of mostly 0 to 6 faults within the horizon, in order of time; now and then a storm of a dozen."""
    faults: list[Fault] = []
    for _ in range(rng.choice((0, 1, 1, 2, 2, 2, 3, 3, 4)) if rng.random() < 0.93 else rng.randint(8, 14)):
        faults.append(draw_one(rng, rng.randint(5, horizon_ms)))
        if rng.random() < 0.45:  # a second one, into the recovery of the first
            first = faults[-1]
            phase = rng.choice(("settling", "settling", "fetching", "heal", "heal", "updating", "agreeing", ""))
            at = first.at_ms if phase else first.at_ms + rng.randint(0, 60)
            faults.append(draw_one(rng, at, phase))
    return tuple(sorted(faults, key=lambda f: f.at_ms))


def draw_split(rng: Random, horizon_ms: int) -> tuple[Fault, ...]:
    """The same for a model in several stages: besides, whole pools die, at once or one member after the other."""
    faults = list(draw(rng, horizon_ms))
    for _ in range(rng.choice((0, 1, 1, 1, 2, 2))):
        at = rng.randint(30, horizon_ms)
        phase = rng.choice(("", "", *PHASES))
        faults.append(replace(draw_one(rng, at, phase), kind="pool", for_ms=rng.choice((0, 0, 1, 5, 40))))
        if rng.random() < 0.5:  # into the settling
            second = rng.choice(("settling", "fetching", "fetching", "computing", "updating"))
            faults.append(replace(draw_one(rng, at, second), kind=rng.choice(("kill", "kill", "pool", "freeze"))))
    return tuple(sorted(faults, key=lambda f: f.at_ms))


def draw_one(rng: Random, at_ms: int, phase: str | None = None) -> Fault:
    """Any fault at a time, perhaps aimed at a phase."""
    kind = rng.choices(_KINDS, weights=tuple(_WEIGHTS.values()))[0]
    if phase is None:
        phase = rng.choice(PHASES) if rng.random() < 0.5 else ""
    long = rng.random() < 0.3
    return Fault(
        kind=kind,
        at_ms=at_ms,
        phase=phase,
        count=rng.choice((1, 1, 1, 2, 3)),
        delay_us=rng.choice((0, 0, rng.randint(0, 800), rng.randint(0, 5000))),
        pick=rng.randint(0, 99),
        for_ms=rng.randint(1000, 4000) if long else rng.randint(5, 600),
        same=rng.random() < 0.5,
    )


class Injector:
    """Arms the faults of a schedule and carries them out."""

    def __init__(self, simulation: Simulation, faults: tuple[Fault, ...]) -> None:
        self.simulation = simulation
        self.world = simulation.world
        self.pending = len(faults)
        self.stopped = False
        for fault in faults:
            self.world.later(fault.at_ms * MS, self._arm, fault)

    def _arm(self, fault: Fault) -> None:
        if self.stopped:
            return
        if not fault.phase:
            self._strike(fault, None)
            return
        site = self.simulation.site
        left = [fault.count]

        def hook(worker: SimWorker, phase: str) -> None:
            if phase != fault.phase:
                return
            left[0] -= 1
            if left[0] == 0:
                site.phase_hooks.remove(hook)
                self.world.later(fault.delay_us * 1000, self._strike, fault, worker if fault.same else None)

        site.phase_hooks.append(hook)

    def _strike(self, fault: Fault, worker: SimWorker | None) -> None:
        if self.stopped:
            return
        self.world.log("chaos", f"*** {fault}")
        self.world.seen["faults", fault.kind] += 1
        self.pending -= 1
        getattr(self, f"_{fault.kind}")(fault, worker)

    def _worker(self, fault: Fault, worker: SimWorker | None) -> SimWorker | None:
        if worker is not None:
            return worker
        live = self.simulation.site.live_workers()
        return live[fault.pick % len(live)] if live else None

    def _two_hosts(self, fault: Fault) -> tuple[str, str] | None:
        hosts = self.simulation.hosts
        if len(hosts) < 2:
            return None
        first = fault.pick % len(hosts)
        return hosts[first], hosts[(first + 1 + fault.pick // len(hosts) % (len(hosts) - 1)) % len(hosts)]

    # ---- kinds

    def _kill(self, fault: Fault, worker: SimWorker | None) -> None:
        target = self._worker(fault, worker)
        if target is not None:
            target.die("SIGKILL")

    def _pool(self, fault: Fault, worker: SimWorker | None) -> None:
        """Everybody who has a seat in one stage, by the newest plan; `for_ms`: time between the deaths."""
        plans = self.simulation.checks.plans
        if not plans:
            return
        plan = plans[max(plans)]
        pool = [plan.member(s.worker_id).key for s in plan.pool(fault.pick % plan.stages)]
        for n, key in enumerate(pool):
            target = self.simulation.site.lives.get(key)
            if target is not None:
                self.world.later(n * fault.for_ms * MS, target.die, "SIGKILL")

    def _freeze(self, fault: Fault, worker: SimWorker | None) -> None:
        target = self._worker(fault, worker)
        if target is not None:
            target.freeze()
            if fault.for_ms < 3000:
                self.world.later(fault.for_ms * MS, target.thaw)

    def _coordinator(self, fault: Fault, worker: SimWorker | None) -> None:
        self.simulation.site.crash_coordinator("SIGKILL")
        self.world.later(fault.for_ms * MS, self.simulation.site.start_coordinator)

    def _coordinator_mid_effects(self, fault: Fault, worker: SimWorker | None) -> None:
        process = self.simulation.site.coordinator
        if process is not None:
            process.crash_after_effects = fault.pick % 12
            self.world.later((fault.for_ms + 500) * MS, self.simulation.site.start_coordinator)

    def _coordinator_freeze(self, fault: Fault, worker: SimWorker | None) -> None:
        process = self.simulation.site.coordinator
        if process is not None:
            process.freeze()
            self.world.later(fault.for_ms * MS, process.thaw)

    def _agent_freeze(self, fault: Fault, worker: SimWorker | None) -> None:
        hosts = self.simulation.hosts
        agent = self.simulation.site.agents[hosts[fault.pick % len(hosts)]]
        agent.freeze()
        self.world.later(fault.for_ms * MS, agent.thaw)

    def _last_words(self, fault: Fault, worker: SimWorker | None) -> None:
        """An exception in a worker: it says so and ends."""
        target = self._worker(fault, worker)
        if target is not None and target.frozen_ns is None:
            target.fail(f"error of {target.me} at {self.world.now_ns}")

    def _stale_plan(self, fault: Fault, worker: SimWorker | None) -> None:
        """A plan comes once more, late."""
        target = self._worker(fault, worker)
        plans = (
            [] if target is None else [p for _, p in sorted(self.simulation.checks.plans.items()) if p.has(target.me)]
        )
        if target is not None and plans:
            plan = plans[-1 - fault.pick % min(3, len(plans))]
            again = wire.PlanPrepared(plan=plan) if plan.prepared else wire.PlanNow(plan=plan)
            target.later(self.world.latency_ns(), target.deliver, again)

    def _raises(self, fault: Fault, worker: SimWorker | None) -> None:
        """An exception in a worker's application, which stays for a while with what it holds."""
        target = self._worker(fault, worker)
        if target is not None:
            target.later(0, target.raises, f"error of {target.me} at {self.world.now_ns}")

    def _damage(self, fault: Fault, worker: SimWorker | None) -> None:
        """The newest checkpoint can be listed, but not read."""
        self.simulation.site.disk.damage()

    def _cut(self, fault: Fault, pairs: list[tuple[str, str]]) -> None:
        for a, b in pairs:
            self.world.cut(a, b)
            self.world.later(fault.for_ms * MS, self.world.mend, a, b)

    def _cut_workers(self, fault: Fault, worker: SimWorker | None) -> None:
        hosts = self._two_hosts(fault)
        if hosts is not None:
            self._cut(fault, [hosts])

    def _cut_control(self, fault: Fault, worker: SimWorker | None) -> None:
        hosts = self.simulation.hosts
        host = worker.host if worker is not None else hosts[fault.pick % len(hosts)]
        self._cut(fault, [(host, "control")])

    def _isolate(self, fault: Fault, worker: SimWorker | None) -> None:
        hosts = self.simulation.hosts
        host = worker.host if worker is not None else hosts[fault.pick % len(hosts)]
        self._cut(fault, [(host, other) for other in [*hosts, "control"] if other != host])

    def _link(self, fault: Fault, worker: SimWorker | None) -> None:
        """Break the connections of one worker with another, once."""
        target = self._worker(fault, worker)
        others = [w for w in self.simulation.site.live_workers() if w is not target]
        if target is not None and others:
            other = others[fault.pick % len(others)]
            pair = tuple(sorted((target.name, other.name)))
            for connection in list(self.world.connections):
                if connection.pair == pair:
                    connection.fail()

    def _bad_link(self, fault: Fault, worker: SimWorker | None) -> None:
        target = self._worker(fault, worker)
        others = [w for w in self.simulation.site.live_workers() if w is not target]
        if target is not None and others:
            other = others[fault.pick % len(others)]
            self.world.spoil(target.name, other.name)
            self.world.later(fault.for_ms * MS, self.world.unspoil, target.name, other.name)

    def _host(self, fault: Fault, worker: SimWorker | None) -> None:
        hosts = self.simulation.hosts
        host = hosts[fault.pick % len(hosts)]
        self.simulation.site.agents[host].die("the host lost power")
        self.world.later(fault.for_ms * MS + SECOND // 2, self.simulation.boot, host)

    def _drop_control(self, fault: Fault, worker: SimWorker | None) -> None:
        """Break control connections, of one process or of all."""
        control = [c for c in self.world.connections if c.ends[1].name == "coordinator"]
        for connection in control:
            if fault.pick % 2 or connection.ends[0] is (worker or control[fault.pick % len(control)].ends[0]):
                connection.fail()

    def _scale(self, fault: Fault, worker: SimWorker | None) -> None:
        self.simulation.command("scale", {"workers": 1 + fault.pick % self.simulation.most_workers})

    def _drain(self, fault: Fault, worker: SimWorker | None) -> None:
        target = self._worker(fault, worker)
        if target is not None:
            self.simulation.command("drain", {"worker_id": target.me.worker_id})

    def _stop(self, fault: Fault, worker: SimWorker | None) -> None:
        """The user ends the job, with a checkpoint if there is time."""
        if fault.pick % 3 == 0:  # most seeds are to see the end
            self.simulation.command("stop", {"grace_s": fault.for_ms / 1000})

    def _flip(self, fault: Fault, worker: SimWorker | None) -> None:
        """A bit of one copy of a stage, as soon as there is another copy, and time for a comparison to show it."""
        simulation = self.simulation
        every = simulation.setup.verify_every
        found = [
            (w, stage)
            for w in ([worker] if worker is not None else simulation.site.live_workers())
            if w.can_flip and w.state.at + 2 * every <= simulation.setup.job.steps
            for stage in sorted(set(w.driver.machine.stages) & set(w.state.stages))
            if simulation.copies(w, stage) > 1
        ]
        if found:
            target, stage = found[fault.pick % len(found)]
            self.world.log(target.name, "FLIPPED", stage, "at", target.state.at)
            target.state.flip(stage)
            simulation.checks.corruption.flipped = target.me
        elif not self.stopped:
            self.world.later(7 * MS, self._flip, fault, None)

    # ---- the end of all faults

    def stop(self) -> None:
        """From here on nothing fails: what is cut, frozen or down comes back."""
        self.stopped = True
        simulation = self.simulation
        simulation.site.phase_hooks.clear()
        self.world.log("chaos", "*** the faults stop")
        self.world.mend_all()
        coordinator = simulation.site.coordinator
        if coordinator is not None:
            coordinator.crash_after_effects = None
            coordinator.thaw()
        simulation.site.start_coordinator()
        for worker in simulation.site.live_workers():
            worker.thaw()
        for host in simulation.hosts:
            simulation.site.agents[host].thaw()
        for host in simulation.hosts:
            simulation.boot(host)
