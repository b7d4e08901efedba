"""What a driver asks to be done, and what it is told: operations, effects, events. Pure data.

An *operation* takes time. One at most is outstanding; it is answered by exactly one `Done`, `Aborted` or `Tainted` that
bears its number. An *effect* is carried out at once and never answered. An *ask* is the application's: it waits until
it gets exactly one *answer*.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from everstep.base.cause import Cause, Why
from everstep.base.extents import Extents
from everstep.base.plan import Member, Plan
from everstep.base.ports import Tag
from everstep.protocol import messages as wire
from everstep.protocol.driver.records import StepOutcome
from everstep.protocol.driver.saves import AbandonSave, Save, SaveAsked
from everstep.protocol.step_types import Discard, Key, Piecewise, Record, Release

LEFT = Why(Cause.LINK, "")

Records = Mapping[int, Record]
GatheredRecords = Mapping[Key, Records]
"""Records of the decisions of one step, by key."""


# ---- operations


@dataclass(frozen=True)
class Operation:
    """op: its number. generation: whoever interrupts that generation, or a later one, ends it; a joiner's is that of
    the plan in its ticket."""

    op: int
    generation: int


@dataclass(frozen=True)
class Open(Operation):
    """Have the stages of the plan's seats, and meet its members; answered with `Opened`.

    step: the one that is computed next. disk: whether readable checkpoints are to be stated; limit: not later ones.
    """

    plan: Plan
    step: int
    disk: bool
    limit: int | None


@dataclass(frozen=True)
class Exchange(Operation):
    """All-gather of small records; answered with the payloads of all members by worker id."""

    tag: Tag
    payload: bytes


@dataclass(frozen=True)
class Compute(Operation):
    """Compute lanes of the step; each is reported at each stage by `LaneDone`, in between.

    lanes: of an unsplit model, those that this worker lacks; of a split one, those that some member lacks, the same at
    all: each passes through all of its seats. It is ended between two lanes or passes.
    """

    plan: Plan
    step: int
    lanes: tuple[int, ...]


@dataclass(frozen=True)
class Reduce(Operation):
    """Offer the lanes' sums and finish the reduction, of all own stages; answered with the agree record's
    `AgreePayload`."""

    plan: Plan
    step: int


@dataclass(frozen=True)
class Update(Operation):
    """Apply the decided step to the stages held; let go of others. Nothing interrupts it. Answered with the unix time
    in ns at which it began. outcome: what the records say."""

    step: int
    records: Mapping[int, Record]
    outcome: StepOutcome
    stages: tuple[int, ...]


@dataclass(frozen=True)
class Fetch(Operation):
    """Copy the state at a position from the donors (worker ids by stage, in order of preference); answered with
    `Copied`, or `Tainted` if blocks that were stated are not to be had. All or nothing.

    pieces: of stages of which this worker has a part itself, or no donor has all.
    """

    plan: Plan
    position: Key
    sources: Mapping[int, tuple[int, ...]]
    pieces: Piecewise = field(default_factory=dict)


@dataclass(frozen=True)
class Restore(Operation):
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
    pieces: Piecewise = field(default_factory=dict)


@dataclass(frozen=True)
class OpenFeeds(Operation):
    """A joiner: connect to the first donor of each group that can be reached and copy what it offers, in memory;
    answered with the position of each offer.

    groups: (donors in order of preference, stages to ask for).
    """

    ticket: int
    groups: tuple[tuple[tuple[Member, ...], tuple[int, ...]], ...]


@dataclass(frozen=True)
class Watch(Operation):
    """A joiner: wait until something comes from a feed, or from the coordinator; answered with a `Seen` for each feed
    that had something. A feed that ends aborts it."""


@dataclass(frozen=True)
class Adopt(Operation):
    """A joiner: load what was offered, and bring every stage to the newest position with the steps that have come.
    Nothing interrupts it. Answered with `Copied`.

    passed: by feed, the outcomes of the steps that are to be applied.
    """

    position: Key
    stages: tuple[int, ...]
    passed: tuple[tuple[StepOutcome, ...], ...]


@dataclass(frozen=True)
class Replay(Operation):
    """A joiner: apply the step that is next in all feeds. Nothing interrupts it. Answered.

    plan: of the ticket, with the generation in which the step counts as made."""

    step: int
    records: Mapping[int, Record]
    outcome: StepOutcome
    plan: Plan


@dataclass(frozen=True)
class Evaluate(Operation):
    """What the application does with the members of this generation beside a step: chunks that pass through the pools.
    Answered, or aborted; the gather that follows says what became of it."""

    plan: Plan
    number: int


@dataclass(frozen=True)
class SaveLast(Operation):
    """Take a checkpoint, since the plan asks for one, and wait until it is durable; answered with where that of the
    step is, empty if it is not there. save: None if it has begun already, or there is none to begin."""

    plan: Plan
    step: int
    save: Save | None


@dataclass(frozen=True)
class Linger(Operation):
    """A checkpoint was taken before the end: do nothing until that comes, or for as long as such a checkpoint may
    take."""


@dataclass(frozen=True)
class Finish(Operation):
    """All steps are done: leave a checkpoint, and where this worker is the job's leader write final/; answered with
    whether that was written. save: as in `SaveLast`."""

    plan: Plan
    step: int
    save: Save | None


@dataclass(frozen=True)
class Opened:
    """Answers `Open`. lost: (stage, lane) of results that were held as part of a sum that the plan tears apart. disk:
    steps of checkpoints that can be read."""

    lost: tuple[tuple[int, int], ...] = ()
    disk: tuple[int, ...] = ()


@dataclass(frozen=True)
class Copied:
    """The state has been copied. records: of its position's decision. gathers: those of that step known so far."""

    records: Mapping[int, Record] = field(default_factory=dict)
    gathers: GatheredRecords = field(default_factory=dict)


@dataclass(frozen=True)
class Seen:
    """What came from a feed. step: the number of the one that came, with its records; 0: the donor has no more now."""

    feed: int
    step: int = 0
    records: Mapping[int, Record] = field(default_factory=dict)


# ---- effects


@dataclass(frozen=True)
class Cut:
    """Leave every transfer of this generation and older ones."""

    generation: int


@dataclass(frozen=True)
class Tell:
    """Send to the coordinator."""

    message: wire.AnyMessage


@dataclass(frozen=True)
class Decided:
    """A decision was taken here. first: the first one of a generation."""

    key: Key
    generation: int
    first: bool


@dataclass(frozen=True)
class Shelve:
    """Put what is held of the state at `position` on the shelf of a generation, for members that lack it; it stays as
    it is until `Unshelve`. gathers: that belong to it. live: whether it is the present state, or a kept one; of the
    present one the application's part is given as it was right after the update, be the position a later one: whoever
    takes it does again what comes between. parts: of further stages, the blocks that are there."""

    generation: int
    position: Key
    records: Mapping[int, Record]
    gathers: GatheredRecords
    stages: tuple[int, ...]
    live: bool
    parts: Mapping[int, Extents] = field(default_factory=dict)


@dataclass(frozen=True)
class Unshelve:
    """Nobody asks for what is on the shelf any more."""


@dataclass(frozen=True)
class OfferFeeds:
    """Everybody who has asked to follow gets the state as it is now, and then the steps that follow."""

    position: Key
    records: Mapping[int, Record]
    gathers: GatheredRecords
    stages: tuple[int, ...]


@dataclass(frozen=True)
class CutFeeds:
    """The state jumps: who follows this worker has to begin anew."""


@dataclass(frozen=True)
class CloseFeeds:
    """This worker follows nobody any more."""


@dataclass(frozen=True)
class EnteredPlan:
    """All have settled: a generation goes on from here."""

    plan: Plan
    step: int


@dataclass(frozen=True)
class Invalidate:
    """Checkpoints and snapshots of steps after `sound` count for nothing. first: this worker sees to what all share."""

    sound: int
    first: bool


@dataclass(frozen=True)
class Keep:
    """Take a snapshot in memory of all stages held, as they are now, of this step; hand some to members of other pools.
    `HandedOver` or `NotKept` says what came of it, `InMemory` what there is then.

    to: by stage, who is to keep it too.
    """

    step: int
    records: Mapping[int, Record]
    to: Mapping[int, Member]


@dataclass(frozen=True)
class RetireKept:
    """All stages have a snapshot of this step: of older ones may go what no rule keeps. proven: up to which step states
    are known to be right."""

    step: int
    proven: int


@dataclass(frozen=True)
class ForgetKept:
    """Snapshots of steps after this one count for nothing, since these are done again."""

    after: int


@dataclass(frozen=True)
class Skipped:
    """A tier took nothing of a step. tell: it has not been told yet."""

    step: int
    why: Why
    tell: bool
    tier: str = "memory"


@dataclass(frozen=True)
class DropLanes:
    """The application has raised: what it was computing is dropped, and the state stands as after the last update."""


# ---- answers


@dataclass(frozen=True)
class Arrived:
    """To `JoinAsked`: this worker is a member, and its state is that of `step`."""

    step: int


@dataclass(frozen=True)
class Stepped:
    """To `StepAsked`: the step has been applied here."""

    step: int


@dataclass(frozen=True)
class GatherDone:
    """To `GatherAsked` and `SaveAsked`: the same at all; nothing once the job has ended."""

    records: Mapping[int, Record] = field(default_factory=dict)


@dataclass(frozen=True)
class Evaluated:
    """To `EvaluateAsked`."""


@dataclass(frozen=True)
class WentBack:
    """To any ask: the state is that of another step now, be it a later one; the application goes on from there."""

    step: int


@dataclass(frozen=True)
class JobOver:
    """To `EndAsked`: the job has ended."""


@dataclass(frozen=True)
class Released:
    """To `HoldAsked`: nobody needs the state, or its time is over."""


@dataclass(frozen=True)
class Exit:
    """To any ask: this worker ends. drained: it is not to come back. failed: the job has failed."""

    reason: str
    drained: bool = False
    failed: bool = False


@dataclass(frozen=True)
class Outvoted:
    """To any ask: this worker's state is not that of the others; it starts anew."""

    reason: str
    step: int
    generation: int
    sound: int


Answer = Arrived | Stepped | GatherDone | Evaluated | WentBack | JobOver | Released | Exit | Outvoted
Effect = (
    Operation
    | Cut
    | Tell
    | Decided
    | Release
    | Discard
    | Shelve
    | Unshelve
    | OfferFeeds
    | CutFeeds
    | CloseFeeds
    | EnteredPlan
    | Invalidate
    | Keep
    | RetireKept
    | ForgetKept
    | Skipped
    | Save
    | AbandonSave
    | DropLanes
    | Answer
)


# ---- events


@dataclass(frozen=True)
class Heard:
    """A message of the coordinator. arrived_ns: monotonic, when it came to this process."""

    message: wire.AnyMessage
    arrived_ns: int = 0


@dataclass(frozen=True)
class Done:
    """An operation was carried out."""

    op: int
    result: object = None


@dataclass(frozen=True)
class Aborted:
    """An operation was left. accused: members that something was expected from in vain."""

    op: int
    accused: tuple[int, ...] = ()
    why: Why = LEFT


@dataclass(frozen=True)
class Tainted:
    """An operation came upon something that must not be used, and all have to settle anew. torn: the state has been
    written in part and cannot be mended here."""

    op: int
    why: Why
    torn: bool = False


@dataclass(frozen=True)
class TimePassed:
    """Time has passed."""


@dataclass(frozen=True)
class FollowerAsked:
    """Somebody wants to follow this worker, from its next step's beginning on."""


@dataclass(frozen=True)
class InMemory:
    """What is kept in memory here: (stage, step), ascending. records: of steps that others have handed over. parts: of
    snapshots that are not whole, the blocks that are there."""

    snapshots: tuple[tuple[int, int], ...]
    records: Mapping[int, Mapping[int, Record]] = field(default_factory=dict)
    parts: Mapping[tuple[int, int], Extents] = field(default_factory=dict)


@dataclass(frozen=True)
class HandedOver:
    """Other pools have got what they are to keep of a step; or not, since somebody is gone."""

    step: int
    done: bool


@dataclass(frozen=True)
class NotKept:
    """There was no room for a snapshot."""

    step: int
    why: Why


@dataclass(frozen=True)
class JoinAsked:
    """The application waits to be a member of the job."""


@dataclass(frozen=True)
class StepAsked:
    """The application wants this step."""

    step: int


@dataclass(frozen=True)
class GatherAsked:
    """The application wants everybody's data; each member asks for the same, in the same order."""

    data: bytes


@dataclass(frozen=True)
class EvaluateAsked:
    """The application wants `Evaluate` done in the present generation."""


@dataclass(frozen=True)
class EndAsked:
    """The application is through with the last step."""


@dataclass(frozen=True)
class HoldAsked:
    """The application has raised. words: what to tell; until_ns: how long to stay."""

    words: wire.AnyMessage
    until_ns: int


Ask = JoinAsked | StepAsked | GatherAsked | SaveAsked | EvaluateAsked | EndAsked | HoldAsked
