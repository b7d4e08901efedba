"""What people ask of the coordinator: status, scale, drain, faults, stop; which slots the agents keep filled. Pure."""

from __future__ import annotations

from typing import Any

from everstep.base.cause import Cause, Why
from everstep.base.plan import Plan
from everstep.protocol import coordinator_profiling as profiling
from everstep.protocol import coordinator_saving as saving
from everstep.protocol.coordinator_state import Agent, State, Worker, listed
from everstep.protocol.messages import Command, CommandReply, InjectFault, SetSlots

INTERRUPTED = 130
TERMINATED = 143
_MOST_FAULT = 500


def command(state: State, connection: str, message: Command) -> None:
    """Carry out a command, or say in one line why not."""
    act = _ACTS.get(message.name)
    result: dict[str, Any]
    if act is None and message.name != "checkpoint":
        error = f"unknown command '{message.name}': expected one of {', '.join(sorted({*_ACTS, 'checkpoint'}))}"
        result = {}
    elif state.ended is not None and message.name != "status":
        error, result = f"the job is over ({state.ended.state}): {message.name} has no effect", {}
    elif act is None:
        saving.ask(state, connection, message)
        return
    else:
        error, result = act(state, message.args)
    reply = CommandReply(request=message.request, ok=not error, error=error, result=result)
    state.send(connection, reply)


def _status(state: State, args: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    return "", status(state)


def _stop(state: State, args: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    code = TERMINATED if args.get("exit_code") == TERMINATED else INTERRUPTED
    grace_s = args.get("grace_s")
    grace_ns = int(grace_s * 1e9) if isinstance(grace_s, int | float) else 0
    cause = Cause.read(args.get("cause") or Cause.REQUESTED)
    why = Why(cause, str(args.get("reason") or "stopped by request"))
    saving.end_after_saving(state, "interrupted", why, code, grace_ns)
    return "", {}


def _scale(state: State, args: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    wanted = args.get("workers")
    least, most = _least(state), state.capacity
    if not isinstance(wanted, int) or isinstance(wanted, bool) or not least <= wanted <= most:
        return f"expected a number of workers from {least} ({_why_least(state)}) to {most} (lanes), got {wanted!r}", {}
    slots = state.slot_ids()
    size = wanted + max(0, len(slots) - state.target)
    members = [m.worker_id for m in _newest(state).members] if state.plan is not None else []
    keep = _keep(state, [i for i in sorted(members) if i in slots], wanted)
    dropped = set(members) - set(keep)
    others = [i for i in sorted(slots) if i not in keep and i not in dropped and i not in state.lost_slots]
    chosen = set((keep + others)[:size])
    fresh = 0
    while len(chosen) < size:
        if fresh not in chosen and fresh not in state.lost_slots and fresh not in dropped:
            chosen.add(fresh)
        fresh += 1
    was = state.target
    state.set_target(wanted, chosen, Why(Cause.SCALED, f"scaled from {was} to {wanted} workers by request"))
    return "", {"workers": wanted, "before": was}


def _drain(state: State, args: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    worker_id = args.get("worker_id")
    slots = state.slot_ids()
    if not isinstance(worker_id, int) or worker_id not in slots:
        return f"no worker {worker_id!r}: the workers are {listed(slots)}", {}
    spare = state.plan is not None and worker_id not in _newest(state).worker_ids and len(slots) > state.target
    target = state.target if spare else state.target - 1
    if target < state.min_workers:
        return f"cannot drain worker {worker_id}: {target} workers would be left and min_workers is {least(state)}", {}
    alone = [] if spare else _alone_in(state, worker_id)
    if alone:
        where = f"stage {listed(set(alone))}"
        return f"cannot drain worker {worker_id}: nobody else holds {where}; let a backup join it first", {}
    state.set_target(target, slots - {worker_id}, Why(Cause.DRAINED, f"worker {worker_id} drained by request"))
    return "", {"workers": target}


def _chaos(state: State, args: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Hand a fault to all workers: as with scripted ones, whoever it means strikes himself."""
    fault = args.get("fault")
    if not isinstance(fault, str) or not 0 < len(fault) <= _MOST_FAULT:
        return f"expected a fault such as kill:target=worker:2, got {str(fault)[:40]!r}", {}
    there = {i: w for i, w in state.workers.items() if w.connection is not None}
    if state.plan is None or not there:
        return "no worker trains yet: try again", {}
    nobody = [i for i in _numbers(args, "workers") if i not in there]
    if nobody:
        return f"no worker {listed(set(nobody))}: the workers are {listed(set(there))}", {}
    beyond = [k for k in _numbers(args, "stages") if not 0 <= k < state.config.stages]
    if beyond:
        return f"no stage {listed(set(beyond))}: the stages are {listed(set(range(state.config.stages)))}", {}
    state.newest_fault = max(state.now, state.newest_fault + 1)
    for _, worker in sorted(there.items()):
        state.send(worker.connection, InjectFault(fault=fault, number=state.newest_fault))
    return "", {"fault": fault, "workers": sorted(there)}


def _numbers(args: dict[str, Any], name: str) -> list[int]:
    found = args.get(name)
    return [i for i in found if isinstance(i, int)] if isinstance(found, list) else []


_ACTS = {"status": _status, "scale": _scale, "drain": _drain, "chaos": _chaos, "stop": _stop, "profile": profiling.ask}


def _least(state: State) -> int:
    """To how many workers a job may be scaled down: every stage keeps one, as far as each has one of its own."""
    members = len(state.plan.members) if state.plan is not None else state.config.workers
    return max(state.min_workers, min(state.config.stages, members))


def _why_least(state: State) -> str:
    return "min_workers" if _least(state) == state.min_workers else "one per stage"


def _keep(state: State, members: list[int], wanted: int) -> list[int]:
    """Who stays when only so many are wanted: the last of the largest pool goes first."""
    if state.plan is None or state.config.stages == 1:
        return members[:wanted]
    plan, kept = _newest(state), set(members)
    while len(kept) > wanted:
        pools = [[s.worker_id for s in plan.pool(k) if s.worker_id in kept] for k in range(plan.stages)]
        free = [pool for pool in pools if len(pool) > 1]
        if not free:
            break
        kept.discard(max(free, key=len)[-1])
    return sorted(kept)


def _alone_in(state: State, worker_id: int) -> list[int]:
    """The stages that nobody but this member holds."""
    if state.plan is None or state.config.stages == 1:
        return []
    plan = _newest(state)
    return [stage for stage in plan.stages_of(worker_id) if len(plan.pool(stage)) == 1]


def least(state: State) -> int:
    """The least number of workers the job may run with."""
    return state.min_workers


def _newest(state: State) -> Plan:
    plan = state.prepared or state.plan
    if plan is None:
        raise LookupError("no plan yet")
    return plan


# ---- slots


def sync_slots(state: State) -> None:
    """Tell each agent which worker ids to keep running, where that is not for the agents themselves to say.

    A slot that is not wanted any more stays in the list until its process has left. After a restart of the coordinator
    the agents come back one by one: what the others run must not be started again at the first. Before an end
    that somebody asked for nothing is started any more.
    """
    if (state.slots is None and not state.config.slots) or state.ended is not None or state.in_grace:
        return
    agents = [a for _, a in sorted(state.agents.items()) if a.connection is not None]
    if not agents or _all_told(state, agents):
        return
    slots = set(range(state.config.slots)) if state.slots is None else state.slots
    wanted = (slots | state.retiring) - set(state.lost_slots)
    if state.ending is not None and state.ending.state == "interrupted":
        wanted = set()
    shares: dict[str, list[int]] = {a.agent_id: [] for a in agents}
    for worker_id in sorted(wanted):
        if state.slot_owner.get(worker_id) in shares:
            shares[state.slot_owner[worker_id]].append(worker_id)
    for worker_id in sorted(wanted):
        if state.slot_owner.get(worker_id) not in state.agents:
            free = [a for a in agents if not a.room or len(shares[a.agent_id]) < a.room]
            fewest = min(free, key=lambda a: (len(shares[a.agent_id]), a.agent_id), default=None)
            if fewest is None:
                break
            shares[fewest.agent_id].append(worker_id)
            state.slot_owner[worker_id] = fewest.agent_id
    for agent in agents:
        _send_slots(state, agent, sorted(shares[agent.agent_id]))


def _all_told(state: State, agents: list[Agent]) -> bool:
    """Whether a job goes on with the slots it began with, and each is some agent's: a thousand hellos need not share
    out a thousand slots each."""
    if state.slots is not None or state.ending is not None:
        return False
    told = all(agent.sent_slots is not None for agent in agents)
    return told and all(state.slot_owner.get(i) in state.agents for i in range(state.config.slots))


def _send_slots(state: State, agent: Agent, ids: list[int]) -> None:
    if agent.sent_slots != ids:
        agent.sent_slots = ids
        state.send(agent.connection, SetSlots(worker_ids=ids, first=[state.next_incarnation(i) for i in ids]))


# ---- status


def status(state: State) -> dict[str, Any]:
    """What `everstep status --json` prints, the coordinator's own pid excepted."""
    why = state.waiting if state.ended is None else Why(state.ended.cause, state.ended.reason)
    return {
        "state": job_state(state),
        "generation": state.plan.generation if state.plan is not None else 0,
        "step": state.step,
        "target": state.target,
        "cause": why.cause if why is not None else None,
        "reason": why.reason if why is not None else "",
        "workers": [_worker_status(state, w) for _, w in sorted(state.workers.items())],
        **profiling.status(state),
    }


def job_state(state: State) -> str:
    """One of INTERFACE's states of a job."""
    if state.ended is not None:
        return state.ended.state
    if state.waiting:
        return "waiting"
    if state.plan is None or (state.generation == 1 and not state.entered and not state.broken):
        return "starting"
    if state.broken or (not state.entered and not state.plan.prepared):
        return "recovering"
    return "running"


def _worker_status(state: State, worker: Worker) -> dict[str, Any]:
    plan = state.plan
    member = plan is not None and plan.has(worker.key)
    worker_id = worker.key.worker_id
    role: str = "spare"
    stages: tuple[int, ...] = ()
    lanes: set[int] = set()
    if plan is not None and member:
        stages = plan.stages_of(worker_id)
        lanes = {lane for seat in plan.seats_of(worker_id) for lane in seat.lanes}
        role = plan.role_of(worker_id)
    elif worker.key.worker_id in state.joins or state.in_any_plan(worker.key) or not worker.ready:
        role = "joining"
    return {
        "worker_id": worker.key.worker_id,
        "incarnation": worker.key.incarnation,
        "pid": worker.pid,
        "host": worker.host,
        "stage": stages[0] if stages else None,
        "stages": list(stages),
        "role": role,
        "step": worker.step,
        "lanes": sorted(lanes),
        "samples_per_s": worker.samples_per_s,
    }
