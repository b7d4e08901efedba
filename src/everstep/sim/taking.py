"""Moving states between simulated workers, the taker's half: blocks of stages from several donors at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from everstep.base.extents import NONE, Extents
from everstep.protocol.chunks import Chunk, Chunks
from everstep.sim.life import Life
from everstep.sim.model import PLANES, Blocks, merged, present
from everstep.sim.state import SimCopy
from everstep.sim.world import MS, SimConnection

CONNECT_NS = 500 * MS
KNOWN = tuple(
    ("copies", name) for name in ("from several", "in the place of one lost", "of what is not whole", "refused", "rest")
)
"""What `World.seen` counts of them."""


class Taking:
    """What is wanted of some stages, who is asked for it, and what has come.

    say: what to send for a chunk. changed: called when something has come, or somebody is gone.
    """

    def __init__(
        self, life: Life, most: int, say: Callable[[int, Extents], tuple[Any, ...]], changed: Callable[[], None]
    ) -> None:
        self.life = life
        self.states: dict[int, Blocks] = {}
        self.refused = False
        self.taken: dict[int, Extents] = {}
        self.meta: SimCopy | None = None
        self._say = say
        self._changed = changed
        self._queue: Chunks[SimConnection] = Chunks(most)
        self._asked: dict[SimConnection, Chunk | None] = {}
        self._came: dict[SimConnection, Extents] = {}
        self._owed = NONE

    def want(self, stage: int, own: Blocks, missing: Extents) -> None:
        """These blocks of a stage; the others are this worker's own."""
        self._queue.want(stage, missing, PLANES)
        self.states[stage] = own
        if not missing.whole:
            self._note("rest")

    def join(self, connection: SimConnection, stages: Mapping[int, Extents]) -> None:
        """Somebody has been reached who has this."""
        if any(not given.whole for given in stages.values()):
            self._note("of what is not whole")
        self._asked[connection] = None
        self._queue.join(connection, stages)
        self._ask()

    def came(self, connection: SimConnection, copy: SimCopy) -> None:
        """What a donor has given. What is not among it, it does not have."""
        chunk = self._asked.get(connection)
        if chunk is None:
            return
        self._asked[connection] = None
        self.meta = self.meta or copy
        ((stage, blocks),) = copy.states.items()
        given = present(blocks) & chunk.extents
        if present(self.states[stage]) & given:
            raise AssertionError(f"{self.life.me} has got blocks of stage {stage} twice: {given}")
        self.states[stage] = merged(self.states[stage], blocks)
        self.taken[stage] = self.taken.get(stage, NONE) | given
        if self._owed & given:
            self._note("in the place of one lost")
        if not given.covers(chunk.extents):
            self.refused = True
            self._note("refused")
        if given and connection not in self._came and self._came:
            self._note("from several")
        self._came[connection] = given
        self._queue.done(connection, chunk, chunk.extents - given)
        self._ask()
        self._changed()

    def lost(self, connection: SimConnection) -> None:
        """A donor is gone."""
        if connection not in self._asked:
            return
        chunk = self._asked.pop(connection)
        if chunk is not None:
            self._owed |= chunk.extents
        self._queue.lost(connection)
        self._ask()
        self._changed()

    def close(self) -> None:
        """Nobody is asked any more."""
        for connection in self._asked:
            connection.close(self.life)
        self._asked = {}

    def uses(self, connection: SimConnection) -> bool:
        """Whether something may still come from there."""
        return connection in self._asked

    @property
    def finished(self) -> bool:
        """Whether all has come."""
        return self._queue.finished

    @property
    def out_of_reach(self) -> bool:
        """Whether somebody else has to be asked."""
        return bool(self._queue.out_of_reach)

    def _ask(self) -> None:
        for connection, chunk in list(self._asked.items()):
            if chunk is None:
                found = self._queue.next(connection)
                self._asked[connection] = found
                if found is not None:
                    connection.send(self.life, self._say(found.stage, found.extents))

    def _note(self, name: str) -> None:
        self.life.world.seen["copies", name] += 1
