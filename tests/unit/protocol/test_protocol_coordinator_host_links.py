"""Hosts that do not reach each other, in the coordinator: who is probed, who leaves, and who stays outside."""

from __future__ import annotations

from coordinator_harness import MS, S, World

from everstep.protocol import messages as m


def three_hosts(**config: object) -> World:
    """Two workers on each of three hosts, 0 and 1 on the first."""
    world = World(workers=6, **config)
    for k in range(3):
        world.agent(2 * k, 2 * k + 1, name=f"a{k + 1}", host=f"a{k + 1}")
    for i in range(6):
        world.hello(i, host=f"a{i // 2 + 1}")
    for i in range(6):
        world.entered(i, 1, 1)
    world.clear()
    return world


def break_link(world: World, generation: int, *accusations: tuple[int, int]) -> None:
    for accuser, accused in accusations:
        world.fault(accuser, generation, accused)
    world.no_death()


def test_of_two_hosts_that_do_not_reach_each_other_one_leaves_and_stays_outside_for_a_while() -> None:
    world = three_hosts()
    break_link(world, 1, (4, 2), (5, 2))
    assert world.plan.generation == 2 and len(world.plan.members) == 6, "links may fail once"
    for i in range(6):
        world.entered(i, 2, 2)
    break_link(world, 2, (4, 2), (5, 2), (2, 4))
    assert world.plan.worker_ids == (0, 1, 4, 5), "host a2, of which nobody reaches 4 and 5"
    for i in (0, 1, 4, 5):
        world.entered(i, world.plan.generation, 2)
    for i in (2, 3):
        world.started(i, 1, agent="a2")
        world.hello(i, 1, host="a2")
    assert world.last(m.Heal, "w2.1") is None
    world.exited(5, agent="a3")  # and nobody takes it in at once instead
    assert world.plan.worker_ids == (0, 1, 4)
    world.entered(0, world.plan.generation, 3)
    world.wait(21 * S)
    assert world.last(m.Heal, "w2.1") is not None and world.last(m.Heal, "w3.1") is not None


def test_any_link_between_two_hosts_is_the_same_again() -> None:
    """One member of each carries for all: the others notice nothing before they have to meet again."""
    world = three_hosts()
    break_link(world, 1, (4, 3))
    assert world.plan.generation == 2 and len(world.plan.members) == 6
    for i in range(6):
        world.entered(i, 2, 2)
    break_link(world, 2, (4, 2), (5, 3))
    assert world.plan.generation == 3 and world.plan.worker_ids == (0, 1, 4, 5)
    assert "its links, or others between the same hosts, failed again (2 to 4, 3 to 5)" in world.plan.reason


def test_links_within_a_host_and_between_hosts_may_fail_at_once() -> None:
    """No host leaves as a whole then: a smallest number of workers does."""
    world = three_hosts()
    break_link(world, 1, (1, 0), (4, 2))
    for i in range(6):
        world.entered(i, 2, 2)
    break_link(world, 2, (1, 0), (4, 2))
    left = set(world.plan.worker_ids)
    assert world.plan.generation == 3 and len(left) == 4 and not {0, 1} <= left and not {2, 4} <= left


def stating(world: World) -> World:
    """The hosts' agents say their addresses, so they are asked whether others answer."""
    for k in range(3):
        name = f"a{k + 1}"
        lives = [m.WorkerLife(worker_id=i, incarnation=0, pid=1000 + i) for i in (2 * k, 2 * k + 1)]
        about = {"address": f"10.0.0.{k + 1}"}
        world.say(
            name, m.AgentHello(agent_id=name, host=f"a{k + 1}", workers=lives, slots=0, process=name, about=about)
        )
    world.clear()
    return world


def test_hosts_of_accused_links_are_probed_and_one_leaves_at_once_if_they_do_not_answer() -> None:
    world = stating(three_hosts())
    break_link(world, 1, (4, 2))
    asked = {name: world.last(m.ProbeHosts, name) for name in ("a2", "a3")}
    assert list(asked["a3"].addresses) == ["a2"] and list(asked["a2"].addresses) == ["a3"]
    assert world.last(m.ProbeHosts, "a1") is None and world.plan.generation == 1, "it is decided when they have looked"
    world.say("a3", m.HostsProbed(agent_id="a3", number=asked["a3"].number, silent=["a2"]))
    world.say("a2", m.HostsProbed(agent_id="a2", number=asked["a2"].number, silent=[]))
    world.wait(MS)
    assert world.plan.generation == 2 and world.plan.worker_ids == (0, 1, 4, 5), (
        "the whole host, though one link failed"
    )
    assert "its host and another do not reach each other (2 to 4)" in world.plan.reason


def test_hosts_that_answer_may_fail_once_and_one_that_does_not_look_is_not_waited_for() -> None:
    world = stating(three_hosts())
    break_link(world, 1, (4, 2))
    for name, other in (("a2", "a3"), ("a3", "a2")):
        number = world.last(m.ProbeHosts, name).number
        world.say("a1", m.HostsProbed(agent_id="a1", number=number, silent=[other]))  # not the one that was asked
        world.say(name, m.HostsProbed(agent_id=name, number=number, silent=[]))
    world.wait(MS)
    assert world.plan.generation == 2 and len(world.plan.members) == 6
    world = stating(three_hosts())
    break_link(world, 1, (4, 2))
    world.wait(1500 * MS)
    assert world.plan.generation == 2 and len(world.plan.members) == 6


def test_one_host_that_does_not_answer_is_told_of_beside_links_that_have_failed_before() -> None:
    world = stating(three_hosts())
    break_link(world, 1, (4, 0))
    for name in ("a1", "a3"):
        world.say(name, m.HostsProbed(agent_id=name, number=world.last(m.ProbeHosts, name).number, silent=[]))
    world.wait(MS)
    assert world.plan.generation == 2 and len(world.plan.members) == 6
    for i in range(6):
        world.entered(i, 2, 2)
    world.clear()
    break_link(world, 2, (4, 0), (4, 2))
    for name in ("a1", "a2", "a3"):
        for asked in world.messages(m.ProbeHosts, name):
            silent = ["a2"] if "a2" in asked.addresses else []
            world.say(name, m.HostsProbed(agent_id=name, number=asked.number, silent=silent))
    world.wait(MS)
    assert world.plan.generation == 3 and "its host and another do not reach each other" in world.plan.reason


def test_on_one_host_another_link_is_another() -> None:
    world = three_hosts()
    break_link(world, 1, (1, 0), (4, 5))
    for i in range(6):
        world.entered(i, 2, 2)
    break_link(world, 2, (2, 3))
    assert world.plan.generation == 3 and len(world.plan.members) == 6
    for i in range(6):
        world.entered(i, 3, 2)
    break_link(world, 3, (3, 2))
    assert len(world.plan.members) == 5


def test_who_is_kept_out_is_looked_at_again_though_another_pair_of_hosts_was_sooner() -> None:
    world = three_hosts()
    for generation in (1, 2):
        for i in range(6):
            world.entered(i, generation, generation)
        break_link(world, generation, (4, 2), (5, 2), (2, 4))
    world.wait(5 * S)
    for generation in (world.plan.generation, world.plan.generation + 1):
        for i in world.plan.worker_ids:
            world.entered(i, generation, generation)
        break_link(world, generation, (4, 0), (5, 0), (5, 1))
    assert world.plan.worker_ids == (0, 1)
    for i in (0, 1):
        world.entered(i, world.plan.generation, 3)
    world.started(4, 1, agent="a3")
    world.hello(4, 1, host="a3")
    world.wait(16 * S)
    assert world.last(m.Heal, "w4.1") is None
    world.wait(6 * S)
    assert world.last(m.Heal, "w4.1") is not None


def test_of_two_workers_on_hosts_that_do_reach_each_other_one_leaves() -> None:
    world = three_hosts()
    for generation in (1, 2):
        for i in range(6):
            world.entered(i, generation, generation)
        break_link(world, generation, (4, 2), (2, 4))
    assert world.plan.worker_ids == (0, 1, 2, 3, 5)


def test_the_first_members_host_stays() -> None:
    world = three_hosts()
    for generation in (1, 2):
        for i in range(6):
            world.entered(i, generation, generation)
        break_link(world, generation, (0, 2), (1, 2), (2, 0), (3, 0))
    assert world.plan.worker_ids == (0, 1, 4, 5)


# ---- slots that come to a host
