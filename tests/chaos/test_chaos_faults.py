"""Kills, hangs and exceptions in real jobs: each ends with the bits of the run in which nothing happened."""

from __future__ import annotations

from pathlib import Path

import pytest

from job_harness import Jobs, healed

STEPS = {"steps": 30}


def test_worker_leader_coordinator_and_a_pause_in_one_job(jobs: Jobs) -> None:
    chaos = (
        "kill:target=worker:2,at=4; kill:target=leader:0,at=8; kill:target=coordinator,at=12; "
        "stop:target=worker:3,at=16,for=0.5"
    )
    job = jobs.run("Pictures", workers=4, chaos=chaos, numerics=STEPS, pace=[healed(2), healed(0)])
    assert len(job.of_kind("fault_injected")) == 4
    assert [e["worker_id"] for e in job.of_kind("worker_evicted")] == [2, 0]
    assert len(job.of_kind("coordinator_restarted")) == 1
    assert {e["worker_id"] for e in job.of_kind("worker_healed")} == {0, 2}
    assert len(job.of_kind("recovery_completed")) == 2


@pytest.mark.longer
def test_a_spare_steps_in(jobs: Jobs) -> None:
    pace = [{"kind": "worker_healed"}]
    job = jobs.run("Text", "--spares", "1", chaos="kill:target=worker:1,at=6", numerics=STEPS, pace=pace)
    assert job.of_kind("worker_healed")[0]["worker_id"] == 3


@pytest.mark.longer
def test_a_hang_is_evicted_and_replaced(jobs: Jobs) -> None:
    limits = {"hang_limit_s": 1, "heartbeat.interval_s": 0.2}
    job = jobs.run("Text", chaos="stop:target=worker:1,at=6", settings=limits, numerics=STEPS, pace=[healed(1)])
    evicted = job.of_kind("worker_evicted")
    assert [e["worker_id"] for e in evicted] == [1]
    assert "no progress" in evicted[0]["reason"] and evicted[0]["cause"] == "hung"


@pytest.mark.longer
def test_a_throttled_worker_and_coordinator_are_late_and_nothing_else(jobs: Jobs) -> None:
    chaos = "throttle:target=worker:1,at=4,for=1; throttle:target=coordinator,at=8,for=1"
    job = jobs.run("Pictures", chaos=chaos, numerics=STEPS)
    assert [e["fault"] for e in job.of_kind("fault_injected")] == ["throttle", "throttle"]
    assert not job.of_kind("worker_evicted") and not job.of_kind("coordinator_restarted")


@pytest.mark.longer
def test_exceptions_in_workers(jobs: Jobs) -> None:
    chaos = "raise:target=worker:1,at=4,phase=forward; raise:target=leader:0,at=9,phase=reduce"
    job = jobs.run("Pictures", chaos=chaos, numerics=STEPS, pace=[healed(1), healed(0)])
    assert [e["worker_id"] for e in job.of_kind("worker_evicted")] == [1, 0]


@pytest.mark.parametrize(
    ("task", "phases"),
    [
        pytest.param("Pictures", ("load", "backward", "agree"), marks=pytest.mark.longer),
        ("Text", ("forward", "reduce", "update")),
    ],
)
def test_a_kill_in_each_phase(jobs: Jobs, task: str, phases: tuple[str, ...]) -> None:
    chaos = "; ".join(f"kill:target=worker:{k},at={3 + 9 * k},phase={p}" for k, p in enumerate(phases))
    job = jobs.run(task, chaos=chaos, numerics=STEPS, pace=[healed(0), healed(1)])
    assert [e["phase"] for e in job.of_kind("fault_injected")] == list(phases)


@pytest.mark.longer
def test_a_second_kill_during_the_first_recovery(jobs: Jobs) -> None:
    """Two die at the same step, and a third as soon as the others go on."""
    chaos = "kill:target=worker:1,at=5,phase=agree; kill:target=worker:2,at=5,phase=agree; kill:target=worker:3,at=6"
    job = jobs.run("Pictures", workers=5, chaos=chaos, numerics=STEPS, pace=[healed(1), healed(2), healed(3)])
    assert len(job.of_kind("worker_evicted")) == 3


@pytest.mark.longer
def test_all_but_one_at_once(jobs: Jobs) -> None:
    chaos = "; ".join(f"kill:target=worker:{k},at=7,phase=backward" for k in (0, 1, 3))
    job = jobs.run("Text", workers=4, chaos=chaos, numerics=STEPS, pace=[healed(0), healed(1), healed(3)])
    assert {e["worker_id"] for e in job.of_kind("worker_evicted")} == {0, 1, 3}


@pytest.mark.longer
def test_all_at_once_start_over(jobs: Jobs) -> None:
    chaos = "; ".join(f"kill:target=worker:{k},at=7,phase=reduce" for k in range(3))
    job = jobs.run("Text", chaos=chaos, numerics=STEPS)
    fallback = job.of_kind("fallback")
    assert len(fallback) == 1 and "all workers with the training state were lost" in fallback[0]["reason"]
    assert fallback[0]["step"] == 0 and fallback[0]["steps_redone"] == 6


@pytest.mark.longer
def test_a_coordinator_that_is_stopped_for_good(jobs: Jobs) -> None:
    """It lives and answers nothing: the launcher ends it, and the next one decides about the worker that died then."""
    chaos = "stop:target=coordinator,at=4; kill:target=worker:1,at=8"
    job = jobs.run("Text", chaos=chaos, numerics=STEPS, pace=[{"kind": "coordinator_restarted"}, healed(1)])
    assert len(job.of_kind("coordinator_restarted")) == 1
    assert [e["worker_id"] for e in job.of_kind("worker_evicted")] == [1]


EXITS = """
import os, torch, everstep
model = torch.nn.Linear(2, 1)
data = torch.utils.data.TensorDataset(torch.randn(32, 2), torch.randn(32, 1))
run = everstep.join(model, torch.optim.SGD(model.parameters(), lr=0.1), data, lanes=4, micro_batch=2, steps=9)
for step in run:
    for x, y in step:
        if step.number == 3:
            os._exit(7)
        step.backward(torch.nn.functional.mse_loss(model(x), y))
    print("printed at step", step.number)
"""


def test_a_step_that_ends_every_process_ends_the_job(jobs: Jobs, tmp_path: Path) -> None:
    """Restarts are no use: said after three deaths, with what is needed to find the cause."""
    script = tmp_path / "exits.py"
    script.write_text(EXITS)
    job = jobs.start(str(script), workers=2, settings={"lanes": 4})
    assert job.end() == 1, job.account()
    reason = job.of_kind("job_failed")[-1]["reason"]
    for words in ("crash loop", "times in a row", "step 3", "exit code 7", "logs/worker-"):
        assert words in reason
    assert "printed at step 1\nprinted at step 2\n" in job.run_dir.with_suffix(".err").read_text()
