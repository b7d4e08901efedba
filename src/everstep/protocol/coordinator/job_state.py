"""The coordinator's parts, each with a state of its own. Pure.

What is said to one part alone is a method of it. What concerns several (a death, a plan, a hello) is a function over
`JobState`, which looks at all parts it needs and tells each what has happened; nobody writes into a part.
"""

from __future__ import annotations

from everstep.base.plan import WorkerKey
from everstep.protocol.coordinator.agreement import NO_PLAN, Agreement, JobProgress, Recovery
from everstep.protocol.coordinator.arrivals import Healing, Quorum
from everstep.protocol.coordinator.asked_checkpoints import Saving
from everstep.protocol.coordinator.environment import Environment
from everstep.protocol.coordinator.links import Links
from everstep.protocol.coordinator.membership import Agents, Membership
from everstep.protocol.coordinator.profiles import Profiling
from everstep.protocol.coordinator.rendezvous_store import RendezvousStore
from everstep.protocol.coordinator.requested_faults import EarlierTargets
from everstep.protocol.coordinator.slots import Slots
from everstep.protocol.coordinator.speeds import Speeds
from everstep.protocol.coordinator.types import CoordinatorConfig


class JobState:
    """The coordinator's knowledge of its job; at first none."""

    def __init__(self, config: CoordinatorConfig) -> None:
        self.env = env = Environment(config)
        self.membership = membership = Membership(env)
        self.agents = Agents(env)
        self.slots = Slots(env, membership, self.agents)
        self.agreement = agreement = Agreement(env, membership)
        self.progress = progress = JobProgress(env, agreement)
        self.recovery = Recovery(env, agreement)
        self.quorum = Quorum(env)
        self.healing = Healing(env)
        self.speeds = Speeds(env, membership, self.agents)
        self.links = Links(env, membership, agreement, self.recovery)
        self.saving = Saving(env, membership, agreement, progress, self.quorum)
        self.profiling = Profiling(env, membership, agreement, progress)
        self.store = RendezvousStore(env)
        self.earlier_targets = EarlierTargets(env)

    @property
    def version(self) -> tuple[int, ...]:
        """Changes as soon as anything changes that a decision looks at.

        While members train in slots that are their agents' own, none looks at agents: a thousand that come back one by
        one cost no decision each.
        """
        trains = self.agreement.plan is not NO_PLAN and not self.agreement.broken
        agents = 0 if trains and not self.slots.shared_out else self.agents.version
        return agents, self.env.version, int(self.saving.ending is not None)

    def share_out(self) -> None:
        """Tell each agent which slots to keep filled, once hosts that are awaited have come."""
        if not self.quorum.lacks_hosts or self.agreement.plan is not NO_PLAN:  # a plan may have been adopted
            self.slots.share_out("" if self.saving.ending is None else self.saving.ending.state)

    def foreign(self, key: WorkerKey, agent_id: str = "", host: str = "") -> bool:
        """Whether this life of the agent, or on the host, is none of its slot, which another agent was given: its own
        agent was away and kept counting. Of lives from before the grant those that are known to live go on."""
        grant = self.slots.grants.of(key.worker_id)
        if grant is None or agent_id == grant.agent_id or host == grant.host:
            return False
        return key.incarnation >= grant.first or self.membership.alive(key) is None
