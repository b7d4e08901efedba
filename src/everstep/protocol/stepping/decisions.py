"""Which decisions a worker has taken, and what others have contributed to those that come. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from everstep.protocol.step_types import Gathered, Key, Record, RecordArrived, Release, StepEffect


class Decisions:
    """position: of the last one; records: of that, by worker id. early: one that was taken before this application has
    asked for it."""

    def __init__(self) -> None:
        self.position = Key(0, 0)
        self.records: Mapping[int, Record] = {}
        self.early: Gathered | None = None
        self._before: tuple[Key, Mapping[int, Record]] = self.position, self.records
        self._arrived: dict[Key, dict[int, Record]] = {}  # of this generation, beyond position
        self._released = 0

    @property
    def next_gather(self) -> Key:
        """Key of the decision that answers the application's next `GatherWanted`."""
        if self.early is not None:
            return self.early.key
        return Key(self.position.step, self.position.seq + 1)

    def regroup(self) -> None:
        """A generation begins: records of others count for nothing."""
        self._arrived = {}

    def arrived(self, event: RecordArrived) -> None:
        """A member has contributed."""
        self._arrived.setdefault(event.key, {}).setdefault(event.worker_id, event.record)

    def given(self, key: Key) -> dict[int, Record]:
        """What members have contributed to a decision."""
        return dict(self._arrived.get(key, {}))

    def take(self, key: Key, records: Mapping[int, Record]) -> list[StepEffect]:
        """All members have contributed to it."""
        self._before = self.position, self.records
        return self.move(key, records)

    def move(self, position: Key, records: Mapping[int, Record]) -> list[StepEffect]:
        """Set the position; a decision beyond (s, 0) proves that every member had decided (s, 0)."""
        if position != self.position:  # else what was decided before the application asked still answers it
            self.early = None
        self.position, self.records = position, records
        self._arrived = {k: r for k, r in self._arrived.items() if k > position}
        return self.prove(position.step if position.seq else position.step - 1)

    def prove(self, proven: int) -> list[StepEffect]:
        """Every member has decided this step."""
        if proven <= self._released:
            return []
        self._released = proven
        return [Release(proven)]

    def take_back(self, *, intact: bool) -> None:
        """The last one was a step, which is not applied. intact: the state before it, and its records, count."""
        if not intact:
            self._before = Key(self.position.step - 1, 0), {}
        self.position, self.records = self._before

    def came_early(self, gathered: Gathered) -> None:
        """The application has yet to ask for it."""
        self.early = gathered

    def answer_early(self) -> Gathered | None:
        """The application asks now. Returns what was decided before that, if something was."""
        gathered, self.early = self.early, None
        return gathered
