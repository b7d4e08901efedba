"""What users get wrong, and what goes wrong for them: one clear line and the right exit code each."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from pathlib import Path

import pytest
from e2e_cli import TASK_FILE, Running, digest_of, everstep, one_error


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--workers", "0"], ["workers", "0"]),
        (["--workers", "5"], ["workers", "4 lanes", "5"]),
        (["--batch-size", "30"], ["4 lanes", "30"]),
        (["--batch-size", "52"], ["50 samples", "52"]),
        (["--set", "micro_batch=13"], ["50 samples", "52"]),
        (["--set", "lane=3"], ["'lane'", "'lanes'"]),
        (["--set", "lanes"], ["key=value"]),
        (["--set", "lanes=many"], ["lanes", "many"]),
        (["--min-workers", "2"], ["min_workers", "2"]),
        (["--config", "missing.yaml"], ["missing.yaml"]),
        (["--chaos", "kil:at=1"], ["'kil:at=1'", "'kil'", "kill"]),
        (["--chaos", "kill:when=1"], ["'when'", "target, at, phase, for"]),
        (["--steps", "0"], ["steps", "0"]),
        (["--", "--an-argument"], ["--an-argument"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_refused_before_anything_starts(small_task: str, run_dir: Path, argv: list[str], words: list[str]) -> None:
    done = everstep("run", small_task, "--run-dir", run_dir, *argv)
    assert done.returncode == 2, done.stderr
    message = one_error(done)
    for word in words:
        assert word in message
    assert not (run_dir / "events.jsonl").exists()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("import no_such_module_at_all", ["does not import", "no_such_module_at_all"]),
        ("class Task: pass", ["has no 'Small'"]),
        ("Small = 3", ["subclass of everstep.Task"]),
        (TASK_FILE.replace('"lanes": 4', '"lane": 4'), ["'lane'", "'lanes'"]),
    ],
)
def test_a_task_that_cannot_be_used(tmp_path: Path, text: str, words: list[str]) -> None:
    (tmp_path / "task.py").write_text(text)
    done = everstep("run", "task.py:Small", cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    message = one_error(done)
    for word in words:
        assert word in message


def test_a_run_directory_that_cannot_be_one(small_task: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = everstep("run", small_task, "--run-dir", tmp_path / "file" / "run")
    assert (done.returncode, "run directory" in one_error(done)) == (2, True)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("return nn.Sequential", "raise ValueError('no model today')\n        return nn.Sequential", "no model today"),
        ("time.sleep", "raise KeyError('label')\n        time.sleep", "label"),
        ("return Numbers(50)", "raise OSError('disk on fire')", "disk on fire"),
        ("x = torch.sin", "if index == 17: raise OSError('unreadable')\n        x = torch.sin", "17"),
        ("loss(self, model, batch):", "loss(self, model, batch):\n        return 3.0\n", "loss"),
    ],
    ids=["build_model", "loss", "dataset", "sample", "no tensor"],
)
def test_an_exception_in_the_task(tmp_path: Path, old: str, new: str, words: str) -> None:
    (tmp_path / "task.py").write_text(TASK_FILE.replace(old, new, 1))
    done = everstep("run", "task.py:Small", "--run-dir", "run", "--workers", "2", cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert words in one_error(done)
    logs = "".join(path.read_text() for path in (tmp_path / "run" / "logs").glob("worker-*.log"))
    assert "Traceback" in logs
    assert words in logs
    assert json.loads(everstep("status", tmp_path / "run", "--json").stdout)["state"] == "failed"


def test_an_operation_that_is_not_deterministic(tmp_path: Path) -> None:
    noise = "torch.tensor(float(int.from_bytes(__import__('os').urandom(2), 'big'))) *"
    text = TASK_FILE.replace("return nn.functional.mse_loss", f"return {noise} nn.functional.mse_loss", 1)
    (tmp_path / "task.py").write_text(text)
    done = everstep("run", "task.py:Small", "--run-dir", "run", cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert "determin" in one_error(done)


def test_a_script_that_never_joins(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('hello')\n")
    done = everstep("run", "train.py", "--run-dir", "run", cwd=tmp_path)
    assert done.returncode != 0
    assert "everstep.join" in one_error(done)


@pytest.mark.parametrize(
    "argv",
    [
        ["status", "nowhere"],
        ["ledger", "nowhere"],
        ["verify", "nowhere", "nowhere"],
        ["scale", "nowhere", "--workers", "2"],
        ["drain", "nowhere", "0"],
        ["eval", "mlp-digits", "--from", "nowhere"],
        ["run", "no-such-task"],
        ["run", "nowhere.py"],
    ],
    ids=lambda argv: argv[0],
)
def test_what_does_not_exist(tmp_path: Path, argv: list[str]) -> None:
    done = everstep(*argv, cwd=tmp_path)
    assert done.returncode == 2
    one_error(done)
    assert not list(tmp_path.iterdir()), "nothing is created for what does not exist"


def test_strangers_at_the_coordinators_port(small_task: str, run_dir: Path, tmp_path: Path) -> None:
    """Garbage bytes and a wrong token are turned away, and change nothing."""
    from everstep.base.errors import ProtocolError
    from everstep.runtime import wire

    slow = ("--set", "task.lane_s=0.1")
    with Running(small_task, "--workers", "2", "--run-dir", run_dir, *slow) as job:
        job.wait_for_step(1)
        port = json.loads((run_dir / "coordinator.json").read_text())["port"]
        with socket.create_connection(("127.0.0.1", port), timeout=30) as garbage:
            garbage.sendall(os.urandom(4096))
        with socket.create_connection(("127.0.0.1", port), timeout=30) as stranger:
            stranger.settimeout(30)
            with pytest.raises(ProtocolError, match="token"):
                wire.handshake_client(stranger, b"\x00" * 32, "client", "stranger")
        code, events, errors = job.end()
    assert code == 0, errors
    warnings = [str(e["reason"]) for e in events if e["kind"] == "warning"]
    assert any("refused a connection" in reason for reason in warnings)
    assert digest_of(run_dir)["step"] == 12


@pytest.fixture
def small_disk(tmp_path: Path) -> Path:
    """A file system of 4 MiB."""
    mount = tmp_path / "disk"
    mount.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(mount)], capture_output=True)
    if done.returncode:
        pytest.skip(f"a small file system can only be mounted by root: {done.stderr.decode().strip()}")
    yield mount  # type: ignore[misc]
    subprocess.run(["umount", "-l", str(mount)], check=True)


def test_a_full_disk_does_not_stop_training(small_task: str, small_disk: Path) -> None:
    run_dir = small_disk / "run"
    options = ("--workers", "2", "--run-dir", run_dir, "--steps", "30", "--set", "task.lane_s=0.1")
    with Running(small_task, *options) as job:
        job.wait_for_step(3)
        ballast = small_disk / "ballast"
        with open(ballast, "wb", buffering=0) as file:
            try:
                while file.write(b"\0" * 512):
                    pass
            except OSError:
                pass
        reached = json.loads(everstep("status", run_dir, "--json").stdout)["step"]
        while json.loads(everstep("status", run_dir, "--json").stdout)["step"] < reached + 3:
            assert job.process.poll() is None, job.end()
        ballast.unlink()
        code, events, errors = job.end()
    assert code == 0, errors
    assert (events[-1]["kind"], events[-1]["steps"]) == ("summary", 30)
    assert digest_of(run_dir)["step"] == 30
