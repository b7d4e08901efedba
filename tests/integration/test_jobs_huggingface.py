"""`everstep run hf:DIR`: kills, stages and a resume leave the bits of the undisturbed run on one worker."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hub_models import made, text
from job_harness import Job, Jobs, same
from sampling import needs

pytestmark = needs("transformers")

Run = Callable[..., Job]


@pytest.fixture
def run(jobs: Jobs, tmp_path: Path) -> Run:
    data = text(tmp_path)

    def started(name: str, run_dir: str, *options: str) -> Job:
        folder = tmp_path / name.replace(", ", "-")
        if not folder.exists():
            made(folder, name)
        where = tmp_path / run_dir
        argv = ["run", f"hf:{folder}", "--run-dir", str(where), "--json", "--set", f"task.data={data}"]
        return jobs.command([*argv, "--set", "lanes=4", "--steps", "6", *options], where)

    return started


KILL = ("--chaos", "kill:target=worker:1,at=3,phase=backward")
SHARDS = ("--set", "cell.shards=2")
TOGETHER = ("--workers", "2", "--set", "cell.tp=2", *KILL)
DIVIDED = ("--workers", "2", "--set", "cell.fsdp=2", *KILL)
SPLIT = ("--stages", "2", "--pool", "2", *KILL)


@pytest.mark.longer
@pytest.mark.parametrize(
    ("name", "alike", "placed"),
    [
        pytest.param("gpt2", (), SPLIT, marks=pytest.mark.longer),  # it has dropout and a tied weight
        pytest.param("llama", ("--set", "task.lora.rank=2"), SPLIT, marks=pytest.mark.longer),
        pytest.param("gpt_neox", (), ("--workers", "2", *KILL), marks=pytest.mark.longer),
        pytest.param("gpt2", (*SHARDS, "--set", "cell.sp=true"), TOGETHER, marks=pytest.mark.longer),
        ("llama, tied", SHARDS, TOGETHER),
        pytest.param("mistral, grouped", SHARDS, TOGETHER, marks=pytest.mark.longer),
        pytest.param("qwen2, grouped", (*SHARDS, "--set", "cell.sp=true"), TOGETHER, marks=pytest.mark.longer),
        pytest.param("llama, tied", SHARDS, (*TOGETHER, "--stages", "2"), marks=pytest.mark.longer),
        pytest.param("gpt2", (), DIVIDED, marks=pytest.mark.longer),
        pytest.param("llama", ("--set", "task.lora.rank=2"), DIVIDED, marks=pytest.mark.longer),
        pytest.param("gpt_neox", (), DIVIDED, marks=pytest.mark.longer),
    ],
)
def test_kills(run: Run, name: str, alike: tuple[str, ...], placed: tuple[str, ...]) -> None:
    if any("lora" in option for option in alike):
        pytest.importorskip("peft")
    alone, job = run(name, "alone", *alike), run(name, "placed", *alike, *placed)
    assert alone.end() == 0, alone.account()
    assert job.end() == 0, job.account()
    assert job.of_kind("worker_evicted"), job.account()
    same(alone.run_dir, job)


@pytest.mark.longer
def test_resume_and_export(run: Run, tmp_path: Path) -> None:
    """From a checkpoint in the middle a job goes on in two stages, to the bits of the job that left it."""
    import transformers

    alone = run("llama", "alone", "--set", "checkpoint.disk.every_steps=3")
    assert alone.end() == 0, alone.account()
    middle = alone.run_dir / "checkpoints" / "step-0000000003"
    again = run("llama", "again", "--resume-from", str(middle), "--stages", "2", "--workers", "2")
    assert again.end() == 0, again.account()
    digests = [json.loads((job.run_dir / "final" / "digest.json").read_text()) for job in (alone, again)]
    assert digests[0] == digests[1]
    argv = [sys.executable, "-m", "everstep", "checkpoints", "export", str(alone.run_dir), "--format", "hf"]
    subprocess.run([*argv, "--to", str(tmp_path / "exported")], check=True, capture_output=True)
    left, right = (
        transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict()
        for folder in (tmp_path / "exported", alone.run_dir / "final")
    )
    assert all(torch.equal(left[name], right[name]) for name in left)
    assert json.loads((alone.run_dir / "final" / "config.json").read_text())["dtype"] == "float32"
