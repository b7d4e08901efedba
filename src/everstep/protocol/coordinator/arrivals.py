"""Workers that the job waits for, and workers on their way in. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass, replace

from everstep.base.cause import Why
from everstep.base.plan import Shard, WorkerKey
from everstep.protocol.coordinator.environment import MILLISECOND_NS, SECOND_NS, Alarm, Environment
from everstep.protocol.coordinator.spare_advice import SpareAdvice

START_PATIENCE_NS = 10 * SECOND_NS
RETRY_NS = 200 * MILLISECOND_NS
RETRY_MOST_NS = 5 * SECOND_NS


class Quorum:
    """The wait for enough workers: its start, its limit and its reason. waiting: why the job waits, None if it does
    not, or has only just begun to. starting_over: all state is lost."""

    def __init__(self, env: Environment) -> None:
        self.waiting: Why | None = None
        self.starting_over = False
        self._env = env
        self._since_ns: int | None = None
        self._first_came_ns: int | None = None
        self._hosts_since_ns: int | None = None

    def begin(self) -> None:
        self._since_ns = self._env.now

    def met(self) -> None:
        self._since_ns = self._first_came_ns = self.waiting = None
        self.starting_over = False

    def wait(self) -> None:
        """There are too few workers; a wait that has begun goes on."""
        if self._since_ns is None:
            self._since_ns = self._env.now
        self._env.alarms.set(Alarm.QUORUM, self._since_ns + self._env.config.quorum_wait_ns)

    def wait_for(self, why: Why, step: int, generation: int) -> None:
        """There are too few workers for this reason, which is reported once."""
        if why != self.waiting:
            self.waiting = why
            self._env.report("waiting", why, step=step, generation=generation)
        self.wait()

    def pardon(self, gap_ns: int) -> None:
        """The coordinator was away for this long: nobody could come."""
        self._since_ns = None if self._since_ns is None else self._since_ns + gap_ns
        self._first_came_ns = None if self._first_came_ns is None else self._first_came_ns + gap_ns
        self._hosts_since_ns = None if self._hosts_since_ns is None else self._hosts_since_ns + gap_ns

    # ---- before that, for hosts

    @property
    def lacks_hosts(self) -> bool:
        return self._hosts_since_ns is not None

    def wait_for_hosts(self, why: Why) -> int:
        """Hosts are missing for this reason, which is reported once. Returns the end of the wait."""
        if self._hosts_since_ns is None:
            self._hosts_since_ns = self._env.now
        if why != self.waiting:
            self.waiting = why
            self._env.report("waiting", why, step=0, generation=0)
        return self._hosts_since_ns + self._env.config.hosts.wait_ns

    def hosts_came(self) -> None:
        """All hosts are here: from now on the job waits for workers."""
        self._hosts_since_ns = self.waiting = None
        self.begin()

    def over(self) -> bool:
        """Whether the wait for workers has lasted long enough; if not, ring when it has."""
        if self._since_ns is None:
            return False
        until_ns = self._since_ns + self._env.config.quorum_wait_ns
        if self._env.now < until_ns:
            self._env.alarms.set(Alarm.QUORUM, until_ns)
        return self._env.now >= until_ns

    # ---- patience with those who are a little later than the first

    @property
    def anybody(self) -> bool:
        """Whether a first worker has come."""
        return self._first_came_ns is not None

    @property
    def patient(self) -> bool:
        """Whether the first worker came so recently that others may follow."""
        return self._first_came_ns is not None and self._env.now < self._first_came_ns + START_PATIENCE_NS

    def came(self) -> None:
        """A worker has come; the first one counts."""
        if self._first_came_ns is None:
            self._first_came_ns = self._env.now

    def give_time(self) -> None:
        """Ring when the workers after the first have had enough time."""
        if self._first_came_ns is not None:
            self._env.alarms.set(Alarm.START, self._first_came_ns + START_PATIENCE_NS)

    def look_again(self) -> None:
        """Ring about the quorum once the workers after the first have had enough time."""
        if self._first_came_ns is not None:
            self._env.alarms.set(Alarm.QUORUM, self._first_came_ns + START_PATIENCE_NS + SECOND_NS)

    def start_over(self) -> None:
        """All state is lost: workers that come from now on count."""
        if not self.starting_over:
            self.starting_over, self._first_came_ns = True, None


@dataclass(frozen=True)
class Join:
    """A worker on its way in, by its newest ticket. stages: those whose state it copies for its future seats, parts:
    its parts of them, if it does not copy all. healed_ns: when it began to follow closely enough; retry_ns: time of the
    next attempt, if one has failed."""

    key: WorkerKey
    ticket: int
    stages: tuple[int, ...]
    healed_ns: int | None = None
    retry_ns: int | None = None
    parts: tuple[Shard, ...] = ()

    @property
    def copying(self) -> bool:
        """Whether the worker neither follows closely enough yet nor has failed."""
        return self.healed_ns is None and self.retry_ns is None

    @property
    def shards(self) -> Iterable[Shard]:
        """What the worker holds once it has healed."""
        return self.parts or (Shard(self.key.worker_id, stage) for stage in self.stages)


class Healing:
    """Workers on their way in, and the failed attempts of each life. joins: by worker id, in the order of their
    start. spares: advice, by how long places were empty."""

    def __init__(self, env: Environment) -> None:
        self.joins: dict[int, Join] = {}
        self.spares = SpareAdvice(env)
        self._env = env
        self._failures: dict[WorkerKey, int] = {}
        self._left_behind: dict[WorkerKey, set[int]] = {}
        self._ticket = 0

    def of(self, key: WorkerKey, ticket: int | None = None) -> Join | None:
        """This life's way in; None if it has none, or has a newer ticket than `ticket`."""
        join = self.joins.get(key.worker_id)
        return join if join is not None and join.key == key and ticket in (None, join.ticket) else None

    def healed(self, key: WorkerKey) -> Join | None:
        """This life's way in, if it follows closely enough."""
        join = self.of(key)
        return join if join is not None and join.healed_ns is not None else None

    def left_behind(self, key: WorkerKey) -> set[int]:
        """The stages that this life followed when a plan came without it, unless it has started over."""
        return self._left_behind.get(key, set())

    def holds(self, key: WorkerKey, stages: Iterable[int]) -> None:
        """A life says hello with the state of these stages; perhaps this coordinator was not there when it copied
        them."""
        self._left_behind[key] = set(stages)

    def leave_behind(self, stages: dict[WorkerKey, set[int]]) -> None:
        """A plan comes without these lives, which follow these stages. Earlier entries are out of date."""
        self._left_behind = stages

    def attempt(self, key: WorkerKey, stages: tuple[int, ...], parts: tuple[Shard, ...] = ()) -> Join:
        """Give out a ticket, the first or a further one."""
        self._ticket += 1
        self._left_behind.pop(key, None)
        self._env.persist("ticket", ticket=self._ticket, **asdict(key))
        join = self.joins[key.worker_id] = Join(key, self._ticket, stages, parts=parts)
        return join

    def succeed(self, join: Join) -> None:
        """A joiner follows closely enough."""
        self._env.change()
        self.joins[join.key.worker_id] = replace(join, healed_ns=self._env.now)

    def fail(self, join: Join) -> int:
        """A joiner has lost its donor: it may try again, later each time. Returns the number of failures of this
        life."""
        self._env.change()
        failures = self._failures[join.key] = self._failures.get(join.key, 0) + 1
        delay_ns = 0 if failures == 1 else min(RETRY_NS << (failures - 2), RETRY_MOST_NS)
        self.joins[join.key.worker_id] = replace(join, healed_ns=None, retry_ns=self._env.now + delay_ns)
        return failures

    def keep(self, worker_ids: Collection[int]) -> None:
        """All other workers no longer need to come in."""
        self.joins = {i: join for i, join in self.joins.items() if i in worker_ids}

    def stop(self, worker_id: int) -> None:
        """This worker is no longer on its way in: it is a member, or lost."""
        self.joins.pop(worker_id, None)

    def forget(self, key: WorkerKey) -> None:
        """This life is over."""
        self.stop(key.worker_id)
        self._failures.pop(key, None)
        self._left_behind.pop(key, None)

    def replay_ticket(self, ticket: int) -> None:
        """Take a ticket that an earlier life of the coordinator gave out."""
        self._ticket = max(self._ticket, ticket)
