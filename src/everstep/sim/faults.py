"""Faults of a simulation: drawn from the seed, at a time or aimed at a phase of the protocol, as readable data.

A fault aimed at a phase strikes when any worker enters it. Faults come in twos often enough that the second hits the
first one's recovery, so settling, fetching, healing and switching get their share.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from random import Random

from everstep.base.cause import Cause, Why
from everstep.base.extents import Extents
from everstep.base.plan import WorkerKey
from everstep.protocol import messages as wire
from everstep.protocol.roles import JOB
from everstep.sim.control import CONTROL_HOST, Control, forget
from everstep.sim.model import Blocks, planes_of
from everstep.sim.sim_worker import SimWorker
from everstep.sim.world import MS, SECOND

PHASES = ("settling", "fetching", "heal", "computing", "reducing", "agreeing", "updating", "gathering")


@dataclass(frozen=True)
class SimFault:
    """After `at_ms` it strikes at once (`phase` ""), or `delay_us` after the `count`-th time that a worker enters the
    phase. `pick`: of the possible targets; `for_ms`: how long; `stages`: of the job from then on; 0: as before."""

    kind: str
    at_ms: int
    phase: str = ""
    count: int = 1
    delay_us: int = 0
    pick: int = 0
    for_ms: int = 0
    same: bool = False  # aimed at the worker that entered the phase
    stages: int = 0

    def __str__(self) -> str:
        when = f"at {self.at_ms} ms"
        if self.phase:
            when += f", {self.delay_us} us after '{self.phase}' number {self.count}{' there' if self.same else ''}"
        lasts = f" for {self.for_ms} ms" if self.for_ms else ""
        cut = f" into {self.stages} stages" if self.stages else ""
        return f"{self.kind}[{self.pick}]{cut}{lasts} {when}"


def draw(rng: Random, horizon_ms: int) -> tuple[SimFault, ...]:
    """A schedule of mostly 0 to 6 faults within the horizon, in order of time; now and then a storm of a dozen."""
    faults: list[SimFault] = []
    for _ in range(rng.choice((0, 1, 1, 2, 2, 2, 3, 3, 4)) if rng.random() < 0.93 else rng.randint(8, 14)):
        faults.append(draw_one(rng, rng.randint(5, horizon_ms)))
        if rng.random() < 0.45:  # a second one, into the recovery of the first
            first = faults[-1]
            phase = rng.choice(("settling", "settling", "fetching", "heal", "heal", "updating", "agreeing", ""))
            at = first.at_ms if phase else first.at_ms + rng.randint(0, 60)
            faults.append(draw_one(rng, at, phase))
    return tuple(sorted(faults, key=lambda f: f.at_ms))


def draw_split(rng: Random, horizon_ms: int) -> tuple[SimFault, ...]:
    """A schedule for a model in several stages: in addition, whole pools die, at once or one member after the other."""
    faults = list(draw(rng, horizon_ms))
    for _ in range(rng.choice((0, 1, 1, 1, 2, 2))):
        at = rng.randint(30, horizon_ms)
        phase = rng.choice(("", "", *PHASES))
        faults.append(replace(draw_one(rng, at, phase), kind="pool", for_ms=rng.choice((0, 0, 1, 5, 40))))
        if rng.random() < 0.5:  # into the settling
            second = rng.choice(("settling", "fetching", "fetching", "computing", "updating"))
            faults.append(replace(draw_one(rng, at, second), kind=rng.choice(("kill", "kill", "pool", "freeze"))))
    return tuple(sorted(faults, key=lambda f: f.at_ms))


def draw_losses(rng: Random, horizon_ms: int) -> tuple[SimFault, ...]:
    """Losses of blocks of snapshots in memory, in every third schedule; often several, or in a recovery."""
    faults: list[SimFault] = []
    for _ in range(rng.choice((1, 1, 2, 4)) if rng.random() < 0.35 else 0):
        one = draw_one(rng, rng.randint(20, horizon_ms))
        faults.append(replace(one, kind="lose_kept"))
        if rng.random() < 0.5:
            phase = rng.choice(("settling", "fetching", "fetching", "heal", "reducing"))
            second = draw_one(rng, one.at_ms + rng.randint(0, 20), phase)
            faults.append(replace(second, kind=rng.choice(("lose_kept", "lose_kept", "kill", "kill", "link"))))
    return tuple(faults)


def draw_more(rng: Random, horizon_ms: int, *, resumes: bool) -> tuple[SimFault, ...]:
    """Faults beyond workers and links, in every second schedule. resumes: the job may die as a whole."""
    faults: list[SimFault] = []
    for _ in range(rng.choice((1, 1, 2)) if rng.random() < 0.5 else 0):
        one = draw_one(rng, rng.randint(20, horizon_ms))
        kind = rng.choices(list(_MORE), weights=list(_MORE.values()))[0]
        if kind == "launcher" and not resumes:
            kind = "fork_server"
        faults.append(replace(one, kind=kind))
        if kind == "disk_full":  # and there must be something to write
            faults += [replace(one, kind="save", at_ms=one.at_ms + rng.randint(0, 100)) for _ in range(2)]
    return tuple(faults)


def draw_one(rng: Random, at_ms: int, phase: str | None = None) -> SimFault:
    """Any fault at a time, perhaps aimed at a phase."""
    kind = rng.choices(list(_KINDS), weights=[weight for weight, _ in _KINDS.values()])[0]
    if phase is None:
        phase = rng.choice(PHASES) if rng.random() < 0.5 else ""
    long = rng.random() < 0.3
    return SimFault(
        kind=kind,
        at_ms=at_ms,
        phase=phase,
        count=rng.choice((1, 1, 1, 2, 3)),
        delay_us=rng.choice((0, 0, rng.randint(0, 800), rng.randint(0, 5000))),
        pick=rng.randint(0, 99),
        for_ms=rng.randint(1000, 4000) if long else rng.randint(5, 600),
        same=rng.random() < 0.5,
    )


Strikes = Callable[["SimInjector", SimFault, SimWorker | None], None]


class SimInjector:
    """The faults that are still to strike. more: strikes of kinds that are not in the table here."""

    def __init__(self, control: Control, faults: tuple[SimFault, ...], more: Mapping[str, Strikes] = {}) -> None:
        self._more = more
        self.control = control
        self.world = control.world
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
        if not self.stopped:
            self.world.log("chaos", f"*** {fault}")
            self.world.seen["faults", fault.kind] += 1
            (self._more.get(fault.kind) or _KINDS[fault.kind][1])(self, fault, worker)

    def for_a_while(self, fault: SimFault, end: Callable[..., None], *args: object) -> None:
        """End the fault after its time."""
        self.world.later(fault.for_ms * MS, end, *args)

    def host(self, fault: SimFault, worker: SimWorker | None = None) -> str:
        """The worker's host, or any host."""
        hosts = self.control.hosts
        return worker.host if worker is not None else hosts[fault.pick % len(hosts)]

    def cut(self, fault: SimFault, a: str, b: str) -> None:
        """Cut two hosts off from each other for a while."""
        self.world.cut(a, b)
        self.for_a_while(fault, self.world.mend, a, b)

    def stop(self) -> None:
        """Stop all faults: cut links, frozen processes and dead hosts come back."""
        self.stopped = True
        control = self.control
        control.site.phases.hooks.clear()
        self.world.log("chaos", "*** the faults stop")
        self.world.mend_all()
        control.mend()
        control.site.disk.empty_all()
        control.resume(control.size, control.checks.job.stages)
        control.start_coordinator()
        for worker in control.live_workers():
            worker.thaw()
        for host in control.hosts:
            control.agents[host].thaw()
            control.agents[host].replace_fork_server()
        for host in control.hosts:
            control.boot(host)


# ---- one worker: the one that entered the phase, or any


def _one(strikes: Callable[[SimInjector, SimFault, SimWorker], None]) -> Strikes:
    """A fault of one worker, if any lives."""

    def strike(injector: SimInjector, fault: SimFault, worker: SimWorker | None) -> None:
        live = injector.control.live_workers()
        if worker is not None or live:
            strikes(injector, fault, worker or live[fault.pick % len(live)])

    return strike


def _kill(injector: SimInjector, fault: SimFault, target: SimWorker) -> None:
    target.die("SIGKILL")


def _freeze(injector: SimInjector, fault: SimFault, target: SimWorker) -> None:
    target.freeze()
    if fault.for_ms < 3000:
        injector.for_a_while(fault, target.thaw)


def _last_words(injector: SimInjector, fault: SimFault, target: SimWorker) -> None:
    """An exception in a worker: it reports it and ends."""
    if target.frozen_ns is None:
        target.ties.fail(f"error of {target.me} at {injector.world.now_ns}")


def _raises(injector: SimInjector, fault: SimFault, target: SimWorker) -> None:
    """An exception in a worker's application; the worker stays for a while with its state."""
    target.later(0, target.loop.raises, f"error of {target.me} at {injector.world.now_ns}")


def _leave(injector: SimInjector, fault: SimFault, target: SimWorker) -> None:
    """Its application leaves its loop, and no other does."""
    if target.driver.machine.step:
        target.later(0, target.loop.leave)


def _stale_plan(injector: SimInjector, fault: SimFault, target: SimWorker) -> None:
    """A plan comes again, late."""
    plans = [p for _, p in sorted(injector.control.checks.records.plans.items()) if p.has(target.me)]
    if plans:
        plan = plans[-1 - fault.pick % min(3, len(plans))]
        again = wire.PlanPrepared(plan=plan) if plan.prepared else wire.PlanNow(plan=plan)
        target.later(injector.world.latency_ns(), target.ties.deliver, again)


def _old_plan(injector: SimInjector, fault: SimFault, target: SimWorker) -> None:
    """Any earlier plan comes again, as an immediate or a prepared one."""
    plans = [p for _, p in sorted(injector.control.checks.records.plans.items())]
    if plans:
        plan = plans[fault.pick % len(plans)]
        again = wire.PlanPrepared(plan=plan) if plan.prepared else wire.PlanNow(plan=plan)
        target.later(injector.world.latency_ns(), target.ties.deliver, again)


def _double_plan(injector: SimInjector, fault: SimFault, target: SimWorker) -> None:
    """The newest plan that has the worker comes twice more, one right after the other."""
    plans = [p for _, p in sorted(injector.control.checks.records.plans.items()) if p.has(target.me)]
    for plan in plans[-1:] * 2:
        again = wire.PlanPrepared(plan=plan) if plan.prepared else wire.PlanNow(plan=plan)
        target.later(0, target.ties.deliver, again)


def _pair(injector: SimInjector, fault: SimFault, target: SimWorker) -> tuple[str, str] | None:
    """Names of the worker and of another."""
    others = [w.name for w in injector.control.live_workers() if w is not target]
    return (target.name, others[fault.pick % len(others)]) if others else None


def _link(injector: SimInjector, fault: SimFault, target: SimWorker) -> None:
    """Break the worker's connections with another, once."""
    pair = _pair(injector, fault, target)
    for connection in list(injector.world.connections):
        if pair is not None and connection.pair == tuple(sorted(pair)):
            connection.fail()


def _bad_link(injector: SimInjector, fault: SimFault, target: SimWorker) -> None:
    pair = _pair(injector, fault, target)
    if pair is not None:
        injector.world.spoil(*pair)
        injector.for_a_while(fault, injector.world.unspoil, *pair)


def _drain(injector: SimInjector, fault: SimFault, target: SimWorker) -> None:
    injector.control.command("drain", {"worker_id": target.me.worker_id})


# ---- several workers


def _pool(injector: SimInjector, fault: SimFault, worker: SimWorker | None) -> None:
    """All members of one stage's pool die, by the newest plan; `for_ms`: time between the deaths."""
    plans = injector.control.checks.records.plans
    if not plans:
        return
    plan = plans[max(plans)]
    for n, seat in enumerate(plan.pool(fault.pick % plan.stages)):
        target = injector.control.workers.get(plan.member(seat.worker_id).key)
        if target is not None:
            injector.world.later(n * fault.for_ms * MS, target.die, "SIGKILL")


def _flip(injector: SimInjector, fault: SimFault, worker: SimWorker | None) -> None:
    """Flip a bit of one copy of a stage that has another copy; not of one that was healed and not compared since, for
    that would be taken for drift."""
    site = injector.control.site
    found = [
        (one, stage)
        for one in ([worker] if worker is not None else injector.control.live_workers())
        if one.can_flip and not one.driver.fresh
        for stage in sorted(set(one.driver.machine.stages) & set(one.state.stages))
        if site.copies(one, stage) > 1
    ]
    if found:
        target, stage = found[fault.pick % len(found)]
        injector.world.log(target.name, "FLIPPED", stage, "at", target.state.at)
        target.state.flip(stage)
        site.checks.taint.flip()
    elif not injector.stopped:
        injector.world.later(7 * MS, _flip, injector, fault, None)


def _lose_kept(injector: SimInjector, fault: SimFault, worker: SimWorker | None) -> None:
    """Lose blocks of a snapshot in memory: of one worker, or of all."""
    live = injector.control.live_workers()
    for n, one in enumerate(live):
        if one.holdings and (fault.same or n == fault.pick % len(live)):
            mask = 1 << (n + fault.pick) % 4 if fault.same else 1 + fault.pick % 15
            one.memory.lose(*one.holdings[-1], _blocks(mask, one.memory.kept[one.holdings[-1]]))


def _blocks(mask: int, state: Blocks) -> Extents:
    return Extents.numbered(planes_of(state), (k for k in range(len(state)) if mask >> k & 1))


# ---- the coordinator and hosts


def _coordinator(injector: SimInjector, fault: SimFault, worker: SimWorker | None) -> None:
    injector.control.coordinator.die("SIGKILL")
    injector.for_a_while(fault, injector.control.start_coordinator)


def _coordinator_mid_effects(injector: SimInjector, fault: SimFault, worker: SimWorker | None) -> None:
    injector.control.coordinator.crash_after(fault.pick % 12)
    injector.world.later((fault.for_ms + 500) * MS, injector.control.start_coordinator)


def _coordinator_freeze(injector: SimInjector, fault: SimFault, worker: SimWorker | None) -> None:
    injector.control.coordinator.freeze()
    injector.for_a_while(fault, injector.control.coordinator.thaw)


def _agent_freeze(injector: SimInjector, fault: SimFault, worker: SimWorker | None) -> None:
    agent = injector.control.agents[injector.host(fault)]
    agent.freeze()
    injector.for_a_while(fault, agent.thaw)


def _host(injector: SimInjector, fault: SimFault, worker: SimWorker | None) -> None:
    host = injector.host(fault)
    injector.control.agents[host].die("the host lost power")
    injector.world.later(fault.for_ms * MS + SECOND // 2, injector.control.boot, host)


def _drain_host(injector: SimInjector, fault: SimFault, worker: SimWorker | None) -> None:
    """The workers of a host leave in order, and then its agent; the host comes back later."""
    host = injector.host(fault)
    injector.control.command("drain", {"host": host})
    injector.world.later(fault.for_ms * MS + SECOND // 2, injector.control.boot, host)


def _fork_server(injector: SimInjector, fault: SimFault, worker: SimWorker | None) -> None:
    """A host's fork server dies; its workers outlive it. It takes a while until there is another."""
    agent = injector.control.agents[injector.host(fault, worker)]
    agent.lose_fork_server()
    injector.for_a_while(fault, agent.replace_fork_server)


def _host_workers(injector: SimInjector, fault: SimFault, worker: SimWorker | None) -> None:
    """All workers of a host die at once; the agent lives, and starts them again."""
    for _, one in sorted(injector.control.agents[injector.host(fault, worker)].workers.items()):
        one.die("all workers of its host died")


def _launcher(injector: SimInjector, fault: SimFault, worker: SimWorker | None) -> None:
    """The whole job dies, and is resumed, perhaps with other numbers of workers and stages."""
    control = injector.control
    if not control.fallen:
        most = min(5, control.checks.job.lanes)
        control.fall()
        stages = fault.stages or control.checks.job.stages
        injector.for_a_while(fault, control.resume, 1 + fault.pick % most, stages)


def _disk_full(injector: SimInjector, fault: SimFault, worker: SimWorker | None) -> None:
    """The disk is full for a while."""
    disk = injector.control.site.disk
    disk.fill()
    injector.for_a_while(fault, disk.empty)


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


def _one_way(injector: SimInjector, fault: SimFault, worker: SimWorker | None) -> None:
    """Packets of one host do not arrive at one of the others, or at the coordinator; or the other way round."""
    host = injector.host(fault, worker)
    others = [CONTROL_HOST, *(h for h in injector.control.hosts if h != host)]
    a, b = (host, others[fault.pick // 2 % len(others)])[:: 1 if fault.pick % 2 else -1]
    injector.world.cut_one_way(a, b)
    injector.for_a_while(fault, injector.world.mend_one_way, a, b)


def _drop_control(injector: SimInjector, fault: SimFault, worker: SimWorker | None) -> None:
    """Break control connections, of one process or of all."""
    control = [c for c in injector.world.connections if c.ends[1].name == "coordinator"]
    owner = None if worker is None else worker
    for connection in control:
        if fault.pick % 2 or connection.ends[0] is (owner or control[fault.pick % len(control)].ends[0]):
            connection.fail()


# ---- users' commands


def _scale(injector: SimInjector, fault: SimFault, worker: SimWorker | None) -> None:
    injector.control.command("scale", {"workers": 1 + fault.pick % injector.control.checks.job.lanes})


def _stop(injector: SimInjector, fault: SimFault, worker: SimWorker | None) -> None:
    """The user ends the job, with a checkpoint if there is time."""
    if fault.pick % 3 == 0:  # most seeds should run to the end
        injector.control.command("stop", {"grace_s": fault.for_ms / 1000})


def _end_alone(injector: SimInjector, fault: SimFault, worker: SimWorker | None) -> None:
    """A signal to the job while its coordinator is dead: only the agent of the job's own host is told. for_ms: time
    after which the coordinator is back, and is asked to end the job; 0: never."""
    control = injector.control
    control.coordinator.die("SIGKILL")
    control.agents[control.hosts[0]].end_alone(Why(Cause.INTERRUPTED, "interrupted"))
    if fault.for_ms:
        injector.for_a_while(fault, control.start_coordinator)
        injector.for_a_while(fault, control.command, "stop", {"grace_s": 10.0}, JOB)
    else:
        _all_gone(injector)


def _all_gone(injector: SimInjector) -> None:
    """The job's process leaves with the last worker."""
    if injector.control.live_workers():
        injector.world.later(5 * MS, _all_gone, injector)
    else:
        injector.control.fate.began("interrupted", "")


def _senseless(injector: SimInjector, fault: SimFault, worker: SimWorker | None) -> None:
    """A plan in the journal makes no sense when the coordinator is started again."""
    control = injector.control
    control.coordinator.die("SIGKILL")
    plans = [n for n, entry in enumerate(control.journal) if entry["kind"] == "plan"]
    if plans:
        control.journal[plans[-1 - fault.pick % len(plans)]] = {"kind": "plan", "plan": {"generation": "none"}}
        forget(control, 0)
    injector.for_a_while(fault, control.start_coordinator)


def _given_up(injector: SimInjector, fault: SimFault, target: SimWorker) -> None:
    """An agent gives up a slot, and the coordinator dies before it has heard of it, unless the slot is worn."""
    if fault.kind == "given_up":
        injector.control.coordinator.die("SIGKILL")
        injector.for_a_while(fault, injector.control.start_coordinator)
    injector.control.agents[target.host].give_up(target)


def _save(injector: SimInjector, fault: SimFault, worker: SimWorker | None) -> None:
    injector.control.command("checkpoint", {})


def _signal(injector: SimInjector, fault: SimFault, worker: SimWorker | None) -> None:
    """The job is told to end, and after a while told to end at once."""
    injector.control.command("stop", {"grace_s": 10.0})
    injector.for_a_while(fault, injector.control.command, "stop", {})


_KINDS: dict[str, tuple[int, Strikes]] = {
    "kill": (8, _one(_kill)),
    "freeze": (3, _one(_freeze)),
    "coordinator": (3, _coordinator),
    "coordinator_mid_effects": (3, _coordinator_mid_effects),
    "cut_workers": (2, _cut_workers),
    "cut_control": (2, _cut_control),
    "isolate": (1, _isolate),
    "one_way": (0, _one_way),
    "link": (2, _one(_link)),
    "bad_link": (1, _one(_bad_link)),
    "host": (1, _host),
    "drop_control": (2, _drop_control),
    "scale": (3, _scale),
    "drain": (2, _one(_drain)),
    "coordinator_freeze": (1, _coordinator_freeze),
    "agent_freeze": (1, _agent_freeze),
    "last_words": (2, _one(_last_words)),
    "stale_plan": (2, _one(_stale_plan)),
    "raises": (2, _one(_raises)),
    "leave": (0, _one(_leave)),
    "damage": (1, _damage),
    "stop": (1, _stop),
    "pool": (0, _pool),
    "lose_kept": (0, _lose_kept),
    "flip": (0, _flip),
    "save": (0, _save),
    "signal": (0, _signal),
    "end_alone": (0, _end_alone),
    "senseless": (0, _senseless),
    "given_up": (0, _one(_given_up)),
    "worn": (0, _one(_given_up)),
    "old_plan": (0, _one(_old_plan)),
    "double_plan": (0, _one(_double_plan)),
    "drain_host": (0, _drain_host),
    "fork_server": (0, _fork_server),
    "host_workers": (0, _host_workers),
    "launcher": (0, _launcher),
    "disk_full": (0, _disk_full),
}
"""Weight of each kind among the others, and its strike. Those of 0 are drawn by `_MORE`, or apart."""
_MORE = {
    "one_way": 3,
    "save": 3,
    "disk_full": 2,
    "fork_server": 2,
    "host_workers": 1,
    "old_plan": 2,
    "double_plan": 2,
    "launcher": 3,
    "signal": 1,
}
DIFFERS = ("faults", "differs")
"""A worker that builds another initial state than all others; it has no time."""
_APART = ("drain_host", "end_alone", "senseless", "given_up", "worn")
KNOWN = (*(("faults", kind) for kind in _KINDS if kind not in _APART), DIFFERS)
"""Cases that `World.seen` counts; the others have scenarios of their own."""
