"""verify: byte equality and what is said where runs differ; ledger: the audit of a directory; status from files."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from everstep.cli.job import Request, effective_config, make_job, read_job, write_job
from everstep.cli.ledger import audit_run, missing_rows
from everstep.cli.main import run_command
from everstep.cli.status import read_status
from everstep.cli.verify import compare, find_weights, read_weights
from everstep.observe.events import EventLog
from everstep.order.cursor import SampleOrder
from everstep.order.ledger import LaneUse, LedgerRow, encode_row, use_digest
from everstep.runtime.files.run_lock import run_lock

BASE = {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "n": np.array([1, 2], dtype=np.int64)}


def finished(path: Path, tensors: dict[str, np.ndarray], state: str = "cd") -> Path:
    (path / "final").mkdir(parents=True)
    save_file(tensors, path / "final" / "model.safetensors")
    (path / "final" / "digest.json").write_text(json.dumps({"step": 3, "model": "ab", "state": state}))
    return path


def changed(name: str, value: np.ndarray) -> dict[str, np.ndarray]:
    return {**BASE, name: value}


def test_equal_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = finished(tmp_path / "a", BASE), finished(tmp_path / "b", BASE)
    assert compare(a, b) == []
    assert run_command(["verify", str(a), str(b)]) == 0
    assert "bitwise equal" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (changed("w", BASE["w"] + np.float32(0.5)), ["1 of 2 tensors differ", "w: 6 of 6 elements", "0.5"]),
        (
            changed("w", np.where(BASE["w"] == 0, np.float32(-0.0), BASE["w"])),
            ["w: bytes differ, in the sign of zeros"],
        ),
        (changed("w", np.where(BASE["w"] == 5, np.float32("nan"), BASE["w"])), ["w: 1 of 6 elements"]),
        (changed("w", BASE["w"].astype(np.float64)), ["F32[2, 3] and F64[2, 3]"]),
        (changed("w", BASE["w"].reshape(3, 2)), ["F32[2, 3] and F32[3, 2]"]),
        ({"w": BASE["w"]}, ["only in the first: n"]),
        (changed("z", BASE["n"]), ["only in the second: z"]),
    ],
)
def test_runs_that_differ(
    tmp_path: Path, other: dict[str, np.ndarray], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = finished(tmp_path / "a", BASE), finished(tmp_path / "b", other)
    text = "\n".join(compare(a, b))
    for word in words:
        assert word in text
    assert run_command(["verify", str(a), str(b)]) == 1


def test_equal_nans_are_equal(tmp_path: Path) -> None:
    nans = {"w": np.full(3, np.nan, np.float32)}
    assert compare(finished(tmp_path / "a", nans), finished(tmp_path / "b", nans)) == []


def test_weights_alone_say_nothing_of_the_optimizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = finished(tmp_path / "a", BASE)
    save_file(BASE, tmp_path / "model.safetensors")
    for one, other in ((a, tmp_path / "model.safetensors"), (tmp_path, a)):
        assert run_command(["verify", str(one), str(other)]) == 0
        assert capsys.readouterr().out.startswith("bitwise equal: weights and buffers, step 3")


def test_bytes_that_do_not_fit_the_shape_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = finished(tmp_path / "a", {"w": np.zeros(2, np.float32)})
    data = (a / "final" / "model.safetensors").read_bytes()
    (tmp_path / "other.safetensors").write_bytes(data.replace(b'"shape":[2]', b'"shape":[3]'))
    assert run_command(["verify", str(a), str(tmp_path / "other.safetensors")]) == 2
    assert "w has 8 bytes" in capsys.readouterr().err


def test_optimizer_state_counts_too(tmp_path: Path) -> None:
    a, b = finished(tmp_path / "a", BASE), finished(tmp_path / "b", BASE, state="other")
    assert compare(a, b) == ["state in digest.json differs: cd and other"]


@pytest.mark.parametrize(("mine", "theirs"), [(1, 2), (None, 2), (2, 2), ("x", None), ([1] * 99, 1)])
def test_digests_of_other_versions_say_nothing(
    tmp_path: Path, mine: object, theirs: object, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = finished(tmp_path / "a", BASE), finished(tmp_path / "b", BASE, state="other")
    for run, version in ((a, mine), (b, theirs)):
        path = run / "final" / "digest.json"
        more = {} if version is None else {"version": version}
        path.write_text(json.dumps({**json.loads(path.read_text()), **more}))
    assert run_command(["verify", str(a), str(b)]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("digests are of versions ") and first.endswith("not the optimizer's state")
    assert second.startswith("bitwise equal: weights and buffers, step 3")
    finished(tmp_path / "c", changed("w", BASE["w"] + 1))
    assert any("w: " in line for line in compare(a, tmp_path / "c"))


def test_no_version_is_the_first(tmp_path: Path) -> None:
    a, b = finished(tmp_path / "a", BASE), finished(tmp_path / "b", BASE, state="other")
    path = b / "final" / "digest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "version": 1}))
    assert compare(a, b) == ["state in digest.json differs: cd and other"]


def test_what_cannot_be_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = finished(tmp_path / "a", BASE)
    for bad in ("missing", "empty", "torn", "nodigest"):
        b = tmp_path / bad
        if bad == "empty":
            b.mkdir()
        elif bad == "torn":
            finished(b, BASE)
            weights = b / "final" / "model.safetensors"
            weights.write_bytes(weights.read_bytes()[:-4])
        elif bad == "nodigest":
            finished(b, BASE)
            (b / "final" / "digest.json").unlink()
        assert run_command(["verify", str(a), str(b)]) == 2, bad
        message = capsys.readouterr().err
        assert message.startswith("error: ")
        assert message.count("\n") == 1


def test_bfloat16_has_values() -> None:
    from everstep.cli.verify import StoredTensor

    stored = StoredTensor("BF16", (2,), memoryview(np.array([0x3F80, 0xC000], np.uint16).tobytes()))
    values = stored.floats()
    assert values is not None
    assert values.tolist() == [1.0, -2.0]


def test_weights_of_a_file_and_of_a_checkpoint(tmp_path: Path) -> None:
    save_file(BASE, tmp_path / "model.safetensors")
    assert find_weights(tmp_path) == tmp_path / "model.safetensors" == find_weights(tmp_path / "model.safetensors")
    assert set(read_weights(find_weights(tmp_path))) == {"w", "n"}


def job_dir(path: Path, steps: int = 3) -> Path:
    config = effective_config({"steps": steps, "lanes": 2, "micro_batch": 4}, Request(()))
    path.mkdir(exist_ok=True)
    write_job(path, make_job("a-task", [], config, 20, Request(())))
    return path


def write_rows(run_dir: Path, steps: range, *, wrong_lane: int = -1) -> None:
    order = SampleOrder(0, 20, 2, 4, steps=3)
    (run_dir / "ledger").mkdir(exist_ok=True)
    for worker in (0, 1):
        with open(run_dir / "ledger" / f"worker-{worker}-0.jsonl", "wb") as file:
            for step in steps:
                uses = []
                for lane in range(2):
                    samples = order.samples(step, lane)
                    digest = use_digest(samples) + (lane == wrong_lane)
                    uses.append(LaneUse(lane, lane, len(samples), digest))
                file.write(encode_row(LedgerRow(step, 1, tuple(uses))))
            file.write(b'{"step":9,"gener')


def test_a_clean_ledger(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job_dir(tmp_path)
    write_rows(tmp_path, range(1, 4))
    EventLog(tmp_path / "events.jsonl").write("step_committed", step=3)
    assert audit_run(tmp_path).clean
    assert run_command(["ledger", str(tmp_path), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["clean"], report["complete"], report["steps"], report["problems"]) == (True, True, 3, [])
    assert report["epochs"][0]["missing"] == 0
    assert run_command(["ledger", str(tmp_path)]) == 0
    assert "clean" in capsys.readouterr().out


def test_a_ledger_that_is_not_clean(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job_dir(tmp_path)
    write_rows(tmp_path, range(1, 4), wrong_lane=1)
    EventLog(tmp_path / "events.jsonl").write("step_committed", step=3)
    assert run_command(["ledger", str(tmp_path)]) == 1
    assert "used other samples" in capsys.readouterr().out
    write_rows(tmp_path, range(1, 3))
    assert "step 3 has no row" in audit_run(tmp_path).problems


def test_nobody_knows_which_steps_were_committed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_rows(job_dir(tmp_path), range(1, 4), wrong_lane=1)
    assert run_command(["ledger", str(tmp_path)]) == 2
    assert "neither events.jsonl nor final/digest.json" in capsys.readouterr().err


def test_rows_that_are_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = job_dir(tmp_path / "run")
    assert missing_rows(run_dir) == "", "nothing was committed"
    write_rows(run_dir, range(2, 3))
    finished(run_dir, BASE)
    assert run_command(["ledger", str(run_dir), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert (report["clean"], report["complete"], report["steps"]) == (False, False, 1)
    assert run_command(["ledger", str(run_dir)]) == 1
    assert "incomplete" in capsys.readouterr().out
    said = missing_rows(run_dir)
    assert "lacks the rows of 2 of 3 steps (1, 3)" in said and "free some space" in said and "\n" not in said
    with open(run_dir / "ledger" / "worker-0-1.jsonl", "ab") as file:  # behind a half row
        file.write(b'{"step":9,"ge' + (run_dir / "ledger" / "worker-0-0.jsonl").read_bytes().replace(b":2,", b":3,"))
    assert "lacks the rows of 1 of 3 steps (1)" in missing_rows(run_dir)
    write_job(run_dir, dataclasses.replace(read_job(run_dir), begins_after=1))
    assert missing_rows(run_dir) == "" and audit_run(run_dir).complete


def test_of_a_job_that_did_not_end_the_committed_steps_have_rows(tmp_path: Path) -> None:
    run_dir = job_dir(tmp_path)
    write_rows(run_dir, range(1, 3))
    EventLog(run_dir / "events.jsonl").write("step_committed", step=2)
    assert missing_rows(run_dir) == "" and audit_run(run_dir).complete
    assert "lacks the rows of 1 of 3 steps (3)" in missing_rows(run_dir, 3), "the events were lost, too"


@pytest.mark.parametrize("command", ["ledger", "status"])
def test_directories_that_are_none(tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    for path in (tmp_path / "missing", tmp_path):
        assert run_command([command, str(path)]) == 2
        assert capsys.readouterr().err.startswith("error: ")


def test_status_of_a_job_that_no_coordinator_answers_for(tmp_path: Path) -> None:
    run_dir = job_dir(tmp_path)
    log = EventLog(run_dir / "events.jsonl")
    log.write("job_started", step=0)
    log.write("step_committed", step=2, generation=4)
    status = read_status(run_dir)
    assert (status["state"], status["step"], status["generation"]) == ("interrupted", 2, 4)
    assert (status["workers"], status["coordinator"]) == ([], {"pid": None})
    log.write("job_failed", state="failed", reason="a worker crashed", exit_code=1)
    assert (read_status(run_dir)["state"], read_status(run_dir)["reason"]) == ("failed", "a worker crashed")
    with run_lock(run_dir):
        assert read_status(run_dir)["workers"] == [], "those of the start before are gone"
        log.write("job_started", step=0)
        assert read_status(run_dir)["state"] == "starting"
        log.write("step_committed", step=1)
        assert read_status(run_dir)["state"] == "running"
    finished(run_dir, BASE)
    assert (read_status(run_dir)["state"], read_status(run_dir)["step"]) == ("completed", 3)


def test_nobody_has_the_process_ids_of_a_job_that_is_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = job_dir(tmp_path)
    log = EventLog(run_dir / "events.jsonl")
    log.write("job_started", step=0, workers=1)
    log.write("worker_joined", worker_id=0, incarnation=0, pid=4711, pids=[4711, 4712], host="here")
    log.write("job_failed", state="failed", reason="a worker crashed", exit_code=1)
    (worker,) = read_status(run_dir)["workers"]
    assert (worker["pid"], worker["pids"], [one["pid"] for one in worker["cell"]]) == (None, [None] * 2, [None] * 2)
    assert run_command(["status", str(run_dir)]) == 0
    assert capsys.readouterr().out.splitlines()[-1].split()[-2:] == ["-", "here"]


def test_on_a_narrow_terminal_no_line_of_status_is_broken_by_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = job_dir(tmp_path)
    log = EventLog(run_dir / "events.jsonl")
    log.write("job_started", step=0, workers=1)
    log.write("worker_joined", worker_id=0, incarnation=0, pid=4711, host="a-host-with-a-name.of-some-length.example")
    seats = [[0, 0, "active", list(range(64))]]
    log.write("generation_started", generation=1, target=1, leaders=[0], seats=seats)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    with run_lock(run_dir):
        log.write("job_started", step=0, workers=1)
        log.write("generation_started", generation=1, target=1, leaders=[0], seats=seats)
        assert run_command(["status", str(run_dir)]) == 0
    lines = capsys.readouterr().out.splitlines()
    (row,) = [line for line in lines if line.startswith("0.0")]
    assert "0,1,2,3,4,5,6,7,8,9,10,…" in row and all(len(line) <= 80 for line in lines[1:]), lines


def test_processes_of_a_worker_on_several_hosts_have_a_line_each(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = job_dir(tmp_path)
    log = EventLog(run_dir / "events.jsonl")
    log.write("job_started", step=0, workers=1)
    cell = {"pids": [4711, 4712, 99], "hosts": ["here", "here", "there"]}
    log.write("worker_joined", worker_id=0, incarnation=0, pid=4711, host="here", **cell)
    with run_lock(run_dir):
        log.write("job_started", step=0, workers=1)
        log.write("worker_joined", worker_id=0, incarnation=0, pid=4711, host="here", **cell)
        (worker,) = read_status(run_dir)["workers"]
        assert [(one["pid"], one["host"]) for one in worker["cell"]] == list(zip(*cell.values(), strict=True))
        assert run_command(["status", str(run_dir)]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()[-3:]]
    assert [(line[0], *line[-2:]) for line in lines] == [
        ("0.0", "4711", "here"),
        ("0/1", "4712", "here"),
        ("0/2", "99", "there"),
    ]


def test_nobody_to_scale_or_drain(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = job_dir(tmp_path)
    for argv in (["scale", str(run_dir), "--workers", "2"], ["drain", str(run_dir), "0"]):
        assert run_command(argv) == 2
        assert "no job is running" in capsys.readouterr().err
    assert run_command(["scale", str(run_dir), "--workers", "3"]) == 2
    assert "from 1 (min_workers) to 2 (lanes), got 3" in capsys.readouterr().err


def test_each_stage_has_its_lanes_for_workers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = job_dir(tmp_path)
    job = json.loads((run_dir / "job.json").read_text())
    job["config"] |= {"stages": 2, "workers": 2}
    (run_dir / "job.json").write_text(json.dumps(job))
    assert run_command(["scale", str(run_dir), "--workers", "4"]) == 2
    assert "no job is running" in capsys.readouterr().err
    assert run_command(["scale", str(run_dir), "--workers", "5"]) == 2
    assert "from 1 (min_workers) to 4 (lanes in each stage), got 5" in capsys.readouterr().err
