"""The slots of the job, and the agents that own them."""

from __future__ import annotations

from collections.abc import Iterable

from everstep.base.cause import Cause, Why
from everstep.protocol.coordinator.cell_parts import CellParts
from everstep.protocol.coordinator.cells import Cells
from everstep.protocol.coordinator.environment import Environment
from everstep.protocol.coordinator.grants import Grants
from everstep.protocol.coordinator.membership import Agent, Agents, Membership
from everstep.protocol.coordinator.slot_owners import Owners


class Slots:
    """Slots that were asked for, and their fate. target: number of members wanted. lost: slots given up for good,
    with the reason. owners: the agents that keep them filled; grants: and start their lives; cells: the shapes of
    these; parts: lives that are one worker."""

    def __init__(self, env: Environment, membership: Membership, agents: Agents) -> None:
        self.target = env.config.workers
        self.lost: dict[int, str] = {}
        self.grants, self.cells, self.parts = Grants(env), Cells(env), CellParts(env)
        self._env, self._membership, self._agents = env, membership, agents
        self._asked: set[int] | None = None  # None: as the agents started them
        self._retiring: set[int] = set()  # not wanted any more, but the worker has not left yet
        self._unwanted: dict[int, Cause] = {}
        self.owners = Owners(env, membership, agents)
        self._version = 0
        self._shared: tuple[int, int, str] | None = None

    # ---- wanted slots

    @property
    def as_started(self) -> bool:
        """Whether the slots are still those that the agents started with."""
        return self._asked is None

    @property
    def shared_out(self) -> bool:
        """Whether the coordinator decides which agent keeps which slots filled."""
        return self._asked is not None or self._env.config.slots > 0

    @property
    def least(self) -> int:
        """Smallest number of members that the job may run with."""
        return max(1, self._env.config.min_workers)

    def ids(self) -> set[int]:
        """Slots to keep filled, including those given up."""
        if self._asked is not None:
            return self._asked
        announced = sum(agent.slots for agent in self._agents.known.values())
        config = self._env.config
        return set(range(max(config.workers, config.slots, announced))) | set(self._membership.workers)

    def wanted(self, worker_id: int) -> bool:
        return self._asked is None or worker_id in self._asked

    def left(self, agent_id: str | None = None, *, but: int | None = None) -> int:
        """Number of slots (of this agent, if one is given) that were not given up; without one, of workers that these
        make. but: not counting this slot."""
        there = sum(agent_id in (None, self.owners.of(i)) for i in self.ids() - set(self.lost) - {but})
        return there if agent_id is not None else there // self.cells.hosts

    def expected(self) -> int:
        """Number of members that there can be: the target, or fewer if slots were given up."""
        return min(self.target, self.left())

    def unwanted_for(self, worker_id: int) -> Cause:
        """Cause of the request that removed this slot."""
        return self._unwanted.get(worker_id, Cause.SCALED)

    def want(self, target: int, ids: set[int], why: Why) -> None:
        """Change the number of members, and the slots, that are wanted."""
        running = {key.worker_id for agent in self._agents.known.values() for key in agent.believed}
        running |= {i for i, worker in self._membership.workers.items() if worker.connection is not None}
        for worker_id in ids - self.ids() - running:
            self.owners.forget(worker_id)
        self._retiring = (self._retiring | (self.ids() & running)) - ids
        self.take_wish(target, ids, why.cause)
        self._env.persist("target", target=target, slots=sorted(ids), cause=why.cause, reason=why.reason)

    def take_wish(self, target: int, ids: set[int], cause: Cause) -> None:
        """Take the wanted slots of a new request, or of an earlier life of the coordinator."""
        self._env.change()
        self._version += 1
        self._unwanted |= dict.fromkeys(self.ids() - ids, cause)
        self.target, self._asked = target, set(ids)

    # ---- fate of the slots

    def runs(self, worker_id: int, agent_id: str) -> None:
        self._version += self.owners.of(worker_id) != agent_id
        self.owners.take(worker_id, agent_id)

    def revive(self, worker_id: int) -> None:
        """A life of the slot runs, though it may have been given up."""
        if self.lost.pop(worker_id, None) is not None:
            self._env.change()
            self._version += 1

    def empty(self, worker_id: int) -> None:
        self._env.change()
        self._version += worker_id in self._retiring
        self._retiring.discard(worker_id)

    def not_run(self, agent_id: str, running: Iterable[int] = ()) -> None:
        """This agent runs only these slots, so workers of its other slots that were to retire have left."""
        left = {i for i in self._retiring - set(running) if self.owners.of(i) == agent_id}
        self._version += bool(left)
        self._retiring -= left

    def let_go(self, worker_id: int, agent: Agent, why: Why) -> None:
        """An agent gives a part of a worker up, which another host may take."""
        if self.owners.give_up(worker_id, agent.agent_id, agent.process, why):
            self._env.change()
            self._version += 1
            about = {"worker_id": worker_id, "agent_id": agent.agent_id, "process": agent.process}
            self._env.persist("let_go", **about, cause=why.cause, reason=why.reason)

    def lose(self, worker_id: int, agent_id: str, why: Why) -> bool:
        """An agent gives a slot up. Returns False if that has no effect: the slot is another agent's, or was given
        up before."""
        if worker_id in self.lost or self.owners.of(worker_id) not in (None, agent_id):
            return False
        self._env.change()
        self._version += 1
        self.lost[worker_id] = why.reason
        self._env.persist("slot_lost", worker_id=worker_id, cause=why.cause, reason=why.reason)
        return True

    def share_out(self, ending: str) -> None:
        """Tell each agent which slots to keep filled, unless the agents decide that themselves.

        An unwanted slot stays in the list until its process has left. After a restart of the coordinator the agents
        come back one by one: slots that the others run must not be started again on the first. ending: the state in
        which the job is about to end, "" if it is not; if slots were asked for, nothing is started then.
        """
        state = self._agents.version, self._version + self.cells.version, ending
        seen = self._shared == state and self.owners.withheld <= self._membership.workers.keys()
        if not self.shared_out or self._membership.in_grace or seen:
            return  # a thousand hellos of workers need not look at all slots
        self._shared = state
        agents = [a for _, a in sorted(self._agents.known.items()) if a.connection is not None]
        goes_on = self._asked is None and not ending and all(agent.sent_slots is not None for agent in agents)
        owners = [self.owners.of(i) for i in range(self._env.config.slots)]
        if not agents or (goes_on and all(owner in self._agents.known for owner in owners)):
            return  # a thousand hellos need not share out a thousand slots each
        asked = set(range(self._env.config.slots)) if self._asked is None else self._asked
        wanted = set() if ending == "interrupted" else (asked | self._retiring) - set(self.lost)
        self.owners.find(wanted, agents)
        slots_of: dict[str, list[int]] = {agent.agent_id: [] for agent in agents}
        for worker_id in sorted(wanted):
            slots_of.get(self.owners.of(worker_id) or "", []).append(worker_id)
        for agent in agents:
            ids = slots_of[agent.agent_id]
            if agent.sent_slots != ids:
                first = self.grants.give(agent, {i: self._membership.next_incarnation(i) for i in ids})
                self._env.send(agent.connection, agent.new_slots(ids, first, self.cells.ranks(ids)))

    # ---- from the journal

    def replay_lost(self, worker_id: int, reason: str) -> None:
        """An earlier life of the coordinator gave this slot up."""
        self.lost[worker_id] = reason

    def restore(self, worker_ids: Iterable[int]) -> None:
        """Take the slots of all members of the plans in the journal."""
        self._retiring = {i for i in worker_ids if not self.wanted(i)}
