"""Arms the faults of a schedule and carries them out: one function per kind."""

from __future__ import annotations

from collections.abc import Callable

from everstep.base.extents import Extents
from everstep.base.plan import WorkerKey
from everstep.protocol import messages as wire
from everstep.sim.control import CONTROL_HOST, Control
from everstep.sim.faults import SimFault
from everstep.sim.model import PLANES
from everstep.sim.worker import SimWorker
from everstep.sim.world import MS, SECOND


class SimInjector:
    """The faults that are still to strike. verify_every: steps between comparisons of the copies."""

    def __init__(self, control: Control, faults: tuple[SimFault, ...], verify_every: int) -> None:
        self.control = control
        self.world = control.world
        self.verify_every = verify_every
        self.stopped = False
        for fault in faults:
            self.world.later(fault.at_ms * MS, self._arm, fault)

    def _arm(self, fault: SimFault) -> None:
        if self.stopped:
            return
        if not fault.phase:
            self._strike(fault, None)
            return
        hooks = self.control.site.phases.hooks
        left = [fault.count]

        def hook(who: WorkerKey, phase: str) -> None:
            if phase != fault.phase:
                return
            left[0] -= 1
            if left[0] == 0:
                hooks.remove(hook)
                worker = self.control.workers[who] if fault.same else None
                self.world.later(fault.delay_us * 1000, self._strike, fault, worker)

        hooks.append(hook)

    def _strike(self, fault: SimFault, worker: SimWorker | None) -> None:
        if self.stopped:
            return
        self.world.log("chaos", f"*** {fault}")
        self.world.seen["faults", fault.kind] += 1
        _KINDS[fault.kind](self, fault, worker)

    def worker(self, fault: SimFault, worker: SimWorker | None) -> SimWorker | None:
        """Whom the fault strikes, if anybody lives."""
        if worker is not None:
            return worker
        live = self.control.live_workers()
        return live[fault.pick % len(live)] if live else None

    def pair(self, fault: SimFault, worker: SimWorker | None) -> tuple[str, str] | None:
        """The names of whom it strikes and of another."""
        target = self.worker(fault, worker)
        others = [w for w in self.control.live_workers() if w is not target]
        if target is None or not others:
            return None
        return target.life.name, others[fault.pick % len(others)].life.name

    def host(self, fault: SimFault, worker: SimWorker | None = None) -> str:
        """That of the worker, or any."""
        hosts = self.control.hosts
        return worker.life.host if worker is not None else hosts[fault.pick % len(hosts)]

    def cut(self, fault: SimFault, a: str, b: str) -> None:
        """Two hosts cannot reach each other for a while."""
        self.world.cut(a, b)
        self.world.later(fault.for_ms * MS, self.world.mend, a, b)

    def lose(self, target: SimWorker, pick: int, mask: int) -> bool:
        """Some blocks of a stage that it holds; whether it was the time for it. Late ones are no matter."""
        life = target.life
        if not life.alive or self.stopped:
            return True
        driver = life.driver
        held = sorted(set(driver.machine.stages) & set(life.state.stages))
        if not held or not driver.still or life.frozen_ns is not None or driver.position.step != life.state.at:
            return False
        self.world.log(life.name, "LOSES", held[pick % len(held)], mask)
        target.lose(held[pick % len(held)], _blocks(mask))
        return True

    def stop(self) -> None:
        """From here on nothing fails: what is cut, frozen or down comes back."""
        self.stopped = True
        control = self.control
        control.site.phases.hooks.clear()
        self.world.log("chaos", "*** the faults stop")
        self.world.mend_all()
        if control.coordinator is not None:
            control.coordinator.crash_after(None)
            control.coordinator.thaw()
        control.start_coordinator()
        for worker in control.live_workers():
            worker.life.thaw()
        for host in control.hosts:
            control.agents[host].thaw()
        for host in control.hosts:
            control.boot(host)


# ---- workers


def _kill(injector: SimInjector, fault: SimFault, worker: SimWorker | None) -> None:
    target = injector.worker(fault, worker)
    if target is not None:
        target.life.die("SIGKILL")


def _pool(injector: SimInjector, fault: SimFault, worker: SimWorker | None) -> None:
    """Everybody who has a seat in one stage, by the newest plan; `for_ms`: time between the deaths."""
    plans = injector.control.checks.records.plans
    if not plans:
        return
    plan = plans[max(plans)]
    pool = [plan.member(s.worker_id).key for s in plan.pool(fault.pick % plan.stages)]
    for n, key in enumerate(pool):
        target = injector.control.workers.get(key)
        if target is not None:
            injector.world.later(n * fault.for_ms * MS, target.life.die, "SIGKILL")


def _freeze(injector: SimInjector, fault: SimFault, worker: SimWorker | None) -> None:
    target = injector.worker(fault, worker)
    if target is not None:
        target.life.freeze()
        if fault.for_ms < 3000:
            injector.world.later(fault.for_ms * MS, target.life.thaw)


def _last_words(injector: SimInjector, fault: SimFault, worker: SimWorker | None) -> None:
    """An exception in a worker: it says so and ends."""
    target = injector.worker(fault, worker)
    if target is not None and target.life.frozen_ns is None:
        target.ties.fail(f"error of {target.life.me} at {injector.world.now_ns}")


def _raises(injector: SimInjector, fault: SimFault, worker: SimWorker | None) -> None:
    """An exception in a worker's application, which stays for a while with what it holds."""
    target = injector.worker(fault, worker)
    if target is not None:
        target.life.later(0, target.loop.raises, f"error of {target.life.me} at {injector.world.now_ns}")


def _stale_plan(injector: SimInjector, fault: SimFault, worker: SimWorker | None) -> None:
    """A plan comes once more, late."""
    target = injector.worker(fault, worker)
    if target is None:
        return
    plans = [p for _, p in sorted(injector.control.checks.records.plans.items()) if p.has(target.life.me)]
    if plans:
        plan = plans[-1 - fault.pick % min(3, len(plans))]
        again = wire.PlanPrepared(plan=plan) if plan.prepared else wire.PlanNow(plan=plan)
        target.life.later(injector.world.latency_ns(), target.ties.deliver, again)


def _flip(injector: SimInjector, fault: SimFault, worker: SimWorker | None) -> None:
    """A bit of one copy of a stage, as soon as there is another copy, and time for a comparison to show it."""
    site = injector.control.site
    found = [
        (life, stage)
        for one in ([worker] if worker is not None else injector.control.live_workers())
        if one.can_flip and one.life.state.at + 2 * injector.verify_every <= site.checks.job.steps
        for life in (one.life,)
        for stage in sorted(set(life.driver.machine.stages) & set(life.state.stages))
        if site.copies(life, stage) > 1
    ]
    if found:
        target, stage = found[fault.pick % len(found)]
        injector.world.log(target.name, "FLIPPED", stage, "at", target.state.at)
        target.state.flip(stage)
        site.checks.corruption.flip(target.me)
    elif not injector.stopped:
        injector.world.later(7 * MS, _flip, injector, fault, None)


def _lose(injector: SimInjector, fault: SimFault, worker: SimWorker | None) -> None:
    """Blocks of one worker's state, as soon as it may be noticed."""
    target = injector.worker(fault, worker)
    if target is not None and not injector.lose(target, fault.pick, 1 + fault.pick % 15):
        injector.world.later(3 * MS, _lose, injector, fault, target)


def _lose_all(injector: SimInjector, fault: SimFault, worker: SimWorker | None) -> None:
    """Of all workers at once, of each another block: what is left is whole together, unless it is one alone."""
    live = injector.control.live_workers()
    if all(one.life.driver.still for one in live):
        for n, one in enumerate(live):
            injector.lose(one, fault.pick, 1 << (n + fault.pick) % 4)
    elif not injector.stopped:
        injector.world.later(MS, _lose_all, injector, fault, worker)


def _lose_kept(injector: SimInjector, fault: SimFault, worker: SimWorker | None) -> None:
    """Blocks of a snapshot in memory: of one worker, or of all."""
    live = injector.control.live_workers()
    for n, one in enumerate(live):
        if one.holdings and (fault.same or n == fault.pick % len(live)):
            mask = 1 << (n + fault.pick) % 4 if fault.same else 1 + fault.pick % 15
            one.lose_kept(*one.holdings[-1], _blocks(mask))


def _blocks(mask: int) -> Extents:
    return Extents.numbered(PLANES, (k for k in range(4) if mask >> k & 1))


# ---- the coordinator and hosts


def _coordinator(injector: SimInjector, fault: SimFault, worker: SimWorker | None) -> None:
    injector.control.crash_coordinator("SIGKILL")
    injector.world.later(fault.for_ms * MS, injector.control.start_coordinator)


def _coordinator_mid_effects(injector: SimInjector, fault: SimFault, worker: SimWorker | None) -> None:
    process = injector.control.coordinator
    if process is not None:
        process.crash_after(fault.pick % 12)
        injector.world.later((fault.for_ms + 500) * MS, injector.control.start_coordinator)


def _coordinator_freeze(injector: SimInjector, fault: SimFault, worker: SimWorker | None) -> None:
    process = injector.control.coordinator
    if process is not None:
        process.freeze()
        injector.world.later(fault.for_ms * MS, process.thaw)


def _agent_freeze(injector: SimInjector, fault: SimFault, worker: SimWorker | None) -> None:
    agent = injector.control.agents[injector.host(fault)]
    agent.freeze()
    injector.world.later(fault.for_ms * MS, agent.thaw)


def _host(injector: SimInjector, fault: SimFault, worker: SimWorker | None) -> None:
    host = injector.host(fault)
    injector.control.agents[host].die("the host lost power")
    injector.world.later(fault.for_ms * MS + SECOND // 2, injector.control.boot, host)


def _damage(injector: SimInjector, fault: SimFault, worker: SimWorker | None) -> None:
    """The newest checkpoint can be listed, but not read."""
    injector.control.site.disk.damage()


# ---- the network


def _cut_workers(injector: SimInjector, fault: SimFault, worker: SimWorker | None) -> None:
    hosts = injector.control.hosts
    if len(hosts) > 1:
        first = fault.pick % len(hosts)
        second = (first + 1 + fault.pick // len(hosts) % (len(hosts) - 1)) % len(hosts)
        injector.cut(fault, hosts[first], hosts[second])


def _cut_control(injector: SimInjector, fault: SimFault, worker: SimWorker | None) -> None:
    injector.cut(fault, injector.host(fault, worker), CONTROL_HOST)


def _isolate(injector: SimInjector, fault: SimFault, worker: SimWorker | None) -> None:
    host = injector.host(fault, worker)
    for other in [*injector.control.hosts, CONTROL_HOST]:
        if other != host:
            injector.cut(fault, host, other)


def _link(injector: SimInjector, fault: SimFault, worker: SimWorker | None) -> None:
    """Break the connections of one worker with another, once."""
    pair = injector.pair(fault, worker)
    if pair is not None:
        for connection in list(injector.world.connections):
            if connection.pair == tuple(sorted(pair)):
                connection.fail()


def _bad_link(injector: SimInjector, fault: SimFault, worker: SimWorker | None) -> None:
    pair = injector.pair(fault, worker)
    if pair is not None:
        injector.world.spoil(*pair)
        injector.world.later(fault.for_ms * MS, injector.world.unspoil, *pair)


def _drop_control(injector: SimInjector, fault: SimFault, worker: SimWorker | None) -> None:
    """Break control connections, of one process or of all."""
    control = [c for c in injector.world.connections if c.ends[1].name == "coordinator"]
    owner = None if worker is None else worker.life
    for connection in control:
        if fault.pick % 2 or connection.ends[0] is (owner or control[fault.pick % len(control)].ends[0]):
            connection.fail()


# ---- what users do


def _scale(injector: SimInjector, fault: SimFault, worker: SimWorker | None) -> None:
    injector.control.command("scale", {"workers": 1 + fault.pick % injector.control.checks.job.lanes})


def _drain(injector: SimInjector, fault: SimFault, worker: SimWorker | None) -> None:
    target = injector.worker(fault, worker)
    if target is not None:
        injector.control.command("drain", {"worker_id": target.life.me.worker_id})


def _stop(injector: SimInjector, fault: SimFault, worker: SimWorker | None) -> None:
    """The user ends the job, with a checkpoint if there is time."""
    if fault.pick % 3 == 0:  # most seeds are to see the end
        injector.control.command("stop", {"grace_s": fault.for_ms / 1000})


_KINDS: dict[str, Callable[[SimInjector, SimFault, SimWorker | None], None]] = {
    "kill": _kill,
    "pool": _pool,
    "freeze": _freeze,
    "last_words": _last_words,
    "raises": _raises,
    "stale_plan": _stale_plan,
    "flip": _flip,
    "coordinator": _coordinator,
    "coordinator_mid_effects": _coordinator_mid_effects,
    "coordinator_freeze": _coordinator_freeze,
    "agent_freeze": _agent_freeze,
    "host": _host,
    "damage": _damage,
    "cut_workers": _cut_workers,
    "cut_control": _cut_control,
    "isolate": _isolate,
    "link": _link,
    "bad_link": _bad_link,
    "drop_control": _drop_control,
    "scale": _scale,
    "drain": _drain,
    "stop": _stop,
    "lose": _lose,
    "lose_all": _lose_all,
    "lose_kept": _lose_kept,
}
