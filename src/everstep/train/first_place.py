"""Environment variables about a worker's place, by torchrun's names, for scripts that read them.

Of its first plan alone, and until that has come what its agent expects of it: later plans change nothing, since who
has read it will not look again. Nothing of the job goes by it.
"""

from __future__ import annotations

from everstep.base.config import Config
from everstep.base.doors import host_of
from everstep.base.foreign import WORKER_MARK, derived_ports
from everstep.base.plan import Plan
from everstep.runtime.link.context import WorkerContext


def expected(context: WorkerContext, config: Config) -> dict[str, str]:
    """Before there is a plan. MASTER_PORT is one that nothing of the job listens at."""
    size = max(1, context.local_size)
    return {
        WORKER_MARK: str(context.worker_id),
        "RANK": str(context.worker_id),
        "WORLD_SIZE": str(max(config.workers, context.worker_id + 1)),
        "LOCAL_RANK": str(context.local_rank),
        "LOCAL_WORLD_SIZE": str(size),
        "GROUP_RANK": str(context.worker_id // size),
        "MASTER_ADDR": config.network.address,
        "MASTER_PORT": str(derived_ports(context.peer_token)[0]),
    }


def of_plan(plan: Plan, worker_id: int) -> dict[str, str]:
    """The place of a member: ranks and hosts are numbered in the order of the members."""
    hosts = list(dict.fromkeys(member.host for member in plan.members))
    here = plan.member(worker_id).host
    neighbours = [member.worker_id for member in plan.members if member.host == here]
    return {
        "RANK": str(plan.worker_ids.index(worker_id)),
        "WORLD_SIZE": str(len(plan.members)),
        "LOCAL_RANK": str(neighbours.index(worker_id)),
        "LOCAL_WORLD_SIZE": str(len(neighbours)),
        "GROUP_RANK": str(hosts.index(here)),
        "MASTER_ADDR": host_of(plan.members[0].address),
    }
