"""A simulated worker that takes blocks from others: it carries out `protocol.moving.taker` on a virtual network."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

from everstep.base.extents import NONE, WHOLE, Extents, Sizes, union
from everstep.base.plan import WorkerKey
from everstep.protocol.moving import taker as moving
from everstep.protocol.moving.chunks import Chunk
from everstep.sim.life import Life, SimCopy
from everstep.sim.model import NOTHING, PLANES, Blocks, merged, present, without
from everstep.sim.world import SimConnection

_ALL = sum(n for _, n in PLANES)

KNOWN = tuple(
    ("copies", name) for name in ("from several", "in the place of one lost", "of what is not whole", "refused", "rest")
)
"""Cases that `World.seen` counts."""


class _Heard(NamedTuple):
    """The receiver of the result, and of each fed step."""

    ended: Callable[[moving.TookAll | moving.TookNothing], None]
    fed: Callable[[WorkerKey, tuple[Any, ...] | None], None]


class SimTaking:
    """One order being carried out. states: by stage, the worker's own blocks and those that have come. taken: by stage,
    the blocks that have come."""

    def __init__(
        self,
        life: Life,
        order: moving.TakeOrder,
        request: Callable[[WorkerKey, bool], tuple[Any, ...]],
        own: Mapping[int, Blocks],
        ended: Callable[[moving.TookAll | moving.TookNothing], None],
        fed: Callable[[WorkerKey, tuple[Any, ...] | None], None] = lambda source, message: None,
        needs: Callable[[int, Sizes], Extents] = lambda stage, of: WHOLE,
    ) -> None:
        """request: makes the message for a source, given whether it leads. own: blocks that are not to come, by stage.
        fed: called with the source and each step that it feeds, and with None at the end of its feed. needs: blocks of
        a stage of these sizes that the worker is to have then."""
        self.life, self.order = life, order
        self.states = {stage: own.get(stage, NOTHING) for stage in order.stages}
        self._needs = needs
        self.taken: dict[int, Extents] = {}
        self.offer: SimCopy | None = None
        self._request, self._heard = request, _Heard(ended, fed)
        self._lines: dict[WorkerKey, SimConnection] = {}
        self._offers: dict[WorkerKey, tuple[SimCopy, Mapping[int, Extents], Mapping[int, Sizes]]] = {}
        self._known: dict[int, Extents] = {}  # blocks whose digests leaders have told, or own blocks
        self._asked: dict[WorkerKey, Chunk] = {}
        self._did: dict[WorkerKey, set[str]] = {}  # sources that were asked, and whether they gave and refused
        self._owed = NONE
        self._taker = moving.Taker(order, _ALL if life.site.donors == 1 else 1)

    def begin(self) -> None:
        self._carry_out(self._taker.begin())

    def uses(self, connection: SimConnection) -> bool:
        """Whether the connection may still carry something for this."""
        return connection in self._lines.values()

    def close(self) -> None:
        self._taker.stop()
        lines, self._lines = self._lines, {}
        for connection in lines.values():
            connection.close(self.life)

    def _tell(self, event: moving.TakerEvent) -> None:
        self._carry_out(self._taker.handle(event))

    def _carry_out(self, effects: Iterable[moving.TakerEffect]) -> None:
        for effect in effects:
            match effect:
                case moving.ReachSource(source, leads):
                    self._reach(source, leads)
                case moving.FindBlocks(leaders):
                    self._describe(leaders)
                case moving.AskSource(source, chunk):
                    self._asked[source] = chunk
                    self._lines[source].send(self.life, ("blocks", chunk.stage, chunk.extents))
                case moving.LeaveSource(source, True):
                    self._lines[source].send(self.life, ("enough",))
                case moving.LeaveSource(source) if source in self._lines:  # otherwise it has just gone by itself
                    self._lines.pop(source).close(self.life)
                case moving.TookAll():
                    self._heard.ended(effect)
                case moving.TookNothing():
                    self._check(effect)
                    self._heard.ended(effect)

    def _reach(self, source: WorkerKey, leads: bool) -> None:
        if source in self._did or source not in self.order.sources:
            raise AssertionError(f"{self.life.me} asks {source}, of {self.order.sources} after {self._did}")
        self._did[source] = set()
        life, came, lost = self.life, partial(self._received, source), partial(self._lost, source)
        connection = life.reach(source, "donor", came, lost)
        if connection is None:
            life.later(life.world.latency_ns(), self._tell, moving.SourceLost(source, "it cannot be reached"))
            return
        self._lines[source] = connection
        connection.send(life, self._request(source, leads))
        self._tell(moving.SourceReached(source))

    def _check(self, how: moving.TookNothing) -> None:
        """Check that no source is left unasked, and no source is blamed for others."""
        unasked = set(self.order.sources) - self._did.keys()
        if (unasked and not self.order.follows) or not (how.refused or how.lost):
            raise AssertionError(f"{self.life.me} gives up without asking {unasked}: {how}")
        refused = any("refused" in did for did in self._did.values())
        if how.refused != (refused or not how.lost) or set(how.lost) - self._did.keys():
            raise AssertionError(f"{self.life.me} says {how}, of {self._did}")

    def _describe(self, leaders: tuple[WorkerKey, ...]) -> None:
        if self.order.scattered and set(self.order.sources) - self._did.keys():
            raise AssertionError(f"{self.life.me} has asked {leaders} alone of {self.order.sources}: nobody has all")
        self.offer = self._offers[leaders[0]][0]
        told = [self._offers[source][1] for source in leaders]
        self._known = {k: union((present(own), *(there[k] for there in told))) for k, own in self.states.items()}
        of = {k: sizes for source in leaders for k, sizes in self._offers[source][2].items()}
        wanted = {k: self._needs(k, of[k]) - present(own) for k, own in self.states.items()}
        if not all(one.whole for one in wanted.values()):
            self._note("rest")
        self._tell(moving.BlocksKnown({stage: (one, of[stage]) for stage, one in wanted.items()}))

    def _received(self, source: WorkerKey, connection: SimConnection, message: tuple[Any, ...]) -> None:
        match message:
            case ("offer", copy, there, of):
                self._offers[source] = copy, there, of
                if any(not part.whole for part in there.values()):
                    self._note("of what is not whole")
                self._tell(moving.SourceOffers(source, copy.position, there))
            case ("blocks", blocks):
                self._came(source, self._asked.pop(source), blocks)
            case _:
                self._heard.fed(source, message)

    def _came(self, source: WorkerKey, chunk: Chunk, blocks: Blocks) -> None:
        """Take blocks that a source has given. It does not have the others that were asked for."""
        stage = chunk.stage
        given = present(blocks) & chunk.extents & self._known[stage]
        if present(self.states[stage]) & given:
            raise AssertionError(f"{self.life.me} has got blocks of stage {stage} twice: {given}")
        self.states[stage] = merged(self.states[stage], without(blocks, WHOLE - given))
        self.taken[stage] = self.taken.get(stage, NONE) | given
        if self._owed & given:
            self._note("in the place of one lost")
        if not given.covers(chunk.extents):
            self._note("refused")
            self._did[source].add("refused")
        if given and any("gave" in did for one, did in self._did.items() if one != source):
            self._note("from several")
        if given:
            self._did[source].add("gave")
        self._tell(moving.BlocksCame(source, chunk, chunk.extents - given))

    def _lost(self, source: WorkerKey, connection: SimConnection) -> None:
        if self._lines.pop(source, None) is None:
            return
        if source in self._asked:
            self._owed |= self._asked.pop(source).extents
        if self._taker.over:
            self._heard.fed(source, None)
        self._tell(moving.SourceLost(source, "it has gone"))

    def _note(self, name: str) -> None:
        self.life.world.seen["copies", name] += 1
