"""The figures of reports and comparisons, drawn from the reading library's facts. Pure."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from everstep.report.facts import Facts
from everstep.report.history import History, names_of
from everstep.report.incidents import LAUNCHER
from everstep.report.series import Series
from everstep.report.style import COLOURS, STATES
from everstep.report.svg import Bar, Curve, Upright, columns_chart, line_chart, rows_chart, stacked_bar
from everstep.report.told_facts import Mark, Span
from everstep.report.usage import PHASES as PHASES_OF_WORK
from everstep.report.wall_time import PHASES
from everstep.report.words import time_text

_MOST_ROWS = 64
_MOST_RECOVERIES = 40
_MOST_COLUMNS = 240
_PHASE_STYLES = {"load": "f6", "forward": "f0", "backward": "f4", "transfer": "f3", "reduce": "f1", "agree": "f5"}
_PHASE_STYLES |= {"update": "f2", "stall": "s-suspect", "recover": "s-dead"}
_USE_STYLES = {"training": "f2", "start-up": "f0", "waiting for workers": "s-suspect", "steps done again": "f5"}
_USE_STYLES |= {"evaluation": "f4", "checkpoints": "f3", "finishing": "f7", "not running": "s-left"}
FigurePart = tuple[str, str, Sequence[float | None]]
_EVALUATED, _LOGGED = "evaluation", "logged"
_OWN_COLOURS = {_EVALUATED: 4, _LOGGED: 1}
_HARD = ("fault", "evicted", "coordinator", "fallback", LAUNCHER)


def figures(history: History, running: bool = False) -> dict[str, str]:
    """Figures by name, as SVG, in the order in which a report shows them."""
    facts, marks = history.facts, history.marks(running)
    found = {
        "loss": loss_chart([history], marks),
        "throughput": throughput_chart([history], marks),
        "workers": workers_chart(facts, marks),
        "recoveries": recoveries_chart(facts),
        "goodput": goodput_chart(history.seconds(running)),
    }
    for name in own_curves([history]):
        (kind, _, title), at = name.partition(":"), 1
        while (key := f"{kind}-" + re.sub(r"\W+", "-", title) + f"-{at}" * (at > 1)) in found:  # a/b and a.b
            at += 1
        found[key] = own_chart([history], name, marks if name.startswith(_LOGGED) else ())
    if history.usage.total_s:
        found["steptime"] = step_time_chart(history, marks)
        found["busy"] = busy_chart(history)
    if history.usage.total_bytes:
        found["communication"] = communication_chart(history, marks)
    if len(facts.course.efficiency()) > 1:
        found["scaling"] = scaling_chart(facts)
    return found


def loss_chart(histories: Sequence[History], marks: Sequence[Mark] = ()) -> str:
    """Loss by step; several runs lie over each other. Neighbouring steps are averaged, the band is their range."""
    curves = []
    for i, (name, one) in enumerate(zip(names_of(histories), histories, strict=True)):
        steps = one.facts.course.steps
        loss, low, high = steps.columns[1:4]
        band = (low, high) if len(histories) == 1 else None
        curves.append(Curve(name, steps.x, loss, i % COLOURS, band))
    return line_chart("Loss by step", curves, "step", _by_step(marks))


def throughput_chart(histories: Sequence[History], marks: Sequence[Mark] = ()) -> str:
    """Samples per second over the time since the start."""
    named = zip(names_of(histories), histories, strict=True)
    curves = [Curve(name, *rates(one.facts), i % COLOURS) for i, (name, one) in enumerate(named)]
    return line_chart("Samples per second", curves, "seconds since the start", _by_time(histories[0].facts, marks))


def own_curves(histories: Sequence[History]) -> list[str]:
    """KIND:NAME of all metrics on the test split, and of what is told beside the loss."""
    found = ((kind, name) for kind in (_EVALUATED, _LOGGED) for one in histories for name in _of_kind(one, kind))
    return list(dict.fromkeys(f"{kind}:{name}" for kind, name in found))


def own_chart(histories: Sequence[History], name: str, marks: Sequence[Mark] = ()) -> str:
    """One of `own_curves` by step, of all runs that have it."""
    kind, _, title = name.partition(":")
    several, curves = len(histories) > 1, []
    for i, (run, one) in enumerate(zip(names_of(histories), histories, strict=True)):
        series = _of_kind(one, kind).get(title)
        if series is not None:
            whose = (run, i % COLOURS) if several else (title, _OWN_COLOURS[kind])
            curves.append(Curve(whose[0], series.x, series.columns[1], whose[1]))
    return line_chart(f"Evaluated: {title}" if kind == _EVALUATED else title, curves, "step", _by_step(marks))


def _of_kind(history: History, kind: str) -> dict[str, Series]:
    return history.facts.course.evaluations if kind == _EVALUATED else history.facts.logged.series


def rates(facts: Facts) -> tuple[list[float], list[float | None]]:
    """(seconds since the start, samples per second) between the points of the curve."""
    times, samples = facts.course.steps.columns[0], facts.course.steps.columns[5]
    passed = [after - before for before, after in pairwise(times)]
    x = [t - facts.began_ns / 1e9 for t in times[1:]]
    return x, [n / s if s > 0 else None for n, s in zip(samples[1:], passed, strict=True)]


def workers_chart(facts: Facts, marks: Sequence[Mark]) -> str:
    """Lives of the workers with their states over time; faults as lines."""
    start = facts.began_ns
    end = facts.condition.ended_ns or facts.account.end_ns
    ids = sorted({span.worker_id for span in facts.crew.spans})
    if len(ids) > _MOST_ROWS:
        troubled = {s.worker_id for s in facts.crew.spans if s.state in ("dead", "suspect", "healing")}
        ids = sorted(sorted(ids, key=lambda i: (i not in troubled, i))[:_MOST_ROWS])
    row_of = {worker_id: row for row, worker_id in enumerate(ids)}
    lives = (_life(span, row_of[span.worker_id], start, end) for span in facts.crew.spans if span.worker_id in row_of)
    bars = [bar for bar in lives if bar.x1 > bar.x0]
    used = {bar.style for bar in bars}
    legend = [(state, f"s-{state}") for state in STATES if f"s-{state}" in used]
    names = [f"worker {i}" for i in ids]
    height = 22 if len(ids) <= 24 else 14
    return rows_chart("Workers", names, bars, "seconds since the start", _by_time(facts, marks), legend, height)


def recoveries_chart(facts: Facts) -> str:
    """Each recovery as a waterfall of its phases, from the fault on."""
    newest = list(facts.recoveries)[-_MOST_RECOVERIES:]
    bars, names, values = [], [], []
    for row, recovery in enumerate(newest):
        at_s = (recovery.begin_ns - facts.began_ns) / 1e9
        whose = "" if recovery.worker_id is None else f", worker {recovery.worker_id}"
        names.append(f"at {time_text(max(0.0, at_s))}{whose}, {recovery.cause}")
        values.append(time_text(recovery.duration_s))
        for part in recovery.phases:
            x0, x1 = ((t - recovery.begin_ns) / 1e6 for t in (part.begin_ns, part.end_ns))
            phase = part.use.removeprefix("recovery: ")
            bars.append(Bar(row, x0, x1, f"f{_phase_colour(phase)}", f"{phase}: {time_text((x1 - x0) / 1e3)}"))
    legend = [(phase, f"f{_phase_colour(phase)}") for phase in (*PHASES, "other")]
    return rows_chart("Recoveries", names, bars, "milliseconds since the fault", (), legend, values=values)


def goodput_chart(seconds: dict[str, float], title: str = "Where the time went") -> str:
    """The account of the wall time as one bar; the phases of recoveries are one part of it."""
    whole = sum(seconds.values()) or 1.0
    together: defaultdict[str, float] = defaultdict(float)
    for use, value in seconds.items():
        together[use.partition(":")[0]] += value
    parts = [(use, value / whole, _USE_STYLES.get(use, "s-dead"), time_text(value)) for use, value in together.items()]
    return stacked_bar(title, parts)


def step_time_chart(history: History, marks: Sequence[Mark]) -> str:
    """Time per step of a worker, by phase, over time."""
    columns = history.usage.columns(_MOST_COLUMNS)
    parts = [
        (name, phase_style(name), [None if y is None else 1e3 * y for y in ys])
        for name, ys in columns["seconds"].items()
    ]
    return _over_time(history, "Milliseconds per step and worker, by phase", columns, parts, marks)


def communication_chart(history: History, marks: Sequence[Mark]) -> str:
    """Bytes that workers send to each other per second, by operation."""
    columns = history.usage.columns(_MOST_COLUMNS)
    parts = [
        (name, f"f{i % COLOURS}", [y / 1e6 for y in ys]) for i, (name, ys) in enumerate(columns["bytes_per_s"].items())
    ]
    return _over_time(history, "Megabytes per second between workers, by operation", columns, parts, marks)


def _over_time(
    history: History, title: str, columns: dict[str, Any], parts: Sequence[FigurePart], marks: Sequence[Mark]
) -> str:
    start, uprights = history.facts.began_ns / 1e9, _by_time(history.facts, marks)
    ends = [t - start for t in columns["x"]]
    return columns_chart(title, ends, parts, columns["width_s"], "seconds since the start", uprights)


def busy_chart(history: History) -> str:
    """All seconds of all workers, by phase, as one bar."""
    total_s = history.usage.total_s
    whole = sum(total_s.values()) or 1.0
    known = [name for name in PHASES_OF_WORK if total_s.get(name)]
    parts = [(name, total_s[name] / whole, phase_style(name), time_text(total_s[name])) for name in known]
    return stacked_bar("What the workers did, all their seconds together", parts)


def phase_style(phase: str) -> str:
    """The class of a phase of a step; the same in all charts."""
    return _PHASE_STYLES.get(phase, "f7")


def scaling_chart(facts: Facts) -> str:
    """Samples per second by number of workers, beside the value if each added as much as the fewest did."""
    found = facts.course.efficiency()
    workers = [e["workers"] for e in found]
    each = found[0]["samples_per_s"] / found[0]["workers"]
    curves = [
        Curve("measured", workers, [e["samples_per_s"] for e in found], 0),
        Curve("in proportion", workers, [each * n for n in workers], COLOURS - 1),
    ]
    return line_chart("Samples per second by number of workers", curves, "workers")


def _phase_colour(phase: str) -> int:
    return PHASES.index(phase) if phase in PHASES else COLOURS - 1


def _life(span: Span, row: int, start: int, end: int) -> Bar:
    until = span.end_ns if span.end_ns is not None else end
    x0, x1 = (span.begin_ns - start) / 1e9, (until - start) / 1e9
    text = f"worker {span.worker_id}.{span.incarnation} {span.state}, {time_text(max(0.0, x1 - x0))}"
    return Bar(row, x0, x1, f"s-{span.state}", text)


def _by_time(facts: Facts, marks: Sequence[Mark]) -> list[Upright]:
    return [Upright((m.time_ns - facts.began_ns) / 1e9, m.text, m.kind not in _HARD) for m in _shown(marks)]


def _by_step(marks: Sequence[Mark]) -> list[Upright]:
    return [Upright(float(m.step), m.text, m.kind not in _HARD) for m in _shown(marks)]


def _shown(marks: Sequence[Mark]) -> list[Mark]:
    return [m for m in marks if m.kind in (*_HARD, "leader")][-200:]
