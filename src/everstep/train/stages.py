"""Which stages of the model this worker holds, and how it comes to hold another one.

An unsplit job has one stage, which is there from the start. In a split one a worker learns from its first plan which
stages it is to hold, and from later ones if that changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from everstep.base.errors import check
from everstep.exact.layout import GradientLayout
from everstep.train.replica import StageReplica


class Stages(Mapping[int, StageReplica]):
    """The replicas by stage, ascending."""

    def __init__(self, count: int, build: Callable[[int], StageReplica], expected_bytes: int = -1) -> None:
        """count: of the job. build: makes a stage in its initial state. expected_bytes: of one stage's state."""
        self.count = count
        self.expected_bytes = expected_bytes
        self._build = build
        self._held: dict[int, StageReplica] = {}

    @staticmethod
    def unsplit(replica: StageReplica, build: Callable[[int], StageReplica] | None = None) -> Stages:
        """Of a job with one stage."""

        def never(stage: int) -> StageReplica:
            check(False, f"stage {stage} of an unsplit job is there from the start")
            return replica

        stages = Stages(1, build or never, replica.expected_bytes())
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
        """The one stage of an unsplit job."""
        check(not self.split, "a worker of a split job may hold several stages, or none")
        return self._held[0]

    @property
    def any(self) -> StageReplica:
        """One of them: what all stages have alike can be asked of it."""
        return self._held[min(self._held)]

    def want(self, stages: Iterable[int]) -> None:
        """Have these, in their initial state if they were not held."""
        for stage in stages:
            if stage not in self._held:
                self._held[stage] = self._build(stage)

    def rebuild(self, stage: int) -> None:
        """Put a stage in its initial state."""
        self._held.pop(stage, None)
        self._held[stage] = self._build(stage)

    def keep(self, stages: Iterable[int]) -> None:
        """Let go of all others."""
        wanted = set(stages)
        self._held = {stage: replica for stage, replica in self._held.items() if stage in wanted}

    def layouts(self, stages: Iterable[int]) -> dict[int, GradientLayout]:
        """Of these stages."""
        return {stage: self._held[stage].layout for stage in stages}
