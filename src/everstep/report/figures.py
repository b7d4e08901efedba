"""The figures of reports and comparisons, drawn from what the reading library knows. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from everstep.report.account import PHASES
from everstep.report.facts import Facts, Mark, Span
from everstep.report.history import History
from everstep.report.style import COLOURS, STATES
from everstep.report.svg import Bar, Curve, Upright, line_chart, rows_chart, stacked_bar
from everstep.report.words import time_text

_MOST_ROWS = 64
_MOST_RECOVERIES = 40
_HARD = ("fault", "evicted", "coordinator", "fallback")


def begin_ns(facts: Facts) -> int:
    """When the job was first started."""
    return facts.account.begin_ns or 0


def figures(history: History) -> dict[str, str]:
    """name -> SVG, in the order in which a report shows them."""
    facts = history.facts
    found = {
        "loss": loss_chart(history),
        "throughput": throughput_chart(history),
        "workers": workers_chart(facts),
        "recoveries": recoveries_chart(facts),
        "goodput": goodput_chart(history.seconds(False)),
    }
    if facts.evaluations:
        found["evaluations"] = evaluations_chart(facts)
    if history.usage.total_s:
        found["steptime"] = step_time_chart(history)
    return found


def loss_chart(history: History, others: Sequence[History] = ()) -> str:
    """Loss by step; of several runs over each other. Neighbouring steps are averaged, the band is their range."""
    curves = []
    for i, one in enumerate([history, *others]):
        steps = one.facts.steps
        loss, low, high = steps.columns[1:4]
        band = (low, high) if not others else None
        curves.append(Curve(one.name, steps.x, loss, i % COLOURS, band))
    marks = _by_step(history.facts) if not others else []
    return line_chart("Loss by step", curves, "step", marks)


def throughput_chart(history: History, others: Sequence[History] = ()) -> str:
    """Samples per second over the time since the start."""
    curves = []
    for i, one in enumerate([history, *others]):
        x, y = rates(one.facts)
        curves.append(Curve(one.name, x, y, i % COLOURS))
    marks = [] if others else _by_time(history.facts)
    return line_chart("Samples per second", curves, "seconds since the start", marks)


def rates(facts: Facts) -> tuple[list[float], list[float | None]]:
    """Seconds since the start, samples per second between the points of the curve."""
    times, samples = facts.steps.columns[0], facts.steps.columns[5]
    start = begin_ns(facts) / 1e9
    x = [t - start for t in times[1:]]
    y: list[float | None] = []
    for i in range(1, len(times)):
        passed = times[i] - times[i - 1]
        y.append(samples[i] / passed if passed > 0 else None)
    return x, y


def evaluations_chart(facts: Facts) -> str:
    """Metrics on the test split by step."""
    curves = [
        Curve(name, series.x, series.columns[1], i % COLOURS)
        for i, (name, series) in enumerate(facts.evaluations.items())
    ]
    return line_chart("Evaluations", curves, "step")


def workers_chart(facts: Facts) -> str:
    """Lives of the workers: who was what, when; faults as lines."""
    start = begin_ns(facts)
    end = facts.ended_ns or facts.account.end_ns
    ids = sorted({span.worker_id for span in facts.spans})
    if len(ids) > _MOST_ROWS:
        troubled = {s.worker_id for s in facts.spans if s.state in ("dead", "suspect", "healing")}
        ids = sorted(ids, key=lambda i: (i not in troubled, i))[:_MOST_ROWS]
        ids.sort()
    row_of = {worker_id: row for row, worker_id in enumerate(ids)}
    bars = [_life(span, row_of[span.worker_id], start, end) for span in facts.spans if span.worker_id in row_of]
    bars = [bar for bar in bars if bar.x1 > bar.x0]
    used = {bar.style for bar in bars}
    legend = [(state, f"s-{state}") for state in STATES if f"s-{state}" in used]
    names = [f"worker {i}" for i in ids]
    height = 22 if len(ids) <= 24 else 14
    return rows_chart("Workers", names, bars, "seconds since the start", _by_time(facts), legend, height)


def recoveries_chart(facts: Facts) -> str:
    """Each recovery as a waterfall of its phases, from the fault on."""
    newest = list(facts.recoveries)[-_MOST_RECOVERIES:]
    bars, names, values = [], [], []
    for row, recovery in enumerate(newest):
        at_s = (recovery.begin_ns - begin_ns(facts)) / 1e9
        names.append(
            f"at {time_text(max(0.0, at_s))}" + ("" if recovery.worker_id is None else f", worker {recovery.worker_id}")
        )
        values.append(time_text(recovery.duration_s))
        for part in recovery.phases:
            x0, x1 = ((t - recovery.begin_ns) / 1e6 for t in (part.begin_ns, part.end_ns))
            phase = part.cause.removeprefix("recovery: ")
            bars.append(Bar(row, x0, x1, f"f{_phase_colour(phase)}", f"{phase}: {time_text((x1 - x0) / 1e3)}"))
    legend = [(phase, f"f{_phase_colour(phase)}") for phase in (*PHASES, "other")]
    return rows_chart("Recoveries", names, bars, "milliseconds since the fault", (), legend, values=values)


def goodput_chart(seconds: dict[str, float], title: str = "Where the time went") -> str:
    """The account of the wall time as one bar."""
    whole = sum(seconds.values()) or 1.0
    parts = [
        (cause, value / whole, cause_style(cause), f"{time_text(value)}, {100 * value / whole:.2f} %")
        for cause, value in seconds.items()
    ]
    return stacked_bar(title, parts)


def cause_style(cause: str) -> str:
    """The class of a cause in bars."""
    styles = {"training": "f2", "start-up": "f0", "waiting for workers": "s-suspect", "steps done again": "f5"}
    styles |= {"evaluation": "f4", "checkpoints": "f3", "finishing": "f7", "not running": "s-left"}
    return styles.get(cause, "s-dead")


def step_time_chart(history: History) -> str:
    """Seconds that a worker spends per step, by phase."""
    columns = history.usage.columns()
    start = begin_ns(history.facts) / 1e9
    x = [t - start for t in columns["x"]]
    curves = [Curve(name, x, y, i % COLOURS) for i, (name, y) in enumerate(columns["seconds"].items())]
    return line_chart("Seconds per step and worker, by phase", curves, "seconds since the start")


def _phase_colour(phase: str) -> int:
    return PHASES.index(phase) if phase in PHASES else COLOURS - 1


def _life(span: Span, row: int, start: int, end: int) -> Bar:
    until = span.end_ns if span.end_ns is not None else end
    x0, x1 = (span.begin_ns - start) / 1e9, (until - start) / 1e9
    text = f"worker {span.worker_id}.{span.incarnation} {span.state}, {time_text(max(0.0, x1 - x0))}"
    return Bar(row, x0, x1, f"s-{span.state}", text)


def _by_time(facts: Facts) -> list[Upright]:
    return [Upright((m.time_ns - begin_ns(facts)) / 1e9, m.text, m.kind not in _HARD) for m in _shown(facts)]


def _by_step(facts: Facts) -> list[Upright]:
    return [Upright(float(m.step), m.text, m.kind not in _HARD) for m in _shown(facts) if math.isfinite(m.step)]


def _shown(facts: Facts) -> list[Mark]:
    return [m for m in facts.marks if m.kind in ("evicted", "coordinator", "fallback", "leader", "fault")][-200:]
