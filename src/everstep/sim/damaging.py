"""Blocks that arrive damaged: their taker asks other sources, or gives up with a reason."""

from __future__ import annotations

from random import Random

from everstep.sim.faults import SimFault, SimInjector
from everstep.sim.sim_worker import SimWorker

_OFTEN = 0.3


def _damage(injector: SimInjector, fault: SimFault, worker: SimWorker | None) -> None:
    """Damage a share of the answers, for a while."""
    site = injector.control.site
    site.damages(_OFTEN)
    injector.for_a_while(fault, site.damages, 0.0)


def draw_damage(rng: Random, horizon_ms: int) -> tuple[SimFault, ...]:
    """Draw damage, in every fourth schedule."""
    damage = SimFault("damage_copies", rng.randint(0, horizon_ms), for_ms=rng.randint(100, 3000))
    return (damage,) if rng.random() < 0.25 else ()


DAMAGE_FAULTS = {"damage_copies": _damage}
