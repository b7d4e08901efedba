"""Rules of a simulated job, not the same for all: when it saves, how slots are shared out, for whom it waits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

from everstep.base.config_keys import ObjectTierConfig
from everstep.placement.cell_shapes import CellShape, shapes_of, shapes_over
from everstep.protocol.coordinator.types import CoordinatorConfig
from everstep.protocol.driver.saver import SavingRules
from everstep.sim.world import MS, SECOND


@dataclass(frozen=True)
class Rules:
    """A job's rules that are not the same for all.

    saves: when checkpoints are taken, beside every few steps. shared: the coordinator shares the slots out from the
    start, `room` of them to a host at most (0: any number). least: hosts that have to be there before the job begins.
    by_steps: the limit for hangs follows from the steps' times. lasting_ms: how long slow workers and weak pools are
    tolerated. reboots: an agent that comes again says that it is another process. degree: processes of each worker,
    which goes on with fewer of them where its slot is given up. told_lanes: the coordinator hears the number of lanes
    from workers. patience_ms: how long the job waits for workers and hosts; 0: for an hour. returns: slots move to
    hosts that come back. first: the host of worker 0; "": any. span: hosts of each worker, with a process on each, and
    with fewer where fewer are left. warns: workers with other kernels may take part. about: what agents say of their
    hosts beside addresses: "node", or not even these, "nothing", but for the first.
    """

    saves: str = ""
    shared: bool = False
    room: int = 0
    least: int = 1
    by_steps: bool = False
    lasting_ms: int = 30_000
    reboots: bool = False
    degree: int = 1
    told_lanes: bool = False
    patience_ms: int = 0
    returns: bool = True
    first: str = ""
    span: int = 1
    warns: bool = False
    about: str = ""

    def of_coordinator(self, config: CoordinatorConfig) -> CoordinatorConfig:
        """The config of a job with these rules."""
        limit = None if self.by_steps else config.hang_limit_ns
        cells = shapes_of(CellShape(1, self.degree), self.degree)
        if self.span > 1:
            cells = shapes_over(CellShape(self.span), self.span)
        wait_ns = self.patience_ms * MS or 3600 * SECOND
        hosts = replace(config.hosts, least=max(self.least, self.span), wait_ns=wait_ns, cells=cells)
        returns = self.returns and self.span == 1
        hosts = replace(hosts, return_ns=hosts.return_ns if returns else None, span=self.span)
        hosts = replace(hosts, named={0: self.first} if self.first else {})
        lanes = config.lanes + 1 if self.told_lanes else config.lanes
        config = replace(config, lasting_ns=self.lasting_ms * MS, lanes=lanes, quorum_wait_ns=wait_ns)
        return replace(config, hosts=hosts, hang_limit_ns=limit, slots=config.workers * self.span if self.shared else 0)

    def of_saving(self, config: SavingRules) -> SavingRules:
        """The same for checkpoints: by time, by what they cost, at the ends of epochs, or none at all."""
        rule = config.rule
        match self.saves:
            case "interval":
                rule = replace(rule, interval=0.05, disk=replace(rule.disk, every_steps=None))
            case "object":
                rule = replace(rule, object=ObjectTierConfig(url="s3://bucket"))
            case "objects":
                rule = replace(rule, object=ObjectTierConfig(url="s3://bucket", every_steps=2))
            case "auto":
                rule = replace(rule, interval="auto", disk=replace(rule.disk, every_steps=None))
            case "minutes":
                rule = replace(rule, disk=replace(rule.disk, every_steps=None, every_minutes=0.001))
            case "epochs":
                return replace(config, epoch_ends=lambda number: number % 3 == 0)
            case "evaluated":
                return replace(config, eval_every=2)
            case "memory":
                return replace(config, memory_every=2)
            case "none":
                return SavingRules(memory_every=2)
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
        reboots=rng.random() < 0.7,
        degree=rng.choice((1, 2, 4)) if shared else 1,
    )


def more_rules(rules: Rules, rng: Random, hosts: int) -> Rules:
    """The same, now and then with others about patience, hosts and object stores."""
    rules = replace(rules, told_lanes=rng.random() < 0.2, returns=rng.random() < 0.85, warns=rng.random() < 0.5)
    rules = replace(rules, about=rng.choice(("", "", "", "node", "nothing")))
    if rng.random() < 0.08:
        rules = replace(rules, saves=rng.choice(("object", "objects")))
    if rng.random() < 0.08:
        rules = replace(rules, patience_ms=rng.choice((300, 1500, 4000)))
    if rng.random() < 0.08 and not rules.shared:
        rules = replace(rules, first=f"host{0 if rng.random() < 0.7 else hosts - 1}")
    return rules
