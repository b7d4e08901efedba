"""Jobs of scripts are rehearsed once: refused before their first step, or never again in any later life."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from everstep.cli.ledger import audit_run
from job_harness import Jobs, healed

SCRIPT = """
import copy, os, sys
import torch
from torch import nn
import everstep

with open({lives!r}, "a") as file:
    file.write(os.environ.get("EVERSTEP_REHEARSAL", "real") + "\\n")
torch.manual_seed(0)
data = [(torch.randn(4), torch.tensor(i % 2)) for i in range(64)]
model = nn.Linear(4, 2)
ema = copy.deepcopy(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in everstep.join(model, optimizer, data, lanes=4, micro_batch=2, steps=12, state={state}):
    for x, y in step:
        step.backward(nn.functional.cross_entropy(model(x), y))
    with torch.no_grad():
        for mine, its in zip(ema.parameters(), model.parameters()):
            mine.lerp_(its, 0.1)
    print("said by", os.environ.get("EVERSTEP_REHEARSAL", "real"))
"""


def write(folder: Path, state: str) -> tuple[str, Path]:
    script, lives = folder / "train.py", folder / "lives"
    script.write_text(SCRIPT.format(lives=str(lives), state=state))
    return str(script), lives


def test_a_job_that_would_lose_its_average_does_not_begin(jobs: Jobs, tmp_path: Path) -> None:
    script, lives = write(tmp_path, "{}")
    job = jobs.start(script, workers=2, settings={"lanes": 4})
    assert job.end() == 2, job.account()
    assert not job.of_kind("step_committed")
    (failed,) = job.of_kind("job_failed")
    assert "ema (train.py:12): join does not carry this Linear" in failed["reason"]
    assert "state={'ema': ema}" in failed["reason"]
    assert not (job.run_dir / "rehearsed.json").exists()
    assert Counter(lives.read_text().split())["a"] == 1
    again = jobs.start(script, workers=1, settings={"lanes": 4, "rehearse": "false"})
    assert again.end() == 0, again.account()


def test_a_job_whose_state_has_the_model_s_own_memory_does_not_begin(jobs: Jobs, tmp_path: Path) -> None:
    script, _ = write(tmp_path, "{'ema': ema, 'kept': everstep.state(best=model.state_dict())}")
    job = jobs.start(script, workers=1, settings={"lanes": 4})
    assert job.end() == 2, job.account()
    assert not job.of_kind("step_committed")
    assert "best['weight'] shares memory with what is trained: store a clone" in job.of_kind("job_failed")[0]["reason"]


@pytest.mark.longer
def test_later_lives_do_not_rehearse(jobs: Jobs, tmp_path: Path) -> None:
    script, lives = write(tmp_path, "{'ema': ema}")
    chaos = "kill:target=worker:0,at=4; kill:target=worker:1,at=8"
    job = jobs.start(script, workers=2, chaos=chaos, pace=[healed(0), healed(1)])
    assert job.end() == 0, job.account()
    lanes = {lane for e in job.of_kind("generation_started") for _, _, _, held in e["seats"] for lane in held}
    assert lanes == set(range(4)), "as the script says, since the command line says nothing of lanes"
    report = audit_run(job.run_dir)
    assert report.clean and report.steps == 12, report
    assert json.loads((job.run_dir / "rehearsed.json").read_text())["note"] == ""
    assert not (job.run_dir / "rehearsal").exists()
    assert Counter(lives.read_text().split()) == {"a": 1, "b": 1, "real": 4}
    assert "said by a" not in job.run_dir.with_suffix(".out").read_text()
