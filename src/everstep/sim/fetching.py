"""How a simulated worker gets the state of a settling generation, and how a joiner follows the members."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from everstep.base.extents import NONE, WHOLE, Extents, Sizes
from everstep.base.plan import Plan, WorkerKey
from everstep.placement.shards import share
from everstep.protocol.driver import operations as do
from everstep.protocol.driver.records import decode_records
from everstep.protocol.moving import taker as moving
from everstep.protocol.moving.giver import JointAsk
from everstep.protocol.moving.taker import TakeOrder, following, orders
from everstep.protocol.step_types import Record
from everstep.sim.block_taking import SimTaking
from everstep.sim.copying import Memory, SimSaver, at_once
from everstep.sim.life import Life, SimCopy, updated
from everstep.sim.model import NOTHING, Blocks, SimReduced, joined, merged, planes_of, present, taken, without
from everstep.sim.world import MS, SimConnection

_Taking = do.Fetch | do.Restore | do.Finish


class Fetcher:
    """Gets the state order by order from others, then from its own copies, from disk, or from initial values. For a
    stage of which this worker has a part, it gets the rest. At the end the job's leader gets all that it writes."""

    def __init__(self, life: Life, memory: Memory, saver: SimSaver) -> None:
        self.life = life
        self.memory = memory
        self._saver = saver
        self._taking: SimTaking | None = None
        self._got: list[SimCopy] = []
        self._orders: list[TakeOrder] = []
        self._own: list[int] = []
        life.install({do.Fetch: self._fetch, do.Restore: self._restore, do.Finish: self._finish})
        life.install({("abort", kind): self._leave for kind in (do.Fetch, do.Restore, do.Finish)})

    def uses(self, connection: SimConnection) -> bool:
        """Whether the connection may still carry something for this."""
        return self._taking is not None and self._taking.uses(connection)

    def _restore(self, operation: do.Restore) -> None:
        self.life.site.went_back.append(operation.step)
        self._fetch(operation)

    def _finish(self, operation: do.Finish) -> None:
        self._saver.at_end(operation)
        self._fetch(operation)

    def _leave(self, operation: do.Operation, accused: tuple[int, ...], reason: str) -> None:
        self._stop()
        self.life.aborted(operation, accused, reason)

    def _damaged(self, operation: do.Restore, reason: str) -> None:
        self._stop()
        self.life.tainted(operation, reason)

    def _fetch(self, operation: _Taking) -> None:
        """Get these stages, then take them on, all or nothing."""
        me, sources, at = self.life.me.worker_id, operation.sources, operation.position
        self._got = []
        self._orders = orders(operation.plan, at, sources, operation.pieces, partial(at_once, self.life), me)
        theirs = {stage for order in self._orders for stage in order.stages}
        self._own = [stage for stage in sorted(sources) if stage not in theirs]
        self._next(operation)

    def _stop(self) -> None:
        """Stop all transfers; they are not wanted any more."""
        if self._taking is not None:
            self._taking.close()
            self._taking = None

    def _next(self, operation: _Taking) -> None:
        life = self.life
        if self._orders:
            self._take(operation, self._orders.pop(0))
        elif self._own and isinstance(operation, do.Restore):
            stage = self._own.pop(0)
            self._from_here(operation, stage, bool(operation.sources[stage]))
        else:
            life.during(operation, life.world.between(0, MS), self._install)

    # ---- this worker's own copies

    def _held(self, operation: _Taking, stage: int) -> Blocks:
        """Own blocks of the wanted state, live or kept."""
        step, state = operation.position.step, self.life.state
        live = state.stages.get(stage, NOTHING) if state.at == step else NOTHING
        kept = self.memory.kept.get((stage, step), NOTHING) if isinstance(operation, do.Restore) else NOTHING
        return merged(live, kept)

    def _claimed(self, operation: _Taking, stage: int) -> Extents:
        """Blocks of the wanted state that this worker claims to have, live. At a position gathers behind, it copies the
        later state. For the result it copies stages of others whole, whatever it has left of them. Of a step that it
        rolled to, and whose update was left out or made the state larger, it has more than it had said."""
        machine, wanted = self.life.driver.machine, operation.position
        left_out = bool(self.life.job.copies) and self.life.job.leaves_out(wanted.step)
        if (
            left_out
            or stage in self.life.state.grew
            or (
                isinstance(operation, do.Finish)
                or machine.step != wanted.step
                or (isinstance(operation, do.Fetch) and machine.position != wanted)
            )
        ):
            return NONE
        return machine.held.get(stage, NONE)

    def _from_here(self, operation: do.Restore, stage: int, memory: bool) -> None:
        """Take a stage from this worker's memory, from disk, or from initial values."""
        life, at = self.life, operation.position
        if memory and stage in operation.stands:
            copy = life.state.copy(at, operation.own, {}, (stage,))
        elif memory:
            copy = SimCopy(at, operation.own, {stage: self._held(operation, stage)})
            needed = share(operation.plan.shard(life.me.worker_id, stage), planes_of(copy.states[stage]))
            if not present(copy.states[stage]).covers(needed):  # lost since the holdings were stated
                said = f"stage {stage} of step {at.step} is not whole any more"
                life.during(operation, 0, self._refuse, said)
                return
        else:
            found = life.site.disk.read(stage, at.step) if at.step else life.state.built_anew(stage)
            if found is None:
                said = f"checkpoint {at.step} is damaged"
                life.during(operation, life.world.between(0, 5 * MS), self._damaged, said)
                return
            effects = ((at.step, life.site.checks.exact.effect(at.step)),) if at.step else ()  # perhaps untold yet
            copy = SimCopy(at, life.site.disk.records.get(at.step, {}), {stage: found}, effects)
        took = life.world.between(0, MS) if memory else life.world.between(MS, 20 * MS)
        life.during(operation, took, self._have, copy)

    def _have(self, operation: _Taking, copy: SimCopy) -> None:
        self._got.append(copy)
        self._next(operation)

    # ---- from peers

    def _take(self, operation: _Taking, order: TakeOrder) -> None:
        life, own = self.life, dict[int, Blocks]()
        if order.pieces is not None:  # perhaps more has been lost since the holdings were stated
            own = {k: without(self._held(operation, k), order.pieces.missing) for k in order.stages}
        dealt = bool(life.job.copies) and not isinstance(operation, do.Finish)
        needs = partial(_share, operation.plan if dealt else None, life.me.worker_id)
        taking = self._taking = SimTaking(
            life,
            order,
            lambda source, leads: ("settle", operation.generation, order.stages),
            own,
            lambda how: self._taken(operation, taking, how),
            needs=needs,
        )
        taking.begin()

    def _taken(self, operation: _Taking, taking: SimTaking, how: moving.TookAll | moving.TookNothing) -> None:
        life = self.life
        if life.operation is not operation or self._taking is not taking:
            return
        if isinstance(how, moving.TookNothing):
            if how.refused:
                self._refuse(operation, how.why)
            else:
                life.abort(operation, tuple(key.worker_id for key in how.lost), f"no copy: {how.why}")
            return
        for stage, took in taking.taken.items():
            if own := self._claimed(operation, stage) & took:
                raise AssertionError(f"{life.me} has copied what it had of stage {stage}: {own}")
        self._stop()
        if taking.offer is None:
            raise AssertionError(f"{life.me} has all blocks, and no records")
        self._have(operation, replace(taking.offer, states=dict(taking.states)))

    def _refuse(self, operation: _Taking, reason: str) -> None:
        self._stop()
        self.life.tainted(operation, reason, torn=False)

    # ---- the end

    def _install(self, operation: _Taking) -> None:
        life, position = self.life, operation.position
        wrong = [c.position for c in self._got if c.position != position]
        if wrong:
            raise AssertionError(f"{life.me} wants the state at {position} and got {wrong}")
        copies = sorted(self._got, key=lambda copy: min(copy.states))
        records = next((c.records for c in copies if c.records), {})
        gathers = next((c.gathers for c in copies if c.gathers), {})
        states = {k: state for c in copies for k, state in c.states.items()}
        lacking = [k for k, state in states.items() if None in state]
        if lacking and (not life.job.copies or isinstance(operation, do.Finish)):
            raise AssertionError(f"{life.me} takes on stages {lacking} without all of their blocks")
        if isinstance(operation, do.Finish):
            self._saver.finish(operation, states)
            return
        effects = tuple(sorted({effect for c in copies for effect in c.effects}))
        life.state.install(SimCopy(position, records, states, effects, gathers))
        anew = (
            []
            if position.step or isinstance(operation, do.Fetch)
            else [k for k, givers in operation.sources.items() if not givers]
        )
        first, parts = {k: life.state.first(k) for k in anew}, {k: planes_of(states[k]) for k in lacking}
        life.done(operation, do.Copied(records, gathers, first, parts))


_Gradients = Mapping[int, SimReduced]


@dataclass(eq=False)
class _Feed:
    """Some stages of a joiner: the blocks that it takes of them, and the steps that have come since. sources: those
    that feed together."""

    taking: SimTaking
    sources: int = 1
    whole: bool = False
    steps: dict[int, tuple[Mapping[int, Record], _Gradients]] = field(default_factory=dict)
    seen: list[int] = field(default_factory=list)  # 0: caught up
    _coming: dict[int, dict[WorkerKey, _Gradients]] = field(default_factory=dict)
    _idle: set[WorkerKey] = field(default_factory=set)

    def complete(self) -> None:
        """Note that all offered blocks have come."""
        self.whole = True

    def came(self, source: WorkerKey, step: int, records: Mapping[int, Record], gradients: _Gradients) -> None:
        """A source has fed a step."""
        self._idle.discard(source)
        of = self._coming.setdefault(step, {})
        of[source] = gradients
        if len(of) == self.sources:
            whole = {k: joined([one[k] for one in of.values()]) for k in gradients}
            self.steps[step] = (records, whole)
            self.seen.append(step)
            del self._coming[step]

    def idles(self, source: WorkerKey) -> None:
        self._idle.add(source)
        if len(self._idle) == self.sources and not self._coming:
            self.seen.append(0)
            self._idle.clear()


class Follower:
    """A joiner's feeds, and their steps."""

    def __init__(self, life: Life) -> None:
        self.life = life
        self.feeds: list[_Feed] = []
        self.broken = ""
        self._moved: set[int] = set()  # stages of which it has other segments than it follows
        life.install({do.OpenFeeds: self._open, do.CloseFeeds: lambda effect: self._stop()})
        life.install({do.Watch: lambda operation: self._look(), do.Adopt: self._adopt, do.Replay: self._replay})

    def uses(self, connection: SimConnection) -> bool:
        """Whether the connection may still carry something for this."""
        return any(feed.taking.uses(connection) for feed in self.feeds)

    def _open(self, operation: do.OpenFeeds) -> None:
        """Open a feed from the first reachable donor of each group; it is whole once all offered blocks came."""
        self._stop()
        for place, (donors, stages) in enumerate(operation.groups):
            keys, at_once = tuple(member.key for member in donors), min(self.life.site.donors, len(donors))
            joint = operation.joint[place] if operation.joint else {}
            in_parts = any(one.segments is not None for one in joint.values())
            order = following(stages, keys, 1 if joint else at_once, in_parts=in_parts)
            plan, me = operation.plan, self.life.me.worker_id
            taking = SimTaking(
                self.life,
                order,
                partial(_joins, stages, joint),
                {},
                partial(self._ended, place),
                partial(self._fed, place),
                partial(_share, plan, me),
            )
            self.feeds.append(_Feed(taking, len(donors) if joint else 1))
        for feed in self.feeds[:]:
            feed.taking.begin()

    def _stop(self) -> None:
        for feed in self.feeds:
            feed.taking.close()
        self.feeds, self.broken, self._moved = [], "", set()

    def _ended(self, place: int, how: moving.TookAll | moving.TookNothing) -> None:
        if isinstance(how, moving.TookNothing):
            self.broken = self.broken or how.why
        else:
            self.feeds[place].complete()
        self._look()

    def _fed(self, place: int, source: WorkerKey, message: tuple[Any, ...] | None) -> None:
        feed = self.feeds[place]
        match message:
            case ("step", step, records, gradients):
                feed.came(source, step, decode_records(records), gradients)
            case None:
                self.broken = self.broken or "the donor went away"
            case _:
                feed.idles(source)
        self._look()

    def _look(self) -> None:
        """Answer the operation that waits for the feeds, if there is something."""
        life = self.life
        operation = life.operation
        if isinstance(operation, do.OpenFeeds):
            offers = [f.taking.offer.position for f in self.feeds if f.whole and f.taking.offer is not None]
            if len(offers) == len(self.feeds):
                life.done(operation, tuple(offers))
            elif self.broken:
                life.abort(operation, (), self.broken)
        elif isinstance(operation, do.Watch):
            seen = [
                do.Seen(n, s, feed.steps[s][0] if s else {}) for n, feed in enumerate(self.feeds) for s in feed.seen
            ]
            for feed in self.feeds:
                feed.seen.clear()
            if seen:
                life.done(operation, tuple(seen))
            elif self.broken:
                life.abort(operation, (), self.broken)

    def _adopt(self, operation: do.Adopt) -> None:
        self.life.soon(MS // 2, 10 * MS, self._load, operation)

    def _replay(self, operation: do.Replay) -> None:
        life = self.life
        life.site.checks.taint.applies(life.me, operation.step, operation.records)
        life.soon(MS // 2, 3 * MS, self._apply, operation)

    def _load(self, operation: do.Adopt) -> None:
        """Load the offered states, brought to one position by the steps that have come."""
        states: dict[int, Blocks] = {}
        effects: dict[int, int] = {}
        newest: SimCopy | None = None
        for feed, passed in zip(self.feeds, operation.passed, strict=True):
            offer = feed.taking.offer
            if offer is None:
                raise AssertionError(f"{self.life.me} adopts what was not offered")
            copies, effects = dict(feed.taking.states), {**effects, **dict(offer.effects)}
            for outcome in passed:
                _, gradients = feed.steps.pop(outcome.step)
                copies = {k: updated(self.life.job, s, outcome, gradients[k]) for k, s in copies.items()}
                effects[outcome.step] = self.life.site.checks.exact.effect(outcome.step)
            if offer.position == operation.position:
                newest = offer
            states |= copies
        if newest is None:
            raise AssertionError(f"{self.life.me}: nobody has offered {operation.position}")
        copy = SimCopy(operation.position, newest.records, states, tuple(sorted(effects.items())), newest.gathers)
        self.life.state.install(copy, only=True)
        sizes = {k: planes_of(state) for k, state in states.items() if None in state}
        self.life.done(operation, do.Copied(newest.records, newest.gathers, sizes=sizes))

    def _apply(self, operation: do.Replay) -> None:
        """Apply the next step of all feeds."""
        gradients: dict[int, SimReduced] = {}
        for feed in self.feeds:
            gradients |= feed.steps.pop(operation.step)[1]
        if self.life.state.at != operation.step - 1:
            raise AssertionError(f"{self.life.me} at {self.life.state.at} is to replay {operation.step}")
        plan, me = operation.plan, self.life.me.worker_id
        parts = plan.divided_stages & gradients.keys()
        stages, job = self.life.state.stages, self.life.job
        grow = {k: job.grows(stages[k], operation.step) and not operation.outcome.nonfinite.left_out for k in parts}
        self._moved |= {k for k, grows in grow.items() if grows}
        takes = {k: NONE if k in self._moved else taken(plan, k, me, stages[k], grow[k]) for k in parts}
        self.life.state.apply(operation.outcome, operation.records, gradients, takes)
        self.life.done(operation, takes)


def _share(plan: Plan | None, me: int, stage: int, of: Sizes) -> Extents:
    """What a plan gives a worker of a stage; all without one."""
    return WHOLE if plan is None else share(plan.shard(me, stage), of)


def _joins(stages: tuple[int, ...], joint: Mapping[int, JointAsk], source: WorkerKey, leads: bool) -> tuple[Any, ...]:
    return "follow", stages, leads, joint.get(source.worker_id)
