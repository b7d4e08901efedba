"""Verdict on a step whose loss or gradient is not finite. Pure.

All members judge the same records, so all reach the same verdict without asking: each leaves the update out, or ends
the job after it. The records also say how many steps in a row were not finite: a worker that was healed or resumed
knows it from the records of the step that it goes on from.
"""

from __future__ import annotations

from dataclasses import dataclass

from everstep.base.config import Config


@dataclass(frozen=True)
class NonfiniteRule:
    """The config's rule. on_nonfinite, limit: its `on_nonfinite` and `nonfinite_limit`. scaled: if only the gradient
    is not finite, a loss scaler leaves the step out and halves its scale."""

    on_nonfinite: str = "warn"
    limit: int = 0
    scaled: bool = False

    @staticmethod
    def of(config: Config) -> NonfiniteRule:
        return NonfiniteRule(config.on_nonfinite, config.nonfinite_limit, config.scales_loss)

    @property
    def applies(self) -> bool:
        """Whether gradients that are not finite may reach the optimizer."""
        return self.on_nonfinite == "warn" and not self.scaled


APPLIED = NonfiniteRule()
"""The rule that applies all updates and ends no job."""


@dataclass(frozen=True)
class Nonfinite:
    """words: the values that are not finite, "" if all are. lanes: those whose loss is not. in_a_row: such steps up
    to and including this one. left_out: its update is not made. ends: why the job ends after it, "" if it goes on."""

    words: str = ""
    lanes: tuple[int, ...] = ()
    in_a_row: int = 0
    left_out: bool = False
    ends: str = ""


FINITE = Nonfinite()


def judged(step: int, lanes: tuple[int, ...], before: int, rule: NonfiniteRule, *, gradient: bool) -> Nonfinite:
    """Verdict on a step. lanes: those whose loss is not finite. gradient: whether that of the global batch is
    finite, as far as norms were exchanged. before: number of non-finite steps in a row before this one, the most
    that any member says."""
    words = _words(lanes, gradient=gradient or rule.scaled)
    if not words:
        return FINITE
    in_a_row = before + 1
    ends = ""
    if rule.on_nonfinite == "stop":
        ends = f"step {step}: {words}; its update is left out, and the job stops (on_nonfinite: stop)"
    elif rule.limit and in_a_row >= rule.limit:
        since = f", as in all steps since {step - in_a_row + 1}" if in_a_row > 1 else ""
        ends = (
            f"step {step}: {words}{since} (nonfinite_limit is {rule.limit}): go on from a checkpoint before that "
            "(--resume-from), with a smaller learning rate or without the samples that the events name"
        )
    return Nonfinite(words, lanes, in_a_row, rule.on_nonfinite != "warn", ends)


def _words(lanes: tuple[int, ...], *, gradient: bool) -> str:
    if lanes:
        listed = ", ".join(str(lane) for lane in lanes)
        return f"the loss of lane{'s' if len(lanes) > 1 else ''} {listed} is not finite"
    return "" if gradient else "the gradient is not finite, though the loss of every lane is"
