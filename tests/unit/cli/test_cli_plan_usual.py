"""`everstep plan usual`: its figures are those of the other commands."""

from __future__ import annotations

import json
from typing import Any

import pytest

from everstep.cli.main import run_command
from everstep.cost.mixed import equal_speed, lanes_by_speed, mixed_speed


def asked(capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    assert run_command(["plan", *options, "--json"]) == 0
    said: dict[str, Any] = json.loads(capsys.readouterr().out)
    return said


def test_its_figures_are_those_of_the_other_commands(capsys: pytest.CaptureFixture[str]) -> None:
    said = asked(capsys, "usual")
    fits, states, days, efficiency, saved, again, twice, large, mixed = (one["figures"] for one in said["answers"])
    options = ("--model", "gpt3-13b", "--gpus", "32", "--batch", "1024", "--dtype", "bf16")
    best = asked(capsys, "recommend", *options, "--tokens", "26B")["best"][0]
    assert (fits["split"], fits["total_bytes"]) == (best["split"], best["total_bytes"]) and fits["fits"]
    assert days["tokens_per_s"] == pytest.approx(best["time"]["tokens_per_s"])
    assert best["days"] * best["goodput"] < 5 < 5 * days["tokens"] / 26e9
    assert states["float32_bytes"] == states["mixed_bytes"] == 208 * 10**9
    assert efficiency["8"] > 0.9 and efficiency["32"] > 0.8 and saved["seconds"] < 120 and again["host_s"] < 300
    ours = asked(capsys, "memory", "--params", "13B", "--workers", "32", "--gpu", "a100-80", "--zero", "1")
    assert twice["1"] == ours["max_model_size_with_zero"] >= 2 * twice["0"]
    assert large["fits"] and mixed["gain"] > 1.5 and said["fits"] and said["source"] and said["assumed"]


def test_lanes_by_speed() -> None:
    assert lanes_by_speed([3.0, 1.0], 8) == [6, 2]
    assert lanes_by_speed([1.0, 1.0, 1.0], 4) == [2, 1, 1]
    assert mixed_speed([3.0, 1.0], [6, 2]) == 4 and equal_speed([3.0, 1.0], 8) == 2
