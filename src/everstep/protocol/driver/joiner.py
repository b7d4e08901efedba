"""A worker that is no member yet: copies what donors offer, and follows their steps until a plan has it. Pure.

Each group of stages has a donor. What they offer may be of different steps; the older ones are brought to the newest
with the steps that their donors feed, before anything is loaded. Then all stages go on together.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from everstep.base.errors import check
from everstep.protocol import messages as wire
from everstep.protocol.driver import operations as do
from everstep.protocol.driver.records import Outcome, conclude, stages_in
from everstep.protocol.step_types import Key

Wanted = tuple[type[do.Operation], tuple[Any, ...]]


@dataclass
class _Feed:
    stages: tuple[int, ...]
    position: Key
    steps: deque[do.Seen] = field(default_factory=deque)
    caught_up: bool = False


class Joiner:
    """From a ticket to the plan."""

    def __init__(self, lanes: int) -> None:
        self._lanes = lanes
        self.ticket: wire.Heal | None = None
        self._feeds: list[_Feed] = []
        self._newest: Key | None = None
        self._said = False

    def begin(self, ticket: wire.Heal) -> None:
        """The coordinator says whom to ask."""
        self.ticket, self._feeds, self._newest, self._said = ticket, [], None, False

    def stop(self) -> bool:
        """Follow nobody any more. Returns whether there was somebody."""
        there, self.ticket = self.ticket is not None, None
        self._feeds, self._newest, self._said = [], None, False
        return there

    def next(self) -> Wanted | Literal["healed"] | None:
        """What is to be done now."""
        ticket = self.ticket
        if ticket is None:
            return None
        if not self._feeds:
            return do.OpenFeeds, (ticket.ticket, groups(ticket))
        if self._newest is None:
            newest = max(feed.position for feed in self._feeds)
            missing = [newest.step - feed.position.step for feed in self._feeds]
            if any(len(feed.steps) < n for feed, n in zip(self._feeds, missing, strict=True)):
                return do.Watch, ()
            passed = tuple(
                tuple(map(self._outcome, list(f.steps)[:n])) for f, n in zip(self._feeds, missing, strict=True)
            )
            return do.Adopt, (newest, self._stages, passed)
        if all(feed.steps for feed in self._feeds):
            first = self._next_step()
            return do.Replay, (first.step, first.records, self._outcome(first), ticket.plan)
        if not self._said and all(feed.caught_up for feed in self._feeds):
            self._said = True
            return "healed"
        return do.Watch, ()

    def opened(self, positions: Sequence[Key]) -> None:
        """Each donor has offered its state, of this position."""
        check(self.ticket is not None, "offers without a ticket")
        found = groups(self.ticket)  # type: ignore[arg-type]
        self._feeds = [_Feed(stages, at) for (_, stages), at in zip(found, positions, strict=True)]

    def saw(self, seen: Sequence[do.Seen]) -> None:
        """Something has come from feeds."""
        for one in seen:
            feed = self._feeds[one.feed]
            feed.caught_up = not one.step
            if one.step:
                feed.steps.append(one)

    def adopted(self, operation: do.Adopt) -> None:
        """What was offered has been loaded."""
        self._newest = operation.position
        for feed, passed in zip(self._feeds, operation.passed, strict=True):
            for _ in passed:
                feed.steps.popleft()

    def replayed(self) -> tuple[int, ...]:
        """A step has been applied; returns the stages of which this worker has the state now."""
        for feed in self._feeds:
            feed.steps.popleft()
        return self._stages

    @property
    def _stages(self) -> tuple[int, ...]:
        return tuple(sorted(stage for feed in self._feeds for stage in feed.stages))

    def _next_step(self) -> do.Seen:
        steps = {feed.steps[0].step for feed in self._feeds}
        check(len(steps) == 1, f"feeds are apart: {sorted(steps)}")
        return self._feeds[0].steps[0]

    def _outcome(self, seen: do.Seen) -> Outcome:
        return conclude(seen.step, self._lanes, seen.records, stages_in(seen.records))


def groups(ticket: wire.Heal) -> tuple[tuple[tuple[Any, ...], tuple[int, ...]], ...]:
    """The stages to ask for, by whom to ask: one feed each."""
    donors = {m.worker_id: m for m in ticket.donors}
    holders = ticket.holders or [list(donors)] * len(ticket.stages)
    found: dict[tuple[int, ...], list[int]] = {}
    by_stage: Mapping[int, Sequence[int]] = dict(zip(ticket.stages, holders, strict=True))
    for stage in sorted(by_stage):
        found.setdefault(tuple(i for i in by_stage[stage] if i in donors), []).append(stage)
    return tuple((tuple(donors[i] for i in ids), tuple(stages)) for ids, stages in found.items())
