"""Life and death of workers: reports of agents, heartbeats, hangs, silence. Pure.

A worker's death is known from its agent (waitpid), from its agent's silence, from its own last words, from a progress
counter that stands still, or, where no agent speaks for it, from the end of its connection.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from everstep.base.cause import Cause, Why
from everstep.base.plan import WorkerKey
from everstep.protocol import messages as m
from everstep.protocol.coordinator import hosts
from everstep.protocol.coordinator.agreement import NO_PLAN
from everstep.protocol.coordinator.environment import MILLISECOND_NS, SECOND_NS, Alarm, describe
from everstep.protocol.coordinator.job_state import JobState
from everstep.protocol.coordinator.membership import Agent, Worker
from everstep.protocol.coordinator.permits import spoken_for
from everstep.protocol.coordinator.plans import narrow_cells
from everstep.protocol.coordinator.profiles import STANDSTILL_NS
from everstep.protocol.coordinator.types import Disconnected
from everstep.protocol.coordinator.workers import (
    evict,
    kill_life,
    left_in_order,
    runs_elsewhere,
    shrinks_cell,
)

HANG_FLOOR_NS = 10 * SECOND_NS
HANG_UNKNOWN_NS = 60 * SECOND_NS
HANG_FACTOR = 10
ALONE_LIMIT_NS = SECOND_NS
_OTHERS = "its slot was given to another host"
_DISOWNED = "the agent of its host does not run it"
KNOCK_NS = 50 * MILLISECOND_NS
STALE_NS = 200 * MILLISECOND_NS
"""Messages read within this time of a long absence of the coordinator had waited for it: a worker that stood still
then may have gone on since.
"""
READING_NS = 20 * MILLISECOND_NS
"""A host that seems dead is given up if this much later it is still silent: if the coordinator itself had stopped, what
the host said meanwhile has been read by then.
"""
EXEMPT_PHASES = ("idle", "starting")


# ---- what agents say


def agent_hello(job: JobState, connection: str, hello: m.AgentHello) -> None:
    """An agent is here (again): from now on it speaks for the workers that it lists."""
    agent = job.agents.watch(hello.agent_id, hello.host)
    if agent.connection != connection:
        job.env.close(agent.connection, "replaced by a newer connection of the same agent")
    anew = bool(agent.process) and agent.process != hello.process
    if not agent.process:
        job.membership.grace.go_on()
    job.agents.greet(agent, connection, hello)
    job.env.introduce(connection, agent_id=hello.agent_id)
    hosts.came(job, agent)
    if job.progress.tell_end(connection):
        return
    before = agent.relist()
    for life in sorted(hello.workers, key=lambda w: w.worker_id):
        _saw_life(job, agent, life)
    why = Why(Cause.EXITED, f"it no longer runs on host {job.agents.shown_name(agent)}")
    if anew:
        why = Why(Cause.HOST_LOST, f"the agent of host {job.agents.shown_name(agent)} died, and its workers with it")
    # Only workers that it listed before can be missing: a thousand agents need not look at a thousand workers each.
    for worker in job.membership.living(sorted(before - agent.lives)):
        if worker.agent_id == agent.agent_id:
            evict(job, worker, why, kill=False)
    job.slots.not_run(agent.agent_id, {key.worker_id for key in agent.lives})
    for lost in hello.lost:
        slot_lost(job, agent, lost)
    if hello.failed is not None:
        host_failed(job, agent, hello.failed)
    if hello.leaving:
        hosts.leaving(job, agent, hello)


def _saw_life(job: JobState, agent: Agent, life: m.WorkerLife) -> None:
    key = WorkerKey(life.worker_id, life.incarnation)
    foreign = job.foreign(key, agent.agent_id)
    if not foreign and spoken_for(job, key, agent.agent_id):
        return
    agent.runs(key)
    membership = job.membership
    if foreign:
        kill_life(job, agent, key, Why(Cause.REPLACED, _OTHERS))
        return
    if membership.is_fenced(key):
        _kill_fenced(job, agent, key, "it was evicted")
        return
    known = membership.workers.get(key.worker_id)
    if membership.newer(key):
        return
    if known is not None and known.key != key:
        if runs_elsewhere(job, known, agent.host):
            return
        why = Why(Cause.REPLACED, f"its slot runs life {key.incarnation} already")
        evict(job, known, why, kill=False)
        known = None
    if known is None:
        known = membership.add(key, agent.host)
    job.slots.revive(key.worker_id)
    known.started(agent.agent_id, life, job.env.now)
    job.slots.runs(key.worker_id, agent.agent_id)


def _kill_fenced(job: JobState, agent: Agent, key: WorkerKey, text: str) -> None:
    membership = job.membership
    why = Why(membership.fenced_for(key.worker_id), text)
    kill_life(job, agent, key, why, again=membership.fenced_again(key.worker_id))


def worker_started(job: JobState, agent: Agent, message: m.WorkerStarted) -> None:
    """A process was started; it says hello itself when it is ready."""
    _saw_life(job, agent, message.worker)


def worker_exited(job: JobState, agent: Agent, message: m.WorkerExited) -> None:
    """A process is dead: waitpid said so."""
    key = WorkerKey(message.worker_id, message.incarnation)
    if job.foreign(key, agent.agent_id):
        job.agents.exited(agent, key)
        return
    if message.in_order:
        left_in_order(job, key)
    job.agents.exited(agent, key)
    job.slots.empty(key.worker_id)
    if not job.slots.as_started and job.slots.wanted(key.worker_id):
        agent.repeat_slots()
    worker = job.membership.alive(key)
    if worker is not None:
        if job.agreement.plan.has(key):
            job.progress.reached(message.step)  # so that it is known how many steps are done again
        why = Why(message.cause, message.reason)
        evict(job, worker, why, kill=False, died_unix_ns=message.died_unix_ns, again=message.again)


def slot_lost(job: JobState, agent: Agent, message: m.SlotLost) -> None:
    """An agent gave up on a slot."""
    slots, given = job.slots, Why(message.cause, message.reason)
    if shrinks_cell(job, message.worker_id) or slots.cells.shrunk_below(message.worker_id, message.ranks):
        grant = slots.grants.of(message.worker_id)
        if grant is None or grant.agent_id == agent.agent_id:
            slots.cells.shrink(message.worker_id, message.ranks, given, job.progress.step)
            agent.repeat_slots()
        return
    if job.env.config.hosts.span > 1:
        slots.let_go(message.worker_id, agent, given)
    elif slots.lose(message.worker_id, agent.agent_id, given) and not _end_without_slots(job):
        _say_lost(job, message.worker_id, given)


def _say_lost(job: JobState, worker_id: int, why: Why) -> None:
    job.env.report("warning", Why(why.cause, f"its slot was given up: {why.reason}"), worker_id=worker_id)


def lose_worn(job: JobState) -> None:
    """Slots of which hosts have given up a worker's part, and that no other one takes, are lost: workers go on over
    fewer hosts, or the job ends. That waits for hosts that may come back. A slot that a worker could not do without
    also waits while all members train, and for owners of other slots that are lost (`quorum_wait_s` limits that)."""
    slots, agreement, begins = job.slots, job.agreement, job.agreement.plan is NO_PLAN
    if job.env.config.hosts.span == 1 or job.membership.in_grace or job.saving.ending is not None:
        return
    wanted = slots.ids() - set(slots.lost)
    if not slots.owners.worn(wanted):
        return
    job.share_out()
    away = any(a.connection is None and not a.draining for a in job.agents.known.values())
    if away or (begins and job.quorum.lacks_hosts):
        return
    owners = {agent_id for i, agent_id in slots.grants.agents() if i in wanted and slots.owners.of(i) is not None}
    waits = (not begins and not agreement.broken) or not owners <= job.agents.known.keys()
    lost = dict[int, Why]()
    for worker_id, why in slots.owners.nobodys(wanted).items():
        if (slots.left(but=worker_id) >= slots.least or not waits) and slots.lose(worker_id, "", why):
            lost[worker_id] = why
    if not lost:
        return
    narrow_cells(job)
    for worker_id, why in lost.items() if not _end_without_slots(job) else ():
        _say_lost(job, worker_id, why)


def _end_without_slots(job: JobState) -> bool:
    """End the job if the slots that were not given up are too few. Returns whether they are. After a restart that is
    decided when all have had time to say what they run."""
    slots = job.slots
    if not slots.lost or job.membership.in_grace or slots.left() >= slots.least:
        return False
    worker_id, reason = list(slots.lost.items())[-1]
    text = (
        f"slot {worker_id} was given up ({reason}); {slots.left()} of the {slots.least} workers that the job needs at "
        "least can still run"
    )
    job.saving.end_after_saving("failed", Why(Cause.QUORUM, text), 1, job.env.config.save_ns)
    return True


def host_failed(job: JobState, agent: Agent, message: m.HostFailed) -> None:
    """An agent can do nothing more for the job."""
    job.progress.end("failed", Why(message.cause, message.reason), 1)


# ---- heartbeats and hangs


def heartbeat(job: JobState, agent: Agent, message: m.Heartbeat) -> None:
    """An agent is alive, and reports its workers' progress."""
    membership, now = job.membership, job.env.now
    agent.heartbeat(now, message.rtt_ms, job.env.config.heartbeat_interval_ns, message.waited_ms * MILLISECOND_NS)
    job.agents.whereabouts.heard(agent.agent_id)
    # The detector expects more of an agent the longer it knows it: an alarm that was set before may ring too late.
    job.env.alarms.set(Alarm.AGENT, now + job.env.config.heartbeat_floor_ns // 2, agent.agent_id)
    job.env.send(agent.connection, m.Pong(seq=message.seq))
    seen = set()
    for pulse in message.workers:
        key = WorkerKey(pulse.worker_id, pulse.incarnation)
        seen.add(key)
        if job.foreign(key, agent.agent_id):
            if not agent.lets_go(key, now):
                kill_life(job, agent, key, Why(Cause.REPLACED, _OTHERS))
            continue
        if spoken_for(job, key, agent.agent_id):
            continue
        worker = membership.alive(key)
        if worker is not None:
            worker.pulse(pulse, now)
            job.speeds.say(key, pulse.compute_ms_per_lane)
            if now >= job.env.fresh_ns:
                _check_hang(job, worker, pulse)
        elif membership.is_fenced(key) and key in agent.lives and not agent.lets_go(key, now):
            _kill_fenced(job, agent, key, "it was evicted and still runs")
    for worker in membership.living(sorted(agent.lives - seen)):
        if worker.agent_id == agent.agent_id and worker.seen_ns:
            _check_unseen(job, agent, worker)


def _check_unseen(job: JobState, agent: Agent, worker: Worker) -> None:
    """The agent runs this worker but has no sign of it: it is cut off. If it comes back, it is dismissed."""
    unseen, limit = job.env.now - worker.seen_ns, job.env.config.heartbeat_ceiling_ns
    what = f"host {job.agents.shown_name(agent)} has seen nothing of it for {unseen / 1e9:.2f} s"
    if unseen >= limit and not _hold_all_state(job, [worker]):
        why = Why(Cause.SILENT, f"{what} (limit {limit / 1e9:.2f} s)")
        evict(job, worker, why, kill=False, notice_ns=unseen)
    elif unseen >= limit // 2:
        suspect(job, worker, Why(Cause.SILENT, what))


def hang_limit_ns(job: JobState, worker: Worker) -> int:
    """Time in ns that this worker's progress counter may stand still."""
    limit = job.env.config.hang_limit_ns or HANG_UNKNOWN_NS
    if job.env.config.hang_limit_ns is None and job.progress.step_times_ms:
        limit = max(HANG_FLOOR_NS, int(HANG_FACTOR * max(job.progress.step_times_ms) * MILLISECOND_NS))
    if job.profiling.records(worker.key):
        limit = max(limit, STANDSTILL_NS)
    return limit if job.agreement.in_any_plan(job.slots.parts.head_of(worker.key)) else limit * HANG_FACTOR


def _limit_of(job: JobState, worker: Worker, pulse: m.WorkerPulse) -> tuple[int, str]:
    """Time in ns that the worker may stand still in its present phase, and the config key that says so. A phase that
    may compile has longer, if the worker shows life."""
    limit, config = hang_limit_ns(job, worker), job.env.config
    lifeless_ns = pulse.lifeless_ms * MILLISECOND_NS
    lives = 0 <= lifeless_ns < (config.hang_limit_ns or HANG_UNKNOWN_NS) and not pulse.stopped
    if lives and (pulse.cold or pulse.phase == "evaluate") and limit < config.hosts.hang_first_ns:
        return config.hosts.hang_first_ns, "hang_first_s"
    return limit, "hang_limit_s"


def _check_hang(job: JobState, worker: Worker, pulse: m.WorkerPulse) -> None:
    still_ns = max(0, pulse.still_ms - pulse.waited_ms) * MILLISECOND_NS
    if pulse.phase in EXEMPT_PHASES:
        # It may rest while nothing is asked of it; after an order its phase has to change.
        still_ns = min(still_ns, job.env.now - worker.ordered_ns) if _owes(job, worker) else 0
    if still_ns < (job.env.config.hang_limit_ns or HANG_FLOOR_NS) // 2:  # whatever the exact limit is
        worker.suspect(False)
        return
    limit, key = _limit_of(job, worker, pulse)
    who = "" if pulse.slowest is None else f"its rank {pulse.slowest}: "
    where = ", stopped by a signal" if pulse.stopped else f", in {pulse.at}" if pulse.at else ""
    what = f"{who}no progress for {still_ns / 1e9:.1f} s in phase '{pulse.phase}' after step {pulse.step}{where}"
    why = Why(Cause.HUNG, f"{what} (limit {limit / 1e9:.1f} s, {key})")
    if still_ns >= limit:
        _hung(job, worker, pulse, why, still_ns)
    elif still_ns >= limit // 2:
        _doubt(job, worker, pulse, why)
    else:
        worker.suspect(False)


def _doubt(job: JobState, worker: Worker, pulse: m.WorkerPulse, why: Why) -> bool:
    """The worker may hang: have it write its stacks. Returns whether the doubt is new."""
    agent, new = job.agents.of(worker), suspect(job, worker, why)
    if new and agent is not None and not pulse.stopped:
        job.env.send(agent.connection, m.ShowStacks(**asdict(worker.key)))
    return new


def _hung(job: JobState, worker: Worker, pulse: m.WorkerPulse, why: Why, still_ns: int) -> None:
    """Evict a hung worker. If a step hangs again in the same phase, in a generation that the worker had settled in,
    a further life is no help; several that hang at once prove nothing."""
    generation, settled = job.agreement.plan.generation, worker.key.worker_id in job.agreement.entered
    again = settled and not pulse.stopped and job.progress.hung_before(pulse.step, pulse.phase, generation)
    if again and not pulse.at and _doubt(job, worker, pulse, why):
        return  # where it is comes with its next pulse
    evict(job, worker, why, kill=True, notice_ns=still_ns)
    if not again:
        return
    text = f"{describe(worker.key)}: {why.reason}; it is the second hang there, its stacks are in its log"
    job.saving.end_after_saving("failed", Why(why.cause, text), 1, job.env.config.save_ns)


def _owes(job: JobState, worker: Worker) -> bool:
    if worker.ordered_ns == 0 or not worker.greeted:
        return False
    join = job.healing.of(worker.key)
    return job.agreement.owes(worker.key) if join is None else join.copying


def suspect(job: JobState, worker: Worker, why: Why) -> bool:
    """Report once that a worker may be in trouble. Returns whether that is new."""
    new = worker.suspect()
    if new:
        where = {"step": worker.step, "generation": job.agreement.plan.generation}
        job.env.report("worker_suspected", why, **worker.named, **where)
    return new


# ---- silence


def agent_due(job: JobState, agent_id: str) -> None:
    """Check whether an agent has been silent for too long, and ring again when it could be."""
    agent, now = job.agents.known.get(agent_id), job.env.now
    if agent is None or job.progress.ended is not None:
        return
    if job.membership.in_grace:
        job.env.alarms.set(Alarm.AGENT, job.membership.grace.until_ns, agent_id)
        return
    job.agents.whereabouts.look(agent_id)
    suspicion = agent.detector.suspicion(now)
    connected = agent.connection is not None
    if not connected and _cut_off(job, agent):
        away_s = (agent.away_ns(now) or 0) / 1e9
        give_up_host(job, agent, f"it and all its workers have been without a connection for {away_s:.2f} s")
        return
    dead = suspicion.dead if connected else now >= agent.detector.ceiling_at_ns
    if dead and agent.detector.give_up():
        give_up_host(job, agent, suspicion.reason)
        return
    if not connected:  # it had enough time, or some of its workers are connected: the others may be decided about
        job.env.change()
    if suspicion.suspect:
        for worker in _workers_of(job, agent):
            suspect(job, worker, Why(Cause.HOST_LOST, f"host {job.agents.shown_name(agent)}: {suspicion.reason}"))
    change = agent.detector.next_change_ns(now) if connected else agent.detector.ceiling_at_ns
    if agent.left_ns is not None and now < agent.left_ns + job.env.config.hosts.reconnect_ns:
        change = min(change, agent.left_ns + job.env.config.hosts.reconnect_ns)
    again = now + READING_NS if dead else max(change, now + MILLISECOND_NS)
    job.env.alarms.set(Alarm.AGENT, again, agent_id)


def _cut_off(job: JobState, agent: Agent) -> bool:
    """Whether all connections of a host have ended, and its agent had time to reconnect. Not if that is so for all
    hosts: then the coordinator is cut off."""
    away = agent.away_ns(job.env.now)
    if away is None or away < job.env.config.hosts.reconnect_ns:
        return False
    others = any(other.connection is not None for other in job.agents.known.values())
    return others and all(w.connection is None for w in _workers_of(job, agent))


def _workers_of(job: JobState, agent: Agent) -> list[Worker]:
    # Not for every heartbeat: a thousand agents cannot look at a thousand workers each.
    return [w for _, w in sorted(job.membership.workers.items()) if w.agent_id == agent.agent_id]


def give_up_host(job: JobState, agent: Agent, reason: str, what: str = "is silent") -> None:
    """An agent is silent, or known to be dead, so its host is lost; unless all state would be lost with it."""
    workers, silence = _workers_of(job, agent), agent.detector.silence_ns(job.env.now)
    if silence < job.env.config.quorum_wait_ns and _hold_all_state(job, workers):
        for worker in workers:
            text = f"host {job.agents.shown_name(agent)}: {reason}; nobody else holds the training state"
            suspect(job, worker, Why(Cause.HOST_LOST, text))
        job.env.alarms.set(Alarm.AGENT, job.env.now + SECOND_NS, agent.agent_id)
        return
    job.agents.remove(agent.agent_id)
    job.slots.not_run(agent.agent_id)
    job.env.close(agent.connection, f"agent {agent.agent_id}: {reason}")
    for worker in workers:
        why = Why(Cause.HOST_LOST, f"host {job.agents.shown_name(agent)} {what}: {reason}")
        evict(job, worker, why, kill=False, notice_ns=silence)


def _hold_all_state(job: JobState, workers: list[Worker]) -> bool:
    """Whether the training state would be lost without these workers.

    Silence does not prove a death: most likely the coordinator is cut off, and they go on training; giving them up
    would mean to start over. A worker that joined in the plan in force, and has not come back to a restarted
    coordinator, may have settled before.
    """
    new, came = job.agreement.empty_handed(), job.membership.came
    holders = [w for w in job.agreement.survivors() if w.key.worker_id not in new]
    perhaps = [w for w in workers if w.key.worker_id in new - came and job.agreement.plan.has(w.key)]
    return bool(holders or perhaps) and all(w in workers for w in holders)


def disconnected(job: JobState, event: Disconnected) -> None:
    """A connection ended. Its worker or agent may come back over another one."""
    name, alarms = event.connection, job.env.alarms
    connection = job.env.disconnected(name)
    job.store.forget(name)
    if connection is None:
        return
    agent = job.agents.known.get(connection.agent_id) if connection.agent_id is not None else None
    if agent is not None and agent.connection == name:
        agent.leave(job.env.now)
        alarms.set(Alarm.AGENT, job.env.now + job.env.config.hosts.reconnect_ns, agent.agent_id)
        alarms.set(Alarm.PROBE_PORT, job.env.now + KNOCK_NS)
    if connection.worker is not None:
        if not job.agents.run(connection.worker):
            job.slots.empty(connection.worker.worker_id)
        worker = job.membership.alive(connection.worker)
        if worker is not None and worker.connection == name:
            job.membership.left(worker, awaited=job.agreement.awaits(worker.key))
            if not job.agreement.in_any_plan(worker.key):
                job.healing.stop(worker.key.worker_id)
            alarms.set(Alarm.GONE, job.env.now + SECOND_NS, worker.key.worker_id)
            own = job.agents.of(worker)
            if own is not None and own.left_ns is not None:  # it may have been the last that its host was heard by
                alarms.set(Alarm.PROBE_PORT, job.env.now + KNOCK_NS)
                alarms.set(Alarm.AGENT, max(own.left_ns + job.env.config.hosts.reconnect_ns, job.env.now), own.agent_id)


def gone_due(job: JobState, worker_id: int) -> None:
    """Check whether a worker without a connection has to be given up."""
    worker = job.membership.workers.get(worker_id)
    if worker is None or worker.gone_ns is None or job.progress.ended is not None:
        return
    if job.membership.in_grace:
        job.env.alarms.set(Alarm.GONE, job.membership.grace.until_ns, worker_id)
        return
    gone = job.env.now - worker.gone_ns
    agent = job.agents.of(worker)
    if agent is None or worker.key not in agent.believed:
        # Either no agent can say that it lives, or its agent has been heard since, and did not say so.
        heard = agent is None or (agent.connection is not None and agent.detector.silence_ns(job.env.now) < gone)
        if gone >= ALONE_LIMIT_NS and heard:
            what = "no agent speaks for its host" if agent is None else _DISOWNED
            text = f"its connection ended {gone / 1e9:.1f} s ago and {what}"
            evict(job, worker, Why(Cause.SILENT, text), kill=False, notice_ns=gone)
            return
        again_ns = (job.env.now if gone >= ALONE_LIMIT_NS else worker.gone_ns) + ALONE_LIMIT_NS
    else:
        # Its agent says it lives. Training needs no coordinator: give it up only if others wait for it to hear of a
        # plan.
        ceiling = job.env.config.heartbeat_ceiling_ns
        if gone >= ceiling and _awaited(job, worker) and not _hold_all_state(job, [worker]):
            text = f"its process lives, but its connection has been gone for {gone / 1e9:.1f} s and a plan waits for it"
            evict(job, worker, Why(Cause.SILENT, text), kill=True, notice_ns=gone)
            return
        again_ns = max(worker.gone_ns + ceiling, job.env.now + SECOND_NS)
    job.env.alarms.set(Alarm.GONE, again_ns, worker_id)


def _disowned(job: JobState, worker: Worker) -> bool:
    """Whether the agent of the worker's host is here, and says that it does not run the worker."""
    agent = job.agents.of(worker)
    return agent is not None and agent.connection is not None and worker.key not in agent.believed


def _awaited(job: JobState, worker: Worker) -> bool:
    switching = job.agreement.prepared is not None and job.agreement.in_any_plan(worker.key)
    return switching or job.agreement.owes(worker.key)


def grace_due(job: JobState, about: Any) -> None:
    """The grace period after the coordinator's restart is over."""
    membership, now = job.membership, job.env.now
    if not membership.grace.until_ns or job.progress.ended is not None:
        return
    if membership.in_grace:  # it was prolonged meanwhile
        job.env.alarms.set(Alarm.GRACE, membership.grace.until_ns)
        return
    absent = sorted((w for w in membership.to_come() if w.member is not None), key=lambda w: w.key)
    for worker in [w for w in absent if _disowned(job, w)]:
        absent.remove(worker)
        why = Why(Cause.EXITED, f"it did not come back after the coordinator's restart, and {_DISOWNED}")
        evict(job, worker, why, kill=True)
    if membership.grace.waited_ns() < job.env.config.quorum_wait_ns and _hold_all_state(job, absent):
        membership.grace.begin()
        return
    membership.grace.end()
    for worker in absent:
        agent = job.agents.of(worker)
        if agent is not None and worker.key in agent.lives:
            worker.leave(now)
            job.env.alarms.set(Alarm.GONE, now, worker.key.worker_id)
        else:
            why = Why(Cause.SILENT, "it did not come back after the coordinator's restart")
            evict(job, worker, why, kill=True)
    if not narrow_cells(job):
        _end_without_slots(job)  # an earlier life of the coordinator may have died before the end


def expect_agents(job: JobState) -> None:
    """After a restart the agents of the journal are expected back; they speak for the workers that they ran."""
    job.env.alarms.set(Alarm.PROBE_PORT, job.env.now + KNOCK_NS)
    for worker_id, agent_id in job.slots.grants.agents():
        grant = job.slots.grants.of(worker_id)
        if grant is None or not job.slots.owners.has_given_up(worker_id, agent_id, grant.process):
            job.slots.runs(worker_id, agent_id)
    for worker_id, worker in sorted(job.membership.workers.items()):
        if worker.agent_id is not None:
            job.slots.runs(worker_id, worker.agent_id)
            job.agents.watch(worker.agent_id, worker.host).restore(worker.key)


def pardon(job: JobState, gap_ns: int, awake_ns: int) -> None:
    """The coordinator itself was away for `gap_ns`, after `awake_ns`: silence in that time does not count, nor does it
    for a moment longer where it waits for something that was said meanwhile, which it has yet to read. The moment is
    shorter than the time awake: waits come to their ends also if the coordinator is late each time."""
    if gap_ns >= (job.env.config.hang_limit_ns or HANG_FLOOR_NS) // 4:
        job.env.distrust(STALE_NS)
    reading_ns = min(STALE_NS, awake_ns // 2)
    for waiting in (job.agreement.claims, job.membership.grace, job.quorum, job.saving, job.links):
        waiting.pardon(gap_ns + reading_ns)
    for agent in job.agents.known.values():
        agent.pardon(gap_ns, job.env.now)
    for worker in job.membership.workers.values():
        worker.pardon(gap_ns)
