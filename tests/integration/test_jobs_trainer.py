"""`everstep.integrations.huggingface.Trainer`: the losses of the original, and the same bits whoever dies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from job_harness import Jobs, same
from sampling import needs

pytestmark = needs("transformers", "accelerate")

SCRIPT = """
import collections, json, os, sys, time
import torch, transformers
from transformers import TrainingArguments
if os.environ.get("ORIGINAL"):
    from transformers import Trainer
else:
    from everstep.integrations.huggingface import Trainer

out, again = sys.argv[1], "again" in sys.argv

class Rows(torch.utils.data.Dataset):
    def __init__(self, count, first):
        made = torch.Generator().manual_seed(first)
        self.rows = [torch.randint(0, 64, (12,), generator=made) for _ in range(count)]
    def __len__(self):
        return len(self.rows)
    def __getitem__(self, k):
        labels = self.rows[k].clone()
        labels[: k % 5] = -100
        return {"input_ids": self.rows[k], "labels": labels}

class Counter(transformers.TrainerCallback):
    count = 0
    def __init__(self):
        self.count = 0
    def on_step_end(self, args, state, control, **more):
        self.count += 1
        control.should_training_stop = self.count == 9

class Average(transformers.TrainerCallback):
    def __init__(self):
        self._recent, self.met, self.began = collections.deque(maxlen=3), set(), time.time()
    def on_train_begin(self, args, state, control, model=None, **more):
        if state.is_world_process_zero and "EVERSTEP_REHEARSAL" not in os.environ:
            open(os.path.join(out, f"zero-{os.getpid()}"), "w").close()
        self.model, self.average, self._total = model, torch.optim.swa_utils.AveragedModel(model), torch.zeros(2)
    def on_step_end(self, args, state, control, model=None, **more):
        self.average.update_parameters(model)
        self._total = self._total + model.lm_head.weight.detach()[0, :2]
        self._recent.append(self._total.tolist())
        self.met.add(state.global_step % 4)
        self.took = time.perf_counter()
    def on_train_end(self, args, state, control, **more):
        if trainer.is_world_process_zero():
            found = {name: value.tolist() for name, value in self.average.state_dict().items()}
            with open(os.path.join(out, "average.json"), "w") as file:
                json.dump([found, list(self._recent), sorted(self.met), self._total.tolist()], file)

class Mine(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, **more):
        return super().compute_loss(model, inputs, return_outputs, **more)

def metrics(found):
    return {"hits": float((found.predictions.argmax(-1)[:, :-1] == found.label_ids[:, 1:]).mean())}

drop = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), float(os.environ.get("DROP", "0.1")))
sizes = dict(vocab_size=64, n_embd=16, n_layer=2, n_head=2, n_positions=16, bos_token_id=0, eos_token_id=0)
torch.manual_seed(7)
model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **drop))
args = TrainingArguments(
    out, per_device_train_batch_size=4, gradient_accumulation_steps=2, num_train_epochs=3, learning_rate=1e-2,
    weight_decay=0.1, warmup_steps=3, lr_scheduler_type="cosine", logging_steps=1, eval_strategy="steps", eval_steps=4,
    save_strategy="steps", save_steps=4, save_total_limit=2, load_best_model_at_end=True, disable_tqdm=True,
    use_cpu=True,
)
trainer = Mine(model=model, args=args, train_dataset=Rows(37, 1), eval_dataset=Rows(5, 2), compute_metrics=metrics,
               callbacks=[Counter(), Average()])
trainer.train(resume_from_checkpoint=os.environ.get("FROM", again))
trainer.save_model()
if trainer.is_world_process_zero():
    with open(os.path.join(out, "history.json"), "w") as file:
        json.dump(trainer.state.log_history, file)
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return str(path)


def history(folder: Path) -> list[dict[str, Any]]:
    rows = json.loads((folder / "history.json").read_text())
    times = ("_runtime", "_per_second", "_time", "total_flos")
    return [{k: v for k, v in row.items() if not k.endswith(times)} for row in rows]


@pytest.mark.longer
def test_losses_are_those_of_the_original(jobs: Jobs, script: str, tmp_path: Path) -> None:
    found = []
    for name, environment in (("original", {"ORIGINAL": "1"}), ("ours", {})):
        where = tmp_path / name
        job = jobs._request(where, [script, str(where)], {"DROP": "0", **environment})
        assert job.end() == 0, job.account()
        found.append(history(where))
        assert (where / "checkpoint-8" / "model.safetensors").exists() and (where / "config.json").exists()
    rows = [json.loads((tmp_path / name / "history.json").read_text()) for name in ("original", "ours")]
    assert [list(row) for row in rows[0]] == [list(row) for row in rows[1]]
    for old, new in zip(*found, strict=True):
        for name, value in old.items():
            assert new[name] == pytest.approx(value, rel=1e-6, abs=1e-6), (old, new)


@pytest.mark.longer
def test_a_kill_changes_no_bit(jobs: Jobs, script: str, tmp_path: Path) -> None:
    """The leader and another worker die; the callbacks' counter and averages, logs and the best checkpoint go on."""
    kill = "kill:target=worker:1,at=3,phase=backward; kill:target=leader:0,at=6"
    ends = []
    for name, options in (("alone", ["--workers", "1"]), ("placed", ["--workers", "3", "--chaos", kill])):
        where, out = tmp_path / name, tmp_path / f"{name}-out"
        job = jobs.command(["run", script, "--run-dir", str(where), "--json", *options, "--", str(out)], where)
        assert job.end() == 0, job.account()
        assert len(list(out.glob("zero-*"))) == 1, "one worker took itself for process zero when training began"
        files = [(out / name).read_bytes() for name in ("model.safetensors", "average.json")]
        ends.append((job, history(out), files))
    assert len(ends[1][0].of_kind("worker_evicted")) == 2
    same(ends[0][0].run_dir, ends[1][0])
    assert ends[0][1:] == ends[1][1:]
    assert ends[0][1][-1]["step"] == 9


def test_only_a_checkpoint_of_the_job_can_be_one_to_go_on_from(jobs: Jobs, script: str, tmp_path: Path) -> None:
    """A job that begins refuses another's, and leaves it there; a replacement may name one that is removed."""
    out, old = tmp_path / "out", tmp_path / "out" / "checkpoint-3"
    for name in ("another", "own"):
        where = tmp_path / name
        if name == "another":
            old.mkdir(parents=True)
        options = ["--workers", "2", "--chaos", "kill:target=worker:1,at=6,phase=backward"] if name == "own" else []
        argv = ["run", script, "--run-dir", str(where), "--json", *options, "--", str(out)]
        job = jobs.command(argv, where, {"FROM": str(old)})
        assert job.end() == (2 if name == "another" else 0), job.account()
        if name == "another":
            assert "has not written" in where.with_suffix(".err").read_text() and old.exists()
            old.rmdir()
    assert job.of_kind("worker_evicted") and (out / "history.json").exists()


@pytest.mark.longer
def test_a_plain_trainer_is_refused(jobs: Jobs, script: str, tmp_path: Path) -> None:
    where = tmp_path / "plain"
    argv = ["run", script, "--run-dir", str(where), "--workers", "2", "--", str(tmp_path / "out")]
    job = jobs.command(argv, where, {"ORIGINAL": "1"})
    assert job.end() == 2, job.account()
    said = where.with_suffix(".err").read_text()
    assert "from everstep.integrations.huggingface import Trainer" in said and "Traceback" not in said
