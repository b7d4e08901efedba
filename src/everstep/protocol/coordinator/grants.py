"""The owner of each slot, and its first incarnation; both are journaled before any host hears them. Pure.

So a restarted coordinator gives no life to a second host that it gave to a first, even if the first may be lost by
then; and a host that counted its own incarnations while it was cut off is not taken for another host's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace

from everstep.protocol.coordinator.environment import Environment
from everstep.protocol.coordinator.membership import Agent


@dataclass(frozen=True)
class Grant:
    """This process of an agent starts the lives of a slot, from the incarnation `first` on. restored: the grant
    comes from the journal, and the agent has not been heard since. The journal knows which of its lives are over."""

    agent_id: str
    host: str
    process: str
    first: int
    restored: bool = False

    @property
    def said(self) -> tuple[str, str, str, int]:
        return self.agent_id, self.host, self.process, self.first


class Grants:
    """The newest grant of each slot."""

    def __init__(self, env: Environment) -> None:
        self._env = env
        self._newest: dict[int, Grant] = {}
        self._of: defaultdict[str, set[int]] = defaultdict(set)  # agent id -> slots

    def of(self, worker_id: int) -> Grant | None:
        """The grant of this slot; None if no agent was told to keep it filled."""
        return self._newest.get(worker_id)

    def agents(self) -> list[tuple[int, str]]:
        """Granted slots with their agents' ids, ascending."""
        return [(worker_id, grant.agent_id) for worker_id, grant in sorted(self._newest.items())]

    def give(self, agent: Agent, least: Mapping[int, int]) -> list[int]:
        """Grant these slots to the agent. least: by slot, the least incarnation that a life may have, as far as
        other lives are known. Returns the incarnation from which on the agent may start lives, in the same order:
        one that no other process could have used."""
        slots = least.keys() | self._of[agent.agent_id]
        before = {i: grant.said for i in slots if (grant := self._newest.get(i)) is not None}
        for worker_id in slots:
            self._take(worker_id, self._next(worker_id, agent, least.get(worker_id, 0)))
        if any(before.get(i) != self._newest[i].said for i in slots):
            self._persist(agent)
        return [max(n, self._newest[i].first) for i, n in least.items()]

    def replay(self, worker_id: int, grant: Grant) -> None:
        """Take a grant of an earlier life of the coordinator."""
        self._take(worker_id, grant)

    def _next(self, worker_id: int, agent: Agent, least: int) -> Grant:
        known = self._newest.get(worker_id)
        if known is None:
            return Grant(agent.agent_id, agent.host, agent.process, least)
        if (known.agent_id, known.process) == (agent.agent_id, agent.process):
            return replace(known, host=agent.host, restored=False)
        first = max(least + known.restored, known.first + 1)
        return Grant(agent.agent_id, agent.host, agent.process, first)

    def _take(self, worker_id: int, grant: Grant) -> None:
        known = self._newest.get(worker_id)
        if known is not None:
            self._of[known.agent_id].discard(worker_id)
        self._newest[worker_id] = grant
        self._of[grant.agent_id].add(worker_id)

    def _persist(self, agent: Agent) -> None:
        """Journal all slots of the agent, so that its newest entry is complete."""
        slots = sorted(self._of[agent.agent_id])
        first = [self._newest[i].first for i in slots]
        about = {"agent_id": agent.agent_id, "host": agent.host, "process": agent.process}
        self._env.persist("grants", **about, slots=slots, first=first)
