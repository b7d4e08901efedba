"""Whether this host can take part in a job, as far as it can tell before it starts anything."""

from __future__ import annotations

from everstep.base.config import Config
from everstep.base.doors import check_ports
from everstep.base.errors import ConfigError
from everstep.protocol.messages import JobFacts
from everstep.runtime.context import Joining
from everstep.runtime.devices import check_slots
from everstep.runtime.versions import differences, task_digest, versions


def why_not(facts: JobFacts, config: Config, joining: Joining) -> str:
    """Why this host has to stay out, in one line; "" if it need not. config: the job's."""
    if joining.task and joining.task != facts.task:
        return f"--task: this host runs {joining.task} and nothing else, the job is to run {facts.task}"
    here = {**versions(), "task file": task_digest(facts.task)}
    differing = differences(here, facts.versions, mixed=config.hosts.mixed)
    if differing:
        return f"this host would not compute the same bits: {'; '.join(differing)}"
    try:
        check_slots(config.device, joining.room)
        check_ports(config.network.ports, joining.room or config.workers + config.spares)
    except ConfigError as error:
        return str(error)
    return ""
