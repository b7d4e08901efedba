"""Processes that get no processor for a while: they must not be taken for dead, and stuck ones must be found.

A starved process does nothing, like a frozen one; only the kernel's report on the two differs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

from everstep.protocol.patience import PING_S, Figures, Patience
from everstep.sim.control import Control
from everstep.sim.faults import SimFault, SimInjector, draw_one
from everstep.sim.promises import PromiseBroken, require
from everstep.sim.sim_worker import SimWorker
from everstep.sim.world import MS, SECOND, Process

SILENT_S = 1.0
_RESTART_NS = 20 * MS


class SimLauncher:
    """The process of the job, as far as it watches over the coordinator: with the patience of production."""

    def __init__(self, control: Control) -> None:
        self._control = control
        self._patience = Patience(SILENT_S)
        self._of: Process | None = None
        self._look()

    def _look(self) -> None:
        control, world = self._control, self._control.world
        coordinator, now_s = control.coordinator, world.now_ns / SECOND
        if coordinator is not self._of:
            self._of = coordinator
            self._patience.begins()
        if coordinator.alive:
            if coordinator.frozen_ns is None:
                self._patience.answered()
            due_s = self._patience.due_in(now_s)
            asked = self._patience.ask(now_s, Figures(coordinator.letter))
            if asked != (due_s == 0.0):
                raise PromiseBroken(f"P8: the coordinator was asked {due_s:.2f} s too early")
            silent = self._patience.too_long()
            patience = self._patience
            if not silent and patience.silence_s >= patience.limit_s:
                raise PromiseBroken(
                    f"P8: the coordinator has been silent for {patience.silence_s:.1f} s, and nobody minds"
                )
            if silent:
                require(not coordinator.starved, "P8", f"the coordinator {silent}, but it waits for a processor")
                world.seen["hosts", "silenced"] += 1
                self._patience.killed(now_s)
                coordinator.die(f"it {silent}")
                world.later(_RESTART_NS, control.start_coordinator)
        world.later(round(PING_S * SECOND) // 2, self._look)


def draw_starved(rng: Random, horizon_ms: int) -> tuple[SimFault, ...]:
    """Starve processes, in every third schedule, often beside a stuck one."""
    faults: list[SimFault] = []
    for _ in range(rng.choice((1, 1, 2, 3)) if rng.random() < 0.35 else 0):
        one = draw_one(rng, rng.randint(20, horizon_ms))
        kind = rng.choice(("starve", "starve", "starve_agent", "starve_coordinator"))
        faults.append(replace(one, kind=kind, for_ms=rng.choice((rng.randint(50, 900), rng.randint(900, 5000)))))
        if rng.random() < 0.3:
            kind = rng.choice(("freeze", "coordinator_freeze"))
            faults.append(replace(one, kind=kind, at_ms=one.at_ms + rng.randint(0, 300), same=False))
    return tuple(faults)


def _starves(of: Callable[[SimInjector, SimFault, SimWorker | None], Process | None]) -> Callable[..., None]:
    def strike(injector: SimInjector, fault: SimFault, worker: SimWorker | None) -> None:
        process = of(injector, fault, worker)
        if process is not None and process.frozen_ns is None:
            process.freeze(starved=True)
            injector.for_a_while(fault, process.thaw)

    return strike


def _worker(injector: SimInjector, fault: SimFault, worker: SimWorker | None) -> Process | None:
    live = injector.control.live_workers()
    return worker or (live[fault.pick % len(live)] if live else None)


STARVING_FAULTS = {
    "starve": _starves(_worker),
    "starve_agent": _starves(lambda injector, fault, worker: injector.control.agents[injector.host(fault, worker)]),
    "starve_coordinator": _starves(lambda injector, fault, worker: injector.control.coordinator),
}
