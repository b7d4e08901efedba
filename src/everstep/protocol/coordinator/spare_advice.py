"""The coordinator's advice on spares: what lost places have cost so far, by the cost model. Pure."""

from __future__ import annotations

from everstep.base.cause import Cause, Why
from everstep.cost.advice import spare_advice
from everstep.protocol.coordinator.environment import SECOND_NS, Environment

FEWEST = 3
"""Failures before there is any advice."""


class SpareAdvice:
    """Times of failures, and for how long places were empty. It advises once."""

    def __init__(self, env: Environment) -> None:
        self._env = env
        self._lost: dict[int, int] = {}
        self._failures: list[int] = []
        self._away_ns: list[int] = []
        self._given = False

    def lost(self, worker_id: int) -> None:
        """A member has failed, and its place is empty."""
        if not self._given:
            self._lost[worker_id] = self._env.now
            self._failures.append(self._env.now)

    def filled(self, worker_id: int, workers: int, spares: int) -> None:
        """A worker computes in a place that was empty. workers: of the job; spares: that it has already."""
        since = self._lost.pop(worker_id, None)
        if since is None or self._given:
            return
        self._away_ns.append(self._env.now - since)
        between_ns = (self._failures[-1] - self._failures[0]) / max(1, len(self._failures) - 1)
        if spares or len(self._failures) < FEWEST or not between_ns:
            return
        away_ns = sum(self._away_ns) / len(self._away_ns)
        advice = spare_advice(between_ns / SECOND_NS, away_ns / SECOND_NS, workers)
        if advice is not None:
            self._given = True
            self._env.report("warning", Why(Cause.SLOW, advice))
