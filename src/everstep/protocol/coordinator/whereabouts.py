"""Failure domains of hosts, and which hosts may have died together. Pure.

A failing domain takes several hosts with it, whose last heartbeats came at different moments. So when one host is
given up, every host that is suspected by then is in doubt: no decision counts on it until it is heard, is given up
too, or the floor has passed once more. If no host is suspected nothing waits. So several deaths become one fault,
with one plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from everstep.base.domains import Domains, ordered
from everstep.placement.domain_spread import prefixes
from everstep.protocol.coordinator.environment import Alarm, Environment
from everstep.protocol.detector import PhiDetector


class Whereabouts:
    """labels: domains of the hosts of agents that have said hello, by agent."""

    def __init__(self, env: Environment) -> None:
        self.labels: dict[str, dict[str, str]] = {}
        self._env = env
        self._doubted_until_ns: dict[str, int] = {}
        self._given_up: dict[str, tuple[int, Domains]] = {}

    def greet(self, agent_id: str, labels: Mapping[str, str]) -> None:
        """An agent has said its host's domains."""
        self.labels[agent_id] = dict(labels)
        self.heard(agent_id)

    def of_host(self, agent_id: str, host: str) -> Domains:
        return ordered(self.labels.get(agent_id, {}), host)

    # ---- hosts that die together

    def give_up(self, agent_id: str, host: str, others: Mapping[str, PhiDetector]) -> None:
        """A host is given up because it is silent. others: judgements of the other agents' heartbeats, by agent."""
        now, floor_ns = self._env.now, self._env.config.heartbeat_floor_ns
        self._given_up = {name: found for name, found in self._given_up.items() if now - found[0] <= 2 * floor_ns}
        self._given_up[agent_id] = now, self.of_host(agent_id, host)
        self._doubted_until_ns.pop(agent_id, None)
        for other_id, detector in sorted(others.items()):
            if detector.suspicion(now).suspect and other_id not in self._doubted_until_ns:
                self._doubted_until_ns[other_id] = now + floor_ns
                self._env.alarms.set(Alarm.AGENT, now + floor_ns, other_id)

    def in_doubt(self, agent_id: str) -> bool:
        """Whether this host may have died with one that was given up."""
        return self._doubted_until_ns.get(agent_id, 0) > self._env.now

    def heard(self, agent_id: str) -> None:
        """An agent was heard, so its host is alive."""
        if self._doubted_until_ns.pop(agent_id, None) is not None:
            self._env.change()

    def look(self, agent_id: str) -> None:
        """Clear the doubt about this host once decisions have waited long enough for it."""
        if agent_id in self._doubted_until_ns and not self.in_doubt(agent_id):
            self.heard(agent_id)

    def lost_domain(self, living: Iterable[tuple[str, str]]) -> str:
        """The widest failure domain that the hosts just given up have in common, in words, if they are several and
        no living (agent, host) is in it; else ""."""
        lost = {name: set(prefixes(domains)) for name, (_, domains) in self._given_up.items()}
        common = set.intersection(*lost.values()) if len(lost) > 1 else set()
        common -= {prefix for agent in living for prefix in prefixes(self.of_host(*agent))}
        if not common:
            return ""
        kind, name = min(common, key=len)[-1]
        return f"{kind} {name} was lost, with the hosts {', '.join(sorted(lost))}"
