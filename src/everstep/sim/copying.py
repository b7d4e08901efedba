"""Everything that a simulated worker keeps, writes and gives away.

As the driver says: snapshots in memory, checkpoints on disk and the result at the end; the shelf for settling members,
feeds for joiners. A donor acts like the threads of a real one: they read a shelf, and never ask the driver.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from everstep.base.cause import Cause, Why
from everstep.base.config_keys import MemoryTierConfig
from everstep.base.extents import NONE, WHOLE, Extents
from everstep.base.plan import WorkerKey
from everstep.placement.shards import fed_blocks
from everstep.placement.shards import share as share_of
from everstep.protocol.driver import operations as do
from everstep.protocol.driver.operations import AbandonSave, Save, SaveEnded
from everstep.protocol.driver.records import encode
from everstep.protocol.moving import giver
from everstep.protocol.moving import taker as moving
from everstep.protocol.moving.chunks import share
from everstep.protocol.moving.memory_retention import Retention, SnapshotKey
from everstep.protocol.moving.taker import orders
from everstep.protocol.step_types import Key, Record
from everstep.sim.block_taking import SimTaking
from everstep.sim.life import Life, SimCopy, nothing
from everstep.sim.model import (
    NOTHING,
    Blocks,
    SimReduced,
    digest,
    fed,
    is_early,
    merged,
    planes_of,
    present,
    segments_in,
    without,
    wrong,
)
from everstep.sim.promises import freed, require
from everstep.sim.world import MS, SimConnection

_MOST_BLOCKS = 6 * len(NOTHING)
NO_ROOM = Why(Cause.CONFIG, "there is no room")


class Memory:
    """One worker's snapshots: states by stage and step, as far as `Retention` keeps them."""

    def __init__(self, life: Life, donor: SimDonor) -> None:
        """donor: gives the newest ones away."""
        self.life = life
        self.donor = donor
        self.kept: dict[SnapshotKey, Blocks] = {}
        self._wanted: dict[tuple[int, ...], SimTaking] = {}  # others' that are on their way, by stages
        self._failed = self._full = False
        self._retention = Retention(MemoryTierConfig(), _MOST_BLOCKS)
        life.install({do.Keep: self._keep, do.RetireKept: self._retire, do.ForgetKept: self._forget})
        life.install({do.DropLanes: nothing})

    def lose(self, stage: int, number: int, lost: Extents) -> None:
        self.kept[stage, number] = without(self.kept[stage, number], lost)
        self._retention.lose(stage, number, lost)
        self.say()

    def _keep(self, effect: do.Keep) -> None:
        """Keep the state as it is, and some of other pools, which has to be copied."""
        life, number = self.life, effect.step
        for stage, value in life.state.stages.items():
            fits, gone = self._retention.make_room(stage, len(value))
            self._let_go(gone)
            if not fits or life.world.rng.random() < 0.05 or not self._put(stage, number, value):
                life.handle(do.NotKept(number, NO_ROOM))
                return
        kept = {k: SimCopy(Key(number, 0), {}, {k: value}) for k, value in life.state.stages.items()}
        self.donor.keeps(number, kept)
        self.say()
        self._failed = self._full = False
        several = partial(at_once, life)
        at, me = Key(number, 0), life.me.worker_id
        for order in orders(effect.plan, at, effect.sources, effect.pieces, several, me):
            asks, ended = ("kept", number, order.stages), partial(self._copied, number, order.stages)
            self._wanted[order.stages] = SimTaking(life, order, partial(_said, asks), {}, ended)
        for taking in list(self._wanted.values()):
            taking.begin()

    def _copied(self, number: int, stages: tuple[int, ...], how: moving.TookAll | moving.TookNothing) -> None:
        """Other pools'; or there is none."""
        taking = self._wanted.pop(stages)
        taking.close()
        self._failed = self._failed or isinstance(how, moving.TookNothing)
        for stage in stages if isinstance(how, moving.TookAll) else ():
            if not self._retention.there.get((stage, number), NONE).whole:
                self._full = not self._put(stage, number, taking.states[stage]) or self._full
        self.say()
        if not self._wanted:
            ended = do.NotKept(number, NO_ROOM) if self._full else do.OthersKept(number, not self._failed)
            self.life.handle(ended)

    def _put(self, stage: int, number: int, value: Blocks) -> bool:
        fits, gone = self._retention.put(stage, number, len(value), present(value))
        self._let_go(gone)
        if fits:
            self.kept[stage, number] = value
        return fits

    def _let_go(self, gone: Iterable[SnapshotKey]) -> None:
        for key in gone:
            del self.kept[key]

    def _retire(self, effect: do.RetireKept) -> None:
        """Drop snapshots older than a complete one, except the newest proven one."""
        self._let_go(self._retention.retire(effect.step, effect.proven))
        self.say()

    def _forget(self, effect: do.ForgetKept) -> None:
        """Drop later snapshots, which are void, and those that are on their way."""
        self.donor.keeps_nothing()
        wanted, self._wanted = self._wanted, {}
        for taking in wanted.values():
            taking.close()
        self._let_go(self._retention.forget(effect.after))
        self.say()

    def uses(self, connection: SimConnection) -> bool:
        """Whether something may still be sent or expected here."""
        return any(taking.uses(connection) for taking in self._wanted.values())

    def say(self) -> None:
        self.life.handle(do.InMemory(self._retention.there, self.donor.busy))


def at_once(life: Life, stages: Sequence[int], sources: int) -> int:
    """Number of sources that are asked at once."""
    return share(len(NOTHING), sources, most=life.site.donors, least_bytes=1)


def _said(asks: tuple[Any, ...], source: WorkerKey, leads: bool) -> tuple[Any, ...]:
    return asks


_GRACE_NS = 500 * MS


def _ended(number: int, wrong: str) -> SaveEnded:
    cost_s = None if wrong else 0.0001
    return SaveEnded(number, not wrong, wrong, "" if wrong else "disk", cost_s, differs=wrong == "parts differ")


class SimSaver:
    """Writes this worker's parts."""

    def __init__(self, life: Life) -> None:
        self.life = life
        self._given_up = 0  # how often the one that is incomplete was
        life.install({Save: self._save, AbandonSave: self._abandon, do.Invalidate: self._invalidate})
        life.install({do.SaveLast: self._save_last})
        life.install({do.Linger: lambda operation: life.soon(10 * MS, 2000 * MS, life.done, operation)})

    def _save(self, effect: Save) -> None:
        """Each worker copies what it holds; the job's leader hears when the last part is there."""
        life, number = self.life, effect.step
        me, disk = life.me.worker_id, life.site.disk
        for stage in effect.plan.stages_of(me):
            state = life.state.stages[stage]
            mine = share_of(effect.plan.shard(me, stage), planes_of(state))
            require(present(state).covers(mine), "P5", f"{life.me} saves step {number} without {mine} of stage {stage}")
        if effect.plan.leader(0) == me:
            disk.ask(number, life.me, lambda wrong: life.later(0, life.handle, _ended(number, wrong)))
        for stage in effect.plan.stages_of(me):
            life.soon(MS, 60 * MS, self._written, effect, stage, life.state.stages[stage], self._given_up)

    def _written(self, save: Save, stage: int, state: Blocks, given_up: int) -> None:
        """Write a part; a checkpoint that is given up before it is complete, or is invalidated, is dropped."""
        sound = self.life.driver.machine.sound
        if self._given_up == given_up and (sound < 0 or save.step <= sound):
            self.life.site.disk.write(stage, save, self.life.me.worker_id, state)

    def _abandon(self, effect: AbandonSave) -> None:
        self._given_up += 1
        self.life.site.disk.abandon(self.life.me)

    def _invalidate(self, effect: do.Invalidate) -> None:
        self.life.site.checks.taint.invalidated(self.life.me, effect.sound)
        self.life.site.disk.invalidate(effect.sound)

    # ---- the end

    def _save_last(self, operation: do.SaveLast) -> None:
        """The job's leader waits until all parts are there, within its limit."""
        life = self.life
        if operation.save is not None:
            self._save(operation.save)
            life.site.disk.saving.setdefault(operation.step, set()).add(life.me.worker_id)
            self._at_one_moment(operation, operation.save.past)
        if operation.plan.leader(0) == life.me.worker_id:
            life.later(_GRACE_NS, life.done, operation, "")
            self._saved(operation)
        else:
            life.soon(MS, 60 * MS, self._others_saved, operation)

    def _at_one_moment(self, operation: do.SaveLast, past: bool) -> None:
        """Check that what loops do between two steps has been done by all that save, or by none; but for a loop that
        has raised, was told to end, or was left while others go on. A worker that was healed at this step has its
        donor's state: it repeats what changes none."""
        staying = self.life.site.disk.staying
        if self.life.site.disk.came_at.get(self.life.me) == operation.step:
            return
        if operation.plan.cause is Cause.LEFT or any(member.key in staying for member in operation.plan.members):
            return
        first = self.life.site.disk.past.setdefault((operation.step, operation.generation), past)
        require(first == past, "P1", f"{self.life.me} saves step {operation.step}, past it: {past}; another: {first}")

    def _others_saved(self, operation: do.SaveLast) -> None:
        """Wait: no worker leaves before the job's leader has all parts."""
        if self._lacks_parts(operation):
            self.life.during(operation, 5 * MS, self._others_saved)
        else:
            self.life.done(operation, "")

    def _lacks_parts(self, operation: do.SaveLast) -> bool:
        """Whether parts are missing of members that have not come so far, or are still writing, and no plan has brought
        all of them there."""
        life, disk = self.life, self.life.site.disk
        there, written = disk.saving.get(operation.step, set()), disk.parts.get(operation.step, ())
        whole = there.issuperset(operation.plan.worker_ids) and len(written) == life.job.stages
        return not operation.plan.save and operation.save is not None and not whole

    def _saved(self, operation: do.SaveLast) -> None:
        life, disk = self.life, self.life.site.disk
        if len(disk.parts.get(operation.step, ())) < life.job.stages or self._lacks_parts(operation):
            life.during(operation, 5 * MS, self._saved)
            return
        life.site.checks.exact.saved(operation.step, disk.parts[operation.step])
        life.done(operation, "disk")

    def at_end(self, operation: do.Finish) -> None:
        if operation.save is not None and self.life.job.write_every:
            self._save(operation.save)

    def finish(self, operation: do.Finish, theirs: Mapping[int, Blocks]) -> None:
        """The job's leader writes the result: of its own stages, and of those that it has copied."""
        life = self.life
        leads = operation.plan.leader(0) == life.me.worker_id
        own = [k for k, there in life.driver.machine.held.items() if there.whole]  # not what it has left, or in part
        held = {k: life.state.stages[k] for k in own} | dict(theirs)
        agreed = {k: operation.digests.get(k, "") for k in held}
        for k, said in agreed.items() if leads else ():
            if said and said != format(digest(life.job.trained(held[k])), "x"):
                givers = () if k in life.driver.machine.held else operation.sources[k][:1]
                life.tainted(operation, f"stage {k} has changed since all had agreed on it", not givers, givers)
                return
        if leads:
            life.site.checks.taint.last(held, operation.plan, agreed)
            life.site.checks.exact.final(life.me, life.state.at, held)
        life.done(operation, leads)


@dataclass(eq=False)
class _Asker:
    """A conversation with a worker that wants state. items: steps that it gets once it has all blocks."""

    connection: SimConnection
    stages: tuple[int, ...] = ()
    generation: int = 0
    given: dict[int, SimCopy] | None = None
    had: bool = False
    items: list[tuple[Any, ...]] = field(default_factory=list)
    joint: giver.JointAsk | None = None

    def asks(self, stages: tuple[int, ...], generation: int, joint: giver.JointAsk | None = None) -> None:
        """Note the request."""
        self.stages, self.generation, self.joint = stages, generation, joint

    def gets(self, given: dict[int, SimCopy]) -> None:
        """Note the copies that it may have, by stage."""
        self.given = given

    def has_all(self) -> None:
        """Note that it has all blocks that it was given."""
        self.had = True


def asked_of(copy: SimCopy, joint: giver.JointAsk | None) -> SimCopy:
    """The part of a copy that a donor offers to who asks this of it."""
    if joint is None:
        return copy
    given = {k: fed_blocks(joint.segments, joint.rest, planes_of(state)) for k, state in copy.states.items()}
    return replace(copy, states={k: without(state, WHOLE - given[k]) for k, state in copy.states.items()})


class SimDonor:
    """Gives states away: to settling members from the shelf, to joiners at a step boundary and then step by step."""

    def __init__(self, life: Life) -> None:
        self.life = life
        self.memory = Memory(life, self)
        self.shelf: dict[int, SimCopy] | None = None  # by stage
        self.askers: list[_Asker] = []
        self._kept: dict[int, SimCopy] = {}
        self._giver = giver.Giver()
        life.install({do.Shelve: self._shelve, do.Unshelve: self._unshelve, ("door", "donor"): self._accept})
        life.install({do.OfferFeeds: self._offer, do.CutFeeds: lambda effect: self._tell(giver.WentElsewhere())})

    def uses(self, connection: SimConnection) -> bool:
        """Whether the connection may still carry something for this."""
        return any(connection is asker.connection for asker in self.askers)

    def _accept(self, connection: SimConnection) -> None:
        asker = _Asker(connection)
        self.askers.append(asker)
        connection.listen(self.life, lambda m: self._asked(asker, m), lambda: self._gone(asker))

    def _gone(self, asker: _Asker) -> None:
        self.askers.remove(asker)
        self._tell(giver.AskerGone(asker))

    def _asked(self, asker: _Asker, message: tuple[Any, ...]) -> None:
        match message:
            case ("follow", stages, leads, joint):
                asker.asks(stages, 0, joint)
                self._tell(giver.AskerCame(asker, stages, None, leads, joint))
                self.life.handle(do.FollowerAsked(joint))
            case ("settle", generation, stages):
                asker.asks(stages, generation)
                self._tell(giver.AskerCame(asker, stages, ("settle", generation)))
            case ("kept", number, stages):
                asker.asks(stages, 0)
                self._tell(giver.AskerCame(asker, stages, ("kept", number)))
            case ("blocks", stage, extents):
                self.life.soon(0, 10 * MS if asker.generation else 3 * MS, self._blocks, asker, stage, extents)
            case _:
                asker.has_all()
                self._tell(giver.AskerHasAll(asker))
                self._pass(asker)

    def _tell(self, event: giver.GiverEvent, given: Mapping[int, SimCopy] = {}, item: tuple[Any, ...] = ()) -> None:
        """Give the machine an event. given: copies of the present state, by stage. item: the step that is decided."""
        busy = self._giver.busy
        for effect in self._giver.handle(event):
            match effect:
                case giver.GiveState(asker, shelf):
                    there = self._kept if shelf == "kept" else self.shelf if shelf and self.shelf is not None else given
                    asker.gets({k: there[k] if shelf else asked_of(there[k], asker.joint) for k in asker.stages})
                    self.life.soon(0, 5 * MS if shelf else 0, self._head, asker)
                case giver.FeedStep(asker, stages):
                    step, records, gradients = item
                    early = {k: is_early(self.life.state.stages[k]) for k in stages}
                    parts = {k: fed(gradients[k], asker.joint, early[k]) for k in stages}
                    asker.items.append(("step", step, records, parts))
                    self._pass(asker)
                case giver.EndAsker(asker):
                    asker.connection.close(self.life)
                    self.askers.remove(asker)
                    self._giver.handle(giver.AskerGone(asker))
        if self._giver.busy != busy:
            self.memory.say()

    def _head(self, asker: _Asker) -> None:
        """Send the description of a copy, without the blocks."""
        copies = [asker.given[k] for k in asker.stages] if asker.given is not None else []
        if copies:
            there = {k: present(copy.states[k]) for k, copy in zip(asker.stages, copies, strict=True)}
            of = {k: planes_of(copy.states[k]) for k, copy in zip(asker.stages, copies, strict=True)}
            asker.connection.send(self.life, ("offer", replace(copies[0], states={}), there, of))

    def lose(self, stage: int, lost: Extents) -> None:
        """Blocks of the present state are gone, on the shelf, too."""
        if self.shelf is not None and stage in self.shelf:
            copy = self.shelf[stage]
            if copy.effects or not copy.position.step:
                self.shelf[stage] = replace(copy, states={stage: without(copy.states[stage], lost)})

    # ---- the shelf

    def _shelve(self, effect: do.Shelve) -> None:
        """Offer members of this generation the states at the position, live or kept."""
        state, kept = self.life.state, self.memory.kept
        step = effect.position.step
        copies = {
            stage: SimCopy(effect.position, effect.records, {stage: value})
            for (stage, at), value in kept.items()
            if at == step
        }
        if effect.live:
            for stage in effect.live:
                copy = state.copy(effect.position, effect.records, effect.gathers, (stage,))
                beside = copies[stage].states[stage] if stage in copies else NOTHING
                copies[stage] = replace(copy, states={stage: merged(copy.states[stage], beside)})
        self.shelf = copies
        self._tell(giver.ShelfFilled(("settle", effect.generation), frozenset(copies)))

    def _unshelve(self, effect: do.Unshelve) -> None:
        """Empty the shelf: nobody asks for it any more."""
        self.shelf = None
        self._tell(giver.ShelfEmptied("settle"))

    @property
    def busy(self) -> bool:
        """Whether a worker still copies a snapshot that is kept."""
        return self._giver.busy

    def keeps(self, number: int, copies: dict[int, SimCopy]) -> None:
        """Others may have these snapshots of a step, by stage, to keep them too."""
        self._kept = copies
        self._tell(giver.ShelfFilled(("kept", number), frozenset(copies)))

    def keeps_nothing(self) -> None:
        self._tell(giver.ShelfEmptied("kept"))

    def _blocks(self, asker: _Asker, stage: int, extents: Extents) -> None:
        """Send further blocks. A shelf's state must not have changed meanwhile, or the copy would be torn."""
        life = self.life
        if asker.given is None or not asker.connection.open:
            return
        copy = asker.given[stage]
        live = copy.effects or not copy.position.step
        if asker.generation > life.cut_to and asker.generation == life.driver.machine.generation:
            copy = self.shelf[stage] if self.shelf is not None and stage in self.shelf else copy
            if self.shelf is None or (live and (life.state.at != copy.position.step or self._differs(stage, copy))):
                raise AssertionError(f"{life.me} moved to {life.driver.machine.position} while it served {asker}")
        blocks = without(copy.states[stage], WHOLE - extents)
        if life.site.damaged and life.world.rng.random() < life.site.damaged:
            blocks = without(blocks, extents.first(1, planes_of(blocks)))
        asker.connection.send(life, ("blocks", blocks))

    def _differs(self, stage: int, copy: SimCopy) -> bool:
        """Whether a block has changed; a wrong one may have been repaired, or have come in a repair."""
        pairs = zip(copy.states[stage], self.life.state.stages.get(stage, copy.states[stage]), strict=True)
        return any(a != b for a, b in pairs if a is not None and b is not None and not wrong((a, b)))

    # ---- feeds

    def _offer(self, effect: do.OfferFeeds) -> None:
        """The state stands still: start the joiners that asked."""
        if not self._giver.waits(effect.tickets):
            return
        state, where = self.life.state, (effect.position, effect.records, effect.gathers)
        given = {stage: state.copy(*where, (stage,)) for stage in effect.stages}
        for stage, copy in given.items():
            if not present(copy.states[stage]).covers(effect.held.get(stage, WHOLE)):
                raise AssertionError(f"{self.life.me} offers {effect} and has {copy}")
        self._tell(giver.StandsStill(frozenset(effect.stages), effect.tickets), given)

    def feed(self, step: int, records: Mapping[int, Record], gradients: Mapping[int, SimReduced]) -> None:
        """A step is decided: pass it on, with its records as they go over the wire. Who still reads its offer reads
        what will not change."""
        lost = [asker for asker in self._giver.giving if asker.given is None or asker not in self.askers]
        freed(self.life.me, "offers that nobody can have", lost)
        if self._giver.feeds:
            early = {k: is_early(self.life.state.stages[k]) for k in gradients}
            found = {k: segments_in(value, early[k]) for k, value in gradients.items()}
            segments = {k: there for k, there in found.items() if there is not None}
            self._tell(giver.StepToFeed(frozenset(gradients), segments), item=(step, encode(records), gradients))

    def began(self) -> None:
        self._tell(giver.GenerationBegan())

    def _pass(self, asker: _Asker) -> None:
        """Send waiting steps to a joiner that has all blocks, and then tell it that it has caught up."""
        if not asker.had:
            return
        items, asker.items[:] = asker.items[:], []
        for item in items:
            asker.connection.send(self.life, item)
            self._giver.handle(giver.StepSent(asker))
        self.life.soon(0, 2 * MS, asker.connection.send, self.life, ("caught_up",))
