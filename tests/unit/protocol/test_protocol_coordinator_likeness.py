"""Workers that compute with other kernels, or run other code, than the job."""

from __future__ import annotations

from typing import Any

from coordinator_harness import World, member

from everstep.base.cause import Cause
from everstep.protocol import messages as m
from everstep.protocol.coordinator.types import Alike, HostRules, Remember
from everstep.protocol.identity import Code, Kernels, told

OURS, THEIRS = Kernels("a" * 32, "a CPU by AVX512", 1), Kernels("b" * 32, "a CPU by AVX2", 1)
CODE = Code({"helper.py": "1" * 16}, {"torch": "2"})
OLDER = Code({"helper.py": "2" * 16}, {"torch": "2"})


class Told(World):
    """One whose workers say what they compute with and run."""

    def __init__(self, **config: Any) -> None:
        super().__init__(**config)
        self.remembered: dict[str, Any] = {}

    def handle(self, event: Any) -> list[Any]:
        effects = super().handle(event)
        for effect in effects:
            if isinstance(effect, Remember):
                self.remembered |= effect.facts
        return effects

    def come(
        self, worker: int, kernels: Kernels | None = OURS, code: Code | None = CODE, life: int = 0, host: str = "a1"
    ) -> str:
        name = f"w{worker}.{life}"
        self.connect(name, "worker")
        self.say(name, m.WorkerHello(member=member(worker, life, host), step=0, kernels=kernels, code=code))
        return name

    def warnings(self) -> list[str]:
        return [str(r.fields["reason"]) for r in self.reports if r.kind == "warning"]

    def over(self) -> Any:
        return self.coordinator.job.progress.ended


def two_hosts(**config: Any) -> Told:
    """Workers 0 and 1 are to run on a1, worker 2 on a2; a3 has room."""
    world = Told(workers=3, slots=3, **config)
    for name in ("a1", "a2", "a3"):
        world.connect(name, "agent")
        host = f"a{name[1]}"
        world.say(name, m.AgentHello(agent_id=name, host=host, workers=[], slots=0, room=2))
    for worker, agent in ((0, "a1"), (1, "a1"), (2, "a2")):
        world.started(worker, 0, agent)
    return world


def sent_away(world: Told) -> m.AgentRefused:
    refused = world.last(m.AgentRefused, "a2")
    assert "w2.0" in [to for to, message in world.sent if isinstance(message, m.Dismissed)]
    assert world.over() is None and "a2" not in world.coordinator.job.agents.known
    assert world.closed == ["a2"]
    assert world.last(m.SetSlots, "a3").worker_ids == [2], "what it was to run another host runs"
    return refused


def test_a_host_with_other_kernels_is_sent_away_and_the_job_goes_on() -> None:
    world = two_hosts()
    world.come(0)
    assert world.remembered["numerics"] == told(OURS)
    world.come(2, THEIRS, host="a2")
    refused = sent_away(world)
    assert refused.cause == Cause.NONDETERMINISTIC
    assert "a CPU by AVX2, the job with a CPU by AVX512" in refused.reason and "numerics.changed=warn" in refused.reason


def test_a_host_with_an_older_file_is_sent_away_and_the_job_goes_on() -> None:
    world = two_hosts()
    world.come(0)
    assert world.remembered["code"] == told(CODE)
    world.come(2, code=OLDER, host="a2")
    assert "helper.py is 2222222222222222 on host a2, 1111111111111111 in the job" in sent_away(world).reason


def test_the_only_host_is_sent_away_too_and_others_may_still_come() -> None:
    """The job's own process ends the job if that host is its own."""
    world = Told(workers=2, slots=2, hosts=HostRules(alike=Alike(kernels=OURS)))
    world.agent(name="a1", host="a1")
    world.come(0, THEIRS)
    assert "a CPU by AVX2, the job with a CPU by AVX512" in world.last(m.AgentRefused, "a1").reason
    assert world.over() is None and not world.remembered
    world.agent(name="a2", host="a2")
    assert world.last(m.SetSlots, "a2").worker_ids == [0, 1]


def test_with_warn_other_kernels_are_told_once_and_are_the_jobs_from_then_on() -> None:
    world = Told(workers=2, slots=2, hosts=HostRules(alike=Alike(kernels=OURS, warns=True)))
    world.agent(name="a1", host="a1")
    world.come(0, THEIRS)
    world.come(1, THEIRS)
    assert world.over() is None and world.remembered["numerics"] == told(THEIRS)
    assert len(world.warnings()) == 1 and "no longer exact" in world.warnings()[0]
    mixed = two_hosts(hosts=HostRules(alike=Alike(warns=True)))
    mixed.come(0)
    mixed.come(2, THEIRS, host="a2")
    assert mixed.remembered["numerics"] == told(OURS) and len(mixed.warnings()) == 1


def begun(min_workers: int = 1, **config: Any) -> Told:
    world = Told(workers=2, slots=2, min_workers=min_workers, **config)
    world.agent(name="a1", host="a1")
    for worker in (0, 1):
        world.started(worker, 0)
        world.come(worker)
        world.entered(worker, 1, 1)
    assert world.plan.generation == 1
    return world


def test_after_an_edit_a_slot_is_given_up_and_those_who_run_go_on() -> None:
    world = begun()
    world.exited(1)
    world.started(1, 1)
    world.come(1, code=OLDER, life=1)
    assert world.over() is None and world.coordinator.job.slots.lost.keys() == {1}
    assert world.last(m.SetSlots, "a1").worker_ids == [0], "it is not started again in vain"
    assert "run it again" in world.warnings()[-1] and world.plan.worker_ids == (0,)
    world.exited(0)
    world.started(0, 1)
    world.come(0, code=OLDER, life=1)
    assert "helper.py is" in world.last(m.AgentRefused, "a1").reason


def test_if_too_few_are_left_the_job_ends() -> None:
    world = begun(min_workers=2)
    world.exited(1)
    world.started(1, 1)
    world.come(1, code=OLDER, life=1)
    assert world.over().exit_code == 2 and "helper.py is" in world.over().reason


def test_what_is_imported_late_counts_like_all_else() -> None:
    world = begun()
    late = Code({"late.py": "3" * 16})
    world.say("w0.0", m.Imported(worker_id=0, incarnation=0, code=late))
    assert world.remembered["code"]["files"] == {"helper.py": "1" * 16, "late.py": "3" * 16}
    world.say("w1.0", m.Imported(worker_id=1, incarnation=0, code=late))
    assert not world.coordinator.job.slots.lost
    world.say("w1.0", m.Imported(worker_id=1, incarnation=0, code=Code({"late.py": "4" * 16})))
    assert (
        world.coordinator.job.slots.lost.keys() == {1} and "late.py is 4444" in world.report("worker_evicted")["reason"]
    )


def test_code_that_was_edited_between_two_runs_is_told() -> None:
    world = Told(workers=1, slots=1, hosts=HostRules(alike=Alike(before=OLDER)))
    world.agent(name="a1", host="a1")
    world.come(0)
    assert world.over() is None and len(world.warnings()) == 1
    assert "helper.py is 1111111111111111 now, 2222222222222222 when it ran last" in world.warnings()[0]


def test_the_next_coordinator_knows_it_from_the_file() -> None:
    world = Told(workers=2, slots=2, hosts=HostRules(alike=Alike(kernels=OURS, code=CODE)))
    world.agent(name="a1", host="a1")
    world.come(0, code=OLDER)
    assert world.last(m.AgentRefused, "a1")


def test_workers_that_say_nothing_of_it_are_taken() -> None:
    world = begun()
    world.come(1, None, None)
    assert world.over() is None


def differ(world: Told, *odd: int, says: int = 0) -> None:
    """A member has found that these compute a lane otherwise than others."""
    reason = f"workers {odd} compute another gradient in lane 3 of step 1"
    who = {"worker_id": says, "incarnation": 0, "workers": [says, *odd], "odd": list(odd), "ends": False}
    at = {"generation": world.plan.generation, "decided_in": 1, "tainted": 1, "lane": 3, "sound": 0, "drift": False}
    world.say(f"w{says}.0", m.SettleAgain(cause=Cause.NONDETERMINISTIC, reason=reason, **who, **at))


def test_a_lane_says_nothing_of_the_other_slots_of_a_host() -> None:
    """All had died at once, and the odd one's next life is the first that says hello."""
    world = begun()
    differ(world, 1)
    assert world.coordinator.job.slots.lost.keys() == {1} and world.plan.worker_ids == (0,)
    world.exited(1)
    world.exited(0)
    world.started(0, 1)
    world.started(1, 1)
    world.come(1, life=1)
    assert "w1.1" in [to for to, message in world.sent if isinstance(message, m.Dismissed)]
    assert world.last(m.AgentRefused, "a1") is None and world.coordinator.job.slots.lost.keys() == {1}
    world.come(0, life=1)
    assert world.plan.worker_ids == (0,) and world.over() is None


def test_if_a_lane_differs_in_all_slots_of_a_host_it_is_sent_away() -> None:
    world = two_hosts()
    for worker, host in ((0, "a1"), (1, "a1"), (2, "a2")):
        world.come(worker, host=host)
        world.entered(worker, 1, 1)
    differ(world, 0, 1, says=2)
    assert "lane 3" in world.last(m.AgentRefused, "a1").reason
    assert world.coordinator.job.slots.lost.keys() == {0} and world.plan.worker_ids == (2,)


def test_what_several_compute_otherwise_is_said_once() -> None:
    world = Told(workers=3, slots=3)
    world.agent(name="a1", host="a1")
    for worker in range(3):
        world.started(worker, 0)
        world.come(worker)
        world.entered(worker, 1, 1)
    differ(world, 1, 2)
    assert world.plan.reason == "workers (1, 2) compute another gradient in lane 3 of step 1"


def test_where_nobody_knows_who_computes_otherwise_the_step_is_done_again_as_a_recovery() -> None:
    world = begun()
    differ(world)
    assert world.plan.generation == 2 and world.plan.worker_ids == (0, 1)
    for worker in (0, 1):
        world.entered(worker, 2, 1)
    world.progress(0, 2, 1)
    done = world.report("recovery_completed")
    assert done["cause"] is Cause.NONDETERMINISTIC and "lane 3 of step 1" in done["reason"] and done["step"] == 1


def test_all_divide_the_optimizers_state_alike_and_the_job_remembers_how() -> None:
    world = begun(hosts=HostRules(alike=Alike(divides={1: "elements"})))
    world.say("w0.0", m.Divided(worker_id=0, incarnation=0, stages={0: "matrices"}))
    assert world.remembered["divides"] == {"0": "matrices", "1": "elements"}
    world.say("w1.0", m.Divided(worker_id=1, incarnation=0, stages={0: "matrices", 1: "elements"}))
    assert not world.coordinator.job.slots.lost
    world.say("w1.0", m.Divided(worker_id=1, incarnation=0, stages={1: "nothing"}))
    reason = world.report("worker_evicted")["reason"]
    assert world.coordinator.job.slots.lost.keys() == {1}
    assert "optimizer of stage 1 can be divided by nothing, this job's by elements" in reason and "zero.stage" in reason


def test_where_too_few_are_left_without_the_odd_one_the_job_ends_and_nothing_begins_anew() -> None:
    world = begun(min_workers=2)
    before = world.plan
    differ(world, 1)
    assert world.over().exit_code == 2 and "another gradient" in world.over().reason
    assert world.plan == before


def test_samples_are_not_named_among_the_code_that_has_changed() -> None:
    before = Code({"sample 0": "1" * 16, "a.py": "2" * 16})
    world = begun(hosts=HostRules(alike=Alike(before=before)))
    world.say("w0.0", m.Imported(worker_id=0, incarnation=0, code=Code({"sample 0": "3" * 16})))
    assert not world.warnings()
    world.say("w0.0", m.Imported(worker_id=0, incarnation=0, code=Code({"a.py": "4" * 16})))
    assert [("a.py" in said, "sample" in said) for said in world.warnings()] == [(True, False)]


def test_a_worker_that_reads_other_samples_is_refused_by_name() -> None:
    world = two_hosts()
    for worker, host in ((0, "a1"), (1, "a1"), (2, "a2")):
        world.come(worker, host=host)
    first, other = Code({"sample 0": "1" * 16, "sample 17": "2" * 16}), Code({"sample 17": "3" * 16})
    world.say("w0.0", m.Imported(worker_id=0, incarnation=0, code=first))
    world.say("w1.0", m.Imported(worker_id=1, incarnation=0, code=first))
    assert world.remembered["code"]["files"].items() >= first.files.items() and not world.warnings()
    world.say("w2.0", m.Imported(worker_id=2, incarnation=0, code=other))
    refused = sent_away(world)
    words = f"sample 17 is {'3' * 16} on host a2, {'2' * 16} in the job"
    assert f"host a2: its data differ from the job's: {words}" in refused.reason
