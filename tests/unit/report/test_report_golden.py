"""What people read, to the letter: each sentence as time goes on, and of one run the report with its figures, the
metrics and the trace.

`pytest --rewrite` writes the golden files; read the difference.
"""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path

import pytest
from test_report_headline import CASES
from test_report_history import T0, event
from test_report_page import run_directory, scaled_run

from everstep.report.facts import facts_of
from everstep.report.headline import Headline, Now, headline
from everstep.report.history import History
from everstep.report.page import Proof, report_page
from everstep.report.svg import Curve, line_chart, short, ticks
from everstep.report.traces import job_events
from told_events import S

HERE = Path(__file__).parent
LATER_S = (0.0, 2.5, 61.0)


def compare(name: str, now: str, rewrite: bool) -> None:
    if rewrite:
        (HERE / name).write_text(now)
    assert (HERE / name).read_text() == now, f"{name} says something else; if that is right: --rewrite"


def test_each_sentence_as_time_goes_on(rewrite: bool) -> None:
    lines = []
    for name, (events, at_s, beside, _, _) in CASES.items():
        said = ["", name]
        for later_s in LATER_S:
            one = headline(facts_of(events), Now(T0 + round((at_s + later_s) * S), **beside))
            said.append(f"  {later_s:5g} s: {one.level}: {one.whole()}")
        lines += said
    compare("sentences.txt", "\n".join(lines) + "\n", rewrite)


def run_of_all_kinds(tmp_path: Path) -> History:
    lines = [
        *scaled_run(),
        event("step_committed", 41, step=37, loss=None, samples=8, nonfinite="loss"),
        event("evaluated", 41.5, step=37, metrics={"accuracy": 0.91, "loss": 0.2}),
        event("step_committed", 42.2, step=38, loss=0.1, samples=8, metrics={"accuracy so far": 0.5, "KL": 1.25}),
        event("checkpoint_completed", 42, step=37, tier="disk", bytes=5_000_000, duration_s=0.5),
    ]
    run_dir = run_directory(tmp_path, "calm", lines)
    (run_dir / "metrics").mkdir()
    rows = [
        {"worker_id": i, "incarnation": 0, "step": step, "samples": 8 * step, "rss_bytes": 210_000_000, "cpu_s": step}
        | {"seconds": {"forward": (3.0 + i) * step, "reduce": 1.0 * step}, "bytes": {"reduce": 5_000_000 * step}}
        for step in (2, 4, 7)
        for i in (0, 1)
    ]
    told = [json.dumps({"t": T0 + S * row["step"], "host": "h", "workers": [row]}) + "\n" for row in rows]
    (run_dir / "metrics" / "h.jsonl").write_text("".join(told))
    return History(run_dir).load()


def test_the_report_of_one_run(tmp_path: Path, rewrite: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    history = run_of_all_kinds(tmp_path)
    monkeypatch.setattr(History, "headline", lambda self, running: Headline("good", "So it stands.", ""))
    proof = Proof({"clean": True, "steps": 37, "problems": [], "epochs": 3}, reference="other", differences=[])
    page = report_page(history, proof)
    body = re.sub(r"<style>.*?</style>|Written [^<]*", "", page, flags=re.DOTALL).replace(str(tmp_path), "RUNS")
    compare("report.html", re.sub(r"(</(?:p|div|tr|svg|text|h\d)>|/>)", r"\1\n", body) + "\n", rewrite)


def test_the_metrics_of_one_run(tmp_path: Path, rewrite: bool) -> None:
    prometheus = pytest.importorskip("everstep.report.prometheus", reason="the extra [dashboard] is not installed")
    history, lines = run_of_all_kinds(tmp_path), []
    for family in prometheus.families(history, True, {"target": 4}, T0 + 43 * S):
        lines.append(f"{family.name}, {family.type}: {family.documentation}")
        for sample in (one for one in family.samples if not one.name.endswith("_bucket")):
            labels = ", ".join(f"{key} {value}" for key, value in sample.labels.items())
            lines.append(f"  {sample.name} ({labels}): {sample.value:.9g}")
    compare("metrics.txt", "\n".join(lines) + "\n", rewrite)


def test_the_trace_of_one_run(tmp_path: Path, rewrite: bool) -> None:
    """Of its middle, with a generation that begins as the trace ends."""
    facts = run_of_all_kinds(tmp_path).facts
    ends_ns = facts.crew.generations[-1].time_ns
    events = job_events(facts, T0 + S, ends_ns, T0)
    compare("trace.txt", "".join(f"{json.dumps(one, sort_keys=True)}\n" for one in events), rewrite)


@pytest.mark.parametrize("low", [-3.0, 0.0, 1e-9, 7.3, 1e6])
@pytest.mark.parametrize("width", [1e-3, 1.0, 97.0, 1e15])
@pytest.mark.parametrize("about", [3, 5, 8])
def test_ticks_are_round_even_and_inside(low: float, width: float, about: int) -> None:
    high = low + width
    marks = ticks(low, high, about)
    gaps = [b - a for a, b in pairwise(marks)]
    assert all(low - width / 1e5 <= mark <= high + width / 1e5 for mark in marks)
    assert about / 2.6 <= len(marks) <= about + 2, "as many as were asked for, or down to two fifths"
    assert all(gap == pytest.approx(gaps[0], rel=1e-3) for gap in gaps)
    assert marks[0] - gaps[0] < low and marks[-1] + gaps[0] > high, "none is left out at an end"


@pytest.mark.parametrize("steps", [[37.0], [1.0, 2.0, 3.0], [2.0, 400.0]])
def test_no_step_lies_between_two_steps(steps: list[float]) -> None:
    svg = line_chart("t", [Curve("a", steps, steps)], "step")
    marked = [float(text) for text in re.findall(r'text-anchor="middle">([\d.]+)<', svg)]
    assert marked and all(step.is_integer() for step in marked)


def test_numbers_in_short_form() -> None:
    values = (0.0, 1e-4, 1e-3, 0.5, 999.0, 9999.0, 1e4, 999_999.0, 1e6, 1e9, -1.2e6, -2.5e-5)
    said = "0 1.0e-04 0.001 0.5 999 9999 10k 1000k 1M 1G -1.2M -2.5e-05"
    assert " ".join(map(short, values)) == said


def test_a_single_point_is_drawn_and_of_two_only_the_line() -> None:
    charts = [line_chart("t", [Curve("a", [1.0, 2.0, 3.0][:n], [5.0, 6.0, 7.0][:n])], "x") for n in (1, 2, 3)]
    paths = [[path for path in re.findall(r' d="([^"]*)"', svg) if "L" in path or "h" in path] for svg in charts]
    assert [sum("h0.1" in path for path in found) for found in paths] == [1, 0, 0], paths
