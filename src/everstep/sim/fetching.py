"""How a simulated worker gets the state of a settling generation, and takes it on, all or nothing."""

from __future__ import annotations

from everstep.base.extents import NONE, WHOLE, Extents
from everstep.protocol.driver import operations as do
from everstep.protocol.step_types import Key, Pieces
from everstep.sim.keep import Memory
from everstep.sim.life import Life, SimHandlers
from everstep.sim.model import NOTHING, PLANES, Blocks, initial, merged, present, without
from everstep.sim.state import SimCopy
from everstep.sim.taking import CONNECT_NS, Taking
from everstep.sim.world import MS, SimConnection, connect

_ALL = sum(n for _, n in PLANES)


class Fetcher:
    """Gets it stage by stage: own copies, peers, disk, or anew. What this worker has a part of, it gets the rest of."""

    def __init__(self, life: Life, memory: Memory) -> None:
        self.life = life
        self.memory = memory
        self._taking: Taking | None = None
        self._donors: list[int] = []
        self._got: dict[int, SimCopy] = {}
        self._left: list[tuple[int, tuple[int, ...]]] = []
        for kind in (do.Fetch, do.Restore):
            life.install_leaving(kind, self._leave)

    def handlers(self) -> SimHandlers:
        """What it carries out."""
        return {do.Fetch: self._fetch, do.Restore: self._restore}

    def uses(self, connection: SimConnection) -> bool:
        """Whether something may still be sent or expected here."""
        return self._taking is not None and self._taking.uses(connection)

    def _restore(self, operation: do.Restore) -> None:
        self.life.site.went_back.append(operation.step)
        self._fetch(operation)

    def _leave(self, operation: do.Operation, accused: tuple[int, ...], reason: str) -> None:
        self._stop()
        self.life.aborted(operation, accused, reason)

    def _damaged(self, operation: do.Restore, reason: str) -> None:
        if self.life.operation is operation:
            self._stop()
            self.life.tainted(operation, reason)

    def _fetch(self, operation: do.Fetch | do.Restore) -> None:
        """Get these stages, then take them on, all or nothing."""
        self._got, self._left = {}, sorted(operation.sources.items())
        self._next(operation)

    def _stop(self) -> None:
        """Whatever is on its way is not wanted."""
        if self._taking is not None:
            self._taking.close()
            self._taking = None

    def _next(self, operation: do.Fetch | do.Restore) -> None:
        life = self.life
        if not self._left:
            life.later(life.world.between(0, MS), self._install, operation)
            return
        stage, donors = self._left.pop(0)
        if isinstance(operation, do.Restore) and (not donors or donors[0] == life.me.worker_id):
            self._own(operation, stage, bool(donors))
        else:
            self._take(operation, stage, donors)

    # ---- of this worker's own

    def _held(self, operation: do.Fetch | do.Restore, stage: int) -> Blocks:
        """What is live or kept here of the state that is wanted."""
        step = operation.step if isinstance(operation, do.Restore) else operation.position.step
        live = self.life.state.stages.get(stage, NOTHING) if self.life.state.at == step else NOTHING
        kept = self.memory.kept.get((stage, step), NOTHING) if isinstance(operation, do.Restore) else NOTHING
        return merged(live, kept)

    def _claimed(self, operation: do.Fetch | do.Restore, stage: int) -> Extents:
        """What this worker says that it has of that, live; where it is gathers behind, it copies what they led to."""
        machine = self.life.driver.machine
        if isinstance(operation, do.Restore):
            there = machine.step == operation.step
        else:
            there = machine.position == operation.position
        if not there:
            return NONE
        return WHOLE if stage in machine.stages else machine.parts.get(stage, NONE)

    def _own(self, operation: do.Restore, stage: int, memory: bool) -> None:
        """From this worker's memory, from disk, or anew."""
        life, step = self.life, operation.step
        if memory and stage in operation.stands:
            copy = life.state.copy(Key(step, 0), operation.own, {}, (stage,))
        elif memory:
            blocks = self._held(operation, stage)
            if None in blocks:  # lost since they were stated
                life.later(0, self._refuse, operation, f"stage {stage} of step {step} is not whole any more")
                return
            copy = SimCopy(Key(step, 0), operation.own, {stage: blocks})
        else:
            found = life.site.disk.read(stage, step) if step else initial(stage)
            if found is None:
                life.later(life.world.between(0, 5 * MS), self._damaged, operation, f"checkpoint {step} is damaged")
                return
            effects = ((step, life.site.checks.exact.effect(step)),) if step else ()  # perhaps nobody has told them
            copy = SimCopy(Key(step, 0), {}, {stage: found}, effects)
        life.later(
            life.world.between(0, MS) if memory else life.world.between(MS, 20 * MS),
            self._have,
            operation,
            stage,
            copy,
        )

    def _have(self, operation: do.Fetch | do.Restore, stage: int, copy: SimCopy) -> None:
        if self.life.operation is operation:
            self._got[stage] = copy
            self._next(operation)

    # ---- from peers

    def _take(self, operation: do.Fetch | do.Restore, stage: int, donors: tuple[int, ...]) -> None:
        """From as many at once as are asked at once; from all of them where none has all."""
        pieces, at_once = operation.pieces.get(stage, Pieces(WHOLE)), self.life.site.donors
        self._donors = list(donors)
        taking = self._taking = Taking(
            self.life,
            _ALL if at_once == 1 else 1,
            lambda k, extents: ("fetch", operation.generation, k, extents),
            lambda: self._look(operation, stage, taking),
        )
        own = without(self._held(operation, stage), pieces.missing)  # perhaps more has been lost since it was stated
        taking.want(stage, own, WHOLE - present(own))
        for _ in range(len(donors) if pieces.given else at_once):
            self._try(operation, stage, taking)

    def _try(self, operation: do.Fetch | do.Restore, stage: int, taking: Taking) -> None:
        """Reach one more donor."""
        life = self.life
        if life.operation is not operation or self._taking is not taking:
            return
        if not self._donors:
            self._look(operation, stage, taking)
            return
        worker_id = self._donors.pop(0)
        donor = life.site.lives.get(operation.plan.member(worker_id).key)
        connection = connect(life.world, life, donor, timeout_ns=CONNECT_NS)
        if connection is None or donor is None:
            life.later(life.world.latency_ns(), self._try, operation, stage, taking)
            return

        def lost() -> None:
            taking.lost(connection)
            self._try(operation, stage, taking)

        donor.accept("donor", connection)
        connection.listen(life, lambda m: taking.came(connection, m[1]), lost)
        pieces = operation.pieces.get(stage)
        taking.join(connection, {stage: WHOLE if pieces is None else pieces.given.get(worker_id, WHOLE)})

    def _look(self, operation: do.Fetch | do.Restore, stage: int, taking: Taking) -> None:
        """Whether the stage is there, or cannot be had."""
        life = self.life
        if life.operation is not operation or self._taking is not taking:
            return
        if taking.finished and taking.meta is not None:
            blocks, copy = taking.states[stage], taking.meta
            own = self._claimed(operation, stage) & taking.taken.get(stage, NONE)
            if own:
                raise AssertionError(f"{life.me} has copied what it had of stage {stage}: {own}")
            self._stop()
            self._have(
                operation, stage, SimCopy(copy.position, copy.records, {stage: blocks}, copy.effects, copy.gathers)
            )
        elif taking.out_of_reach and not self._donors:
            if taking.refused:
                self._refuse(operation, f"blocks of stage {stage} are not there any more")
            else:
                life.abort(operation, tuple(operation.sources[stage]), "the state could not be copied")
        elif taking.out_of_reach:
            self._try(operation, stage, taking)

    def _refuse(self, operation: do.Fetch | do.Restore, reason: str) -> None:
        if self.life.operation is operation:
            self._stop()
            self.life.tainted(operation, reason, torn=False)

    # ---- the end

    def _install(self, operation: do.Fetch | do.Restore) -> None:
        life = self.life
        if life.operation is not operation:
            return
        position = Key(operation.step, 0) if isinstance(operation, do.Restore) else operation.position
        wrong = [c.position for c in self._got.values() if c.position != position]
        if wrong:
            raise AssertionError(f"{life.me} wants the state at {position} and got {wrong}")
        copies = [self._got[k] for k in sorted(self._got)]
        records = next((c.records for c in copies if c.records), {})
        gathers = next((c.gathers for c in copies if c.gathers), {})
        states = {k: state for c in copies for k, state in c.states.items()}
        lacking = [k for k, state in states.items() if None in state]
        if lacking:
            raise AssertionError(f"{life.me} takes on stages {lacking} without all of their blocks")
        effects = tuple(sorted({effect for c in copies for effect in c.effects}))
        life.state.install(SimCopy(position, records, states, effects, gathers))
        life.done(operation, do.Copied(records, gathers))
