"""The steps of a job by its events: its progress, curves and speed, and repeated steps. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

from everstep.report.pace import Pace
from everstep.report.series import POINTS, Series
from everstep.report.told_facts import Strange
from everstep.report.wall_time import Stretch
from everstep.report.words import Event, known, number, number_text, one_line, whole_number

# time_s, loss, loss_min, loss_max, lr, samples, workers
_STEP_RULES = ("last", "mean", "min", "max", "last", "sum", "last")
_MOST_METRICS = 16
_MEASURED_STEPS = 10
Again = tuple[int, int]
"""Begin and end of the time in which repeated steps were done first, in ns."""


@dataclass
class Course:
    """Progress of a job. `loss`: of the newest step, None if there is none or it is not finite; `strange`: steps
    without a finite loss. `metrics`: of the newest evaluation, None for a value that is not finite. `rates`: samples,
    seconds, steps, and the sum of the squares of the seconds of each, by number of workers. `redo_to`: the last step
    that is repeated now, 0 if none is; `began_again_ns`: when that began. `clean`: only a step follows the last one."""

    step: int = 0
    loss: float | None = None
    strange: Strange | None = None
    tokens_per_sample: float | None = None
    steps: Series = field(default_factory=lambda: Series(_STEP_RULES, POINTS))
    evaluations: dict[str, Series] = field(default_factory=dict)
    metrics: dict[str, float | None] = field(default_factory=dict)
    metrics_step: int = 0
    rates: dict[int, list[float]] = field(default_factory=dict)
    pace: Pace = field(default_factory=Pace)
    last_step_ns: int = 0
    steps_lost: int = 0
    redo_to: int = 0
    began_again_ns: int | None = None
    clean: bool = False

    def begin(self, step: int, time_ns: int) -> Again:
        """The job goes on from this step. Returns the time of the steps that it repeats."""
        self.redo_to = self.step if 0 < step < self.step else 0  # int refuses longer ones, and so the line
        self.steps_lost += max(0, self.step - step)
        again = self._go_back(step, time_ns)
        self.step, self.last_step_ns, self.pace.told = max(self.step, step), 0, step
        self._begin(time_ns)
        self.strange = self.strange if self.step else None
        return again

    def _begin(self, time_ns: int) -> None:
        self.clean, self.began_again_ns = False, time_ns
        self.pace.begin(time_ns)

    def committed(self, event: Event, time_ns: int, members: int, settled: bool) -> Stretch | None:
        """Take in a committed step of so many members. settled: the next one follows upon it. Returns the time for
        which it was overdue, if it was."""
        step = self.step = int(event["step"])
        loss = _float(event.get("loss"))
        self.loss = loss if loss is not None and math.isfinite(loss) else None
        empty = self.loss is None and not whole_number(event.get("samples"))
        finite = empty or (self.loss is not None and not event.get("nonfinite"))
        self.finite(step, finite, applied=event.get("applied") is not False)
        rate = event.get("lr")
        lr = _float(rate[0] if isinstance(rate, list) and rate else rate)
        samples = whole_number(event.get("samples"))
        tokens = number(event["tokens"]) if "tokens" in event else 0.0
        self.tokens_per_sample = tokens / samples if tokens > 0 and samples > 0 else None
        self.steps.add(step, (time_ns / 1e9, loss, loss, loss, lr, samples, members))
        passed_s = (time_ns - self.last_step_ns) / 1e9 if self.last_step_ns else 0.0
        late = self.pace.was_late(passed_s)
        clean = self.clean and passed_s > 0.0
        if clean and not late:
            entry = self.rates.setdefault(members, [0.0, 0.0, 0.0, 0.0])
            entry[0] += samples
            entry[1] += passed_s
            entry[2] += 1
            entry[3] += passed_s * passed_s
        stalled = self.standstill(time_ns) if late and not self.redo_to else None
        self.pace.commit(time_ns, step, samples, clean)
        self.clean, self.last_step_ns = settled, time_ns
        self.redo_to = self.redo_to if step < self.redo_to else 0
        return stalled

    def standstill(self, until_ns: int) -> Stretch:
        """Time from the moment at which the next step was due."""
        due_ns = self.last_step_ns + round(1e9 * (self.pace.usual_s or 0.0))
        return Stretch(min(until_ns, due_ns), until_ns, "stalled")

    def finite(self, step: int, finite: bool, applied: bool = True) -> None:
        """Note whether the loss and gradient of a step were finite, and its update was made."""
        strange = self.strange
        if finite and strange is not None:
            self.strange = replace(strange, in_a_row=0, applied=False)
        elif not finite:
            before = strange or Strange(0, step, step, 0, False)
            more = not before.in_a_row or before.last != step
            self.strange = Strange(
                before.count + more, before.first, step, before.in_a_row + more, before.applied or applied
            )

    def fall_back(self, event: Event, time_ns: int) -> Again:
        """Take in an event after which training may go back. Returns the time of the repeated steps."""
        back_to = known(event.get("step"))
        if back_to is None or event.get("what") == "checkpoint":  # that one is not used, which tells no more
            return 0, 0
        if event.get("steps_redone") is None and back_to >= self.step:
            return 0, 0
        redo_to = max(self.redo_to, self.step, back_to + (known(event.get("steps_redone")) or 0))
        self.redo_to = redo_to if redo_to > back_to else 0
        self.steps_lost += max(0, self.step - back_to)
        again = self._go_back(back_to, time_ns)
        self._begin(time_ns)
        return again

    def _go_back(self, back_to: int, time_ns: int) -> Again:
        """Go back to a step. The later ones are repeated with the same bits but not told again, so their points
        stay."""
        at, self.step = self.steps.at(back_to + 1), min(self.step, back_to)
        if at is None:
            return 0, 0
        return int(self.steps.columns[0][max(0, at - 1)] * 1e9), min(time_ns, self.last_step_ns)

    def evaluated(self, event: Event, time_ns: int) -> bool:
        """Take in an evaluation; returns whether the event has metrics."""
        metrics = event.get("metrics")
        if not isinstance(metrics, dict):
            return False
        self.metrics = {one_line(k, 60): _finite(v) for k, v in list(metrics.items())[:_MOST_METRICS]}
        self.metrics_step = whole_number(event.get("step"))
        for name, value in self.metrics.items():
            if value is not None and (len(self.evaluations) < _MOST_METRICS or name in self.evaluations):
                series = self.evaluations.setdefault(name, Series(("last", "last")))
                series.add(self.metrics_step, (time_ns / 1e9, value))
        self.clean = False
        return True

    @property
    def loss_text(self) -> str:
        """Loss of the newest step; "nan" if it is not finite, "" if there is none."""
        if self.loss is not None:
            return number_text(self.loss)
        return "nan" if self.strange is not None and self.strange.last == self.step else ""

    def efficiency(self) -> list[dict[str, float]]:
        """By number of workers, rising: samples per second; relative to `relative_to`, the fewest workers, the
        speed-up, the ideal one, and the efficiency, which is the one over the other. `spread`: standard deviation of
        the step time relative to its mean. Those that `left_out` names are missing."""
        found: list[dict[str, float]] = []
        for workers, (samples, seconds, steps, squares) in sorted(self.rates.items()):
            if seconds > 0 and steps >= _MEASURED_STEPS and workers:
                rate = samples / seconds
                first, fewest = (found[0]["samples_per_s"], found[0]["workers"]) if found else (rate, workers)
                speed_up, ideal = rate / first if first else 0.0, workers / fewest
                spread = math.sqrt(max(0.0, squares * steps / (seconds * seconds) - 1))
                one = {"workers": workers, "samples_per_s": rate, "efficiency": speed_up / ideal, "steps": steps}
                found.append({**one, "speed_up": speed_up, "ideal": ideal, "relative_to": fewest, "spread": spread})
        return found

    def efficiency_text(self, members: int) -> str:
        """The efficiency of so many workers in a few words, with its standard error; "" until two numbers were
        measured."""
        found = self.efficiency()
        if len(found) < 2:
            return ""
        now = next((one for one in found[1:] if one["workers"] == members), found[-1])
        few, many = (f"{one:.0f} worker{'s' * (one != 1)}" for one in (now["relative_to"], now["workers"]))
        error = now["efficiency"] * math.hypot(*(one["spread"] / math.sqrt(one["steps"]) for one in (found[0], now)))
        efficiency = f"efficiency {now['efficiency']:.0%} ± {error:.0%}"
        return f"{many}: {now['speed_up']:.2f}x of {few}, ideal {now['ideal']:.2f}x, {efficiency}"

    def left_out(self) -> str:
        """Which numbers of workers `efficiency` leaves out, and why; "" if none."""
        few = [(n, int(steps)) for n, (_, _, steps, _) in sorted(self.rates.items()) if n and steps < _MEASURED_STEPS]
        named = ", ".join(f"{n} worker{'s' * (n != 1)} ({steps} step{'s' * (steps != 1)})" for n, steps in few[:8])
        why = f"left out, as fewer than {_MEASURED_STEPS} undisturbed steps were measured"
        return f"{named}{' and more' if len(few) > 8 else ''}: {why}" if few else ""

    def mean_samples_per_s(self) -> float | None:
        """Mean speed over all steps without a change of generation, an evaluation or a standstill."""
        spent = sum(seconds for _, seconds, _, _ in self.rates.values())
        return sum(samples for samples, _, _, _ in self.rates.values()) / spent if spent > 0 else None

    def eta_s(self, total_steps: int | None) -> float | None:
        """Seconds to the last step at the speed of the newest steps; None if unknown, or there already."""
        return self.pace.eta_s(self.step, total_steps)


def _finite(value: Any) -> float | None:
    """A number from an event; None for one that is not finite, or no number."""
    found = number(value, math.nan)
    return found if math.isfinite(found) else None


def _float(value: Any) -> float | None:
    return value if type(value) is float else float(value) if isinstance(value, int | float) else None
