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

from everstep.base.extents import NONE, WHOLE, Extents, Sizes
from everstep.base.plan import Plan

BY_SCRIPT = (
    "the script makes them differ: does it change the model, the optimizer or state= depending on the worker "
    "(run.is_main), its process, the clock or files?"
)
"""The end of a message about states that differ without any other reason."""


class Key(NamedTuple):
    """Identity of a decision."""

    step: int
    seq: int


class Record(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One worker's contribution to one decision. prepared: generation of the newest prepared plan it holds, or 0."""

    prepared: int
    payload: bytes


class LaneSaid(msgspec.Struct, frozen=True, array_like=True):
    """Digests of a member's results when it computed a lane in a part of the model, in order of computation; "" if
    there is none.

    data: the lane's batch. took, made: input and output of the forward pass (output includes buffers and the loss).
    back, gave: input and output of the backward pass (output includes the parameters' gradients).
    """

    data: str = ""
    took: str = ""
    made: str = ""
    back: str = ""
    gave: str = ""


class Doubt(msgspec.Struct, frozen=True, array_like=True):
    """Members got different results for a lane of this step in this part of the model, and no majority says who is
    wrong. said: each member's results, by worker id."""

    step: int = 0
    lane: int = 0
    part: int = 0
    said: dict[int, LaneSaid] = {}


Snapshots = Mapping[tuple[int, int], Extents]
"""Blocks of snapshots in memory, by (stage, step)."""


@dataclass(frozen=True)
class Holding:
    """A worker's statement when it settles.

    position: key of its last decision; records: its records by worker id, handed to members that lack them.
    gradient_step: the step beyond position.step whose reduced gradient it holds (it has contributed, or was about
    to), 0 if none; gradients: by stage, the blocks of the state that this takes to that step. digest: of the initial
    state, at step 0 only. stages: blocks held of their state at `position`. lacking: lanes whose results for step
    position.step + 1 are missing at one of its seats at least. snapshots: blocks of states kept in its memory, by
    (stage, step). disk: steps of the verified, complete checkpoints that it can read. sound: states after this step
    are tainted, as far as it knows; -1: none is. fresh: its state was copied or read since it was last found to be
    that of all others. proven: it was seen to compute as others do. doubt: what it knows of members that compute
    differently. Digests of initial states, by stage: first: those that the members began with; built: those that it
    has built, at step 0 only. heard: the newest step of which its application has heard; -1: of none. stays_at: the
    step that its application wanted last, if it goes no further; -1: it does. gathered: digests of all that was
    gathered since the step, up to `position` and up to the gather before it; "": nothing.
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
    heard: int = -1
    stays_at: int = -1
    gathered: tuple[str, str] = ("", "")

    def live(self, stage: int) -> Extents:
        """Blocks held of a stage's state at `position`."""
        return self.stages.get(stage, NONE)

    def kept(self, stage: int, step: int) -> Extents:
        """Blocks kept of a stage's state of a step."""
        return self.snapshots.get((stage, step), NONE)


class Pieces(msgspec.Struct, frozen=True):
    """How to get a stage in parts. missing: the blocks that a member lacks. given: the blocks that donors have of
    those, by donor; a donor that is not named has all of them."""

    missing: Extents
    given: Mapping[int, Extents] = {}


Piecewise = Mapping[int, Pieces]
"""By stage, for stages whose blocks do not all come from donors with the whole stage."""


# ---- events


class StepEvent(msgspec.Struct, frozen=True):
    """Input of a step machine."""


class PlanArrived(StepEvent, frozen=True):
    """From the coordinator: leave all work, and settle in this plan."""

    plan: Plan


class PreparedArrived(StepEvent, frozen=True):
    """From the coordinator: a plan to switch to once all members hold it."""

    plan: Plan


class HoldingArrived(StepEvent, frozen=True):
    """A member (or this worker) stated what it holds in this generation."""

    generation: int
    worker_id: int
    holding: Holding


class LaneDone(StepEvent, frozen=True):
    """A lane of a step has been computed here for a stage; its result is kept until the step is decided."""

    step: int
    stage: int
    lane: int


class LanesLost(StepEvent, frozen=True):
    """Results of a step are no longer held: the plan tears apart the sums that they were part of. lanes: (stage,
    lane)."""

    step: int
    lanes: tuple[tuple[int, int], ...]


class GradientReduced(StepEvent, frozen=True):
    """This worker holds what it takes of the step's reduced gradient, for all its stages. payload: of its agree
    record."""

    generation: int
    step: int
    payload: bytes


class Takes(StepEvent, frozen=True):
    """The blocks that this worker's reduced gradient takes to its step, by stage, if those are not all it holds."""

    step: int
    blocks: Mapping[int, Extents]


class Holds(StepEvent, frozen=True):
    """Blocks held of the state of `step`, by stage: this worker has updated its own, or has got those of others. moved:
    the step has given further parameters a state that is divided, which moves segments: members hold other blocks than
    the plan gives them until they have settled. All members of the pool say the same."""

    step: int
    blocks: Mapping[int, Extents]
    moved: bool = False


class RecordArrived(StepEvent, frozen=True):
    """A record of a member (or of this worker) for a decision."""

    generation: int
    key: Key
    worker_id: int
    record: Record


class Updated(StepEvent, frozen=True):
    """The optimizer has been applied; the state is that of `step`."""

    step: int


class UpdateRefused(StepEvent, frozen=True):
    """The decision's records show that states differ. Comes instead of `Updated`, as nothing was applied, or after
    `Gathered`, which then gets no answer. States after the step `sound` are void at every worker until all have gone
    back. intact: no state is in doubt; only the step is repeated."""

    sound: int
    intact: bool = False


class StateCopied(StepEvent, frozen=True):
    """Answers `FetchState` and `GoBack`: this worker has the state at `position` for all its seats. records: of the
    decision `position`; empty at step 0. sizes: of the states of which no more than its share was copied, by stage."""

    generation: int
    position: Key
    records: Mapping[int, Record]
    sizes: Mapping[int, Sizes] = {}


class GatherWanted(StepEvent, frozen=True):
    """The application wants a decision after the current step (every member asks for the same, in the same order)."""

    payload: bytes


class StepWanted(StepEvent, frozen=True):
    """The application wants the next step."""


class StepLeft(StepEvent, frozen=True):
    """The application no longer wants the step that it asked for, and its lane results are gone."""


class Followed(StepEvent, frozen=True):
    """To a joiner: its state is now that of `position`, copied or replayed. records: of the decision `position`;
    empty for a snapshot whose records are not known. stages: those whose state it has. generation: of the members that
    it follows. held: its blocks of these stages, where not all."""

    position: Key
    records: Mapping[int, Record] = {}
    stages: tuple[int, ...] = (0,)
    generation: int = 0
    held: Mapping[int, Extents] = {}


class SnapshotsKept(StepEvent, frozen=True):
    """All states that this worker could go back to, replacing earlier statements; stated in the next settle.

    snapshots: in its memory, of own stages or for other pools. disk: steps of the verified complete checkpoints that
    it can read. A step may be named only after the worker that made it has seen its `Release`.
    """

    snapshots: Snapshots = {}
    disk: tuple[int, ...] = ()


class StepSaved(StepEvent, frozen=True):
    """The checkpoint of the present step is complete: all members have written their parts of it, and so decided the
    step."""

    step: int


class BlocksLost(StepEvent, frozen=True):
    """Blocks of a stage's present state are gone or damaged, and nothing has been computed from them. This worker
    stops in this generation; the next settle repairs them."""

    stage: int
    extents: Extents


# ---- effects


class StepEffect(msgspec.Struct, frozen=True):
    """Output of a step machine."""


class Leave(StepEffect, frozen=True):
    """Abandon every pending transfer of this generation and older."""

    generation: int
    reason: str


class Regroup(StepEffect, frozen=True):
    """Regroup the transport for this plan."""

    plan: Plan


class SendHolding(StepEffect, frozen=True):
    """State to all members what is held."""

    generation: int
    holding: Holding


class SettleAnew(StepEffect, frozen=True):
    """The statements of this generation are void: all members have to settle in another one."""

    generation: int
    reason: str


class LanesNeeded(StepEffect, frozen=True):
    """Compute these lanes of the step, each at all seats of this worker that it passes through.

    In an unsplit job these are the plan's lanes that are not held already. In a split one they are all lanes that
    some member lacks, so a held result may be computed again; the repeated one is thrown away, but every lane is
    reported at every seat (`LaneDone`).
    """

    step: int
    lanes: tuple[int, ...]


class ReductionDue(StepEffect, frozen=True):
    """All own lanes are computed at all own stages: offer them and finish the reduction."""

    generation: int
    step: int


class SendRecord(StepEffect, frozen=True):
    """Send this worker's record for a decision to all members."""

    generation: int
    key: Key
    record: Record


class StepDecided(StepEffect, frozen=True):
    """These records decide the step: apply it, without interruption. It is applied to the stages whose reduced
    gradient is held; every other stage is dropped."""

    step: int
    records: Mapping[int, Record] = {}


class Gathered(StepEffect, frozen=True):
    """A gather is decided; hand the records to the application. here: decided by the members of this generation,
    which have all settled then; else in an earlier generation, and it says nothing about them."""

    key: Key
    records: Mapping[int, Record] = {}
    here: bool = True


class Release(StepEffect, frozen=True):
    """All members have decided this step or a later one: its effects may leave the process and its gradient may be
    freed."""

    step: int


class Discard(StepEffect, frozen=True):
    """Drop lane results and gradients of this step and older ones: the state has passed them. undone: the step was
    reduced, and is repeated from the same state."""

    step: int
    undone: bool = False


class ServeState(StepEffect, frozen=True):
    """Give the state at `position` to these members, live or as a snapshot, as they ask for it. The state is kept
    until this worker's first decision after this, including stages in which it has lost its seat."""

    generation: int
    position: Key
    to: tuple[int, ...]


class FetchState(StepEffect, frozen=True):
    """Copy the state at `position` from the donors (by stage) before anything else; answer with `StateCopied`. Only
    the stages that this worker lacks are named; it keeps the others."""

    generation: int
    position: Key
    donors: Mapping[int, tuple[int, ...]]
    pieces: Piecewise = {}


class GoBack(StepEffect, frozen=True):
    """Go to the state of `step`, which may also lie ahead (a checkpoint); answer with `StateCopied` at (step, 0).

    sources: for each stage of this worker's seats, the worker ids that have it in memory, itself first; empty: read
    it from disk, or build it for step 0, which has no records. If this worker is a source and its own state is that
    of `step`, nothing has to be copied. The application goes on from there and repeats the steps after it.
    """

    generation: int
    step: int
    sources: Mapping[int, tuple[int, ...]]
    pieces: Piecewise = {}


class Entered(StepEffect, frozen=True):
    """Settled: this generation goes on from the state of `step`, which this worker holds for all stages of its
    seats."""

    generation: int
    step: int


class LeftPlan(StepEffect, frozen=True):
    """The members switched to a prepared plan of this generation without this worker: it may leave."""

    generation: int
