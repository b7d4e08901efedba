"""When checkpoints are taken, and which are kept: small objects that decide from the figures they are given. Pure.

Time and measurements are passed in. Only the job's leader asks what is due; the records of the step tell the others,
so that all take the same.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from everstep.base.cause import Cause, Why
from everstep.base.config_keys import CheckpointConfig, TierConfig
from everstep.cost.save_interval import MOST_COST, SaveInterval, automatic_interval

Tier = Literal["memory", "disk", "object", "end", "compare"]
TIERS: tuple[Tier, ...] = ("memory", "disk", "object")
END: Tier = "end"
"""A tier in an agree record: the job ends with the checkpoint of that step."""
COMPARE: Tier = "compare"
"""A tier in an agree record: all members compare their states before the next step, since parts of a checkpoint were
of different states.
"""


@dataclass(frozen=True)
class Due:
    """The tiers that take a checkpoint after a step, and why. With `END` it is the last one."""

    tiers: tuple[Tier, ...] = ()
    reason: str = ""
    cause: Cause = Cause.SCHEDULED

    def __bool__(self) -> bool:
        return bool(self.tiers)


@dataclass
class SaveSchedule:
    """Checkpoints that are due after each step, for the job's leader.

    Call `due` once per step, in order. wanted: requests to be answered at the next step. memory_every: the memory
    tier's steps if it has no rule of its own; 0: it is off then. cost_s: training time that the newest one on disk
    took; None before. failures: seen.
    """

    config: CheckpointConfig
    memory_every: int = 0
    wanted: list[Why] = field(default_factory=list)
    cost_s: float | None = None
    failures: int = 0
    _suspected: bool = False
    _began_s: float | None = None
    _last_s: dict[Tier, float] = field(default_factory=dict)

    def active(self) -> tuple[Tier, ...]:
        return tuple(tier for tier in TIERS if tier != "object" or self.config.object.url)

    def ask_again(self, wanted: Sequence[Why]) -> None:
        """The requested checkpoint could not be had after this step."""
        self.wanted = list(wanted)

    def failed(self) -> None:
        """A worker failed: the automatic interval takes it into account."""
        self.failures += 1

    def cost(self, cost_s: float) -> None:
        """Training time that the last checkpoint took."""
        self.cost_s = cost_s

    def request(self, why: Why) -> None:
        """Note a request for a checkpoint after the next step."""
        if why not in self.wanted:
            self.wanted.append(why)

    def suspect(self) -> None:
        """Parts of a checkpoint were of different states: all members have to compare theirs."""
        self._suspected = True

    def compared(self) -> None:
        """States were compared, and are alike."""
        self._suspected = False

    def with_comparison(self, due: Due) -> Due:
        """The tiers, with a comparison if one is due."""
        return replace(due, tiers=(*due.tiers, COMPARE)) if self._suspected else due

    def interval(self, now_s: float) -> SaveInterval:
        """Present interval between checkpoints on disk if the config has no rule, with its reason."""
        if self.config.interval != "auto":
            return SaveInterval(self.config.interval, f"every {self.config.interval:g} s, as configured")
        minutes = self.config.mtbf_minutes
        elapsed_s = now_s - (self._began_s if self._began_s is not None else now_s)
        return automatic_interval(self.cost_s, self.failures, elapsed_s, None if minutes is None else minutes * 60)

    def affordable(self, now_s: float) -> bool:
        """Whether another one now would keep checkpoints within `MOST_COST` of the time since the last one on disk."""
        last_s = self._last_s.get("disk")
        return self.cost_s is None or last_s is None or now_s - last_s >= self.cost_s / MOST_COST

    def due(self, step: int, now_s: float, *, epoch_end: bool = False, epochs: int = 0) -> Due:
        """Checkpoints that are due after this step. now_s: monotonic. epoch_end: a checkpoint at an epoch's end can be
        afforded now. epochs: that are over, if this step is the last one of an epoch; else 0."""
        if self._began_s is None:
            self._began_s = now_s
        interval = self.interval(now_s)
        if self.wanted:
            asked, self.wanted = self.wanted, []
            reason = ", ".join(why.reason for why in asked)
            return self._taken(now_s, self._stored(), reason, asked[0].cause)
        reasons: dict[Tier, str] = {}
        for tier in self.active():
            rule: TierConfig = getattr(self.config, tier)
            self._last_s.setdefault(tier, now_s)
            waited = now_s - self._last_s[tier]
            if rule.every_epochs is not None and epochs and epochs % rule.every_epochs == 0:
                reasons[tier] = f"every {rule.every_epochs} epochs"
            elif epoch_end and tier != "memory" and rule.every_epochs is None:
                reasons[tier] = "the end of an epoch"
            elif rule.every_steps is not None and step % rule.every_steps == 0:
                reasons[tier] = f"every {rule.every_steps} steps"
            elif rule.every_minutes is not None and waited >= rule.every_minutes * 60:
                reasons[tier] = f"every {rule.every_minutes:g} minutes"
            elif _ruled(rule):
                continue
            elif tier == "disk" and waited >= interval.seconds:
                reasons[tier] = interval.reason
            elif tier == "memory" and self.memory_every and step % self.memory_every == 0:
                reasons[tier] = f"every {self.memory_every} steps"
        rule = self.config.object
        if "disk" in reasons and rule.url and not _ruled(rule):
            reasons.setdefault("object", reasons["disk"])
        if "object" in reasons and "disk" not in reasons:
            reasons["disk"] = reasons["object"]
        return self._taken(now_s, tuple(t for t in TIERS if t in reasons), _said(reasons))

    def last(self, why: Why) -> Due:
        """Checkpoints that are due if the job ends after a step."""
        return Due((END, *self._stored()), why.reason, why.cause)

    def _stored(self) -> tuple[Tier, ...]:
        return tuple(tier for tier in self.active() if tier != "memory")

    def _taken(self, now_s: float, tiers: tuple[Tier, ...], reason: str, cause: Cause = Cause.SCHEDULED) -> Due:
        for tier in tiers:
            self._last_s[tier] = now_s
        return Due(tiers, reason, cause)


def evaluates_after(step: int, epochs: int, every: int, every_epochs: int) -> bool:
    """Whether an evaluation follows a step that is not the last. epochs: that are over, if the step is the last one of
    an epoch; else 0. every, every_epochs: steps, and epochs, between evaluations; 0: none."""
    return bool(every and step % every == 0) or bool(every_epochs and epochs and epochs % every_epochs == 0)


def _ruled(rule: TierConfig) -> bool:
    """Whether the config says when a tier takes a checkpoint; else it is taken automatically."""
    return any(every is not None for every in (rule.every_steps, rule.every_epochs, rule.every_minutes))


def _said(reasons: Mapping[Tier, str]) -> str:
    """The reasons of all tiers as one; each with its tiers, if they differ."""
    tiers: dict[str, list[str]] = {}
    for tier in TIERS:
        if tier in reasons:
            tiers.setdefault(reasons[tier], []).append(tier)
    if len(tiers) == 1:
        return next(iter(tiers))
    return "; ".join(f"{reason} ({', '.join(who)})" for reason, who in tiers.items())


def kept(
    steps: Iterable[int],
    rule: TierConfig,
    *,
    pins: Collection[int] = (),
    scores: Mapping[int, float] | None = None,
    best_mode: str = "max",
    proven: int = 0,
    strange: Collection[int] = (),
) -> dict[int, str]:
    """The steps of checkpoints to keep, each with the reason; the newest one always stays. scores: the metric by
    step, if it was evaluated (NaN counts as the worst). proven: the newest step whose state is known to be right:
    the newest checkpoint up to it remains if a later one turns out wrong. strange: the steps whose state is not
    finite."""
    ordered = sorted(set(steps), reverse=True)
    reasons: dict[int, str] = {}
    for step in ordered[: max(1, rule.keep_last)]:
        reasons[step] = "one of the newest"
    for step in [step for step in ordered if step <= proven][:1]:
        reasons.setdefault(step, "the newest that was compared among the workers")
    for step in [step for step in ordered if step not in strange][:1]:
        reasons.setdefault(step, "the newest that is finite")
    for step in best_of(ordered, scores or {}, best_mode)[: rule.keep_best]:
        reasons.setdefault(step, "one of the best")
    for step in ordered:
        if rule.keep_every is not None and step % rule.keep_every == 0:
            reasons.setdefault(step, f"every {rule.keep_every} steps")
        if step in pins:
            reasons.setdefault(step, "pinned")
    return reasons


def best_of(steps: Iterable[int], scores: Mapping[int, float], best_mode: str) -> list[int]:
    """Steps with a score, the best first; on a tie the earlier."""
    sign = -1.0 if best_mode == "max" else 1.0
    judged = [step for step in steps if step in scores and not math.isnan(scores[step])]
    return sorted(judged, key=lambda step: (sign * scores[step], step))
