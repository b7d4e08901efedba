"""How a plan is made, checked, handed out and told; and when one is due because the present one cannot go on. Pure.

Every plan is made here, and nowhere else. A plan for at once takes the members of the current plan that live (and
newcomers only where there would be too few); a prepared one changes the membership at a step boundary.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from itertools import zip_longest
from typing import Any, NamedTuple

from everstep.base.cause import Cause, Why
from everstep.base.errors import check
from everstep.base.exit_codes import WORKERS_MISSING
from everstep.base.plan import SEGMENTS, Member, Plan, Seat, Shard, WorkerKey
from everstep.placement.domain_spread import Crowd
from everstep.placement.lanes import leaders
from everstep.placement.shards import segment_holders, segment_shards, spread
from everstep.protocol.coordinator import awaited_hosts
from everstep.protocol.coordinator.agreement import NO_PLAN, stages_lost
from everstep.protocol.coordinator.arrivals import START_PATIENCE_NS
from everstep.protocol.coordinator.cell_parts import count_cells
from everstep.protocol.coordinator.environment import SECOND_NS, describe, listed
from everstep.protocol.coordinator.job_state import JobState
from everstep.protocol.coordinator.membership import Worker
from everstep.protocol.messages import PlanNow, PlanPrepared

SMALL_STATE_BYTES = 32 << 20
"""A worker with at most this much state to copy is taken into a plan for at once, and copies it there."""


def candidates(job: JobState) -> list[Worker]:
    """Ready workers outside the current plan whose slots are wanted; those first that would die with the fewest of the
    pools that lack members."""
    ready = list(_outside(job))
    if len(ready) < 2:
        return ready
    short = _short_pools(job)
    if not short:  # before the first plan nobody is near to a member
        return sorted(ready, key=lambda w: w.key.worker_id)
    crowd = Crowd(short, job.speeds.domains(short))
    return sorted(ready, key=lambda w: (crowd.near(job.agents.domains(w)), w.key.worker_id))


def _outside(job: JobState) -> Iterator[Worker]:
    """The candidates, in no order."""
    for w in job.membership.workers.values():
        free = w.ready and not job.agreement.plan.has(w.key) and job.slots.wanted(w.key.worker_id)
        if free and (not job.links.kept_out(w.host) or followed(job, w)):
            yield w


def _short_pools(job: JobState) -> list[int]:
    """The members of those pools that lack most members."""
    plan, wish = job.agreement.plan, job.env.config.wish
    there = {w.key.worker_id for w in job.agreement.survivors()}
    pools = [[seat.worker_id for seat in plan.pool(k) if seat.worker_id in there] for k in range(plan.stages)]
    lacking = [wish.size(stage) - len(pool) for stage, pool in enumerate(pools)]
    return [i for stage, pool in enumerate(pools) if lacking[stage] == max(lacking) for i in pool]


def followed(job: JobState, worker: Worker) -> set[int]:
    """The stages whose newest state a worker outside the plan is known to hold, as a joiner."""
    join, prepared = job.healing.healed(worker.key), job.agreement.prepared
    if job.agreement.plan.has(worker.key):
        return set()
    if join is not None:
        return set(join.stages)
    if prepared is not None and prepared.has(worker.key):
        return set(prepared.stages_of(worker.key.worker_id))
    return job.healing.left_behind(worker.key)


def without_lanes(worker: Worker, stages: Iterable[int]) -> list[Seat]:
    """Seats from which placement starts: in the stages whose state the worker holds."""
    return [Seat(worker.key.worker_id, stage, "standby", ()) for stage in sorted(stages)]


# ---- plans for at once


def make_now(job: JobState, members: Sequence[Worker], why: Why, *, fresh: bool) -> None:
    """Give out a plan for at once. fresh: no worker holds the state of the plan before; lanes are laid out again."""
    agreement = job.agreement
    old = agreement.plan
    repaired, held, newcomers = NO_PLAN, list[Seat](), list[int]()
    if not fresh:
        repaired, still_new = old, agreement.empty_handed()
        held = [seat for w in members for seat in without_lanes(w, followed(job, w))]
        newcomers = [w.key.worker_id for w in members if not old.has(w.key) or w.key.worker_id in still_new]
    ids = sorted(w.key.worker_id for w in members)
    seats = job.speeds.seats(ids, [*repaired.seats, *held])
    plan = _plan(
        job,
        members,
        seats,
        Why(why.cause, why.reason + _promotions(repaired, seats)),
        previous=repaired.generation,
        joining=tuple(sorted(newcomers)),
        save=_save_reason(job),
        sound=job.progress.sound,
    )
    job.healing.leave_behind({w.key: followed(job, w) for w in _outside(job) if not plan.has(w.key)})
    agreement.issue(plan)
    job.links.forget_accusations()
    job.quorum.met()
    for worker_id in plan.worker_ids:
        job.healing.stop(worker_id)
    job.recovery.decided(plan.generation)
    message = PlanNow(plan=plan)
    for worker_id in plan.worker_ids:
        order(job, job.membership.workers[worker_id], message)
    announce(job, old)


def _plan(
    job: JobState,
    members: Iterable[Worker],
    seats: tuple[Seat, ...],
    why: Why,
    handing_over: Collection[int] = (),
    **rest: Any,
) -> Plan:
    """The next generation, of these members, which are all ready. handing_over: as for `shards_of`."""
    config, there = job.env.config, sorted(members, key=lambda w: w.key.worker_id)
    return Plan(
        generation=job.agreement.generation + 1,
        reason=why.reason,
        members=tuple(_placed(job, w, w.member) for w in there if w.member is not None),
        seats=seats,
        lanes=config.lanes,
        stages=config.stages,
        speeds=job.speeds.of(w.key.worker_id for w in there),
        leaders=leaders(seats, config.wish),
        cause=why.cause,
        term=config.hosts.term,
        alike=job.progress.known_alike,
        shards=shards_of(job, seats, handing_over),
        voided=job.progress.voided,
        **rest,
    )


def shards_of(job: JobState, seats: Sequence[Seat], handing_over: Collection[int] = ()) -> tuple[Shard, ...]:
    """The holders of the segments of the optimizer's state: the present holders, as far as the shares are even.
    handing_over: members that are about to leave; they keep what they hold, and the others hold everything."""
    config, old = job.env.config, job.agreement.plan
    found: list[Shard] = []
    for stage in range(config.stages) if config.wish.copies else ():
        ids = [seat.worker_id for seat in seats if seat.stage == stage]
        before = segment_holders(old, stage) if old.divided_stages else ()
        staying = [i for i in ids if i not in handing_over] or ids
        holders = spread(SEGMENTS, config.wish.copies, staying, job.speeds.domains(staying), before)
        kept = [[i for i in who if i in handing_over] for who in before] if handing_over else []
        holders = tuple(tuple(sorted({*who, *more})) for who, more in zip_longest(holders, kept, fillvalue=()))
        found += segment_shards(stage, holders, ids)
    return tuple(found)


def _placed(job: JobState, worker: Worker, member: Member) -> Member:
    """The member as a plan names it, with its failure domains."""
    domains = tuple(label for label in job.agents.domains(worker) if label[0] != "host")
    return member if member.domains == domains else replace(member, domains=domains)


def _save_reason(job: JobState) -> str:
    """Why the members of the next plan have to take a checkpoint at once; "" if they do not."""
    if job.saving.ending is not None:
        return job.saving.ending.why.reason
    staying = sorted(job.saving.staying.items())
    return "; ".join(f"before the end of {describe(key)}: {why.reason}" for key, why in staying)


def _promotions(old: Plan, seats: Sequence[Seat]) -> str:
    """The end of a reason: which standbys take over whose lanes."""
    was = {(s.worker_id, s.stage): s for s in old.seats}
    staying = {(s.worker_id, s.stage) for s in seats}
    text = ""
    for seat in seats:
        before = was.get((seat.worker_id, seat.stage))
        if not seat.lanes or before is None or before.lanes:
            continue
        left = [s for s in old.pool(seat.stage) if (s.worker_id, s.stage) not in staying]
        gone = {s.worker_id for s in left if set(s.lanes) & set(seat.lanes)}
        where = f" of stage {seat.stage}" if old.stages > 1 else ""
        whose = f"the lanes of worker {listed(gone)}" if gone else f"lanes {listed(seat.lanes)}"
        text += f"; worker {seat.worker_id}, standby{where}, takes {whose}"
    return text


def order(job: JobState, worker: Worker, message: PlanNow | PlanPrepared) -> None:
    """Send a worker an order; if it is not connected, it gets the order in answer to its hello."""
    worker.ordered(job.env.now)
    job.env.send(worker.connection, message)


# ---- prepared plans


class Move(NamedTuple):
    """A member changes to another pool."""

    worker_id: int
    source: int
    target: int


def moved(seats: Sequence[Seat], move: Move | None) -> list[Seat]:
    """The seats after a move, without lanes for the moved member yet."""
    if move is None:
        return list(seats)
    staying = [s for s in seats if (s.worker_id, s.stage) != (move.worker_id, move.source)]
    return [*staying, Seat(move.worker_id, move.target, "standby", ())]


def prepare(
    job: JobState,
    joiners: Sequence[tuple[Worker, tuple[int, ...]]],
    leaving: Sequence[WorkerKey],
    why: Why,
    move: Move | None = None,
    handing_over: Collection[int] = (),
) -> None:
    """Hand out a plan to which the members switch by themselves, after an agree in which all hold it. joiners: with
    the stages whose state they hold. move: a member that changes its pool; it copies the state when it settles
    there, while the others wait. handing_over: as for `shards_of`."""
    agreement = job.agreement
    check(agreement.running and agreement.prepared is None, "a plan is prepared upon a current one, one at a time")
    survivors, joining = agreement.survivors(), [w for w, _ in joiners]
    members = sorted([*(w for w in survivors if w.key not in leaving), *joining], key=lambda w: w.key)
    before = [*moved(agreement.plan.seats, move), *(seat for w, stages in joiners for seat in without_lanes(w, stages))]
    seats = job.speeds.seats([w.key.worker_id for w in members], before, anew=True)
    newcomers = {w.key.worker_id for w in joining} | (set() if move is None else {move.worker_id})
    plan = _plan(job, members, seats, why, handing_over, prepared=True, joining=tuple(sorted(newcomers)))
    agreement.issue(plan)
    for worker in sorted([*survivors, *joining], key=lambda w: w.key):
        order(job, worker, PlanPrepared(plan=plan))


# ---- telling


def announce(job: JobState, old: Plan) -> None:
    """Report that the plan in force has taken the place of `old`."""
    plan = job.agreement.plan
    job.progress.tell(plan.generation)
    job.env.report(
        "generation_started",
        Why(plan.cause, plan.reason),
        generation=plan.generation,
        step=job.progress.step,
        target=job.slots.target,
        workers=list(plan.worker_ids),
        leader=plan.leader(0),
        lanes={str(seat.worker_id): list(seat.lanes) for seat in plan.pool(0)},
        seats=[[s.worker_id, s.stage, s.role, list(s.lanes)] for s in plan.seats],
        leaders=[plan.leader(stage) for stage in range(plan.stages)],
    )
    for stage in range(plan.stages) if old is not NO_PLAN else ():
        _announce_few(job, plan, old, stage)
        leader = plan.member(plan.leader(stage))
        if old.member(old.leader(stage)).key != leader.key:
            _announce_leader(job, plan, leader.key, stage)


def _announce_few(job: JobState, plan: Plan, old: Plan, stage: int) -> None:
    """Warn that a pool has become smaller than the number of copies that are wanted of the optimizer's state."""
    copies, members = job.env.config.wish.copies, len(plan.pool(stage))
    if members < copies <= len(old.pool(stage)):
        where = f" of stage {stage}" * (plan.stages > 1)
        text = (
            f"{members} of zero.copies={copies} copies of the optimizer's state{where} are left, one at each worker: "
            "should these be lost before others have joined, the job goes back to its newest copy"
        )
        fields = {"generation": plan.generation, "step": job.progress.step, "stage": stage}
        job.env.report("warning", Why(plan.cause, text), **fields)


def announce_late(job: JobState) -> None:
    """Members follow the plan in force: report its start, if the coordinator that has journaled it died before it did
    so."""
    agreement, told = job.agreement, job.progress.told
    if agreement.plan.generation > told:
        announce(job, agreement.before if agreement.before.generation == told else NO_PLAN)


def _announce_leader(job: JobState, plan: Plan, leader: WorkerKey, stage: int) -> None:
    where = f" of stage {stage}" if plan.stages > 1 else ""
    by_map = plan.leaders and plan.leaders[stage] == leader.worker_id
    named = "the leader that the map names" if by_map else "the first member"
    text = f"worker {leader.worker_id} is {named}{where} of generation {plan.generation}: {plan.reason}"
    fields = {"generation": plan.generation, "step": job.progress.step, **asdict(leader), "stage": stage}
    job.env.report("leader_changed", Why(plan.cause, text), **fields)


# ---- the start, and what follows when the plan cannot go on


def reconcile(job: JobState) -> None:
    """Make the plan that is due at once, or report the wait."""
    if awaited_hosts.waits(job):
        return
    if job.agreement.plan is NO_PLAN:
        _start(job)
    elif job.agreement.broken:
        _regroup(job)


def _too_few_came(job: JobState) -> bool:
    """Whether the start has to wait anyway, so that a thousand hellos need not each look at a thousand workers."""
    came, slots, quorum = len(job.membership.came), job.slots, job.quorum
    some_missing = came < slots.target and slots.as_started and not slots.lost
    return some_missing and (quorum.patient if quorum.anybody else not came)


def _start(job: JobState) -> None:
    slots, quorum = job.slots, job.quorum
    quorum.wait()
    if _too_few_came(job):
        return
    ready = candidates(job)
    if ready:
        quorum.came()
    expected = slots.expected()
    # The slots from 0 are the job's workers, those beyond are its spares. Of several hosts' any may have a head.
    config = job.env.config
    first = config.slots if config.hosts.span > 1 else config.workers
    willing = [w for w in ready if w.key.worker_id < first]
    all_there = len(willing) >= expected or (bool(slots.lost) and len(ready) >= expected)
    if all_there and expected >= slots.least:
        some = willing if len(willing) >= expected else ready
        make_now(job, some[:expected], Why(Cause.STARTED, "all workers are there"), fresh=True)
    elif quorum.patient:
        quorum.give_time()
    elif quorum.anybody and len(ready) >= slots.least:
        some = ready[: slots.target]
        text = f"{len(some)} of {slots.target} workers came within {START_PATIENCE_NS // SECOND_NS} s"
        make_now(job, some, Why(Cause.STARTED, text), fresh=True)


def _regroup(job: JobState) -> None:
    agreement, slots = job.agreement, job.slots
    if job.membership.in_grace and any(agreement.in_any_plan(w.key) for w in job.membership.to_come()):
        # Who is not back yet may follow a newer plan than the journal knows, or have switched to the prepared one.
        return  # first of all, so that a thousand who come back need not look at a thousand members each
    survivors = agreement.survivors()
    if any(job.agents.out_of_touch(worker) for worker in survivors):
        return
    cause, text = agreement.broken[0].cause, "; ".join(why.reason for why in agreement.broken)
    if not survivors:
        _fall_back(job, Why(cause, text))
        return
    needed = _as_before(job) if job.env.config.on_failure == "wait" else slots.least
    lost = stages_lost(agreement, [w.key.worker_id for w in survivors])
    if job.saving.ending is not None and not lost:  # they only save their state
        needed = agreement.plan.stages
    members = survivors + _newcomers(job, len(survivors), needed, lost)
    if len(members) < needed and job.saving.ending is not None:
        job.saving.end_with("no checkpoint: too few workers are left")
        return
    if len(members) < needed:
        policy = "on_failure is 'wait'" if needed > slots.least else "min_workers is the least the job may run with"
        text = f"{text}. {len(members)} of {needed} workers are ready ({policy}): waiting for more"
        job.quorum.wait_for(Why(cause, text), job.progress.step, agreement.generation)
        return
    if len(members) > len(survivors):
        newcomers = [w.key.worker_id for w in members[len(survivors) :]]
        text += f"; worker {listed(newcomers)} takes part from here"
    if lost and agreement.plan.stages > 1:
        text += f"; stage {listed(lost)} has lost its whole pool: every stage goes back to the newest copy"
    elif lost:
        text += "; no worker holds the training state any more: back to the newest copy"
    domain = job.agents.whereabouts.lost_domain((name, agent.host) for name, agent in job.agents.known.items())
    text = f"{domain}: {text}" if domain else text
    if not agreement.entered:  # stages that were to be restored before may still be nowhere
        lost = sorted({*lost, *job.progress.lost_stages})
    make_now(job, members, Why(cause, text), fresh=False)
    job.progress.lose(lost)


def _as_before(job: JobState) -> int:
    """As many members as the plan has, as far as they are wanted and their slots were not given up. More may be wanted
    than the hosts have room for: nobody waits for those."""
    return max(job.slots.least, min(job.slots.expected(), len(job.agreement.plan.members)))


def _newcomers(job: JobState, survivors: int, needed: int, lost: Sequence[int]) -> list[Worker]:
    """Joiners that are taken in at once: those with little to copy; others only if there would be too few members. A
    joiner that follows a stage without any other holder comes first, because it saves all members from going back."""
    room = max(0, job.slots.target - survivors)
    ready = candidates(job)
    saving = [w for w in ready if followed(job, w) & set(lost)]
    small = [w for w in ready if 0 <= w.state_bytes <= SMALL_STATE_BYTES and w not in saving]
    large = [w for w in ready if w not in small and w not in saving]
    chosen = (saving + small)[:room]
    if survivors + len(chosen) < needed:
        return (chosen + large)[:room]
    wanted = max(len(lost), needed - survivors) if survivors < needed or lost else 0
    return chosen + large[: max(0, min(wanted, room) - len(chosen))]


def _fall_back(job: JobState, why: Why) -> None:
    """No worker holds the state of the plan now: start over with the workers that come, from the newest copy
    that is left."""
    if job.saving.ending is not None:
        job.saving.end_without_workers()
        return
    slots, quorum = job.slots, job.quorum
    quorum.start_over()
    # A joiner that follows the members is the next best: it may even have switched with them already.
    ready = sorted(candidates(job), key=lambda w: -_held_step(job, w))
    if ready:
        quorum.came()
    wait_for_all = job.env.config.on_failure == "wait"
    expected = _as_before(job) if wait_for_all else max(slots.least, slots.expected())
    enough = len(ready) >= expected or (len(ready) >= slots.least and not quorum.patient and not wait_for_all)
    text = f"no worker holds the training state any more ({why.reason}): "
    generation = job.agreement.generation
    if not enough:
        why = Why(why.cause, f"{text}waiting for workers to start over")
        quorum.wait_for(why, job.progress.step, generation)
        if quorum.patient:
            quorum.give_time()
        return
    step = _held_step(job, ready[0])
    if step:
        text += f"worker {ready[0].key.worker_id}, which had healed, goes on from step {step} or later"
    else:
        text += "starting over from the newest copy that is left, or else from step 0"
    why = Why(why.cause, text)
    if not job.progress.fall_back(step):
        job.env.report("fallback", why, step=step or None, generation=generation + 1)
    make_now(job, ready[: slots.target], why, fresh=True)


def _held_step(job: JobState, worker: Worker) -> int:
    """The step that a worker outside the plan is known to hold; 0 unless it has said that it has healed, and of whole
    stages."""
    join = job.healing.healed(worker.key)
    parts = bool(job.env.config.wish.copies) and (join is None or bool(join.parts))
    return worker.step if followed(job, worker) and not parts else 0


def narrow_cells(job: JobState) -> bool:
    """Where the hosts that are left, with those that take a lost one's place, have room for more of the workers if each
    has fewer hosts: have their next lives on fewer. Returns whether it is so."""
    agreement, cells = job.agreement, job.slots.cells
    if not agreement.broken or job.membership.in_grace or cells.hosts == 1:
        return False
    job.share_out()
    slots = [job.slots.left(name) for name, agent in job.agents.known.items() if not agent.draining]
    rooms = {n: count_cells(slots, n, job.slots.target) for n in range(1, cells.hosts + 1)}
    hosts = max(rooms, key=lambda n: (rooms[n], n))
    if hosts == cells.hosts or not rooms[hosts]:
        return False
    why = agreement.broken[0]
    text = f"{hosts} of the {cells.hosts} hosts that each worker has are left"
    if rooms[cells.hosts] or sum(map(bool, slots)) > hosts:
        room = f"{rooms[cells.hosts]} of {job.slots.target} workers over {cells.hosts} hosts each"
        text = f"what is left has room for {room}, and for {rooms[hosts]} over {hosts}"
    alive = {worker.key.worker_id for worker in agreement.survivors()}
    said = Why(why.cause, f"{text}: {why.reason}")
    cells.narrow(hosts, agreement.plan.worker_ids, alive, said, job.progress.step)
    return True


def quorum_due(job: JobState, about: Any) -> None:
    """Give up if too few workers came for too long; members that are left save their state first."""
    agreement, waiting = job.agreement, job.quorum.waiting
    if (agreement.plan is not NO_PLAN and not agreement.broken) or not job.quorum.over():
        return
    if job.quorum.patient and len(candidates(job)) >= job.slots.least:  # enough came; the others get a little time
        job.quorum.look_again()
        return
    if job.saving.ending is None and narrow_cells(job):
        job.quorum.begin()
        return
    waited_s = job.env.config.quorum_wait_ns / 1e9
    came = f"{len(candidates(job))} of {job.slots.expected()} workers came"
    text = f"gave up after waiting {waited_s:g} s for workers: {waiting.reason if waiting else came}"
    job.saving.end_after_saving("failed", Why(Cause.QUORUM, text), WORKERS_MISSING, job.env.config.save_ns)
