"""Which slots are wanted, who keeps them filled, and which were given up. Pure.

A slot's worker id is its number. Agents that start slots of their own are told nothing about them until somebody wants
others; what else a job begins with (`CoordinatorConfig.slots`) is shared out among its agents.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from everstep.base.cause import Cause, Why
from everstep.protocol.coordinator.agents import Agent, Agents
from everstep.protocol.coordinator.desk import Desk
from everstep.protocol.coordinator.membership import Membership


class Slots:
    """What was asked for, and what came of it. target: how many members are wanted."""

    def __init__(self, desk: Desk, membership: Membership, agents: Agents) -> None:
        self.version = 0
        self.target = desk.config.workers
        self._desk, self._membership, self._agents = desk, membership, agents
        self._asked: set[int] | None = None  # None: as the agents started them
        self._retiring: set[int] = set()  # not wanted any more, but the worker has not left yet
        self._unwanted: dict[int, Cause] = {}
        self._owners: dict[int, str] = {}
        self._lost: dict[int, str] = {}

    # ---- what is wanted

    @property
    def as_started(self) -> bool:
        """Whether nobody has ever asked for other slots than those that the agents started with."""
        return self._asked is None

    @property
    def shared_out(self) -> bool:
        """Whether it is said here which agent keeps which slots filled."""
        return self._asked is not None or self._desk.config.slots > 0

    @property
    def lost(self) -> Mapping[int, str]:
        """The slots given up for good, with the reason."""
        return self._lost

    @property
    def least(self) -> int:
        """With how many members the job may run at least."""
        return max(1, self._desk.config.min_workers)

    def ids(self) -> set[int]:
        """The slots that are to be kept filled, those given up included."""
        if self._asked is not None:
            return self._asked
        announced = sum(agent.slots for agent in self._agents.known.values())
        config = self._desk.config
        return set(range(max(config.workers, config.slots, announced))) | set(self._membership.workers)

    def wanted(self, worker_id: int) -> bool:
        return self._asked is None or worker_id in self._asked

    def left(self) -> int:
        """How many slots were not given up."""
        return len(self.ids() - set(self._lost))

    def expected(self) -> int:
        """How many members there can be: the target, less what was given up for good."""
        return min(self.target, self.left())

    def unwanted_for(self, worker_id: int) -> Cause:
        """How it was asked that this slot be no more."""
        return self._unwanted.get(worker_id, Cause.SCALED)

    def want(self, target: int, ids: set[int], why: Why) -> None:
        """Change how many members, and which slots, are wanted."""
        running = {key.worker_id for agent in self._agents.known.values() for key in agent.lives}
        running |= {i for i, worker in self._membership.workers.items() if worker.connection is not None}
        self._retiring = (self._retiring | (self.ids() & running)) - ids
        self.take_wish(target, ids, why.cause)
        self._desk.persist("target", target=target, slots=sorted(ids), cause=why.cause, reason=why.reason)

    def take_wish(self, target: int, ids: set[int], cause: Cause) -> None:
        """What is asked for from now on, or was by a former life of the coordinator."""
        self.version += 1
        self._unwanted |= dict.fromkeys(self.ids() - ids, cause)
        self.target, self._asked = target, set(ids)

    # ---- what became of them

    def runs(self, worker_id: int, agent_id: str) -> None:
        """This agent runs a life of the slot."""
        self._owners[worker_id] = agent_id

    def revive(self, worker_id: int) -> None:
        """The slot has a new life, though it may have been given up."""
        self.version += 1
        self._lost.pop(worker_id, None)

    def empty(self, worker_id: int) -> None:
        """The slot's worker has left."""
        self.version += 1
        self._retiring.discard(worker_id)

    def not_run(self, agent_id: str, running: Iterable[int] = ()) -> None:
        """This agent runs these slots alone, so the workers of its other slots that were to retire have left."""
        left = self._retiring - set(running)
        self._retiring -= {i for i in left if self._owners.get(i) == agent_id}

    def lose(self, worker_id: int, agent_id: str, why: Why) -> bool:
        """An agent gives a slot up. Returns False where that says nothing: it is another's, or given up before."""
        if worker_id in self._lost or self._owners.get(worker_id) not in (None, agent_id):
            return False
        self.version += 1
        self._lost[worker_id] = why.reason
        self._desk.persist("slot_lost", worker_id=worker_id, cause=why.cause, reason=why.reason)
        return True

    def share_out(self, ending: str) -> None:
        """Tell each agent which slots to keep filled, where that is not for the agents themselves to say.

        A slot that is not wanted any more stays in the list until its process has left. After a restart of the
        coordinator the agents come back one by one: what the others run must not be started again at the first.
        ending: the state in which the job is about to end, "" if it is not; where somebody asked for that, nothing is
        started any more.
        """
        if not self.shared_out or self._membership.in_grace:
            return
        agents = [a for _, a in sorted(self._agents.known.items()) if a.connection is not None]
        goes_on = self._asked is None and not ending and all(agent.told_slots for agent in agents)
        owners = [self._owners.get(i) for i in range(self._desk.config.slots)]
        if not agents or (goes_on and all(owner in self._agents.known for owner in owners)):
            return  # a thousand hellos need not share out a thousand slots each
        asked = set(range(self._desk.config.slots)) if self._asked is None else self._asked
        wanted = set() if ending == "interrupted" else (asked | self._retiring) - set(self._lost)
        self._owners |= _new_owners(wanted, self._owners, self._agents.known, agents)
        for agent in agents:
            ids = sorted(i for i in wanted if self._owners.get(i) == agent.agent_id)
            message = agent.new_slots(ids, [self._membership.next_incarnation(i) for i in ids])
            if message is not None:
                self._desk.send(agent.connection, message)

    # ---- from the journal

    def replay_lost(self, worker_id: int, reason: str) -> None:
        """A slot that a former life of the coordinator has given up."""
        self._lost[worker_id] = reason

    def restore(self, worker_ids: Iterable[int]) -> None:
        """The slots of all members of the plans in the journal."""
        self._retiring = {i for i in worker_ids if not self.wanted(i)}


def _new_owners(
    wanted: Iterable[int], owners: Mapping[int, str], known: Collection[str], agents: Sequence[Agent]
) -> dict[int, str]:
    """For slots that are no known agent's: the agent that has the fewest, if it has room."""
    counts = Counter(owner for i in wanted if (owner := owners.get(i)) is not None)
    found: dict[int, str] = {}
    for worker_id in sorted(i for i in wanted if owners.get(i) not in known):
        free = [a for a in agents if not a.room or counts[a.agent_id] < a.room]
        fewest = min(free, key=lambda a: (counts[a.agent_id], a.agent_id), default=None)
        if fewest is None:
            break
        counts[fewest.agent_id] += 1
        found[worker_id] = fewest.agent_id
    return found
