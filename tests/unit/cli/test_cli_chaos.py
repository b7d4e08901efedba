"""`everstep chaos`: what it passes on, how it judges, what it says is wrong; no job is run here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from everstep.base.cause import Cause
from everstep.chaos.scenarios import SCENARIOS, Scenario
from everstep.cli import chaos
from everstep.cli.chaos import Suite, judge, print_faults, print_result, undisturbed_options
from everstep.cli.main import run_command
from everstep.runtime.files.run_lock import run_lock


def test_the_undisturbed_run_has_one_worker() -> None:
    given = [
        "--stages",
        "3",
        "--set",
        "lanes=4",
        "--workers=6",
        "--set",
        "map=x",
        "--pool",
        "2",
        "--steps",
        "9",
        "--set=a=1",
    ]
    assert undisturbed_options(given) == ["--set", "lanes=4", "--steps", "9", "--set=a=1"]


def test_what_each_run_is_given(tmp_path: Path) -> None:
    started: list[list[str]] = []

    def start(argv: list[str], run_dir: Path) -> int:
        started.append(argv)
        run_dir.mkdir(parents=True, exist_ok=True)
        return 0

    suite = Suite(tmp_path, "zoo", {"lanes": 4, "stages": 7}, start=start)
    suite.make_undisturbed()
    scenario = Scenario("one", "", "kill:at=1", {}, {"stages": 2, "map": [{"workers": [0]}, {"workers": [1]}]})
    result = suite.run(scenario)
    calm, disturbed = (" ".join(argv) for argv in started)
    assert "workers=1" in calm and "lanes=4" in calm and "stages" not in calm
    assert "stages=2" in disturbed and "chaos=kill:at=1" in disturbed and "--config" in disturbed
    assert json.loads((tmp_path / "one.yaml").read_text()) == {"map": scenario.shape["map"]}
    assert not result.passed, "nothing was trained"
    assert "everstep run zoo" in result.again


def test_a_failure_is_said_with_what_reproduces_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = tmp_path / "x"
    run_dir.mkdir()
    (run_dir / "job.json").write_text(json.dumps({"config": {"seed": 11, "chaos": "kill:at=3"}}))
    (run_dir / "events.jsonl").write_text('{"time_unix_ns": 1, "kind": "job_failed", "reason": "too few workers"}\n')
    result = judge(run_dir, None, None)
    result.again = "everstep run it --again"
    print_result(result)
    said = capsys.readouterr().out
    for words in ("FAILED", "too few workers", "seed 11", "kill:at=3", "everstep run it --again"):
        assert words in said


def test_a_job_that_still_runs_has_not_failed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "events.jsonl").write_text('{"time_unix_ns": 1, "kind": "step_committed", "step": 3}\n')
    with run_lock(tmp_path):
        result = judge(tmp_path, None, None)
        print_result(result)
        print_faults(tmp_path)
    said = capsys.readouterr().out
    assert result.passed and result.running and "FAILED" not in said and f"{tmp_path.name}: running at step 3" in said
    dead = judge(tmp_path, None, None)  # nobody runs it any more
    print_faults(tmp_path)
    said = capsys.readouterr().out
    assert dead.wrong == ["the job is interrupted: the process of the job died without a word"]
    assert "interrupted at step 3, the process of the job died without a word" in said and "not over" not in said


def test_a_job_that_cannot_go_on_as_stated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = tmp_path / "x"
    run_dir.mkdir()
    ended = {"time_unix_ns": 1, "kind": "job_failed", "cause": "quorum", "reason": "too few workers"}
    (run_dir / "events.jsonl").write_text(json.dumps(ended) + "\n")
    stated = Scenario("x", "", "", {}, fails=Cause.QUORUM)
    result = judge(run_dir, None, stated)
    print_result(result)
    assert result.passed and "says why" in (said := capsys.readouterr().out) and "too few workers" in said
    assert not judge(run_dir, None, Scenario("x", "", "", {}, fails=Cause.CONFIG)).passed
    (run_dir / "events.jsonl").write_text('{"time_unix_ns": 1, "kind": "job_completed", "state": "completed"}\n')
    assert "expected it to fail for the cause quorum" in judge(run_dir, None, stated).wrong[0]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["chaos", "suite", "single_fail"], ["single_fail", "did you mean 'single_failure'"]),
        (["chaos", "suite", "--set", "lanes"], ["key=value"]),
        (["chaos", "run", "mlp-digits"], ["--chaos"]),
        (["chaos", "run", "mlp-digits", "--chaos", "kil:at=1"], ["did you mean 'kill'"]),
        (["chaos", "report", "/nowhere"], ["holds no run"]),
        (["chaos", "inject", "/nowhere", "kill:target=worker:1"], ["/nowhere"]),
        (["chaos", "inject", "/nowhere", "kil:target=worker:1"], ["did you mean 'kill'"]),
    ],
)
def test_bad_input(argv: list[str], words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(argv) == 2
    error = capsys.readouterr().err
    assert len(error.strip().splitlines()) == 1
    for word in words:
        assert word in error


def test_the_list_names_them_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["chaos", "suite", "--list", "--json"]) == 0
    listed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [entry["name"] for entry in listed] == [scenario.name for scenario in SCENARIOS]


def test_a_run_that_does_not_end_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chaos, "own_command", lambda *words: ["sleep", "600"])
    assert chaos.run_everstep([], tmp_path / "run", limit_s=0.01) != 0
    assert "stopped after 0.01 s" in (tmp_path / "run.log").read_text()
