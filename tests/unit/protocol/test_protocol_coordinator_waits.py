"""What the coordinator waits for before it makes a plan, and what it takes for the end of a wait."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from coordinator_harness import MS, S, World, drop, running

from everstep.base.cause import Cause, Why
from everstep.base.plan import Member, Plan, Seat, WorkerKey
from everstep.base.pool_wish import PoolWish
from everstep.protocol import messages as m
from everstep.protocol.coordinator import restoring
from everstep.protocol.coordinator.arrivals import START_PATIENCE_NS
from everstep.protocol.coordinator.environment import Environment
from everstep.protocol.coordinator.joins import Move, _moves
from everstep.protocol.coordinator.links import APART_NS, Links
from everstep.protocol.coordinator.sharing import share
from everstep.protocol.coordinator.types import HostRules, PortProbed
from everstep.protocol.following import PlanAsked

# ---- the start


def arrive(world: World, name: str) -> None:
    world.agent(name=name, host=name, slots=0)


def test_hosts_that_were_there_and_are_missing_again_are_waited_for_anew() -> None:
    """The alarm of the first wait rings early, and is set again."""
    world = World(workers=2, slots=2, hosts=HostRules(least=2, wait_ns=50 * S))
    arrive(world, "a1")
    world.wait(30 * S)
    arrive(world, "a2")
    world.wait(S)
    drop(world, "a2")
    world.wait(49 * S)
    assert world.coordinator.job.progress.ended is None
    world.wait(2 * S)
    ended = world.coordinator.job.progress.ended
    assert ended is not None and ended.exit_code == 3


def test_a_wait_for_one_host_names_it_alone_and_says_if_none_is_there() -> None:
    world = World(workers=2, slots=2, hosts=HostRules(named={0: "a2", 1: "a1"}))
    arrive(world, "a1")
    text = world.report("waiting")["reason"]
    assert "worker 0 is to run on host 'a2'" in text and text.endswith("has not joined: the hosts are a1")
    alone = World(workers=2, slots=2, hosts=HostRules(named={0: "a2", 1: "a1"}))
    alone.wait(MS)
    assert alone.report("waiting")["reason"].endswith("and 1 more workers wait for theirs: the hosts are none")


def test_a_spare_begins_at_once_in_place_of_a_slot_that_is_lost() -> None:
    world = World(workers=2)
    world.agent(0, 2, slots=3)
    world.say("a1", m.SlotLost(agent_id="a1", worker_id=1, reason="it dies at once", cause=Cause.EXITED))
    world.hello(0)
    assert world.plan is None
    world.hello(2)
    assert world.plan is not None and world.plan.worker_ids == (0, 2)


# ---- after losses


def test_with_on_failure_wait_as_many_are_waited_for_as_there_were() -> None:
    """Not for those that never came."""
    world = World(workers=3, on_failure="wait")
    world.agent(0, 1, slots=3)
    world.hello(0)
    world.hello(1)
    world.wait(START_PATIENCE_NS)
    assert world.plan is not None and world.plan.worker_ids == (0, 1)
    for i in range(2):
        world.entered(i, 1, 1)
    world.exited(1)
    assert world.plan.generation == 1
    world.hello(1, 1)
    assert (world.plan.generation, world.plan.worker_ids) == (2, (0, 1))


def all_lost(workers: int = 2, **config: Any) -> World:
    world = running(workers, **config)
    world.progress(0, 1, 4)
    for i in range(workers):
        world.exited(i)
    return world


def test_where_all_are_lost_patience_begins_with_the_first_who_is_back() -> None:
    world = all_lost()
    said = world.report("waiting")
    assert (said["step"], said["generation"]) == (4, 2)
    world.wait(START_PATIENCE_NS // 2)
    world.hello(0, 1)
    world.wait(START_PATIENCE_NS - S)
    assert world.plan is not None and world.plan.generation == 2
    world.wait(S)
    assert (world.plan.generation, world.plan.worker_ids) == (3, (0,))


def test_who_is_near_to_the_living_of_a_short_pool_comes_last() -> None:
    """It would die with them."""
    world = World(workers=4, stages=2, wish=PoolWish(homes=((0, 1), (2, 3))))
    for i in range(4):
        world.agent(i, name=f"a{i}", host=f"a{i}")
    world.agent(4, name="a4", host="a3")
    world.agent(5, name="a5", host="a5")
    for i in range(4):
        world.hello(i, host=f"a{i}")
    for i in range(4):
        world.entered(i, 1, 1)
    world.hello(4, host="a3")
    world.hello(5, host="a5")
    world.exited(1, agent="a1")
    for i in (0, 2, 3):
        world.entered(i, 2, 1)
    plan = world.plan
    assert plan is not None and [seat.worker_id for seat in plan.pool(1)] == [3]
    assert [to for to, message in world.sent if isinstance(message, m.Heal)] == ["w5.0"]


# ---- a restarted coordinator


def test_a_job_that_is_to_end_ends_by_the_next_plan_though_one_was_adopted_meanwhile() -> None:
    world = running(4, save_ns=30 * S)
    journal = list(world.journal)
    world.exited(3)
    newer = world.plan
    again = world.restart(journal=journal)
    again.agent(0, 1, 2)
    for i in range(3):
        again.hello(i, plan=newer, shows=False)
    again.command("stop", grace_s=10.0)
    again.shows(0, plan=newer)
    assert again.plan is not None and newer is not None
    assert again.plan.generation > newer.generation and again.plan.save == "stopped by request"


def test_of_those_who_claim_a_plan_one_that_has_died_is_passed_over() -> None:
    world = running(5)
    journal = list(world.journal)
    world.exited(4)
    again = world.restart(journal=journal)
    again.agent(0, 1, 2, 3)
    for i in (0, 1, 2):
        again.hello(i, plan=world.plan, shows=False)
    again.exited(1)
    drop(again, "w0.0")
    assert [to for to, message in again.sent if isinstance(message, PlanAsked)] == ["w0.0", "w2.0"]


@pytest.mark.parametrize(("count", "more"), [(3, ""), (4, "; and 1 more"), (6, "; and 3 more")])
def test_of_many_entries_that_make_no_sense_three_are_told(count: int, more: str) -> None:
    before = running(3)
    again = before.restart([*before.journal, *[{"kind": "plan"}] * count])
    again.agent(0)
    text = again.report("warning")["reason"].partition("set aside: ")[2]
    assert text.count("entry ") == 3 and text.removesuffix("; the workers have the missing part").endswith(more)
    assert ("more" in text) == bool(more)


def test_a_journal_of_which_nothing_makes_sense_was_one_all_the_same() -> None:
    """Its workers may come back."""
    world = World(journal=[{"kind": "plan"}])
    world.agent(0)
    assert world.coordinator.job.membership.in_grace
    fresh = World()
    fresh.agent(0)
    assert not fresh.coordinator.job.membership.in_grace


def test_a_journal_says_how_the_job_ended() -> None:
    ended = {"kind": "ended", "state": "failed", "cause": "quorum", "reason": "nobody came", "exit_code": 3}
    entries: list[dict[str, Any]] = [{"kind": "lanes", "lanes": 8}, {"kind": "unknown"}, ended]
    assert restoring.end_in(entries[:2]) is None
    said = restoring.end_in(entries)
    assert said is not None and (said.state, said.reason, said.exit_code) == ("failed", "nobody came", 3)


# ---- doors and links


def test_what_a_kernel_said_before_a_worker_was_back_counts_no_more() -> None:
    world = running(4, elsewhere=(2, 3), quorum_wait_ns=60 * S)
    world.wait(20 * S)

    def lose() -> None:
        for name in ("w2.0", "a2", "w3.0"):
            drop(world, name)
        world.wait(MS)

    lose()
    world.handle(PortProbed(WorkerKey(2, 0), False))
    world.agent(2, 3, name="a2", host="a2")
    for i in (2, 3):
        world.hello(i, plan=world.plan)
    world.wait(S)
    lose()
    world.handle(PortProbed(WorkerKey(3, 0), False))
    assert world.plan is not None and world.plan.generation == 1
    world.handle(PortProbed(WorkerKey(2, 0), False))
    assert world.plan.generation == 2


class Linked:
    """Links between workers of three hosts, of which those of two are members."""

    def __init__(self) -> None:
        self.env = Environment(World().config)
        self.env.advance(S)
        self.broken: list[Why] = []
        self.there = [self.worker(i, f"a{i // 2}") for i in range(4)]
        members = tuple(Member(i, 0, f"a{i // 2}") for i in range(4))
        plan = Plan(1, "", members, tuple(Seat(i, 0, "active", ()) for i in range(4)), 4)
        self.agreement: Any = SimpleNamespace(
            plan=plan, broken=[], entered=set(), survivors=lambda: self.there, break_off=self.broken.append
        )
        alive = {w.key: w for w in self.there}
        membership: Any = SimpleNamespace(alive=alive.get, workers={w.key.worker_id: w for w in self.there})
        recovery: Any = SimpleNamespace(begin=lambda why: None)
        self.links = Links(self.env, membership, self.agreement, recovery)

    @staticmethod
    def worker(worker_id: int, host: str) -> Any:
        return SimpleNamespace(key=WorkerKey(worker_id, 0), host=host, connection=f"w{worker_id}")

    def accuse(self, accuser: int, *accused: int) -> None:
        message = m.PeerFault(
            worker_id=accuser, incarnation=0, generation=1, accused=list(accused), reason="reset", cause=Cause.LINK
        )
        self.links.peer_fault(self.there[accuser], message)


def test_only_hosts_that_did_not_reach_a_members_host_are_kept_out_for_a_while() -> None:
    found = Linked()
    for _ in range(2):
        found.accuse(0, 2)
        found.accuse(1, 3)
        leaving = found.links.close_window()
    assert [worker.key.worker_id for worker, _ in leaving] == [2, 3]
    assert found.links.kept_out("a1") and not found.links.kept_out("a2")
    assert found.env.alarms.next_ns is not None
    found.there = found.there[2:]
    assert not found.links.kept_out("a1") and found.links.kept_out("a0"), "it reaches itself"
    found.env.advance(S + APART_NS)
    assert not found.links.kept_out("a0")


def test_accusations_count_between_members_alone() -> None:
    found = Linked()
    found.accuse(0, 9)
    assert found.links.close_window() == [] and not found.broken
    found.accuse(3, 0)
    plan = found.agreement.plan
    found.agreement.plan = Plan(1, "", plan.members[:3], plan.seats[:3], 4)
    assert found.links.close_window() == [] and not found.broken
    found.accuse(0, 1)
    assert found.links.close_window() == [] and "(0 to 1)" in found.broken[0].reason
    found.accuse(2)
    found.links.close_window()
    assert "(2)" in found.broken[1].reason, "who accuses nobody is at fault itself"


# ---- slots


def test_slots_go_from_domain_to_domain_as_each_gets_one() -> None:
    where = {"a1": (("rack", "r1"),), "a2": (("rack", "r1"),), "a3": (("rack", "r2"),)}
    rooms = dict.fromkeys(where, 2.0)
    got = share(range(6), {}, list(where), rooms, {}, where)
    assert [got[i] for i in range(6)] == ["a1", "a3", "a2", "a3", "a1", "a2"]
    assert share(range(2), {0: "a1"}, list(where), rooms, {}, where) == {1: "a3"}
    assert share([0, 1], {}, list(where), rooms, {1: ["a2"]}, where)[1] == "a2"
    assert share(range(9), {}, list(where), rooms, {}, where).keys() == set(range(6)), "the others find no room"


def test_a_worker_that_has_left_is_something_to_decide_about() -> None:
    job = running().coordinator.job
    before = job.version
    job.slots.empty(1)
    assert job.version != before


def test_a_host_that_may_not_leave_hears_so_once_and_may_ask_again() -> None:
    world = World(workers=2, slots=2, min_workers=2)
    arrive(world, "a1")
    for i in (0, 1):
        world.started(i, 0, agent="a1")
        world.hello(i, host="a1")
    for times in (1, 2):
        world.say("a1", m.HostLeaving(agent_id="a1"))
        world.entered(times - 1, 1, 1)
        world.wait(S)
        assert len(world.messages(m.HostKept, "a1")) == times


def test_pools_that_lack_nobody_get_nobody() -> None:
    seats = tuple(Seat(i, i // 2, "active", ()) for i in range(4))
    plan = Plan(1, "", tuple(Member(i, 0, "h") for i in range(4)), seats, 4, stages=2)

    def moves(*homes: tuple[int, ...], expected: int = 4) -> list[Move]:
        config = SimpleNamespace(wish=PoolWish(homes=homes))
        job: Any = SimpleNamespace(slots=SimpleNamespace(expected=lambda: expected), env=SimpleNamespace(config=config))
        return _moves(job, plan)

    assert moves((0, 1), (2, 3)) == []
    assert moves((0, 1, 4), (2, 3)) == [Move(3, 1, 0)]
    assert moves((0, 1, 4), (2, 3), expected=5) == [], "another worker is yet to come"


def test_a_lane_that_nobody_computes_twice_alike_ends_the_job_as_failed() -> None:
    world = running(2)
    again = {"cause": Cause.NONDETERMINISTIC, "reason": "lane 3 differs", "tainted": 5, "decided_in": 1, "sound": 4}
    message = m.SettleAgain(worker_id=0, incarnation=0, generation=1, lane=3, workers=[0, 1], ends=True, **again)
    world.say("w0.0", message)
    ended = world.coordinator.job.progress.ended
    assert ended is not None and (ended.state, ended.exit_code) == ("failed", 1)
    assert ended.reason.endswith("the newest checkpoint up to step 4 counts")


def test_a_job_that_has_lost_all_state_waits_for_as_many_as_it_had_though_more_are_wanted() -> None:
    """The hosts may have no room for the others, and these never come."""
    world = running(3, on_failure="wait")
    assert world.command("scale", workers=5).ok
    for i in range(3):
        world.exited(i)
    for i in range(3):
        assert world.plan is not None and world.plan.generation == 1
        world.started(i, 1)
        world.hello(i, 1)
    assert world.plan.generation == 2 and world.plan.worker_ids == (0, 1, 2)
