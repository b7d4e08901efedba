"""Operations and effects of a driver, and the events that it takes. Pure data.

An *operation* takes time. At most one is outstanding; exactly one `Done`, `Aborted` or `Tainted` with its number
answers it. An *effect* is carried out at once and never answered. An *ask* comes from the application, which waits
until it gets exactly one *answer*.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from everstep.base.cause import Cause, Why
from everstep.base.extents import Extents, Sizes
from everstep.base.plan import Member, Plan
from everstep.base.ports import Tag
from everstep.placement.probes import Trial
from everstep.protocol import messages as wire
from everstep.protocol.driver.policy import Due
from everstep.protocol.driver.records import StageSection, StepOutcome
from everstep.protocol.moving.giver import JointAsk
from everstep.protocol.step_types import Discard, Key, Piecewise, Record, Release, Snapshots

LEFT = Why(Cause.LINK, "")

Records = Mapping[int, Record]
GatheredRecords = Mapping[Key, Records]
"""Records of the decisions of one step, by key."""


# ---- operations


class Operation(msgspec.Struct, frozen=True):
    """op: its number. generation: a message that ends this generation, or a later one, cuts the operation; for a
    joiner it is that of the plan in its ticket."""

    op: int
    generation: int


class Open(Operation, frozen=True):
    """Have the stages of the plan's seats, and connect to its members; answered with `Opened`. step: the one that is
    computed next. disk: whether to state readable checkpoints; limit: none of a later step."""

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

    lanes: of an unsplit model, those that this worker lacks; of a split one, those that some member lacks, the same
    for all members: each passes through all of its seats. The operation is cut between two lanes or passes. trials:
    lanes that members other than their owners compute as well, so that the records can be compared.
    """

    plan: Plan
    step: int
    lanes: tuple[int, ...]
    trials: tuple[Trial, ...] = ()


class Reduce(Operation, frozen=True):
    """Offer the lanes' sums and finish the reduction for all own stages; answered with the `AgreePayload`. compare:
    it includes the digests of the states before the step."""

    plan: Plan
    step: int
    compare: bool = False


class Update(Operation, frozen=True):
    """Apply the decided step to the stages held, and drop other stages. Nothing interrupts it. Answered with the
    unix time in ns at which it began. outcome: of the step's records."""

    step: int
    records: Mapping[int, Record]
    outcome: StepOutcome
    stages: tuple[int, ...]


class Spread(Operation, frozen=True):
    """Send the parameters that were updated here to the members that did not update them, and get theirs; answered
    with `Holds`."""

    plan: Plan
    step: int


class Fetch(Operation, frozen=True):
    """Copy the state at a position from the donors (worker ids by stage, in order of preference); answered with
    `Copied`, or with `Tainted` if blocks that were stated cannot be had. All or nothing. pieces: of stages of which
    this worker has a part itself, or no donor has all."""

    plan: Plan
    position: Key
    sources: Mapping[int, tuple[int, ...]]
    pieces: Piecewise = {}


class Restore(Operation, frozen=True):
    """Take the state of a step, each stage from the first of its sources (this worker: its own memory; none: disk,
    or at step 0 the initial state). Answered with `Copied`, or with `Tainted` if a checkpoint cannot be used or
    stated blocks cannot be had.

    own: the records of that step's decision, if this worker is at that step. stands: the stages whose state of that
    step it already has. pieces: as in `Fetch`; this worker's own blocks among them are live or kept.
    """

    plan: Plan
    step: int
    sources: Mapping[int, tuple[int, ...]]
    own: Mapping[int, Record]
    stands: tuple[int, ...]
    pieces: Piecewise = {}

    @property
    def position(self) -> Key:
        """The worker's position once the state is restored."""
        return Key(self.step, 0)


class OpenFeeds(Operation, frozen=True):
    """A joiner: connect to the first donor of each group that can be reached, and copy its offer into memory;
    answered with the position of each offer. groups: (donors in order of preference, stages to ask for). plan: in which
    this worker has its parts, if it gets parts; then all donors offer and feed, as `joint` says, by group and id."""

    ticket: int
    groups: tuple[tuple[tuple[Member, ...], tuple[int, ...]], ...]
    plan: Plan | None = None
    joint: tuple[Mapping[int, JointAsk], ...] = ()


class Watch(Operation, frozen=True):
    """A joiner: wait until a feed or the coordinator sends something; answered with a `Seen` for each feed that did.
    A feed that ends aborts the operation."""


class Adopt(Operation, frozen=True):
    """A joiner: load the offered state, and bring every stage to the newest position with the steps that have come.
    Nothing interrupts it. Answered with `Copied`. passed: by feed, the outcomes of the steps to apply; none of stages
    that come in parts."""

    position: Key
    stages: tuple[int, ...]
    passed: tuple[tuple[StepOutcome, ...], ...]


class Replay(Operation, frozen=True):
    """A joiner: apply the step that is next in all feeds. Nothing interrupts it. Answered with its blocks of stages of
    which it has a part, by stage. plan: of the ticket (with its parts), with the generation in which the step counts as
    made."""

    step: int
    records: Mapping[int, Record]
    outcome: StepOutcome
    plan: Plan


class Evaluate(Operation, frozen=True):
    """The application's work with the members of this generation beside a step: chunks that pass through the pools.
    Answered or aborted; the gather that follows carries the result."""

    plan: Plan
    number: int


class SaveLast(Operation, frozen=True):
    """Take a checkpoint because the plan asks for one, and wait until it is durable; answered with the place of the
    step's checkpoint, "" if there is none. save: None if it has begun already, or cannot begin."""

    plan: Plan
    step: int
    save: Save | None


class Linger(Operation, frozen=True):
    """A checkpoint was taken before the end: wait for the end, or for as long as such a checkpoint may take."""


class Finish(Operation, frozen=True):
    """All steps are done: save a last checkpoint and, if this worker is the job's leader, write final/;
    answered with whether that was written. save: as in `SaveLast`. digests: by stage, of the state that all members
    hold. position, sources, pieces: as in `Fetch`, of the stages that the job's leader does not hold."""

    plan: Plan
    step: int
    save: Save | None
    digests: Mapping[int, str]
    position: Key
    sources: Mapping[int, tuple[int, ...]] = {}
    pieces: Piecewise = {}


class Opened(msgspec.Struct, frozen=True):
    """Answers `Open`. lost: (stage, lane) of results that were held in a sum that the plan tears apart. disk: steps
    of checkpoints that can be read. built: digests of the initial states that this worker holds, at step 0."""

    lost: tuple[tuple[int, int], ...] = ()
    disk: tuple[int, ...] = ()
    built: Mapping[int, str] = {}


class Copied(msgspec.Struct, frozen=True):
    """The state has been copied. records: of its position's decision. gathers: those of that step known so far.
    built: digests of the initial states that had to be built, by stage. sizes: of the states of which no more than this
    worker's share was copied, by stage."""

    records: Mapping[int, Record] = {}
    gathers: GatheredRecords = {}
    built: Mapping[int, str] = {}
    sizes: Mapping[int, Sizes] = {}


class Seen(msgspec.Struct, frozen=True):
    """An item from a feed. step: number of the step that came, with its records; 0: the donor has no more now."""

    feed: int
    step: int = 0
    records: Mapping[int, Record] = {}


# ---- what else a driver is told


class EndOrdered(msgspec.Struct, frozen=True):
    """The job's own host ends the job, and no coordinator answers: all members have to save the same step and leave."""

    why: Why


# ---- effects


class AtOnce(msgspec.Struct, frozen=True):
    """An effect that is never answered."""


class Cut(AtOnce, frozen=True):
    """Cut every transfer of this generation and older ones."""

    generation: int


class Tell(AtOnce, frozen=True):
    """Send to the coordinator."""

    message: wire.AnyMessage


class Decided(AtOnce, frozen=True):
    """A decision was taken here. first: it is the first one of a generation."""

    key: Key
    generation: int
    first: bool


class Shelve(AtOnce, frozen=True):
    """Put the state at `position` on the shelf of a generation, for members that lack it, until `Unshelve`.

    gathers: those that belong to it. live: blocks of the present state that are of that position, by stage; other
    blocks come from snapshots. The user-loop state is the copy taken right after the update, even if the position is
    a later one: the receiver repeats the gathers in between. stands: nothing changes the state before `Unshelve`; else
    the loop goes on at once, and may.
    """

    generation: int
    position: Key
    records: Mapping[int, Record]
    gathers: GatheredRecords
    live: Mapping[int, Extents]
    stands: bool = False


class Unshelve(AtOnce, frozen=True):
    """No member needs the state on the shelf any more."""


class OfferFeeds(AtOnce, frozen=True):
    """Give every joiner that asked the state as it is now, and feed it the steps that follow. held: blocks of these
    stages that are here, where not all. tickets: of joiners that get it from several donors, and may have it now."""

    position: Key
    records: Mapping[int, Record]
    gathers: GatheredRecords
    stages: tuple[int, ...]
    held: Mapping[int, Extents] = {}
    tickets: frozenset[int] = frozenset()


class CutFeeds(AtOnce, frozen=True):
    """The state jumps: joiners that follow this worker have to start over."""


class CloseFeeds(AtOnce, frozen=True):
    """This worker stops following its donors."""


class EnteredPlan(AtOnce, frozen=True):
    """All members have settled: a generation goes on from here."""

    plan: Plan
    step: int


class Invalidate(AtOnce, frozen=True):
    """Checkpoints and snapshots of steps after `sound` are void. first: this worker deletes those that all share."""

    sound: int
    first: bool


class Keep(AtOnce, frozen=True):
    """Take a snapshot in memory of all stages held, as they are now, of this step, and copy stages of other pools
    beside it. `OthersKept` or `NotKept` reports the result, and `InMemory` the snapshots there are then. sources,
    pieces: of the other pools' stages, as in `Fetch`."""

    plan: Plan
    step: int
    sources: Mapping[int, tuple[int, ...]]
    pieces: Piecewise


class RetireKept(AtOnce, frozen=True):
    """All stages have a snapshot of this step: drop older ones that no rule keeps. proven: the newest step whose
    state is known to be right."""

    step: int
    proven: int


class ForgetKept(AtOnce, frozen=True):
    """Drop snapshots of steps after this one, which are repeated."""

    after: int


class Skipped(AtOnce, frozen=True):
    """A tier saved nothing of a step. tell: this was not reported yet."""

    step: int
    why: Why
    tell: bool
    tier: str = "memory"


class DropLanes(AtOnce, frozen=True):
    """The application has raised: drop the lane it was computing, so that the state is that after the last update."""


class Save(AtOnce, frozen=True):
    """Begin a checkpoint of the present state, which is that of this step.

    If this worker is the job's leader, `PartsThere` reports when all parts have come, and `SaveEnded` how the
    checkpoint ended. boundary: it does not come right after the update, so the application's state may have changed
    since, and one of this step that is already on disk is not repeated. past: the application is done with the step.
    """

    plan: Plan
    step: int
    due: Due
    records: Mapping[int, Record]
    boundary: bool = False
    past: bool = False
    metrics: Mapping[str, float] = {}


class AbandonSave(AtOnce, frozen=True):
    """The unfinished checkpoint will never be complete. plan: of the generation that is the reason, if one is: the
    rest of this worker's own part is then copied now."""

    why: Why
    plan: Plan | None


# ---- answers


class Answer(msgspec.Struct, frozen=True):
    """Answer to an ask."""


class Arrived(Answer, frozen=True):
    """To `JoinAsked`: this worker is a member, with the state of `step`."""

    step: int


class Stepped(Answer, frozen=True):
    """To `StepAsked`: the step has been applied."""

    step: int


class EndsJob(Answer, frozen=True):
    """To `StepAsked`: the job ends with the step whose state this worker has, by that step's records."""

    reason: str


class GatherDone(Answer, frozen=True):
    """To `GatherAsked` and `SaveAsked`: the same data for all members; None once the job has ended."""

    records: Mapping[int, Record] = {}


class Evaluated(Answer, frozen=True):
    """To `EvaluateAsked`."""


class WentBack(Answer, frozen=True):
    """To any ask: the state is that of another step now, perhaps a later one; the application goes on from there."""

    step: int


class JobOver(Answer, frozen=True):
    """To `EndAsked`: the job has ended."""


class Released(Answer, frozen=True):
    """To `HoldAsked`: no worker needs this worker's state, or the time is up."""


class Exit(Answer, frozen=True):
    """To any ask: this worker ends. drained: for good. failed: so has the job. returns: a new life loads a step."""

    reason: str
    drained: bool = False
    failed: bool = False
    returns: bool = False


class Outvoted(Answer, frozen=True):
    """To any ask: this worker's state differs from that of the others; it restarts."""

    reason: str
    step: int
    generation: int
    sound: int


class Refused(Answer, frozen=True):
    """To any ask: the initial state that this worker has built differs from that of the others."""

    reason: str


Effect = Operation | AtOnce | Answer | Release | Discard


# ---- events


class DriverEvent(msgspec.Struct, frozen=True):
    """Input of a driver."""


class Heard(DriverEvent, frozen=True):
    """A message from the coordinator. arrived_ns: monotonic, when it came to this process."""

    message: wire.AnyMessage
    arrived_ns: int = 0


class Done(DriverEvent, frozen=True):
    """An operation was carried out."""

    op: int
    result: object = None


class Aborted(DriverEvent, frozen=True):
    """An operation was cut or failed. accused: members from which data was expected in vain."""

    op: int
    accused: tuple[int, ...] = ()
    why: Why = LEFT


class Tainted(DriverEvent, frozen=True):
    """An operation found data that must not be used, and all members have to settle again. torn: the state was
    partly overwritten and cannot be mended here. odd: members whose state is wrong."""

    op: int
    why: Why
    torn: bool = False
    odd: tuple[int, ...] = ()


class TimePassed(DriverEvent, frozen=True):
    """Time has passed."""


class FollowerAsked(DriverEvent, frozen=True):
    """A joiner wants to follow this worker from the start of its next step. joint: from one that others
    offer it, too."""

    joint: JointAsk | None = None


class InMemory(DriverEvent, frozen=True):
    """Snapshots in this worker's memory. busy: members of other pools are still copying the newest one."""

    snapshots: Snapshots
    busy: bool = False


class OthersKept(DriverEvent, frozen=True):
    """The snapshots of other pools that this worker keeps are here, of a step; or a donor is gone."""

    step: int
    done: bool


class NotKept(DriverEvent, frozen=True):
    """There was no room for a snapshot."""

    step: int
    why: Why


class PartsThere(DriverEvent, frozen=True):
    """A checkpoint has all its parts, or was given up: the next one may begin."""

    step: int


class SaveEnded(DriverEvent, frozen=True):
    """A checkpoint is on disk, or will never be. reason: why it was taken, or was not completed. where: its place.
    cost_s: time that a checkpoint costs, if that is known yet. differs: it failed because members hold different
    states of the step."""

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
    """The application wants data of all members; each member asks for the same, in the same order."""

    data: bytes


class EvaluateAsked(Ask, frozen=True):
    """The application wants `Evaluate` in the present generation."""


class EndAsked(Ask, frozen=True):
    """The application is done with the last step; left: it has left its loop after an earlier one, maybe in the next.
    states: as in `GatherPayload`, after the step `at`. metrics: of evaluations; they rank the last checkpoint."""

    left: bool = False
    states: tuple[StageSection, ...] = ()
    at: int = 0
    metrics: Mapping[str, float] = {}


class HoldAsked(Ask, frozen=True):
    """The application has raised. words: message for the coordinator; until_ns: how long this worker stays."""

    words: wire.AnyMessage
    until_ns: int


class SaveAsked(Ask, frozen=True):
    """The application has evaluated; a checkpoint may follow. stored: the leader's best on disk. past: as of `Save`."""

    metrics: Mapping[str, float]
    stored: float | None = None
    past: bool = False
