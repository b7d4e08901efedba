"""Checkpoints as far as the coordinator goes: on request, and before a job ends that could go on later. Pure.

Before the end it makes a plan for at once with the same members, which says that they take a checkpoint as soon as they
have settled: that interrupts a step wherever it is, and all of them stand at the same one.
"""

from __future__ import annotations

from everstep.base.cause import Cause, Why
from everstep.protocol.coordinator.alarms import EndDue
from everstep.protocol.coordinator.recovery import begin
from everstep.protocol.coordinator.state import Ending, State, Worker
from everstep.protocol.messages import Command, CommandReply, Saved, SaveNow, SettleAgain


def end_after_saving(state: State, name: str, why: Why, exit_code: int, grace_ns: int) -> None:
    """End the job, with a checkpoint first where that is possible; at once if not."""
    able = state.plan is not None and state.entered and not state.fallback and not state.waiting
    if not able or grace_ns <= 0 or not state.survivors():
        state.end(name, why, exit_code)
        return
    if state.ending is not None:
        return
    state.ending = Ending(name, why, exit_code, state.now + grace_ns)
    state.alarms.set(EndDue(), state.ending.until_ns)
    state.broken.append(Why(why.cause, f"{why.reason}: a checkpoint is taken first"))
    state.dirty = True


def ring(state: State, alarm: EndDue) -> None:
    """The time for a checkpoint before the end is over."""
    ending = state.ending
    if ending is None or state.ended is not None:
        return
    if state.now < ending.until_ns:
        state.alarms.set(EndDue(), ending.until_ns)
        return
    _end(state, ending, "no checkpoint was completed in time")


def _end(state: State, ending: Ending, outcome: str) -> None:
    state.end(ending.state, Why(ending.why.cause, f"{ending.why.reason}; {outcome}"), ending.exit_code)


def saved(state: State, worker: Worker, message: Saved) -> None:
    """A checkpoint that was asked for has ended, one way or the other."""
    ending = state.ending
    if ending is not None:
        plan = state.plan
        if plan is not None and plan.save:
            what = f"checkpoint of step {message.step} in {message.where}" if message.ok else message.reason
            _end(state, ending, what if message.ok else f"no checkpoint: {what}")
        return
    waiting, state.save_requests = state.save_requests, []
    error = "" if message.ok else f"no checkpoint of step {message.step}: {message.reason}"
    for connection, request in waiting:
        result = {"step": message.step, "path": message.where} if message.ok else {}
        state.send(connection, CommandReply(request=request, ok=message.ok, error=error, result=result))


def ask(state: State, connection: str, message: Command) -> None:
    """Somebody wants a checkpoint; the reply comes when it is there."""
    state.save_requests.append((connection, message.request))
    cause = Cause.read(message.args.get("cause") or Cause.REQUESTED)
    state.save_why = Why(cause, str(message.args.get("reason") or "requested"))
    remind(state)


def remind(state: State) -> None:
    """Tell the leader what is wanted of it; the one before may have died."""
    plan = state.plan
    leader = plan.leader(0) if plan is not None and state.entered else None
    if leader is None or not state.save_requests:
        return
    worker = state.workers.get(leader)
    if worker is not None:
        state.send(worker.connection, SaveNow(cause=state.save_why.cause, reason=state.save_why.reason))


def job_ended(state: State) -> None:
    """Nobody will answer any more."""
    waiting, state.save_requests = state.save_requests, []
    why = f"the job ended before a checkpoint was complete ({state.ended.reason if state.ended is not None else '?'})"
    for connection, request in waiting:
        state.send(connection, CommandReply(request=request, ok=False, error=why, result={}))


def settle_again(state: State, worker: Worker, message: SettleAgain) -> None:
    """What a member had stated does not hold: all settle in a new generation, with what holds."""
    plan = state.plan
    if message.tainted and _repeated(state, message):
        return
    if plan is None or message.generation != plan.generation or not plan.has(worker.key):
        return
    text = message.reason if message.tainted else f"worker {worker.key.worker_id}: {message.reason}"
    state.broken.append(Why(message.cause, text))
    begin(state, Why(message.cause, message.reason))
    state.dirty = True


def _repeated(state: State, message: SettleAgain) -> bool:
    """States differ: once, all go back to where they were alike. Where they differ again, that is no chance."""
    first = state.tainted.setdefault(message.tainted, message.decided_in)
    if first != message.decided_in:
        text = f"{message.reason}; this is the second time at this step, going back does not help"
        state.end("failed", Why(message.cause, text), 1)
        return True
    in_doubt(state, Why(message.cause, message.reason), message.sound)
    return False


def in_doubt(state: State, why: Why, sound: int) -> None:
    """Some worker has found states to be tainted. It may be the only one, and gone before all have heard of it."""
    state.doubt = why
    state.sound = sound if state.sound < 0 else min(state.sound, sound)
