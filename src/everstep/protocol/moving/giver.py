"""How a worker gives state to others: who may have what when, who is fed, and when it lets go of whom. Pure.

An *asker* is one conversation. Members that settle get what is on the shelf for their generation, as soon as it is
there. Joiners get an offer at the next step boundary; those that follow are then fed each step, in order and without a
gap, or let go: where the state jumps, where a stage of theirs is not held any more, and where they take too long.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

MAX_BACKLOG = 16
"""Steps that wait for one follower: what they hold is kept in memory."""

# ---- events


@dataclass(frozen=True)
class AskerCame:
    """Somebody wants state of these stages. generation: it is a member that settles in it; None: a joiner. follows: a
    joiner that is fed afterwards."""

    asker: Any
    stages: tuple[int, ...]
    generation: int | None = None
    follows: bool = False


@dataclass(frozen=True)
class ShelfFilled:
    """Members that settle in this generation may have these stages."""

    generation: int
    stages: frozenset[int]


@dataclass(frozen=True)
class ShelfEmptied:
    """Nobody has to copy from the shelf any more."""


@dataclass(frozen=True)
class StandsStill:
    """The state stands still, with these stages."""

    stages: frozenset[int]


@dataclass(frozen=True)
class StepToFeed:
    """A step of these stages is decided, and is about to be applied."""

    stages: frozenset[int]


@dataclass(frozen=True)
class WentElsewhere:
    """The state goes on elsewhere."""


@dataclass(frozen=True)
class AskerHasAll:
    """An asker has all that it wanted of what it was given."""

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
    | AskerHasAll
    | StepSent
    | AskerGone
)

# ---- effects


@dataclass(frozen=True)
class GiveState:
    """Tell an asker what there is, and give it blocks as it asks for them: of the shelf, or of the state as it is."""

    asker: Any
    shelf: bool


@dataclass(frozen=True)
class FeedStep:
    """Have a follower get the step that is decided, after all that it was given before. stages: its gradients."""

    asker: Any
    stages: tuple[int, ...]


@dataclass(frozen=True)
class EndAsker:
    """Nothing more is said to an asker."""

    asker: Any


GiverEffect = GiveState | FeedStep | EndAsker

# ---- the machine


@dataclass
class _Joiner:
    """backlog: steps that have not left yet. closing: it is let go once it has what it was offered."""

    asked: AskerCame
    offered: bool = False
    had: bool = False
    backlog: int = 0
    closing: bool = False


class Giver:
    """One worker's part in giving."""

    def __init__(self) -> None:
        self._shelf: ShelfFilled | None = None
        self._settling: dict[Any, AskerCame] = {}
        self._joiners: dict[Any, _Joiner] = {}

    @property
    def asked(self) -> bool:
        """Whether somebody waits for a step boundary."""
        return any(not joiner.offered for joiner in self._joiners.values())

    @property
    def feeds(self) -> bool:
        """Whether somebody is to get the next step."""
        return any(self._fed(joiner) for joiner in self._joiners.values())

    @property
    def giving(self) -> tuple[Any, ...]:
        """Who may still read what it was offered, be it let go or not."""
        return tuple(asker for asker, joiner in self._joiners.items() if joiner.offered and not joiner.had)

    def handle(self, event: GiverEvent) -> list[GiverEffect]:
        """What is to be done now."""
        match event:
            case AskerCame(asker, _, None):
                self._joiners[asker] = _Joiner(event)
            case AskerCame(asker):
                self._settling[asker] = event
                return self._serve()
            case ShelfFilled():
                self._shelf = event
                return self._serve()
            case ShelfEmptied():
                self._shelf = None
            case StandsStill(stages):
                return self._offer(stages)
            case StepToFeed(stages):
                return self._feed(stages)
            case WentElsewhere():
                return self._let_go(asker for asker, joiner in self._joiners.items() if joiner.offered)
            case AskerHasAll(asker):
                return self._had(asker)
            case StepSent(asker) if asker in self._joiners:  # else it has gone while the step was sent
                self._joiners[asker].backlog -= 1
            case AskerGone(asker):
                self._settling.pop(asker, None)
                self._joiners.pop(asker, None)
        return []

    # ---- the shelf

    def _serve(self) -> list[GiverEffect]:
        shelf = self._shelf
        if shelf is None:
            return []
        now = [one for one in self._settling.values() if one.generation == shelf.generation]
        for one in now:
            del self._settling[one.asker]
        return [GiveState(one.asker, True) if shelf.stages >= set(one.stages) else EndAsker(one.asker) for one in now]

    # ---- joiners

    def _offer(self, stages: frozenset[int]) -> list[GiverEffect]:
        effects: list[GiverEffect] = []
        for asker, joiner in list(self._joiners.items()):
            if joiner.offered:
                continue
            if stages >= set(joiner.asked.stages):
                joiner.offered = True
                effects.append(GiveState(asker, False))
            else:
                del self._joiners[asker]
                effects.append(EndAsker(asker))
        return effects

    @staticmethod
    def _fed(joiner: _Joiner) -> bool:
        return joiner.asked.follows and joiner.offered and not joiner.closing

    def _feed(self, stages: frozenset[int]) -> list[GiverEffect]:
        fed = {asker: joiner for asker, joiner in self._joiners.items() if self._fed(joiner)}
        late = [a for a, j in fed.items() if j.backlog >= MAX_BACKLOG or not stages >= set(j.asked.stages)]
        effects = self._let_go(late)
        for asker, joiner in fed.items():
            if asker not in late:
                joiner.backlog += 1
                effects.append(FeedStep(asker, joiner.asked.stages))
        return effects

    def _let_go(self, askers: Iterable[Any]) -> list[GiverEffect]:
        """Who has not got all that it was offered gets that first: it is worth nothing, but it has been promised."""
        effects: list[GiverEffect] = []
        for asker in list(askers):
            joiner = self._joiners[asker]
            joiner.closing = True
            if joiner.had:
                effects.append(EndAsker(asker))
        return effects

    def _had(self, asker: Any) -> list[GiverEffect]:
        joiner = self._joiners.get(asker)
        if joiner is None:
            return []
        joiner.had = True
        return [EndAsker(asker)] if joiner.closing or not joiner.asked.follows else []
