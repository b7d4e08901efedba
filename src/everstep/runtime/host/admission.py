"""Checks whether this host can take part in a job, before it starts anything."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from everstep.base.config import Config
from everstep.base.doors import check_ports
from everstep.base.errors import ConfigError
from everstep.base.strikes import Strike
from everstep.protocol.messages import JobFacts
from everstep.runtime.host.devices import check_slots
from everstep.runtime.host.packet_faults import lacking
from everstep.runtime.link.context import Joining
from everstep.runtime.versions import differences, task_digest, versions


def why_not(facts: JobFacts, config: Config, joining: Joining) -> str:
    """Reason why this host must stay out, in one line; "" if it may join. config: the job's."""
    if joining.task and joining.task != facts.task:
        return f"--task: expected a job that runs {joining.task}, got one that runs {facts.task}"
    here = {**versions(), "task file": task_digest(facts.task)}
    differing = differences(here, facts.versions)
    if differing:
        return f"this host would not compute the same bits: {'; '.join(differing)}"
    try:
        check_slots(config.device, joining.room)
        most = joining.room or config.workers + config.spares
        check_ports(config.network.ports, most, spans=config.cell.hosts > 1)
    except ConfigError as error:
        return str(error)
    return cannot_strike(facts.strikes, (joining.host, joining.own))


def cannot_strike(strikes: Iterable[Strike], names: Sequence[str]) -> str:
    """Scripted fault that this host (of these names) cannot carry out, with the reason, in one line; "" if there is
    none."""
    own = [strike for strike in strikes if any(strike.acts(name) for name in names)]
    lacks = lacking(strike.means for strike in own)
    return f"chaos fault {next(s for s in own if s.means).text!r} cannot strike here: {lacks}" if lacks else ""
