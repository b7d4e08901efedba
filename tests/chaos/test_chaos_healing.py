"""Faults of those who heal and of those who feed them."""

from __future__ import annotations

import os
import signal

import pytest

from job_harness import Jobs, healed

STEPS = {"steps": 30}


@pytest.mark.longer
def test_a_joiner_dies_while_it_heals(jobs: Jobs) -> None:
    chaos = "kill:target=worker:1,at=4; kill:target=worker:1,at=1,phase=heal"
    job = jobs.run("Pictures", chaos=chaos, numerics=STEPS, pace=[healed(1)])
    assert [e["phase"] for e in job.of_kind("fault_injected")] == ["load", "heal"]
    assert job.of_kind("worker_healed")[-1]["incarnation"] == 2


@pytest.mark.longer
def test_a_joiner_hangs_while_it_heals(jobs: Jobs) -> None:
    """For a moment: it has fallen behind, and catches up."""
    chaos = "kill:target=worker:2,at=4; stop:target=worker:2,at=1,phase=heal,for=0.7"
    jobs.run("Text", chaos=chaos, numerics=STEPS, pace=[healed(2)])


@pytest.mark.longer
def test_the_donor_dies_while_a_joiner_heals(jobs: Jobs) -> None:
    chaos = "kill:target=worker:1,at=4; stop:target=worker:1,at=1,phase=heal,for=0.5"
    job = jobs.start("Pictures", chaos=chaos, numerics=STEPS, pace=[healed(1), healed(2)])
    job.wait_for("fault_injected", phase="heal")
    os.kill(job.pid_of(2), signal.SIGKILL)  # donors are backups: not the leader, worker 0
    jobs.check(job, "Pictures", STEPS)
    assert {e["worker_id"] for e in job.of_kind("worker_healed")} == {1, 2}, job.account()


def test_everyone_else_dies_while_a_joiner_heals(jobs: Jobs) -> None:
    """Whoever is left holds no state, or has just got it."""
    chaos = "kill:target=worker:1,at=4; stop:target=worker:1,at=1,phase=heal,for=0.3"
    job = jobs.start("Text", chaos=chaos, numerics=STEPS)
    job.wait_for("fault_injected", phase="heal")
    for worker_id in (0, 2):
        os.kill(job.pid_of(worker_id), signal.SIGKILL)
    jobs.check(job, "Text", STEPS)


@pytest.mark.longer
def test_a_member_dies_just_after_a_joiner_came(jobs: Jobs) -> None:
    """The leader, as the generation with the joiner begins: who is newest may have to give what it just got."""
    job = jobs.start(
        "Pictures", chaos="kill:target=worker:0,at=4", numerics=STEPS, pace=[healed(0), healed(1), healed(2)]
    )
    job.wait_for("worker_healed", worker_id=0)
    for worker_id in (1, 2):
        os.kill(job.pid_of(worker_id), signal.SIGKILL)
    jobs.check(job, "Pictures", STEPS)
