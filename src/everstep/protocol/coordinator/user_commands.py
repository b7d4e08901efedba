"""Commands of people to the coordinator: status, scale, drain, faults, stop. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from itertools import count, islice
from typing import Any

import msgspec

from everstep.base.cause import Cause, Why
from everstep.base.plan import SEGMENTS, Plan
from everstep.base.strikes import Strike
from everstep.protocol.converter import converter
from everstep.protocol.coordinator import fault_orders, hosts
from everstep.protocol.coordinator.agreement import NO_PLAN
from everstep.protocol.coordinator.asked_checkpoints import Stop
from everstep.protocol.coordinator.environment import listed
from everstep.protocol.coordinator.job_state import JobState
from everstep.protocol.coordinator.membership import Worker
from everstep.protocol.coordinator.workers import processes
from everstep.protocol.messages import Command, CommandReply, InjectFault, JobHello
from everstep.protocol.roles import COMMANDS, JOB, READ, command_refusal

_read_strike = converter(Strike)

INTERRUPTED = 130
TERMINATED = 143
_MOST_FAULT = 500
_MOST_NAME = 40
_MOST_HOST = 200
_MOST_GRACE_S = 1_000_000
MOST_ASKED = 16
"""Most unanswered requests of the job's process."""

_Args = dict[str, Any]
_Reply = tuple[str, dict[str, Any]]
"""An error, "" if there is none, and the result."""


def command(job: JobState, connection: str, message: Command) -> None:
    """Carry out a command, or say in one line why not."""
    name, ended = message.name, job.progress.ended
    role = job.env.connections[connection].role
    refused = command_refusal(role, name)
    result: dict[str, Any]
    if COMMANDS.get(name) != READ:
        _tell_who_asked(job, role, name[:_MOST_NAME], refused)
    first = job.env.said if name == "chaos" else None  # a coordinator that is struck has answered before
    if refused:
        error, result = refused, {}
    elif name not in _ACTS and name not in _APART:
        error, result = f"unknown command '{name}': expected one of {', '.join(sorted({*_ACTS, *_APART}))}", {}
    elif ended is not None and name != "status":
        error, result = f"the job is over ({ended.state}): {name} has no effect", {}
    elif name == "checkpoint":
        job.saving.ask(connection, message)
        return
    elif name == "stop":
        error, result = _stop(job, message.args, lasting=role != JOB)
    else:
        error, result = _ACTS[name](job, message.args)
    reply = CommandReply(request=message.request, ok=not error, error=error, result=result)
    job.env.send(connection, reply, first)
    if refused:
        job.env.close(connection, refused, foul=True)


def _tell_who_asked(job: JobState, role: str, name: str, refused: str) -> None:
    text = f"{name} was asked for with the token for {role!r}{': refused' if refused else ''}"
    why = Why(Cause.REFUSED if refused else Cause.REQUESTED, text)
    job.env.report("commanded", why, command=name, role=role)


def job_hello(job: JobState, connection: str, hello: JobHello) -> None:
    """The job's process is here (again): its requests to an earlier coordinator count for this one, too."""
    if not job.progress.tell_end(connection):
        for asked in hello.asked[:MOST_ASKED]:
            command(job, connection, asked)


def _stop(job: JobState, args: _Args, *, lasting: bool) -> _Reply:
    code = TERMINATED if args.get("exit_code") == TERMINATED else INTERRUPTED
    grace_s = args.get("grace_s", 0)
    if not isinstance(grace_s, int | float) or not 0 <= grace_s < _MOST_GRACE_S:
        return f"grace_s: expected seconds from 0 to {_MOST_GRACE_S}, got {str(grace_s)[:40]!r}", {}
    cause = Cause.read(args.get("cause") or Cause.REQUESTED)
    why = Why(cause, str(args.get("reason") or "stopped by request"))
    job.saving.stop(Stop(why, code, int(grace_s * 1e9)), lasting=lasting)
    return "", {}


def _scale(job: JobState, args: _Args) -> _Reply:
    if job.env.config.hosts.span > 1:
        return f"cannot scale: {hosts.SPANNED}", {}
    wanted, slots, members = args.get("workers"), job.slots, set(job.agreement.newest.worker_ids)
    least, most = _least(job), job.env.config.room
    if type(wanted) is not int or not least <= wanted <= most:
        whose = "min_workers" if least == slots.least else "one per stage"
        return f"expected a number of workers from {least} ({whose}) to {most} (lanes), got {wanted!r}", {}
    ids, was = slots.ids(), slots.target
    size = wanted + max(0, len(ids) - was)
    keep = _keep(job, sorted(members & ids - set(slots.lost)), wanted)
    dropped = members - set(keep)
    # Who is to stay, then the slots that there are already, then new ones.
    others = [i for i in sorted(ids) if i not in keep and i not in dropped and i not in slots.lost]
    chosen = (keep + others)[:size]
    leaving = {*dropped, *hosts.slots_of_drained(job)}
    fresh = (i for i in count() if i not in chosen and i not in slots.lost and i not in leaving)
    chosen += islice(fresh, size - len(chosen))
    slots.want(wanted, set(chosen), Why(Cause.SCALED, f"scaled from {was} to {wanted} workers by request"))
    return "", {"workers": wanted, "before": was}


def _least(job: JobState) -> int:
    """Number of workers to which a job may be scaled down: every stage keeps one, as far as each has one of its own."""
    config = job.env.config
    return max(job.slots.least, min(config.stages, len(job.agreement.newest.members) or config.workers))


def _keep(job: JobState, members: list[int], wanted: int) -> list[int]:
    """Workers that stay if only `wanted` are wanted: the last of the largest pool leaves first."""
    plan, kept = job.agreement.newest, set(members)
    if plan.stages == 1:
        return members[:wanted]
    while len(kept) > wanted:
        pools = [[s.worker_id for s in plan.pool(k) if s.worker_id in kept] for k in range(plan.stages)]
        largest = max(pools, key=len)
        if len(largest) < 2:
            break
        kept.discard(largest[-1])
    return sorted(kept)


def _drain(job: JobState, args: _Args) -> _Reply:
    if "host" in args:
        return hosts.drain(job, str(args["host"])[:_MOST_HOST])
    worker_id, slots, plan = args.get("worker_id"), job.slots, job.agreement.newest
    ids = slots.ids()
    if job.env.config.hosts.span > 1:
        return f"cannot drain worker {worker_id!r:.20}: {hosts.SPANNED}", {}
    if type(worker_id) is not int or worker_id not in ids:
        return f"no worker {worker_id!r}: the workers are {listed(ids)}", {}
    spare = plan is not NO_PLAN and worker_id not in plan.worker_ids
    staying = ids - {worker_id} - set(slots.lost)  # a slot that was given up starts nobody
    target = min(len(staying), slots.target if spare else slots.target - 1)
    if target < slots.least:
        return f"cannot drain worker {worker_id}: {target} workers would be left and min_workers is {slots.least}", {}
    if alone := hosts.stages_without(job, [worker_id], staying):
        return f"cannot drain worker {worker_id}: {hosts.refused_for(alone)}", {}
    least = _least(job)
    if target < least:
        return f"cannot drain worker {worker_id}: {target} workers would be left of {least} for the stages", {}
    slots.want(target, ids - {worker_id}, Why(Cause.DRAINED, f"worker {worker_id} drained by request"))
    return "", {"workers": target}


def _chaos(job: JobState, args: _Args) -> _Reply:
    """Hand a fault to all workers: as with scripted faults, its target injects it into itself."""
    fault, stages = args.get("fault"), range(job.env.config.stages)
    if "strike" in args:
        return _strike(job, args["strike"])
    if not isinstance(fault, str) or not 0 < len(fault) <= _MOST_FAULT:
        return f"expected a fault such as kill:target=worker:2, got {str(fault)[:40]!r}", {}
    there = {i: w for i, w in sorted(job.membership.workers.items()) if w.connection is not None}
    if job.agreement.plan is NO_PLAN or not there:
        return "no worker trains yet: try again", {}
    away = [i for i in job.agreement.plan.worker_ids if i in job.membership.workers and i not in job.membership.came]
    if away:  # it would never hear of it
        return f"the coordinator was restarted, and workers {listed(away)} have yet to come back to it: try again", {}
    nobody = [i for i in _numbers(args, "workers") if i not in there]
    if nobody:
        return f"no worker {listed(nobody)}: the workers are {listed(there)}", {}
    beyond = [k for k in _numbers(args, "stages") if k not in stages]
    if beyond:
        return f"no stage {listed(beyond)}: the stages are {listed(stages)}", {}
    message = InjectFault(fault=fault, number=job.env.number())
    if "due" in args:
        strike, wrong = _as_strike(args["due"])
        if strike is None or not strike.coordinator:
            return wrong or "expected a fault of the coordinator, got one of something else", {}
        job.earlier_targets.ask(replace(strike, index=message.number))
    for worker in there.values():
        job.env.send(worker.connection, message)
    return "", {"fault": fault, "workers": list(there)}


def _as_strike(given: Any) -> tuple[Strike | None, str]:
    """The strike as it was given, or the mistake in it."""
    what = "a fault of a host, a link or the coordinator"
    try:
        strike = _read_strike(given)
    except msgspec.ValidationError as error:
        return None, f"expected {what}, got something else: {str(error)[:100]}"
    if not strike.possible:
        return None, f"expected {what}, got {strike.kind[:40]!r} with numbers that make no sense"
    return strike, ""


def _strike(job: JobState, given: Any) -> _Reply:
    strike, wrong = _as_strike(given)
    if strike is None:
        return wrong, {}
    refused = fault_orders.strike_asked(job, strike)
    return refused, {} if refused else {"fault": strike.text, "workers": []}


def _numbers(args: _Args, name: str) -> list[int]:
    found = args.get(name)
    return [i for i in found if isinstance(i, int)] if isinstance(found, list) else []


# ---- what `everstep status` shows


def status(job: JobState) -> dict[str, Any]:
    """The output of `everstep status --json`, without the coordinator's own pid."""
    ended = job.progress.ended
    why = job.quorum.waiting if ended is None else Why(ended.cause, ended.reason)
    return {
        "state": job_state(job),
        "generation": job.agreement.plan.generation,
        "step": job.progress.step,
        "target": job.slots.target,
        "cause": why.cause if why is not None else None,
        "reason": why.reason if why is not None else "",
        "workers": [
            _worker_status(job, w)
            for _, w in sorted(job.membership.workers.items())
            if job.slots.parts.head_of(w.key) == w.key
        ],
        **job.profiling.status(),
    }


def job_state(job: JobState) -> str:
    """How it ended, if it has; else waiting, starting, recovering or running."""
    agreement = job.agreement
    if job.progress.ended is not None:
        return job.progress.ended.state
    if job.quorum.waiting:
        return "waiting"
    settled = bool(agreement.entered)
    if agreement.plan is NO_PLAN or (agreement.generation == 1 and not settled and not agreement.broken):
        return "starting"
    if agreement.broken or (not settled and not agreement.plan.prepared):
        return "recovering"
    return "running"


def _worker_status(job: JobState, worker: Worker) -> dict[str, Any]:
    plan, worker_id = job.agreement.plan, worker.key.worker_id
    takes_part = plan.has(worker.key)
    comes = worker_id in job.healing.joins or job.agreement.is_prepared(worker.key) or not worker.ready
    stages = plan.stages_of(worker_id) if takes_part else ()
    return {
        **worker.named,
        **processes(job, worker),
        "host": job.agents.shown_host(worker),
        "stage": stages[0] if stages else None,
        "stages": list(stages),
        "role": plan.role_of(worker_id) if takes_part else "joining" if comes else "spare",
        "step": worker.step,
        "lanes": sorted({lane for stage in stages for lane in plan.lanes_of(worker_id, stage)}),
        "samples_per_s": worker.samples_per_s,
        "segments": _segments(plan, worker_id, stages) if takes_part else None,
    }


def _segments(plan: Plan, worker_id: int, stages: Collection[int]) -> list[int]:
    """Numbers of the segments of the optimizer's state that a member holds, and that there are in its stages."""
    held = [s.segments for s in plan.shards if s.worker_id == worker_id and s.segments is not None]
    whole = len(stages) - len(held)
    return [whole * SEGMENTS + sum(hi - lo for runs in held for lo, hi in runs), len(stages) * SEGMENTS]


_APART = ("checkpoint", "stop")
_ACTS: dict[str, Callable[[JobState, _Args], _Reply]] = {
    "status": lambda job, args: ("", status(job)),
    "hosts": lambda job, args: ("", {"hosts": hosts.listed_hosts(job)}),
    "scale": _scale,
    "drain": _drain,
    "chaos": _chaos,
    "profile": lambda job, args: job.profiling.ask(args),
}
