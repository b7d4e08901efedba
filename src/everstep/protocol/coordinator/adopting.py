"""Reconcile the plan that a worker follows with the plans known here: by name, or by the plan itself, which one
worker is asked to send. Pure.
"""

from __future__ import annotations

import msgspec

from everstep.base.cause import Cause, Why
from everstep.base.errors import EverstepError, InvariantViolation, ProtocolError
from everstep.base.plan import Plan, WorkerKey
from everstep.protocol.coordinator.agreement import check_seats
from everstep.protocol.coordinator.claims import GIVE_UP_NS
from everstep.protocol.coordinator.environment import SECOND_NS, describe, listed
from everstep.protocol.coordinator.job_state import JobState
from everstep.protocol.coordinator.membership import Worker
from everstep.protocol.coordinator.types import CoordinatorConfig
from everstep.protocol.following import PlanAsked, PlanName, PlanShown, name_of
from everstep.protocol.messages import WorkerHello

SENSELESS = (EverstepError, InvariantViolation, LookupError, TypeError, ValueError, msgspec.MsgspecError)
"""Exceptions that nonsense raises."""


def check_plan(plan: Plan, config: CoordinatorConfig) -> None:
    """Raises: one of `SENSELESS` if this is no plan of this job."""
    if (plan.lanes, plan.stages) != (config.lanes, config.stages) or plan.generation < 1:
        size = f"{config.lanes} lanes and {config.stages} stages"
        raise ProtocolError(f"expected a plan for {size}, got generation {plan.generation} for {plan.lanes}")
    check_seats(plan)


def claimed(job: JobState, worker: Worker, hello: WorkerHello) -> bool:
    """A worker names the plan that it follows. Returns whether it has to wait until the plan is known."""
    agreement, connection, said = job.agreement, worker.connection, hello.follows
    if said is None or connection is None:
        return False
    claims, newest = agreement.claims, agreement.newest
    if claims.opens(said, (newest.term, newest.generation)):
        if claims.wanted is None:
            job.membership.grace.begin()
        agreement.hear_of(said.generation)
        claims.claim(connection, said, hello)
        return True
    known = agreement.known_as(said)
    if known is not None:
        job.env.knows(connection, known)
    elif said.generation >= agreement.plan.generation and not claims.beyond(said):
        of_term = f" of term {said.term}" if said.term else ""
        _foreign(job, worker, said.generation, f"follows another plan, generation {said.generation}{of_term}")
    return False


def held(job: JobState, worker: Worker, prepared: int) -> None:
    """A worker holds a prepared plan of this generation, to which it may switch at any moment."""
    known = job.agreement.prepared
    if prepared > job.agreement.plan.generation and (known is None or known.generation != prepared):
        _foreign(job, worker, prepared, f"holds a prepared plan, generation {prepared}")


def _foreign(job: JobState, worker: Worker, generation: int, what: str) -> None:
    """A worker has a plan that nobody may follow, and accepts only newer ones: the plan of a deposed coordinator, or
    one that no worker has sent."""
    agreement = job.agreement
    agreement.hear_of(generation)
    if agreement.in_any_plan(worker.key) and not agreement.broken:
        agreement.break_off(Why(Cause.JOURNAL, f"{describe(worker.key)} {what}: it is ignored"))


def reconcile(job: JobState) -> list[WorkerHello]:
    """Ask a worker for the wanted plan, if there is one. Returns the workers that have waited in vain."""
    claims = job.agreement.claims
    if claims.wanted is None or job.progress.ended is not None:
        return []
    asked = None if claims.asked is None else job.membership.alive(claims.asked)
    if asked is not None and asked.connection is not None and claims.waits_for(asked.key, asked.connection):
        return []
    if claims.over:
        return _give_up(job, claims.wanted)
    while (found := claims.next()) is not None:
        worker = job.membership.alive(found[0])
        if worker is not None and worker.connection == found[1]:
            claims.ask(*found)
            job.env.send(worker.connection, PlanAsked())
            return []
    claims.wait()
    return []


def shown(job: JobState, worker: Worker, message: PlanShown) -> list[WorkerHello]:
    """A worker sends the plan that it follows; if it is not the one that it named, another worker is asked. Returns
    the workers that waited for the plan, once it is here."""
    claims, said = job.agreement.claims, name_of(message.plan)
    hello, connection = claims.by(worker.key), worker.connection
    before = None if hello is None else hello.follows
    if claims.wanted is None or hello is None or before is None or connection is None:
        return []
    if said is not None and said.rank > before.rank and claims.opens(said, claims.wanted.rank):
        job.agreement.hear_of(said.generation)  # it has switched to that since its hello
        claims.claim(connection, said, msgspec.structs.replace(hello, follows=said, settled=False))
        before = said
    try:
        if message.plan is None or said != before:
            raise ProtocolError(f"it has named another one, of generation {before.generation}")
        check_plan(message.plan, job.env.config)
    except SENSELESS as error:
        what = " ".join(str(error).split())[:200]
        text = f"the plan that {describe(worker.key)} showed is ignored: {what}"
        job.env.report("warning", Why(Cause.JOURNAL, text), generation=before.generation)
        claims.refused(worker.key)
        return []
    if before.rank != claims.wanted.rank:  # a newer one is asked for by now
        return []
    _adopt(job, message.plan, worker.key)
    return claims.close(found=True)


def _adopt(job: JobState, plan: Plan, source: WorkerKey) -> None:
    """Adopt a plan that workers follow and the journal lacks, and let its members come back."""
    agreement, membership = job.agreement, job.membership
    known = agreement.newest.generation
    agreement.adopt(plan)
    job.progress.take_up(plan)
    job.healing.keep(())
    job.quorum.met()
    membership.grace.begin()
    for member in plan.members:
        membership.restore(member, None)
        if membership.alive(member.key) is None:
            cause = membership.fenced_for(member.worker_id)
            agreement.break_off(Why(cause, f"{describe(member.key)} was evicted before"))
    if job.saving.ending is not None:
        agreement.break_off(job.saving.ending.why)
    text = (
        f"{describe(source)} follows generation {plan.generation} with workers {listed(plan.worker_ids)}, "
        f"which the journal, at generation {known}, does not have: adopted"
    )
    job.env.report("warning", Why(Cause.JOURNAL, text), generation=plan.generation)


def _give_up(job: JobState, wanted: PlanName) -> list[WorkerHello]:
    """No worker has sent the plan: the journal counts, and the next plan is newer than both."""
    waited = job.agreement.claims.close(found=False)
    who = listed(hello.member.worker_id for hello in waited)
    text = (
        f"worker {who} said to follow generation {wanted.generation}, which the journal does not have, and no worker "
        f"showed it within {GIVE_UP_NS // SECOND_NS} s: it is ignored"
    )
    job.env.report("warning", Why(Cause.JOURNAL, text), generation=wanted.generation)
    return waited
