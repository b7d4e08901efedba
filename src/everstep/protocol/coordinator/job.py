"""The coordinator's parts, each with a state of its own. Pure.

What is said to one part alone is a method of it. What concerns several (a death, a plan, a hello) is a function over
`JobState`, which looks at all parts it needs and tells each what has happened; nobody writes into a part.
"""

from __future__ import annotations

from dataclasses import dataclass

from everstep.protocol.coordinator.agents import Agents
from everstep.protocol.coordinator.agreement import Agreement
from everstep.protocol.coordinator.desk import Desk
from everstep.protocol.coordinator.failures import Failures
from everstep.protocol.coordinator.healing import Healing
from everstep.protocol.coordinator.links import Links
from everstep.protocol.coordinator.membership import Membership
from everstep.protocol.coordinator.profiling import Profiling
from everstep.protocol.coordinator.progress import JobProgress
from everstep.protocol.coordinator.quorum import Quorum
from everstep.protocol.coordinator.recovery import Recovery
from everstep.protocol.coordinator.saving import Saving
from everstep.protocol.coordinator.slots import Slots
from everstep.protocol.coordinator.speeds import Place, Speeds
from everstep.protocol.coordinator.store import RendezvousStore
from everstep.protocol.coordinator.types import CoordinatorConfig


@dataclass(frozen=True)
class JobState:
    """All that the coordinator knows of its job."""

    desk: Desk
    membership: Membership
    agents: Agents
    slots: Slots
    agreement: Agreement
    progress: JobProgress
    recovery: Recovery
    quorum: Quorum
    healing: Healing
    speeds: Speeds
    links: Links
    saving: Saving
    failures: Failures
    profiling: Profiling
    store: RendezvousStore

    @property
    def version(self) -> tuple[int, ...]:
        """Changes as soon as anything changes that a decision looks at.

        While members train in slots that are their agents' own, none looks at agents: a thousand that come back one by
        one cost no decision each.
        """
        agreement, slots = self.agreement, self.slots
        trains = agreement.plan is not None and not agreement.broken
        agents = 0 if trains and not slots.shared_out else self.agents.version
        others = (self.membership.version, slots.version, agreement.version, self.quorum.version, self.healing.version)
        return (agents, int(self.saving.ending is not None), *others)


def new_job(config: CoordinatorConfig, place: Place) -> JobState:
    """A job of which nothing is known yet."""
    desk = Desk(config)
    membership, agents, quorum = Membership(desk), Agents(desk), Quorum(desk)
    agreement = Agreement(desk, membership)
    progress, recovery = JobProgress(desk, agreement), Recovery(desk, agreement)
    saving = Saving(desk, membership, agreement, progress, quorum)
    return JobState(
        desk=desk,
        membership=membership,
        agents=agents,
        slots=Slots(desk, membership, agents),
        agreement=agreement,
        progress=progress,
        recovery=recovery,
        quorum=quorum,
        healing=Healing(desk),
        speeds=Speeds(desk, membership, place),
        links=Links(desk, membership, agreement, recovery),
        saving=saving,
        failures=Failures(desk, membership, agreement, progress, saving),
        profiling=Profiling(desk, membership, agreement, progress),
        store=RendezvousStore(desk.send),
    )
