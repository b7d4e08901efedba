"""Messages of workers, from hello to last words: the plan that each follows, and the end of its life. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import asdict
from typing import Any

from everstep.base.cause import Cause, Why
from everstep.base.plan import Plan, WorkerKey
from everstep.protocol import messages as m
from everstep.protocol.coordinator import adopting
from everstep.protocol.coordinator.agreement import NO_PLAN
from everstep.protocol.coordinator.cell_parts import lost_with
from everstep.protocol.coordinator.environment import SECOND_NS, Alarm, describe
from everstep.protocol.coordinator.job_state import JobState
from everstep.protocol.coordinator.links import WINDOW_NS
from everstep.protocol.coordinator.membership import Agent, Worker
from everstep.protocol.coordinator.plans import announce, announce_late, narrow_cells, order
from everstep.protocol.following import PlanShown
from everstep.protocol.messages_base import CellPart, CellSought

KILL_AGAIN_NS = 5 * SECOND_NS


# ---- hello


def worker_hello(job: JobState, name: str, hello: m.WorkerHello) -> None:
    """A worker says who it is and which plan it follows: welcome or dismiss it, and tell it what it has missed."""
    key, membership = hello.member.key, job.membership
    text = _elsewhere(job, hello)
    if text:
        # Not introduced: nothing that it says may count as said by the life of that number on its slot's own host.
        job.env.send(name, m.Dismissed(cause=Cause.REPLACED, reason=text, drained=False))
        job.env.close(name, text)
        return
    job.env.introduce(name, worker=key)
    if job.progress.tell_end(name):
        return
    if hello.lanes and not job.env.lanes_told and job.agreement.plan is NO_PLAN:
        if hello.lanes != job.env.config.lanes:
            job.env.persist("lanes", lanes=hello.lanes)
        job.env.takes_lanes(hello.lanes)
    refusal = _refusal(job, hello)
    if refusal is not None:
        job.env.send(name, m.Dismissed(cause=refusal.cause, reason=refusal.reason, drained=False))
        return
    known = membership.workers.get(key.worker_id)
    if known is not None and known.key != key:
        why = Why(Cause.REPLACED, f"its slot runs life {key.incarnation} already")
        evict(job, known, why, kill=True)
    worker = membership.alive(key) or membership.add(key, hello.member.host)
    host = hello.member.host
    likeness = job.membership.likeness
    odd = likeness.lane(key.worker_id, host)
    unlike = likeness.kernels(hello.kernels, host) or likeness.code(hello.code, host) or odd
    if unlike is not None:
        job.env.send(name, m.Dismissed(cause=unlike.cause, reason=unlike.reason, drained=False))
        refuse(job, worker, unlike, alone=unlike is odd)
        return
    if worker.connection != name:
        job.env.close(worker.connection, "replaced by a newer connection of the same worker")
    first = not worker.greeted and not job.agreement.in_any_plan(key)
    membership.greet(worker, name, hello, awaited=job.agreement.awaits(key))
    if first:
        found = processes(job, worker)
        pids = found if len(found["pids"]) > 1 else {}
        where = {"host": worker.host, "step": worker.step, "generation": job.agreement.generation}
        where |= {"node": shown} if (shown := job.agents.shown_host(worker)) != worker.host else {}
        job.env.report("worker_joined", Why(Cause.JOINED, "it is ready"), **worker.named, **pids, **where)
    _catch_up(job, worker, hello)
    job.profiling.remind(worker)
    if job.agreement.plan.has(key) and key.worker_id == job.agreement.plan.leader(0):
        job.saving.remind()


def _elsewhere(job: JobState, hello: m.WorkerHello) -> str:
    """Why a life of that number belongs to another host, "" if it may be this one's. Two hosts that know nothing of
    each other may count alike."""
    key, host = hello.member.key, hello.member.host
    grant, known = job.slots.grants.of(key.worker_id), job.membership.alive(key)
    if grant is not None and job.foreign(key, host=host):
        return f"slot {key.worker_id} was given to host {grant.host}"
    if known is not None and known.connection is not None and known.member is not None and known.member.host != host:
        return f"{describe(key)} runs on host {known.member.host}"
    return ""


def processes(job: JobState, worker: Worker) -> dict[str, Any]:
    """Pids of a worker's processes, by rank, and the host of each if they are on several."""
    parts = job.membership.living(job.slots.parts.cell_of(worker.key))
    found = [(pid, job.agents.shown_host(part)) for part in parts for pid in part.pids]
    hosts = [host for _, host in found]
    return {"pids": [pid for pid, _ in found], **({"hosts": hosts} if len({*hosts}) > 1 else {})}


def _refusal(job: JobState, hello: m.WorkerHello) -> Why | None:
    """Why this life has to leave; None if it may stay."""
    key, membership = hello.member.key, job.membership
    known, lanes = membership.workers.get(key.worker_id), job.env.config.lanes
    if hello.lanes not in (0, lanes):
        return Why(Cause.CONFIG, f"it joins with lanes={hello.lanes}, the job has lanes={lanes}")
    if membership.is_fenced(key):
        return Why(membership.fenced_for(key.worker_id), f"{describe(key)} was evicted or replaced")
    if membership.newer(key):
        return Why(Cause.REPLACED, f"{describe(key)} was evicted or replaced")
    if known is not None and known.key != key and runs_elsewhere(job, known, hello.member.host):
        text = f"slot {key.worker_id} runs on host {known.host}, as incarnation {known.key.incarnation}"
        return Why(Cause.REPLACED, text)
    return None


def cell_sought(job: JobState, name: str, message: CellSought) -> None:
    """A life looks for others on other hosts, to be one worker, or says which ones it has found."""
    key, membership = WorkerKey(message.worker_id, message.incarnation), job.membership
    if job.progress.tell_end(name):
        return
    over = [part.key for part in message.cell if membership.is_fenced(part.key) or membership.newer(part.key)]
    another = Why(Cause.REPLACED, f"slot {key.worker_id}, a part of it, has another life")
    _end_parts(job, job.slots.parts.before(key), another)
    if over or membership.is_fenced(key) or membership.newer(key):
        job.env.send(
            name, m.Dismissed(cause=Cause.REPLACED, reason="its worker was evicted or replaced", drained=False)
        )
    elif message.cell:
        job.slots.parts.know(message.cell)
    else:
        job.slots.parts.look(name, CellPart(key.worker_id, key.incarnation, message.address))


def form_cells(job: JobState) -> None:
    """Lives on different hosts that look for each other are one worker."""
    found = {}
    for worker in job.membership.living(job.slots.parts.looking):
        agent = job.agents.of(worker)
        if agent is not None and not agent.draining and not job.agents.out_of_touch(worker):
            found[worker.key] = agent.agent_id
    if job.env.config.on_failure == "shrink":
        narrow_cells(job)
    job.slots.parts.form(found, job.slots.cells.hosts)


def imported(job: JobState, worker: Worker, message: m.Imported) -> None:
    """A worker has imported more code."""
    unlike = job.membership.likeness.code(message.code, worker.host)
    if unlike is not None:
        refuse(job, worker, unlike)


def divided(job: JobState, worker: Worker, message: m.Divided) -> None:
    """A worker says how the optimizer's state can be divided."""
    unlike = job.membership.likeness.divides(message.stages, worker.host)
    if unlike is not None:
        refuse(job, worker, unlike)


def refuse(job: JobState, worker: Worker, why: Why, *, alone: bool = False) -> None:
    """This worker's numerics or code differ from the job's, and those of its next life would, too: its host is
    dismissed. If other workers there are alike (code was edited while they ran, for example), only this slot is
    given up.

    If too few hosts are left, the job ends; it also ends, by its own process, if its own host is dismissed and there
    is no other. alone: this says nothing about the host's other slots, whose lives may not be ready yet.
    """
    agent, agents, slots = job.agents.of(worker), job.agents, job.slots
    evict(job, worker, why, kill=worker.greeted)
    if agent is None:  # nobody knows its host: another life is refused like this one
        return
    there = [w for w in job.membership.workers.values() if agents.of(w) is agent]
    others = slots.left(agent.agent_id) - (worker.key.worker_id not in slots.lost)
    if any(w.member is not None for w in there) or (alone and others > 0):
        if slots.lose(worker.key.worker_id, agent.agent_id, why):
            agent.repeat_slots()
        if slots.left() < slots.least:
            job.progress.end("failed", why, 2)
    else:
        job.env.report("warning", Why(why.cause, f"host {agents.shown_name(agent)} is sent away: {why.reason}"))
        job.env.send(agent.connection, m.AgentRefused(cause=why.cause, reason=why.reason))
        agents.refuse(agent)
        slots.not_run(agent.agent_id)
        job.env.close(agent.connection, f"host {agent.host} was sent away")
        for other in there:
            evict(job, other, why, kill=False)


def runs_elsewhere(job: JobState, known: Worker, host: str) -> bool:
    """Whether the slot belongs to another host, where a life of it takes part or runs. A host whose slot was given
    to another while it was away does not know that, and starts the slot's next life. That life is newer, but it does
    not prove that the other has ended: only that life's own host, or its silence, does."""
    there = known.connection is not None or job.agreement.in_any_plan(known.key)
    return bool(known.host) and known.host != host and there


def _catch_up(job: JobState, worker: Worker, hello: m.WorkerHello) -> None:
    """Compare the plan that the worker follows with the plan that it should follow."""
    job.progress.reached(hello.step)
    if hello.step:
        job.healing.holds(worker.key, hello.stages)
    if not adopting.claimed(job, worker, hello):
        _go_on(job, worker, hello)


def _go_on(job: JobState, worker: Worker, hello: m.WorkerHello) -> None:
    """Let a worker go on that follows a known plan, or none."""
    agreement = job.agreement
    known = None if hello.follows is None else agreement.known_as(hello.follows)
    if known is not None:
        follow(job, known.generation)
    adopting.held(job, worker, hello.prepared)
    plan, prepared = agreement.plan, agreement.prepared
    if plan.has(worker.key) and known is plan:
        announce_late(job)
        if hello.settled:  # it repeats that, but a plan may follow from this hello
            job.progress.closed(plan)
        # Else that it has healed was told before a restart.
        if agreement.enter(worker.key.worker_id) and plan.generation == agreement.switched:
            _report_healed(job, worker, worker.step)
    elif plan.has(worker.key) and not agreement.broken:
        order(job, worker, m.PlanNow(plan=plan))
    if prepared is not None and agreement.in_any_plan(worker.key):
        order(job, worker, m.PlanPrepared(plan=prepared))


def plan_shown(job: JobState, worker: Worker, message: PlanShown) -> None:
    """A worker sends the plan that it was asked for. Members of it that follow an older plan, and wait there for the
    others, are told."""
    waited = adopting.shown(job, worker, message)
    _bring_together(job, waited)
    claimants = {hello.member.key for hello in waited}
    for member in job.agreement.survivors() if waited and not job.agreement.broken else ():
        if member.ready and member.key not in claimants:
            order(job, member, m.PlanNow(plan=job.agreement.plan))


def ask_for_plan(job: JobState) -> None:
    """If workers follow a plan that this coordinator lacks, ask one of them for it."""
    _bring_together(job, adopting.reconcile(job))


def _bring_together(job: JobState, waited: list[m.WorkerHello]) -> None:
    """The plan of these workers is known now, or given up: handle their hellos again."""
    for hello in waited:
        worker = job.membership.alive(hello.member.key)
        if worker is not None and worker.connection is not None and not adopting.claimed(job, worker, hello):
            _go_on(job, worker, hello)


# ---- what members say of a generation


def entered(job: JobState, worker: Worker, message: m.GenerationEntered) -> None:
    """A worker has settled in a generation; the message has the step that it computes next."""
    step = message.step - 1
    worker.reached(step)
    follow(job, message.generation)
    plan = job.agreement.plan
    if not plan.has(worker.key):
        return
    if message.generation == plan.generation:
        announce_late(job)
        job.progress.settled(plan, step, job.recovery.cause(plan.cause))
        if job.agreement.enter(worker.key.worker_id):
            _report_healed(job, worker, step)
        job.recovery.entered(message.generation, message.phases_ms)
        job.saving.leaving.entered(worker.key, message.generation, step, message.loop)
    if worker.key.worker_id == plan.leader(0):
        job.saving.remind()


def _report_healed(job: JobState, worker: Worker, step: int) -> None:
    """The worker has settled; if it had not been a member before, it has healed."""
    if worker.key.worker_id in job.agreement.plan.joining:
        why = Why(Cause.JOINED, "it holds the state of the others and takes part")
        generation = job.agreement.plan.generation
        job.env.report("worker_healed", why, **worker.named, step=step, generation=generation)
        spares = len(job.slots.ids()) // job.env.config.hosts.span - job.slots.target
        job.healing.spares.filled(worker.key.worker_id, job.slots.target, spares)


def progressed(job: JobState, worker: Worker, message: m.Progress) -> None:
    """A step is committed."""
    follow(job, message.generation)
    worker.reached(message.step)
    here, before = message.generation == job.agreement.plan.generation, job.progress.step
    if here or not job.agreement.entered:  # else it may be of a step that all have left again
        job.progress.reached(message.step, message.step_ms)
    if here and message.generation:
        job.agreement.enter(worker.key.worker_id)
        ends = job.saving.ending is not None or job.saving.staying  # then the others may only save their state
        if message.step > before or not ends:
            job.recovery.complete(job.progress.step, message.committed_unix_ns)


def loop_left(job: JobState, worker: Worker, message: m.LoopLeft) -> None:
    """The worker's loop was left before the last step; it waits until all others have left theirs."""
    follow(job, message.generation)
    worker.reached(message.step)
    if job.agreement.plan.has(worker.key):
        job.saving.leaving.left(worker.key, message.step)


def done(job: JobState, worker: Worker, message: m.WorkerDone) -> None:
    """The worker has finished the last step; if the final state is written too, the job is over."""
    follow(job, message.generation)
    worker.reached(message.step)
    if message.final_written and job.agreement.plan.has(worker.key):
        job.progress.reached(message.step)
        job.recovery.complete(job.progress.step)
        job.progress.end("completed", Why(Cause.COMPLETED, f"step {message.step} was the last"), 0)


def peer_fault(job: JobState, worker: Worker, message: m.PeerFault) -> None:
    """A transfer between members has failed."""
    follow(job, message.generation)
    job.links.peer_fault(worker, message)


def links_due(job: JobState, about: Any) -> None:
    """All workers that lost a peer have had time to say so, and no death explains their accusations."""
    if job.progress.ended is not None:
        return
    if any(job.agents.out_of_touch(w) or job.links.may_be_dead(w) for w in job.agreement.survivors()):
        job.env.alarms.set(Alarm.LINKS, job.env.now + WINDOW_NS)  # whether that is a death is known soon
    elif not _probes_links(job):
        for worker, why in job.links.close_window():
            evict(job, worker, why, kill=True)


def _probes_links(job: JobState) -> bool:
    """Have the agents of both ends look whether the hosts of accused links answer each other, before anything is
    decided. Returns whether there is something to wait for."""
    links = job.links
    for a, b in links.to_probe():
        ends = [(one, other, job.agents.of(one)) for one, other in ((a, b), (b, a))]
        for _, other, agent in ends:
            if agent is None or agent.connection is None or other.member is None or "address" not in agent.about:
                continue  # nobody there says where it is on the network
            number = links.asks(agent.agent_id)
            job.env.send(agent.connection, m.ProbeHosts(number=number, addresses={other.host: other.member.address}))
    return links.waits_for_probes()


def hosts_probed(job: JobState, agent: Agent, message: m.HostsProbed) -> None:
    """An agent has looked whether other hosts answer."""
    job.links.probed(agent.agent_id, agent.host, message)


def settle_again(job: JobState, worker: Worker, message: m.SettleAgain) -> None:
    """A member's statement is wrong: all settle in a new generation, with the rest.

    If states differ, all go back to the last step at which they were alike, once. If they differ again before they
    have come as far and were alike, that is no chance. A member whose state is wrong leaves; it may not have found
    that by itself yet.
    """
    agreement, why = job.agreement, Why(message.cause, message.reason)
    if message.lane >= 0:
        _computed_otherwise(job, message, why)
        return
    if message.tainted:
        if job.progress.differ(why, message):
            return
        job.progress.in_doubt(why, message)
    in_force = message.generation == agreement.plan.generation or _left_behind(job, worker.key.worker_id)
    if in_force and agreement.plan.has(worker.key):
        text = message.reason if message.tainted else f"worker {worker.key.worker_id}: {message.reason}"
        for odd in _members(job, message.odd):
            evict(job, odd, why, kill=True)
        agreement.break_off(Why(message.cause, text))
        job.recovery.begin(why)


def _left_behind(job: JobState, worker_id: int) -> bool:
    """Whether the others have switched to the plan in force, which was prepared, and this member has not entered it:
    what it lacks in the generation before, it lacks in this one."""
    agreement = job.agreement
    return agreement.switched == agreement.plan.generation and worker_id not in agreement.entered


def _members(job: JobState, worker_ids: Collection[int]) -> list[Worker]:
    """The living members with these worker ids."""
    there = (job.membership.workers.get(worker_id) for worker_id in worker_ids)
    return [worker for worker in there if worker is not None and job.agreement.plan.has(worker.key)]


def _computed_otherwise(job: JobState, message: m.SettleAgain, why: Why) -> None:
    """Members got different results for a lane. A worker that is wrong leaves, and its next life would, too. If no
    majority says who is wrong, all repeat the step once; then the job ends."""
    if message.generation != job.agreement.plan.generation or job.agreement.broken:
        return  # another member has said it before
    at = {"step": message.tainted, "lane": message.lane, "generation": message.decided_in}
    job.env.report("probe_done", why, **at, workers=message.workers, equal=False)
    for worker in _members(job, message.odd):
        job.membership.likeness.differed(worker.key.worker_id, worker.host, why)
        refuse(job, worker, why, alone=True)
    if message.ends:
        job.progress.in_doubt(why, message)
        left = f"the newest checkpoint up to step {message.sound}" if message.sound > 0 else "no checkpoint"
        job.progress.end("failed", Why(why.cause, f"{why.reason}; {left} counts"), 1)
    elif job.progress.ended is None:
        job.agreement.break_off(why, alone=True)  # the evictions have said the same of each
        job.recovery.begin(why)


# ---- the switch to a prepared plan


def follow(job: JobState, generation: int) -> None:
    """Something shows that the members have switched to this generation, if it is the prepared one."""
    prepared = job.agreement.prepared
    if prepared is not None and generation == prepared.generation:
        _switch(job, prepared)


def left_in_order(job: JobState, key: WorkerKey) -> None:
    """A process ended because its work was done. If the prepared plan leaves it out, the members have switched to
    that."""
    prepared = job.agreement.prepared
    if prepared is not None and job.agreement.plan.has(key) and not prepared.has(key):
        _switch(job, prepared)


def _switch(job: JobState, plan: Plan) -> None:
    old = job.agreement.switch(plan)
    job.progress.closed(old)
    behind = job.links.left_behind(plan)
    if behind is not None:
        job.agreement.break_off(behind)
    job.links.forget_accusations()
    for worker_id in plan.joining:
        job.healing.stop(worker_id)
    announce(job, old)
    for worker in job.membership.living(member.key for member in old.members if not plan.has(member.key)):
        dismiss(job, worker, Why(plan.cause, plan.reason))


# ---- last words


def worker_failed(job: JobState, worker: Worker, message: m.WorkerFailed) -> None:
    """A worker ends by an exception."""
    if job.saving.last_words(worker, message):
        evict(job, worker, Why(message.cause, message.reason), kill=False)


def failed_early(job: JobState, message: m.WorkerFailed) -> None:
    """A worker that never said hello ends by an exception: its task cannot even be built."""
    worker = job.membership.alive(WorkerKey(message.worker_id, message.incarnation))
    if worker is not None:
        worker_failed(job, worker, message)


def saved(job: JobState, worker: Worker, message: m.Saved) -> None:
    """A checkpoint has ended: one that was requested, or the last one, before the job ends or a worker leaves. Who has
    yet to settle in the plan that asks for the last one tells of a request before it."""
    last = bool(job.agreement.plan.save) and worker.key.worker_id in job.agreement.entered
    if last and job.saving.staying and job.saving.ending is None:
        _let_go(job)
    else:
        job.saving.saved(message, last=last)


def failed_due(job: JobState, about: Any) -> None:
    """There may be no more time for a checkpoint before workers that have raised are dismissed."""
    if not job.saving.waits():
        _let_go(job)


def _let_go(job: JobState) -> None:
    """There is a checkpoint, or no more time for one: dismiss workers that have raised."""
    for worker, why in job.saving.let_go():
        evict(job, worker, why, kill=False)


# ---- the end of a life


def evict(
    job: JobState,
    worker: Worker,
    why: Why,
    *,
    kill: bool,
    notice_ns: int = 0,
    died_unix_ns: int | None = None,
    again: bool = False,
) -> None:
    """This life is over, or is ended now: fence it, report why, and break the plan that it was part of. kill: it may
    still run. notice_ns: time since the fault happened, as far as known. again: it ended by itself, or ends with
    another part of its worker, and is no loss: the slot's next life follows."""
    key, agent = worker.key, job.agents.of(worker)
    job.membership.remove(key, why, again=again)
    job.healing.forget(key)
    job.agreement.forget(key.worker_id)
    job.speeds.forget(key.worker_id)
    fields = {**worker.named, "step": worker.step, "generation": job.agreement.plan.generation}
    if worker.member is None:
        head = job.slots.parts.head_of(key)
        how = "ended before it was ready" if head == key else f"ended, a part of {describe(head)}"
        early = Why(why.cause, f"{describe(key)} {how}: {why.reason}")
        job.env.report("warning", early, **fields)
    else:
        job.env.report("worker_evicted", why, died_unix_ns=died_unix_ns, **fields)
    job.env.send(worker.connection, m.Dismissed(cause=why.cause, reason=why.reason, drained=False))
    if kill and agent is not None:
        kill_life(job, agent, key, why, again=again)
    whose = Why(why.cause, f"{describe(key)}: {why.reason}")
    job.slots.cells.ended(key.worker_id, whose, job.progress.step)
    if job.agreement.in_any_plan(key):
        job.agreement.break_off(whose)
        if why.cause is not Cause.EXCEPTION:  # a spare would raise it, too
            job.healing.spares.lost(key.worker_id)
        job.recovery.begin(whose, key=key, notice_ns=notice_ns, died_unix_ns=died_unix_ns)
        if not again:
            _shrink(job, key, why.cause)
    _end_parts(job, job.slots.parts.over(key), lost_with(key, why, job.agents.shown_host(worker)))


def _end_parts(job: JobState, keys: Iterable[WorkerKey], why: Why) -> None:
    """A life is over: so are the other parts of its worker, if that spans hosts."""
    for key in keys:
        other = job.membership.alive(key)
        if other is not None:  # else one of the others has ended it
            evict(job, other, why, kill=True, again=True)


def _shrink(job: JobState, key: WorkerKey, cause: Cause) -> None:
    slots, shrinks = job.slots, job.env.config.on_failure == "shrink" and job.env.config.hosts.span == 1
    others = slots.ids() - {key.worker_id}
    enough = slots.target > slots.least and len(others - set(slots.lost)) >= slots.least  # else it has to come back
    smaller = cause != Cause.HOST_LOST and shrinks_cell(job, key.worker_id)  # nobody is there who could start it
    if shrinks and not smaller and slots.wanted(key.worker_id) and enough:
        reason = f"{describe(key)} was lost and on_failure is 'shrink'"
        slots.want(slots.target - 1, others, Why(cause, reason))


def shrinks_cell(job: JobState, worker_id: int) -> bool:
    """Whether this worker, if its slot is given up, goes on as a smaller cell: the job runs, and it has no spare on a
    host that is there."""
    slots = job.slots
    runs = job.agreement.plan is not NO_PLAN and slots.wanted(worker_id) and worker_id not in slots.lost
    if not runs or slots.cells.smaller(worker_id) is None:
        return False
    kept = slots.left() if job.membership.in_grace else sum(map(slots.left, job.agents.known))
    return kept <= slots.target


def kill_life(job: JobState, agent: Agent, key: WorkerKey, why: Why, *, again: bool = False) -> None:
    """Ask the agent for SIGKILL, at most once per `KILL_AGAIN_NS`. again: as of `KillWorker`."""
    if agent.may_kill(key, job.env.now, KILL_AGAIN_NS):
        job.env.send(agent.connection, m.KillWorker(**asdict(key), cause=why.cause, reason=why.reason, again=again))


def dismiss(job: JobState, worker: Worker, why: Why) -> None:
    """A worker is no longer wanted: it leaves without fault."""
    job.membership.remove(worker.key, why)
    job.healing.forget(worker.key)
    job.env.report("worker_left", why, **worker.named, step=worker.step, generation=job.agreement.plan.generation)
    job.env.send(worker.connection, m.Dismissed(cause=why.cause, reason=why.reason, drained=True))
    _end_parts(job, job.slots.parts.over(worker.key), lost_with(worker.key, why, job.agents.shown_host(worker)))
