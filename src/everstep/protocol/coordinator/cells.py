"""Shapes of the workers' cells: where a cell cannot be had any more, its worker goes on with a smaller one. Pure.

The bits of the job do not depend on it. A shape is journaled before any agent hears of it, and each plan names all the
processes of its members.
"""

from __future__ import annotations

from collections.abc import Iterable

from everstep.base.cause import Why
from everstep.placement.cell_shapes import CellShape
from everstep.protocol.coordinator.environment import Environment


class Cells:
    """The shape of each worker's next life. The first of the config's shapes is that of all workers, until theirs is
    made smaller. version: grows when it is."""

    def __init__(self, env: Environment) -> None:
        self.version = 0
        self._env = env
        self._shapes: dict[int, CellShape] = {}

    def shape(self, worker_id: int) -> CellShape:
        shapes = self._env.config.hosts.cells
        return self._shapes.get(worker_id, shapes[0] if shapes else CellShape())

    def smaller(self, worker_id: int) -> CellShape | None:
        """The shape that comes after it; None if there is none."""
        now = self.shape(worker_id).ranks
        return next((shape for shape in self._env.config.hosts.cells if shape.ranks < now), None)

    def shrunk_below(self, worker_id: int, ranks: int) -> bool:
        """Whether this worker was given a smaller shape than one of so many processes."""
        return worker_id in self._shapes and self._shapes[worker_id].ranks < ranks

    def shrink(self, worker_id: int, ranks: int, why: Why, step: int) -> None:
        """Lives of so many processes were given up: give this worker's next life the next smaller shape, and say so,
        unless that was done before. step: that the job has come to."""
        self._env.change()
        before, shape = self.shape(worker_id), self.smaller(worker_id)
        if shape is None or self.shrunk_below(worker_id, ranks):
            return
        self._shapes[worker_id], self.version = shape, self.version + 1
        self._env.persist("cell", worker_id=worker_id, ranks=shape.ranks, cause=why.cause, reason=why.reason)
        said = f"{shape} in place of {before}, to the same bits: {why.reason}"
        about = {"worker_id": worker_id, "ranks": shape.ranks, "step": step}
        self._env.report("cell_shrunk", Why(why.cause, said), **about, **shape._asdict())

    def ranks(self, worker_ids: Iterable[int]) -> list[int]:
        """Processes of these workers' next lives; empty if all are as the job says."""
        return [self.shape(i).ranks for i in worker_ids] if self._shapes else []

    def replay(self, worker_id: int, ranks: int) -> None:
        """An earlier life of the coordinator has made a cell smaller."""
        found = next((shape for shape in self._env.config.hosts.cells if shape.ranks == ranks), None)
        if found is not None:
            self._shapes[worker_id] = found
