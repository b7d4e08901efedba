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
    made smaller. version: grows when it is. hosts: of each next life."""

    def __init__(self, env: Environment) -> None:
        self.version = 0
        self.hosts = env.config.hosts.span
        self._env = env
        self._shapes: dict[int, CellShape] = {}
        self._over: dict[int, int] = {}  # hosts of each worker's next life, as it was said

    def shape(self, worker_id: int) -> CellShape:
        rules = self._env.config.hosts
        return self._shapes.get(worker_id, rules.cells[rules.span - self.hosts] if rules.cells else CellShape())

    def smaller(self, worker_id: int) -> CellShape | None:
        """The shape that comes after it on the same host; None if there is none."""
        if self._env.config.hosts.span > 1:
            return None
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
        self._say(worker_id, before, why, step)

    def narrow(self, hosts: int, ended: Iterable[int], why: Why, step: int) -> None:
        """No worker can have more hosts than so many: give the next lives of all no more. ended: workers that are to
        have such a life now; the others go on as they are."""
        self._env.change()
        self.hosts = hosts
        for worker_id in ended:
            self.ended(worker_id, why, step)

    def ended(self, worker_id: int, why: Why, step: int) -> None:
        """A worker's life is over: say so if its next one has fewer hosts."""
        rules, before = self._env.config.hosts, self._over.get(worker_id, self._env.config.hosts.span)
        if self.hosts < before:
            self._over[worker_id] = self.hosts
            self._say(worker_id, rules.cells[rules.span - before], why, step)

    def _say(self, worker_id: int, before: CellShape, why: Why, step: int) -> None:
        shape = self.shape(worker_id)
        self._env.persist("cell", worker_id=worker_id, ranks=shape.ranks, cause=why.cause, reason=why.reason)
        said = f"{shape} in place of {before}, to the same bits: {why.reason}"
        about = {"worker_id": worker_id, "ranks": shape.ranks, "step": step}
        self._env.report("cell_shrunk", Why(why.cause, said), **about, **shape._asdict())

    def ranks(self, worker_ids: Iterable[int]) -> list[int]:
        """Processes of these workers' next lives; empty if all are as the job says."""
        return [self.shape(i).ranks for i in worker_ids] if self._shapes else []

    def replay(self, worker_id: int, ranks: int) -> None:
        """An earlier life of the coordinator has made a cell smaller."""
        rules = self._env.config.hosts
        found = next((shape for shape in rules.cells if shape.ranks == ranks), None)
        if found is not None and rules.span > 1:
            self.hosts = self._over[worker_id] = rules.span - rules.cells.index(found)
        elif found is not None:
            self._shapes[worker_id] = found
