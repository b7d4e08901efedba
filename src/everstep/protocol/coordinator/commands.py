"""What people ask of the coordinator: status, scale, drain, faults, stop. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from everstep.base.cause import Cause, Why
from everstep.protocol.coordinator.job import JobState
from everstep.protocol.coordinator.status import status
from everstep.protocol.coordinator.words import listed
from everstep.protocol.messages import Command, CommandReply, InjectFault

INTERRUPTED = 130
TERMINATED = 143
_MOST_FAULT = 500


def command(job: JobState, connection: str, message: Command) -> None:
    """Carry out a command, or say in one line why not."""
    act = _ACTS.get(message.name)
    result: dict[str, Any]
    if act is None and message.name != "checkpoint":
        error = f"unknown command '{message.name}': expected one of {', '.join(sorted({*_ACTS, 'checkpoint'}))}"
        result = {}
    elif job.progress.ended is not None and message.name != "status":
        error, result = f"the job is over ({job.progress.ended.state}): {message.name} has no effect", {}
    elif act is None:
        job.saving.ask(connection, message)
        return
    else:
        error, result = act(job, message.args)
    reply = CommandReply(request=message.request, ok=not error, error=error, result=result)
    job.desk.send(connection, reply)


def _status(job: JobState, args: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    return "", status(job)


def _stop(job: JobState, args: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    code = TERMINATED if args.get("exit_code") == TERMINATED else INTERRUPTED
    grace_s = args.get("grace_s")
    grace_ns = int(grace_s * 1e9) if isinstance(grace_s, int | float) else 0
    cause = Cause.read(args.get("cause") or Cause.REQUESTED)
    why = Why(cause, str(args.get("reason") or "stopped by request"))
    job.saving.end_after_saving("interrupted", why, code, grace_ns)
    return "", {}


def _scale(job: JobState, args: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    wanted, slots, newest = args.get("workers"), job.slots, job.agreement.newest
    least, most = _least(job), job.desk.config.room
    if not isinstance(wanted, int) or isinstance(wanted, bool) or not least <= wanted <= most:
        whose = "min_workers" if least == slots.least else "one per stage"
        return f"expected a number of workers from {least} ({whose}) to {most} (lanes), got {wanted!r}", {}
    ids, was = slots.ids(), slots.target
    size = wanted + max(0, len(ids) - was)
    members = set(newest.worker_ids) if newest is not None else set()
    keep = _keep(job, sorted(members & ids), wanted)
    dropped = members - set(keep)
    others = [i for i in sorted(ids) if i not in keep and i not in dropped and i not in slots.lost]
    chosen = set((keep + others)[:size])
    fresh = 0
    while len(chosen) < size:
        if fresh not in chosen and fresh not in slots.lost and fresh not in dropped:
            chosen.add(fresh)
        fresh += 1
    slots.want(wanted, chosen, Why(Cause.SCALED, f"scaled from {was} to {wanted} workers by request"))
    return "", {"workers": wanted, "before": was}


def _drain(job: JobState, args: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    worker_id, slots, newest = args.get("worker_id"), job.slots, job.agreement.newest
    ids = slots.ids()
    if not isinstance(worker_id, int) or worker_id not in ids:
        return f"no worker {worker_id!r}: the workers are {listed(ids)}", {}
    spare = newest is not None and worker_id not in newest.worker_ids and len(ids) > slots.target
    target = slots.target if spare else slots.target - 1
    if target < slots.least:
        return f"cannot drain worker {worker_id}: {target} workers would be left and min_workers is {slots.least}", {}
    alone = [] if spare else _alone_in(job, worker_id)
    if alone:
        where = f"stage {listed(set(alone))}"
        return f"cannot drain worker {worker_id}: nobody else holds {where}; let a backup join it first", {}
    slots.want(target, ids - {worker_id}, Why(Cause.DRAINED, f"worker {worker_id} drained by request"))
    return "", {"workers": target}


def _chaos(job: JobState, args: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Hand a fault to all workers: as with scripted ones, whoever it means strikes himself."""
    fault = args.get("fault")
    if not isinstance(fault, str) or not 0 < len(fault) <= _MOST_FAULT:
        return f"expected a fault such as kill:target=worker:2, got {str(fault)[:40]!r}", {}
    there = {i: w for i, w in job.membership.workers.items() if w.connection is not None}
    if job.agreement.plan is None or not there:
        return "no worker trains yet: try again", {}
    nobody = [i for i in _numbers(args, "workers") if i not in there]
    if nobody:
        return f"no worker {listed(set(nobody))}: the workers are {listed(set(there))}", {}
    beyond = [k for k in _numbers(args, "stages") if not 0 <= k < job.desk.config.stages]
    if beyond:
        return f"no stage {listed(set(beyond))}: the stages are {listed(set(range(job.desk.config.stages)))}", {}
    number = job.desk.number()
    for _, worker in sorted(there.items()):
        job.desk.send(worker.connection, InjectFault(fault=fault, number=number))
    return "", {"fault": fault, "workers": sorted(there)}


def _numbers(args: dict[str, Any], name: str) -> list[int]:
    found = args.get(name)
    return [i for i in found if isinstance(i, int)] if isinstance(found, list) else []


_ACTS: dict[str, Callable[[JobState, dict[str, Any]], tuple[str, dict[str, Any]]]] = {
    "status": _status,
    "scale": _scale,
    "drain": _drain,
    "chaos": _chaos,
    "stop": _stop,
    "profile": lambda job, args: job.profiling.ask(args),
}


def _least(job: JobState) -> int:
    """To how many workers a job may be scaled down: every stage keeps one, as far as each has one of its own."""
    plan, config = job.agreement.plan, job.desk.config
    members = len(plan.members) if plan is not None else config.workers
    return max(job.slots.least, min(config.stages, members))


def _keep(job: JobState, members: list[int], wanted: int) -> list[int]:
    """Who stays when only so many are wanted: the last of the largest pool goes first."""
    plan, kept = job.agreement.newest, set(members)
    if plan is None or plan.stages == 1:
        return members[:wanted]
    while len(kept) > wanted:
        pools = [[s.worker_id for s in plan.pool(k) if s.worker_id in kept] for k in range(plan.stages)]
        free = [pool for pool in pools if len(pool) > 1]
        if not free:
            break
        kept.discard(max(free, key=len)[-1])
    return sorted(kept)


def _alone_in(job: JobState, worker_id: int) -> list[int]:
    """The stages that nobody but this member holds."""
    plan = job.agreement.newest
    if plan is None or plan.stages == 1:
        return []
    return [stage for stage in plan.stages_of(worker_id) if len(plan.pool(stage)) == 1]
