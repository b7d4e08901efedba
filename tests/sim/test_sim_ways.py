"""The simulated world meets every way of the driver: each operation, effect, answer, ask and event occurs."""

from __future__ import annotations

from collections import Counter

from everstep.protocol.driver import operations as do
from everstep.protocol.driver.driver import Driver
from everstep.protocol.step_types import Discard, Release
from everstep.sim.faults import SimFault
from everstep.sim.model import SimJob
from everstep.sim.scenario import simulate
from everstep.sim.setups import Setup

SEEDS, SPLIT_SEEDS = 46, 8
DAMAGE = tuple(SimFault("damage", 180, "settling", n, 1500) for n in range(1, 9))
UNHEARD = (SimFault("raises", 100, pick=1), SimFault("cut_control", 99, pick=1, for_ms=2500))
RARE = (
    # The newest checkpoint is damaged after it was stated.
    Setup(4, 0, 2, 1, "replace", SimJob(8, 4, 3, 2, 0, 1), (SimFault("pool", 180), *DAMAGE)),
    # Nobody hears of a worker that has raised and holds its state, and nobody lets it go.
    Setup(3, 0, 3, 1, "replace", SimJob(12, 6, 3), UNHEARD),
)
EVENTS = (
    do.Heard,
    do.Done,
    do.Aborted,
    do.Tainted,
    do.FollowerAsked,
    do.InMemory,
    do.OthersKept,
    do.NotKept,
    do.TimePassed,
)
OPERATIONS = tuple(do.Operation.__subclasses__())
TOLD_APART = {
    do.Exit: ("drained", "failed"),
    do.OthersKept: ("done",),
    do.Tainted: ("torn",),
}
NEVER = {"Exit(drained=True, failed=True)"}


def name_of(one: object) -> str:
    fields = TOLD_APART.get(type(one), ())
    said = ", ".join(f"{field}={getattr(one, field)}" for field in fields)
    return f"{type(one).__name__}({said})" if said else type(one).__name__


def wanted() -> set[str]:
    said = {*OPERATIONS, *do.AtOnce.__subclasses__(), *do.Answer.__subclasses__(), Release, Discard}
    kinds = {*said, *do.Ask.__subclasses__(), *EVENTS}
    names = {kind.__name__ for kind in kinds if not TOLD_APART.get(kind)}
    for kind, fields in TOLD_APART.items():
        values = [""]
        for field in fields:
            values = [
                f"{before}{', ' if before else ''}{field}={value}" for before in values for value in (True, False)
            ]
        names |= {f"{kind.__name__}({said})" for said in values if said}
    return names - NEVER


def test_every_way_of_the_driver_is_met():
    seen: Counter[str] = Counter()

    class Watched(Driver):
        def handle(self, now_ns: int, event: object) -> list[do.Effect]:
            effects = super().handle(now_ns, event)
            seen.update(map(name_of, (event, *effects)))
            return effects

    outcomes = [simulate(seed, driver=Watched) for seed in range(SEEDS)]
    outcomes += [simulate(seed, split=True, driver=Watched) for seed in range(SPLIT_SEEDS)]
    outcomes += [simulate(seed, sharded=True, driver=Watched) for seed in range(6)]
    outcomes += [simulate(seed, setup=setup, driver=Watched) for setup in RARE for seed in range(6)]
    failed = [str(outcome) for outcome in outcomes if not outcome.ok]
    assert not failed, failed[0]
    assert not wanted() - set(seen), f"never met: {sorted(wanted() - set(seen))}; rare: {seen.most_common()[-8:]}"
