"""Who lives: agents, heartbeats, hangs, deaths. Pure.

A worker's death is known from its agent (waitpid), from its agent's silence, from its own last words, from a progress
counter that stands still, or, where no agent speaks for it, from the end of its connection.
"""

from __future__ import annotations

from statistics import median

from everstep.base.cause import Cause, Why
from everstep.base.plan import WorkerKey
from everstep.protocol import coordinator_profiling as profiling
from everstep.protocol import coordinator_recovery as recovery
from everstep.protocol.coordinator_state import (
    MILLISECOND_NS,
    SECOND_NS,
    Agent,
    State,
    Worker,
    describe,
)
from everstep.protocol.detector import PhiDetector
from everstep.protocol.messages import (
    AgentHello,
    Dismissed,
    Heartbeat,
    KillWorker,
    Pong,
    SlotLost,
    WorkerExited,
    WorkerLife,
    WorkerPulse,
    WorkerStarted,
)

HEARTBEAT_LEAST_NS = SECOND_NS // 5
HEARTBEAT_MOST_NS = 5 * SECOND_NS
HANG_FLOOR_NS = 10 * SECOND_NS
HANG_UNKNOWN_NS = 60 * SECOND_NS
HANG_FACTOR = 10
ALONE_LIMIT_NS = SECOND_NS
KILL_AGAIN_NS = 5 * SECOND_NS
EXEMPT_PHASES = ("idle", "starting")


# ---- deaths


def evict(
    state: State,
    worker: Worker,
    why: Why,
    *,
    kill: bool,
    notice_ns: int = 0,
    died_unix_ns: int | None = None,
) -> None:
    """This life is over, or is made to be: fence it, say why, and break the plan it was part of.

    kill: it may still run. notice_ns: how long ago the fault happened, as far as is known.
    """
    key = worker.key
    agent = state.agent_of(worker)
    del state.workers[key.worker_id]
    state.joins.pop(key.worker_id, None)
    state.entered.discard(key.worker_id)
    state.speeds.pop(key.worker_id, None)
    state.accusations.pop(key.worker_id, None)
    state.failed.pop(key, None)
    state.fence(key, why)
    state.dirty = True
    fields = {
        "worker_id": key.worker_id,
        "incarnation": key.incarnation,
        "pid": worker.pid,
        "step": worker.step,
        "generation": state.plan.generation if state.plan is not None else 0,
    }
    if worker.member is None:
        early = Why(why.cause, f"{describe(key)} ended before it was ready: {why.reason}")
        state.report("warning", early, **fields)
    else:
        state.report("worker_evicted", why, died_unix_ns=died_unix_ns, **fields)
    state.send(worker.connection, Dismissed(cause=why.cause, reason=why.reason, drained=False))
    if kill and agent is not None:
        kill_life(state, agent, key, why)
    if state.in_any_plan(key):
        whose = Why(why.cause, f"{describe(key)}: {why.reason}")
        state.broken.append(whose)
        recovery.begin(state, whose, key=key, notice_ns=notice_ns, died_unix_ns=died_unix_ns)
        _shrink(state, key, why.cause)


def _shrink(state: State, key: WorkerKey, cause: Cause) -> None:
    if state.config.on_failure != "shrink" or not state.slot_wanted(key.worker_id):
        return
    if state.target > state.min_workers:
        reason = f"{describe(key)} was lost and on_failure is 'shrink'"
        state.set_target(state.target - 1, state.slot_ids() - {key.worker_id}, Why(cause, reason))


def kill_life(state: State, agent: Agent, key: WorkerKey, why: Why) -> None:
    """Ask the agent for SIGKILL, at most once per `KILL_AGAIN_NS`."""
    last = agent.killed_ns.get(key)
    if agent.connection is None or (last is not None and state.now - last < KILL_AGAIN_NS):
        return
    agent.killed_ns[key] = state.now
    who = {"worker_id": key.worker_id, "incarnation": key.incarnation}
    state.send(agent.connection, KillWorker(**who, cause=why.cause, reason=why.reason))


# ---- what agents say


def agent_hello(state: State, connection: str, hello: AgentHello) -> None:
    """An agent is there (again): from now on it speaks for the workers it lists."""
    agent = state.agents.get(hello.agent_id)
    if agent is None:
        agent = state.agents[hello.agent_id] = watch_agent(state, hello.agent_id, hello.host)
    elif agent.connection is not None and agent.connection != connection:
        state.close(agent.connection, "replaced by a newer connection of the same agent")
    anew = bool(agent.process) and agent.process != hello.process
    agent.connection, agent.host, agent.slots = connection, hello.host, hello.slots
    agent.room, agent.process = hello.room, hello.process
    agent.sent_slots, agent.suspected = None, False
    agent.killed_ns.clear()
    agent.detector.resume(state.now)
    state.connections[connection].agent_id = hello.agent_id
    state.dirty = state.dirty or state.plan is None or state.slots is not None or not hello.slots
    if state.ended is not None:
        state.send(connection, state.ended)
        return
    before = agent.lives | agent.restored
    agent.lives, agent.restored = set(), set()
    for life in sorted(hello.workers, key=lambda w: w.worker_id):
        saw_life(state, agent, life)
    # Only what it listed before can be missing: a thousand agents need not look at a thousand workers each.
    for key in sorted(before - agent.lives):
        worker = state.alive(key)
        if worker is not None and worker.agent_id == agent.agent_id:
            why = Why(Cause.EXITED, f"it no longer runs on host {agent.host}")
            if anew:
                why = Why(Cause.HOST_LOST, f"the agent of its host {agent.host} died, and its workers with it")
            evict(state, worker, why, kill=False)
    running = {key.worker_id for key in agent.lives}
    state.retiring -= {i for i in state.retiring - running if state.slot_owner.get(i) == agent.agent_id}


def watch_agent(state: State, agent_id: str, host: str) -> Agent:
    """Begin to expect an agent's heartbeats."""
    config = state.config
    interval = config.heartbeat_interval_ns or HEARTBEAT_MOST_NS
    detector = PhiDetector(
        floor_ns=config.heartbeat_floor_ns,
        ceiling_ns=config.heartbeat_ceiling_ns,
        interval_ns=interval,
        now_ns=state.now,
    )
    state.alarms.set("agent", detector.next_change_ns(state.now), agent_id)
    return Agent(agent_id, host, detector)


def saw_life(state: State, agent: Agent, life: WorkerLife) -> None:
    """An agent says that it runs this process."""
    key = WorkerKey(life.worker_id, life.incarnation)
    agent.lives.add(key)
    if state.is_fenced(key):
        kill_life(state, agent, key, Why(state.fenced_for[key.worker_id], "it was evicted"))
        return
    known = state.workers.get(key.worker_id)
    if known is not None and known.key.incarnation > key.incarnation:
        return
    if known is not None and known.key.incarnation < key.incarnation:
        if runs_elsewhere(state, known, agent.host):
            return
        why = Why(Cause.REPLACED, f"its slot already runs incarnation {key.incarnation}")
        evict(state, known, why, kill=False)
        known = None
    if known is None:
        known = state.workers[key.worker_id] = Worker(key, host=agent.host)
        state.lost_slots.pop(key.worker_id, None)
        state.dirty = True
    known.agent_id, known.pid = agent.agent_id, life.pid
    known.seen_ns = state.now if known.seen_ns else 0
    state.slot_owner[key.worker_id] = agent.agent_id


def runs_elsewhere(state: State, known: Worker, host: str) -> bool:
    """Whether a slot is another host's, where a life of it takes part or is there.

    A host whose slot was given to another while it was away does not know that, and starts its slot's next life. This
    one is newer, but no sign that the other has ended: that is for its own host to say, or for its silence.
    """
    return bool(known.host) and known.host != host and (known.connection is not None or state.in_any_plan(known.key))


def worker_started(state: State, agent: Agent, message: WorkerStarted) -> None:
    """A process was started; it says hello itself when it is ready."""
    saw_life(state, agent, message.worker)


def worker_exited(state: State, agent: Agent, message: WorkerExited) -> None:
    """A process is dead: waitpid said so."""
    key = WorkerKey(message.worker_id, message.incarnation)
    agent.lives.discard(key)
    agent.killed_ns.pop(key, None)
    state.retiring.discard(key.worker_id)
    if state.slots is not None and state.slot_wanted(key.worker_id):
        # It may have left as once asked, and its slot be wanted again by now: say so anew.
        agent.sent_slots = None
    state.dirty = True
    worker = state.alive(key)
    if worker is not None:
        if state.plan is not None and state.plan.has(key):
            state.step = max(state.step, message.step)  # so that it is known how many steps are done again
        why = Why(message.cause, message.reason)
        evict(state, worker, why, kill=False, died_unix_ns=message.died_unix_ns)


def slot_lost(state: State, agent: Agent, message: SlotLost) -> None:
    """An agent gave up on a slot. If it is another's by now, this says nothing."""
    if message.worker_id in state.lost_slots or state.slot_owner.get(message.worker_id) not in (None, agent.agent_id):
        return
    state.lost_slots[message.worker_id] = message.reason
    state.persist("slot_lost", worker_id=message.worker_id, cause=message.cause, reason=message.reason)
    state.dirty = True
    left = len(state.slot_ids() - set(state.lost_slots))
    if left < state.min_workers:
        text = (
            f"slot {message.worker_id} was given up ({message.reason}); {left} of the {state.min_workers} workers "
            "that the job needs at least can still run"
        )
        state.end("failed", Why(Cause.QUORUM, text), 1)
    else:
        why = Why(message.cause, f"its slot was given up: {message.reason}")
        state.report("warning", why, worker_id=message.worker_id)


# ---- heartbeats and hangs


def heartbeat(state: State, agent: Agent, message: Heartbeat) -> None:
    """An agent lives, and says how its workers get on."""
    if message.rtt_ms > 0:
        agent.rtts_ms.append(message.rtt_ms)
    agent.detector.heartbeat(state.now)
    agent.detector.expect(expected_interval_ns(state, agent))
    agent.suspected = False
    state.send(agent.connection, Pong(seq=message.seq))
    for pulse in message.workers:
        key = WorkerKey(pulse.worker_id, pulse.incarnation)
        worker = state.alive(key)
        if worker is not None:
            worker.seen_ns = state.now
            worker.step, worker.phase, worker.samples_per_s = pulse.step, pulse.phase, pulse.samples_per_s
            worker.ms_per_lane = pulse.compute_ms_per_lane
            if worker.ms_per_lane > 0:
                state.watch_speeds()
            _check_hang(state, worker, pulse)
        elif state.is_fenced(key) and key in agent.lives:
            _outlived(state, agent, key)
    if len(message.workers) < len(agent.lives):
        _check_unseen(state, agent, {WorkerKey(p.worker_id, p.incarnation) for p in message.workers})


def _check_unseen(state: State, agent: Agent, seen: set[WorkerKey]) -> None:
    """Its agent runs it, and sees nothing of it any more: it is cut off. Should it return, it is dismissed."""
    for key in sorted(agent.lives - seen):
        worker = state.alive(key)
        if worker is None or worker.agent_id != agent.agent_id or not worker.seen_ns:
            continue
        unseen = state.now - worker.seen_ns
        what = f"host {agent.host} has seen nothing of it for {unseen / 1e9:.2f} s"
        if unseen < state.config.heartbeat_ceiling_ns // 2:
            continue
        if unseen < state.config.heartbeat_ceiling_ns or _hold_all_state(state, [worker]):
            suspect(state, worker, Why(Cause.SILENT, what))
        else:
            limit_s = state.config.heartbeat_ceiling_ns / 1e9
            why = Why(Cause.SILENT, f"{what} (limit {limit_s:.2f} s)")
            evict(state, worker, why, kill=False, notice_ns=unseen)


def expected_interval_ns(state: State, agent: Agent) -> int:
    """The heartbeat interval to expect: the configured one, else 10 x the median round trip within 0.2 to 5 s."""
    if state.config.heartbeat_interval_ns is not None:
        return state.config.heartbeat_interval_ns
    if not agent.rtts_ms:
        return SECOND_NS
    wanted = int(10 * median(agent.rtts_ms) * MILLISECOND_NS)
    return min(max(wanted, HEARTBEAT_LEAST_NS), HEARTBEAT_MOST_NS)


def _outlived(state: State, agent: Agent, key: WorkerKey) -> None:
    # A worker that said its last words, or was dismissed, gets some time to leave by itself.
    if key not in agent.killed_ns:
        agent.killed_ns[key] = state.now
    else:
        kill_life(state, agent, key, Why(state.fenced_for[key.worker_id], "it was evicted and still runs"))


def hang_limit_ns(state: State, worker: Worker) -> int:
    """How long this worker's progress counter may stand still."""
    fixed = state.config.hang_limit_ns
    if fixed is not None:
        limit = fixed
    elif state.step_times_ms:
        limit = max(HANG_FLOOR_NS, int(HANG_FACTOR * max(state.step_times_ms) * MILLISECOND_NS))
    else:
        limit = HANG_UNKNOWN_NS
    if profiling.records(state, worker.key):
        limit = max(limit, profiling.STANDSTILL_NS)
    return limit if state.in_any_plan(worker.key) else limit * HANG_FACTOR


def _check_hang(state: State, worker: Worker, pulse: WorkerPulse) -> None:
    still_ns = pulse.still_ms * MILLISECOND_NS
    if pulse.phase in EXEMPT_PHASES:
        # It may rest while nothing is asked of it; after an order its phase has to change.
        if not _owes(state, worker):
            worker.suspected = False
            return
        still_ns = min(still_ns, state.now - worker.ordered_ns)
    if still_ns < (state.config.hang_limit_ns or HANG_FLOOR_NS) // 2:  # whatever the exact limit is
        worker.suspected = False
        return
    limit = hang_limit_ns(state, worker)
    what = f"no progress for {still_ns / 1e9:.1f} s in phase '{pulse.phase}' of step {pulse.step}"
    why = Why(Cause.HUNG, f"{what} (limit {limit / 1e9:.1f} s)")
    if still_ns >= limit:
        evict(state, worker, why, kill=True, notice_ns=still_ns)
    elif still_ns >= limit // 2:
        suspect(state, worker, why)
    else:
        worker.suspected = False


def _owes(state: State, worker: Worker) -> bool:
    if worker.ordered_ns == 0 or not worker.greeted:
        return False
    join = state.joins.get(worker.key.worker_id)
    if join is not None and join.key == worker.key:
        return join.healed_ns is None and join.retry_ns is None
    in_plan = state.plan is not None and state.plan.has(worker.key)
    return in_plan and worker.key.worker_id not in state.entered


def suspect(state: State, worker: Worker, why: Why) -> None:
    """Say once that a worker may be in trouble."""
    if not worker.suspected:
        worker.suspected = True
        state.report(
            "worker_suspected",
            why,
            worker_id=worker.key.worker_id,
            incarnation=worker.key.incarnation,
            pid=worker.pid,
            step=worker.step,
            generation=state.plan.generation if state.plan is not None else 0,
        )


# ---- silence


def check_agent(state: State, agent_id: str) -> None:
    """Look whether an agent has been silent for too long, and ring again when it could be."""
    agent = state.agents.get(agent_id)
    if agent is None or state.ended is not None:
        return
    if state.in_grace:
        state.alarms.set("agent", state.grace_until_ns or state.now, agent_id)
        return
    suspicion = agent.detector.suspicion(state.now)
    connected = agent.connection is not None
    dead = suspicion.dead if connected else state.now >= agent.detector.ceiling_at_ns
    if not dead and (agent.suspected or not suspicion.suspect):
        # The usual case, once or twice per heartbeat: a thousand agents do not look at a thousand workers each.
        change = agent.detector.next_change_ns(state.now) if connected else agent.detector.ceiling_at_ns
        state.alarms.set("agent", max(change, state.now + MILLISECOND_NS), agent_id)
        return
    workers = [w for _, w in sorted(state.workers.items()) if w.agent_id == agent_id]
    silence = agent.detector.silence_ns(state.now)
    if dead and silence < state.config.quorum_wait_ns and _hold_all_state(state, workers):
        for worker in workers:
            text = f"host {agent.host}: {suspicion.reason}; nobody else holds the training state"
            suspect(state, worker, Why(Cause.HOST_LOST, text))
        state.alarms.set("agent", state.now + SECOND_NS, agent_id)
        return
    if dead:
        del state.agents[agent_id]
        state.retiring -= {i for i in state.retiring if state.slot_owner.get(i) == agent_id}
        state.close(agent.connection, f"agent {agent_id}: {suspicion.reason}")
        for worker in workers:
            why = Why(Cause.HOST_LOST, f"its host {agent.host} is silent: {suspicion.reason}")
            evict(state, worker, why, kill=False, notice_ns=silence)
        return
    if suspicion.suspect and not agent.suspected:
        agent.suspected = True
        for worker in workers:
            suspect(state, worker, Why(Cause.HOST_LOST, f"host {agent.host}: {suspicion.reason}"))
    change = agent.detector.next_change_ns(state.now) if connected else agent.detector.ceiling_at_ns
    state.alarms.set("agent", max(change, state.now + MILLISECOND_NS), agent_id)


def _hold_all_state(state: State, workers: list[Worker]) -> bool:
    """Whether the training state would be lost without these. Silence does not prove a death: most likely it is the
    coordinator that is cut off, and they go on training; to give them up would mean to start over.
    """
    new = set(state.plan.joining) - state.entered if state.plan is not None else set()
    holders = [w for w in state.survivors() if w.key.worker_id not in new]
    return bool(holders) and all(w in workers for w in holders)


def check_gone(state: State, worker_id: int) -> None:
    """Look whether a worker without a connection has to be given up."""
    worker = state.workers.get(worker_id)
    if worker is None or worker.gone_ns is None or worker.connection is not None or state.ended is not None:
        return
    who = str(worker_id)
    if state.in_grace:
        state.alarms.set("gone", state.grace_until_ns or state.now, who)
        return
    gone = state.now - worker.gone_ns
    if state.agent_of(worker) is None:
        if gone >= ALONE_LIMIT_NS:
            text = f"its connection ended {gone / 1e9:.1f} s ago and no agent speaks for its host"
            evict(state, worker, Why(Cause.SILENT, text), kill=False, notice_ns=gone)
        else:
            state.alarms.set("gone", worker.gone_ns + ALONE_LIMIT_NS, who)
        return
    # Its agent says it lives. Training needs no coordinator: give it up only if others wait for it to hear of a plan.
    ceiling = state.config.heartbeat_ceiling_ns
    if gone >= ceiling and _awaited(state, worker) and not _hold_all_state(state, [worker]):
        text = f"its process lives, but its connection has been gone for {gone / 1e9:.1f} s and a plan waits for it"
        evict(state, worker, Why(Cause.SILENT, text), kill=True, notice_ns=gone)
    else:
        state.alarms.set("gone", max(worker.gone_ns + ceiling, state.now + SECOND_NS), who)


def _awaited(state: State, worker: Worker) -> bool:
    if state.prepared is not None and state.in_any_plan(worker.key):
        return True
    in_plan = state.plan is not None and state.plan.has(worker.key)
    return in_plan and worker.key.worker_id not in state.entered


def end_of_grace(state: State) -> None:
    """The time to come back after the coordinator's restart is over."""
    if state.grace_until_ns is None or state.now < state.grace_until_ns:
        return
    absent = [w for _, w in sorted(state.workers.items()) if not w.greeted and w.member is not None]
    if state.absent_since_ns is None:
        state.absent_since_ns = state.now
    waited = state.now - state.absent_since_ns
    if waited < state.config.quorum_wait_ns and _hold_all_state(state, absent):
        state.grace_until_ns = state.now + state.config.grace_ns
        state.alarms.set("grace", state.grace_until_ns)
        return
    state.grace_until_ns = state.absent_since_ns = None
    state.dirty = True
    for worker in absent:
        agent = state.agent_of(worker)
        if agent is not None and worker.key in agent.lives:
            worker.gone_ns = state.now
            state.alarms.set("gone", state.now, str(worker.key.worker_id))
        else:
            why = Why(Cause.SILENT, "it did not come back after the coordinator's restart")
            evict(state, worker, why, kill=True)


def pardon(state: State, gap_ns: int) -> None:
    """The coordinator itself was away for `gap_ns`: nobody's silence in that time counts."""
    for _, agent in sorted(state.agents.items()):
        agent.detector.pardon(gap_ns)
    for _, worker in sorted(state.workers.items()):
        if worker.gone_ns is not None:
            worker.gone_ns += gap_ns
        worker.seen_ns += gap_ns if worker.seen_ns else 0
