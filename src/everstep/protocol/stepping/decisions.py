"""The decisions that a worker has taken, and the records of others for those that come. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from everstep.protocol.step_types import Gathered, Key, Record, RecordArrived, Release, StepEffect


class Decisions:
    """position: key of the last decision; records: its records by worker id. early: a gather that was decided before
    this application has asked for it."""

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
        """A generation begins: the records that others sent are void."""
        self._arrived = {}

    def arrived(self, event: RecordArrived) -> None:
        self._arrived.setdefault(event.key, {}).setdefault(event.worker_id, event.record)

    def given(self, key: Key) -> dict[int, Record]:
        """Records that members have sent for a decision, by worker id."""
        return dict(self._arrived.get(key, {}))

    def take(self, key: Key, records: Mapping[int, Record]) -> list[StepEffect]:
        """Take a decision for which all records have come."""
        self._before = self.position, self.records
        return self.move(key, records)

    def move(self, position: Key, records: Mapping[int, Record]) -> list[StepEffect]:
        """Set the position; a decision beyond (s, 0) proves that every member had decided (s, 0)."""
        if position != self.position:  # else a gather that was decided early still answers the application
            self.early = None
        self.position, self.records = position, records
        self._arrived = {k: r for k, r in self._arrived.items() if k > position}
        return self.prove(position.step if position.seq else position.step - 1)

    def forget(self) -> None:
        """The records of the last decision do not count; its key stays."""
        self.records, self.early = {}, None

    def prove(self, proven: int) -> list[StepEffect]:
        """Every member has decided this step: release it."""
        if proven <= self._released:
            return []
        self._released = proven
        return [Release(proven)]

    def take_back(self, *, intact: bool) -> None:
        """Undo the last decision, a step that is not applied. intact: the state before it, and its records, count."""
        if not intact:
            self._before = Key(self.position.step - 1, 0), {}
        self.position, self.records = self._before

    def came_early(self, gathered: Gathered) -> None:
        """Keep a gather until the application asks for it."""
        self.early = gathered

    def answer_early(self) -> Gathered | None:
        """Take the gather that was decided before the application asked, if there is one."""
        gathered, self.early = self.early, None
        return gathered
