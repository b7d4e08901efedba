"""Operations and effects of a driver, and the events that it takes. Pure data.

An *operation* takes time. One at most is outstanding; it is answered by exactly one `Done`, `Aborted` or `Tainted` that
bears its number. An *effect* is carried out at once and never answered. An *ask* is the application's: it waits until
it gets exactly one *answer*.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from everstep.base.cause import Cause, Why
from everstep.base.extents import Extents
from everstep.base.plan import Member, Plan
from everstep.base.ports import Tag
from everstep.placement.probes import Trial
from everstep.protocol import messages as wire
from everstep.protocol.driver.policy import Due
from everstep.protocol.driver.records import StageSection, StepOutcome
from everstep.protocol.step_types import Discard, Key, Piecewise, Record, Release, Snapshots

LEFT = Why(Cause.LINK, "")

Records = Mapping[int, Record]
GatheredRecords = Mapping[Key, Records]
"""Records of the decisions of one step, by key."""


# ---- operations


class Operation(msgspec.Struct, frozen=True):
    """op: its number. generation: whoever interrupts that generation, or a later one, ends it; a joiner's is that of
    the plan in its ticket."""

    op: int
    generation: int


class Open(Operation, frozen=True):
    """Have the stages of the plan's seats, and meet its members; answered with `Opened`.

    step: the one that is computed next. disk: whether readable checkpoints are to be stated; limit: not later ones.
    """

    plan: Plan
    step: int
    disk: bool
    limit: int | None


class Exchange(Operation, frozen=True):
    """All-gather of small records; answered with the payloads of all members by worker id."""

    tag: Tag
    payload: bytes


class Compute(Operation, frozen=True):
    """Compute lanes of the step; each is reported at each stage by `LaneDone`, in between.

    lanes: of an unsplit model, those that this worker lacks; of a split one, those that some member lacks, the same at
    all: each passes through all of its seats. It is ended between two lanes or passes. trials: lanes that others than
    their owners compute as well; the record is to say what both get.
    """

    plan: Plan
    step: int
    lanes: tuple[int, ...]
    trials: tuple[Trial, ...] = ()


class Reduce(Operation, frozen=True):
    """Offer the lanes' sums and finish the reduction, of all own stages; answered with the agree record's
    `AgreePayload`. compare: it says the digests of the states before the step."""

    plan: Plan
    step: int
    compare: bool = False


class Update(Operation, frozen=True):
    """Apply the decided step to the stages held; let go of others. Nothing interrupts it. Answered with the unix time
    in ns at which it began. outcome: what the records say."""

    step: int
    records: Mapping[int, Record]
    outcome: StepOutcome
    stages: tuple[int, ...]


class Spread(Operation, frozen=True):
    """Give the parameters that were updated here to the members that did not update them, and get those of others;
    answered with what is there of the state then, by stage."""

    plan: Plan
    step: int


class Fetch(Operation, frozen=True):
    """Copy the state at a position from the donors (worker ids by stage, in order of preference); answered with
    `Copied`, or `Tainted` if blocks that were stated are not to be had. All or nothing.

    pieces: of stages of which this worker has a part itself, or no donor has all.
    """

    plan: Plan
    position: Key
    sources: Mapping[int, tuple[int, ...]]
    pieces: Piecewise = {}


class Restore(Operation, frozen=True):
    """Take on the state of a step: for each stage from the first of its sources (oneself: own memory; nobody: disk, or
    at step 0 the initial state); answered with `Copied`, or `Tainted` if what is on disk cannot be used, or blocks that
    were stated are not to be had.

    own: the records of that step's decision, if this worker stands there itself. stands: of which stages it has the
    state of that step already. pieces: as in `Fetch`; what is this worker's own of them is live or kept.
    """

    plan: Plan
    step: int
    sources: Mapping[int, tuple[int, ...]]
    own: Mapping[int, Record]
    stands: tuple[int, ...]
    pieces: Piecewise = {}

    @property
    def position(self) -> Key:
        """Where this worker is then."""
        return Key(self.step, 0)


class OpenFeeds(Operation, frozen=True):
    """A joiner: connect to the first donor of each group that can be reached and copy what it offers, in memory;
    answered with the position of each offer.

    groups: (donors in order of preference, stages to ask for).
    """

    ticket: int
    groups: tuple[tuple[tuple[Member, ...], tuple[int, ...]], ...]


class Watch(Operation, frozen=True):
    """A joiner: wait until something comes from a feed, or from the coordinator; answered with a `Seen` for each feed
    that had something. A feed that ends aborts it."""


class Adopt(Operation, frozen=True):
    """A joiner: load what was offered, and bring every stage to the newest position with the steps that have come.
    Nothing interrupts it. Answered with `Copied`.

    passed: by feed, the outcomes of the steps that are to be applied.
    """

    position: Key
    stages: tuple[int, ...]
    passed: tuple[tuple[StepOutcome, ...], ...]


class Replay(Operation, frozen=True):
    """A joiner: apply the step that is next in all feeds. Nothing interrupts it. Answered.

    plan: of the ticket, with the generation in which the step counts as made."""

    step: int
    records: Mapping[int, Record]
    outcome: StepOutcome
    plan: Plan


class Evaluate(Operation, frozen=True):
    """The application's work with the members of this generation beside a step: chunks that pass through the pools.
    Answered, or aborted; the gather that follows says what became of it."""

    plan: Plan
    number: int


class SaveLast(Operation, frozen=True):
    """Take a checkpoint, since the plan asks for one, and wait until it is durable; answered with where that of the
    step is, empty if it is not there. save: None if it has begun already, or there is none to begin."""

    plan: Plan
    step: int
    save: Save | None


class Linger(Operation, frozen=True):
    """A checkpoint was taken before the end: do nothing until that comes, or for as long as such a checkpoint may
    take."""


class Finish(Operation, frozen=True):
    """All steps are done: leave a checkpoint, and where this worker is the job's leader write final/; answered with
    whether that was written. save: as in `SaveLast`. digests: by stage, of the state that all hold. position,
    sources, pieces: as in `Fetch`, of the stages that the job's leader does not hold."""

    plan: Plan
    step: int
    save: Save | None
    digests: Mapping[int, str]
    position: Key
    sources: Mapping[int, tuple[int, ...]] = {}
    pieces: Piecewise = {}


class Opened(msgspec.Struct, frozen=True):
    """Answers `Open`. lost: (stage, lane) of results that were held as part of a sum that the plan tears apart. disk:
    steps of checkpoints that can be read. built: at step 0 the digests of the initial states of the stages that it has
    anything of."""

    lost: tuple[tuple[int, int], ...] = ()
    disk: tuple[int, ...] = ()
    built: Mapping[int, str] = {}


class Copied(msgspec.Struct, frozen=True):
    """The state has been copied. records: of its position's decision. gathers: those of that step known so far.
    built: digests of the initial states that were built anew, by stage."""

    records: Mapping[int, Record] = {}
    gathers: GatheredRecords = {}
    built: Mapping[int, str] = {}


class Seen(msgspec.Struct, frozen=True):
    """An item from a feed. step: the number of the one that came, with its records; 0: the donor has no more now."""

    feed: int
    step: int = 0
    records: Mapping[int, Record] = {}


# ---- what else a driver is told


class EndOrdered(msgspec.Struct, frozen=True):
    """The job's own host ends the job, and no coordinator answers: all are to save the same step and leave."""

    why: Why


# ---- effects


class AtOnce(msgspec.Struct, frozen=True):
    """An effect that is never answered."""


class Cut(AtOnce, frozen=True):
    """Leave every transfer of this generation and older ones."""

    generation: int


class Tell(AtOnce, frozen=True):
    """Send to the coordinator."""

    message: wire.AnyMessage


class Decided(AtOnce, frozen=True):
    """A decision was taken here. first: the first one of a generation."""

    key: Key
    generation: int
    first: bool


class Shelve(AtOnce, frozen=True):
    """Put what is held of the state at `position` on the shelf of a generation, for members that lack it; it stays as
    it is until `Unshelve`. gathers: that belong to it. live: what of the present state is of that position, by stage;
    else only what is kept is. The application's part of the present state is given as it was right after the update, be
    the position a later one: whoever takes it does again what comes between."""

    generation: int
    position: Key
    records: Mapping[int, Record]
    gathers: GatheredRecords
    live: Mapping[int, Extents]


class Unshelve(AtOnce, frozen=True):
    """Nobody asks for what is on the shelf any more."""


class OfferFeeds(AtOnce, frozen=True):
    """Everybody who has asked to follow gets the state as it is now, and then the steps that follow."""

    position: Key
    records: Mapping[int, Record]
    gathers: GatheredRecords
    stages: tuple[int, ...]


class CutFeeds(AtOnce, frozen=True):
    """The state jumps: who follows this worker has to begin anew."""


class CloseFeeds(AtOnce, frozen=True):
    """This worker follows nobody any more."""


class EnteredPlan(AtOnce, frozen=True):
    """All have settled: a generation goes on from here."""

    plan: Plan
    step: int


class Invalidate(AtOnce, frozen=True):
    """Checkpoints and snapshots of steps after `sound` count for nothing. first: this worker sees to what all share."""

    sound: int
    first: bool


class Keep(AtOnce, frozen=True):
    """Take a snapshot in memory of all stages held, as they are now, of this step, and copy some of other pools beside
    it. `OthersKept` or `NotKept` says what came of it, `InMemory` what there is then.

    sources, pieces: of others, as in `Fetch`.
    """

    plan: Plan
    step: int
    sources: Mapping[int, tuple[int, ...]]
    pieces: Piecewise


class RetireKept(AtOnce, frozen=True):
    """All stages have a snapshot of this step: of older ones may go what no rule keeps. proven: up to which step states
    are known to be right."""

    step: int
    proven: int


class ForgetKept(AtOnce, frozen=True):
    """Snapshots of steps after this one count for nothing, since these are done again."""

    after: int


class Skipped(AtOnce, frozen=True):
    """A tier took nothing of a step. tell: it has not been told yet."""

    step: int
    why: Why
    tell: bool
    tier: str = "memory"


class DropLanes(AtOnce, frozen=True):
    """The application has raised: what it was computing is dropped, and the state stands as after the last update."""


class Save(AtOnce, frozen=True):
    """Begin a checkpoint of the state as it is, that of this step. Where this worker is the job's leader, `PartsThere`
    says when all has come that is to go into it, and `SaveEnded` what became of it.

    boundary: it does not follow directly upon the update, so the application may have learnt something since; then one
    that is on disk already is not taken again. past: it is through with the step.
    """

    plan: Plan
    step: int
    due: Due
    records: Mapping[int, Record]
    boundary: bool = False
    past: bool = False
    metrics: Mapping[str, float] = {}


class AbandonSave(AtOnce, frozen=True):
    """The checkpoint that is incomplete will never be complete. plan: of the generation that is the reason, if one is:
    then what is still to be written of the own part is copied now."""

    why: Why
    plan: Plan | None


# ---- answers


class Answer(msgspec.Struct, frozen=True):
    """Answer to an ask."""


class Arrived(Answer, frozen=True):
    """To `JoinAsked`: this worker is a member, and its state is that of `step`."""

    step: int


class Stepped(Answer, frozen=True):
    """To `StepAsked`: the step has been applied here."""

    step: int


class EndsJob(Answer, frozen=True):
    """To `StepAsked`: by the records of the step whose state this worker has, the job ends with that."""

    reason: str


class GatherDone(Answer, frozen=True):
    """To `GatherAsked` and `SaveAsked`: the same at all; nothing once the job has ended."""

    records: Mapping[int, Record] = {}


class Evaluated(Answer, frozen=True):
    """To `EvaluateAsked`."""


class WentBack(Answer, frozen=True):
    """To any ask: the state is that of another step now, be it a later one; the application goes on from there."""

    step: int


class JobOver(Answer, frozen=True):
    """To `EndAsked`: the job has ended."""


class Released(Answer, frozen=True):
    """To `HoldAsked`: nobody needs the state, or its time is over."""


class Exit(Answer, frozen=True):
    """To any ask: this worker ends. drained: it is not to come back. failed: the job has failed."""

    reason: str
    drained: bool = False
    failed: bool = False


class Outvoted(Answer, frozen=True):
    """To any ask: this worker's state is not that of the others; it starts anew."""

    reason: str
    step: int
    generation: int
    sound: int


class Refused(Answer, frozen=True):
    """To any ask: what this worker has built is not what the others have."""

    reason: str


Effect = Operation | AtOnce | Answer | Release | Discard


# ---- events


class DriverEvent(msgspec.Struct, frozen=True):
    """Event of a driver."""


class Heard(DriverEvent, frozen=True):
    """A message of the coordinator. arrived_ns: monotonic, when it came to this process."""

    message: wire.AnyMessage
    arrived_ns: int = 0


class Done(DriverEvent, frozen=True):
    """An operation was carried out."""

    op: int
    result: object = None


class Aborted(DriverEvent, frozen=True):
    """An operation was left. accused: members that something was expected from in vain."""

    op: int
    accused: tuple[int, ...] = ()
    why: Why = LEFT


class Tainted(DriverEvent, frozen=True):
    """An operation came upon something that must not be used, and all have to settle anew. torn: the state has been
    written in part and cannot be mended here."""

    op: int
    why: Why
    torn: bool = False


class TimePassed(DriverEvent, frozen=True):
    """Time has passed."""


class FollowerAsked(DriverEvent, frozen=True):
    """Somebody wants to follow this worker, from its next step's beginning on."""


class InMemory(DriverEvent, frozen=True):
    """Snapshots in this worker's memory. busy: the newest one is being copied by members of other pools."""

    snapshots: Snapshots
    busy: bool = False


class OthersKept(DriverEvent, frozen=True):
    """The snapshots of other pools that are kept here are there, of a step; or cannot be had, since a donor is gone."""

    step: int
    done: bool


class NotKept(DriverEvent, frozen=True):
    """There was no room for a snapshot."""

    step: int
    why: Why


class PartsThere(DriverEvent, frozen=True):
    """A checkpoint is complete, or was given up: the next one may begin."""

    step: int


class SaveEnded(DriverEvent, frozen=True):
    """A checkpoint is on disk, or will never be. reason: it was taken; or was not completed. where: it is. cost_s: what
    one costs, if that is known by now. differs: there is none since members hold different states of the step."""

    step: int
    ok: bool
    reason: str
    where: str = ""
    cost_s: float | None = None
    differs: bool = False


class Ask(DriverEvent, frozen=True):
    """Ask of the application, which waits for an answer."""


class JoinAsked(Ask, frozen=True):
    """The application waits to be a member of the job."""


class StepAsked(Ask, frozen=True):
    """The application wants this step."""

    step: int


class GatherAsked(Ask, frozen=True):
    """The application wants everybody's data; each member asks for the same, in the same order."""

    data: bytes


class EvaluateAsked(Ask, frozen=True):
    """The application wants `Evaluate` done in the present generation."""


class EndAsked(Ask, frozen=True):
    """The application is through with the last step. left: with an earlier one, after which it has left its loop; it
    may have begun the next one. states: as in `GatherPayload`, after the step `at`."""

    left: bool = False
    states: tuple[StageSection, ...] = ()
    at: int = 0


class HoldAsked(Ask, frozen=True):
    """The application has raised. words: what to tell; until_ns: how long to stay."""

    words: wire.AnyMessage
    until_ns: int


class SaveAsked(Ask, frozen=True):
    """The application has evaluated, and a checkpoint may follow from what came of it; each member asks, in the same
    order as it gathers. Answered as `GatherAsked`. stored: the best value by now according to what is on disk, if
    anything is; from the job's leader alone."""

    metrics: Mapping[str, float]
    stored: float | None = None
