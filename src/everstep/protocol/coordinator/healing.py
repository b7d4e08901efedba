"""Who is on the way in: tickets, and how far each has got. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from everstep.base.plan import WorkerKey
from everstep.protocol.coordinator.desk import MILLISECOND_NS, SECOND_NS, Desk

RETRY_NS = 200 * MILLISECOND_NS
RETRY_MOST_NS = 5 * SECOND_NS


@dataclass
class Join:
    """A worker on its way in.

    stages: whose state it copies, and where it is to sit. healed_ns: since when it follows closely enough; retry_ns:
    next attempt, if one has failed.
    """

    key: WorkerKey
    ticket: int = 0
    stages: tuple[int, ...] = (0,)
    healed_ns: int | None = None
    retry_ns: int | None = None

    def begin(self, ticket: int, stages: tuple[int, ...]) -> None:
        """An attempt begins, by this ticket."""
        self.ticket, self.stages, self.healed_ns, self.retry_ns = ticket, stages, None, None

    def heal(self, now_ns: int) -> None:
        """The worker follows closely enough."""
        self.healed_ns = now_ns

    def fail(self, retry_ns: int) -> None:
        """The attempt failed; the next one is made at `retry_ns`."""
        self.healed_ns, self.retry_ns = None, retry_ns


class Healing:
    """Who is on the way in, by worker id, and how often each life has failed."""

    def __init__(self, desk: Desk) -> None:
        self.version = 0
        self._desk = desk
        self._joins: dict[int, Join] = {}
        self._failures: dict[WorkerKey, int] = {}
        self._left_behind: dict[WorkerKey, set[int]] = {}
        self._ticket = 0

    @property
    def joins(self) -> Mapping[int, Join]:
        """Who is on the way in, by worker id, in the order in which they began."""
        return self._joins

    def of(self, key: WorkerKey, ticket: int | None = None) -> Join | None:
        """How this life is on the way in; None if it is not, or says so by another `ticket` than its newest."""
        join = self._joins.get(key.worker_id)
        if join is None or join.key != key or ticket not in (None, join.ticket):
            return None
        return join

    def healed(self, key: WorkerKey) -> Join | None:
        """How this life is on the way in, if it follows closely enough."""
        join = self.of(key)
        return join if join is not None and join.healed_ns is not None else None

    def left_behind(self, key: WorkerKey) -> set[int]:
        """The stages that this life followed when a plan came without it, unless it has begun anew."""
        return set(self._left_behind.get(key, ()))

    def holds(self, key: WorkerKey, stages: Iterable[int]) -> None:
        """A life says hello with the state of these stages, perhaps to one who has not seen it come by them."""
        self._left_behind[key] = set(stages)

    def leave_behind(self, stages: Mapping[WorkerKey, set[int]]) -> None:
        """A plan comes without these, who follow these stages. What was known of others is out of date."""
        self._left_behind = {key: found for key, found in stages.items() if found}

    def attempt(self, key: WorkerKey, stages: tuple[int, ...]) -> Join:
        """Give out a ticket, for the first time or again."""
        self._ticket += 1
        self._left_behind.pop(key, None)
        self._desk.persist("ticket", ticket=self._ticket, worker_id=key.worker_id, incarnation=key.incarnation)
        join = self._joins.setdefault(key.worker_id, Join(key))
        join.begin(self._ticket, stages)
        return join

    def succeed(self, join: Join) -> None:
        """A joiner follows closely enough."""
        self.version += 1
        join.heal(self._desk.now)

    def fail(self, join: Join) -> int:
        """A joiner has lost its donor: it may try again, later each time. Returns how often this life has failed."""
        self.version += 1
        failures = self._failures[join.key] = self._failures.get(join.key, 0) + 1
        delay_ns = 0 if failures == 1 else min(RETRY_NS << (failures - 2), RETRY_MOST_NS)
        join.fail(self._desk.now + delay_ns)
        return failures

    def moment_came(self) -> None:
        """The time has come for which joiners were waited for, or for the next attempt of one."""
        self.version += 1

    def keep(self, worker_ids: Collection[int]) -> None:
        """All others need not come in any more."""
        self._joins = {i: join for i, join in self._joins.items() if i in worker_ids}

    def stop(self, worker_id: int) -> None:
        """This worker is on the way in no more: it is in, or lost."""
        self._joins.pop(worker_id, None)

    def stop_all(self) -> None:
        """The members have changed at once: all begin again, with the new plan and new donors."""
        self._joins = {}

    def forget(self, key: WorkerKey) -> None:
        """This life is over."""
        self.stop(key.worker_id)
        self._failures.pop(key, None)
        self._left_behind.pop(key, None)

    def replay_ticket(self, ticket: int) -> None:
        """A ticket that a former life of the coordinator has given out."""
        self._ticket = max(self._ticket, ticket)
