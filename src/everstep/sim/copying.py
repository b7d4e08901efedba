"""What a simulated worker keeps, writes and gives away, and how it takes blocks from several who give.

Snapshots in memory, checkpoints on disk and the result at the end, as the driver says; the shelf for members that
settle, feeds for joiners. A donor does what the threads of a real one do: they read a shelf, and never ask the driver.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from everstep.base.cause import Cause, Why
from everstep.base.extents import NONE, WHOLE, Extents
from everstep.base.plan import Plan
from everstep.protocol.chunks import Chunk, Chunks
from everstep.protocol.driver import operations as do
from everstep.protocol.driver.operations import AbandonSave, Save, SaveEnded
from everstep.protocol.step_types import Record
from everstep.sim.life import Life, SimCopy, nothing
from everstep.sim.mesh import Mesh
from everstep.sim.model import NOTHING, PLANES, Blocks, SimGradient, digest, merged, present, without, wrong
from everstep.sim.world import MS, SimConnection

NO_ROOM = Why(Cause.CONFIG, "there is no room")


class Memory:
    """One worker's snapshots: states by stage and step."""

    def __init__(self, life: Life, mesh: Mesh) -> None:
        self.life = life
        self.mesh = mesh
        self.kept: dict[tuple[int, int], Blocks] = {}
        life.install({do.Keep: self._keep, do.RetireKept: self._retire, do.ForgetKept: self._forget})
        life.install({do.DropLanes: nothing, ("message", "snapshot"): self._take})

    def lose(self, stage: int, number: int, lost: Extents) -> None:
        """Blocks of a snapshot are gone."""
        self.kept[stage, number] = without(self.kept[stage, number], lost)
        self._say()

    def _keep(self, effect: do.Keep) -> None:
        """Of the state as it is; some of it is handed to other pools, and may get lost on the way."""
        life, number = self.life, effect.step
        if life.world.rng.random() < 0.05:
            life.handle(do.NotKept(number, NO_ROOM))
            return
        for stage, value in life.state.stages.items():
            self.kept[stage, number] = value
        self._say()
        for stage, member in effect.to.items():
            if stage in life.state.stages:
                value = life.state.stages[stage]
                self.mesh.send(member.worker_id, "snapshot", stage, number, value, effect.records)
        if effect.to:
            done = life.world.rng.random() < 0.9
            life.soon(MS, 40 * MS, life.handle, do.HandedOver(number, done))

    def _take(self, stage: int, number: int, value: Blocks, records: do.Records) -> None:
        """Another pool's."""
        self.kept.setdefault((stage, number), value)
        self._say({number: records})

    def _retire(self, effect: do.RetireKept) -> None:
        """What is older than a complete one goes, but for the newest that is proven."""
        older = {number for _, number in self.kept if number <= effect.proven}
        self.kept = {k: v for k, v in self.kept.items() if k[1] >= effect.step or k[1] == max(older, default=-1)}
        self._say()

    def _forget(self, effect: do.ForgetKept) -> None:
        """Later ones count for nothing."""
        self.kept = {key: value for key, value in self.kept.items() if key[1] <= effect.after}
        self._say()

    def _say(self, records: Mapping[int, do.Records] | None = None) -> None:
        there = {key: part for key, value in sorted(self.kept.items()) if (part := present(value))}
        whole = tuple(key for key, part in there.items() if part.whole)
        parts = {key: part for key, part in there.items() if not part.whole}
        self.life.handle(do.InMemory(whole, records or {}, parts))


_GRACE_NS = 500 * MS


def _ended(number: int, wrong: str) -> SaveEnded:
    return SaveEnded(number, not wrong, wrong, "" if wrong else "disk", differs=wrong == "parts differ")


class SimSaver:
    """Writes this worker's parts."""

    def __init__(self, life: Life) -> None:
        self.life = life
        life.install({Save: self._save, AbandonSave: nothing, do.Invalidate: self._invalidate})
        life.install({do.SaveLast: self._save_last, do.Finish: self._finish})
        life.install({do.Linger: lambda operation: life.soon(10 * MS, 2000 * MS, life.done, operation)})

    def _save(self, effect: Save) -> None:
        """Each worker copies what it holds; the job's leader hears when the last part is there."""
        life, number = self.life, effect.step
        me, disk = life.me.worker_id, life.site.disk
        if effect.plan.leader(0) == me:
            disk.ask(number, lambda wrong: life.later(0, life.handle, _ended(number, wrong)))
        for stage in effect.plan.stages_of(me):
            life.soon(MS, 60 * MS, self._written, effect.plan, stage, number, life.state.stages[stage])

    def _written(self, plan: Plan, stage: int, number: int, state: Blocks) -> None:
        """What is not complete when its generation ends, or when it is invalidated, is abandoned."""
        driver = self.life.driver
        sound = driver.machine.sound
        if driver.generation == plan.generation and (sound < 0 or number <= sound):
            self.life.site.disk.write(stage, number, self.life.me.worker_id, state, plan)

    def _invalidate(self, effect: do.Invalidate) -> None:
        self.life.site.checks.taint.invalidated(self.life.me, effect.sound)
        self.life.site.disk.invalidate(effect.sound)

    # ---- the end

    def _save_last(self, operation: do.SaveLast) -> None:
        """The job's leader waits until all parts are there, for as long as it may."""
        life = self.life
        if operation.save is not None:
            self._save(operation.save)
            life.site.disk.saving.setdefault(operation.step, set()).add(life.me.worker_id)
        if operation.plan.leader(0) == life.me.worker_id:
            life.later(_GRACE_NS, life.done, operation, "")
            self._saved(operation)
        else:
            life.soon(MS, 60 * MS, self._others_saved, operation)

    def _others_saved(self, operation: do.SaveLast) -> None:
        """Nobody leaves before the job's leader has all parts."""
        if self._lacks_parts(operation):
            self.life.during(operation, 5 * MS, self._others_saved)
        else:
            self.life.done(operation, "")

    def _lacks_parts(self, operation: do.SaveLast) -> bool:
        """Of members who have not come so far, or are still writing, where no plan has brought all there."""
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

    def _finish(self, operation: do.Finish) -> None:
        if operation.save is not None and self.life.job.write_every:
            self._save(operation.save)
        self.life.during(operation, self.life.world.between(0, 3 * MS), self._finished)

    def _finished(self, operation: do.Finish) -> None:
        life = self.life
        leads = operation.plan.leader(0) == life.me.worker_id
        held = {k: life.state.stages[k] for k in life.driver.machine.stages}  # not what it has left, or lost in part
        agreed = {k: operation.digests.get(k, "") for k in held}
        if leads and any(said and said != format(digest(held[k]), "x") for k, said in agreed.items()):
            life.tainted(operation, "the state is not the one that all have agreed on", torn=True)
            return
        if leads:
            life.site.checks.taint.last(held, operation.plan)
            life.site.checks.exact.final(life.me, life.state.at, held)
        life.done(operation, leads)


SimAsked = tuple[SimConnection, int, int, Extents]
"""By whom, in which generation, of which stage, which blocks."""


class SimDonor:
    """Gives states away: to settling members from the shelf, to joiners at a step boundary and then step by step."""

    def __init__(self, life: Life, memory: Memory) -> None:
        self.life = life
        self.memory = memory
        self.shelf: tuple[int, dict[int, SimCopy]] | None = None  # of a generation, by stage
        self.feeds: list[tuple[SimConnection, tuple[int, ...]]] = []  # with the stages
        self.wanted: list[tuple[SimConnection, tuple[int, ...], str]] = []  # and what it wants of them
        self.fetchers: list[SimAsked] = []
        self.served: dict[SimConnection, int] = {}  # who has got something, by generation
        self.offered: dict[SimConnection, SimCopy] = {}  # who asks for the blocks of what it was offered
        self.silent: list[SimConnection] = []  # who has come, and asks for nothing as long as others give it
        life.install({do.Shelve: self._shelve, do.Unshelve: self._unshelve, ("door", "donor"): self._accept})
        life.install({do.OfferFeeds: self._offer, do.CutFeeds: self._jumped})

    def uses(self, connection: SimConnection) -> bool:
        """Whether something may still be sent or expected here."""
        held = (one[0] for one in [*self.feeds, *self.wanted, *self.fetchers])
        return any(connection is one for one in [*held, *self.served, *self.offered, *self.silent])

    def _accept(self, connection: SimConnection) -> None:
        self.silent.append(connection)
        connection.listen(self.life, lambda m: self._asked(connection, m), lambda: self._gone(connection))

    def _gone(self, connection: SimConnection) -> None:
        self.feeds = [f for f in self.feeds if f[0] is not connection]
        self.wanted = [w for w in self.wanted if w[0] is not connection]
        self.fetchers = [f for f in self.fetchers if f[0] is not connection]
        self.served.pop(connection, None)
        self.offered.pop(connection, None)
        self.silent = [one for one in self.silent if one is not connection]

    def lose(self, stage: int, lost: Extents) -> None:
        """Blocks of the present state are gone, on the shelf too."""
        if self.shelf is not None and stage in self.shelf[1]:
            copy = self.shelf[1][stage]
            if copy.effects or not copy.position.step:
                states = {stage: without(copy.states[stage], lost)}
                self.shelf[1][stage] = replace(copy, states=states)

    def _asked(self, connection: SimConnection, message: tuple[Any, ...]) -> None:
        self.silent = [one for one in self.silent if one is not connection]
        match message:
            case ("follow", stages, kind):
                self.wanted.append((connection, stages, kind))
                self.life.handle(do.FollowerAsked())
            case ("blocks", stage, extents):
                self.life.soon(0, 3 * MS, self._give_offered, connection, stage, extents)
            case ("fetch", generation, stage, extents):
                self.fetchers.append((connection, generation, stage, extents))
                self._serve()

    # ---- the shelf

    def _shelve(self, effect: do.Shelve) -> None:
        """Members of this generation may have what is held at the position, live or kept."""
        state, kept = self.life.state, self.memory.kept
        step = effect.position.step
        copies = {
            stage: SimCopy(effect.position, effect.records, {stage: value})
            for (stage, at), value in kept.items()
            if at == step
        }
        if effect.live:
            for stage in (*effect.stages, *effect.parts):
                copy = state.copy(effect.position, effect.records, effect.gathers, (stage,))
                beside = copies[stage].states[stage] if stage in copies else NOTHING
                copies[stage] = replace(copy, states={stage: merged(copy.states[stage], beside)})
        self.shelf = (effect.generation, copies)
        self._serve()

    def _unshelve(self, effect: do.Unshelve) -> None:
        """Nobody asks for it any more."""
        self.shelf = None

    def _serve(self) -> None:
        if self.shelf is None:
            return
        for one in self.fetchers[:]:
            if one[1] == self.shelf[0]:
                self.fetchers.remove(one)
                self.life.soon(MS, 15 * MS, self._give, self.shelf, *one)

    def _give(self, shelf: tuple[int, dict[int, SimCopy]], *asked: Any) -> None:
        """The last block has been read. Nothing may have changed meanwhile, or the copy would be torn."""
        connection, generation, stage, extents = asked
        life, copy = self.life, shelf[1].get(stage)
        if self.shelf is not shelf or copy is None:
            if connection.open and life.driver.generation == generation and life.cut_to < generation:
                raise AssertionError(f"{life.me} at {life.driver.position} served {shelf}, and does no more")
            connection.close(life)
            return
        live = copy.effects or not copy.position.step
        if live and (life.state.at != copy.position.step or self._differs(stage, copy)):
            raise AssertionError(f"{life.me} moved to {life.driver.position} while it served {shelf}")
        if connection.open:
            self.served[connection] = generation
        connection.send(life, ("state", replace(copy, states={stage: _of(copy, stage, extents)})))

    def _differs(self, stage: int, copy: SimCopy) -> bool:
        """Whether a block is another one now; a wrong one may have been repaired, or have come in a repair."""
        pairs = zip(copy.states[stage], self.life.state.stages.get(stage, NOTHING), strict=True)
        return any(a != b for a, b in pairs if a is not None and b is not None and not wrong((a, b)))

    def cut(self, generation: int) -> None:
        """Who waits for a state of this generation, or an older one, need not."""
        for connection, wanted in [*(f[:2] for f in self.fetchers), *self.served.items()]:
            if wanted <= generation:
                connection.close(self.life)
        self.fetchers = [f for f in self.fetchers if f[1] > generation]
        self.served = {c: wanted for c, wanted in self.served.items() if wanted > generation}

    # ---- feeds

    def _offer(self, effect: do.OfferFeeds) -> None:
        """The state stands still: start the joiners that asked."""
        wanted, self.wanted = self.wanted, []
        for connection, stages, kind in wanted:
            if not set(stages) <= set(effect.stages):
                connection.close(self.life)
                continue
            copy = self.life.state.copy(effect.position, effect.records, effect.gathers, stages)
            if kind != "all":
                self.offered[connection] = copy
                copy = replace(copy, states=dict.fromkeys(stages, NOTHING))
            connection.send(self.life, ("offer", copy))
            if kind != "blocks":
                self.feeds.append((connection, stages))
                self._caught_up(connection)

    def _give_offered(self, connection: SimConnection, stage: int, extents: Extents) -> None:
        if connection in self.offered:
            copy = self.offered[connection]
            connection.send(self.life, ("blocks", replace(copy, states={stage: _of(copy, stage, extents)})))

    def feed(self, step: int, records: Mapping[int, Record], gradients: Mapping[int, SimGradient]) -> None:
        """A step is decided: pass it on."""
        for connection, stages in self.feeds:
            if set(stages) <= set(gradients):
                connection.send(self.life, ("step", step, records, {k: gradients[k] for k in stages}))
                self._caught_up(connection)
            else:
                connection.close(self.life)
        self.feeds = [f for f in self.feeds if set(f[1]) <= set(gradients)]

    def _caught_up(self, connection: SimConnection) -> None:
        self.life.soon(0, 2 * MS, connection.send, self.life, ("caught_up",))

    def _jumped(self, effect: do.CutFeeds) -> None:
        """The followers have missed something."""
        for connection, _ in self.feeds:
            connection.close(self.life)
        self.feeds = []


def _of(copy: SimCopy, stage: int, extents: Extents) -> Any:
    """Of a stage, only these blocks."""
    return without(copy.states[stage], WHOLE - extents)


KNOWN = tuple(
    ("copies", name) for name in ("from several", "in the place of one lost", "of what is not whole", "refused", "rest")
)
"""What `World.seen` counts of them."""


class Taking:
    """What is wanted of some stages, who is asked for it, and what has come.

    say: what to send for a chunk. changed: called when something has come, or somebody is gone.
    """

    def __init__(
        self, life: Life, most: int, say: Callable[[int, Extents], tuple[Any, ...]], changed: Callable[[], None]
    ) -> None:
        self.life = life
        self.states: dict[int, Blocks] = {}
        self.refused = False
        self.taken: dict[int, Extents] = {}
        self.meta: SimCopy | None = None
        self._say = say
        self._changed = changed
        self.queue: Chunks[SimConnection] = Chunks(most)
        self.asked: dict[SimConnection, Chunk | None] = {}
        self._came: dict[SimConnection, Extents] = {}
        self._owed = NONE

    def want(self, stage: int, own: Blocks, missing: Extents) -> None:
        """These blocks of a stage; the others are this worker's own."""
        self.queue.want(stage, missing, PLANES)
        self.states[stage] = own
        if not missing.whole:
            self._note("rest")

    def join(self, connection: SimConnection, stages: Mapping[int, Extents]) -> None:
        """Somebody has been reached who has this."""
        if any(not given.whole for given in stages.values()):
            self._note("of what is not whole")
        self.asked[connection] = None
        self.queue.join(connection, stages)
        self._ask()

    def came(self, connection: SimConnection, copy: SimCopy) -> None:
        """What a donor has given. What is not among it, it does not have."""
        chunk = self.asked.get(connection)
        if chunk is None:
            return
        self.asked[connection] = None
        self.meta = self.meta or copy
        ((stage, blocks),) = copy.states.items()
        given = present(blocks) & chunk.extents
        if present(self.states[stage]) & given:
            raise AssertionError(f"{self.life.me} has got blocks of stage {stage} twice: {given}")
        self.states[stage] = merged(self.states[stage], blocks)
        self.taken[stage] = self.taken.get(stage, NONE) | given
        if self._owed & given:
            self._note("in the place of one lost")
        if not given.covers(chunk.extents):
            self.refused = True
            self._note("refused")
        if given and connection not in self._came and self._came:
            self._note("from several")
        self._came[connection] = given
        self.queue.done(connection, chunk, chunk.extents - given)
        self._ask()
        self._changed()

    def lost(self, connection: SimConnection) -> None:
        """A donor is gone."""
        if connection not in self.asked:
            return
        chunk = self.asked.pop(connection)
        if chunk is not None:
            self._owed |= chunk.extents
        self.queue.lost(connection)
        self._ask()
        self._changed()

    def close(self) -> None:
        """Nobody is asked any more."""
        for connection in self.asked:
            connection.close(self.life)
        self.asked = {}

    def _ask(self) -> None:
        for connection, chunk in list(self.asked.items()):
            if chunk is None:
                found = self.queue.next(connection)
                self.asked[connection] = found
                if found is not None:
                    connection.send(self.life, self._say(found.stage, found.extents))

    def _note(self, name: str) -> None:
        self.life.world.seen["copies", name] += 1
