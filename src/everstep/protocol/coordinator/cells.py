"""Shapes of the workers' cells: where a cell cannot be had any more, its worker goes on with a smaller one. Pure.

The bits of the job do not depend on it. A shape is journaled before any agent hears of it, and each plan names all the
processes of its members.
"""

from __future__ import annotations

from collections.abc import Container, Iterable

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
        self._wide: dict[int, int] = {}  # hosts of the present life, where the next one has fewer

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

    def narrow(self, hosts: int, worker_ids: Iterable[int], alive: Container[int], why: Why, step: int) -> None:
        """No worker can have more hosts than so many: give the next lives of all no more. Those of these that are alive
        go on as they are, until they end."""
        self._env.change()
        before, self.hosts = self.hosts, hosts
        for worker_id in worker_ids:
            self._wide.setdefault(worker_id, before)
            if worker_id in alive:
                self._keep(worker_id, why, wide=self._wide[worker_id])
            else:
                self.ended(worker_id, why, step)

    def ended(self, worker_id: int, why: Why, step: int) -> None:
        """A worker's life is over: say so if its next one has fewer hosts."""
        rules, before = self._env.config.hosts, self._wide.pop(worker_id, None)
        if before is not None:
            self._say(worker_id, rules.cells[rules.span - before], why, step)

    def _keep(self, worker_id: int, why: Why, **about: int) -> None:
        ranks = self.shape(worker_id).ranks
        self._env.persist("cell", worker_id=worker_id, ranks=ranks, **about, cause=why.cause, reason=why.reason)

    def _say(self, worker_id: int, before: CellShape, why: Why, step: int) -> None:
        shape = self.shape(worker_id)
        self._keep(worker_id, why)
        said = f"{shape} in place of {before}, to the same bits: {why.reason}"
        about = {"worker_id": worker_id, "ranks": shape.ranks, "step": step}
        self._env.report("cell_shrunk", Why(why.cause, said), **about, **shape._asdict())

    def ranks(self, worker_ids: Iterable[int]) -> list[int]:
        """Processes of these workers' next lives; empty if all are as the job says."""
        return [self.shape(i).ranks for i in worker_ids] if self._shapes else []

    def replay(self, worker_id: int, ranks: int, wide: int) -> None:
        """An earlier life of the coordinator has made a cell smaller. wide: hosts that its worker keeps until it ends,
        0 if it has ended."""
        rules = self._env.config.hosts
        found = next((shape for shape in rules.cells if shape.ranks == ranks), None)
        if found is not None and rules.span > 1:
            self.hosts = rules.span - rules.cells.index(found)
            self._wide = {i: n for i, n in {**self._wide, worker_id: min(wide, rules.span)}.items() if n}
        elif found is not None:
            self._shapes[worker_id] = found
