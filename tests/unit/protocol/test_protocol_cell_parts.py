"""Workers that span hosts, in the coordinator: which lives are the parts of one, and who ends with whom."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from coordinator_harness import CONFIG, World, drop, member
from hypothesis import given
from hypothesis import strategies as st

from everstep.base.cause import Cause
from everstep.base.plan import WorkerKey
from everstep.placement.cell_shapes import CellShape, shapes_over
from everstep.protocol import messages as m
from everstep.protocol.coordinator.cell_parts import matched
from everstep.protocol.messages_base import CellFormed, CellPart, CellSought

S = 1_000_000_000


@given(
    st.dictionaries(st.builds(WorkerKey, st.integers(0, 30), st.integers(0, 2)), st.sampled_from("abcde")),
    st.integers(1, 4),
)
def test_no_cell_has_two_parts_on_a_host_and_none_is_left_that_could_be(hosts: dict[WorkerKey, str], size: int) -> None:
    cells = matched(hosts, size)
    taken = [key for cell in cells for key in cell]
    assert len(taken) == len(set(taken))
    for cell in cells:
        assert len(cell) == size == len({hosts[key] for key in cell}) and list(cell) == sorted(cell)
    assert len({host for key, host in hosts.items() if key not in taken}) < size


class Parts:
    """Hosts with room for one part each, which begin to look for others."""

    def __init__(self, hosts: int, span: int = 2, **config: Any) -> None:
        rules = replace(CONFIG.hosts, span=span, cells=shapes_over(CellShape(2 * span), span))
        self.world = World(**{"workers": 1, "slots": span, "hosts": rules, **config})
        for i in range(hosts):
            self.world.connect(f"a{i}", "agent")
            self.world.say(f"a{i}", m.AgentHello(agent_id=f"a{i}", host=f"a{i}", workers=[], slots=0, room=1))

    def looks(self, worker_id: int, host: int, incarnation: int = 0, cell: tuple[CellPart, ...] = ()) -> str:
        """A life begins, and says so. Returns its connection."""
        life = m.WorkerLife(worker_id=worker_id, incarnation=incarnation, pid=1000 + 10 * worker_id + incarnation)
        self.world.say(f"a{host}", m.WorkerStarted(agent_id=f"a{host}", worker=life))
        name = f"p{worker_id}.{incarnation}"
        self.world.connect(name, "worker")
        about = {"worker_id": worker_id, "incarnation": incarnation, "address": f"a{host}:1"}
        self.world.say(name, CellSought(**about, cell=list(cell)))
        return name

    def cell(self, name: str) -> list[WorkerKey]:
        """The cell that this connection was told of last."""
        return [part.key for part in self.world.last(CellFormed, name).cell]

    def ready(self, worker_id: int, host: int, incarnation: int = 0) -> None:
        """The head of a cell says hello, and trains."""
        name = f"w{worker_id}.{incarnation}"
        self.world.connect(name, "worker")
        said = replace(member(worker_id, host=f"a{host}"), incarnation=incarnation)
        self.world.say(name, m.WorkerHello(member=said, step=0))


def running(span: int, more: int = 0, **config: Any) -> Parts:
    """A worker over so many hosts runs. more: hosts that have no part of it."""
    parts = Parts(span + more, span, **config)
    for i in range(span):
        parts.looks(i, i)
    parts.ready(0, 0)
    return parts


def test_one_of_two_on_different_hosts_becomes_the_worker() -> None:
    parts = Parts(2)
    names = [parts.looks(i, i) for i in range(2)]
    assert parts.cell(names[0]) == parts.cell(names[1]) == [WorkerKey(0, 0), WorkerKey(1, 0)]
    parts.ready(0, 0)
    assert parts.world.coordinator.job.agreement.plan.worker_ids == (0,)


def test_a_worker_is_shown_once_with_the_host_of_each_process() -> None:
    parts = running(2)
    (shown,) = parts.world.coordinator.status()["workers"]
    assert (shown["worker_id"], shown["pids"], shown["hosts"]) == (0, [1000, 1010], ["a0", "a1"])
    joined = parts.world.report("worker_joined")
    assert (joined["pids"], joined["hosts"]) == ([1000, 1010], ["a0", "a1"])


def test_who_has_not_heard_of_its_cell_is_told_again() -> None:
    parts = Parts(2)
    for i in range(2):
        parts.looks(i, i)
    drop(parts.world, "p1.0")
    parts.world.clear()
    assert parts.cell(parts.looks(1, 1)) == [WorkerKey(0, 0), WorkerKey(1, 0)]


def test_a_part_that_dies_ends_the_others_and_a_host_with_room_takes_its_place() -> None:
    parts = running(2, more=1, slots=3)
    parts.world.clear()
    parts.world.exited(1, agent="a1")
    killed = parts.world.last(m.KillWorker, "a0")
    assert (killed.worker_id, killed.incarnation) == (0, 0)
    assert "its part on host a1 (slot 1) was lost" in killed.reason
    assert killed.again, "it is no loss of its own"
    parts.world.exited(0, agent="a0")
    parts.looks(0, 0, 1)
    assert parts.cell(parts.looks(2, 2)) == [WorkerKey(0, 1), WorkerKey(2, 0)]


def test_of_three_parts_each_ends_once() -> None:
    parts = running(3)
    parts.world.clear()
    parts.world.exited(2, agent="a2")
    assert sorted(k.worker_id for k in parts.world.messages(m.KillWorker)) == [0, 1]


def lost(hosts: int, **config: Any) -> Parts:
    """A worker over so many hosts runs, and loses the last one."""
    parts = running(hosts, quorum_wait_ns=60 * S, **config)
    parts.world.clear()
    for name in (f"a{hosts - 1}", f"p{hosts - 1}.0"):
        drop(parts.world, name)
    parts.world.wait(2 * S)
    for i in range(hosts - 1):
        parts.world.exited(i, agent=f"a{i}")
    return parts


@pytest.mark.parametrize("hosts", [2, 3])
def test_a_host_that_nobody_replaces_leaves_a_worker_over_fewer(hosts: int) -> None:
    """Before the job would be given up; and a later coordinator knows it."""
    parts = lost(hosts)
    names = [parts.looks(i, i, 1) for i in range(hosts - 1)]
    assert not parts.world.messages(CellFormed) and "cell_shrunk" not in parts.world.kinds()
    parts.world.wait(60 * S)
    assert parts.cell(names[0]) == [WorkerKey(i, 1) for i in range(hosts - 1)]
    shrunk = parts.world.report("cell_shrunk")
    assert (shrunk["worker_id"], shrunk["ranks"], shrunk["cause"]) == (0, 2 * (hosts - 1), Cause.HOST_LOST)
    assert f"{hosts - 1} of the {hosts} hosts that each worker has are left" in shrunk["reason"]
    parts.ready(0, 0, 1)
    assert parts.world.coordinator.job.agreement.plan.members[0].key == WorkerKey(0, 1)
    assert parts.world.restart().coordinator.job.slots.cells.hosts == hosts - 1


def test_it_is_so_at_once_where_on_failure_says_so() -> None:
    parts = lost(2, on_failure="shrink")
    assert parts.world.report("cell_shrunk")["ranks"] == 2
    assert parts.cell(parts.looks(0, 0, 1)) == [WorkerKey(0, 1)]


@pytest.mark.parametrize("config", [{"on_failure": "shrink"}, {}])
def test_a_host_with_room_comes_before_fewer(config: dict[str, Any]) -> None:
    """At once, without a wait for others."""
    parts = Parts(3, **config)
    for i in range(2):
        parts.looks(i, i)
    parts.ready(0, 0)
    for name in ("a1", "p1.0"):
        drop(parts.world, name)
    parts.world.wait(2 * S)
    parts.world.exited(0, agent="a0")
    assert parts.world.last(m.SetSlots, "a2") == m.SetSlots(worker_ids=[1], first=[1])
    parts.looks(0, 0, 1)
    assert parts.cell(parts.looks(1, 2, 1)) == [WorkerKey(0, 1), WorkerKey(1, 1)]
    assert "cell_shrunk" not in parts.world.kinds()


def test_so_does_a_slot_that_is_given_up() -> None:
    """As where lives die again and again on one of the hosts."""
    parts = running(2)
    for i in (1, 0):
        parts.world.exited(i, agent=f"a{i}")
    parts.world.say("a1", m.SlotLost(agent_id="a1", worker_id=1, cause=Cause.CRASH_LOOP, reason="it died again"))
    assert parts.world.report("cell_shrunk")["ranks"] == 2
    assert parts.cell(parts.looks(0, 0, 1)) == [WorkerKey(0, 1)]
    assert parts.world.coordinator.job.progress.ended is None


def test_a_host_that_comes_in_time_is_taken() -> None:
    parts = lost(2)
    parts.looks(0, 0, 1)
    parts.world.connect("a9", "agent")
    parts.world.say("a9", m.AgentHello(agent_id="a9", host="a9", workers=[], slots=0, room=1))
    parts.world.started(1, 1, "a9")
    parts.world.connect("p1.1", "worker")
    parts.world.say("p1.1", CellSought(worker_id=1, incarnation=1, address="a9:1"))
    assert parts.cell("p1.1") == [WorkerKey(0, 1), WorkerKey(1, 1)]
    assert "cell_shrunk" not in parts.world.kinds()


def test_the_head_that_dies_ends_its_parts() -> None:
    parts = running(2)
    parts.world.clear()
    parts.world.exited(0, agent="a0")
    assert parts.world.last(m.KillWorker, "a1").worker_id == 1


def test_a_restarted_coordinator_learns_of_cells_from_their_parts() -> None:
    parts = Parts(2)
    for i in range(2):
        life = m.WorkerLife(worker_id=i, incarnation=0, pid=1000 + i)
        parts.world.say(f"a{i}", m.WorkerStarted(agent_id=f"a{i}", worker=life))
    parts.ready(0, 0)
    parts.looks(1, 1, cell=(CellPart(0, 0, "a0:1"), CellPart(1, 0, "a1:1")))
    parts.world.clear()
    parts.world.exited(1, agent="a1")
    assert parts.world.last(m.KillWorker, "a0").worker_id == 0


def test_the_number_of_workers_is_fixed() -> None:
    parts = Parts(2)
    parts.world.connect("cli", "operate")
    parts.world.say("cli", m.Command(request=1, name="scale", args={"workers": 2}))
    assert "cell.hosts" in parts.world.last(m.CommandReply, "cli").error


def test_a_part_whose_head_died_while_there_was_no_coordinator_ends() -> None:
    parts = Parts(2)
    parts.looks(1, 1, cell=(CellPart(0, 0, "a0:1"), CellPart(1, 0, "a1:1")))
    parts.world.clear()
    parts.looks(0, 0, 1)
    assert parts.world.last(m.KillWorker, "a1").worker_id == 1
    parts.world.exited(1, agent="a1")
    assert parts.cell(parts.looks(1, 1, 1)) == [WorkerKey(0, 1), WorkerKey(1, 1)]


def test_of_three_parts_those_that_are_left_end_once_when_the_first_has_a_newer_life() -> None:
    parts = Parts(3, span=3)
    cell = tuple(CellPart(i, 0, f"a{i}:1") for i in range(3))
    for i in (1, 2):
        parts.looks(i, i, cell=cell)
    parts.world.clear()
    parts.looks(0, 0, 1)
    assert sorted(k.worker_id for k in parts.world.messages(m.KillWorker)) == [1, 2]


def test_a_part_of_a_head_that_has_a_newer_life_is_sent_away() -> None:
    parts = Parts(2)
    parts.looks(0, 0, 1)
    name = parts.looks(1, 1, cell=(CellPart(0, 0, "a0:1"), CellPart(1, 0, "a1:1")))
    assert parts.world.last(m.Dismissed, name).drained is False
