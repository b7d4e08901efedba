"""`everstep publish` and the key `sinks`: names, missing libraries, doing it twice."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from everstep.base.config import describe, load_config, to_dict
from everstep.base.config_keys import NOTICES, SINKS
from everstep.base.errors import ConfigError
from everstep.cli import run as run_module
from everstep.cli.job import JobFile, write_job
from everstep.cli.main import run_command
from everstep.observe.events import format_event
from everstep.sinks import sink as sink_module


def test_the_key_takes_lists_and_text() -> None:
    for said in (["tensorboard", "mlflow"], "[tensorboard,mlflow]", " tensorboard, 'mlflow', tensorboard "):
        config = load_config([("--set", {"sinks": said})])
        assert config.sinks == ("tensorboard", "mlflow")
        assert load_config([("job.json", json.loads(json.dumps(to_dict(config))))]) == config
    for said in ([], "", "[]"):
        assert load_config([("--set", {"sinks": said})]).sinks == ()
    for said in (["tensorbord"], "tensorbord", 5, {"a": 1}, [1]):
        with pytest.raises(ConfigError, match=r"sinks: expected list of tensorboard \| wandb \| mlflow \| otel, got"):
            load_config([("--set", {"sinks": said})])
    assert ("sinks", "list of tensorboard | wandb | mlflow | otel", "none") in {row[:3] for row in describe()}
    assert tuple(sink_module._BEHIND) == (*SINKS, NOTICES)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    write_job(tmp_path, JobFile("mine", (), load_config([("test", {"steps": 2})]), created_unix_ns=10**18))
    lines = [format_event("job_started", 10**18, {"step": 0, "workers": 1})]
    lines += [format_event("step_committed", 10**18 + n * 10**9, {"step": n, "loss": 0.5}) for n in (1, 2)]
    lines.append(format_event("job_completed", 10**18 + 3 * 10**9, {"state": "completed"}))
    (tmp_path / "events.jsonl").write_bytes(b"".join(lines))
    return tmp_path


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["publish", "{dir}", "--to", "tensorbord"], "expected tensorboard, wandb, mlflow, otel, got 'tensorbord'"),
        (["publish", "{dir}", "--to", ","], "got nothing"),
        (["publish", "{dir}"], "--to"),
        (["publish", "{dir}/nowhere", "--to", "tensorboard"], "there is no run directory"),
        (["publish", "{dir}/tensorboard", "--to", "tensorboard"], "is not a run directory"),
        (["publish", "{dir}", "--to", "tensorboard,mlflow", "--follow"], "expected one sink, got 2"),
    ],
)
def test_what_cannot_be_published(
    run_dir: Path, argv: list[str], words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("everstep.cli.publish.check_installed", lambda names: None)
    (run_dir / "tensorboard").mkdir()
    assert run_command([part.replace("{dir}", str(run_dir)) for part in argv]) == 2
    said = capsys.readouterr().err
    assert words in said and said.count("\n") == 1


def test_a_missing_library_is_found_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sink_module, "_found", lambda module: False)
    config = load_config([("test", {"steps": 1, "sinks": ["wandb"]})])
    monkeypatch.setattr(run_module, "effective_config", lambda *a, **k: config)
    script = tmp_path / "train.py"
    script.write_text("raise SystemExit('must not run')")
    assert run_command(["run", str(script), "--run-dir", str(tmp_path / "run")]) == 2
    assert "the sink wandb needs wandb: pip install 'everstep[wandb]'" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_published_twice_says_nothing_new(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tensorboard")
    job = json.loads((run_dir / "job.json").read_text())
    job["config"]["a key of another version"] = 1
    (run_dir / "job.json").write_text(json.dumps(job))
    assert run_command(["publish", str(run_dir), "--to", "tensorboard"]) == 0
    assert capsys.readouterr().out == "tensorboard: 2 steps and 2 events\n"
    assert run_command(["publish", str(run_dir), "--to", "tensorboard", "--follow"]) == 0
    assert run_command(["publish", str(run_dir), "--to", "tensorboard"]) == 0
    assert capsys.readouterr().out == "tensorboard: nothing new\n"


def test_what_cannot_be_written_is_one_line(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run_dir / "tensorboard").write_text("in the way")
    pytest.importorskip("tensorboard")
    assert run_command(["publish", str(run_dir), "--to", "tensorboard"]) == 2
    assert "cannot be written to" in capsys.readouterr().err
