"""Faults in split jobs: whoever dies in whatever phase, the bits are those of the run in which nothing happened."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

from job_harness import Jobs, healed
from sampling import mostly_longer

STEPS = {"steps": 24}
LIMITS = {"hang_limit_s": 5, "heartbeat.interval_s": 0.2}
SNAPSHOTS = {"checkpoint.memory.every_steps": 4}


def seeds() -> list[int]:
    found: list[int] = []
    for part in os.environ.get("EVERSTEP_CHAOS_SEEDS", "1-3").split(","):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


@pytest.mark.parametrize("seed", mostly_longer(seeds(), lambda seed: "EVERSTEP_CHAOS_SEEDS" in os.environ))
def test_random_faults(jobs: Jobs, seed: int) -> None:
    task = ("Pictures", "Text", "Layers")[seed % 3]
    stages = 2 + seed % 2
    settings: dict[str, Any] = {**LIMITS, **SNAPSHOTS, "stages": stages}
    settings["schedule"] = ("1f1b", "gpipe")[seed // 2 % 2]
    settings["recompute"] = seed % 5 == 0
    settings["transport"] = "sockets" if seed % 4 == 3 else "auto"
    if seed % 3 == 2:
        settings |= {"redundancy": 1}
    workers = 2 * stages if seed % 3 == 2 else stages + seed % 4
    if seed % 7 == 4:
        settings["eval_every"] = 6
    jobs.run(task, workers=workers, chaos=f"random:p=0.1,seed={seed},after_step=3", numerics=STEPS, settings=settings)


@pytest.mark.parametrize(
    "phases", [("load", "backward", "agree"), pytest.param(("forward", "reduce", "update"), marks=pytest.mark.longer)]
)
def test_a_kill_in_each_phase(jobs: Jobs, phases: tuple[str, ...]) -> None:
    """A leader of the first stage, a backup in the middle, a leader of the last stage."""
    chaos = "; ".join(
        f"kill:target=worker:{w},at={3 + 9 * k},phase={p}"
        for k, (w, p) in enumerate(zip((0, 3, 4), phases, strict=True))
    )
    job = jobs.run("Text", workers=6, chaos=chaos, numerics=STEPS, settings={"stages": 3}, pace=[healed(0), healed(3)])
    assert [e["phase"] for e in job.of_kind("fault_injected")] == list(phases)
    assert not job.of_kind("fallback")


@pytest.mark.longer
def test_leaders_die_one_after_the_other_and_a_standby_takes_over(jobs: Jobs) -> None:
    chaos = "kill:target=leader:1,at=5,phase=backward; kill:target=leader:1,at=6,phase=agree"
    settings = {"stages": 2, "redundancy": 2, "backoff.initial_s": 20}
    job = jobs.run("Pictures", workers=6, chaos=chaos, numerics=STEPS, settings=settings)
    assert [e["worker_id"] for e in job.of_kind("worker_evicted")] == [3, 4]
    assert not job.of_kind("fallback")


@pytest.mark.parametrize("phase", [pytest.param("forward", marks=pytest.mark.longer), "update"])
def test_a_whole_pool_dies_and_its_copy_is_used(jobs: Jobs, phase: str) -> None:
    chaos = f"kill:target=worker:2,at=18,phase={phase}; kill:target=worker:3,at=18,phase={phase}"
    settings = {"stages": 3, **SNAPSHOTS}
    job = jobs.run("Text", workers=6, chaos=chaos, numerics=STEPS, settings=settings, pace=[healed(2)])
    redone = [e for e in job.of_kind("fallback") if e.get("steps_redone") is not None]
    assert len(redone) == 1, job.account()
    assert 12 <= redone[0]["step"] <= 16


@pytest.mark.longer
@pytest.mark.parametrize("worker", [pytest.param(0, marks=pytest.mark.longer), 2])
def test_the_main_or_a_leader_dies_while_final_is_made(jobs: Jobs, worker: int) -> None:
    chaos = f"kill:target=worker:{worker},at=6,phase=finish"
    job = jobs.run("Text", workers=4, chaos=chaos, numerics={"steps": 6}, settings={"stages": 2})
    assert [e["phase"] for e in job.of_kind("fault_injected")] == ["finish"]


@pytest.mark.longer
def test_a_stage_is_lost_while_final_is_made_and_steps_are_done_again(jobs: Jobs) -> None:
    """The state goes back after the last step: the job may not end before it is there again."""
    chaos = "; ".join(f"kill:target=worker:{w},at=6,phase=finish" for w in (0, 1))
    settings = {"stages": 3, "on_failure": "shrink", "checkpoint.memory.every_steps": 2}
    job = jobs.start("Text", workers=3, chaos=chaos, numerics={"steps": 6}, settings=settings)
    assert job.end() == 0, job.account()
    found, expected = (
        json.loads((d / "final/digest.json").read_text()) for d in (job.run_dir, jobs.reference("Text", {"steps": 6}))
    )
    assert found == expected, job.account()


@pytest.mark.longer
def test_fewer_workers_than_stages_until_the_last_one(jobs: Jobs) -> None:
    chaos = "kill:target=worker:1,at=10,phase=backward; kill:target=worker:2,at=16,phase=agree"
    settings = {"stages": 3, "on_failure": "shrink", **SNAPSHOTS}
    job = jobs.run("Layers", workers=3, chaos=chaos, numerics=STEPS, settings=settings)
    assert job.of_kind("generation_started")[-1]["workers"] == [0]


@pytest.mark.longer
def test_a_worker_dies_while_chunks_flow_through_the_stages(jobs: Jobs) -> None:
    evaluation = {"eval_every": 5, "early_stop.metric": "accuracy", "early_stop.patience": 9}
    job = jobs.run(
        "FatalEvaluation", workers=4, numerics={"steps": 12, **evaluation}, settings={"stages": 2, **SNAPSHOTS},
        pace=[{"kind": "worker_evicted"}], lane_s=0.01,
    )  # fmt: skip
    assert len(job.of_kind("worker_evicted")) == 1
    assert [e["step"] for e in job.of_kind("evaluated")] == [5, 10, 12]


@pytest.mark.longer
def test_who_heals_dies_and_then_its_donor(jobs: Jobs) -> None:
    chaos = "kill:target=worker:3,at=4; kill:target=worker:3,at=1,phase=heal; kill:target=leader:1,at=14,phase=reduce"
    jobs.run("Pictures", workers=4, chaos=chaos, numerics=STEPS, settings={"stages": 2}, pace=[healed(3)])


@pytest.mark.longer
def test_an_evaluation_that_is_done_again_counts_once(jobs: Jobs) -> None:
    """All go back to the copy that was taken before the loop evaluated; otherwise the job would stop at step 15."""
    evaluation = {"eval_every": 5, "early_stop.metric": "accuracy", "early_stop.patience": 3, "early_stop.min_delta": 9}
    settings = {"stages": 3, "on_failure": "shrink", "checkpoint.memory.every_steps": 5}
    job = jobs.run(
        "Pictures", workers=3, chaos="kill:target=worker:1,at=11,phase=forward", settings=settings,
        numerics={"steps": 40, **evaluation},
    )  # fmt: skip
    back = [e for e in job.of_kind("fallback") if e.get("steps_redone") is not None]
    assert [e["step"] for e in back] == [10], job.account()
    assert [e["step"] for e in job.of_kind("evaluated")] == [5, 10, 10, 15, 20], job.account()
