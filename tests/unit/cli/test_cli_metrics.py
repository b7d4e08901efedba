"""`everstep metrics` and what `run --metrics` is asked for: addresses, bad input, what is printed."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

import recorded_run as recorded

pytest.importorskip("prometheus_client", reason="the extra [dashboard] is not installed")
pytest.importorskip("uvicorn", reason="the extra [dashboard] is not installed")

from everstep.base.config import load_config
from everstep.base.errors import ConfigError
from everstep.cli.beside import check_metrics, parse_listen
from everstep.cli.main import cli, run_command
from everstep.sinks.publication import Publication
from everstep.sinks.sink import Sink, SinkFailed

BAD = ["", ":", "9400", ":9400", "127.0.0.1", "127.0.0.1:", "127.0.0.1:x", "127.0.0.1:65536", "127.0.0.1:-1", "a b:1"]
BAD += ["::1:9400", "[::1]", "http://localhost:9400", "localhost:9400/metrics", "localhost:١", "[localhost]:1"]


def error_of(capsys: pytest.CaptureFixture[str], *argv: str | Path) -> str:
    assert run_command([str(a) for a in argv]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith("error: ") and said.err.count("\n") == 1
    return said.err


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("127.0.0.1:0", ("127.0.0.1", 0)),
        (" localhost:9400 ", ("localhost", 9400)),
        ("[::1]:65535", ("::1", 65535)),
        ("trainer.example:80", ("trainer.example", 80)),
    ],
)
def test_addresses(text: str, place: tuple[str, int]) -> None:
    assert parse_listen("--listen", text) == place


@pytest.mark.parametrize("text", BAD)
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(ConfigError, match="--listen: expected HOST:PORT"):
        parse_listen("--listen", text)
    if text:  # nothing is none
        with pytest.raises(ConfigError, match=r"metrics\.listen"):
            check_metrics(load_config([("x", {"metrics.listen": text, "steps": 1})]).metrics.listen)


def test_beyond_loopback_a_token_is_needed_before_the_job_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EVERSTEP_METRICS_TOKEN", raising=False)
    check_metrics(None)
    check_metrics("127.0.0.1:0")
    for token in ("", "short"):
        monkeypatch.setenv("EVERSTEP_METRICS_TOKEN", token)
        with pytest.raises(ConfigError, match=r"(?i)token"):
            check_metrics("0.0.0.0:0")
    monkeypatch.setenv("EVERSTEP_METRICS_TOKEN", "long enough to be kept".replace(" ", "-"))
    check_metrics("0.0.0.0:0")


def test_once_prints_the_exposition(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = recorded.make_run(tmp_path / "run")
    assert run_command(["metrics", str(run_dir), "--once"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "everstep_steps_total 10.0" in lines
    assert "# TYPE everstep_step_seconds histogram" in lines


def test_events_that_cannot_be_read_are_not_taken_for_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = recorded.make_run(tmp_path / "run")
    (run_dir / "events.jsonl").rename(tmp_path / "events")
    (run_dir / "events.jsonl").symlink_to(tmp_path / "events")
    assert "events.jsonl cannot be read: " in error_of(capsys, "metrics", run_dir, "--once")
    with pytest.raises(SinkFailed, match="events cannot be read"):
        Publication(run_dir, "tensorboard", Sink(), {}).advance(over=True)


def test_bad_input_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = recorded.make_run(tmp_path / "run")
    assert "there is no run directory" in error_of(capsys, "metrics", tmp_path / "nowhere", "--once")
    (tmp_path / "other").mkdir()
    assert "is no run directory" in error_of(capsys, "metrics", tmp_path / "other")
    assert "HOST:PORT" in error_of(capsys, "metrics", run_dir, "--listen", "nowhere")
    assert "EVERSTEP_METRICS_TOKEN" in error_of(capsys, "metrics", run_dir, "--listen", "0.0.0.0:0")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        assert f"cannot listen on {address}" in error_of(capsys, "metrics", run_dir, "--listen", address)
    assert "metrics.listen" in error_of(capsys, "run", "mlp-digits", "--steps", "1", "--metrics=nowhere")
    assert "EVERSTEP_METRICS_TOKEN" in error_of(capsys, "run", "--metrics", "[::]:0", "mlp-digits", "--steps", "1")
    assert "nosuch" in error_of(capsys, "run", "--metrics", "nosuch", "--steps", "1")


@pytest.mark.parametrize(
    ("argv", "listen", "task"),
    [
        (["--metrics", "mlp-digits"], "127.0.0.1:0", "mlp-digits"),
        (["--metrics", "tasks.py:Mine", "--steps", "2"], "127.0.0.1:0", "tasks.py:Mine"),
        (["--metrics", "127.0.0.1:9400", "mlp-digits"], "127.0.0.1:9400", "mlp-digits"),
        (["mlp-digits", "--metrics=localhost:1"], "localhost:1", "mlp-digits"),
        (["mlp-digits", "--metrics"], "127.0.0.1:0", "mlp-digits"),
        (["train.py", "--", "--metrics", "x"], None, "train.py"),
    ],
)
def test_the_address_may_be_left_out(argv: list[str], listen: str | None, task: str) -> None:
    command = cli.get_command(None, "run")  # type: ignore[arg-type]
    assert command is not None
    given = command.make_context("run", list(argv)).params
    assert (given["metrics"], given["task"]) == (listen, task)
