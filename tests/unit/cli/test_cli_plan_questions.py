"""`everstep plan failures` and its neighbours: answers as JSON and as text, refusals."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from everstep.cli.main import run_command


def answered(capsys: pytest.CaptureFixture[str], *options: str, code: int = 0) -> dict[str, Any]:
    assert run_command(["plan", *options, "--json"]) == code
    first = capsys.readouterr().out
    assert run_command(["plan", *options, "--json"]) == code
    assert capsys.readouterr().out == first, "the same question has the same answer, byte by byte"
    said: dict[str, Any] = json.loads(first)
    return said


def test_failures_of_a_job(capsys: pytest.CaptureFixture[str]) -> None:
    said = answered(capsys, "failures", "--nodes", "64", "--hours", "168", "--mtbf", "50000h")
    assert said["expected"] == 64 * 168 / 50_000 and said["lecture"] == said["probability"] * 64
    assert said["mtbf_s"] == 50_000 * 3600 / 64 and "counts every node" in said["lecture_reason"]
    assert [one["nodes"] for one in said["scenarios"]] == [8, 64, 256, 1024] and said["scenarios"][1][
        "expected"
    ] == 0.21504
    assert said["by_cause"]["total"] == 419 and said["by_cause"]["expected_total"] == pytest.approx(
        419 * 512 * 168 / (16384 * 54 * 24)
    )
    assert [one["published_is"] for one in said["mttf_by_size"]] == ["observed", "projected", "projected"]
    assert said["checkpoint_interval"]["ours_s"] == 3600 and said["checkpoint_interval"]["young_s"] == 7500


def test_failures_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["plan", "failures", "--nodes", "8", "--hours", "24", "--per-node", "4"]) == 0
    text = capsys.readouterr().out
    assert "a week        64     168    10.19%        0.108" in text and "is no expected number" in text
    assert "assumed: 4 devices per node" in text and "Llama 3's rates, 32 devices" in text


REFUSED = [
    (["failures", "--hours", "1"], "--nodes"),
    (["failures", "--nodes", "0", "--hours", "1"], "--nodes"),
    (["failures", "--nodes", "8", "--hours", "-1"], "more than 0 and at most 1e+06 hours, got -1"),
    (["failures", "--nodes", "8", "--hours", "nan"], "got nan"),
    (["failures", "--nodes", "8", "--hours", "1", "--mtbf", "100000"], "with its unit"),
    (["failures", "--nodes", "8", "--hours", "1", "--mtbf", "1e20h"], "from 0.001 to 1e+12 seconds"),
    (["failures", "--nodes", "8", "--hours", "1", "--checkpoint-cost", "-3s"], "--checkpoint-cost: expected a time"),
]


@pytest.mark.parametrize(("options", "said"), REFUSED)
def test_a_bad_question_is_one_line(options: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["plan", *options]) == 2
    told = capsys.readouterr()
    assert not told.out and said in told.err and len(told.err.splitlines()) == 1


WITHOUT_TORCH = [["failures", "--nodes", "8", "--hours", "24"]]


@pytest.mark.parametrize("options", WITHOUT_TORCH, ids=lambda options: options[0])
def test_torch_is_not_imported(options: list[str]) -> None:
    program = (
        "import sys; from everstep.cli.main import run_command; "
        f"code = run_command(['plan', *{options!r}]); sys.exit(code or 'torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], stdout=subprocess.DEVNULL).returncode == 0
