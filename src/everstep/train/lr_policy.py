"""What happens to batch size and learning rate when the number of workers changes.

By default nothing: the global batch is constant. With `batch: per_worker` the global batch follows the number of
workers, and the learning rate follows the batch by a rule, warmed up after each change. This voids exactness.
"""

from __future__ import annotations

import math
from typing import Any

from everstep.base.errors import check


class LrPolicy:
    """The factor on the scheduled learning rate.

    rule: 'none' (1), 'linear' (batch ratio) or 'sqrt'. The factor moves linearly from its old to its new value over
    `warmup_steps` updates after a change.
    Source: linear rule and gradual warm-up, Goyal et al. (2017), sections 2.1 and 2.2; square root, Krizhevsky (2014).
    """

    def __init__(self, rule: str, base_workers: int, warmup_steps: int) -> None:
        check(rule in ("none", "linear", "sqrt"), f"unknown lr rule {rule!r}")
        self.rule = rule
        self.base_workers = base_workers
        self.warmup_steps = warmup_steps
        self.workers = base_workers
        self.begin = 1.0
        self.target = 1.0
        self.since = 0

    def target_factor(self, workers: int) -> float:
        ratio = workers / self.base_workers
        return {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[self.rule]

    def factor(self) -> float:
        """For the next update."""
        if self.warmup_steps <= 0 or self.since >= self.warmup_steps:
            return self.target
        return self.begin + (self.target - self.begin) * (self.since + 1) / self.warmup_steps

    def advance(self, workers: int) -> float:
        """One update made with this many workers; returns the factor for it."""
        if workers != self.workers:
            self.begin = self.begin + (self.target - self.begin) * self._progress()
            self.target = self.target_factor(workers)
            self.workers = workers
            self.since = 0
        factor = self.factor()
        self.since += 1
        return factor

    def _progress(self) -> float:
        return 1.0 if self.warmup_steps <= 0 else min(1.0, self.since / self.warmup_steps)

    def state_dict(self) -> dict[str, Any]:
        return {"workers": self.workers, "begin": self.begin, "target": self.target, "since": self.since}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.workers, self.since = int(state["workers"]), int(state["since"])
        self.begin, self.target = float(state["begin"]), float(state["target"])
