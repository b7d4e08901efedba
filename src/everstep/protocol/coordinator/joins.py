"""Changes while training goes on: who heals, who leaves, which lanes move, and when a plan for it is prepared. Pure.

`reconcile` compares the wanted membership (target, slots) with the present one and moves one step towards it: it
gives tickets to joiners, and prepares a plan once joiners have healed or members have to leave.

Moving lanes costs a change of generation, so the gain has to last: a plan by speeds must promise steps that are a
fifth shorter, at every check for half a minute, and not within half a minute of another one. A pool that has lost
members for good, and so makes all others wait, gets a member from another pool if that makes the steps a fifth
shorter than lanes by speed would. The member copies the stage at the switch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

from everstep.base.cause import Cause, Why
from everstep.base.plan import SEGMENTS, Member, Plan, Seat, Shard, WorkerKey
from everstep.cost.advice import step_ms
from everstep.placement.shards import lost_stages
from everstep.protocol.coordinator.environment import MILLISECOND_NS, Alarm, describe, listed
from everstep.protocol.coordinator.job_state import JobState
from everstep.protocol.coordinator.membership import Worker
from everstep.protocol.coordinator.plans import Move, candidates, moved, prepare, shards_of
from everstep.protocol.coordinator.speeds import by_speed, reason
from everstep.protocol.coordinator.workers import dismiss, evict
from everstep.protocol.messages import Heal, HealFailed, WorkerHealed

BATCH_NS = 250 * MILLISECOND_NS
MOST_FAILURES = 10
LEAST_GAIN = 0.2


def reconcile(job: JobState) -> None:
    """Move one step towards the wanted membership."""
    if job.progress.ended is not None or job.membership.in_grace:
        return
    _dismiss_unwanted(job)
    if not job.agreement.running:
        return
    leaving = leavers(job)
    _choose_joiners(job, leaving)
    for _, join in sorted(job.healing.joins.items()):
        if join.retry_ns is not None and job.env.now >= join.retry_ns:
            _send_heal(job, join.key)
        elif join.retry_ns is not None:
            job.env.alarms.set(Alarm.JOINS, join.retry_ns)
    touch = not any(job.agents.out_of_touch(worker) for worker in job.agreement.survivors())
    if job.agreement.prepared is None and touch:
        _prepare_if_due(job, leaving)


def leavers(job: JobState) -> list[Worker]:
    """Members whose slots are not wanted any more, in id order."""
    return [w for w in job.agreement.survivors() if not job.slots.wanted(w.key.worker_id)]


def _dismiss_unwanted(job: JobState) -> None:
    slots = job.slots
    if slots.as_started:
        return
    for worker_id, worker in sorted(job.membership.workers.items()):
        if worker.ready and not slots.wanted(worker_id) and not job.agreement.in_any_plan(worker.key):
            text = f"its slot is no longer wanted (workers wanted: {slots.target})"
            dismiss(job, worker, Why(slots.unwanted_for(worker_id), text))


def _vacancies(job: JobState, leaving: list[Worker], coming: Collection[int]) -> int:
    """Number of further members that are wanted."""
    return max(0, job.slots.target - (len(job.agreement.survivors()) - len(leaving)) - len(coming))


def _choose_joiners(job: JobState, leaving: list[Worker]) -> None:
    """Give tickets to as many ready workers as there are vacancies; withdraw other tickets."""
    agreement, healing = job.agreement, job.healing
    coming = set(agreement.prepared.joining) if agreement.prepared is not None else set()
    vacancies = _vacancies(job, leaving, coming)
    found = [w for w in candidates(job) if w.key.worker_id not in coming]
    # A worker that has begun to heal goes on; a life that replaced another starts over.
    found.sort(key=lambda w: w.key.worker_id not in healing.joins)
    chosen = found[:vacancies]
    healing.keep({w.key.worker_id for w in chosen} | coming)
    for worker in sorted(chosen, key=lambda w: w.key):
        if worker.key.worker_id not in healing.joins:
            _send_heal(job, worker.key)


def donors(job: JobState, attempt: int, stage: int) -> list[Member]:
    """Donors of a stage's state in order of preference: the backups, another one at each attempt, then the leader."""
    plan = job.agreement.plan
    leader, pool = plan.leader(stage), {s.worker_id for s in plan.pool(stage)}
    alive = [w.member for w in job.agreement.survivors() if w.member is not None and w.key.worker_id in pool]
    backups = [m for m in alive if m.worker_id != leader]
    turn = attempt % len(backups) if backups else 0
    return backups[turn:] + backups[:turn] + [m for m in alive if m.worker_id == leader]


def _seats_with(job: JobState, key: WorkerKey) -> tuple[Seat, ...]:
    """The seats that there will probably be with a joiner: those that it gets are those whose stages it copies."""
    plan = job.agreement.plan
    on_the_way = [j for j in job.healing.joins.values() if j.key != key]
    seats = [*plan.seats, *(Seat(j.key.worker_id, k, "standby", ()) for j in on_the_way for k in j.stages)]
    staying = {w.key.worker_id for w in job.agreement.survivors()} - {w.key.worker_id for w in leavers(job)}
    ids = sorted(staying | {j.key.worker_id for j in on_the_way} | {key.worker_id})
    if plan.stages == 1:
        return tuple(Seat(i, 0, "standby", ()) for i in ids)
    return job.speeds.seats(ids, seats, anew=True)


def _parts_of(job: JobState, worker_id: int, stages: Collection[int], seats: Sequence[Seat]) -> list[Shard]:
    """The parts of stages that a joiner probably gets; all segments of one that nobody has completely now. None where
    everybody has all."""
    found = {s.stage: s for s in shards_of(job, seats) if s.worker_id == worker_id}
    now, every = job.agreement.plan.divided_stages, ((0, SEGMENTS),)
    return [found.get(k) or Shard(worker_id, k, segments=every) for k in stages if k in found or k in now]


def _send_heal(job: JobState, key: WorkerKey) -> None:
    worker, plan = job.membership.alive(key), job.agreement.plan
    if worker is None:
        return
    seats = _seats_with(job, key)
    stages = tuple(sorted(seat.stage for seat in seats if seat.worker_id == key.worker_id))
    parts = _parts_of(job, key.worker_id, stages, seats)
    join = job.healing.attempt(key, stages, tuple(parts))
    worker.ordered(job.env.now)
    by_stage = [donors(job, join.ticket, stage) for stage in join.stages]
    everybody = list({m.worker_id: m for found in by_stage for m in found}.values())
    holders = [[m.worker_id for m in found] for found in by_stage]
    stages_told: dict[str, Any] = {"stages": list(join.stages), "holders": holders, "shards": parts}
    job.env.send(worker.connection, Heal(ticket=join.ticket, plan=plan, donors=everybody, **stages_told))


def worker_healed(job: JobState, worker: Worker, message: WorkerHealed) -> None:
    """A joiner follows closely enough. An old ticket is void."""
    join = job.healing.of(worker.key, message.ticket)
    if join is not None and join.healed_ns is None:
        job.healing.succeed(join)
        worker.healed(message.step)


def heal_failed(job: JobState, worker: Worker, message: HealFailed) -> None:
    """A joiner lost its donor: it tries again, later each time, and is replaced after too many failures. If the
    members have switched to a plan with it, or may have, they wait for it in vain, and cannot feed it either."""
    agreement, join = job.agreement, job.healing.of(worker.key, message.ticket)
    if (agreement.plan.prepared and agreement.owes(worker.key)) or agreement.is_prepared(worker.key):
        text = f"{describe(worker.key)} could not follow to the switch: {message.reason}"
        agreement.break_off(Why(message.cause, text))
    elif join is not None and job.healing.fail(join) >= MOST_FAILURES:
        why = Why(message.cause, f"it could not heal in {MOST_FAILURES} attempts: {message.reason}")
        evict(job, worker, why, kill=True)


def _may_go(job: JobState, leaving: list[Worker], joining: list[tuple[int, ...]]) -> list[Worker]:
    """Those leaving workers without which enough others stay, in all and in each of their stages."""
    plan, survivors = job.agreement.plan, job.agreement.survivors()
    may_leave = len(survivors) + len(joining) - job.slots.least
    going = leaving[-may_leave:] if may_leave > 0 else []
    # Who only moves to another host leaves when its successor comes.
    moving = [w for w in going if job.slots.unwanted_for(w.key.worker_id) is Cause.REBALANCED]
    moving = _succeeded_first(plan, moving, joining)
    too_early = moving[max(0, len(survivors) + len(joining) - job.slots.target) :]
    going = [w for w in going if w not in too_early]
    if plan.stages == 1:
        return going
    staying = [w.key.worker_id for w in survivors if w not in going]
    held = {stage for i in staying for stage in plan.stages_of(i)} | {k for stages in joining for k in stages}
    free = []
    for worker in reversed(going):
        own = set(plan.stages_of(worker.key.worker_id))
        if own <= held:
            free.append(worker)
        else:
            held |= own
    return free[::-1]


def _succeeded_first(plan: Plan, moving: list[Worker], joining: list[tuple[int, ...]]) -> list[Worker]:
    """Leaving workers, first those whose stages a joiner takes over."""
    coming = Counter(stage for stages in joining for stage in stages)
    first = []
    for worker in moving:
        own = Counter(plan.stages_of(worker.key.worker_id))
        if own <= coming:
            coming -= own
            first.append(worker)
    return first + [w for w in moving if w not in first]


def _prepare_if_due(job: JobState, leaving: list[Worker]) -> None:
    joins = job.healing.joins
    healed = [join for _, join in sorted(joins.items()) if join.healed_ns is not None]
    until_ns = min((join.healed_ns + BATCH_NS for join in healed if join.healed_ns is not None), default=0)
    if job.env.now < until_ns and any(join.copying for join in joins.values()):
        # Others are about to follow: one change of generation for all of them.
        job.env.alarms.set(Alarm.JOINS, until_ns)
        return
    room = max(0, job.env.config.room - len(job.agreement.survivors()) + len(leaving))
    joiners = [(worker, joins[worker.key.worker_id].stages) for worker in job.membership.living(j.key for j in healed)]
    joiners = joiners[:room]
    going = _may_go(job, leaving, [stages for _, stages in joiners])
    parts, cause = [], Cause.REBALANCED
    if joiners:
        cause = Cause.JOINED
        ids = listed(w.key.worker_id for w, _ in joiners)
        parts.append(f"workers {ids} healed and join" if len(joiners) > 1 else f"worker {ids} healed and joins")
    if going:
        cause = job.slots.unwanted_for(going[0].key.worker_id)
        ids = listed(w.key.worker_id for w in going)
        parts.append(f"workers {ids} leave as asked" if len(going) > 1 else f"worker {ids} leaves as asked")
    if not parts and job.speeds.idle_members(job.agreement.plan):
        parts.append("members without lanes get their share")
    leave = [w.key.worker_id for w in going]
    coming = [shard for worker, _ in joiners for shard in joins[worker.key.worker_id].shards]
    handing_over = leave if _hold_alone(job.agreement.plan, leave, coming) else []
    if handing_over:
        parts[-1] += ", once the others have copied what nobody else holds"
        going = []
    if parts:
        prepare(job, joiners, [w.key for w in going], Why(cause, "; ".join(parts)), handing_over=handing_over)


def _hold_alone(plan: Plan, worker_ids: Collection[int], coming: Sequence[Shard] = ()) -> bool:
    """Whether nobody else holds some of the optimizer's state that members have divided. coming: what joiners hold."""
    staying = {*plan.worker_ids}.difference(worker_ids)
    return bool(worker_ids) and not plan.divided_stages.isdisjoint(lost_stages(plan, staying, coming))


# ---- other lanes, or other pools, because some workers are slower than others


class _Change(NamedTuple):
    """A change that makes the steps shorter: the busiest worker's step would take `step_ms`."""

    step_ms: float
    speeds: dict[int, float]
    why: Why
    move: Move | None = None


def speeds_due(job: JobState, about: Any) -> None:
    """Note the present speeds; prepare a plan once the gain has lasted."""
    speeds, plan = job.speeds, job.agreement.plan
    speeds.look_later()
    change = _gain(job, plan)
    if change is None:
        speeds.even()
    elif speeds.uneven():
        speeds.change(change.speeds, plan.member(change.move.worker_id).key if change.move is not None else None)
        prepare(job, [], [], change.why, change.move)


def _gain(job: JobState, plan: Plan) -> _Change | None:
    """A change that makes the steps shorter; None if there is none, something else is under way, or a speed is
    unknown."""
    agreement = job.agreement
    if agreement.broken or agreement.prepared is not None or job.healing.joins or job.progress.ended is not None:
        return None
    found = job.speeds.measured(plan)
    if found is None or len(agreement.entered) < len(plan.members):
        return None
    now_ms = step_ms(plan.seats, found)
    speeds = by_speed(found)
    then_ms = step_ms(job.speeds.seats(plan.worker_ids, plan.seats, anew=True, speeds=speeds), found)
    moving = [_moving(job, plan, found, now_ms, move) for move in _moves(job, plan)]
    best = min(moving, key=lambda change: change.step_ms, default=None)
    if best is not None and best.step_ms <= min(now_ms, then_ms) * (1 - LEAST_GAIN):
        return best
    if then_ms > now_ms * (1 - LEAST_GAIN):
        return None
    cause = Cause.SLOW if speeds else Cause.REBALANCED
    return _Change(then_ms, speeds, Why(cause, reason(found, now_ms, then_ms)))


def _moving(job: JobState, plan: Plan, found: Mapping[int, float], now_ms: float, move: Move) -> _Change:
    """The change that this move would make, with lanes by speed."""
    there = {**found, move.worker_id: _in_other_pool(plan, found, move)}
    speeds = by_speed(there)
    seats = job.speeds.seats(plan.worker_ids, moved(plan.seats, move), anew=True, speeds=speeds)
    moved_ms = step_ms(seats, there)
    text = (
        f"worker {move.worker_id} goes from stage {move.source} to stage {move.target}, which has lost members "
        f"and makes all others wait: the busiest worker will compute {moved_ms:.0f} ms per step instead of "
        f"{now_ms:.0f} ms, by the cost model"
    )
    return _Change(moved_ms, speeds, Why(Cause.REBALANCED, text), move)


def _moves(job: JobState, plan: Plan) -> list[Move]:
    """Moves of workers into a pool that lacks members for good, the last worker of each pool first. A worker that moves
    gives up what it holds."""
    if plan.stages == 1 or len(plan.members) < job.slots.expected():
        return []
    pools = [[seat.worker_id for seat in plan.pool(stage)] for stage in range(plan.stages)]
    small = [k for k, pool in enumerate(pools) if len(pool) < job.env.config.wish.size(k)]
    free = [[i for i in pool if len(plan.seats_of(i)) == 1 and i != plan.leader(k)] for k, pool in enumerate(pools)]
    last = {k: own[-1] for k, own in enumerate(free) if own and not _hold_alone(plan, own[-1:])}
    return [Move(i, k, target) for target in small for k, i in last.items() if k != target]


def _in_other_pool(plan: Plan, ms_per_lane: Mapping[int, float], move: Move) -> float:
    """Time of a lane in another pool, in ms: that of its members, times the worker's slowness compared with its own
    pool."""
    own, there = (median(ms_per_lane[s.worker_id] for s in plan.pool(k)) for k in (move.source, move.target))
    return there * ms_per_lane[move.worker_id] / own if own > 0 else there
