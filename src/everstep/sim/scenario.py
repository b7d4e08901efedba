"""One simulation from its seed, or many: the setup, the faults, and whether the promises held.

First safety under faults; then the faults stop, everything that is down comes back, and the training must finish within
a bound of virtual time. For a seed that breaks a promise the command that replays it is printed.
"""

from __future__ import annotations

import gc
import itertools
import json
import re
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import itemgetter
from typing import Any, Literal

from everstep.base.config_keys import CheckpointConfig, DiskTierConfig, MemoryTierConfig
from everstep.base.extents import NONE, Extents
from everstep.base.plan import WorkerKey
from everstep.base.pool_wish import PoolWish, even_homes
from everstep.placement.probes import ProbeRule
from everstep.protocol.coordinator.coordinator import Coordinator
from everstep.protocol.coordinator.types import Alike, CoordinatorConfig, HostRules
from everstep.protocol.driver.driver import Driver
from everstep.protocol.driver.driver_parts import DriverConfig
from everstep.protocol.driver.nonfinite import NonfiniteRule
from everstep.protocol.driver.records import StepOutcome
from everstep.protocol.driver.saver import SavingRules
from everstep.protocol.identity import Code, read_code, read_divides, read_kernels
from everstep.protocol.step_machine import StepMachine
from everstep.protocol.step_types import Key, Record
from everstep.sim.checks import Checks, ToldTwice, Views
from everstep.sim.control import (
    HEARTBEAT_NS,
    AgentProcess,
    Client,
    Control,
    SimCoordinator,
)
from everstep.sim.damaging import DAMAGE_FAULTS
from everstep.sim.faults import DIFFERS, SimInjector
from everstep.sim.faults import KNOWN as FAULTS
from everstep.sim.holders import HOLDER_FAULTS
from everstep.sim.leases import LEASE_FAULTS, LeasedControl
from everstep.sim.life import Disk, Life, SimSite
from everstep.sim.model import PLANES, present, wrong
from everstep.sim.odd_messages import HOST_FAILED, NO_SPACE, ODD_FAULTS
from everstep.sim.odd_messages import UNLIKE as UNLIKE_SAID
from everstep.sim.operating import OPERATING_FAULTS
from everstep.sim.orders import STRIKES
from everstep.sim.promises import freed, require
from everstep.sim.setups import (
    LeasedSetup,
    Setup,
    UnlikeSetup,
    set_up,
    set_up_leased,
    set_up_operated,
    set_up_sharded,
    set_up_split,
)
from everstep.sim.shrinking import MOST_RUNS, shrink, source_of
from everstep.sim.sim_worker import KNOWN as WAYS
from everstep.sim.sim_worker import METRIC
from everstep.sim.starving import STARVING_FAULTS, SimLauncher
from everstep.sim.world import MS, SECOND, SimConnection, World

SeedKind = Literal["", "split", "leased", "operated", "sharded"]
"""Kinds of seeds: whole models; models in several stages; jobs with two coordinators, of either; jobs of any of these,
in which people and the owners of hosts have a hand; jobs whose members divide the optimizer's state."""
NewDriver = Callable[[DriverConfig, StepMachine], Driver]
NewCoordinator = Callable[[CoordinatorConfig, Sequence[dict[str, Any]], int], Coordinator]

FAULTS_STOP_NS = 6 * SECOND
LIVENESS_NS = 120 * SECOND
DRAIN_NS = 5 * SECOND
LOOK_NS = 200 * MS
DRIFT = ("ends", "drift")
NONFINITE = ("ends", "not finite")
UNLIKE = ("ends", "members that compute otherwise")
TOLD_TWICE = ("ends", "a number told twice")
TOO_FEW = ("ends", "slots given up")
HUNG_TWICE = ("ends", "a second hang")
WAITED = ("ends", "nobody came in time")
FAILED_HOST = ("ends", "a host that fails")
RAISED = ("ends", "two that raise before the first step")
OTHERS = ("ends", "workers that are not alike")
MOST_LOOKS = 5
_NEVER_S = 1e9
_FAILURE_CHARS = 60
_MORE_FAULTS = {**LEASE_FAULTS, **STARVING_FAULTS, **DAMAGE_FAULTS, **OPERATING_FAULTS, **HOLDER_FAULTS, **ODD_FAULTS}


@dataclass(frozen=True)
class Verdict:
    """Outcome of a seed. `problem` is "" if every promise held."""

    seed: int
    setup: Setup
    problem: str
    steps: int
    generations: int
    events: int
    lost_everything: int
    reports: dict[str, int]
    targets: tuple[int, ...]  # steps that a worker went back to, each time
    flipped: bool  # a bit of a copy
    found: bool  # a comparison has found it
    unnoticed: bool  # all copies were alike when they were compared
    trace: tuple[str, ...]
    seen: Mapping[tuple[str, str], int]  # counts by group and name
    digest: str  # alike where each message and report was alike and came at the same time

    @property
    def ok(self) -> bool:
        return not self.problem

    @property
    def promise(self) -> str:
        """What was broken, or the kind of error; "" if every promise held."""
        return self.problem.partition(":")[0]

    @property
    def failure(self) -> str:
        """How the problem begins, without its numbers: alike where the same goes wrong in another schedule."""
        return re.sub(r"[0-9.]+", "", self.problem)[:_FAILURE_CHARS]

    def __str__(self) -> str:
        verdict = "ok" if self.ok else f"FAILED: {self.problem}"
        return f"seed {self.seed}: {verdict}\n{self.setup}"


@dataclass(frozen=True)
class SimDriverConfig(DriverConfig):
    """Remembers outcomes: members conclude the same from the same records."""

    known: dict[tuple[int, tuple[tuple[int, Record], ...]], StepOutcome] = field(default_factory=dict)

    def outcome(self, number: int, records: Mapping[int, Record]) -> StepOutcome:
        made_from = number, tuple(sorted(records.items(), key=itemgetter(0)))
        found = self.known.get(made_from)
        if found is None:
            found = self.known[made_from] = super().outcome(number, records)
        return found


class Simulation:
    """One run, put together."""

    def __init__(
        self,
        seed: int,
        setup: Setup,
        tracing: bool,
        machine: type[StepMachine] = StepMachine,
        coordinator: NewCoordinator = Coordinator,
        driver: NewDriver = Driver,
    ) -> None:
        self.setup = setup
        self.world = World(seed, tracing)
        self.checks = Checks(setup.job, Views(self._holders, self._position, self._settled))
        self.new_machine, self.new_driver, self.new_coordinator = machine, driver, coordinator
        hosts = [f"host{i}" for i in range(setup.hosts)]
        seeing = None if setup.disk_hosts is None else frozenset(hosts[: setup.disk_hosts])
        drifts = setup.differs if isinstance(setup.differs, str) else ""
        self.differs = WorkerKey(setup.differs, 0) if isinstance(setup.differs, int) else None
        self.world.seen[DIFFERS] += self.differs is not None
        foreign = self.foreign = hosts[-1] if isinstance(setup, UnlikeSetup) else ""
        odd = setup.differs if isinstance(setup.differs, WorkerKey) else None
        site = SimSite(self.world, self.checks, Disk(seeing), setup.donors, self.differs, foreign, drifts, odd)
        self.facts = site.facts
        control = LeasedControl if isinstance(setup, LeasedSetup) else Control
        size = setup.workers, setup.spares
        self.control = control(site, hosts, size, self._coordinator, self._driver, setup.rules)
        for host in hosts:
            self.control.boot(host)
        self.injector = SimInjector(self.control, setup.faults, _MORE_FAULTS)
        self.launcher = None if isinstance(setup, LeasedSetup) else SimLauncher(self.control)
        self.unused: dict[SimConnection, int] = {}  # and how often they were seen
        self._look()

    def _coordinator(self, journal: Sequence[dict[str, Any]], workers: int, term: int) -> Coordinator:
        """Coordinator of a job that was started with this many workers; it has the present number of stages."""
        setup, stages = self.setup, self.checks.job.stages
        config = CoordinatorConfig(
            lanes=setup.job.lanes,
            stages=stages,
            workers=workers,
            min_workers=min(setup.min_workers, workers),
            on_failure=setup.on_failure,
            hang_limit_ns=1 * SECOND,
            heartbeat_floor_ns=500 * MS,
            heartbeat_ceiling_ns=1500 * MS,
            heartbeat_interval_ns=HEARTBEAT_NS,
            quorum_wait_ns=3600 * SECOND,
            hosts=HostRules(
                grace_ns=1 * SECOND,
                return_ns=2 * SECOND,
                term=term,
                strikes=STRIKES,
                alike=Alike(
                    read_kernels(self.facts.get("numerics")),
                    read_code(self.facts.get("code")) or Code(),
                    read_code(self.facts.get("code_before")) or Code(),
                    setup.rules.warns,
                    read_divides(self.facts.get("divides")),
                ),
            ),
            save_ns=setup.save_ms * MS,
            wish=PoolWish(
                homes=even_homes(workers, stages),
                active=(setup.active,) * stages if setup.active else (),
                copies=setup.job.copies,
            ),
        )
        told = self.control.site.last_generation if journal else 0
        return self.new_coordinator(setup.rules.of_coordinator(config), list(journal), told)

    def _driver(self, key: WorkerKey) -> Driver:
        return self.new_driver(self._driver_config, self.new_machine(key))

    @cached_property
    def _driver_config(self) -> DriverConfig:
        job, every = self.setup.job, self.setup.verify_every
        memory, judged = MemoryTierConfig(every_steps=job.keep_every or None), job.write_every == 2
        disk = DiskTierConfig(job.write_every or None, keep_best=int(judged))
        rule = CheckpointConfig(memory=memory, disk=disk, interval=_NEVER_S, best_metric=METRIC if judged else None)
        saving = self.setup.rules.of_saving(SavingRules(rule, on=True))
        rule_of_probes = ProbeRule(every=every, joins=True)
        config = SimDriverConfig(job.lanes, self.setup.rewindable, every, saving=saving, probes=rule_of_probes)
        return replace(config, nonfinite=NonfiniteRule(job.on_nonfinite, job.nonfinite_limit))

    def _holders(self) -> dict[WorkerKey, set[tuple[int, tuple[int, int]]]]:
        """(step, part of the state) that live, reachable workers with a plan hold, or would hold with one more
        decision. Workers that were given up do not count: nobody hears them any more. Nor do workers without whom all
        others go on as decided."""
        live = [
            w
            for w in self.control.live_workers()
            if w.frozen_ns is None and w.driver.machine.plan is not None and self.world.reachable(w.host, "control")
            if w.me not in self.checks.given_up and not _leaves(w.driver.machine)
        ]
        # No decision is taken without its records, and who has gathered since has those of the last one alone.
        tops = {w.state.at for w in live if w.driver.machine.position == Key(w.state.at, 0)}
        found = {}
        for w in live:
            right = {k: present(state) for k, state in w.state.stages.items() if not wrong(state)}
            held = w.driver.machine.holding()
            found[w.me] = {(w.state.at, part) for part in self._parts(right)}
            if held.gradient_step > w.state.at and held.gradient_step in tops:
                takes = {k: blocks for k, blocks in held.gradients.items() if not blocks - right.get(k, NONE)}
                found[w.me] |= {(held.gradient_step, part) for part in self._parts(takes)}
        return found

    def _parts(self, held: Mapping[int, Extents]) -> set[tuple[int, int]]:
        """Parts of the job's state that are complete."""
        whole = {(k, 0) for k, blocks in held.items() if blocks.whole}
        if not self.setup.job.copies:
            return whole
        return {(k, n) for k, blocks in held.items() for lo, hi in blocks.spans(PLANES) for n in range(lo, hi)}

    def _settled(self, generation: int) -> dict[WorkerKey, Key]:
        machines = [w.driver.machine for w in self.control.workers.values() if w.alive]
        return {m.me: m.position for m in machines if m.generation == generation and m.settled}

    def _position(self, who: WorkerKey) -> Key | None:
        worker = self.control.workers.get(who)
        follows = worker is not None and worker.alive and worker.driver.machine.plan is not None
        return worker.driver.machine.position if worker is not None and follows else None

    def ended(self) -> bool:
        return self.control.fate.ended

    def run(self) -> str:
        """Run the simulation; returns the problem, or "". Raises: any error of the machines."""
        if not self.world.run(FAULTS_STOP_NS, self.ended):
            self.injector.stop()
            if not self.world.run(self.world.now_ns + LIVENESS_NS, self.ended):
                kernels = read_kernels(self.facts.get("numerics"))
                foreign = isinstance(self.setup, UnlikeSetup) and kernels is not None and kernels.device == self.foreign
                if foreign and not self.checks.records.plans:
                    self.world.seen[OTHERS] += 1
                    return ""  # the host that is unlike the others came first: the job waits for hosts like it
                return f"P4: no end {LIVENESS_NS / SECOND:.0f} s after the faults stopped: {self._where()}"
        if self.setup.differs is not None and "initial state" in self.control.fate.failed:
            return ""  # its state was the first one, so all others were refused
        unlike = isinstance(self.setup.differs, WorkerKey) or self.checks.taint.flipped
        if unlike and " for lane " in self.control.fate.failed:
            self.world.seen[UNLIKE] += 1
            return ""  # nobody knows who is wrong, or too few are left
        odd = self.checks.taint.flipped or self.setup.differs is not None
        drifted = odd and "the script makes" in self.control.fate.failed
        self.world.seen[DRIFT] += drifted
        if drifted or self._loops_disagreed():
            return ""
        if self.checks.exact.over and "not finite" in self.control.fate.failed:
            self.world.seen[NONFINITE] += 1
            return ""
        gives_up = any(fault.kind in ("given_up", "worn") for fault in self.setup.faults)
        if gives_up and re.search(r"was given up \(.*it died again and again\)", self.control.fate.failed):
            self.world.seen[TOO_FEW] += 1
            return ""
        if self._ended_by_an_act():
            return ""
        if self.control.fate.failed:
            return f"P4: the job failed: {self.control.fate.failed}"
        if not self.control.fate.stopped:
            self.checks.finish()
            self._check_told()
        self._sweep()
        return ""

    def _check_told(self) -> None:
        """Check that the plan with which the job was completed has been told, if the coordinator heard that a member
        has settled in it and lived to tell the end; and that the end has the members' last step."""
        told, agreement = self.control.site.last_generation, self.control.coordinator.machine.job.agreement
        last = agreement.plan.generation
        right = told >= last or not agreement.entered or "job_completed" not in self.control.fate.reports
        require(right, "P6", f"generation {last} completed the job, the newest that was told is {told}")
        steps = [one["step"] for one in self.control.site.told if one["kind"] == "job_completed"]
        ended_at = self.checks.exact.ended_at
        require(set(steps) <= {ended_at}, "P6", f"the job was completed at step {ended_at}, and says {steps}")

    def _ended_by_an_act(self) -> bool:
        """Whether the job failed as one of the acts, or its rules, have it fail."""
        kinds, failed = {fault.kind for fault in self.setup.faults}, self.control.fate.failed
        for may, said, seen in (
            ("stuck" in kinds, "it is the second hang there", HUNG_TWICE),
            ("fails" in kinds, HOST_FAILED, FAILED_HOST),
            ("strange" in kinds, NO_SPACE, FAILED_HOST),
            (self.setup.rules.patience_ms > 0, "gave up after waiting", WAITED),
            (
                {"raises", "first_words"} <= kinds and not self.checks.effects.committed,
                "it cannot even be built",
                RAISED,
            ),
            *(
                ({"divides", "other_code"} & kinds or isinstance(self.setup, UnlikeSetup), words, OTHERS)
                for words in UNLIKE_SAID
            ),
        ):
            if may and said in failed:
                self.world.seen[seen] += 1
                return True
        return False

    def _loops_disagreed(self) -> bool:
        """Whether the job ended because one loop was left, and says by which worker and after which step."""
        text, left = self.control.fate.failed, self.checks.exact.left.items()
        said = (f"worker {who.worker_id} left the loop after step {step}" for who, steps in left for step in steps)
        return any(one in text for one in said)

    def _sweep(self) -> None:
        """Check that nothing is left a while after the job has ended."""
        self.injector.stop()
        self.world.run(self.world.now_ns + DRAIN_NS, lambda: False)
        freed("the job", "workers", [f"{w.me} in {w.operation}" for w in self.control.live_workers()])
        control = (AgentProcess, SimCoordinator, Client)
        left = [c.pair for c in self.world.connections if not all(isinstance(end, control) for end in c.ends)]
        freed("the network", "connections of workers", left)
        owners = [getattr(act, "__self__", None) for act in self.world.pending() if act.__name__ == "wake"]
        timers = [str(owner.me) for owner in owners if isinstance(owner, Life)]
        freed("the world", "timers of workers", timers)

    def _look(self) -> None:
        """Find connections that one end holds and the other has forgotten, for longer than any transfer takes."""
        unused: dict[SimConnection, int] = {}
        for connection in self.world.connections:
            workers = [end for end in connection.ends if isinstance(end, Life)]
            still = connection.closing or any(w.frozen_ns is not None for w in workers) or connection.stuck
            if not still and not all(self.control.workers[w.me].uses(connection) for w in workers):
                unused[connection] = self.unused.get(connection, 0) + 1
        self.unused = unused
        leaks = [connection.pair for connection, looks in unused.items() if looks > MOST_LOOKS]
        freed("the network", "connections that one side does not use", leaks)
        self.world.later(LOOK_NS, self._look)

    def _where(self) -> str:
        status = self.control.coordinator.machine.status()
        live = [(w.driver.machine, w.operation) for w in self.control.live_workers()]
        workers = [f"{m.me} {m.phase} generation {m.generation} at {m.position} in {doing}" for m, doing in live]
        return f"workers: {workers}; coordinator: {status}"


def _leaves(machine: StepMachine) -> bool:
    """Whether it was decided that all go on without this worker, as soon as it has updated."""
    return machine.switch is not None and not machine.switch.has(machine.me)


def simulate(
    seed: int,
    *,
    split: bool = False,
    leased: bool = False,
    operated: bool = False,
    sharded: bool = False,
    setup: Setup | None = None,
    tracing: bool = False,
    machine: type[StepMachine] = StepMachine,
    coordinator: NewCoordinator = Coordinator,
    driver: NewDriver = Driver,
) -> Verdict:
    """Run one seed. `sharded`: members divide the optimizer's state; `split`: of a model in several stages; `leased`:
    with two coordinators; `operated`: of any kind,
    with people who have a hand in it. `setup` replaces the drawn one."""
    drawn = (
        set_up_sharded
        if sharded
        else set_up_operated
        if operated
        else set_up_leased
        if leased
        else set_up_split
        if split
        else set_up
    )
    chosen = setup if setup is not None else drawn(seed)
    simulation = Simulation(seed, chosen, tracing, machine, coordinator, driver)
    try:
        problem = simulation.run()
    except ToldTwice:
        simulation.world.seen[TOLD_TWICE], problem = 1, ""
    except Exception as error:  # any error is this seed's finding
        problem = f"{type(error).__name__}: {error}"
        if tracing:
            simulation.world.lines.extend(traceback.format_exc().splitlines())
    simulation.world.note(simulation.world.events)
    return Verdict(
        seed=seed,
        setup=chosen,
        problem=problem,
        steps=simulation.checks.effects.committed,
        generations=len(simulation.checks.records.plans),
        events=simulation.world.events,
        lost_everything=simulation.checks.lost_everything,
        reports=dict(simulation.control.fate.reports),
        targets=tuple(simulation.control.site.went_back),
        flipped=simulation.checks.taint.flipped,
        found=simulation.checks.taint.found,
        unnoticed=simulation.checks.taint.unnoticed,
        trace=tuple(simulation.world.lines),
        seen=simulation.world.seen,
        digest=f"{simulation.world.digest:08x}",
    )


@dataclass
class SeedTally:
    """Outcomes of many seeds. seen: counts by group and name; cases that never happened count 0."""

    count: int = 0
    events: int = 0
    failed: list[Verdict] = field(default_factory=list)
    seen: Counter[tuple[str, str]] = field(default_factory=lambda: Counter(dict.fromkeys((*WAYS, *FAULTS), 0)))

    def add(self, outcome: Verdict) -> None:
        self.count += 1
        self.events += outcome.events
        self.seen.update(outcome.seen)
        self.seen.update({("reports", kind): n for kind, n in outcome.reports.items()})
        if not outcome.ok:
            self.failed.append(outcome)

    def as_json(self, kind: SeedKind, cpu_s: float) -> dict[str, Any]:
        """The tally for programs. cpu_s: CPU time used."""
        coverage: dict[str, dict[str, int]] = {}
        for (group, name), n in sorted(self.seen.items()):
            coverage.setdefault(group, {})[name] = n
        violations = [
            {
                "seed": outcome.seed,
                "promise": outcome.promise,
                "problem": outcome.problem,
                "schedule": [str(fault) for fault in outcome.setup.faults],
                "replay": _replay(outcome.seed, kind),
            }
            for outcome in self.failed
        ]
        return {
            "seeds": self.count,
            "violations": violations,
            "seeds_per_cpu_s": round(self.count / max(cpu_s, 1e-9), 2),
            "coverage": coverage,
        }


def _simulated(seed: int, kind: SeedKind, tracing: bool = False) -> Verdict:
    split, leased, operated, sharded = (kind == name for name in ("split", "leased", "operated", "sharded"))
    return simulate(seed, split=split, leased=leased, operated=operated, sharded=sharded, tracing=tracing)


def run_one(seed: int, kind: SeedKind, trace: bool) -> int:
    """Run one seed, and print the outcome. Returns the exit code: 0 all promises held, 1 one was broken."""
    outcome = _simulated(seed, kind, trace)
    for line in outcome.trace:
        print(line)
    print(outcome)
    print(
        f"{outcome.steps} steps, {outcome.generations} generations, {outcome.events} events, "
        f"digest {outcome.digest}, {outcome.reports}"
    )
    return 0 if outcome.ok else 1


def run_shrunk(seed: int, kind: SeedKind, most_runs: int = MOST_RUNS) -> int:
    """Look for the shortest schedule with which a seed fails in the same way, and print it, also as Python for a
    scenario. Exit codes of `run_one`."""
    first = _simulated(seed, kind)
    if first.ok:
        print(f"{first}\nthe seed keeps all promises: there is nothing to shrink")
        return 0
    found = shrink(first.setup, lambda setup: simulate(seed, setup=setup).failure == first.failure, most_runs)
    print(simulate(seed, setup=found.setup))
    left = f"{len(found.setup.faults)} of {len(first.setup.faults)} faults are left after {found.runs} simulations"
    stopped = ", where the search was stopped: fewer may do" if found.runs >= most_runs else ""
    print(f"{left}{stopped}; as a scenario:")
    print(f"simulate({seed}, setup={source_of(found.setup)})")
    return 1


def run_many(start: int, stop: int | None, kind: SeedKind, keep_going: bool, as_json: bool) -> int:
    """Run the seeds from `start` to before `stop`; None: until one fails or the user interrupts. Exit codes of
    `run_one`."""
    tally, begin_s, begin_cpu_s = SeedTally(), time.monotonic(), time.process_time()
    gc.set_threshold(50_000)  # a seed leaves few cycles: to look for them as often as usual is an eighth of its time
    seeds: Iterable[int] = itertools.count(start) if stop is None else range(start, stop)
    try:
        for seed in seeds:
            outcome = _simulated(seed, kind)
            tally.add(outcome)
            if not as_json:
                _tell(tally, outcome, kind)
            if not outcome.ok and not keep_going:
                break
    except (KeyboardInterrupt, SystemExit):
        if stop is not None:
            raise
    if as_json:
        print(json.dumps(tally.as_json(kind, time.process_time() - begin_cpu_s)))
    else:
        took = time.monotonic() - begin_s
        print(f"{tally.count} seeds, {len(tally.failed)} failed, {tally.events} events, {took:.1f} s")
    return 1 if tally.failed else 0


def _tell(tally: SeedTally, outcome: Verdict, kind: SeedKind) -> None:
    if not outcome.ok:
        print(f"{outcome}\n  replay with: {_replay(outcome.seed, kind)}", flush=True)
    if tally.count % 1000 == 0:
        print(f"{tally.count} seeds, {len(tally.failed)} failed", flush=True)


def _replay(seed: int, kind: SeedKind) -> str:
    return f"everstep sim --seed {seed}{f' --{kind}' if kind else ''} --trace"
