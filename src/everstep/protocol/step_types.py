"""Events and effects of the worker's step machine, and what they carry. Pure.

A *decision* has a key (step, seq): seq 0 is the agree of that step, by which the step is committed; seq 1, 2, ... are
gathers after it (evaluation, barriers, the empty agree at the end). Decisions are totally ordered; a decision is taken
at a worker when the records of all members of the generation for its key have arrived there. `payload` is opaque here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from everstep.base.extents import NONE, WHOLE, Extents
from everstep.base.plan import Plan

BY_SCRIPT = (
    "the script makes them differ: does it change the model, the optimizer or state= depending on the worker "
    "(run.is_main), its process, the clock or files?"
)
"""What a person is told where states differ for no other reason."""


class Key(NamedTuple):
    """Of a decision."""

    step: int
    seq: int


class Record(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One worker's contribution to one decision. `prepared`: generation of the newest prepared plan it holds, or 0."""

    prepared: int
    payload: bytes


class LaneSaid(msgspec.Struct, frozen=True, array_like=True):
    """Digests of what a member got when it computed a lane in a part of the model, in the order in which that came to
    be; "" for what there is not. data: the lane's batch. took, made: what came into the forward pass, and what came out
    (buffers and the loss, too). back, gave: of the backward pass, likewise (the parameters' gradients, too)."""

    data: str = ""
    took: str = ""
    made: str = ""
    back: str = ""
    gave: str = ""


class Doubt(msgspec.Struct, frozen=True, array_like=True):
    """Members computed a lane of this step otherwise, in this part of the model, and nobody knows who is wrong. said:
    by worker, what each got."""

    step: int = 0
    lane: int = 0
    part: int = 0
    said: dict[int, LaneSaid] = {}


Snapshots = Mapping[tuple[int, int], Extents]
"""By (stage, step), what is there of states in memory."""


@dataclass(frozen=True)
class Holding:
    """What a worker states when it settles.

    position: key of its last decision; records: that decision's records by worker id, handed to whoever lacks them.
    gradient_step: the step beyond position.step whose reduced gradient it holds (it has contributed, or was about
    to), 0 if none; gradients: by stage, the blocks of the state that this takes to that step. digest: of the
    initial state, at step 0 only. stages: what it has of their state at `position`. lacking: lanes of its seats in
    this plan whose results for step position.step + 1 it does not have, at one of them at least. snapshots: by (stage,
    step), what is there of the states kept in its memory. disk: steps of the verified, complete checkpoints that it can
    read. sound: the newest step whose state counts, if it knows that later ones are tainted; else -1.

    fresh: its state was copied or read since it was last found to be that of all others. proven: it was seen to compute
    as others do. doubt: what it knows of members that do not compute alike.

    Digests of initial states, by stage: first: of those that members are known to have begun with; built: of those that
    it has built, at step 0 only.
    """

    position: Key
    records: Mapping[int, Record]
    gradient_step: int
    digest: str = ""
    stages: Mapping[int, Extents] = field(default_factory=lambda: {0: WHOLE})
    lacking: tuple[int, ...] = ()
    snapshots: Snapshots = field(default_factory=dict)
    disk: tuple[int, ...] = ()
    gradients: Mapping[int, Extents] = field(default_factory=lambda: {0: WHOLE})
    sound: int = -1
    first: Mapping[int, str] = field(default_factory=dict)
    built: Mapping[int, str] = field(default_factory=dict)
    fresh: bool = False
    proven: bool = False
    doubt: Doubt = field(default_factory=Doubt)

    def live(self, stage: int) -> Extents:
        """What it has of a stage's state at `position`."""
        return self.stages.get(stage, NONE)

    def kept(self, stage: int, step: int) -> Extents:
        """What it has kept of a stage's state of a step."""
        return self.snapshots.get((stage, step), NONE)


class Pieces(msgspec.Struct, frozen=True):
    """How a stage is to be had in parts. missing: what a member lacks; the rest is its own. given: what donors have
    of that, by donor; who is not named has all of it."""

    missing: Extents
    given: Mapping[int, Extents] = {}


Piecewise = Mapping[int, Pieces]
"""By stage, where not all of it comes from those that have all of it."""


# ---- events


class StepEvent(msgspec.Struct, frozen=True):
    """What a step machine takes in."""


class PlanArrived(StepEvent, frozen=True):
    """From the coordinator: leave what you do and settle in this plan."""

    plan: Plan


class PreparedArrived(StepEvent, frozen=True):
    """From the coordinator: a plan to switch to once all hold it."""

    plan: Plan


class HoldingArrived(StepEvent, frozen=True):
    """A member (oneself included) stated what it holds in this generation."""

    generation: int
    worker_id: int
    holding: Holding


class LaneDone(StepEvent, frozen=True):
    """A lane of a step has been computed at a stage here; its result is kept until the step is decided."""

    step: int
    stage: int
    lane: int


class LanesLost(StepEvent, frozen=True):
    """Results of a step that were held are not any more: the plan tears apart the sums that they were part of.

    lanes: (stage, lane).
    """

    step: int
    lanes: tuple[tuple[int, int], ...]


class GradientReduced(StepEvent, frozen=True):
    """This worker holds what it takes of the step's reduced gradient, of all its stages; `payload` is its agree
    record's."""

    generation: int
    step: int
    payload: bytes


class Takes(StepEvent, frozen=True):
    """What this worker's reduced gradient takes to its step, by stage, where that is not all that the worker holds."""

    step: int
    blocks: Mapping[int, Extents]


class Holds(StepEvent, frozen=True):
    """What is there of the state of `step`, by stage: an update of its own parts has been made, or the parts of others
    have come."""

    step: int
    blocks: Mapping[int, Extents]


class RecordArrived(StepEvent, frozen=True):
    """A member's record (oneself's included) for a decision."""

    generation: int
    key: Key
    worker_id: int
    record: Record


class Updated(StepEvent, frozen=True):
    """The optimizer has been applied; the state is that of `step`."""

    step: int


class UpdateRefused(StepEvent, frozen=True):
    """The decision's own records show that states differ: instead of `Updated`, as nothing was applied; or after
    `Gathered`, which is answered by nobody.

    Later states than that of step `sound` count for nothing, at any worker, until all have gone back. intact: no state
    is in doubt, the step alone is done again.
    """

    sound: int
    intact: bool = False


class StateCopied(StepEvent, frozen=True):
    """Answers `FetchState` and `GoBack`: this worker has the state at `position` for all its seats.

    `records`: those of the decision `position`; none at step 0.
    """

    generation: int
    position: Key
    records: Mapping[int, Record]


class GatherWanted(StepEvent, frozen=True):
    """The application wants a decision after the current step (every member asks for the same, in the same order)."""

    payload: bytes


class StepWanted(StepEvent, frozen=True):
    """The application wants the next step."""


class StepLeft(StepEvent, frozen=True):
    """The application does not want the step any more that it wanted, and lane results of it are gone."""


class Followed(StepEvent, frozen=True):
    """To a worker without a plan, which heals: its state is now that of `position`, copied or replayed.

    `records`: those of the decision `position`; empty for a snapshot whose records are not known. `stages`: what it
    has the state of.
    """

    position: Key
    records: Mapping[int, Record] = {}
    stages: tuple[int, ...] = (0,)


class SnapshotsKept(StepEvent, frozen=True):
    """What this worker could go back to, all of it: replaces what was said before. Stated in the next settle.

    snapshots: in its memory, of own stages or for other pools. disk: steps of the verified complete checkpoints that it
    can read. None may name a step before its `Release` has been seen by whoever made it.
    """

    snapshots: Snapshots = {}
    disk: tuple[int, ...] = ()


class StepSaved(StepEvent, frozen=True):
    """The checkpoint of the present step is complete: all members have written their parts of it, and so decided it."""

    step: int


class BlocksLost(StepEvent, frozen=True):
    """Blocks of a stage's present state are not there any more, or not to be trusted, and nothing has been computed
    from what is there instead. This worker goes no further in this generation; the next settle repairs them."""

    stage: int
    extents: Extents


# ---- effects


class StepEffect(msgspec.Struct, frozen=True):
    """What a step machine wants done."""


class Leave(StepEffect, frozen=True):
    """Abandon every pending transfer of this generation and older."""

    generation: int
    reason: str


class Regroup(StepEffect, frozen=True):
    """Regroup the transport for this plan."""

    plan: Plan


class SendHolding(StepEffect, frozen=True):
    """State what is held, to all members."""

    generation: int
    holding: Holding


class SettleAnew(StepEffect, frozen=True):
    """What was stated in this generation does not do: all are to state it once more, in another one."""

    generation: int
    reason: str


class LanesNeeded(StepEffect, frozen=True):
    """Compute these lanes of the step, each at all of this worker's seats that it passes through.

    In an unsplit job these are the plan's lanes that are not held already. In a split one they are all lanes that some
    member lacks, so a result that is held already may come up again; the repeated one is thrown away, but every lane
    is reported at every seat (`LaneDone`).
    """

    step: int
    lanes: tuple[int, ...]


class ReductionDue(StepEffect, frozen=True):
    """All own lanes are there, at all own stages: offer them and finish the reduction."""

    generation: int
    step: int


class SendRecord(StepEffect, frozen=True):
    """Contribute to a decision, to all members."""

    generation: int
    key: Key
    record: Record


class StepDecided(StepEffect, frozen=True):
    """The step is decided by these records: apply it. Nothing may interrupt it.

    It is applied to the stages whose reduced gradient is held; any other stage that was still held is dropped.
    """

    step: int
    records: Mapping[int, Record] = {}


class Gathered(StepEffect, frozen=True):
    """A gather is decided; hand the records to the application. here: by the members of this generation, who are all
    past its settle then; else it was in an earlier one, and says nothing of them."""

    key: Key
    records: Mapping[int, Record] = {}
    here: bool = True


class Release(StepEffect, frozen=True):
    """All members have gone beyond this step: its effects may leave the process and its gradient may be freed."""

    step: int


class Discard(StepEffect, frozen=True):
    """Drop lane results and gradients of this step and older: the state has moved past them; or (undone) the step was
    reduced, and is done again from the same state."""

    step: int
    undone: bool = False


class ServeState(StepEffect, frozen=True):
    """Give the state at `position` to these members: what they ask for and this worker has, live or as a snapshot.

    What it has it keeps until its first decision after this, also a stage in which it has lost its seat.
    """

    generation: int
    position: Key
    to: tuple[int, ...]


class FetchState(StepEffect, frozen=True):
    """Copy the state at `position` from the donors (by stage), before anything else; answer with `StateCopied`.

    Only the stages that this worker lacks are named; the others it keeps.
    """

    generation: int
    position: Key
    donors: Mapping[int, tuple[int, ...]]
    pieces: Piecewise = {}


class GoBack(StepEffect, frozen=True):
    """Go to the state of `step`, which may also lie ahead (a checkpoint); answer with `StateCopied` at (step, 0).

    sources: for each stage of this worker's seats, the worker ids that have it in memory, oneself first; empty: read
    it from disk, or build it anew for step 0, which has no records. Where this worker is a source itself and its own
    state stands at `step`, nothing is to be copied. The application goes on from there; steps after it are done again.
    """

    generation: int
    step: int
    sources: Mapping[int, tuple[int, ...]]
    pieces: Piecewise = {}


class Entered(StepEffect, frozen=True):
    """Settled: this generation goes on from the state of `step`, held for all stages of this worker's seats."""

    generation: int
    step: int


class LeftPlan(StepEffect, frozen=True):
    """The members switched to a prepared plan of this generation that this worker is not part of: it may go."""

    generation: int
