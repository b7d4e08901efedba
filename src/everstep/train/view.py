"""The common view of one worker's parts: its identity, its stages, and its progress.

Apart so that the parts need not know each other: each reads its inputs here, and returns results.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from everstep.base.config import Config
from everstep.base.errors import check
from everstep.base.plan import Divides, Plan
from everstep.exact.state_memory import RoomThere
from everstep.parallel.staged import StagedTransport
from everstep.protocol.driver.driver import Driver
from everstep.protocol.identity import Kernels
from everstep.train.elastic import AnyOrder
from everstep.train.executor import Cutter
from everstep.train.job_data import DataPosition
from everstep.train.published import Publisher
from everstep.train.replica import StageReplica, how_divided
from everstep.train.worker_link import WorkerLink


class Stages(Mapping[int, StageReplica]):
    """The stages of the model that this worker holds, ascending, and how it comes to hold another one.

    An unsplit job has one, which is there from the start. In a split one a worker learns from its first plan which
    stages it is to hold, and from later ones if that changes.
    """

    def __init__(self, count: int, build: Callable[[int], StageReplica], expected_bytes: int = -1) -> None:
        """count: of the job. build: makes a stage in its initial state. expected_bytes: of one stage's state."""
        self.count = count
        self.expected_bytes = expected_bytes
        self._build = build
        self._held: dict[int, StageReplica] = {}
        self._first: dict[int, str] = {}

    @staticmethod
    def unsplit(replica: StageReplica) -> Stages:
        """The only stage of a job that is not split."""

        def never(stage: int) -> StageReplica:
            check(False, f"stage {stage} of an unsplit job is there from the start")
            return replica

        tensors = [*replica.parts.model.buffers(), *replica.parts.model.parameters()]
        filled = 2 * sum(p.nbytes for p in replica.parts.model.parameters())  # of the optimizer, by its first update
        stages = Stages(1, never, sum(t.nbytes for t in tensors) + filled)
        stages._held[0] = replica
        return stages

    def __getitem__(self, stage: int) -> StageReplica:
        return self._held[stage]

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self._held))

    def __len__(self) -> int:
        return len(self._held)

    @property
    def split(self) -> bool:
        """Whether lanes go from worker to worker."""
        return self.count > 1

    @property
    def only(self) -> StageReplica:
        check(not self.split, "a worker of a split job may hold several stages, or none")
        return self._held[0]

    @property
    def any(self) -> StageReplica:
        """One of the stages, for facts that all stages share."""
        return self._held[min(self._held)]

    @property
    def room(self) -> Callable[[int], RoomThere] | None:
        """What makes room, for so many bytes, with the other hosts of this worker; None if it is on one."""
        held = tuple(self._held.values())  # also in threads beside that which changes it
        others = held[0].state.memory.others if held else None
        return None if others is None else others.room

    def divides(self) -> dict[int, Divides]:
        """How the optimizer's state of each of them can be divided, where that is done and is known."""
        return {stage: found for stage, replica in self._held.items() if (found := how_divided(replica)) is not None}

    def want(self, stages: Iterable[int]) -> None:
        """Have these, in their initial state if they were not held."""
        for stage in stages:
            if stage not in self._held:
                self.rebuild(stage)

    def rebuild(self, stage: int) -> None:
        """Put a stage in its initial state."""
        self._held.pop(stage, None)
        self._first.pop(stage, None)
        self._held[stage] = self._build(stage)

    def first(self, stage: int) -> str:
        """Digest of the initial state in which the stage was built; to be asked for before anything changes that."""
        if stage not in self._first:
            self._first[stage] = self._held[stage].digest(0)
        return self._first[stage]

    def keep(self, stages: Iterable[int]) -> None:
        wanted = set(stages)
        self._held = {stage: replica for stage, replica in self._held.items() if stage in wanted}


@dataclass(frozen=True)
class WorkerView:
    """`driver` is looked at by the training thread alone; only the executor feeds it."""

    link: WorkerLink
    stages: Stages
    order: AnyOrder
    position: DataPosition
    driver: Driver
    cutter: Cutter
    publisher: Publisher
    transport: StagedTransport
    kernels: Kernels

    @property
    def me(self) -> int:
        """worker_id."""
        return self.link.me.worker_id

    @property
    def config(self) -> Config:
        return self.link.config

    @property
    def plan(self) -> Plan | None:
        return self.driver.machine.plan

    @property
    def step(self) -> int:
        """Updates applied."""
        return self.driver.machine.position.step

    @property
    def is_main(self) -> bool:
        """Whether this worker is the leader of the first stage."""
        plan = self.driver.machine.plan
        return plan is not None and plan.leader(0) == self.me

    @property
    def ended(self) -> bool:
        return self.driver.ended is not None

    def hold_until_ns(self) -> int:
        """Until when (monotonic, ns) a loop that has raised keeps its state if it is not released before."""
        return time.monotonic_ns() + int(self.config.checkpoint.grace_s * 1e9)

    def tick(self) -> None:
        """Something was done: this worker does not hang."""
        self.link.row.tick()

    def phase(self, name: str, number: int, plan: Plan | None) -> None:
        """A phase begins (progress board, scripted faults)."""
        self.link.row.set(step=self.step, phase=name)
        if plan is not None:
            self.link.faults(number, name, plan)
