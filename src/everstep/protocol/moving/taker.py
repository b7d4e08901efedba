"""How a worker takes the state of some stages from others: which sources it asks, which answers count, when it ends.
Pure.

The first *source* that it asks *leads*: its answer says what there is to take (manifests and records), and blocks of
other sources count only if they are at the same position. Then blocks are requested in chunks, each from a source
that is free and has them. A source that is lost, refuses blocks or sends damaged ones is replaced for those blocks
alone. The copy ends with all blocks or with a reason, and nothing is used before all blocks are here.

Three ways differ in little:

- *To settle*, one source leads; more are asked while that is worthwhile, or once no other source has the rest.
- *No source has all*: every source leads, since each knows only the digests of its own part.
- *To follow*, the first source that can be reached leads, and then feeds its steps; a few others are asked at the
  same moment, before they take another step. A leader that is lost then is not replaced. If no source has all, all
  of them lead and feed, and none is done without.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from everstep.base.extents import NONE, WHOLE, Extents, Sizes
from everstep.base.plan import Plan, WorkerKey
from everstep.protocol.moving.chunks import Chunk, Chunks
from everstep.protocol.step_types import Key, Pieces, Piecewise


@dataclass(frozen=True)
class TakeOrder:
    """An order to take state.

    stages: those to take. sources: worker ids in order of preference. at_once: most sources asked at once. position:
    where they have to be, None: where the leading source is. pieces: of the one stage that is taken in part, or that
    no source has completely; None: each stage is taken completely, from any source. follows: the leading source then
    feeds its steps.
    """

    stages: tuple[int, ...]
    sources: tuple[WorkerKey, ...]
    at_once: int = 1
    position: Key | None = None
    pieces: Pieces | None = None
    follows: bool = False

    @property
    def scattered(self) -> bool:
        """Whether no source has all, so that all are asked."""
        return self.pieces is not None and bool(self.pieces.given)


def following(stages: Sequence[int], sources: Sequence[WorkerKey], at_once: int, *, in_parts: bool) -> TakeOrder:
    """The order to follow. in_parts: all of the sources, which have parts of the stages; else the first one that can be
    reached, and at_once sources are asked for blocks."""
    pieces = Pieces(WHOLE, {key.worker_id: WHOLE for key in sources}) if in_parts else None
    return TakeOrder(tuple(stages), tuple(sources), len(sources) if in_parts else at_once, None, pieces, follows=True)


def orders(
    plan: Plan,
    position: Key,
    sources: Mapping[int, tuple[int, ...]],
    pieces: Piecewise,
    at_once: Callable[[Sequence[int], int], int],
    me: int,
) -> list[TakeOrder]:
    """The orders to carry out one after the other; stages that the same sources have completely go together.
    sources: by stage, worker ids in order of preference; stages from no worker, or from this worker itself first,
    are left out. at_once: number of sources worth asking at once for these stages, out of so many."""
    whole: dict[tuple[int, ...], list[int]] = {}
    others = {stage: ids for stage, ids in sorted(sources.items()) if ids and ids[0] != me}
    for stage, ids in others.items():
        if stage not in pieces:
            whole.setdefault(ids, []).append(stage)
    together = [(tuple(stages), ids, None) for ids, stages in whole.items()]
    return [
        TakeOrder(stages, tuple(plan.member(i).key for i in ids), at_once(stages, len(ids)), position, some)
        for stages, ids, some in (*together, *(((k,), others[k], pieces[k]) for k in sorted(pieces) if k in others))
    ]


# ---- events


@dataclass(frozen=True)
class SourceReached:
    """The request to a source has been made."""

    source: WorkerKey


@dataclass(frozen=True)
class SourceOffers:
    """A source says its position, and its blocks of the stages."""

    source: WorkerKey
    position: Key
    there: Mapping[int, Extents]


@dataclass(frozen=True)
class BlocksKnown:
    """The blocks to take, by stage, now that the offer and this worker's own blocks are known."""

    wants: Mapping[int, tuple[Extents, Sizes]]


@dataclass(frozen=True)
class BlocksCame:
    """A source has answered for a chunk. missing: blocks that did not come, or came damaged."""

    source: WorkerKey
    chunk: Chunk
    missing: Extents = NONE


@dataclass(frozen=True)
class SourceLost:
    """A source cannot be reached, or is gone. why: in words."""

    source: WorkerKey
    why: str


# ---- effects


@dataclass(frozen=True)
class ReachSource:
    """Send the request to a source. leads: it also has to say what there is."""

    source: WorkerKey
    leads: bool


@dataclass(frozen=True)
class FindBlocks:
    """Work out from these sources' answers which blocks to take."""

    leaders: tuple[WorkerKey, ...]


@dataclass(frozen=True)
class AskSource:
    """Ask a source for blocks."""

    source: WorkerKey
    chunk: Chunk


@dataclass(frozen=True)
class LeaveSource:
    """A source is no longer needed. feeds: for blocks; from now on it feeds its steps."""

    source: WorkerKey
    feeds: bool = False


@dataclass(frozen=True)
class TookAll:
    """All blocks are there."""


@dataclass(frozen=True)
class TookNothing:
    """The state cannot be had. refused: sources are here, but do not give blocks that they claimed to have. lost:
    sources that are gone."""

    why: str
    refused: bool
    lost: tuple[WorkerKey, ...]


SourceTold = AskSource | LeaveSource
"""A message to a source that was reached."""
TakerEffect = ReachSource | FindBlocks | SourceTold | TookAll | TookNothing
TakerEvent = SourceReached | SourceOffers | BlocksKnown | BlocksCame | SourceLost


# ---- the machine


@dataclass
class _Asked:
    """A source that has been asked. free: no request to it is open."""

    leads: bool
    reached: bool = False
    offer: tuple[Key, Mapping[int, Extents]] | None = None
    joined: bool = False
    free: bool = False


class Taker:
    """Carries out an order."""

    def __init__(self, order: TakeOrder, most: int) -> None:
        """most: blocks in a chunk."""
        self.order = order
        self.over = False
        self._waiting = deque(order.sources)
        self._asked: dict[WorkerKey, _Asked] = {}
        self._lost: dict[WorkerKey, str] = {}
        self._refused: list[str] = []
        self._position = order.position
        self._describing = self._described = False
        self._chunks: Chunks[WorkerKey] = Chunks(most)
        self._effects: list[TakerEffect] = []

    def begin(self) -> list[TakerEffect]:
        """Ask the first source, or all of them if no source has all."""
        for _ in range(len(self._waiting) if self.order.scattered else min(1, len(self._waiting))):
            self._reach(leads=True)
        return self._taken()

    def handle(self, event: TakerEvent) -> list[TakerEffect]:
        """Take one event. Returns the effects. Events after the end, or from a dropped source, have no effect."""
        if self.over:
            return []
        if isinstance(event, BlocksKnown):
            self._know(event)
        elif event.source in self._asked:
            match event:
                case SourceReached():
                    self._reached(event.source)
                case SourceOffers():
                    self._offered(event)
                case BlocksCame():
                    self._came(event)
                case _:
                    self._gone(event.source, event.why)
        return self._taken()

    def stop(self) -> None:
        """The copy is not wanted any more: ask no further source."""
        self.over = True

    def _taken(self) -> list[TakerEffect]:
        if not self.over:
            self._go_on()
        effects, self._effects = self._effects, []
        return effects

    # ---- sources

    def _reach(self, leads: bool) -> None:
        source = self._waiting.popleft()
        self._asked[source] = _Asked(leads)
        self._effects.append(ReachSource(source, leads))

    def _reached(self, source: WorkerKey) -> None:
        """To follow, ask a few more sources at the same moment: later they are at another step."""
        asked = self._asked[source]
        asked.reached = True
        if self.order.follows:
            for _ in range(min(self.order.at_once - 1, len(self._waiting))):
                self._reach(leads=False)
            self._waiting.clear()

    def _offered(self, event: SourceOffers) -> None:
        """A source at another position has other blocks under the same names."""
        asked = self._asked[event.source]
        asked.offer = event.position, event.there
        if asked.leads and self._position is None:
            self._position = event.position
        elsewhere = {s: at.offer[0] for s, at in self._asked.items() if at.offer and at.offer[0] != self._position}
        for source, position in elsewhere.items() if self._position is not None else ():
            self._effects.append(LeaveSource(source))
            self._gone(source, f"it offered {position}, not {self._position}")

    def _gone(self, source: WorkerKey, why: str) -> None:
        """Request the open blocks of a lost source from others. To follow, no other source can feed steps after its
        offer."""
        asked = self._asked.pop(source)
        self._lost[source] = why
        self._chunks.lost(source)
        if self.order.follows and asked.leads and (asked.reached or self.order.scattered):
            self._fail()
        elif not self._describing and self._waiting:
            self._reach(leads=True)

    @property
    def _leaders(self) -> list[WorkerKey]:
        return [source for source, asked in self._asked.items() if asked.leads]

    # ---- blocks

    def _know(self, event: BlocksKnown) -> None:
        self._described = True
        for stage, (missing, of) in event.wants.items():
            self._chunks.want(stage, missing, of)
        for _ in range(min(self.order.at_once - len(self._asked), len(self._waiting))):
            self._reach(leads=False)

    def _came(self, event: BlocksCame) -> None:
        self._chunks.done(event.source, event.chunk, event.missing)
        self._asked[event.source].free = True
        if event.missing:
            stage, lacking = event.chunk.stage, event.missing
            self._refused.append(f"blocks of stage {stage} ({lacking}) did not come from {event.source}")

    def _go_on(self) -> None:
        """Send requests to free sources; check whether the copy has ended, or needs another source."""
        if not self._described:
            self._describe()
            return
        for source, asked in self._asked.items():
            if asked.offer is not None and not asked.joined:
                asked.joined = asked.free = True
                self._chunks.join(source, asked.offer[1])
            chunk = self._chunks.next(source) if asked.free else None
            if chunk is not None:
                asked.free = False
                self._effects.append(AskSource(source, chunk))
        opening = any(asked.offer is None for asked in self._asked.values())
        if self._chunks.finished:
            self._end(TookAll())
        elif not opening and self._chunks.out_of_reach:
            if self._waiting:
                self._reach(leads=False)
            else:
                self._fail()

    def _describe(self) -> None:
        """Once all leading sources have answered."""
        leaders = self._leaders
        if self._describing or any(self._asked[source].offer is None for source in leaders):
            return
        if leaders:
            self._describing = True
            self._effects.append(FindBlocks(tuple(leaders)))
        else:
            self._fail()

    # ---- the end

    def _fail(self) -> None:
        refused = bool(self._refused) or not self._lost
        gone = "; ".join(f"{source}: {why}" for source, why in self._lost.items())
        why = ("; ".join(self._refused) or "none of the donors has all that is wanted") if refused else gone
        self._end(TookNothing(why, refused, tuple(self._lost)))

    def _end(self, how: TookAll | TookNothing) -> None:
        self.over = True
        for source, asked in self._asked.items():
            self._effects.append(LeaveSource(source, isinstance(how, TookAll) and self.order.follows and asked.leads))
        self._effects.append(how)
