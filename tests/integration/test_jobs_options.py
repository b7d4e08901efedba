"""Optimizers, precisions, schedulers, loaders, evaluation and transports: with a kill and a joiner that heals."""

from __future__ import annotations

import json
from typing import Any

import pytest

from job_harness import Jobs, healed
from sampling import mostly_longer

CHAOS = "kill:target=worker:1,at=4,phase=backward; kill:target=leader:0,at=9,phase=agree"
PACE = [healed(1), healed(0)]
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "absent gradients": ("Sparse", {}, {}),
    "Adafactor": ("PicturesAdafactor", {}, {"verify_every": 3}),
    "extra state of modules": ("PicturesCounting", {}, {"verify_every": 3}),
    "extra state of modules, in stages": ("PicturesCounting", {}, {"verify_every": 3, "stages": 2}),
    "Muon in bf16": ("MuonText", {"precision": "bf16"}, {}),
    "loss scaler": ("Text", {"precision": "fp16"}, {}),
    "OneCycle, loader processes, end of data": ("PicturesEpochs", {}, {"loader.workers": 2}),
}


@pytest.mark.parametrize("case", mostly_longer(CASES, lambda case: case.startswith("OneCycle")))
def test_kills_and_healing(jobs: Jobs, case: str) -> None:
    task, numerics, settings = CASES[case]
    job = jobs.run(task, chaos=CHAOS, numerics=numerics, settings=settings, pace=PACE)
    assert {e["worker_id"] for e in job.of_kind("worker_healed")} == {0, 1}, job.account()


EVALUATION = {"eval_every": 5, "early_stop.metric": "accuracy", "early_stop.patience": 2, "early_stop.min_delta": 0.2}


def evaluations(events: list[dict[str, Any]]) -> list[tuple[int, str]]:
    """(step, metrics) of the evaluations that were reported."""
    return [(e["step"], json.dumps(e["metrics"])) for e in events if e["kind"] == "evaluated"]


@pytest.mark.longer
def test_evaluation_and_early_stop(jobs: Jobs) -> None:
    """The stop comes at the same step with the same numbers, though a worker dies while it evaluates."""
    job = jobs.run("FatalEvaluation", chaos=CHAOS, numerics={"steps": 60, **EVALUATION}, pace=PACE)
    alone = jobs.reference("FatalEvaluation", {"steps": 60, **EVALUATION})
    expected = evaluations([json.loads(line) for line in (alone / "events.jsonl").read_text().splitlines()])
    assert evaluations(job.events) == expected
    assert expected[-1][0] < 60
    assert len(job.of_kind("worker_evicted")) == 3


@pytest.mark.longer
def test_a_ready_residual_network_with_all_its_options(jobs: Jobs) -> None:
    options = {"include_top": False, "pooling": "max", "scale_layers": True, "bn_eps": 1e-4, "momentum": 0.8}
    numerics = {f"task.{name}": value for name, value in {**options, "num_classes": 12}.items()}
    job = jobs.run("ThinResNet50", chaos="kill:target=worker:1,at=2,phase=backward", numerics={**numerics, "steps": 6})
    assert job.of_kind("worker_evicted"), job.account()


@pytest.mark.longer
@pytest.mark.parametrize("tls", [pytest.param("off", marks=pytest.mark.longer), "on"])
def test_sockets(jobs: Jobs, tls: str) -> None:
    """With TLS, all of the job's connections are over it, those to the coordinator too."""
    job = jobs.run("Text", chaos=CHAOS, settings={"transport": "sockets", "security.tls.mode": tls}, pace=PACE)
    assert {e["worker_id"] for e in job.of_kind("worker_healed")} == {0, 1}, job.account()


@pytest.mark.longer
def test_sockets_of_five_uneven_workers(jobs: Jobs) -> None:
    chaos = "kill:target=worker:2,at=5,phase=reduce; kill:target=coordinator,at=8; stop:target=worker:1,at=12,for=0.3"
    jobs.run("Pictures", workers=5, chaos=chaos, settings={"transport": "sockets"}, pace=[healed(2)])
