"""Faults of hosts: agents are told to strike, once for each, as the job's own specification says."""

from __future__ import annotations

from coordinator_harness import S, World
from test_protocol_coordinator_hosts import begin, shared_out

from everstep.base.strikes import Strike
from everstep.protocol import messages as m
from everstep.protocol.coordinator.types import HostRules

CUT = Strike("cut:target=link:h1-h2,at=3,for=2", "cut", "h1-h2", True, 2.0, index=0)
SLOW = Strike("slow:target=link:h1-h2,at=4,for=2,by=0.1", "slow", "h1-h2", True, 2.0, 0.1, index=1)
KILL = Strike("kill:target=host:h2,at=5", "kill", "h2", index=2)
GONE = Strike("kill:target=host:h9,at=5", "kill", "h9", index=3)


def job() -> World:
    world = World(workers=2, slots=2, hosts=HostRules(strikes=(CUT, SLOW, KILL, GONE)))
    for k in (1, 2):
        arrive(world, k)
    for k in (1, 2):
        begin(world, f"h{k}")
    for i in range(2):
        world.entered(i, 1, 1)
    return world


def arrive(world: World, k: int) -> None:
    name = f"h{k}"
    world.connect(name, "agent")
    about = {"address": f"10.0.0.{k}"}
    world.say(name, m.AgentHello(agent_id=name, host=name, workers=[], slots=0, room=1, process="p", about=about))


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
    arrive(world, 1)
    world.hello(0, plan=before.plan, step=3, host="h1")
    world.wait(5 * S)
    due(world, 2)
    assert not world.messages(m.StrikeNow)


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
