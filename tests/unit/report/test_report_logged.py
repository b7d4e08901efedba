"""Curves of values that are told with each step: the gradient norm, and what the user's loop logs."""

from __future__ import annotations

from pathlib import Path

from everstep.report.facts import facts_of
from everstep.report.figures import figures
from everstep.report.history import History
from everstep.report.page import Proof, report_page
from everstep.report.words import sentence
from told_events import commit, event, trained, write_events


def test_values_of_steps_become_curves_and_what_is_no_number_does_not(tmp_path: Path) -> None:
    told = [
        {**commit(11, 6.0), "grad_norm": 2.5, "metrics": {"reward": 1, "<b>": 0.5, "bad": "x", "worse": float("nan")}},
        {**commit(12, 6.3), "grad_norm": 1.5, "metrics": {"reward": 3, "flag": True}},
        {**commit(13, 6.6), "grad_norm": None, "metrics": [1]},
        {**commit(12, 6.9), "grad_norm": 4.0},
    ]
    series = facts_of([*trained(), *told]).logged.series
    assert {name: (one.x, one.columns[1]) for name, one in series.items()} == {
        "Gradient norm": ([11, 12], [2.5, 4.0]),
        "reward": ([11, 12], [1.0, 3.0]),
        "<b>": ([11], [0.5]),
    }
    write_events(tmp_path, [*trained(), *told])
    drawn = figures(History(tmp_path).load())
    assert "logged-reward" in drawn and "<b>" not in drawn["logged--b-"]


def test_names_that_differ_by_a_sign_have_charts_of_their_own(tmp_path: Path) -> None:
    write_events(tmp_path, [*trained(), {**commit(11, 6.0), "metrics": {"train/loss": 1.0, "train.loss": 2.0}}])
    drawn = figures(History(tmp_path).load())
    assert "train/loss" in drawn["logged-train-loss"] and "train.loss" in drawn["logged-train-loss-2"]


def test_names_are_bounded() -> None:
    many = {**commit(11, 6.0), "metrics": {f"{'n' * 99}{i}": i for i in range(3)} | {str(i): i for i in range(99)}}
    series = facts_of([*trained(), many]).logged.series
    assert len(series) == 32 and max(map(len, series)) == 60


def test_numbers_of_the_leader_are_told_beside_the_steps() -> None:
    told = [commit(11, 6.0), event("logged", 6.1, step=11, metrics={"score": 0.5}), commit(12, 6.3)]
    logged = facts_of([*trained(), *told]).logged
    assert logged.newest == {"score": 0.5} and logged.series["score"].x == [11]
    assert sentence(told[1]) == "logged after step 11: score 0.5000"


def test_a_value_that_is_no_longer_finite_is_not_shown_as_it_was(tmp_path: Path) -> None:
    told = [commit(11, 6.0), event("logged", 6.1, step=11, metrics={"score": 0.5})]
    logged = facts_of([*trained(), *told, event("logged", 6.4, step=12, metrics={"score": None})]).logged
    assert logged.finite() == {"score": None} and logged.series["score"].x == [11]
    told = [{**commit(11, 6.0), "grad_norm": 2.5}, {**commit(12, 6.3), "loss": None, "grad_norm": None}]
    assert facts_of([*trained(), *told]).logged.finite() == {"Gradient norm": None}
    assert facts_of([*trained(), commit(11, 6.0)]).logged.finite() == {}, "a job that does not compute it"


def test_an_evaluation_that_is_not_finite_is_no_zero(tmp_path: Path) -> None:
    told = [event("evaluated", 6.0 + n, step=10 + n, metrics={"error": v, "n": 1.0}) for n, v in enumerate((0.5, None))]
    write_events(tmp_path, [*trained(), *told])
    known = History(tmp_path).load()
    course = known.facts.course
    assert (course.metrics, course.evaluations["error"].columns[1]) == ({"error": None, "n": 1.0}, [0.5])
    assert sentence(told[1]) == "evaluated after step 11: error not finite, n 1.0000"
    assert "<b>not finite</b><span>test error</span>" in report_page(known, Proof())
