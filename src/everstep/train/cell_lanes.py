"""Lanes that the processes of one worker compute together, in the same way at its head and at its limbs.

With cell.tp several ranks have a seat together: they run the same passes at the same time, each for its own shards of
the model, and learn of the others' shards in between. Outside such passes each of them has all shards.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from everstep.base.config import Config
from everstep.exact.rank_sums import RankSums
from everstep.parallel.shard_boxes import BoxExchange
from everstep.train.cell_store import CellPlaces, CellStore
from everstep.train.replica import StageReplica

_EXCHANGES_BITS = 32
"""A command has fewer exchanges than 2 to the power of this."""


def places_of(replica: StageReplica, config: Config) -> CellPlaces:
    """Places of the memory that this worker's processes share."""
    cell = config.cell
    return CellPlaces(
        *(replica.layout, replica.parts.model, cell.ranks, config.lanes, cell.least, cell.tp, cell.shards),
        parameters=replica.everything,
        hops=replica.spec.is_split,
    )


class SharedLanes:
    """One rank's part in the lanes. sums: of the lanes; seat, rank: of those that compute a lane together."""

    def __init__(self, replica: StageReplica, config: Config, store: CellStore) -> None:
        cell, parts = config.cell, replica.parts
        self._mesh, self._degree, self._memory = parts.mesh, cell.tp, store.memory
        self.seat, self.rank = divmod(store.rank, cell.tp)
        first = store.rank == 0 or cell.tp > 1  # the head's, and what is computed together with its lanes
        first = first and not replica.spec.is_split  # there a pass knows by itself
        self.sums = RankSums(
            replica.layout,
            parts.model,
            config.lanes,
            store,
            store.places.units,
            whole_first=first,
            mesh=parts.mesh,
            degree=cell.tp,
        )
        self._exchange: BoxExchange | None = store.exchange(cell.shards, cell.tp) if cell.tp > 1 else None

    def restart(self, command: int) -> None:
        """A command begins. Count its exchanges from a point that no rank has come to: seats make different numbers of
        them, and a pass that was left in its middle has left the ranks of a seat at different ones. command: its
        number."""
        self._memory.start(command)
        if self._exchange is not None:
            self._exchange.start(command << _EXCHANGES_BITS)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Inside, this rank computes its own shards, as the others of its seat do."""
        if self._mesh is None or self._exchange is None:
            yield
            return
        with self._mesh.among(self.rank, self._degree, self._exchange):
            yield
