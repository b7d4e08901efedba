"""Workers that come back name the plan that they follow; who is asked for it, whom the coordinator believes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from coordinator_harness import MS, S, World, drop, member, running

from everstep.base.extents import NONE
from everstep.base.plan import Plan, Shard, WorkerKey
from everstep.protocol import messages as m
from everstep.protocol.coordinator.claims import GIVE_UP_NS
from everstep.protocol.coordinator.types import HostRules, Tick
from everstep.protocol.following import PlanAsked, PlanName, name_of
from everstep.protocol.messages import decode, encode
from everstep.protocol.telling import Listener, parts_of


def behind(**config: Any) -> tuple[World, Plan]:
    """A coordinator that has begun from a journal without the newest plan, which four workers follow."""
    world = running(5, **config)
    journal = list(world.journal)
    world.exited(4)
    assert world.plan is not None and world.plan.generation == 2
    again = world.restart(journal=journal)
    again.agent(0, 1, 2, 3)
    again.clear()
    return again, world.plan


def asked(world: World) -> list[str]:
    return [to for to, message in world.sent if isinstance(message, PlanAsked)]


def test_a_plan_that_the_journal_has_is_only_named() -> None:
    world = running()
    again = world.restart()
    again.agent(0, 1, 2)
    again.clear()
    for i in range(3):
        again.hello(i, plan=world.plan, step=7)
    assert again.sent == [] and again.coordinator.job.agreement.entered == {0, 1, 2}
    assert again.knows == {f"w{i}.0": world.plan for i in range(3)}


def test_a_plan_is_named_with_what_its_seats_hold() -> None:
    plan = running().plan
    assert plan is not None
    other = replace(plan, shards=(Shard(1, 0, NONE),))
    assert name_of(other) != name_of(plan) == name_of(replace(other, shards=()))


def test_the_next_plan_goes_as_what_has_changed_to_those_who_have_named_theirs() -> None:
    world = running(5)
    again = world.restart()
    again.agent(0, 1, 2, 3, 4)
    for i in range(5):
        again.hello(i, plan=world.plan)
    again.exited(3)
    message = again.last(m.PlanNow, "w0.0")
    parts, _ = parts_of(message, again.knows["w0.0"])
    listener = Listener(world.plan)
    heard = [listener.take(decode(encode(part))) for part in parts]
    assert heard == [None, message] and isinstance(parts[0], m.PlanTold) and parts[0].before == 1


def test_one_worker_is_asked_and_all_who_follow_that_plan_go_on() -> None:
    again, newer = behind()
    for i in (2, 0, 1):
        again.hello(i, plan=newer, step=9, shows=False)
    assert asked(again) == ["w2.0"] and again.plan is not None and again.plan.generation == 1
    again.shows(2, plan=newer)
    assert again.plan == newer and again.coordinator.job.agreement.entered == {0, 1, 2}
    assert set(again.knows) == {"w0.0", "w1.0", "w2.0"} and "adopted" in again.report("warning")["reason"]
    again.hello(3, plan=newer, step=9)
    assert asked(again) == ["w2.0"] and again.last(m.PlanNow) is None


def test_the_doubt_of_a_plan_that_the_journal_lacks_lasts_until_somebody_has_settled_in_it() -> None:
    again, newer = behind()
    newer = replace(newer, sound=4, voided=2)
    again.hello(0, plan=newer, step=9, shows=False)
    again.shows(0, plan=newer)
    progress = again.coordinator.job.progress
    assert again.plan == newer and (progress.sound, progress.voided) == (4, 2)


def test_nothing_is_decided_while_somebody_is_asked() -> None:
    again, newer = behind()
    for i in range(4):
        again.hello(i, plan=newer, shows=False)
    again.exited(3)
    assert again.last(m.PlanNow) is None
    again.shows(0, plan=newer)
    plan = again.last(m.PlanNow, "w0.0").plan
    assert plan.generation == 3 and plan.worker_ids == (0, 1, 2)


def test_who_is_gone_is_not_waited_for() -> None:
    again, newer = behind()
    for i in range(3):
        again.hello(i, plan=newer, shows=False)
    drop(again, "w0.0")
    assert asked(again) == ["w0.0", "w1.0"]
    again.exited(1)
    assert asked(again) == ["w0.0", "w1.0", "w2.0"]
    again.shows(2, plan=newer)
    assert again.plan == newer and "worker 1" in again.coordinator.job.agreement.broken[0].reason


def test_who_is_silent_is_waited_for_for_a_second_and_may_answer_late() -> None:
    again, newer = behind()
    again.hello(0, plan=newer, shows=False)
    again.hello(1, plan=newer, shows=False)
    again.wait(900 * MS)
    assert asked(again) == ["w0.0"]
    again.wait(200 * MS)
    assert asked(again) == ["w0.0", "w1.0"]
    again.shows(0, plan=newer)
    assert again.plan == newer
    again.shows(1, plan=newer)
    assert again.plan == newer and again.kinds().count("warning") == 1


def test_it_rings_when_the_second_is_over_or_the_time_for_all_of_it() -> None:
    again, newer = behind()
    claims, env = again.coordinator.job.agreement.claims, again.coordinator.job.env
    again.hello(0, plan=newer, shows=False)
    first_ns = again.now
    for waited_ns, rings_ns in ((0, S), (GIVE_UP_NS - 500 * MS, GIVE_UP_NS)):
        env.advance(first_ns + waited_ns)
        env.alarms.due(first_ns + GIVE_UP_NS)
        claims.ask(WorkerKey(0, 0), "w0.0")
        assert env.alarms.next_ns == first_ns + rings_ns


@pytest.mark.parametrize("how", ["other", "none", "lanes", "seats"])
def test_what_does_not_fit_its_name_is_passed_over(how: str) -> None:
    again, newer = behind()
    foreign = {
        "other": replace(newer, reason="another"),
        "none": None,
        "lanes": replace(newer, lanes=9),
        "seats": replace(newer, seats=newer.seats[1:]),
    }[how]
    named = foreign if how in ("lanes", "seats") else newer
    again.hello(0, plan=named, shows=False)
    again.shows(0, plan=foreign)
    assert "showed is ignored" in again.report("warning")["reason"]
    again.hello(1, plan=newer, shows=False)
    assert asked(again) == ["w0.0", "w1.0"]
    again.shows(1, plan=newer)
    assert again.plan == newer
    again.hello(2, plan=newer)
    again.hello(3, plan=newer)
    if named != newer:  # who follows something else cannot go on with the others
        assert again.last(m.PlanNow, "w0.0").plan.generation == 3


def test_a_plan_that_nobody_shows_is_given_up_and_its_number_never_used() -> None:
    again, newer = behind()
    far = replace(newer, generation=7)
    for i in range(3):
        again.hello(i, plan=far, shows=False)
    again.hello(3, plan=replace(newer, generation=1))
    again.wait(14 * S)
    assert again.last(m.PlanNow, "w0.0") is None
    again.wait(2 * S)
    plan = again.last(m.PlanNow, "w0.0").plan
    assert plan.generation == 8 and set(plan.worker_ids) >= {0, 1, 2}
    assert any("no worker showed it" in r.fields["reason"] for r in again.reports)
    again.clear()
    drop(again, "w0.0")
    again.hello(0, plan=far)
    assert asked(again) == [] and again.last(m.PlanNow, "w0.0").plan == plan


def test_a_plan_that_they_have_switched_to_meanwhile_is_taken_as_well() -> None:
    again, newer = behind()
    later = replace(newer, generation=3, prepared=True)
    again.hello(0, plan=newer, shows=False)
    again.hello(1, plan=newer, shows=False)
    again.shows(0, plan=later)
    assert again.plan == later
    assert again.last(m.PlanNow, "w1.0").plan == later


def test_a_worker_has_not_settled_in_the_plan_to_which_it_has_switched_since_it_said_so() -> None:
    again, newer = behind()
    later = replace(newer, generation=3, sound=12)
    again.hello(0, plan=newer, shows=False, settled=True)
    again.shows(0, plan=later)
    assert again.plan == later and again.coordinator.job.progress.sound == 12


def of_term(plan: Plan | None, term: int, generation: int) -> Plan:
    assert plan is not None
    return replace(plan, term=term, generation=generation)


def test_a_plan_of_a_deposed_coordinator_never_wins() -> None:
    world = running(3, hosts=HostRules(term=2))
    again = world.restart()
    again.config = replace(again.config, hosts=HostRules(term=3))
    again = again.restart(journal=world.journal)
    again.agent(0, 1, 2)
    again.clear()
    again.hello(0, plan=of_term(world.plan, 1, 5))
    again.hello(1, plan=world.plan)
    assert asked(again) == []
    again.hello(2, plan=world.plan)
    plan = again.last(m.PlanNow, "w0.0").plan
    assert (plan.term, plan.generation, plan.worker_ids) == (3, 6, (0, 1, 2))


def test_a_deposed_coordinator_asks_for_no_plan_of_the_next_one() -> None:
    world = running(3, hosts=HostRules(term=2))
    later = of_term(world.plan, 3, 2)
    drop(world, "w1.0")
    world.hello(1, plan=later)
    assert asked(world) == [] and world.plan is not None and world.plan.generation == 1
    assert world.coordinator.job.agreement.generation == 1 and not world.coordinator.job.agreement.broken


def test_of_two_plans_the_newer_term_counts() -> None:
    world = running(3, hosts=HostRules(term=5))
    again = world.restart(journal=[])
    again.agent(0, 1, 2)
    again.hello(0, plan=of_term(world.plan, 2, 9), shows=False)
    again.hello(1, plan=of_term(world.plan, 4, 8), shows=False)
    assert asked(again) == ["w0.0", "w1.0"]
    again.shows(0, plan=of_term(world.plan, 2, 9))
    assert again.plan is None
    again.shows(1, plan=of_term(world.plan, 4, 8))
    again.hello(2, plan=of_term(world.plan, 4, 8))
    plan = again.last(m.PlanNow, "w0.0").plan
    assert plan.generation == 10 and plan.previous == 8


def test_two_plans_of_one_generation_do_not_go_on_together() -> None:
    world = running()
    again = world.restart()
    again.agent(0, 1, 2)
    for i in range(2):
        again.hello(i, plan=world.plan)
    again.hello(2, plan=of_term(replace(world.plan, reason="another"), 0, 1))
    plan = again.last(m.PlanNow, "w2.0").plan
    assert plan.generation == 2 and plan.worker_ids == (0, 1, 2)


def test_members_have_their_time_to_come_back_as_long_as_others_do() -> None:
    world = running(8, elsewhere=(7,))
    again = world.restart()
    again.agent(*range(7))
    for i in range(7):
        again.hello(i, plan=world.plan)
        again.wait(1500 * MS)
    assert again.plan == world.plan and "worker_evicted" not in again.kinds()
    again.wait(600 * MS)
    assert again.plan is not None and again.plan.worker_ids == tuple(range(7))


def test_names_are_alike_wherever_a_plan_has_come_by() -> None:
    plan = running().plan
    assert plan is not None
    plan = replace(plan, speeds=((0, 5), (1, 0.25)))
    name = name_of(plan)
    shown = decode(encode(m.PlanTold(plan=plan)))
    assert isinstance(shown, m.PlanTold) and name_of(shown.plan) == name
    assert isinstance(name, PlanName) and name_of(replace(plan, sound=3)) != name
    assert name_of(replace(plan, voided=3)) != name
    assert len(encode(m.WorkerHello(member=plan.members[0], step=3, follows=name))) < 300


def test_who_has_stayed_behind_hears_of_the_plan_that_was_shown() -> None:
    again, newer = behind()
    again.hello(0, plan=running(5).plan)
    again.hello(1, plan=newer)
    assert again.last(m.PlanNow, "w0.0").plan == newer and again.last(m.PlanNow, "w1.0") is None


def test_who_heals_by_an_older_plan_than_the_one_that_is_shown_begins_again() -> None:
    world = running(3)
    world.exited(2)
    for i in range(2):
        world.entered(i, 2, 1)
    world.agent(0, 1, 5)
    world.hello(5)
    old = world.last(m.Heal, "w5.0")
    newer = replace(old.plan, generation=3)
    drop(world, "w0.0")
    world.hello(0, plan=newer)
    assert world.plan == newer
    world.healed(5, ticket=old.ticket)
    world.hello(1, plan=newer)
    world.wait(world.config.hosts.grace_ns)
    heal = world.last(m.Heal, "w5.0")
    assert world.prepared is None and heal.ticket > old.ticket and heal.plan == newer


def test_a_prepared_plan_that_the_journal_lacks_does_not_count_nor_does_its_number() -> None:
    world = running()
    again = world.restart()
    again.agent(0, 1, 2)
    for i in range(3):
        again.connect(f"w{i}.0", "worker")
        hello = m.WorkerHello(member=member(i), step=3, follows=name_of(world.plan), prepared=2)
        again.say(f"w{i}.0", hello)
    plan = again.last(m.PlanNow, "w0.0").plan
    assert plan.generation == 3 and plan.previous == 1


def test_the_coordinators_own_absence_is_no_time_in_which_nobody_showed_a_plan() -> None:
    again, newer = behind()
    again.hello(0, plan=newer, shows=False)
    again.wait(500 * MS)
    again.now += 20 * S
    again.handle(Tick())
    assert "warning" not in again.kinds(), "it is not given up"
    again.hello(1, plan=newer, shows=False)
    assert asked(again) == ["w0.0"], "who was asked still has its second"
    again.shows(0, plan=newer)
    assert again.plan == newer


def test_members_of_a_plan_that_was_shown_have_all_of_their_time_from_then_on() -> None:
    world = running(5)
    journal = list(world.journal)
    world.exited(4)
    again, newer, grace_ns = world.restart(journal=journal), world.plan, world.config.hosts.grace_ns
    again.hello(0, plan=newer, shows=False)
    again.wait(900 * MS)
    again.shows(0, plan=newer)
    assert again.plan == newer
    again.wait(grace_ns - 100 * MS)
    assert "worker_evicted" not in again.kinds()
    again.wait(200 * MS)
    assert "worker_evicted" in again.kinds()


def test_what_a_worker_says_while_its_plan_is_asked_for_counts_once_that_is_known() -> None:
    """It says that once: that the last step is done, say, and nobody would ever hear of it."""
    again, newer = behind()
    again.hello(0, plan=newer, step=9, shows=False)
    again.say("w0.0", m.WorkerDone(worker_id=0, incarnation=0, generation=2, step=9, final_written=True))
    assert again.coordinator.job.progress.ended is None
    again.shows(0, plan=newer)
    ended = again.last(m.JobEnded, "w0.0")
    assert ended is not None and ended.state == "completed"


def test_what_was_said_meanwhile_is_taken_as_if_it_came_now_where_nobody_shows_the_plan() -> None:
    again, newer = behind()
    again.hello(0, plan=newer, step=9, shows=False)
    again.say("w0.0", m.WorkerDone(worker_id=0, incarnation=0, generation=2, step=9, final_written=True))
    again.wait(GIVE_UP_NS + S)
    ended = again.last(m.JobEnded, "w0.0")
    assert ended is not None and ended.state == "completed", "it was a member in the plan that the journal has, too"


def test_a_plan_that_nobody_has_asked_for_orders_nothing() -> None:
    world = running(3)
    world.shows(1, plan=world.plan)
    assert not world.sent and not world.reports
