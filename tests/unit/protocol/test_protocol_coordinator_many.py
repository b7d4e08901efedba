"""The plans of many hosts stay what they were, to the bit: whatever makes them faster changes none."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import pytest
from coordinator_harness import CONFIG, S

from everstep.base.cause import Cause
from everstep.base.plan import Member, Plan
from everstep.protocol import messages as m
from everstep.protocol.coordinator.coordinator import Coordinator
from everstep.protocol.coordinator.types import Connected, CoordinatorEvent, Received, Send
from everstep.protocol.following import name_of


class _Size(NamedTuple):
    """racks: how many the hosts are spread over, 0: they say nothing of that. spares: workers beyond those wanted."""

    hosts: int
    each: int
    lanes: int
    stages: int = 1
    racks: int = 0
    spares: int = 0


class _Job:
    """A coordinator with agents that speak for `each` workers, and what was said to these."""

    def __init__(self, size: _Size) -> None:
        count = size.hosts * size.each
        config = replace(CONFIG, lanes=size.lanes, stages=size.stages, workers=count - size.spares)
        self.size, self.coordinator, self.plans = size, Coordinator(config), list[Plan]()
        for host in range(size.hosts):
            self._agent(host)
        for worker_id in sorted(range(count), key=lambda i: i * 7919 % count):  # they come in no order
            self._hello(worker_id)

    def _handle(self, event: CoordinatorEvent) -> None:
        for effect in self.coordinator.handle(S, event):
            plan = effect.message.plan if isinstance(effect, Send) and isinstance(effect.message, m.PlanNow) else None
            if plan is not None and plan not in self.plans[-1:]:
                self.plans.append(plan)

    def _agent(self, host: int) -> None:
        ids = range(host * self.size.each, (host + 1) * self.size.each)
        lives = [m.WorkerLife(worker_id=i, incarnation=0, pid=1000 + i) for i in ids]
        labels = {"rack": f"r{host * 5 % self.size.racks}", "zone": f"z{host % 2}"} if self.size.racks else {}
        hello = m.AgentHello(agent_id=f"h{host}", host=f"h{host}", workers=lives, slots=self.size.each, domains=labels)
        self._handle(Connected(f"h{host}", "agent"))
        self._handle(Received(f"h{host}", hello))

    def _hello(self, worker_id: int) -> None:
        host = worker_id // self.size.each
        address = f"10.0.{host // 250}.{host % 250}:{10000 + worker_id * 7919 % 50000}"
        member = Member(worker_id, 0, f"h{host}", 1000 + worker_id, address, f"{worker_id * 2654435761 % 2**32:08x}")
        self._handle(Connected(f"w{worker_id}", "worker"))
        self._handle(Received(f"w{worker_id}", m.WorkerHello(member=member, step=0, follows=None)))

    def lose(self, worker_id: int) -> None:
        """Its agent says that it is dead."""
        agent = f"h{worker_id // self.size.each}"
        life = {"worker_id": worker_id, "incarnation": 0, "died_unix_ns": None}
        died = m.WorkerExited(agent_id=agent, **life, cause=Cause.KILLED, reason="killed")
        self._handle(Received(agent, died))


@pytest.mark.parametrize(
    ("size", "digests"),
    [
        (_Size(1, 3, 8), ("e1ca84c8d17daa477844190b3309ab59", "ace0d6593dda4cf9969e38764a5f5363")),
        (_Size(7, 3, 64, racks=3), ("42b39d8562fdc35b6afdb2b76731a29b", "1fb29d7de73894a79c008af6bbcb6451")),
        (
            _Size(12, 4, 40, stages=3, racks=5, spares=9),
            ("93e0f5af8c759f57ff6753342abcc476", "4f0812a0bb109ad03391cf19069c154a"),
        ),
        (_Size(30, 8, 1000), ("6e54ec31a58f562954668996602378fd", "1958e1df91657449fa73c34ab7400006")),
        (_Size(150, 8, 1200, racks=11), ("465f2ef4651cf42251d8ec4a127df280", "17ecf6e24ce168229a77fc0634753749")),
    ],
    ids=str,
)
def test_the_first_plan_and_the_next_are_what_they_always_were(size: _Size, digests: tuple[str, ...]) -> None:
    job = _Job(size)
    job.lose(size.each - 1)
    names = [name_of(plan) for plan in job.plans]
    assert tuple(name.digest for name in names if name is not None) == digests
