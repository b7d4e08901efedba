"""Workers of two processes in real jobs: whichever of them dies or hangs, the worker is replaced and the bits are the
undisturbed run's.
"""

from __future__ import annotations

from pathlib import Path

from cell_worker import FOLLOWED
from job_harness import Event, Job, Jobs, healed

STEPS = {"steps": 30}
TWO_RANKS = {"EVERSTEP_TEST_RANKS": "2"}


def followed(job: Job, life: str) -> list[int]:
    """The updates that the limb of this life has followed."""
    return [int(line) for line in (job.run_dir / FOLLOWED / f"{life}-1").read_text().split()]


def left(job: Job) -> list[int]:
    """The processes of cells that are still there."""
    pids = [int(path.read_text()) for path in (job.run_dir / FOLLOWED).glob("*.pid")]
    assert pids
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def evicted(job: Job) -> dict[int, Event]:
    return {event["worker_id"]: event for event in job.of_kind("worker_evicted")}


def test_heads_train_and_their_limbs_follow(jobs: Jobs) -> None:
    job = jobs.run("Pictures", workers=3, numerics=STEPS, environment=TWO_RANKS)
    for worker_id in range(3):
        assert followed(job, f"{worker_id}.0") == list(range(1, 31))
    pids = [event["pids"] for event in job.of_kind("worker_joined")]
    assert all(len(cell) == 2 for cell in pids) and len({pid for cell in pids for pid in cell}) == 6
    assert not job.of_kind("worker_evicted") and not left(job)
    parts = [path.name for path in (job.run_dir / "checkpoints").rglob("part-*")]
    assert parts and all("-r0-" in name for name in parts)


def test_a_killed_rank_takes_its_cell_along(jobs: Jobs) -> None:
    chaos = (
        "kill:target=worker:1/1,at=4,phase=backward; kill:target=worker:2,at=9; "
        "kill:target=worker:0/1,at=14,phase=update"
    )
    pace = [healed(1), healed(2), healed(0)]
    job = jobs.run("Pictures", workers=3, chaos=chaos, numerics=STEPS, pace=pace, environment=TWO_RANKS)
    struck = {event["worker_id"]: event for event in job.of_kind("fault_injected")}
    for worker_id, rank in ((1, 1), (2, 0), (0, 1)):
        event = evicted(job)[worker_id]
        assert event["reason"] == f"its rank {rank} was killed by SIGKILL" and event["cause"] == "killed"
        assert (event["pid"] == struck[worker_id]["pid"]) is (rank == 0)
        steps = followed(job, f"{worker_id}.1")
        assert steps == list(range(steps[0], 31)), "its next life, from where it came in"
    assert len(job.of_kind("worker_evicted")) == 3 and not left(job)


def test_a_stopped_limb_is_a_worker_that_hangs(jobs: Jobs) -> None:
    limits = {"hang_limit_s": 1, "heartbeat.interval_s": 0.2}
    chaos = "stop:target=worker:1/1,at=6"
    how = {"settings": limits, "numerics": STEPS, "pace": [healed(1)], "environment": TWO_RANKS}
    job = jobs.run("Text", workers=3, chaos=chaos, **how)
    (event,) = job.of_kind("worker_evicted")
    assert event["worker_id"] == 1 and event["cause"] == "hung"
    assert event["reason"].startswith("its rank 1: no progress for ")
    assert followed(job, "1.1")[-1] == 30 and not left(job)


def test_a_spare_cell_steps_in(jobs: Jobs) -> None:
    how = {"numerics": STEPS, "pace": [{"kind": "worker_healed"}], "environment": TWO_RANKS}
    job = jobs.run("Text", "--spares", "1", workers=2, chaos="kill:target=worker:1/1,at=6", **how)
    assert job.of_kind("worker_healed")[0]["worker_id"] == 2
    assert followed(job, "2.0")[-1] == 30 and not left(job)
