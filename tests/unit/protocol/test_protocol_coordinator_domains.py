"""What the coordinator makes of failure domains: labels, slots, pools, and a domain that dies as a whole."""

from __future__ import annotations

import pytest
from coordinator_harness import MS, S, World

from everstep.base.errors import ProtocolError
from everstep.base.pool_wish import PoolWish, make_wish
from everstep.protocol import messages as m
from everstep.protocol.coordinator.types import HostRules

RACKS = {"h1": "r1", "h2": "r1", "h3": "r2", "h4": "r2"}


def arrive(world: World, name: str, room: int = 0, workers: tuple[int, ...] = (), **labels: str) -> None:
    world.connect(name, "agent")
    lives = [m.WorkerLife(worker_id=i, incarnation=0, pid=1000 + 10 * i) for i in workers]
    hello = m.AgentHello(agent_id=name, host=name, workers=lives, slots=0, room=room, process="p", domains=labels)
    world.say(name, hello)


def begin(world: World, name: str) -> list[int]:
    """The agent starts what it was told and does not run; they say hello."""
    told = world.last(m.SetSlots, name)
    fresh = [i for i in told.worker_ids if i not in world.coordinator.job.membership.workers]
    for i in fresh:
        world.started(i, told.first[told.worker_ids.index(i)], agent=name)
        world.hello(i, told.first[told.worker_ids.index(i)], host=name)
    return fresh


def four_hosts(workers: int = 4, **config: object) -> World:
    """Two racks of two hosts with as many workers each, known for a while; they are heard one after the other."""
    world = World(workers=workers, slots=workers, heartbeat_interval_ns=200 * MS, **config)
    for name, rack in RACKS.items():
        arrive(world, name, workers // 4, rack=rack)
    for name in RACKS:
        begin(world, name)
    for i in range(workers):
        world.entered(i, 1, 1)
    beat(world, 3 * S)
    world.clear()
    return world


def beat(world: World, for_ns: int, silent: tuple[str, ...] = ()) -> int | None:
    """Time passes, and all but the silent are heard every 200 ms, one after the other. Returns when the next generation
    began, if it did."""
    end = world.now + for_ns
    found = None
    generation = world.plan.generation if world.plan else 0
    while world.now < end:
        for name in RACKS:
            if name not in silent:
                world.beat(agent=name)
            world.wait(50 * MS, beating=False)
            if found is None and world.plan and world.plan.generation > generation:
                found = world.now
    return found


def hosts_of(world: World) -> dict[int, str]:
    return {member.worker_id: member.host for member in world.plan.members}


def test_labels_reach_plans_and_whoever_asks() -> None:
    world = four_hosts()
    assert {member.host: dict(member.domains) for member in world.plan.members} == {
        name: {"rack": rack} for name, rack in RACKS.items()
    }
    hosts = world.command("hosts").result["hosts"]
    assert {host["name"]: host["domains"] for host in hosts} == {
        name: {"rack": rack, "host": name} for name, rack in RACKS.items()
    }


def test_a_gpu_is_a_domain_too() -> None:
    world = World(workers=2, slots=2, hosts=HostRules(device="cuda", devices={1: "cuda:1"}))
    arrive(world, "h1", 2)
    begin(world, "h1")
    assert [dict(member.domains) for member in world.plan.members] == [{"gpu": "0"}, {"gpu": "1"}]


@pytest.mark.parametrize("labels", [{"shelf": "a"}, {"rack": ""}, {"rack": "a b"}, {"rack": "r" * 64}, {"rack": "r\n"}])
def test_other_labels_are_no_message_of_ours(labels: dict[str, str]) -> None:
    hello = m.AgentHello(agent_id="a", host="a", workers=[], slots=0, domains=labels)
    with pytest.raises(ProtocolError):
        m.decode(m.encode(hello))


def test_a_restarted_coordinator_knows_the_domains_before_the_agents_are_back() -> None:
    world = four_hosts()
    plan = world.plan
    again = world.restart()
    for i in range(4):
        again.hello(i, host=hosts_of(world)[i], plan=plan)
    for name in ("h1", "h2", "h3"):
        there = tuple(i for i, host in hosts_of(world).items() if host == name)
        arrive(again, name, 2, there, rack=RACKS[name])
    again.fault(0, 1, 1)
    again.no_death()
    assert again.plan.generation > 1
    assert {x.host: dict(x.domains)["rack"] for x in again.plan.members} == {
        x: RACKS[x] for x in hosts_of(again).values()
    }


def test_a_slot_goes_to_another_rack_if_hosts_have_as_many() -> None:
    world = World(workers=1, slots=1, lanes=4)
    for name, rack in (("h1", "r1"), ("h2", "r1"), ("h3", "r2")):
        arrive(world, name, rack=rack)
    begin(world, "h1")
    world.entered(0, 1, 1)
    assert world.command("scale", workers=2).ok
    assert world.last(m.SetSlots, "h3").worker_ids == [1]


def test_each_pool_is_on_both_racks_and_no_rack_s_death_loses_a_stage() -> None:
    world = four_hosts(workers=8, stages=4, lanes=8, wish=make_wish(8, 4, 1))
    rack_of = {i: RACKS[host] for i, host in hosts_of(world).items()}
    for stage in range(4):
        assert {rack_of[seat.worker_id] for seat in world.plan.pool(stage)} == {"r1", "r2"}
    beat(world, 5 * S, silent=("h3", "h4"))
    assert world.plan.generation == 2 and {RACKS[h] for h in hosts_of(world).values()} == {"r1"}
    assert "fallback" not in world.kinds() and "lost its whole pool" not in world.plan.reason


def test_a_rack_that_dies_is_one_fault_with_one_plan() -> None:
    world = four_hosts()
    began = world.now
    at = beat(world, 8 * S, silent=("h3", "h4"))
    assert world.plan.generation == 2 and set(hosts_of(world).values()) == {"h1", "h2"}
    assert world.plan.reason.startswith("rack r2 was lost, with the hosts h3, h4: ")
    assert world.kinds().count("worker_evicted") == 2
    assert at is not None and at - began <= 2500 * MS


def test_hosts_without_a_common_label_that_die_together_are_one_plan_too() -> None:
    world = four_hosts()
    beat(world, 8 * S, silent=("h2", "h3"))
    assert world.plan.generation == 2 and set(hosts_of(world).values()) == {"h1", "h4"}
    assert "was lost, with the hosts" not in world.plan.reason


def test_an_ordinary_host_s_death_waits_for_nobody() -> None:
    world = four_hosts()
    began = world.now
    at = beat(world, 8 * S, silent=("h3",))
    assert world.plan.generation == 2 and len(world.plan.members) == 3
    assert at is not None and at - began <= 2300 * MS
    assert not world.coordinator.job.agents.whereabouts._doubted_until_ns


def test_who_is_only_slow_stays_and_holds_up_nobody_once_it_is_heard() -> None:
    world = four_hosts()
    while world.coordinator.job.agents.known.get("h3") is not None:
        for name in ("h1", "h2"):
            world.beat(agent=name)
        world.wait(10 * MS, beating=False)
    assert world.plan.generation == 1, "h4 is in doubt"
    world.beat(agent="h4")
    assert world.plan.generation == 2 and set(hosts_of(world).values()) == {"h1", "h2", "h4"}


def test_a_doubt_ends_though_nothing_is_heard() -> None:
    world = four_hosts(heartbeat_ceiling_ns=60 * S)
    agents = world.coordinator.job.agents
    for _ in range(30):  # heard seldom, so it is given much time
        world.wait(4 * S, beating=False)
        for name in RACKS:
            world.beat(agent=name)
    beat(world, 60 * S, silent=("h3", "h4"))
    assert not agents.whereabouts._doubted_until_ns and world.plan.generation >= 2


# ---- split jobs on hosts that come and go


def split(*rooms: int, workers: int = 4, stages: int = 2) -> World:
    world = World(
        workers=workers,
        slots=workers,
        stages=stages,
        hosts=HostRules(return_ns=30 * S),
        wish=make_wish(workers, stages),
    )
    for k, room in enumerate(rooms):
        arrive(world, f"h{k + 1}", room)
    for k in range(len(rooms)):
        begin(world, f"h{k + 1}")
    for i in range(workers):
        world.entered(i, 1, 1)
    return world


def heal(world: World, fresh: list[int]) -> None:
    for i in fresh:
        world.healed(i)
    world.wait(S)


def pools(world: World) -> list[list[int]]:
    plan = world.prepared or world.plan
    return [[seat.worker_id for seat in plan.pool(stage)] for stage in range(plan.stages)]


def test_slots_of_a_split_job_move_to_a_host_that_comes_one_of_each_pool() -> None:
    world = split(0)
    assert pools(world) == [[0, 1], [2, 3]]
    arrive(world, "h2")
    world.wait(31 * S)
    fresh = begin(world, "h2")
    assert fresh == [4, 5] and world.prepared is None
    stages = {i: world.last(m.Heal, f"w{i}.0").stages for i in fresh}
    assert sorted(stages.values()) == [[0], [1]], "each copies the stage that one is to leave"
    heal(world, fresh)
    assert [len(pool) for pool in pools(world)] == [2, 2]
    there = {member.worker_id: member.host for member in world.prepared.members}
    assert [{there[i] for i in pool} for pool in pools(world)] == [{"h1", "h2"}, {"h1", "h2"}]
    assert world.plan.generation == 1 and 0 in there


def test_a_pool_of_one_moves_without_being_empty_for_a_moment() -> None:
    world = split(0, workers=3, stages=3)
    arrive(world, "h2")
    world.wait(31 * S)
    (fresh,) = begin(world, "h2")
    (stage,) = world.last(m.Heal, f"w{fresh}.0").stages
    assert stage == 2 and world.prepared is None
    heal(world, [fresh])
    assert pools(world) == [[0], [1], [fresh]]


def test_of_those_that_move_he_leaves_first_whose_successor_is_there() -> None:
    world = split(0, workers=6, stages=3)
    arrive(world, "h2")
    world.wait(31 * S)
    fresh = begin(world, "h2")
    assert len(fresh) == 3
    stages = {i: world.last(m.Heal, f"w{i}.0").stages[0] for i in fresh}
    assert sorted(stages.values()) == [0, 1, 2]
    last = max(fresh)
    world.healed(last)
    world.wait(S)
    assert world.prepared is not None and [len(pool) for pool in pools(world)] == [2, 2, 2]
    assert last in pools(world)[stages[last]]


def test_homes_that_a_map_names_stay_where_they_are() -> None:
    named = PoolWish(homes=((0, 1), (2, 3)), named=True)
    world = World(workers=4, slots=4, stages=2, hosts=HostRules(return_ns=30 * S), wish=named)
    arrive(world, "h1")
    begin(world, "h1")
    for i in range(4):
        world.entered(i, 1, 1)
    arrive(world, "h2")
    world.wait(60 * S)
    assert world.last(m.SetSlots, "h2").worker_ids == []


def test_a_split_job_s_host_is_drained_and_every_stage_is_kept() -> None:
    world = split(2, 2)
    arrive(world, "h3", 2)
    reply = world.command("drain", host="h2")
    assert reply.ok and reply.result["moved"] == 2
    fresh = begin(world, "h3")
    for generation in range(2, 6):
        if world.prepared is not None:
            plan = world.prepared
            assert all(plan.pool(stage) for stage in range(2))
            for i in plan.worker_ids:
                world.entered(i, plan.generation, 5)
        heal(world, [i for i in fresh if not world.plan.has(world.coordinator.job.membership.workers[i].key)])
        assert generation
    assert {member.host for member in world.plan.members} == {"h1", "h3"}
    assert all(world.plan.pool(stage) for stage in range(2))
