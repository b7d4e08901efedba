"""The examples to start from: with a worker that is killed they end with the bits of one undisturbed worker."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from e2e_cli import everstep, together

_EXAMPLES = Path(__file__).parents[2] / "examples"
_KILL = "kill:target=worker:1,at=2,phase=backward"
_STEPS = ("--steps", "4", "--set", "rehearse=false")
_MANY = ("--workers", "2", "--min-workers", "2", "--chaos", _KILL, *_STEPS)


@pytest.mark.longer
@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("ddpm_digits.py", ()),
        ("gan_digits.py", ()),
        ("graph_network.py", ()),
        ("llama_bpe.py:Llama", ()),
        ("llama_bpe.py:Llama", ("--stages", "2")),
        ("lora_gpt2.py", ()),
        ("hf_gpt2.py:GPT2", ()),
        ("hf_resnet.py:ResNet", ()),
    ],
)
def test_an_example_survives_a_kill(name: str, more: tuple[str, ...], tmp_path: Path) -> None:
    target = str(_EXAMPLES / name)
    one, many = together(
        ["run", target, "--workers", "1", *_STEPS, "--run-dir", "one"],
        ["run", target, *_MANY, *more, "--run-dir", "many"],
        cwd=tmp_path,
    )
    assert one.returncode == many.returncode == 0, (one.stdout, one.stderr, many.stdout, many.stderr)
    digests = [json.loads((tmp_path / d / "final" / "digest.json").read_text()) for d in ("one", "many")]
    assert digests[0] == digests[1]
    assert '"worker_evicted"' in (tmp_path / "many" / "events.jsonl").read_text()


@pytest.mark.longer
@pytest.mark.parametrize("origin", ["plain", "lightning", "hf"])
def test_a_starting_point_survives_a_kill(origin: str, tmp_path: Path) -> None:
    made = everstep("init", tmp_path, "--from", origin)
    assert made.returncode == 0, made.stderr
    target = made.stdout.splitlines()[-1].split()[3]
    one, many = together(
        ["run", target, "--workers", "1", *_STEPS, "--run-dir", "one"],
        ["run", target, *_MANY, "--run-dir", "many"],
        cwd=tmp_path,
    )
    assert one.returncode == many.returncode == 0, (one.stdout, one.stderr, many.stdout, many.stderr)
    digests = [json.loads((tmp_path / d / "final" / "digest.json").read_text()) for d in ("one", "many")]
    assert digests[0] == digests[1]


def journal(name: str, *argv: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a file of the journal's, as its users do."""
    path = _EXAMPLES / "journal" / name
    command = [sys.executable, str(path)] if path.suffix == ".py" else ["sh", str(path)]
    variables = {**os.environ, "PYTHON": sys.executable}
    return subprocess.run([*command, *argv], cwd=cwd, env=variables, capture_output=True, text=True, timeout=600)


@pytest.mark.longer
def test_the_journals_command_line(tmp_path: Path) -> None:
    wanted = ("--epochs", "1", "--batch-size", "720", "--lr", "0.02", "--momentum", "0.8", "--log-dir", "logs")
    wanted += ("--log-interval", "1", "--weight-decay", "0", "--checkpoint-freq", "2", "--eval-freq", "1")
    more = ("--num-nodes", "2", "--redundancy-factor", "1", "--simulate-failure")
    one = journal("main.py", "--mode", "train", *wanted, "--checkpoint-dir", "one", cwd=tmp_path)
    many = journal("main.py", "--mode", "train", *wanted, *more, "--checkpoint-dir", "many", cwd=tmp_path)
    assert one.returncode == many.returncode == 0, (one.stdout, one.stderr, many.stdout, many.stderr)
    digests = [json.loads((tmp_path / d / "final" / "digest.json").read_text()) for d in ("one", "many")]
    assert digests[0] == digests[1]
    assert "step 1/2  loss" in many.stdout + many.stderr and (tmp_path / "logs" / "events.jsonl").is_file()
    assert '"worker_evicted"' in (tmp_path / "many" / "events.jsonl").read_text()
    judged = journal("main.py", "--mode", "eval", "--checkpoint-dir", "many", cwd=tmp_path)
    assert judged.returncode == 0 and "accuracy" in judged.stdout, judged.stderr
    sound = journal("check.sh", "many", cwd=tmp_path)
    assert sound.returncode == 0, sound.stdout + sound.stderr


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("main.py", "--mode", "train", "--num-nodes", "3", "--redundancy-factor", "2"), "a divisor of 3 workers"),
        pytest.param(
            ("main.py", "--mode", "train", "--start-epoch", "2"), "there is no checkpoint in", marks=pytest.mark.longer
        ),
        pytest.param(
            ("main.py", "--mode", "train", "--world-size", "2", "--num-nodes", "3"),
            "--num-nodes: expected 2",
            marks=pytest.mark.longer,
        ),
        pytest.param(
            ("main.py", "--mode", "train", "--batch-size", "0"),
            "--batch-size: expected at least 1",
            marks=pytest.mark.longer,
        ),
        pytest.param(
            ("main.py", "--mode", "train", "--num-nodes", "0"),
            "--num-nodes: expected at least 1",
            marks=pytest.mark.longer,
        ),
        (
            ("main.py", "--mode", "train", "--num-nodes", "3", "--devices-per-node", "4"),
            "at most 8 workers that hold a s",
        ),
        (("main.py", "--mode", "train", "--batch-size", "100"), "--batch-size: expected a multiple of 8, got 100"),
        (("main.py", "--mode", "train", "--lr", "fast"), "error: argument --lr: invalid float value: 'fast'"),
        (("main.py", "--mode", "train", "--log-dir", "/proc/none"), "--log-dir /proc/none: No such file"),
        (
            ("main.py", "--mode", "train", "--num-nodes", "2", "--rank", "1"),
            "give the number of hosts as --world-size",
        ),
        (("check.sh", "one", "two"), "usage: check.sh [RUN_DIR]"),
        (("run_main.sh", "2", "0"), "usage: run_main.sh NODES RANK ADDR PORT"),
        (("run_failure_tests.sh", "meteor"), "got meteor"),
    ],
)
def test_what_the_journals_files_refuse(argv: tuple[str, ...], said: str, tmp_path: Path) -> None:
    done = journal(*argv, cwd=tmp_path)
    assert done.returncode == 2 and said in done.stderr, done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr


@pytest.mark.longer
def test_a_signal_to_the_journals_main_reaches_the_job(tmp_path: Path) -> None:
    command = [sys.executable, str(_EXAMPLES / "journal" / "main.py"), "--mode", "train", "--log-dir", "log"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as main:
        assert main.stdout is not None and main.stdout.readline()
        main.terminate()
        said = "".join(main.communicate(timeout=120))
    assert main.returncode == 143 and "interrupted by SIGTERM" in said, said


@pytest.mark.longer
def test_the_journals_failure_tests(tmp_path: Path) -> None:
    done = journal("run_failure_tests.sh", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
