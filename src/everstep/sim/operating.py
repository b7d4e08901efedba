"""Acts of users and of the owners of hosts: commands, some of them in vain, and hosts that are taken away."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

from everstep.protocol.roles import INJECT, OPERATE, READ
from everstep.sim.control import forget
from everstep.sim.faults import SimFault, SimInjector, draw_one
from everstep.sim.sim_worker import SimWorker
from everstep.sim.world import MS, SECOND


def draw_operated(rng: Random, horizon_ms: int) -> tuple[SimFault, ...]:
    """Draw commands and acts."""
    faults: list[SimFault] = []
    for _ in range(rng.choice((1, 2, 2, 3, 4))):
        one = draw_one(rng, rng.randint(20, horizon_ms))
        kind = rng.choices(list(_WEIGHTS), weights=list(_WEIGHTS.values()))[0]
        faults.append(replace(one, kind=kind))
    return tuple(faults)


_WEIGHTS = {"ask": 4, "drain_host": 3, "leave_host": 2, "given_up": 2, "senseless": 2, "forgetful": 2}
WITHOUT_LEASE = frozenset({"senseless", "forgetful"})
"""Faults of a journal on one host's disk."""

_STRIKE = {"text": "partition:target=host0,for_s=1", "kind": "partition", "target": "host0", "for_s": 1.0}
_OF_COORDINATOR = {"text": "kill:target=coordinator", "kind": "kill", "target": "coordinator", "coordinator": True}
_ASKED: tuple[tuple[str, str, dict[str, Any]], ...] = (
    (READ, "status", {}),
    (READ, "hosts", {}),
    (READ, "scale", {"workers": 2}),  # refused: it needs another token
    (OPERATE, "reboot", {}),
    (OPERATE, "scale", {"workers": "three"}),
    (OPERATE, "drain", {"worker_id": 99}),
    (OPERATE, "drain", {"host": "nowhere"}),
    (OPERATE, "profile", {"steps": 2, "folder": "slow"}),
    (OPERATE, "profile", {"steps": 2, "folder": "slower"}),
    (OPERATE, "profile", {"steps": 2, "folder": "slow", "workers": [77]}),
    (OPERATE, "profile", {"steps": "two", "folder": "slow"}),
    (OPERATE, "profile", {"steps": 2, "folder": "../slow"}),
    (OPERATE, "checkpoint", {}),
    (OPERATE, "stop", {"grace_s": -1.0}),
    (INJECT, "chaos", {"strike": {**_STRIKE, "kind": "cut", "target": "host0-node0"}}),
    (INJECT, "chaos", {"strike": {**_STRIKE, "kind": "cut", "target": "host0-host1"}}),
    (INJECT, "chaos", {"fault": "kill:target=worker:0,at=1"}),
    (INJECT, "chaos", {"fault": "kill:target=worker:77,at=1", "workers": [77]}),
    (INJECT, "chaos", {"fault": "kill:target=leader:9,at=1", "stages": [9]}),
    (INJECT, "chaos", {"fault": 7}),
    (INJECT, "chaos", {"strike": _STRIKE}),
    (INJECT, "chaos", {"strike": {**_STRIKE, "for_s": -1.0}}),
    (INJECT, "chaos", {"strike": "host0"}),
    (INJECT, "chaos", {"fault": "kill:target=coordinator,at=1", "due": _OF_COORDINATOR}),
    (INJECT, "chaos", {"fault": "kill:target=coordinator,at=1", "due": _STRIKE}),
)


def _ask(injector: SimInjector, fault: SimFault, worker: SimWorker | None) -> None:
    role, name, args = _ASKED[fault.pick % len(_ASKED)]
    injector.control.command(name, args, role)


def _leave_host(injector: SimInjector, fault: SimFault, worker: SimWorker | None) -> None:
    """A host is told by its owner to leave; it comes back later."""
    host = injector.host(fault)
    injector.control.agents[host].leave()
    injector.world.later(fault.for_ms * MS + SECOND // 2, injector.control.boot, host)


def _forgetful(injector: SimInjector, fault: SimFault, worker: SimWorker | None) -> None:
    """The coordinator dies, and the next one begins with a journal that lacks what was written last."""
    control = injector.control
    control.coordinator.die("SIGKILL")
    forget(control, 1 + fault.pick % 3)
    injector.for_a_while(fault, control.start_coordinator)


OPERATING_FAULTS: dict[str, Callable[[SimInjector, SimFault, SimWorker | None], None]] = {
    "ask": _ask,
    "leave_host": _leave_host,
    "forgetful": _forgetful,
}
