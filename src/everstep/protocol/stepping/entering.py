"""How members enter a generation: what each holds, and who rolls forward, copies or goes back. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from everstep.base.errors import check
from everstep.base.extents import NONE, Extents, Sizes
from everstep.protocol.settling import Settlement, settle, sound_limit, unaware
from everstep.protocol.step_phases import Phase
from everstep.protocol.step_types import (
    Discard,
    Entered,
    FetchState,
    Gathered,
    GatherWanted,
    GoBack,
    Holding,
    HoldingArrived,
    Key,
    Record,
    ServeState,
    SettleAnew,
    StateCopied,
    StepDecided,
    StepEffect,
)
from everstep.protocol.stepping.contributing import Contributing
from everstep.protocol.stepping.known import Known


class Entering:
    """Takes a worker from a new plan to the moment at which it goes on. entered: it has."""

    def __init__(self, known: Known, contributing: Contributing) -> None:
        self.entered = False
        self._known = known
        self._contributing = contributing
        self._holdings: dict[int, dict[int, Holding]] = {}  # by generation, this one and later
        self._concluded: Settlement | None = None  # from those of this generation, once all have come
        self._copied = self._served = False

    def regroup(self) -> None:
        """A generation begins: statements of older ones are void."""
        self.entered = self._copied = self._served = False
        self._concluded = None
        self._holdings = {g: h for g, h in self._holdings.items() if g >= self._known.plans.generation}

    def again(self) -> None:
        """The statements of this generation are void."""
        self.entered = False
        self._concluded = None
        self._holdings.pop(self._known.plans.generation, None)

    # ---- what members hold

    def holding_arrived(self, event: HoldingArrived) -> list[StepEffect]:
        generation = self._known.plans.generation
        if event.generation < generation:
            return []
        self._holdings.setdefault(event.generation, {}).setdefault(event.worker_id, event.holding)
        # One of a prepared generation waits, though it proves the switch: this worker may be a joiner's donor, and the
        # joiner gets nothing from one that has not decided the step itself.
        settling = event.generation == generation and self._known.phase is Phase.SETTLING
        return self.settle() if settling else []

    def _stated(self) -> dict[int, Holding]:
        """The members' holdings of this generation that have come so far."""
        plans = self._known.plans
        stated = self._holdings.get(plans.generation, {})
        return {i: stated[i] for i in plans.current.worker_ids if i in stated}

    def _conclude(self, holdings: Mapping[int, Holding]) -> Settlement:
        """Where all go on: the holdings of all members say it, and none of them changes in this generation."""
        if self._concluded is None:
            self._concluded = settle(self._known.plans.current, holdings)
        return self._concluded

    # ---- what follows

    def settle(self) -> list[StepEffect]:
        """Go on, or fetch missing state, once all members have stated what they hold."""
        known, plans, mine = self._known, self._known.plans, self._known.me.worker_id
        holdings = self._stated()
        if len(holdings) < len(plans.current.members):
            return []
        limit = sound_limit(holdings)
        if limit is not None and any(h.sound != limit for h in holdings.values()):
            if known.held.sound != limit:
                known.doubt(limit)  # this member's statement lacks its states up to that step
            return [SettleAnew(plans.generation, f"states later than that of step {limit} are tainted")]
        settled = self._conclude(holdings)
        effects: list[StepEffect] = []
        if settled.target.step == known.step and mine in unaware(holdings, known.step + 1):
            effects.append(known.void())
        if mine in settled.rolls and known.decisions.position != settled.target:
            effects = self._roll_forward(settled.target, settled.records)
            if known.phase is Phase.UPDATING:
                return effects
        if mine in settled.serves and not self._served:
            self._served = True
            effects.append(ServeState(plans.generation, settled.target, settled.serves[mine]))
        if mine in settled.wants and not self._copied:
            known.goes(Phase.FETCHING)
            return [*effects, self._get(settled)]
        at = known.decisions.position
        check(at == settled.target, f"settled at {settled.target}, but at {at}")
        known.next.runs(settled.rerun)
        return effects + self._enter()

    def _get(self, settled: Settlement) -> StepEffect:
        generation, mine = self._known.plans.generation, self._known.me.worker_id
        wanted, pieces = settled.wants[mine], settled.pieces.get(mine, {})
        if settled.back:
            return GoBack(generation, settled.target.step, wanted, pieces)
        return FetchState(generation, settled.target, wanted, pieces)

    def _roll_forward(self, top: Key, records: Mapping[int, Record]) -> list[StepEffect]:
        """Take the one decision that is missing here, with the records that another member handed over."""
        known, held = self._known, self._known.held
        effects = known.take(top, records)
        if top.seq == 0:
            self._contributing.answered()
            held.becomes(known.next.gradients)
            known.goes(Phase.UPDATING)
            return [*effects, StepDecided(top.step, dict(records))]
        gathered = Gathered(top, dict(records), here=False)
        if isinstance(self._contributing.asked, GatherWanted):
            self._contributing.answered()
            effects.append(gathered)
        else:
            known.decisions.came_early(gathered)
        return effects

    def state_copied(self, event: StateCopied) -> list[StepEffect]:
        """The state that this worker had to get is here."""
        known, held, mine = self._known, self._known.held, self._known.me.worker_id
        generation, stated = known.plans.generation, self._stated()
        settled = self._conclude(stated)
        fits = (event.generation, event.position) == (generation, settled.target)
        check(fits, f"expected the state of {settled.target} in generation {generation}, got {event}")
        wanted, before = settled.wants[mine], known.decisions.position
        effects = known.move(event.position, event.records)
        if event.position != before:
            self._contributing.answered()
            effects.append(Discard(before.step + 1 if event.position.step < before.step else event.position.step))
        elif held.sound >= 0 or any(k in held.blocks and donors[:1] != (mine,) for k, donors in wanted.items()):
            # Another state of the same step, or a repaired one: results computed from the old one are void.
            known.next.forget()
            effects.append(Discard(event.position.step + 1))
        if event.position.step == 0:
            held.begins_with(next((stated[ids[0]].digest for ids in wanted.values() if ids), held.digest))
        stays = event.position.step == before.step
        held.becomes(self._with_seats({**settled.sizes, **event.sizes}, stays=stays))
        self._copied = True
        return effects + self.settle()

    def _with_seats(self, sizes: Mapping[int, Sizes], *, stays: bool) -> dict[int, Extents]:
        """What this worker holds once all its seats have their share. sizes: of the states, by stage, where that is
        not all of them. stays: the step is the same as before, so stages without a seat are kept until the next
        decision."""
        known, blocks = self._known, self._known.held.blocks
        kept = {k: part for k, part in blocks.items() if stays and (known.step or not part.whole)}
        return kept | {k: kept.get(k, NONE) | share for k, share in known.plans.shares(sizes).items()}

    def _enter(self) -> list[StepEffect]:
        known = self._known
        self.entered = True
        known.goes(Phase.IDLE)
        return [Entered(known.plans.generation, known.step), *self._contributing.resume()]
