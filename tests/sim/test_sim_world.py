"""The simulated network: what real ones promise, it keeps, too."""

from __future__ import annotations

from everstep.sim.faults import SimFault
from everstep.sim.model import SimJob
from everstep.sim.scenario import simulate
from everstep.sim.setups import Setup
from everstep.sim.world import MS, SECOND, Process, World, connect


def test_a_connection_keeps_the_order_of_what_is_sent_whenever_packets_are_lost() -> None:
    """Also of what was under way as the hosts lost each other, and of what was sent as they found each other again."""
    held = 0
    for seed in range(200):
        world = World(seed)
        a, b = Process(world, "a", "host0"), Process(world, "b", "host1")
        connection = connect(world, a, b)
        assert connection is not None
        came: list[int] = []
        connection.listen(b, came.append, lambda: None)
        for n in range(40):
            world.later(world.between(0, 20 * MS), world.cut if n % 2 else world.cut_one_way, "host0", "host1")
            world.later(world.between(0, 20 * MS), world.mend if n % 2 else world.mend_one_way, "host0", "host1")
        times = sorted(world.between(0, 20 * MS) for _ in range(60))
        for n, at in enumerate(times):
            world.later(at, connection.send, a, n)
        world.later(21 * MS, world.mend_all)
        world.run(20 * MS, lambda: False)
        held += connection.stuck
        world.run(500 * MS, lambda: False)
        assert came == list(range(60)), seed
    assert held > 20


def test_a_connection_ends_over_what_has_waited_for_too_long_and_is_the_oldest() -> None:
    world = World(0)
    a, b = Process(world, "a", "host0"), Process(world, "b", "host1")
    connection = connect(world, a, b, SECOND)
    assert connection is not None
    lost: list[str] = []
    connection.listen(b, lambda message: None, lambda: lost.append("b"))
    connection.send(a, 0)
    world.cut("host0", "host1")
    connection.send(a, 1)
    world.run(3 * SECOND, lambda: False)
    assert lost == ["b"] and not connection.open


def test_a_side_that_has_ended_a_connection_hears_nothing_more_of_it_even_if_it_had_failed():
    """The process was frozen: its own act comes first, then a message and the failure that had been waiting for it."""
    world = World(0)
    a, b = Process(world, "a", "host0"), Process(world, "b", "host1")
    connection = connect(world, a, b)
    assert connection is not None
    heard: list[str] = []
    connection.listen(a, lambda message: None, lambda: heard.append("a"))
    connection.listen(b, heard.append, lambda: heard.append("b"))
    b.freeze()
    b.later(0, connection.close, b)
    world.run(0, lambda: False)
    connection.send(a, "message")
    world.run(SECOND, lambda: False)
    connection.fail()
    world.run(2 * SECOND, lambda: False)
    b.thaw()
    assert heard == ["a"]


def test_nobody_is_accused_where_no_link_breaks_however_slow_a_record_is() -> None:
    """A member that has all records hangs up and follows the prepared plan: its last record arrives before that end,
    though the two members talk over a connection each way."""
    scales = tuple(SimFault("scale", at, pick=pick) for at, pick in ((60, 5), (200, 0), (400, 6)))
    setup = Setup(4, 0, 2, 1, "replace", SimJob(12, 8, 4), scales)
    for seed in range(12):
        outcome = simulate(seed, setup=setup, tracing=True)
        assert outcome.ok, outcome
        assert outcome.seen["messages", "PlanPrepared"], outcome
        assert not [line for line in outcome.trace if " accuses " in line], outcome
