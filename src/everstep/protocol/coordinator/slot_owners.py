"""Which agent keeps which slot filled. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from math import inf

from everstep.base.cause import Why
from everstep.protocol.coordinator.environment import Environment
from everstep.protocol.coordinator.membership import Agent, Agents, Membership
from everstep.protocol.coordinator.sharing import share

MOST_HOSTS = 2
"""A slot that so many hosts have given up is lost for good: the fault is none of theirs."""


class Owners:
    """The agent of each slot. withheld: slots that are nobody's, but a life of each is there."""

    def __init__(self, env: Environment, membership: Membership, agents: Agents) -> None:
        self.withheld: set[int] = set()
        self._env, self._membership, self._agents = env, membership, agents
        self._of: dict[int, str] = {}
        self._given_up: dict[tuple[str, str, int], Why] = {}  # by agent and its process, slot

    def of(self, worker_id: int) -> str | None:
        return self._of.get(worker_id)

    def worn(self, wanted: Collection[int]) -> dict[int, Why]:
        """Those of these slots that an agent has given up, and no agent has since; and why."""
        return {i: why for (_, _, i), why in self._given_up.items() if i in wanted and i not in self._of}

    def nobodys(self, wanted: Collection[int]) -> dict[int, Why]:
        """Those of these slots that hosts have given up, and no other one takes; and why. A slot with a living worker
        is none yet."""
        found = {}
        for worker_id, why in sorted(self.worn(wanted).items()):
            names = self._agents.names(self._givers(worker_id))
            turns = f"hosts {', '.join(names)} gave it up in turn, last: " if len(names) > 1 else ""
            if worker_id not in self.withheld:
                found[worker_id] = Why(why.cause, turns + why.reason)
        return found

    def _givers(self, worker_id: int) -> list[str]:
        """The agents that have given the slot up, in this order."""
        return list(dict.fromkeys(agent_id for agent_id, _, i in self._given_up if i == worker_id))

    def has_given_up(self, worker_id: int, agent_id: str, process: str) -> bool:
        """Whether this process of an agent has given the slot up."""
        return (agent_id, process, worker_id) in self._given_up

    def take(self, worker_id: int, agent_id: str) -> None:
        """An agent has the slot."""
        self._of[worker_id] = agent_id

    def forget(self, worker_id: int) -> None:
        """An earlier owner has no claim to the slot."""
        self._of.pop(worker_id, None)

    def give_up(self, worker_id: int, agent_id: str, process: str, why: Why) -> bool:
        """This process of an agent does not get the slot again; it has room for one less. Returns whether that is
        new."""
        owner, known = self.of(worker_id), self.has_given_up(worker_id, agent_id, process)
        had = owner == agent_id
        if had:
            self.forget(worker_id)
        elif owner is not None:
            return False  # it ran lives of its own while it was cut off
        self._given_up.setdefault((agent_id, process, worker_id), why)
        return had or not known

    def find(self, wanted: Collection[int], agents: Sequence[Agent]) -> None:
        """Give slots without a known agent to the host that the map names, or to the host with the fewest slots. But
        a slot with a living worker waits for the agent of that worker's host: otherwise two hosts would have lives
        of one slot, and neither host's would be admitted."""
        self.withheld, worn = set(), self.worn(wanted)
        for worker_id in sorted(i for i in wanted if self._of.get(i) not in self._agents.known):
            worker = self._membership.workers.get(worker_id)
            agent = None if worker is None else self._agents.of(worker)
            mine = agent is not None and not self.has_given_up(worker_id, agent.agent_id, agent.process)
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
        worn_out = {i for i in worn if i not in self._of and len(self._givers(i)) >= MOST_HOSTS}
        free, known = set(wanted) - self.withheld - worn_out, self._agents.known
        kept = {i for i in free if self.of(i) in known}
        for worker_id in sorted({i for _, _, i in self._given_up} & (free - kept)):
            others = {i: n for i, n in rooms.items() if not self.has_given_up(worker_id, i, known[i].process)}
            found = share({*kept, worker_id}, self._of, known, others, named, domains)
            self._of |= found
            kept |= found.keys()
            free -= {worker_id} - kept
        self._of |= share(free, self._of, known, rooms, named, domains)
        for worker_id in sorted(worn.keys() & self._of.keys()):
            self._say_moved(worker_id, worn[worker_id])

    def _say_moved(self, worker_id: int, why: Why) -> None:
        owner, giver = self._agents.names([self._of[worker_id], self._givers(worker_id)[-1]])
        text = f"host {owner} takes its slot, which host {giver} gave up: {why.reason}"
        self._env.report("warning", Why(why.cause, text), worker_id=worker_id, host=owner)
