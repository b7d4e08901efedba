"""Which agent keeps which slot filled. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from math import inf

from everstep.protocol.coordinator.environment import Environment
from everstep.protocol.coordinator.membership import Agent, Agents, Membership
from everstep.protocol.coordinator.sharing import share


class Owners:
    """The agent of each slot. withheld: slots that are nobody's, but a life of each is there."""

    def __init__(self, env: Environment, membership: Membership, agents: Agents) -> None:
        self.withheld: set[int] = set()
        self._env, self._membership, self._agents = env, membership, agents
        self._of: dict[int, str] = {}
        self._given_up: set[tuple[str, str, int]] = set()  # agent and its process, slot

    def of(self, worker_id: int) -> str | None:
        return self._of.get(worker_id)

    def kept(self, worker_id: int) -> bool:
        """Whether an agent that is here keeps the slot filled, or one may once its present life is over."""
        return self.of(worker_id) in self._agents.known or worker_id in self.withheld

    def take(self, worker_id: int, agent_id: str) -> None:
        """An agent has the slot."""
        self._of[worker_id] = agent_id

    def forget(self, worker_id: int) -> None:
        """An earlier owner has no claim to the slot."""
        self._of.pop(worker_id, None)

    def give_up(self, worker_id: int, agent: Agent) -> bool:
        """This process of an agent does not get the slot again; it has room for one less. Returns whether it had it."""
        self._given_up.add((agent.agent_id, agent.process, worker_id))
        return self._of.get(worker_id) == agent.agent_id and self._of.pop(worker_id) is not None

    def find(self, wanted: Collection[int], agents: Sequence[Agent]) -> None:
        """Give slots without a known agent to the host that the map names, or to the host with the fewest slots. But
        a slot with a living worker waits for the agent of that worker's host: otherwise two hosts would have lives
        of one slot, and neither host's would be admitted."""
        self.withheld = set()
        for worker_id in sorted(i for i in wanted if self._of.get(i) not in self._agents.known):
            worker = self._membership.workers.get(worker_id)
            agent = None if worker is None else self._agents.of(worker)
            mine = agent is not None and (agent.agent_id, agent.process, worker_id) not in self._given_up
            if agent is not None and mine and not agent.draining:
                self._of[worker_id] = agent.agent_id
            elif worker is not None:
                self.withheld.add(worker_id)
        config = self._env.config  # of a worker on several hosts none has two parts
        most = inf if config.hosts.span == 1 else config.slots // config.hosts.span
        less = Counter((agent_id, process) for agent_id, process, _ in self._given_up)
        rooms = {a.agent_id: min(a.room or inf, most) - less[a.agent_id, a.process] for a in agents if not a.draining}
        where = self._env.config.hosts.named.items()
        named = {i: [a.agent_id for a in agents if name in (a.agent_id, a.about.get("address"))] for i, name in where}
        of_host = self._agents.whereabouts.of_host
        domains = {agent_id: of_host(agent_id, agent.host) for agent_id, agent in self._agents.known.items()}
        self._of |= share(set(wanted) - self.withheld, self._of, self._agents.known, rooms, named, domains)
