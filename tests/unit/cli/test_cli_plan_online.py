"""`everstep plan --from`: predicted beside measured, from a run directory alone; refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import recorded_run as recorded
from everstep.cli.main import run_command

CONFIG = {"steps": 40, "lanes": 8, "micro_batch": 4, "workers": 2}


def make_run(run_dir: Path, *, steps: int = 30, more: int = 0, config: dict[str, Any] | None = None) -> Path:
    """Two workers, a step of 0.5 s; each computes 4 lanes of 0.1 s. Then `more` steps of 0.9 s of one worker."""
    lines = [recorded.event("job_started", 0, step=0, workers=2), recorded.plan(1, 1, [0, 1])]
    lines += [commit(step, 1 + 0.5 * step) for step in range(1, steps + 1)]
    end = 1 + 0.5 * steps
    for at in (end - 4.2, end - 0.2):
        lines.append(recorded.event("checkpoint_completed", at, step=2, tier="disk", stall_s=0.02, size_bytes=12_000))
    if more:
        lines += [recorded.plan(end, 2, [0]), *(commit(steps + n, end + 0.9 * n) for n in range(1, more + 1))]
    lines.append(recorded.event("job_completed", end + more + 1, step=steps + more, exit_code=0, state="completed"))
    (run_dir / "metrics").mkdir(parents=True)
    (run_dir / "events.jsonl").write_bytes(b"".join(lines))
    seconds = {"load": 0.1, "forward": 0.1, "backward": 0.2, "reduce": 0.06, "agree": 0.02, "update": 0.01}
    rows = [
        {
            **recorded.row(i, 0, steps),
            "passes": 4 * steps,
            "pss_bytes": 130_000_000,
            "seconds": {phase: each * steps for phase, each in seconds.items()},
        }
        for i in range(2)
    ]
    (run_dir / "metrics" / "a.jsonl").write_bytes(recorded.sample(end, "a", *rows))
    (run_dir / "job.json").write_text(json.dumps({"task": "small", "argv": [], "config": config or CONFIG}))
    return run_dir


def commit(step: int, at_s: float) -> bytes:
    return recorded.event("step_committed", at_s, step=step, generation=1, loss=1.0, samples=32, lr=[0.1])


def planned(capsys: pytest.CaptureFixture[str], run_dir: Path) -> dict[str, Any]:
    assert run_command(["plan", "--from", str(run_dir), "--json"]) == 0
    said: dict[str, Any] = json.loads(capsys.readouterr().out)
    return said


def test_predicted_beside_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = planned(capsys, make_run(tmp_path / "r", more=12))
    one, two = said["time"]
    assert (one["workers"], two["workers"], two["calibrated"]) == (1, 2, True)
    assert two["measured_s"] == pytest.approx(0.5, rel=0.01) and two["predicted_s"] == pytest.approx(0.49)
    assert one["measured_s"] == pytest.approx(0.9) and one["predicted_s"] == pytest.approx(0.81)
    assert one["error"] == pytest.approx(-0.1) and said["errs"].startswith("with 1 worker the predicted step is 10.0% ")
    assert said["lane_s"] == pytest.approx(0.1) and said["fits"] is None and said["source"] and said["assumed"]
    parts = {part["part"]: part for part in said["parts"]}
    assert parts["compute"]["predicted_s"] == parts["compute"]["measured_s"] == pytest.approx(0.4)


def test_memory_is_compared_with_a_workers_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The state is 12 kB; the rest is Python and torch, a third of which each of fork server and workers counts."""
    said = planned(capsys, make_run(tmp_path / "r"))["memory"]
    assert said["measured_bytes"] == 130_000_000 and said["resident_bytes"] == 2000
    assert said["predicted_bytes"] == pytest.approx(48e6 + 163e6 / 3, rel=0.001)
    assert said["error"] == pytest.approx(said["predicted_bytes"] / 130e6 - 1)
    assert said["per_worker_bytes"]["optimizer"] == 8000 and "snapshots" not in said["per_worker_bytes"]
    cells = {**CONFIG, "cell": {"fsdp": 2}}
    assert planned(capsys, make_run(tmp_path / "cells", config=cells))["memory"]["predicted_bytes"] is None


def test_workers_of_stages_keep_snapshots_of_two_stages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for steps, sets in ((12, 1), (22, 2), (62, 2), (102, 3)):
        run_dir = make_run(tmp_path / f"{steps}", steps=steps, config={**CONFIG, "stages": 2})
        said = planned(capsys, run_dir)["memory"]["per_worker_bytes"]
        assert (said["parameters"], said["optimizer"], said["snapshots"]) == (2000, 4000, sets * 12_000)


def test_of_an_offloaded_state_what_is_in_use_is_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of so small a one that is all."""
    runs = make_run(tmp_path / "a"), make_run(tmp_path / "b", config={**CONFIG, "zero": {"offload": "/disk"}})
    here, there = (planned(capsys, run)["memory"]["predicted_bytes"] for run in runs)
    assert here == there


def test_what_a_change_would_give(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = planned(capsys, make_run(tmp_path / "r"))
    by = {one["workers"]: one for one in said["what_if"]["workers"]}
    assert sorted(by) == [1, 2, 3, 4, 8] and by[2]["speed_up"] == 1
    assert by[1]["step_s"] > by[2]["step_s"] > by[4]["step_s"] > by[8]["step_s"]
    assert [one["stages"] for one in said["what_if"]["splits"]] == [1, 2]
    none, spare = said["what_if"]["spares"]
    assert (none["spares"], spare["spares"]) == (0, 1) and spare["goodput"] >= none["goodput"]
    assert spare["back_s"] < none["back_s"]
    every = {one["name"]: one for one in said["what_if"]["intervals"]}
    assert every["now"]["interval_s"] == said["checkpoints"]["interval_s"] == pytest.approx(4.0)
    assert every["young"]["lost"] <= min(every["half"]["lost"], every["double"]["lost"])


def test_checkpoints_go_by_the_formula_of_the_coordinator(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = planned(capsys, make_run(tmp_path / "r"))["checkpoints"]
    assert (said["count"], said["cost_s"], said["failures"]) == (2, 0.02, 0) and "same formula" in said["source"]
    assert f"every {said['ours_s']:.0f} s" in said["ours_reason"]


def test_emulated_lanes_take_what_is_configured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {**CONFIG, "emulate_compute_ms": 30.0}
    said = planned(capsys, make_run(tmp_path / "r", config=config))
    assert said["lane_s"] == pytest.approx(0.09) and said["lane_source"] == "emulate_compute_ms"


def test_for_people(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["plan", "--from", str(make_run(tmp_path / "r"))]) == 0
    text = capsys.readouterr().out
    assert "where it errs" in text and "What a change would give" in text and "speed-up" in text


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("missing", "there is no run directory"),
        ("no job", "is not a run directory"),
        ("few steps", "expected at least 10 undisturbed steps with one number of workers, found 3"),
        ("no samples", "expected samples of its workers in metrics/"),
        ("torn samples", "expected samples of its workers in metrics/"),
    ],
)
def test_what_it_cannot_read_is_one_line(
    change: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "r"
    if change != "missing":
        make_run(run_dir, steps=4 if change == "few steps" else 30)
    if change == "no job":
        (run_dir / "job.json").unlink()
    if change in ("no samples", "torn samples"):
        (run_dir / "metrics" / "a.jsonl").write_bytes(b"" if change == "no samples" else b'{"t": 1, "workers": [{}]}\n')
    assert run_command(["plan", "--from", str(run_dir), "--json"]) == 2
    err = capsys.readouterr().err
    assert said in err and len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"seconds": {"forward": 1e308, "backward": 1e308, "load": 0.1}}, 0),
        ({"seconds": {"forward": -5.0, "load": 3.0}}, 0),
        ({"seconds": [1]}, 2),
        ({"passes": 10**400}, 2),
        ({"passes": True}, 2),
        ({"rss_bytes": 1e308}, 0),
    ],
)
def test_numbers_that_no_job_can_have_told_count_as_none(
    change: dict[str, Any], code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = make_run(tmp_path / "r")
    path = run_dir / "metrics" / "a.jsonl"
    line = json.loads(path.read_text())
    line["workers"] = [{**row, **change} for row in line["workers"]]
    path.write_text(json.dumps(line) + "\n")
    for more in ([], ["--json"]):
        found = run_command(["plan", "--from", str(run_dir), *more])
        assert found == code
        assert "Infinity" not in capsys.readouterr().out


def test_either_a_run_or_a_question(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["plan", "--from", "x", "failures", "--nodes", "1", "--hours", "1"]) == 2
    assert run_command(["plan", "--json"]) == 2
    assert run_command(["plan"]) == 0
    assert "recommend" in capsys.readouterr().out


def test_a_script_is_not_cut_into_stages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = make_run(tmp_path / "r")
    job = json.loads((run_dir / "job.json").read_text())
    (run_dir / "job.json").write_text(json.dumps({**job, "task": "/there/train.py"}))
    said = planned(capsys, run_dir)
    assert [one["stages"] for one in said["what_if"]["splits"]] == [1]
    assert any(one.startswith("not cut into stages: a script") for one in said["assumed"])
    assert run_command(["plan", "--from", str(run_dir)]) == 0
    assert "\nstages " not in capsys.readouterr().out


def test_workers_share_the_processors_of_their_host(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two workers of 0.1 s a lane on two processors: four take as long for half as many lanes each."""
    run_dir = make_run(tmp_path / "r")
    file = run_dir / "metrics" / "a.jsonl"
    file.write_text("".join(json.dumps({**json.loads(line), "cpus": 2}) + "\n" for line in file.open()))
    said = planned(capsys, run_dir)
    steps = {one["workers"]: one["compute_s"] for one in said["what_if"]["workers"]}
    assert steps[1] == pytest.approx(0.8) and steps[2] == steps[4] == steps[8] == pytest.approx(0.4)
    assert "the workers of a host share its 2 processors, and take turns where they are more" in said["assumed"]
    assert "processors and devices enough for all workers" in planned(capsys, make_run(tmp_path / "s"))["assumed"]


def test_emulated_stages_wait_as_long_as_the_whole_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = planned(capsys, make_run(tmp_path / "r", config={**CONFIG, "emulate_compute_ms": 100}))
    one, two = said["what_if"]["splits"]
    assert one["compute_s"] == pytest.approx(4 * 0.3) and two["compute_s"] == pytest.approx(8 * 0.3)
    assert two["bubble_s"] == pytest.approx(0.3) and any("emulated devices" in said for said in said["assumed"])
