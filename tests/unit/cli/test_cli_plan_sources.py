"""Each figure of each answer of `everstep plan --json` has a source."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from test_cli_plan_online import make_run

from everstep.cli.main import run_command

MODEL = ("--params", "13B", "--gpus", "32", "--tokens", "26B")
TASK = "mlp-digits"


def without_source(found: Any, named: Mapping[str, str], path: tuple[str, ...] = ()) -> Iterator[str]:
    """Places of figures that nothing around them gives a source for: no object with `source`, and no key in
    `sources`, the object's own at the top aside."""
    if isinstance(found, dict):
        if path and isinstance(found.get("source"), str) and found["source"]:
            return
        for key, value in found.items():
            if key not in named:
                yield from without_source(value, named, (*path, key))
    elif isinstance(found, list):
        for k, value in enumerate(found):
            yield from without_source(value, named, (*path, str(k)))
    elif isinstance(found, int | float) and not isinstance(found, bool):
        yield ".".join(path)


@pytest.mark.parametrize(
    "words",
    [
        ("memory", "--params", "7.5B", "--zero", "2", "--workers", "64"),
        ("memory", "--params", "13B", "--workers", "8", "--gpu", "a100-80", "--offload", "cpu"),
        ("memory", "--params", "1M", "--workers", "4", "--set", "cell.fsdp=4"),
        ("memory", TASK, "--workers", "2", "--memory", "1GB"),
        ("failures", "--nodes", "64", "--hours", "168"),
        ("goodput", "--devices", "64", "--days", "9", "--runs", "2", "--wanted", "99%"),
        ("time", *MODEL, "--tp", "2", "--pp", "2"),
        ("time", TASK, "--gpus", "2", "--samples", "1M"),
        ("recommend", *MODEL),
        ("recommend", "--params", "175B", "--gpus", "8"),
        ("recommend", TASK, "--gpus", "2"),
        ("usual",),
    ],
    ids=" ".join,
)
def test_each_figure_has_its_source(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["plan", *words, "--json"]) in (0, 1)
    check(json.loads(capsys.readouterr().out))


def test_each_figure_of_a_job_has_its_source(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["plan", "--from", str(make_run(tmp_path / "r", more=12)), "--json"]) == 0
    check(json.loads(capsys.readouterr().out))


def check(said: dict[str, Any]) -> None:
    assert said["source"] and isinstance(said["assumed"], list) and "fits" in said
    named = said.get("sources", {})
    assert all(isinstance(source, str) and source for source in named.values())
    assert list(without_source(said, named)) == []


def test_a_figure_without_a_source_is_found() -> None:
    said = {
        "a": 1,
        "b": {"source": "here", "c": [2]},
        "d": [{"e": 3.5, "f": True}],
        "sources": {"a": "x"},
        "source": "y",
    }
    assert list(without_source(said, said["sources"])) == ["d.0.e"]
