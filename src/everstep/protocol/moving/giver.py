"""How a worker gives state to others: when each may have it, who is fed, and when a conversation ends. Pure.

An *asker* is one conversation. Members that settle, and those that keep snapshots for other pools, get the state on
a shelf as soon as it is there: of their generation, or of the step. Joiners get an offer at the next step boundary.
Those that follow are then fed every step, in order and without a gap, until the state jumps, a stage of theirs is no
longer held, or they take too long. One that gets its part of the stages from several donors waits for the boundary at
which all of them offer.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from everstep.base.extents import Runs
from everstep.placement.shards import numbers_of_runs
from everstep.protocol.converter import converter

MAX_BACKLOG = 16
"""Most steps that wait for one follower; they occupy memory."""

ShelfKind = Literal["settle", "kept"]
"""settle: states of a generation, for members that settle; kept: the newest snapshots in memory, for members that
keep them too.
"""

ShelfName = tuple[ShelfKind, int]
"""The kind, and its generation or step. A shelf of a higher number replaces the one before."""


@dataclass(frozen=True)
class JointAsk:
    """What a joiner asks of one of several donors that offer it a state together. worker: the joiner's id; ticket: its
    ticket; donors: ids of all of them; times: conversations of this ticket with this donor. segments: those of the
    optimizer's state whose gradients this one feeds, None: all; rest: also what is not dealt out."""

    worker: int
    ticket: int
    donors: tuple[int, ...]
    times: int
    segments: Runs | None
    rest: bool


read_joint = converter(JointAsk)


# ---- events


@dataclass(frozen=True)
class AskerCame:
    """A conversation begins: the asker wants state of these stages. shelf: where it lies; None: the asker is a
    joiner. follows: a joiner that is fed afterwards. joint: if others offer it, too."""

    asker: Any
    stages: tuple[int, ...]
    shelf: ShelfName | None = None
    follows: bool = False
    joint: JointAsk | None = None

    @property
    def ticket(self) -> int:
        """Ticket of a joiner that others offer it, too; 0 of any other."""
        return 0 if self.joint is None else self.joint.ticket


@dataclass(frozen=True)
class ShelfFilled:
    """Members may have these stages."""

    shelf: ShelfName
    stages: frozenset[int]


@dataclass(frozen=True)
class ShelfEmptied:
    """No member needs the shelf any more."""

    kind: ShelfKind


@dataclass(frozen=True)
class StandsStill:
    """The state of these stages does not change for now. tickets: those that all of their donors offer it now."""

    stages: frozenset[int]
    tickets: frozenset[int] = frozenset()


@dataclass(frozen=True)
class StepToFeed:
    """A step of these stages is decided, and is about to be applied. segments: by stage, those whose gradients this
    worker has, where not all."""

    stages: frozenset[int]
    segments: Mapping[int, Runs] = field(default_factory=dict)


@dataclass(frozen=True)
class WentElsewhere:
    """The state jumps to another step."""


@dataclass(frozen=True)
class GenerationBegan:
    """All members have settled in a new generation."""


@dataclass(frozen=True)
class AskerHasAll:
    """An asker has all that it wanted of its offer."""

    asker: Any


@dataclass(frozen=True)
class StepSent:
    """A step has left for a follower."""

    asker: Any


@dataclass(frozen=True)
class AskerGone:
    """A conversation has ended."""

    asker: Any


GiverEvent = (
    AskerCame
    | ShelfFilled
    | ShelfEmptied
    | StandsStill
    | StepToFeed
    | WentElsewhere
    | GenerationBegan
    | AskerHasAll
    | StepSent
    | AskerGone
)

# ---- effects


@dataclass(frozen=True)
class GiveState:
    """Tell an asker what there is, and give it blocks as it asks for them: of a shelf, or of the state as it is."""

    asker: Any
    shelf: ShelfKind | None


@dataclass(frozen=True)
class FeedStep:
    """Feed a follower the step that is decided, after everything that it was given before. stages: those whose
    gradients it gets."""

    asker: Any
    stages: tuple[int, ...]


@dataclass(frozen=True)
class EndAsker:
    """End the conversation with an asker."""

    asker: Any


GiverEffect = GiveState | FeedStep | EndAsker

# ---- the machine


@dataclass
class _Joiner:
    """backlog: steps that were not sent yet. closing: it is let go once it has its offer."""

    asked: AskerCame
    offered: bool = False
    had: bool = False
    backlog: int = 0
    closing: bool = False


class Giver:
    """One worker's part in giving."""

    def __init__(self) -> None:
        self._shelves: dict[ShelfKind, ShelfFilled] = {}
        self._waiting: dict[Any, AskerCame] = {}
        self._keeping: set[Any] = set()
        self._joiners: dict[Any, _Joiner] = {}

    def waiting(self, tickets: Collection[int] = ()) -> list[AskerCame]:
        """Askers that wait for a step boundary at which these tickets are offered."""
        those = {0, *tickets}
        return [one.asked for one in self._joiners.values() if not one.offered and one.asked.ticket in those]

    def waits(self, tickets: Collection[int] = ()) -> bool:
        return bool(self.waiting(tickets))

    @property
    def feeds(self) -> bool:
        """Whether a follower gets the next step."""
        return any(self._fed(joiner) for joiner in self._joiners.values())

    @property
    def busy(self) -> bool:
        """Whether an asker still copies a kept snapshot."""
        return bool(self._keeping)

    @property
    def giving(self) -> tuple[Any, ...]:
        """Askers that may still read their offers, including those that were let go."""
        return tuple(asker for asker, joiner in self._joiners.items() if joiner.offered and not joiner.had)

    def handle(self, event: GiverEvent) -> list[GiverEffect]:
        """Take one event. Returns the effects."""
        match event:
            case AskerCame(asker, _, None):
                self._joiners[asker] = _Joiner(event)
            case AskerCame(asker):
                self._waiting[asker] = event
                return self._serve()
            case ShelfFilled((kind, _)):
                self._shelves[kind] = event
                return self._serve()
            case ShelfEmptied(kind):
                self._shelves.pop(kind, None)
            case StandsStill(stages, tickets):
                return self._offer(stages, {0, *tickets})
            case StepToFeed():
                return self._feed(event)
            case WentElsewhere():
                return self._let_go(asker for asker, joiner in self._joiners.items() if joiner.offered)
            case GenerationBegan():
                return self._end_joint()
            case AskerHasAll(asker):
                return self._had(asker)
            case StepSent(asker) if asker in self._joiners:  # else it has gone while the step was sent
                self._joiners[asker].backlog -= 1
            case AskerGone(asker):
                self._waiting.pop(asker, None)
                self._joiners.pop(asker, None)
                self._keeping.discard(asker)
        return []

    # ---- shelves

    def _serve(self) -> list[GiverEffect]:
        effects: list[GiverEffect] = []
        for one in list(self._waiting.values()):
            kind, number = one.shelf  # type: ignore[misc]
            filled = self._shelves.get(kind)
            if filled is None or filled.shelf[1] < number:
                continue
            del self._waiting[one.asker]
            if filled.shelf[1] != number or not filled.stages >= set(one.stages):
                effects.append(EndAsker(one.asker))
                continue
            if kind == "kept":
                self._keeping.add(one.asker)
            effects.append(GiveState(one.asker, kind))
        return effects

    # ---- joiners

    def _end_joint(self) -> list[GiverEffect]:
        """End joiners that were not offered anything: some of their donors may have been about to offer."""
        over = [asker for asker, joiner in self._joiners.items() if joiner.asked.ticket and not joiner.offered]
        for asker in over:
            del self._joiners[asker]
        return [EndAsker(asker) for asker in over]

    def _offer(self, stages: frozenset[int], tickets: Collection[int]) -> list[GiverEffect]:
        effects: list[GiverEffect] = []
        for asker, joiner in list(self._joiners.items()):
            if joiner.offered or joiner.asked.ticket not in tickets:
                continue
            if stages >= set(joiner.asked.stages):
                joiner.offered = True
                effects.append(GiveState(asker, None))
            else:
                del self._joiners[asker]
                effects.append(EndAsker(asker))
        return effects

    @staticmethod
    def _fed(joiner: _Joiner) -> bool:
        return joiner.asked.follows and joiner.offered and not joiner.closing

    def _feed(self, step: StepToFeed) -> list[GiverEffect]:
        fed = {asker: joiner for asker, joiner in self._joiners.items() if self._fed(joiner)}
        late = [a for a, j in fed.items() if j.backlog >= MAX_BACKLOG or not _can_feed(step, j.asked)]
        effects = self._let_go(late)
        for asker, joiner in fed.items():
            if asker not in late:
                joiner.backlog += 1
                effects.append(FeedStep(asker, joiner.asked.stages))
        return effects

    def _let_go(self, askers: Iterable[Any]) -> list[GiverEffect]:
        """Let askers go. An asker that has not got its whole offer gets that first: it is worthless, but it was
        promised."""
        effects: list[GiverEffect] = []
        for asker in list(askers):
            joiner = self._joiners[asker]
            joiner.closing = True
            if joiner.had:
                effects.append(EndAsker(asker))
        return effects

    def _had(self, asker: Any) -> list[GiverEffect]:
        joiner = self._joiners.get(asker)
        self._keeping.discard(asker)
        if joiner is None:
            return []
        joiner.had = True
        return [EndAsker(asker)] if joiner.closing or not joiner.asked.follows else []


def _can_feed(step: StepToFeed, asked: AskerCame) -> bool:
    """Whether this worker has all gradients of the step that a follower gets from it."""
    wanted = None if asked.joint is None else asked.joint.segments
    parts = [numbers_of_runs(step.segments[k]) for k in asked.stages if k in step.segments]
    return step.stages >= {*asked.stages} and all(
        wanted is not None and numbers_of_runs(wanted) <= one for one in parts
    )
