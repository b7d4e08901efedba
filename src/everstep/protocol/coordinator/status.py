"""What `everstep status` shows of the job and its workers. Pure."""

from __future__ import annotations

from typing import Any

from everstep.base.cause import Why
from everstep.protocol.coordinator.job import JobState
from everstep.protocol.coordinator.membership import Worker


def status(job: JobState) -> dict[str, Any]:
    """What `everstep status --json` prints, the coordinator's own pid excepted."""
    ended = job.progress.ended
    why = job.quorum.waiting if ended is None else Why(ended.cause, ended.reason)
    return {
        "state": job_state(job),
        "generation": job.agreement.in_force,
        "step": job.progress.step,
        "target": job.slots.target,
        "cause": why.cause if why is not None else None,
        "reason": why.reason if why is not None else "",
        "workers": [_worker_status(job, w) for _, w in sorted(job.membership.workers.items())],
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
    if agreement.plan is None or (agreement.generation == 1 and not settled and not agreement.broken):
        return "starting"
    if agreement.broken or (not settled and not agreement.plan.prepared):
        return "recovering"
    return "running"


def _worker_status(job: JobState, worker: Worker) -> dict[str, Any]:
    plan, worker_id = job.agreement.plan, worker.key.worker_id
    role = "spare"
    stages: tuple[int, ...] = ()
    lanes: set[int] = set()
    if plan is not None and plan.has(worker.key):
        stages = plan.stages_of(worker_id)
        lanes = {lane for seat in plan.seats_of(worker_id) for lane in seat.lanes}
        role = plan.role_of(worker_id)
    elif worker_id in job.healing.joins or job.agreement.in_any_plan(worker.key) or not worker.ready:
        role = "joining"
    return {
        "worker_id": worker_id,
        "incarnation": worker.key.incarnation,
        "pid": worker.pid,
        "pids": list(worker.pids),
        "host": worker.host,
        "stage": stages[0] if stages else None,
        "stages": list(stages),
        "role": role,
        "step": worker.step,
        "lanes": sorted(lanes),
        "samples_per_s": worker.samples_per_s,
    }
