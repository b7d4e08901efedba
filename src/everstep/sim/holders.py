"""Deaths of all holders of a part of an optimizer's state that the members of a pool have divided."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from everstep.sim.faults import SimFault, SimInjector, draw_one
from everstep.sim.model import segments_of
from everstep.sim.sim_worker import SimWorker
from everstep.sim.world import MS

_WHILE = ("reducing", "reducing", "agreeing", "agreeing", "updating", "updating", "spreading", "spreading", "settling")


def draw_holders(rng: Random, horizon_ms: int) -> tuple[SimFault, ...]:
    """Deaths of one holder, or of all of a part, mostly while the members take a step or give each other its result."""
    faults: list[SimFault] = []
    for _ in range(rng.choice((0, 1, 1, 2))):
        one = draw_one(rng, rng.randint(20, horizon_ms), rng.choice(_WHILE))
        kind = rng.choice(("kill", "holders", "holders"))
        faults.append(replace(one, kind=kind, for_ms=rng.choice((0, 0, 1, 3, 20))))
    return tuple(faults)


def _holders(injector: SimInjector, fault: SimFault, worker: SimWorker | None) -> None:
    """All holders of a part die, by the newest plan; of one of the worker's, if one entered the phase. `for_ms`: time
    between the deaths."""
    plans = injector.control.checks.records.plans
    if not plans:
        return
    plan = plans[max(plans)]
    stage = fault.pick % plan.stages
    held = segments_of(plan, stage)
    near = [who for who in held if worker is not None and worker.me.worker_id in who]
    for n, worker_id in enumerate((near or held)[fault.pick % len(near or held)]):
        target = injector.control.workers.get(plan.member(worker_id).key)
        if target is not None:
            injector.world.seen["faults", "holder"] += 1
            injector.world.later(n * fault.for_ms * MS, target.die, "SIGKILL")


HOLDER_FAULTS = {"holders": _holders}
