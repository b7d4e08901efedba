"""Workers that end by an exception: chance, the user's code, or the last that hold the state. Pure.

A worker whose loop has raised still holds the state of the newest step, and stays until it is let go. If nobody else
holds it who could go on (all have raised, say), the members take a checkpoint first.
"""

from __future__ import annotations

from everstep.base.cause import Why
from everstep.base.plan import WorkerKey
from everstep.protocol.coordinator import saving
from everstep.protocol.coordinator.alarms import FailedDue
from everstep.protocol.coordinator.health import evict
from everstep.protocol.coordinator.state import State, Worker, describe
from everstep.protocol.messages import Saved, WorkerFailed


def worker_failed(state: State, worker: Worker, message: WorkerFailed) -> None:
    """A worker's last words. The same error at the same step is the user's code, not chance, if it comes in a later
    generation: in another life, or at whom the work of the first went to. Several at once are no proof of that."""
    who, why = describe(worker.key), Why(message.cause, message.reason)
    if message.fatal:
        state.end("failed", Why(why.cause, f"{who}: {message.reason}"), message.exit_code)
        return
    if message.sound >= 0 and state.plan is not None and state.plan.has(worker.key):
        saving.in_doubt(state, why, message.sound)
    now = (worker.key, message.generation)
    first, generation = state.failures.setdefault((message.step, message.signature), now)
    needed = message.holds and _is_needed(state, worker)
    if first != worker.key and not 0 < message.generation <= generation:
        reason = f"{who} failed at step {message.step} as {describe(first)} did: {message.reason}"
        if state.ending is None:
            saving.end_after_saving(state, "failed", Why(why.cause, reason), 1, state.config.save_ns)
        if state.ending is not None and not needed and len(state.survivors()) > 1:
            evict(state, worker, why, kill=False)  # the others hold the state
    elif needed:
        state.failed[worker.key] = why
        state.alarms.set(FailedDue(), state.now + state.config.save_ns)
        text = f"{who}: {message.reason}; nobody else holds its state, so a checkpoint is taken first"
        state.broken.append(Why(why.cause, text))
        state.dirty = True
    else:
        evict(state, worker, why, kill=False)


def failed_early(state: State, connection: str, message: WorkerFailed) -> None:
    """The last words of a worker that never said hello: its task cannot even be built."""
    worker = state.alive(WorkerKey(message.worker_id, message.incarnation))
    if worker is not None:
        worker_failed(state, worker, message)


def _is_needed(state: State, worker: Worker) -> bool:
    """Whether it holds a stage that no other member holds who could go on."""
    plan = state.plan
    if not state.config.save_ns or plan is None or not plan.has(worker.key):
        return False
    new = set(plan.joining) - state.entered
    able = [w.key.worker_id for w in state.survivors() if w.key != worker.key and w.key not in state.failed]
    held = {stage for i in able if i not in new for stage in plan.stages_of(i)}
    mine = plan.stages_of(worker.key.worker_id)
    return worker.key.worker_id not in new and any(stage not in held for stage in mine)


def saved(state: State, worker: Worker, message: Saved) -> None:
    """A checkpoint has ended, one way or the other: that before a worker is let go, or one that was asked for."""
    plan = state.plan
    if state.failed and state.ending is None and plan is not None and plan.save:
        let_go(state)
    else:
        saving.saved(state, worker, message)


def ring(state: State, alarm: FailedDue) -> None:
    """The time for a checkpoint is over."""
    let_go(state)


def let_go(state: State) -> None:
    """The checkpoint is there, or the time for it is over."""
    for key, why in sorted(state.failed.items()):
        worker = state.alive(key)
        if worker is not None:
            evict(state, worker, why, kill=False)
    state.failed = {}
