"""What users get wrong, and what goes wrong for them: one clear line and the right exit code each."""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e_cli import TASK_FILE, Running, digest_of, everstep, one_error, together

from everstep.cli.ledger import audit_run, read_rows
from everstep.observe.events import read_events
from job_harness import Jobs

REFUSED: list[tuple[list[str], list[str]]] = [
    (["--workers", "0"], ["workers", "0"]),
    (["--workers", "5"], ["workers", "4 lanes", "5"]),
    (["--batch-size", "30"], ["4 lanes", "30"]),
    (["--batch-size", "52"], ["50 samples", "52"]),
    (["--set", "lane=3"], ["'lane'", "'lanes'"]),
    (["--set", "lanes"], ["key=value"]),
    (["--set", "lanes=many"], ["lanes", "many"]),
    (["--min-workers", "2"], ["min_workers", "2"]),
    (["--config", "missing.yaml"], ["missing.yaml"]),
    (["--config", "nested.yaml"], ["'loader.worker'", "nested.yaml", "'loader.workers'"]),
    (["--config", "typed.yaml"], ["steps", "'ten'", "typed.yaml"]),
    (["--config", "list.yaml"], ["keys and values", "list"]),
    (["--chaos", "kil:at=1"], ["'kil:at=1'", "'kil'", "kill"]),
    (["--steps", "0"], ["steps", "0"]),
    (["--set", "early_stop.metric=loss"], ["early_stop.metric", "eval_every"]),
    (["--", "--an-argument"], ["--an-argument"]),
    (["--run-dir", "caf\udce9"], ["UTF-8", "caf\\udce9"]),
    (["--stages", "2"], ["stages", "1 unit", "2 parts"]),
    (["--set", "device=cuda:99"], ["cuda:99"]),
    (["--config", "far.yaml"], ["worker 0", "'far-away'", "localhost"]),
]
FILES = {
    "nested.yaml": "loader:\n  worker: 2\n",
    "typed.yaml": "steps: ten\n",
    "list.yaml": "- 1\n",
    "far.yaml": "map: [{hosts: [far-away]}]",
}


def at_once(
    jobs: Jobs, folder: Path, *commands: list[str], cwd: Path | None = None
) -> list[subprocess.CompletedProcess[str]]:
    """As `together`, each in a fork that has imported torch already."""
    outputs = [folder / f"command-{number}" for number in range(len(commands))]
    running = [jobs.command(argv, output, cwd=cwd) for argv, output in zip(commands, outputs, strict=True)]
    codes = [job.end() for job in running]
    texts = [[output.with_suffix(end).read_text() for end in (".out", ".err")] for output in outputs]
    return [subprocess.CompletedProcess(*found, *text) for *found, text in zip(commands, codes, texts, strict=True)]


def test_refused_before_anything_starts(jobs: Jobs, small_task: str, tmp_path: Path) -> None:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    run = ["run", small_task, "--run-dir", str(tmp_path / "run")]
    commands = [run + [str(tmp_path / a) if a.endswith(".yaml") else a for a in argv] for argv, _ in REFUSED]
    for (argv, words), done in zip(REFUSED, at_once(jobs, tmp_path, *commands), strict=True):
        assert done.returncode == 2, f"{argv}: {done.stderr}"
        message = one_error(done)
        assert [word for word in words if word not in message] == [], f"{argv}: {message}"
    assert not (tmp_path / "run").exists(), "nothing is left behind by what cannot work"


def test_a_task_that_cannot_be_used(jobs: Jobs, tmp_path: Path) -> None:
    cases = {
        "absent.py:Small": ["no file absent.py"],
        "broken.py:Small": ["does not import", "no_such_module_at_all"],
        "broken:Small": ["does not import", "no_such_module_at_all"],
        "typo.py:Small": ["'lane'", "'lanes'"],
        "typo.py:Smal": ["has no 'Smal'", "Small"],
        "no-such-task": ["'no-such-task'", "mlp-digits"],
    }
    (tmp_path / "broken.py").write_text("import no_such_module_at_all")
    (tmp_path / "typo.py").write_text(TASK_FILE.replace('"lanes": 4', '"lane": 4'))
    found = at_once(jobs, tmp_path, *(["run", task] for task in cases), cwd=tmp_path)
    for (task, words), done in zip(cases.items(), found, strict=True):
        assert done.returncode == 2, f"{task}: {done.stderr}"
        message = one_error(done)
        assert [word for word in words if word not in message] == [], f"{task}: {message}"
    assert not (tmp_path / "runs").exists()


@pytest.mark.longer
def test_what_does_not_exist(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    commands = [
        ["status", "nowhere"],
        ["ledger", "nowhere"],
        ["verify", "nowhere", "nowhere"],
        ["scale", "nowhere", "--workers", "2"],
        ["drain", "nowhere", "0"],
        ["eval", "mlp-digits", "--from", "nowhere"],
        ["run", "mlp-digits", "--run-dir", "file/run"],
    ]
    for command, done in zip(commands, together(*commands, cwd=tmp_path), strict=True):
        assert done.returncode == 2, f"{command}: {done.stderr}"
        assert "nowhere" in one_error(done) or "run directory" in one_error(done)
    assert [path.name for path in tmp_path.iterdir()] == ["file"], "nothing is created for what does not exist"


NOISE = "int.from_bytes(os.urandom(2), 'big') / 65536"
SEED = "int.from_bytes(os.urandom(4), 'big')"
NOISY_OPTIMIZER = f"""class Noisy(torch.optim.SGD):
            @torch.no_grad()
            def step(self, closure=None):
                super().step()
                self.param_groups[0]["params"][0].add_({NOISE})

        return Noisy(params, lr=0.01)"""
FAILURES = {
    "build_model": ("return nn.Sequential", "raise ValueError('no model today')\n        return nn.Sequential"),
    "initial": ("return nn.Sequential", f"torch.manual_seed({SEED})\n        return nn.Sequential"),
    "build_dataset": ("return Numbers(50)", "raise OSError('disk on fire')"),
    "build_optimizer": ("return torch.optim.AdamW(params, lr=0.01)", "raise KeyError('lr')"),
    "loss": ("end = time", "raise RuntimeError('no loss today')\n        end = time"),
    "sample": ("x = torch.sin", "if index == 17: raise OSError('unreadable')\n        x = torch.sin"),
    "number": ("loss(self, model, batch):", "loss(self, model, batch):\n        return 3.0\n"),
    "operation": ("return nn.functional.mse_loss", f"return {NOISE} * nn.functional.mse_loss"),
    "optimizer": ("return torch.optim.AdamW(params, lr=0.01)", NOISY_OPTIMIZER),
}
METHODS = ("build_model", "build_dataset", "build_optimizer", "loss")
WORDS = {
    "build_model": ["Small.build_model", "ValueError: no model today"],
    "initial": ["worker 1", "initial state of stage 0", "not the one that the job began with"],
    "build_dataset": ["Small.build_dataset", "OSError: disk on fire"],
    "build_optimizer": ["Small.build_optimizer", "KeyError: 'lr'"],
    "loss": ["Small.loss", "RuntimeError: no loss today"],
    "sample": ["sample 17", "unreadable"],
    "number": ["the loss must be a tensor", "float"],
    "operation": ["computed twice", "not deterministic"],
    "optimizer": ["made twice", "Noisy", "not deterministic"],
}


def test_what_goes_wrong_in_the_task(jobs: Jobs, tmp_path: Path) -> None:
    for name, (old, new) in FAILURES.items():
        assert old in TASK_FILE
        (tmp_path / f"{name}.py").write_text(TASK_FILE.replace(old, new, 1))
    runs = [["run", f"{tmp_path / n}.py:Small", "--run-dir", str(tmp_path / n), "--workers", "2"] for n in FAILURES]
    for name, done in zip(FAILURES, at_once(jobs, tmp_path, *runs), strict=True):
        assert done.returncode == 1, f"{name}: {done.stderr}"
        message = one_error(done)
        assert [word for word in WORDS[name] if word not in message] == [], f"{name}: {message}"
        logs = "".join(path.read_text() for path in (tmp_path / name / "logs").glob("worker-*.jsonl"))
        assert "Traceback" in logs and WORDS[name][-1] in logs, f"{name}: {logs}"
        if name in METHODS:
            assert f"({name}.py:" in message, "the line is named"
    for name in METHODS:
        assert json.loads(everstep("status", tmp_path / name, "--json").stdout)["state"] == "failed"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    mount = tmp_path / "disk"
    mount.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(mount)], capture_output=True)
    if done.returncode:
        pytest.skip(f"a small file system can only be mounted by root: {done.stderr.decode().strip()}")
    yield mount
    subprocess.run(["umount", "-l", str(mount)], check=True)


def fill(disk: Path) -> Path:
    """Leave no room; returns the file that takes it."""
    ballast = disk / "ballast"
    with open(ballast, "ab", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(b"\0" * 512):
            pass
    return ballast


@pytest.mark.longer
def test_a_full_disk_does_not_stop_training_and_costs_no_row(small_task: str, small_disk: Path) -> None:
    run_dir, hold = small_disk / "run", small_disk.with_name("hold")
    hold.touch()
    pace = {"E2E_LANE_S": "0.06", "E2E_HOLD": str(hold)}
    options = ["--workers", "2", "--run-dir", run_dir, "--steps", "60", "--set", "lanes=16"]
    with Running(small_task, *options, **pace) as job:
        job.wait_for_step(3)
        ballast = fill(small_disk)
        written = max(row.step for row in read_rows(run_dir))
        while json.loads(everstep("status", run_dir, "--json").stdout)["step"] < written + 4:
            assert job.process.poll() is None, job.end()
            fill(small_disk)  # again: an older checkpoint may have been deleted since
            written = max(row.step for row in read_rows(run_dir))
        ballast.unlink()
        hold.unlink()
        code, events, errors = job.end()
    assert code == 0, errors
    last = events[-1]
    assert (last["kind"], last["steps"], last["ledger_complete"]) == ("summary", 60, True)
    assert digest_of(run_dir)["step"] == 60
    report = audit_run(run_dir)
    assert report.clean and report.complete and report.steps == 60
    told = read_events(run_dir / "events.jsonl")
    assert [event["step"] for event in told if event["kind"] == "step_committed"] == list(range(1, 61))
    assert not [event for event in told if "were lost" in str(event["reason"])]


@pytest.mark.longer
def test_a_ledger_that_can_never_be_written_is_not_passed_over(
    small_task: str, small_disk: Path, request: pytest.FixtureRequest
) -> None:
    run_dir = small_disk.with_name("run")
    (run_dir / "ledger").mkdir(parents=True)
    subprocess.run(["mount", "--bind", str(small_disk), str(run_dir / "ledger")], check=True)
    request.addfinalizer(lambda: subprocess.run(["umount", "-l", str(run_dir / "ledger")], check=True))
    ballast = fill(small_disk)
    command = ["run", small_task, "--workers", "2", "--run-dir", run_dir, "--steps", "6", "--json"]
    done = everstep(*command)
    said = one_error(done)
    assert done.returncode == 1, done.stderr
    assert "lacks the rows of 6 of 6 steps (1..6)" in said and "free some space" in said, said
    last = json.loads(done.stdout.splitlines()[-1])
    assert (last["state"], last["exit_code"], last["ledger_complete"]) == ("completed", 1, False)
    assert said.endswith(last["reason"]) and digest_of(run_dir)["step"] == 6
    warnings = [event["reason"] for event in read_events(run_dir / "events.jsonl") if event["kind"] == "warning"]
    assert sum("wait in memory" in reason for reason in warnings) == 2, warnings
    assert sum("without having written 6 rows" in reason for reason in warnings) == 2, warnings
    assert warnings[-1] == last["reason"], warnings
    ballast.unlink()
    again, audited = together(command, ["ledger", run_dir, "--json"])
    assert (again.returncode, json.loads(again.stdout)["ledger_complete"]) == (1, False), again.stderr
    report = json.loads(audited.stdout)
    assert (audited.returncode, report["complete"], report["steps"]) == (1, False, 0), audited.stderr
