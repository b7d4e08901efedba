"""What people and the owners of hosts do to a job: they ask it for things, in vain too, take hosts away, and have rules
of their own for checkpoints, hosts and hangs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from everstep.base.config_keys import CheckpointConfig, DiskTierConfig, MemoryTierConfig
from everstep.protocol.coordinator.types import CoordinatorConfig
from everstep.protocol.driver.saver import SavingRules
from everstep.protocol.roles import INJECT, OPERATE, READ
from everstep.sim.control import forget
from everstep.sim.faults import SimFault, SimInjector, draw_one
from everstep.sim.sim_worker import SimWorker
from everstep.sim.world import MS, SECOND

_MS_IN_MINUTES = 1 / 60_000


@dataclass(frozen=True)
class Rules:
    """A job's rules that are not the same for all.

    saves: when checkpoints are taken, beside every few steps. shared: the coordinator shares the slots out from the
    start, `room` of them to a host at most (0: any number). least: hosts that have to be there before the job begins.
    by_steps: the limit for hangs follows from the steps' times. lasting_ms: how long slow workers and weak pools are
    tolerated.
    """

    saves: str = ""
    shared: bool = False
    room: int = 0
    least: int = 1
    by_steps: bool = False
    lasting_ms: int = 30_000

    def of_coordinator(self, config: CoordinatorConfig) -> CoordinatorConfig:
        """The config of a job with these rules."""
        limit = None if self.by_steps else config.hang_limit_ns
        hosts = replace(config.hosts, least=self.least, wait_ns=3600 * SECOND)
        config = replace(config, lasting_ns=self.lasting_ms * MS)
        return replace(config, hosts=hosts, hang_limit_ns=limit, slots=config.workers if self.shared else 0)

    def of_saving(self, config: SavingRules) -> SavingRules:
        """The same for checkpoints: by time, by what they cost, at the ends of epochs, or none at all."""
        rule = config.rule
        match self.saves:
            case "interval":
                rule = replace(rule, interval=0.05, disk=replace(rule.disk, every_steps=None))
            case "auto":
                rule = replace(rule, interval="auto", disk=replace(rule.disk, every_steps=None))
            case "minutes":
                rule = replace(rule, disk=replace(rule.disk, every_steps=None, every_minutes=60 * _MS_IN_MINUTES))
            case "epochs":
                return replace(config, epoch_ends=lambda number: number % 3 == 0)
            case "evaluated":
                return replace(config, eval_every=2)
            case "memory":
                return replace(config, memory_every=2)
            case "none":
                return SavingRules(CheckpointConfig(memory=MemoryTierConfig(), disk=DiskTierConfig()), memory_every=2)
        return replace(config, rule=rule)


USUAL = Rules()


def draw_rules(rng: Random, hosts: int, wanted: int, lasting_ms: int) -> Rules:
    """Rules of a job of so many hosts and wanted workers: mostly the usual ones."""
    saves = rng.choice(("interval", "auto", "minutes", "epochs", "evaluated", "memory", "none"))
    shared = rng.random() < 0.2
    room = -(-wanted // hosts) + rng.randint(0, 2) if shared and rng.random() < 0.5 else 0
    return Rules(
        saves=saves if rng.random() < 0.5 else "",
        shared=shared,
        room=room,
        least=rng.randint(2, hosts) if hosts > 1 and rng.random() < 0.15 else 1,
        by_steps=rng.random() < 0.1,
        lasting_ms=lasting_ms,
    )


def draw_operated(rng: Random, horizon_ms: int) -> tuple[SimFault, ...]:
    """What people ask for and do."""
    faults: list[SimFault] = []
    for _ in range(rng.choice((1, 2, 2, 3, 4))):
        one = draw_one(rng, rng.randint(20, horizon_ms))
        kind = rng.choices(list(_WEIGHTS), weights=list(_WEIGHTS.values()))[0]
        faults.append(replace(one, kind=kind, for_ms=max(1, one.for_ms)))
    ended = any(fault.kind == "end_alone" for fault in faults)  # and a journal that forgets that knows of no end
    return tuple(fault for fault in faults if not (ended and fault.kind == "forgetful"))


_WEIGHTS = {"ask": 4, "drain_host": 3, "leave_host": 2, "given_up": 2, "senseless": 2, "forgetful": 2, "end_alone": 1}
WITHOUT_LEASE = frozenset({"senseless", "forgetful", "end_alone"})
"""What befalls a journal on one host's disk, and whoever reads that."""

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
    (OPERATE, "profile", {"steps": 2, "name": "slow"}),
    (OPERATE, "profile", {"steps": 2, "name": "slow", "workers": [77]}),
    (OPERATE, "checkpoint", {}),
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
