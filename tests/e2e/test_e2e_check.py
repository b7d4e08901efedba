"""`everstep check`: exit codes and findings, of scripts and tasks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from e2e_cli import TASK_FILE, one_error, together

import rehearsed_scripts

KEEPING = """
class Keeping(Small):
    def build_model(self):
        self.ema = nn.Linear(2, 2)
        return super().build_model()

    def loss(self, model, batch):
        with torch.no_grad():
            self.ema.weight.add_(1)
        return super().loss(model, batch)
"""


@pytest.mark.longer
def test_what_check_says(tmp_path: Path) -> None:
    (trainer,) = (s for s in rehearsed_scripts.WHOLE if s.name == "trainer")
    (tmp_path / "trainer.py").write_text(trainer.text)
    (tmp_path / "tasks.py").write_text(TASK_FILE + KEEPING)
    (tmp_path / "nothing.py").write_text("print('hello')")
    (tmp_path / "raises.py").write_text("import sys\nraise ValueError(sys.argv[1:])")
    script, small, keeping, nothing, raises = together(
        ["check", "trainer.py", "--json"],
        ["check", "tasks.py:Small", "--json", "--max-seconds", "90"],
        ["check", "tasks.py:Keeping"],
        ["check", "nothing.py"],
        ["check", "raises.py", "--steps", "4", "--", "--lr", "1"],
        cwd=tmp_path,
    )
    said = json.loads(script.stdout)
    assert script.returncode == 1 and said["ok"] is False, script.stderr
    found = {f["object"]: f for f in said["findings"]}
    assert set(found) == {*trainer.refused, *trainer.listed}
    average = found["self.ema"]
    line = trainer.text.splitlines().index("        self.ema = copy.deepcopy(self.model)") + 1
    assert (average["kind"], average["file"], average["line"]) == ("module", "trainer.py", line)
    assert "state={'ema': self.ema}" in average["remedy"]
    assert said["covered"] and any("C extensions" in text for text in said["not_covered"])
    assert small.returncode == 0 and json.loads(small.stdout)["ok"] is True, small.stdout + small.stderr
    told = json.loads(small.stdout)
    assert any("(the last step): resumed" in text for text in told["covered"]), told
    assert any("two workers, one of which" in text for text in (*told["covered"], *told["not_covered"])), told
    assert keeping.returncode == 1 and "task.ema: join does not carry this Linear" in keeping.stdout
    assert nothing.returncode == 2 and "it ended without calling everstep.join" in one_error(nothing)
    assert raises.returncode == 2 and "ValueError: ['--lr', '1'] (raises.py:2)" in one_error(raises)


BRIEF = """
import torch
import everstep

model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=5)
data = [(torch.full((2,), float(n)), torch.tensor(n % 2)) for n in range(40)]
run = everstep.join(model, optimizer, data, scheduler=scheduler, steps=5, lanes=4, micro_batch=2)
for step in run:
    for x, y in step:
        step.backward(torch.nn.functional.cross_entropy(model(x), y))
"""


@pytest.mark.longer
def test_a_job_shorter_than_the_check_and_one_with_settings(tmp_path: Path) -> None:
    (tmp_path / "brief.py").write_text(BRIEF)
    (tmp_path / "greeting.py").write_text("import os\nassert os.environ['GREETING'] == 'hello'\n" + BRIEF)
    elsewhere = tmp_path / "checkpoints"
    more = ["steps=4", "env.GREETING=hello", "workers=7", "min_workers=3", f"checkpoint.disk.path={elsewhere}"]
    brief, settings, wrong = together(
        ["check", "brief.py", "--json"],
        ["check", "greeting.py", "--json", *(word for one in more for word in ("--set", one))],
        ["check", "brief.py", "--set", "zero.stages=2"],
        cwd=tmp_path,
    )
    for done, steps in ((brief, 5), (settings, 4)):
        assert done.returncode == 0, done.stdout + done.stderr
        said = json.loads(done.stdout)
        assert (
            f"two workers, one of which is killed and healed: {steps} steps to the bits of one worker"
            in (said["covered"])
        )
    assert "leaves out: checkpoint.disk.path, min_workers, workers" in json.loads(settings.stdout)["not_covered"][-1]
    assert not elsewhere.exists()
    assert wrong.returncode == 2 and "zero.stage" in one_error(wrong)
