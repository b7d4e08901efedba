"""Faults of hosts: agents are told to strike, once for each, as the job's own specification says."""

from __future__ import annotations

from dataclasses import replace

from coordinator_harness import S, World
from test_protocol_coordinator_hosts import begin, shared_out

from everstep.base.cause import Cause
from everstep.base.strikes import Strike
from everstep.protocol import messages as m
from everstep.protocol.coordinator.types import HostRules

CUT = Strike("cut:target=link:h1-h2,at=3,for=2", "cut", "h1-h2", True, 2.0, index=0)
SLOW = Strike("slow:target=link:h1-h2,at=4,for=2,by=0.1", "slow", "h1-h2", True, 2.0, 0.1, index=1)
KILL = Strike("kill:target=host:h2,at=5", "kill", "h2", index=2)
GONE = Strike("kill:target=host:h9,at=5", "kill", "h9", index=3)


def job(*strikes: Strike) -> World:
    world = World(workers=2, slots=2, hosts=HostRules(strikes=strikes or (CUT, SLOW, KILL, GONE)))
    for k in (1, 2):
        arrive(world, k)
    for k in (1, 2):
        begin(world, f"h{k}")
    for i in range(2):
        world.entered(i, 1, 1)
    return world


def arrive(world: World, k: int, *runs: int) -> None:
    name = f"h{k}"
    world.connect(name, "agent")
    about = {"address": f"10.0.0.{k}"}
    lives = [m.WorkerLife(worker_id=i, incarnation=0, pid=1000 + 10 * i) for i in runs]
    world.say(name, m.AgentHello(agent_id=name, host=name, workers=lives, slots=0, room=1, process="p", about=about))


def due(world: World, index: int, worker_id: int = 0) -> None:
    who = {"worker_id": worker_id, "incarnation": 0}
    world.say(f"w{worker_id}.0", m.StrikeDue(**who, index=index, generation=1, step=3, phase="load"))


def test_the_first_worker_that_says_so_counts_and_one_end_of_a_link_is_enough() -> None:
    world = job()
    due(world, 0)
    due(world, 0, 1)
    [(to, told)] = [(name, x) for name, x in world.sent if isinstance(x, m.StrikeNow)]
    assert (to, told.kind, told.peer, told.for_s) == ("h1", "cut", "10.0.0.2", 2.0)
    injected = world.report("fault_injected")
    assert (injected["fault"], injected["target"], injected["step"]) == ("cut", "link:h1-h2", 3)
    assert world.kinds().count("fault_injected") == 1


def test_a_host_with_itself_is_no_link_whatever_it_is_called() -> None:
    for target, words in (("h1-h1", "expected two hosts"), ("h1-10.0.0.1", "expected a link between two hosts")):
        world = job(replace(CUT, target=target))
        due(world, 0)
        assert words in world.report("warning")["reason"] and "fault_injected" not in world.kinds()


def test_both_ends_of_a_link_slow_down_what_leaves_them() -> None:
    world = job()
    due(world, 1)
    told = [(name, x.peer, x.by_s) for name, x in world.sent if isinstance(x, m.StrikeNow)]
    assert told == [("h1", "10.0.0.2", 0.1), ("h2", "10.0.0.1", 0.1)]


def test_a_restart_does_not_strike_again() -> None:
    before = job()
    due(before, 2)
    assert before.last(m.StrikeNow, "h2").kind == "kill"
    world = before.restart()
    arrive(world, 1, 0)
    arrive(world, 2, 1)
    world.hello(0, plan=before.plan, step=3, host="h1")
    world.wait(5 * S)
    due(world, 2)
    assert not world.messages(m.StrikeNow)
    due(world, 0)
    assert world.last(m.StrikeNow, "h1").kind == "cut", "the others are still to strike"


def test_what_is_not_in_the_specification_has_no_effect_and_who_is_not_there_is_told() -> None:
    world = job()
    due(world, 17)
    assert not world.messages(m.StrikeNow) and "warning" not in world.kinds()
    due(world, 3)
    assert "expected a host of the job, got 'h9': the hosts are h1, h2" in world.report("warning")["reason"]


def test_people_may_ask_for_one() -> None:
    world = shared_out(2, 2)
    reply = world.command("chaos", fault="x", strike=vars(KILL))
    assert reply.ok and world.last(m.StrikeNow, "h2").kind == "kill"
    assert "the hosts are h1, h2" in world.command("chaos", fault="x", strike=vars(GONE)).error
    assert "expected a fault of a host" in world.command("chaos", fault="x", strike={"kind": 5}).error
    for nonsense in (
        {"for_s": float("inf")},
        {"kind": "rm"},
        {"mbit": float("nan")},
        {"share": -1.0},
        {"text": "x" * 501},
    ):
        assert "no sense" in world.command("chaos", fault="x", strike={**vars(CUT), **nonsense}).error
    assert world.command("chaos", fault="x", strike=vars(CUT)).error == "the address of one of these hosts is not known"


def test_a_link_whose_ends_both_act_needs_the_addresses_of_both() -> None:
    for lacking in (1, 2):
        world = World(workers=2, slots=2)
        for k in (1, 2):
            name, about = f"h{k}", {} if k == lacking else {"address": f"10.0.0.{k}"}
            hello = m.AgentHello(agent_id=name, host=name, workers=[], slots=0, room=1, process="p", about=about)
            world.connect(name, "agent")
            world.say(name, hello)
        reply = world.command("chaos", fault="x", strike=vars(SLOW))
        assert reply.error == "the address of one of these hosts is not known"
        assert world.last(m.StrikeNow) is None


# ---- the coordinator

STOP = Strike("stop:target=coordinator,at=3,for=2", "stop", "coordinator", for_s=2.0, index=4, coordinator=True)
AGAIN = Strike("kill:target=coordinator", "kill", "coordinator", index=5, coordinator=True)


def with_jobs(*names: str) -> World:
    world = job(STOP, AGAIN)
    for name in names:
        world.connect(name, "job")
        world.say(name, m.JobHello())
    return world


def told(world: World) -> list[tuple[str, str, float]]:
    return [(name, x.kind, x.for_s) for name, x in world.sent if isinstance(x, m.StrikeNow)]


def test_the_coordinator_is_struck_by_the_job_s_process_on_its_host_which_knows_that_it_is() -> None:
    world = with_jobs("j1", "j2")
    due(world, 4)
    assert told(world) == [("j1", "stop", 2.0), ("j2", "stop", 2.0)]
    injected = world.report("fault_injected")
    assert (injected["fault"], injected["target"], injected["worker_id"]) == ("stop", "coordinator", None)
    assert (injected["step"], injected["phase"]) == (3, "load") and injected["cause"] is Cause.INJECTED


def test_random_ones_strike_it_again_and_again_for_their_workers_claim_each() -> None:
    world = with_jobs("j1")
    due(world, 5)
    due(world, 5)
    assert told(world) == 2 * [("j1", "kill", 0.0)]


def test_where_nobody_can_it_is_said() -> None:
    world = with_jobs()
    due(world, 4)
    assert not told(world) and "not connected" in world.report("warning")["reason"]


def test_one_that_is_asked_for_strikes_at_once_or_when_a_worker_says_so() -> None:
    world = with_jobs("j1")
    assert world.command("chaos", fault="x", strike=vars(AGAIN)).ok
    assert told(world) == [("j1", "kill", 0.0)]
    said = [type(x) for _, x in world.sent if isinstance(x, m.CommandReply | m.StrikeNow)]
    assert said == [m.CommandReply, m.StrikeNow], "once it is struck it cannot answer"
    world.clear()
    assert world.command("chaos", fault=STOP.text, due={**vars(STOP), "index": 0}).ok
    assert not told(world)
    number = next(x.number for _, x in world.sent if isinstance(x, m.InjectFault))
    after = world.restart()
    for k in (1, 2):
        arrive(after, k, k - 1)
    after.hello(0, plan=world.plan, step=3, host="h1")
    after.connect("j1", "job")
    after.say("j1", m.JobHello())
    due(after, number)
    assert told(after) == [("j1", "stop", 2.0)]


def test_after_a_restart_nothing_is_asked_of_workers_until_all_are_back() -> None:
    world = with_jobs("j1")
    after = world.restart()
    for k in (1, 2):
        arrive(after, k, k - 1)
    after.hello(0, plan=world.plan, step=3, host="h1")
    early = after.command("chaos", fault="kill:target=leader")
    assert not early.ok and "workers 1 have yet to come back to it: try again" in early.error
    assert not after.messages(m.InjectFault)
    after.hello(1, plan=world.plan, step=3, host="h2")
    assert after.command("chaos", fault="kill:target=leader").ok and len(after.messages(m.InjectFault)) == 2


def test_what_is_asked_for_makes_sense() -> None:
    world = with_jobs("j1")
    for wrong in (
        {**vars(STOP), "kind": "cut"},
        {**vars(STOP), "for_s": -1.0},
        {**vars(STOP), "for_s": "x"},
        vars(KILL),
        7,
    ):
        said = world.command("chaos", fault="x", due=wrong)
        assert not said.ok and "expected a fault of" in said.error and "\n" not in said.error
    for kind in ("raise", "partition", "drop"):
        assert not world.command("chaos", fault="x", strike={**vars(STOP), "kind": kind}).ok
    assert not world.messages(m.InjectFault) and not told(world)
