"""What the parts of one worker see in common: who it is, what it trains, and how far it is.

Apart so that they need not know each other: they look at this, get what they work on, and return results.
"""

from __future__ import annotations

from dataclasses import dataclass

from everstep.base.config import Config
from everstep.base.plan import Plan
from everstep.protocol.driver.driver import Driver
from everstep.train.cutter import Cutter
from everstep.train.elastic_order import AnyOrder
from everstep.train.link import WorkerLink
from everstep.train.published import Publisher
from everstep.train.stages import Stages


@dataclass(frozen=True)
class WorkerView:
    """`driver` is looked at by the training thread alone; only the executor feeds it."""

    link: WorkerLink
    stages: Stages
    order: AnyOrder
    driver: Driver
    cutter: Cutter
    publisher: Publisher

    @property
    def me(self) -> int:
        """worker_id."""
        return self.link.me.worker_id

    @property
    def config(self) -> Config:
        return self.link.config

    @property
    def plan(self) -> Plan | None:
        """Of the present generation."""
        return self.driver.plan

    @property
    def step(self) -> int:
        """Updates applied."""
        return self.driver.position.step

    @property
    def is_main(self) -> bool:
        """Whether this worker is the leader of the first stage."""
        plan = self.driver.plan
        return plan is not None and plan.leader(0) == self.me

    @property
    def ended(self) -> bool:
        """Whether the job has."""
        return self.driver.ended is not None

    def tick(self) -> None:
        """Something was done: this worker does not hang."""
        self.link.row.tick()

    def phase(self, name: str, number: int, plan: Plan | None) -> None:
        """A phase begins (progress board, scripted faults)."""
        self.link.row.set(step=self.step, phase=name)
        if plan is not None:
            self.link.faults(number, name, plan)
