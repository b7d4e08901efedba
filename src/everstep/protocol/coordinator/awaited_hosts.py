"""Hosts that have to join before a job begins, and those that are missing. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from everstep.base.cause import Cause, Why
from everstep.protocol.coordinator.agreement import NO_PLAN
from everstep.protocol.coordinator.environment import SECOND_NS, Alarm
from everstep.protocol.coordinator.job_state import JobState
from everstep.protocol.coordinator.membership import Agent


def waits(job: JobState) -> bool:
    """Whether the job, which has not begun, waits for hosts. Reports which; no slot is given out meanwhile."""
    if job.agreement.plan is not NO_PLAN or job.progress.ended is not None:
        return False
    why = _lacking(job)
    if why is None:
        if job.quorum.lacks_hosts:
            job.quorum.hosts_came()
        return False
    until_ns = job.quorum.wait_for_hosts(why)
    job.env.alarms.set(Alarm.HOSTS, until_ns)
    return True


def hosts_due(job: JobState, about: Any) -> None:
    """The wait for hosts may have been too long."""
    if job.agreement.plan is not NO_PLAN or job.progress.ended is not None or not job.quorum.lacks_hosts:
        return
    rules, why = job.env.config.hosts, _lacking(job)
    if why is None:
        return
    until_ns = job.quorum.wait_for_hosts(why)
    if job.env.now < until_ns:
        job.env.alarms.set(Alarm.HOSTS, until_ns)
        return
    text = f"gave up after waiting {rules.wait_ns / SECOND_NS:g} s (hosts.wait_s) for hosts: {why.reason}"
    job.progress.end("failed", Why(why.cause, text), 2 if why.cause is Cause.CONFIG else 3)


def _lacking(job: JobState) -> Why | None:
    rules = job.env.config.hosts
    if rules.least <= 1 and not rules.named:
        return None
    there = [agent for _, agent in sorted(job.agents.known.items()) if agent.connection is not None]
    names = ", ".join(agent.agent_id for agent in there) or "none"
    absent = _absent(rules.named.items(), there)
    if absent:
        worker_id, name = absent[0]
        others = f", and {len(absent) - 1} more workers wait for theirs" if len(absent) > 1 else ""
        text = (
            f"map: worker {worker_id} is to run on host {name!r}, which has not joined{others}: the hosts are {names}"
        )
        return Why(Cause.CONFIG, text)
    if len(there) < rules.least:
        text = (
            f"hosts.min: {len(there)} of {rules.least} hosts have joined ({names}): {rules.least - len(there)} missing"
        )
        return Why(Cause.QUORUM, text)
    return None


def _absent(named: Iterable[tuple[int, str]], there: list[Agent]) -> list[tuple[int, str]]:
    """Workers whose host is missing, with its name."""
    names = {name for agent in there for name in (agent.agent_id, agent.about.get("address"), agent.about.get("node"))}
    return [(i, name) for i, name in sorted(named) if name not in names]
