"""The promises: statements that must always be true, checked at every step of a simulation.

The checks watch the workers from outside and share no code with the machines under test.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from math import inf

import msgspec
from msgspec.structs import astuple

from everstep.base.cause import Cause
from everstep.base.extents import NONE
from everstep.base.plan import Plan, WorkerKey
from everstep.base.ports import Tag
from everstep.placement.shards import share
from everstep.protocol.driver.records import AgreePayload, committed_unix_ns, decode_holding, decode_record, last_states
from everstep.protocol.settling import sound_limit
from everstep.protocol.step_types import Holding, Key, Record
from everstep.sim.model import (
    BLOCKS,
    Blocks,
    SimJob,
    SimReduced,
    by_unit,
    cut_anew,
    merged,
    planes_of,
    present,
    undisturbed,
    wrong,
)
from everstep.sim.promises import PromiseBroken, require
from everstep.sim.releases import Effects, GatherAnswers


class Vote(msgspec.Struct, frozen=True, array_like=True):
    """Vote of a member, in a record's payload: its contributions and its generation."""

    generation: int
    worker_id: int
    lanes: tuple[int, ...]  # stage times the number of lanes, plus lane
    sums: tuple[tuple[int, int], ...]  # stage times `BLOCKS`, plus block, and value of what it has of the gradient
    states: tuple[tuple[int, int], ...]  # stage and its state before the step


_agreed = lru_cache(maxsize=64)(msgspec.msgpack.Decoder(AgreePayload).decode)
_vote = msgspec.msgpack.Decoder(Vote)
_PROBED = -100
"""Numbers from here down stand for results of lanes that several workers have computed."""


class ToldTwice(Exception):
    """Another plan has the number of one that the journal has lost, and of which nobody had told the coordinator. What
    is checked by number means nothing from here on."""


class SimRecords:
    """Plans, and the records and holdings that members have contributed."""

    def __init__(self) -> None:
        self.plans: dict[int, Plan] = {}
        self.holdings: dict[int, dict[int, Holding]] = {}  # by generation and worker
        self.exchanged: dict[Key, dict[int, dict[int, Record]]] = {}  # by generation and worker
        self._votes: dict[bytes, Vote] = {}
        self._judged: set[tuple[int, tuple[bytes, ...]]] = set()
        self._forgotten: float = inf
        self._unknown: set[int] = set()
        self._entered = self._written = self._settled = 0

    def forget(self, known: Collection[int]) -> None:
        """The journal has the plans of these generations alone: others may get the numbers that follow, and what a
        lost plan said of states is known again once the journal has that plan from a worker."""
        self._forgotten = min(self._forgotten, 1 + max(known, default=0))
        self._unknown |= self.plans.keys() - set(known)
        self._settled = 0

    @property
    def forgetful(self) -> bool:
        """Whether the journal has lost entries."""
        return self._forgotten < inf

    def journaled(self, generation: int) -> None:
        self._unknown.discard(generation)
        self._written = max(self._written, generation)

    @property
    def newest(self) -> int:
        """The newest generation that was sent, or that a journal has though its coordinator died before it sent it."""
        return max(self._written, max(self.plans, default=0))

    def plan(self, plan: Plan) -> None:
        known = self.plans.get(plan.generation)
        if known is None:
            self.plans[plan.generation] = plan
            self._new_plan(plan)
        elif known != plan and plan.generation >= self._forgotten:
            raise ToldTwice
        elif known != plan:
            raise PromiseBroken(f"P3: two plans of generation {plan.generation}: {known} and {plan}")

    def entered(self, generation: int) -> None:
        self._entered = max(self._entered, generation)

    def settled(self, generation: int) -> None:
        """A coordinator has heard that members settled in this generation, and everything that it wrote by then is in
        the journal."""
        self._settled = max(self._settled, generation)

    def doubted(self) -> None:
        """A worker reports a doubt, which may be another one."""
        self._settled = 0

    def clear(self) -> None:
        """Another run of the job begins; its generations count from 1."""
        self._entered = self._written = self._settled = 0
        self._unknown.clear()
        self.plans.clear()
        self.holdings.clear()
        self.exchanged.clear()
        self._judged.clear()

    def _new_plan(self, plan: Plan) -> None:
        require(bool(plan.members) and plan.generation >= 1, "P3", f"no members, or not a generation, in {plan}")
        for stage in range(plan.stages):
            pool = plan.pool(stage)
            lanes = sorted(lane for seat in pool for lane in seat.lanes)
            if lanes != list(range(plan.lanes)):
                raise PromiseBroken(f"P3: lanes {lanes} in {plan}")
            if not {plan.leader(stage), *(s.worker_id for s in pool)} <= set(plan.worker_ids):
                raise PromiseBroken(f"P3: a stranger leads or has a seat in {plan}")
        known = {n for n in self.plans.keys() - self._unknown if not self.plans[n].prepared}
        before = max((number for number in known if number < plan.generation), default=0)
        doubt = self.plans[before].sound if before else -1
        closed = doubt < 0 or self._entered >= before or 0 <= plan.sound <= doubt or plan.prepared
        if not closed:
            raise PromiseBroken(f"P1: states after step {doubt} are in doubt since generation {before}, not in {plan}")
        settled = self.plans[self._settled].sound if self._settled else -1
        over = settled >= plan.sound >= 0
        require(not over, "P2", f"members had settled behind step {settled} in {self._settled}, and go back in {plan}")

    def contributed(self, generation: int, tag: Tag, worker_id: int, payload: bytes) -> None:
        """A member gives its record for a decision of this generation."""
        if tag.kind == "decide":
            made = self.exchanged.setdefault(Key(tag.step, tag.seq), {})
            made.setdefault(generation, {})[worker_id] = decode_record(payload)

    def made_in(self, generation: int, key: Key, records: Mapping[int, Record]) -> int:
        """The newest generation, up to this one, whose members have contributed exactly these records."""
        for made_in, given in sorted(self.exchanged.get(key, {}).items(), reverse=True):
            if made_in <= generation and given == records and tuple(sorted(given)) == self.plans[made_in].worker_ids:
                return made_in
        given_in = {g: sorted(given) for g, given in self.exchanged.get(key, {}).items()}
        raise PromiseBroken(
            f"P3: {key} decided in generation {generation} with records of {sorted(records)}, "
            f"but those of one generation are from {given_in}"
        )

    def are_new(self, made_in: int, records: Mapping[int, Record]) -> bool:
        """Whether nobody has decided from these records yet: those of others need no second look."""
        said = made_in, tuple(records[i].payload for i in sorted(records))
        new = said not in self._judged
        self._judged.add(said)
        return new

    def vote(self, payload: bytes) -> Vote:
        found = self._votes.get(payload)
        if found is None:
            found = _vote.decode(_agreed(payload).sections[0].buffers[0])
            self._votes[payload] = found
        return found

    def stated(self, generation: int, worker_id: int, payload: bytes) -> None:
        self.holdings.setdefault(generation, {})[worker_id] = decode_holding(payload)

    def compared(self, records: Mapping[int, Record]) -> bool:
        """Whether all members told the digests of their states before the step."""
        return all(section.digest for r in records.values() for section in _agreed(r.payload).sections)

    def said(self, key: Key, records: Mapping[int, Record]) -> dict[int, set[str]]:
        """Digests that members compare in a decision, by stage; below zero those of the model's settings, and of lanes
        that several have computed."""
        agree = (section for r in records.values() for section in _agreed(r.payload).sections)
        said: dict[int, set[str]] = {}
        for section in chain.from_iterable(last_states(records).values()) if key.seq else agree:
            said.setdefault(section.stage, set()).update({section.digest} - {""})
            said.setdefault(~section.stage, set()).update({section.settings.hex()} - {""})
            for lane, parts in section.probes.items():
                for part, one in parts.items():
                    for what, digest in enumerate(astuple(one)):
                        said.setdefault(_PROBED - 5 * (lane * 100 + part) - what, set()).add(digest)
        return said

    def copies(self, records: Mapping[int, Record]) -> dict[int, set[int]]:
        """States of all copies of each stage before the step."""
        copies: dict[int, set[int]] = {}
        for record in records.values():
            for stage, state in self.vote(record.payload).states:
                copies.setdefault(stage, set()).add(state)
        return copies


class Taint:
    """P1, with flipped bits: no member builds on a state that a comparison can show to be wrong, and all go back behind
    it.

    flipped: a bit has flipped. found: a comparison has shown it. unnoticed: all copies of every stage were alike in a
    comparison, and some were wrong: then nobody can know.
    """

    def __init__(self, records: SimRecords) -> None:
        self.records = records
        self.flipped = self.found = self.unnoticed = False
        self._alike: dict[tuple[int, int], set[str]] = {}  # by step and stage

    def flip(self) -> None:
        self.flipped = True

    def accept(self) -> None:
        """A state that differs from the undisturbed run was there from the first step: nobody can know."""
        self.unnoticed = True

    def applies(self, who: WorkerKey, step: int, records: Mapping[int, Record]) -> None:
        """A worker is about to apply a step, decided by these records."""
        for stage, digests in self.records.said(Key(step, 0), records).items():
            alike = stage > _PROBED or len(digests) == 1
            if not alike:
                raise PromiseBroken(f"P1: {who} applies step {step}, of which members have computed a lane otherwise")
            self._alike.setdefault((step - 1, stage), set()).update(digests)
        if not self.records.compared(records):
            return
        copies = self.records.copies(records)
        differing = sorted(stage for stage, states in copies.items() if len(states) > 1)
        if differing:
            raise PromiseBroken(f"P1: {who} applies step {step}, before which stages {differing} differ: {copies}")
        self.unnoticed = self.unnoticed or any(map(wrong, set().union(*copies.values())))

    def invalidated(self, who: WorkerKey, sound: int) -> None:
        """A worker has found that states after this step are void."""
        shown = any(
            key.step >= sound + (not key.seq)
            and tuple(sorted(given)) == self.records.plans[generation].worker_ids
            and self._differ(key, given, made.values() if key.seq else ())
            for key, made in self.records.exchanged.items()
            for generation, given in made.items()
        )
        require(
            shown or self.unnoticed, "P1", f"{who} finds states after step {sound} tainted, but all copies are alike"
        )
        self.found = True

    def _differ(self, key: Key, given: Mapping[int, Record], earlier: Iterable[Mapping[int, Record]]) -> bool:
        """Whether digests differ among these records, or from earlier ones of the same state. earlier: decisions of
        other generations about the job's last state, which no step has applied."""
        said, step = self.records.said(key, given), key.step if key.seq else key.step - 1
        known = {k: set(self._alike.get((step, k), ())) for k in said}
        for records in earlier:
            for k, digests in self.records.said(key, records).items():
                known.setdefault(k, set()).update(digests)
        return any(len(digests | known[k]) > 1 for k, digests in said.items())

    def last(self, states: Mapping[int, Blocks], plan: Plan, agreed: Mapping[int, str]) -> None:
        """The result is written by a worker that holds these stages. Nobody can know that a stage is wrong if it has no
        other holder, or if all holders have stated the digest of a wrong state (`agreed`): one of them has lost its
        own, and copied the other's."""
        spoilt = [stage for stage, state in states.items() if wrong(state)]
        stated = {stage for stage in spoilt if agreed.get(stage) and wrong(int(agreed[stage], 16))}
        alone = all(len(plan.pool(stage)) == 1 or stage in stated for stage in spoilt)
        self.unnoticed = self.unnoticed or (alone and bool(spoilt))

    def went_back(self, who: WorkerKey, generation: int, step: int, held: Mapping[int, Blocks]) -> bool:
        """Check a return. If a member of the generation knew of taint, all go back behind it. Once a plan or a member
        has reported taint, nobody goes on from a wrong state. Returns whether a member knew."""
        sound = sound_limit(self.records.holdings.get(generation, {}))
        told = any(plan.sound >= 0 for number, plan in self.records.plans.items() if number <= generation)
        if sound is not None or told:
            seats = self.records.plans[generation].stages_of(who.worker_id)  # other stages will be dropped
            spoilt = sorted(stage for stage in seats if stage in held and wrong(held[stage]))
            right = not spoilt or self.unnoticed
            require(right, "P1", f"{who} enters {generation} at step {step} with wrong states of stages {spoilt}")
        if sound is None:
            return False
        require(step <= sound, "P1", f"{who} enters {generation} at step {step}, tainted after {sound}")
        return True


class Exact:
    """P1: a worker's state, the copies that it gives and its results are those of the undisturbed run, unless a bit has
    flipped."""

    def __init__(self, job: SimJob, taint: Taint) -> None:
        self.job = job
        self.taint = taint
        self.states, self.made = undisturbed(job)
        self.over = False  # for what is not finite
        self._done: dict[WorkerKey, set[int]] = {}
        self.finals: list[dict[int, Blocks]] = []
        self.left: dict[WorkerKey, list[int]] = {}
        """Steps after which loops were left, of which other workers know nothing; the newest last."""
        self.ended_at = 0

    def cut_anew(self, job: SimJob) -> None:
        """Take the same states as stages of another cut of the model."""
        self.job, self.states = job, [cut_anew(states, job) for states in self.states]
        self.made = [cut_anew(states, job) for states in self.made]

    def state(self, who: WorkerKey, step: int, stage: int, state: Blocks) -> None:
        """A worker's state of a stage, every block that is there, is now that of `step`."""
        known = 0 <= step <= self.job.steps
        whole = self.states[step][stage] if known else ()
        right = known and (state == whole or wrong(state) or whole == merged(state, whole))
        if not right:
            raise PromiseBroken(f"P1: {who}: wrong state of stage {stage} at step {step}")

    def reduced(self, who: WorkerKey, step: int, stage: int, state: Blocks, gradient: SimReduced) -> None:
        """A worker holds the reduced gradient of `step`, computed from `state`."""
        after, made = self.job.updated(state, step, gradient), self.made[step][stage]
        right = wrong(after) or merged(after, made) == made
        if not right:
            raise PromiseBroken(f"P1: {who}: wrong gradient of stage {stage} in step {step}")

    def effect(self, step: int) -> int:
        """Entry that a step would write into the ledger: a function of the step."""
        return hash((step, by_unit(self.states[step])))

    def does(self, who: WorkerKey, step: int) -> None:
        """A worker carries out a step itself, and does not have its state from others or from disk. If it had gone
        beyond that step before, it has returned, and no longer knows what came then."""
        self._done[who] = {n for n in self._done.get(who, ()) if n < step} | {step}

    def goes_on(self, who: Collection[WorkerKey], step: int) -> None:
        """These have more to do after this step, or are through with it. That it was the end is known to who has done
        it: to the others it may be the step with which an earlier run of the job has ended."""
        known = [one for one in who if step in self._done.get(one, ())] if self.job.ends_with(step) else []
        if known:
            raise PromiseBroken(f"P1: {known} go on after step {step}, by which the job ends for what is not finite")

    def ends(self, who: WorkerKey, step: int) -> None:
        """An application is told that the job ends with its state, for what is not finite."""
        require(self.job.ends_with(step), "P1", f"{who} ends the job with step {step}")
        self.over = True

    def stands(self, who: WorkerKey, step: int, at: int) -> None:
        """An application is told that the state is that of `step`."""
        if step != at:
            raise PromiseBroken(f"P1: {who} is told of step {step}, its state is that of {at}")

    def final(self, who: WorkerKey, step: int, states: Mapping[int, Blocks]) -> None:
        """The job's leader wrote the result, of all stages."""
        right = step == self.job.last or self.left.get(who, [-1])[-1] == step
        require(right, "P1", f"{who} finished at step {step} of {self.job.last}")
        require(
            states.keys() == set(range(self.job.stages)), "P1", f"{who} finished with stages {sorted(states)} alone"
        )
        self.ended_at = step
        self.goes_on([who], step)
        for stage, state in states.items():
            self.state(who, step, stage, state)
            require(None not in state, "P1", f"{who} finished without blocks of stage {stage}")
            unnoticed = wrong(state) and not self.taint.unnoticed
            require(not unnoticed, "P1", f"{who} finished with a wrong state of stage {stage}")
        self.finals.append(dict(states))

    def saved(self, step: int, states: Mapping[int, Blocks]) -> None:
        right = states.keys() == self.states[step].keys() and all(
            wrong(state) or state == self.states[step][stage] for stage, state in states.items()
        )
        require(right, "P1", f"the checkpoint of step {step} holds {states}")


@dataclass(frozen=True)
class Views:
    """Views of the workers. `holders`: (step, part of the state) that live, reachable workers which follow some plan
    have, or would have with one more decision; `position`: of a live worker that follows one; `settled`: of the live
    workers that have entered a generation."""

    holders: Callable[[], Mapping[WorkerKey, Collection[tuple[int, tuple[int, int]]]]]
    position: Callable[[WorkerKey], Key | None]
    settled: Callable[[int], Mapping[WorkerKey, Key]]


class Checks:
    """The promises, over one simulation: each by itself, and here the checks that concern several of them."""

    def __init__(self, job: SimJob, views: Views) -> None:
        self.job = job
        self.views = views
        self.records = SimRecords()
        self.taint = Taint(self.records)
        self.exact = Exact(job, self.taint)
        self.effects = Effects()
        self.answers = GatherAnswers()
        self.lost_everything = 0
        self.given_up: set[WorkerKey] = set()
        self._excused: dict[tuple[int, WorkerKey], bool] = {}  # by term of the coordinator that gave it up
        self.newest = 0  # newest generation that a worker has entered

    def decision(self, generation: int, key: Key, records: Mapping[int, Record], handed: bool, now_ns: int) -> None:
        """A worker took a decision; `handed`: with records of an older generation that a peer gave it."""
        made_in = self.records.made_in(generation, key, records)
        fits = made_in <= generation if handed else made_in == generation
        if not fits:
            raise PromiseBroken(f"P3: {key} decided in generation {generation} with records of {made_in}")
        self.together(generation)
        plan = self.records.plans[made_in]
        needed = key.step if key.seq else key.step - 1
        stale = made_in < self.newest  # members may have returned since: their records show where they were
        there = [] if stale else [(m.key, self.views.position(m.key)) for m in plan.members]
        behind = [who for who, at in there if at is not None and at.step < needed]
        if behind:
            raise PromiseBroken(f"P2: {key} was decided while members {behind} had not decided step {needed}")
        if self.records.are_new(made_in, records):
            self._check_records(made_in, key, records, now_ns)
        if key.seq == 0:
            self.exact.goes_on([m.key for m in plan.members], key.step - 1)
            self.effects.commit(key.step)

    def _check_records(self, made_in: int, key: Key, records: Mapping[int, Record], now_ns: int) -> None:
        """Check what the records of a decision say."""
        plan, committed_ns = self.records.plans[made_in], committed_unix_ns(records, key.seq == 0)
        require(committed_ns <= now_ns, "P6", f"{key} follows a commit at {committed_ns}")
        if key.seq == 0:
            votes = [self.records.vote(r.payload) for r in records.values()]
            stale_votes = [v for v in votes if v.generation != made_in]
            require(not stale_votes, "P3", f"{key}, made in {made_in}, bears {stale_votes}")
            who = tuple(sorted(v.worker_id for v in votes))
            require(who == plan.worker_ids, "P3", f"{key} decided by {who}, the plan says {plan.worker_ids}")
            lanes = sorted(lane for v in votes for lane in v.lanes)
            needed_lanes = list(range(self.job.lanes * self.job.stages))
            require(lanes == needed_lanes, "P2", f"step {key.step} committed with lanes {lanes}")
            sums = {one for v in votes for one in v.sums}
            blocks = sorted(at for at, _ in sums)
            wanted = list(range(self.job.stages * BLOCKS))
            require(blocks == wanted, "P1", f"step {key.step}: gradients differ or are missing")

    def entered(self, who: WorkerKey, generation: int, step: int, held: Mapping[int, Blocks]) -> None:
        """A worker goes on in a generation from the state of `step`, of which it holds these stages."""
        self.newest = max(self.newest, generation)
        self.records.entered(generation)
        plan = self.records.plans[generation]
        seats = plan.stages_of(who.worker_id)
        shares = {k: share(plan.shard(who.worker_id, k), planes_of(held[k])) for k in seats if k in held}
        missing = {k for k in seats if k not in held or not present(held[k]).covers(shares[k])}
        require(not missing, "P1", f"{who} enters {generation} at step {step} without stages {sorted(missing)}")
        self.together(generation)
        if step == 0:
            self._first_state(who, generation, held)
        if self.job.stages > 1:
            self._newest_possible(who, generation, step)
        floor = self.effects.floor
        if self.taint.went_back(who, generation, step, held):
            self.effects.back(step)
            return
        if step >= floor or generation < self.newest:  # a sleeper gets nowhere in an old generation
            return
        gone_on = self.views.settled(generation)  # workers that entered earlier may have come to later steps since
        heard = self._counted_on(generation) - self.given_up - gone_on.keys()
        holders = {k: held for k, held in self.views.holders().items() if k in heard}
        there = {one for held in holders.values() for one in held if one[0] >= floor}
        kept = sorted(
            {at for at, _ in there if all((at, part) in there for part in self.job.parts(self.exact.states[at]))}
        )
        require(
            not kept,
            "P2",
            f"{who} enters {generation} at step {step}, {floor} was released and {kept} are held: {holders}",
        )
        self.lost_everything += 1

    def remembered(self, who: WorkerKey, generation: int, step: int, said: bool) -> None:
        """A worker says whether members have stated that they have the state of a step in memory."""
        stated = self.records.holdings.get(generation, {}).values()
        there = any(step in (h.position.step, *(at for _, at in h.snapshots)) for h in stated)
        require(said == there, "P2", f"{who} says that step {step} is in memory: {said}, and it is: {there}")

    def proven(
        self,
        who: WorkerKey,
        step: int,
        at: int,
        disk: Mapping[int, Mapping[int, Blocks]],
        all_wrong: Callable[[int], bool],
    ) -> None:
        """A worker says that states up to a step are proven, and enters a generation at another one. all_wrong: whether
        a stage's copies are all wrong, as they are where a lane was computed with a flipped bit: nobody can know."""
        require(step <= at, "P1", f"{who} at step {at} says that step {step} is proven")
        spoilt = [
            n for n, parts in disk.items() if n <= step and any(wrong(s) and not all_wrong(k) for k, s in parts.items())
        ]
        right = not spoilt or self.taint.unnoticed
        require(right, "P1", f"{who} says that step {step} is proven, checkpoints {spoilt} are wrong")

    def _counted_on(self, generation: int) -> set[WorkerKey]:
        """Members of this plan and of those before it that were in force, down to one by which workers left as asked.
        A joiner of a prepared plan that never came into force, or one that has left, may hold state that the
        coordinator does not know of."""
        found: set[WorkerKey] = set()
        plan = self.records.plans[generation]
        while True:
            found |= {m.key for m in plan.members}
            earlier = [n for n, p in self.records.plans.items() if n < plan.generation and (p.previous or n == 1)]
            before = plan.previous if plan.previous in self.records.plans else max(earlier, default=0)
            if not before or plan.cause in (Cause.SCALED, Cause.DRAINED, Cause.PREEMPTED):
                return found
            plan = self.records.plans[before]

    def _newest_possible(self, who: WorkerKey, generation: int, step: int) -> None:
        """Check that members go back no further than their holdings require, and only to states that exist."""
        plan, said = self.records.plans[generation], self.records.holdings[generation]
        limit = sound_limit(said)

        def there(at: int, stage: int) -> bool:
            top = limit is None and any(h.position == Key(at, 0) and h.records for h in said.values())
            live = any(
                h.live(stage).whole
                and (h.position.step == at or (top and h.gradients.get(stage, NONE).whole and h.gradient_step == at))
                for h in said.values()
            )
            pool = [s.worker_id for s in plan.pool(stage)]
            return live or all(at in said[i].disk for i in pool) or self._in_parts(said, at, stage, rolls=top)

        steps = range(1 + (self.job.steps if limit is None else limit))
        newest = max(at for at in steps if at == 0 or all(there(at, k) for k in range(plan.stages)))
        require(step == newest, "P2", f"{who} enters {generation} at step {step}; the newest in all is {newest}")

    def _in_parts(self, said: Mapping[int, Holding], at: int, stage: int, *, rolls: bool) -> bool:
        """Whether the members' parts of a stage at a step are together all of it. rolls: a member that has its gradient
        may take that step."""
        live = [h.live(stage) for h in said.values() if h.position.step == at]
        if rolls and self.job.copies:
            takes = [(h.gradients.get(stage, NONE), h) for h in said.values() if h.gradient_step == at]
            live += [blocks for blocks, h in takes if h.position.step == at - 1 and h.live(stage).covers(blocks)]
        kept = [h.kept(stage, at) for h in said.values()]
        whole = self.exact.states[at][stage]
        blocks = {k for part in live + kept for lo, hi in part.spans(planes_of(whole)) for k in range(lo, hi)}
        return len(blocks) == len(whole)

    def resumed(self, stages: int) -> None:
        """The job was started again, in so many stages: states of old processes are gone, and their records void."""
        if stages != self.job.stages:
            self.job = self.job.cut(stages)
            self.exact.cut_anew(self.job)
        self.records.clear()
        self.newest = 0
        self.effects.back(0)

    def _first_state(self, who: WorkerKey, generation: int, held: Mapping[int, Blocks]) -> None:
        """Check that each worker begins with the common initial state, unless members had begun with the other one
        before, or most of them have built it."""
        seats, said = self.records.plans[generation].stages_of(who.worker_id), self.records.holdings.get(generation, {})
        for stage, state in ((k, held[k]) for k in seats if k in held):
            if not wrong(state) or self.taint.flipped:
                continue
            stated = [h for _, h in sorted(said.items())]
            first = [h.first[stage] for h in stated if stage in h.first][:1]
            counts = [int(one, 16) & 1 for one in first or [h.built[stage] for h in stated if stage in h.built]]
            most = 2 * sum(counts) - len(counts)
            known = most > 0 or (most == 0 and counts[:1] == [1])
            require(known, "P1", f"{who} begins with another state of stage {stage} than all")
            self.taint.accept()

    def together(self, generation: int) -> None:
        """Check that the workers that have entered a generation are at most one decision apart."""
        positions = self.views.settled(generation)
        if not positions:
            return
        low, high = min(positions.values()), max(positions.values())
        by_gather = low.step == high.step and high.seq - low.seq <= 1
        by_update = low.step + 1 == high.step and high.seq == 0
        if not (by_gather or by_update):
            raise PromiseBroken(f"P1: members of generation {generation} are apart: {positions}")

    def given_up_by(self, term: int, who: WorkerKey, *, excused: bool) -> None:
        """A coordinator says that a life is over; this counts when it is journaled.

        excused: the life is said to be lost, and other members are left, as far as the coordinator can know, or only
        its host has been silent so long that it must be taken for gone. Then it is no loss.
        """
        self._excused[term, who] = excused

    def evicted(self, term: int, who: WorkerKey) -> None:
        """The journal has the eviction, though its writer may die before it tells anybody."""
        if self._excused[term, who]:
            self.given_up.add(who)

    def finish(self) -> None:
        """Check a job that is reported as completed."""
        require(bool(self.exact.finals), "P1", "completed without a result")
        missing = [s for s in range(1, self.exact.ended_at + 1) if s not in self.effects.effects]
        require(not missing, "P2", f"completed, but the effects of steps {missing} never left")
