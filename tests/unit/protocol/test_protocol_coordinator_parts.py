"""Parts of the coordinator by themselves: what each keeps, forgets, tells once, and for how long."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from coordinator_harness import CONFIG, MS, S, member

from everstep.base.cause import Cause, Why
from everstep.base.plan import Plan, Seat, WorkerKey
from everstep.base.strikes import Strike
from everstep.cost.advice import step_ms
from everstep.protocol import messages as m
from everstep.protocol.coordinator.arrivals import RETRY_MOST_NS, RETRY_NS, START_PATIENCE_NS, Healing, Quorum
from everstep.protocol.coordinator.asked_checkpoints import Ending, Saving
from everstep.protocol.coordinator.claims import ASK_AGAIN_NS, GIVE_UP_NS, MOST_SAID, Claims
from everstep.protocol.coordinator.closed import ClosedDoors
from everstep.protocol.coordinator.environment import Alarm, Environment
from everstep.protocol.coordinator.joins import Move, _in_other_pool
from everstep.protocol.coordinator.links import Links, Probes
from everstep.protocol.coordinator.loops_left import Leaving
from everstep.protocol.coordinator.membership import GRACE_MOST, Agent, Grace, Worker
from everstep.protocol.coordinator.rendezvous_store import RendezvousStore
from everstep.protocol.coordinator.requested_faults import MOST_ASKED, EarlierTargets
from everstep.protocol.coordinator.sharing import share
from everstep.protocol.coordinator.spare_advice import SpareAdvice
from everstep.protocol.coordinator.speeds import Speeds, by_speed
from everstep.protocol.coordinator.types import HostRules, Report, Send
from everstep.protocol.coordinator.whereabouts import Whereabouts
from everstep.protocol.detector import PhiDetector
from everstep.protocol.following import PlanName, PlanShown
from everstep.protocol.roles import WORKER

KEY, OTHER = WorkerKey(1, 0), WorkerKey(2, 0)


def environment(now: int = S, **config: Any) -> Environment:
    env = Environment(replace(CONFIG, **config))
    env.advance(now)
    return env


def rings(env: Environment, due: Alarm, about: str | int = 0) -> int | None:
    """When this alarm is set for."""
    return env.alarms._at.get((due, about))


def told(env: Environment, kind: type = Report) -> list[Any]:
    return [effect for effect in env.take_effects() if isinstance(effect, kind)]


def test_no_number_is_given_out_twice_also_by_a_later_life() -> None:
    env = environment()
    assert [env.number() for _ in range(3)] == [S, S + 1, S + 2]
    env.advance(2 * S)
    assert env.number() == 2 * S


# ---- workers that are waited for


def test_patience_with_late_workers_begins_with_the_first_and_anew_when_all_state_is_lost() -> None:
    env = environment()
    quorum = Quorum(env)
    quorum.give_time()
    assert not quorum.anybody and not quorum.patient and rings(env, Alarm.START) is None
    quorum.came()
    env.advance(2 * S)
    quorum.came()  # not the first
    quorum.give_time()
    assert rings(env, Alarm.START) == S + START_PATIENCE_NS and quorum.patient
    quorum.start_over()
    assert quorum.starting_over and not quorum.anybody
    env.advance(3 * S)
    quorum.came()
    quorum.start_over()  # it has, already
    assert quorum.anybody and quorum.patient
    env.advance(3 * S + START_PATIENCE_NS)
    assert not quorum.patient and quorum.anybody
    quorum.met()
    assert not quorum.anybody and not quorum.starting_over and quorum.waiting is None


def test_a_wait_is_told_once_and_is_over_after_its_time_from_its_beginning() -> None:
    env = environment(quorum_wait_ns=10 * S)
    quorum, why = Quorum(env), Why(Cause.QUORUM, "too few")
    assert not quorum.over()
    quorum.wait_for(why, 4, 7)
    env.advance(5 * S)
    quorum.wait_for(why, 5, 7)
    quorum.wait_for(Why(Cause.QUORUM, "fewer"), 5, 7)
    said = [(one.kind, one.fields) for one in told(env)]
    assert [(kind, f["reason"], f["step"], f["generation"]) for kind, f in said] == [
        ("waiting", "too few", 4, 7),
        ("waiting", "fewer", 5, 7),
    ]
    assert rings(env, Alarm.QUORUM) == 11 * S
    env.advance(11 * S - 1)
    env.alarms.due(env.now + 1)
    assert not quorum.over() and rings(env, Alarm.QUORUM) == 11 * S, "it may ring early, and rings again"
    env.advance(11 * S)
    assert quorum.over()


def test_hosts_are_waited_for_from_the_first_that_was_missing_and_then_workers() -> None:
    env = environment(hosts=HostRules(wait_ns=5 * S), quorum_wait_ns=10 * S)
    quorum, why = Quorum(env), Why(Cause.QUORUM, "one is missing")
    assert not quorum.lacks_hosts and quorum.wait_for_hosts(why) == 6 * S
    env.advance(3 * S)
    assert quorum.wait_for_hosts(why) == 6 * S and quorum.lacks_hosts and len(told(env)) == 1
    quorum.hosts_came()
    assert not quorum.lacks_hosts and quorum.waiting is None
    env.advance(13 * S - 1)
    assert not quorum.over()
    env.advance(13 * S)
    assert quorum.over()
    assert quorum.wait_for_hosts(why) == 18 * S and len(told(env)) == 1


# ---- workers on the way in


def test_attempts_to_heal_come_later_each_time_until_that_life_is_over() -> None:
    env = environment()
    healing = Healing(env)
    delays: list[int] = []
    for failures in range(1, 9):
        assert healing.fail(healing.attempt(KEY, (0,))) == failures
        delays.append((healing.joins[1].retry_ns or 0) - env.now)
    assert delays == [0, *(min(RETRY_NS << n, RETRY_MOST_NS) for n in range(7))]
    healing.forget(KEY)
    assert not healing.joins and healing.fail(healing.attempt(KEY, (0,))) == 1


def test_a_ticket_is_of_one_life_and_never_given_twice() -> None:
    healing = Healing(environment())
    for number in (5, 3):
        healing.replay_ticket(number)
    join = healing.attempt(KEY, (0, 2))
    assert (join.ticket, join.stages, join.copying) == (6, (0, 2), True)
    assert healing.of(KEY, 6) == healing.of(KEY) == join
    assert healing.of(KEY, 5) is None and healing.of(WorkerKey(1, 1)) is None and healing.of(OTHER) is None
    assert healing.healed(KEY) is None
    healing.succeed(join)
    assert healing.healed(KEY) is not None and not healing.joins[1].copying
    healing.attempt(OTHER, (0,))
    healing.keep({2})
    assert list(healing.joins) == [2]
    healing.stop(2)
    healing.stop(2)
    assert not healing.joins


def test_who_was_left_behind_holds_its_stages_until_it_begins_anew() -> None:
    healing = Healing(environment())
    healing.leave_behind({KEY: {0}, OTHER: {1}})
    healing.holds(WorkerKey(3, 0), (0, 2))
    assert healing.left_behind(WorkerKey(3, 0)) == {0, 2} and healing.left_behind(WorkerKey(4, 0)) == set()
    healing.attempt(KEY, (0,))
    healing.forget(OTHER)
    assert not healing.left_behind(KEY) and not healing.left_behind(OTHER)
    healing.leave_behind({})
    assert not healing.left_behind(WorkerKey(3, 0))


# ---- doors, keys, faults


def test_a_door_is_closed_as_long_as_the_kernel_says_so() -> None:
    doors = ClosedDoors()
    assert not doors.has(KEY)
    assert doors.answer(KEY, False) and doors.has(KEY) and not doors.has(OTHER)
    for listens in (True, None):
        doors.answer(KEY, False)
        assert not doors.answer(KEY, listens) and not doors.has(KEY)
    doors.answer(KEY, False)
    doors.answer(OTHER, False)
    doors.only([OTHER])
    assert not doors.has(KEY) and doors.has(OTHER)


def test_a_store_answers_when_all_keys_are_there_or_the_generation_is_over() -> None:
    env = environment()
    store = RendezvousStore(env)
    for name in ("w1", "w2"):
        env.connected(name, WORKER, None)
    both = m.StoreGet(generation=3, keys=["a", "b"], request=7)
    store.get("w1", both)
    store.get("w2", both)
    store.set(m.StoreSet(generation=3, key="a", value=b"1"))
    store.set(m.StoreSet(generation=4, key="b", value=b"3"))
    assert not told(env, Send)
    store.forget("w1")
    store.set(m.StoreSet(generation=3, key="b", value=b"2"))
    assert told(env, Send) == [Send("w2", m.StoreValues(request=7, values=[b"1", b"2"]))]
    store.get("w1", both)
    assert told(env, Send) == [Send("w1", m.StoreValues(request=7, values=[b"1", b"2"]))]
    later = m.StoreGet(generation=4, keys=["z"], request=8)
    store.get("w2", later)
    store.advance(4)
    assert not told(env, Send)
    store.get("w1", both)
    assert told(env, Send) == [Send("w1", m.StoreValues(request=7, values=None))]
    store.set(m.StoreSet(generation=3, key="a", value=b"1"))
    store.advance(3)  # it does not go back
    store.advance(5)
    assert told(env, Send) == [Send("w2", m.StoreValues(request=8, values=None))]


def strike(index: int) -> Strike:
    return Strike("kill host a1", "kill", "a1", index=index)


def test_a_fault_strikes_once_and_of_many_that_were_asked_for_the_newest_are_known() -> None:
    scripted = strike(1)
    targets = EarlierTargets(environment(hosts=HostRules(strikes=(scripted,))))
    assert targets.first(1) and not targets.first(1) and targets.first(2)
    targets.replay(5)
    assert not targets.first(5)
    for n in range(MOST_ASKED):
        targets.ask(strike(10 + n))
    assert targets.find(10) is not None
    targets.ask(strike(9))
    assert targets.find(10) is None and targets.find(11) is not None and targets.find(9) is not None
    assert targets.find(1) == scripted and targets.find(3) is None


# ---- plans that are claimed


def claim(claims: Claims, worker_id: int, name: PlanName) -> None:
    hello = m.WorkerHello(member=member(worker_id), step=0, follows=name)
    claims.claim(f"w{worker_id}", name, hello)


def test_who_claims_the_newest_plan_is_asked_in_turn() -> None:
    env = environment()
    claims = Claims(env)
    old, new = PlanName(term=0, generation=4, digest="a"), PlanName(term=0, generation=5, digest="b")
    claim(claims, 3, old)
    claim(claims, 2, new)
    claim(claims, 4, old)
    claim(claims, 1, new)
    assert claims.wanted == new and claims.next() == (WorkerKey(2, 0), "w2")
    claims.ask(WorkerKey(2, 0), "w2")
    assert claims.waits_for(WorkerKey(2, 0), "w2") and claims.asked == WorkerKey(2, 0)
    assert not claims.waits_for(WorkerKey(2, 0), "w9") and not claims.waits_for(WorkerKey(1, 0), "w2")
    assert rings(env, Alarm.ASKED) == env.now + ASK_AGAIN_NS
    env.advance(env.now + ASK_AGAIN_NS)
    assert not claims.waits_for(WorkerKey(2, 0), "w2")
    claims.refused(WorkerKey(1, 0))
    assert claims.asked == WorkerKey(2, 0)
    claims.refused(WorkerKey(2, 0))
    assert claims.asked is None and claims.next() == (WorkerKey(1, 0), "w1") and claims.next() is None
    env.advance(S + GIVE_UP_NS - 1)
    assert not claims.over
    env.advance(S + GIVE_UP_NS)
    assert claims.over
    assert [hello.member.worker_id for hello in claims.close(found=False)] == [1, 2, 3, 4]
    assert claims.wanted is None and claims.by(WorkerKey(1, 0)) is None


@pytest.mark.parametrize("found", [False, True])
def test_a_plan_that_nobody_showed_is_not_asked_for_again(found: bool) -> None:
    claims = Claims(environment())
    name = PlanName(term=0, generation=5, digest="b")
    claim(claims, 1, name)
    claims.close(found=found)
    assert claims.opens(name, (0, 4)) == found and claims.opens(PlanName(term=0, generation=6, digest="c"), (0, 4))
    assert not claims.opens(name, (0, 5))


@pytest.mark.parametrize(("term", "beyond"), [(0, False), (4, True), (5, False), (6, False)])
def test_a_plan_of_a_later_lease_is_not_ours_to_ask_for(term: int, beyond: bool) -> None:
    claims, name = Claims(environment(hosts=HostRules(term=term))), PlanName(term=5, generation=5, digest="b")
    assert claims.beyond(name) == beyond and claims.opens(name, (0, 0)) != beyond


def test_what_is_said_meanwhile_is_kept_up_to_a_limit_and_taken_out_once() -> None:
    claims = Claims(environment())
    claim(claims, 1, PlanName(term=0, generation=5, digest="b"))
    message = m.WorkerDone(worker_id=1, incarnation=0, generation=5, step=4, final_written=False)
    assert not claims.defers(OTHER, "w2", message)
    assert not claims.defers(KEY, "w1", PlanShown(worker_id=1, incarnation=0, plan=None))
    for _ in range(MOST_SAID + 1):
        assert claims.defers(KEY, "w1", message)
    assert claims.take_said() == []
    claims.close(found=True)
    assert claims.take_said() == [("w1", message)] * MOST_SAID and claims.take_said() == []


# ---- speeds


def speeds(env: Environment, *living: WorkerKey) -> Speeds:
    membership: Any = SimpleNamespace(alive=lambda key: key if key in living else None, workers={})
    return Speeds(env, membership, SimpleNamespace(domains=lambda worker: ()))  # type: ignore[arg-type]


def pair(lanes: tuple[int, ...] = (2, 3)) -> Plan:
    seats = (Seat(1, 0, "active", (0, 1)), Seat(2, 0, "active" if lanes else "standby", lanes))
    return Plan(1, "", (member(1), member(2)), seats, 4)


def test_speeds_are_looked_at_from_the_first_that_is_known() -> None:
    env = environment(lasting_ns=2 * S)
    found = speeds(env, KEY)
    found.say(KEY, 0.0)
    assert not found.watching and rings(env, Alarm.SPEEDS) is None
    found.say(KEY, 0.5)
    assert found.watching and rings(env, Alarm.SPEEDS) == env.now + env.config.look_ns
    env.alarms.due(1 << 60)
    found.say(KEY, 5.0)
    assert rings(env, Alarm.SPEEDS) is None


@pytest.mark.parametrize(("lasting_s", "look_ms"), [(30, 5000), (2, 1010), (0, 10), (9.98, 5000), (9.978, 4999)])
def test_speeds_are_looked_at_often_enough_to_see_a_gain_last(lasting_s: float, look_ms: int) -> None:
    assert replace(CONFIG, lasting_ns=int(lasting_s * S)).look_ns == look_ms * MS


def test_speeds_of_the_living_are_medians_of_the_last_looks() -> None:
    env = environment()
    found = speeds(env, KEY, OTHER)
    assert found.measured(pair()) is None
    found.say(KEY, 10.0)
    assert found.measured(pair()) is None, "one with lanes is not known"
    assert found.measured(pair(())) == {1: 10.0, 2: 10.0}, "one without lanes counts as the others"
    found.say(OTHER, 4.0)
    for ms in (90.0, 10.0, 10.0, 10.0):
        found.say(KEY, ms)
        assert found.measured(pair()) == {1: 10.0, 2: 4.0}
    for _ in range(4):
        found.say(KEY, 50.0)
        now = found.measured(pair())
    assert now == {1: 50.0, 2: 4.0}
    found.change({1: 2.0}, KEY)
    assert found.in_force == {1: 2.0} and found.of([2, 1]) == ((1, 2.0),)
    found.say(KEY, 7.0)
    assert found.measured(pair()) == {1: 7.0, 2: 4.0}, "in another stage a lane takes another time"
    found.forget(1)
    assert not found.in_force


def test_members_without_lanes_are_idle_only_if_there_are_lanes_for_them() -> None:
    found = speeds(environment(lanes=4), KEY, OTHER)
    for plan in (pair(()), pair(()), replace(pair(()), generation=2)):
        assert found.idle_members(plan) and not found.idle_members(pair())
    alone = replace(pair(()), seats=(Seat(1, 0, "active", (0,)), Seat(2, 0, "standby", ())), lanes=1)
    assert not speeds(environment(lanes=1), KEY, OTHER).idle_members(alone)


def test_speeds_of_the_dead_are_forgotten() -> None:
    env, living = environment(), [KEY, OTHER]
    found = speeds(env, *living)
    found._membership.alive = lambda key: key if key in living else None  # type: ignore[assignment,method-assign]
    for key in living:
        found.say(key, 10.0)
    assert found.measured(pair()) == {1: 10.0, 2: 10.0}
    living.remove(OTHER)
    assert found.measured(pair()) is None
    living.append(OTHER)
    assert found.measured(pair()) is None


def test_a_gain_counts_when_it_has_lasted_and_so_has_the_last_change() -> None:
    env = environment(lasting_ns=10 * S)
    found = speeds(env)
    assert not found.uneven()
    env.advance(11 * S - 1)
    assert not found.uneven()
    env.advance(11 * S)
    assert found.uneven()
    found.even()
    assert not found.uneven()
    found.change({}, None)
    env.advance(12 * S)
    assert not found.uneven()
    env.advance(21 * S)
    assert not found.uneven()
    env.advance(22 * S)
    assert found.uneven()


def test_steps_take_as_long_as_their_busiest_worker() -> None:
    seats = [Seat(1, 0, "active", (0, 1)), Seat(2, 0, "active", (2,)), Seat(2, 1, "active", (0, 1))]
    assert step_ms(seats, {1: 10.0, 2: 7.0}) == 21.0 and step_ms([], {}) == 0.0
    assert by_speed({1: 11.0, 2: 10.0}) == {} and by_speed({1: 12.5, 2: 10.0}) == {1: 80.0, 2: 100.0}


@pytest.mark.parametrize(("own", "mover", "expected"), [(10.0, 30.0, 60.0), (0.0, 30.0, 20.0)])
def test_a_worker_is_as_much_slower_in_another_pool_as_in_its_own(own: float, mover: float, expected: float) -> None:
    seats = (*(Seat(i, 0, "active", ()) for i in (1, 2, 3)), Seat(4, 1, "active", ()))
    plan = Plan(1, "", tuple(member(i) for i in (1, 2, 3, 4)), seats, 4, stages=2)
    assert _in_other_pool(plan, {1: own, 2: own, 3: mover, 4: 20.0}, Move(3, 0, 1)) == expected


# ---- hosts


def detector(env: Environment, *, silent: bool) -> PhiDetector:
    found = PhiDetector(floor_ns=2 * S, ceiling_ns=10 * S, interval_ns=S, now_ns=env.now)
    if silent:
        env.advance(env.now + 9 * S)
    else:
        found.heartbeat(env.now)
    return found


def test_who_is_suspected_when_a_host_is_given_up_is_in_doubt_for_a_while() -> None:
    env = environment()
    where, silent = Whereabouts(env), detector(env, silent=True)
    others = {"a2": silent, "a3": detector(env, silent=False)}
    where.give_up("a1", "h1", others)
    until_ns = env.now + CONFIG.heartbeat_floor_ns
    assert where.in_doubt("a2") and not where.in_doubt("a3") and rings(env, Alarm.AGENT, "a2") == until_ns
    env.advance(env.now + 1)
    where.give_up("a4", "h4", others)  # the time is not made longer
    before = env.version
    where.look("a2")
    where.look("a3")
    assert where.in_doubt("a2") and env.version == before
    env.advance(until_ns)
    assert not where.in_doubt("a2")
    where.look("a2")
    assert env.version == before + 1
    where.look("a2")
    assert env.version == before + 1


def test_who_is_heard_or_given_up_is_in_doubt_no_more() -> None:
    env = environment()
    where, silent = Whereabouts(env), detector(env, silent=True)
    where.give_up("a1", "h1", {"a2": silent, "a3": silent})
    before = env.version
    where.greet("a2", {"rack": "r1"})
    assert not where.in_doubt("a2") and env.version == before + 1
    where.give_up("a3", "h3", {})
    assert not where.in_doubt("a3")


def test_hosts_that_die_one_after_another_have_lost_their_domain_if_nobody_lives_in_it() -> None:
    env = environment()
    where, both = Whereabouts(env), 2 * CONFIG.heartbeat_floor_ns
    for name, rack in (("a1", "r1"), ("a2", "r1"), ("a3", "r2"), ("a4", "r1")):
        where.greet(name, {"zone": "z1", "rack": rack})
    where.give_up("a1", "h1", {})
    assert where.lost_domain([]) == "", "one host is no domain"
    env.advance(env.now + both)
    where.give_up("a2", "h2", {})
    assert where.lost_domain([("a3", "h3")]) == "rack r1 was lost, with the hosts a1, a2"
    assert where.lost_domain([("a3", "h3"), ("a4", "h4")]) == ""
    assert where.lost_domain([]) == "zone z1 was lost, with the hosts a1, a2"
    env.advance(env.now + 1)
    where.give_up("a3", "h3", {})
    assert where.lost_domain([]) == "zone z1 was lost, with the hosts a2, a3", "a1 was lost too long ago"


def agent(env: Environment) -> Agent:
    return Agent("a1", "h1", detector(env, silent=False))


def test_an_agent_that_is_back_knows_nothing_of_what_it_was_told() -> None:
    env = environment()
    one = agent(env)
    assert one.away_ns(env.now) is None
    one.greet("c1", m.AgentHello(agent_id="a1", host="h2", workers=[], slots=3, room=5, process="p1"), env.now)
    one.new_slots([1, 2], [0, 0])
    assert one.may_kill(KEY, env.now, 2 * S) and one.sent_slots == [1, 2]
    assert not one.may_kill(KEY, env.now + 2 * S - 1, 2 * S) and one.may_kill(KEY, env.now + 2 * S, 2 * S)
    one.leave(env.now + S)
    assert one.away_ns(env.now + 4 * S) == 3 * S and not one.may_kill(OTHER, env.now, 0)
    one.greet("c2", m.AgentHello(agent_id="a1", host="h2", workers=[], slots=3, room=5, process="p1"), env.now)
    assert one.connection == "c2" and one.away_ns(env.now + 9 * S) is None and one.sent_slots is None
    assert one.may_kill(KEY, env.now, 2 * S), "what it was asked before may be lost"
    assert (one.host, one.slots, one.room, one.process) == ("h2", 3, 5, "p1")


def test_an_agent_is_believed_to_run_what_it_says_or_the_journal() -> None:
    one = agent(environment())
    one.restore(KEY)
    one.runs(OTHER)
    assert one.believed == {KEY, OTHER} and one.relist() == {KEY, OTHER} and one.believed == set()
    one.restore(KEY)
    one.runs(KEY)
    assert one.lets_go(KEY, S) and not one.lets_go(KEY, S)
    one.exited(KEY)
    assert one.believed == set() and one.lets_go(KEY, S)


def test_the_coordinators_own_absence_is_no_absence_of_an_agent() -> None:
    env = environment()
    one = agent(env)
    one.pardon(5 * S, 9 * S)
    assert one.away_ns(9 * S) is None
    one.leave(S)
    one.pardon(5 * S, 9 * S)
    assert one.away_ns(10 * S) == S


def waiting_parts() -> list[Any]:
    """Each part that waits for somebody, or judges a silence."""
    env, nothing = environment(), SimpleNamespace()
    saving = Saving(env, nothing, nothing, nothing, nothing)
    saving.ending = Ending("interrupted", Why(Cause.REQUESTED, "stop"), 0, 3 * S)
    links = Links(env, nothing, nothing, nothing)
    detector = PhiDetector(floor_ns=S, ceiling_ns=2 * S, interval_ns=S, now_ns=S)
    parts = [Claims(env), Grace(env), Quorum(env), saving, saving.leaving, links, links._probes, detector]
    return [*parts, Worker(KEY)]


SPANS = {"_floor_ns", "_ceiling_ns", "_least_mean_ns"}
UNMOVED = {"ordered_ns"}
"""Another time bounds it: that for which the worker's own progress has stood still."""


@pytest.mark.parametrize("part", waiting_parts(), ids=lambda part: type(part).__name__)
def test_no_moment_stays_when_the_coordinator_was_away(part: Any) -> None:
    """Of a wait that is bounded by several, one that stays would end it too early."""
    names = sorted(name for name in vars(part) if name.endswith("_ns") and name not in SPANS | UNMOVED)
    assert names, "it has no moment"
    for n, name in enumerate(names):
        setattr(part, name, (n + 2) * S)
    part.pardon(100 * S)
    assert [getattr(part, name) for name in names] == [(n + 102) * S for n in range(len(names))], names


def test_moments_of_parts_within_parts_are_moved_too() -> None:
    by_type = {type(part): part for part in waiting_parts()}
    saving, links = by_type[Saving], by_type[Links]
    assert isinstance(saving.leaving, Leaving) and isinstance(links._probes, Probes)
    saving.leaving._due_ns = links._probes.until_ns = 2 * S
    saving.pardon(5 * S)
    links.pardon(5 * S)
    assert saving.leaving._due_ns == links._probes.until_ns == 7 * S
    assert saving.ending is not None and saving.ending.until_ns == 8 * S


def test_who_comes_back_gives_the_others_time_up_to_a_limit_from_the_start() -> None:
    """Each of the three bounds decides once."""
    env = environment(hosts=HostRules(grace_ns=2 * S))
    grace = Grace(env)
    grace.begin()
    assert grace.until_ns == 3 * S and rings(env, Alarm.GRACE) == 3 * S
    for now, until in ((2 * S, 4 * S), (3 * S, 5 * S), (3 * S - MS, 5 * S)):
        env.advance(now)
        grace.go_on()
        assert grace.until_ns == until, "time from the last who came, and never less than before"
    last = S + GRACE_MOST * 2 * S
    while env.now < last - S // 2:
        env.advance(min(grace.until_ns - 1, last - S // 2))
        grace.go_on()
        assert grace.until_ns == min(env.now + 2 * S, last)
    assert grace.until_ns == last
    env.advance(last)
    grace.go_on()
    assert grace.until_ns == last, "what is over does not begin anew"


@pytest.mark.parametrize(("state", "draining"), [("no", False), ("wished", False), ("asked", True), ("told", True)])
def test_who_only_wishes_to_leave_still_gets_slots(state: Any, draining: bool) -> None:
    one = agent(environment())
    one.drain(state)
    assert one.draining == draining


@pytest.mark.parametrize(
    ("rtts_ms", "fixed_ns", "expected_ns"),
    [
        ([], None, S),
        ([0.0], None, S),
        ([100.0], None, S),
        ([1.0], None, S // 5),
        ([900.0, 800.0], None, 5 * S),
        ([1.0, 50.0, 60.0], None, 500 * MS),
        ([50.0], 3 * S, 3 * S),
    ],
)
def test_heartbeats_are_expected_by_the_round_trips(
    rtts_ms: list[float], fixed_ns: int | None, expected_ns: int
) -> None:
    env = environment()
    one, heard = agent(env), []
    one.detector.expect = heard.append  # type: ignore[method-assign]
    for rtt in rtts_ms or [0.0]:
        one.heartbeat(env.now, rtt, fixed_ns)
    assert heard[-1] == expected_ns


# ---- advice


def advised(empty_s: int, every_s: int, failures: int, spares: int = 0) -> list[Any]:
    env = environment()
    advice = SpareAdvice(env)
    for i in range(failures):
        env.advance((1 + i * every_s) * S)
        advice.lost(i % 4)
        env.advance((1 + i * every_s + empty_s) * S)
        advice.filled(i % 4, 4, spares)
    return told(env)


def test_a_spare_is_advised_once_when_places_stay_empty_for_long() -> None:
    (report,) = advised(30, 120, 6)
    assert report.kind == "warning" and report.fields["reason"] == (
        "a spare would give back up to 5.9% of the workers' time, by the cost model: a failure every 120 s, after "
        "which a place is empty for 30.0 s: use --spares 1"
    )
    assert not advised(1, 120, 6), "that costs less than a spare"
    assert not advised(30, 120, 2), "two failures may be chance"
    assert not advised(30, 120, 6, spares=1), "there is one"
    env = environment()
    SpareAdvice(env).filled(1, 4, 0)
    assert not told(env), "nobody was lost"


@pytest.mark.parametrize(("room", "expected"), [(3, "aaa"), (1, "abb"), (0, "bbb")])
def test_a_slot_goes_where_the_map_says_as_long_as_there_is_room(room: int, expected: str) -> None:
    named = dict.fromkeys(range(3), ("a",))
    found = share(range(3), {}, (), {"a": room, "b": 9}, named, {})
    assert "".join(found[i] for i in range(3)) == expected
