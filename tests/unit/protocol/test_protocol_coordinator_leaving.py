"""Loops that are left before the last step: by all after the same one, or the job ends, and says who."""

from __future__ import annotations

from coordinator_harness import S, World, running

from everstep.base.cause import Cause
from everstep.protocol import messages as m


def left(world: World, worker: int, step: int = 4) -> None:
    assert world.plan is not None
    said = m.LoopLeft(worker_id=worker, incarnation=0, generation=world.plan.generation, step=step)
    world.say(f"w{worker}.0", said)


def entered(world: World, worker: int, loop: str, step: int = 4) -> None:
    assert world.plan is not None
    at = {"worker_id": worker, "incarnation": 0, "generation": world.plan.generation, "step": step + 1}
    world.say(f"w{worker}.0", m.GenerationEntered(**at, phases_ms={}, loop=loop))  # type: ignore[arg-type]


def test_where_all_leave_after_the_same_step_nothing_is_asked() -> None:
    world = running()
    for i in range(3):
        left(world, i)
    world.wait(3 * S)
    assert world.plan is not None and world.plan.generation == 1
    world.say("w0.0", m.WorkerDone(worker_id=0, incarnation=0, generation=1, step=4, final_written=True))
    assert world.report("job_completed")["reason"] == "step 4 was the last"


def test_where_one_leaves_and_others_go_on_the_job_ends_with_a_checkpoint() -> None:
    world = running(save_ns=5 * S)
    left(world, 1)
    world.wait(S // 2)
    assert world.plan is not None and world.plan.generation == 1, "they may follow"
    world.wait(S)
    assert world.plan.generation == 2 and world.plan.cause is Cause.LEFT
    assert world.plan.reason == "worker 1 left the loop after step 4: asking whether the others did, too"
    entered(world, 0, "on")
    entered(world, 1, "left")
    assert world.plan.generation == 3 and world.plan.save, "it is saved first"
    for i in range(3):
        entered(world, i, "left" if i == 1 else "on")
    world.wait(3 * S)
    assert world.plan.generation == 3, "nobody is asked again while it is saved"
    world.say("w0.0", m.Saved(worker_id=0, incarnation=0, step=4, ok=True, where="there", reason=""))
    failed = world.report("job_failed")
    assert failed["cause"] is Cause.LEFT
    assert failed["reason"].startswith("worker 1 left the loop after step 4, worker 0 went on: leave it after the same")
    assert world.coordinator.job.progress.ended is not None
    assert world.coordinator.job.progress.ended.exit_code == 1


def test_who_has_not_come_so_far_is_asked_again() -> None:
    """Nor is one that joins, and has yet to do what follows upon the step."""
    world = running()
    left(world, 1)
    world.wait(3 * S // 2)
    for i, loop in enumerate(("left", "left", "")):
        entered(world, i, loop)
    assert world.plan is not None and world.plan.generation == 2
    world.wait(3 * S // 2)
    assert world.plan.generation == 3
    for i in range(3):
        entered(world, i, "left")
    world.wait(3 * S)
    assert world.plan.generation == 3 and world.coordinator.job.progress.ended is None


def test_nobody_is_asked_while_a_plan_is_being_settled() -> None:
    world = running()
    left(world, 1)
    world.wait(5 * S)
    assert world.plan is not None and world.plan.generation == 2


def test_one_that_left_and_died_is_as_if_it_had_not() -> None:
    world = running()
    left(world, 1)
    world.exited(1)
    assert world.plan is not None and world.plan.worker_ids == (0, 2)
    for i in (0, 2):
        entered(world, i, "on")
    world.wait(3 * S)
    assert world.plan.generation == 2 and world.coordinator.job.progress.ended is None


def test_a_coordinator_that_is_started_again_hears_of_it_again() -> None:
    world = running()
    left(world, 1)
    world.wait(3 * S // 2)
    plan = world.plan
    world = world.restart()
    world.agent(0, 1, 2)
    for i in range(3):
        world.hello(i, plan=plan, step=4)
    entered(world, 1, "left")
    entered(world, 0, "on")
    world.wait(2 * S)
    assert world.coordinator.job.progress.ended is not None
    assert "worker 1 left the loop after step 4" in world.report("job_failed")["reason"]


def asked() -> World:
    """Worker 1 has left its loop, and a plan has been made for that."""
    world = running()
    left(world, 1)
    world.wait(3 * S // 2)
    assert world.plan is not None and world.plan.generation == 2
    return world


def test_one_whose_loop_goes_on_again_has_not_left_it() -> None:
    """Its state was put back to that of an earlier step."""
    world = asked()
    for i in (1, 0, 2):
        entered(world, i, "on")
    world.wait(3 * S)
    assert world.plan is not None and world.plan.generation == 2 and world.coordinator.job.progress.ended is None


def test_what_a_loop_did_in_an_earlier_generation_says_nothing_of_now() -> None:
    world = asked()
    for i in (1, 0, 2):
        entered(world, i, "on")
    left(world, 1, step=5)
    world.wait(3 * S // 2)
    assert world.plan is not None and world.plan.generation == 3
    for i in (1, 0, 2):
        entered(world, i, "left")
    world.wait(3 * S)
    assert world.plan.generation == 3 and world.coordinator.job.progress.ended is None


def test_who_has_not_come_to_that_step_has_not_gone_on() -> None:
    world = asked()
    entered(world, 1, "left", step=6)
    for i in (0, 2):
        entered(world, i, "on", step=5)
    assert world.plan is not None and world.plan.generation == 2, "it may leave there, too"
    world.wait(3 * S // 2)
    assert world.plan.generation == 3 and not world.plan.save


def test_who_leaves_while_a_plan_is_being_settled_is_not_forgotten() -> None:
    world = asked()
    entered(world, 1, "")
    left(world, 1, step=5)
    world.wait(3 * S)
    assert world.plan is not None and world.plan.generation == 2
    for i in (0, 2):
        entered(world, i, "")
    world.wait(3 * S // 2)
    assert world.plan.generation == 3 and world.plan.reason.startswith("worker 1 left the loop after step 5")


def test_a_loop_that_was_left_by_who_is_no_member_says_nothing_of_the_others() -> None:
    world = running()
    world.exited(2)
    world.hello(2, 1)
    said = m.LoopLeft(worker_id=2, incarnation=1, generation=world.plan.generation, step=4)
    world.say("w2.1", said)
    world.wait(3 * S)
    assert world.plan.cause is not Cause.LEFT and world.last(m.JobEnded) is None
