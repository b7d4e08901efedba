"""Workers that span hosts, in the coordinator: which lives are the parts of one, and who ends with whom."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from coordinator_harness import CONFIG, World, drop, member
from hypothesis import given
from hypothesis import strategies as st

from everstep.base.plan import WorkerKey
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

    def __init__(self, hosts: int, **config: Any) -> None:
        rules = replace(CONFIG.hosts, span=2)
        self.world = World(**{"workers": 1, "slots": 2, "hosts": rules, **config})
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


def test_one_of_two_on_different_hosts_becomes_the_worker() -> None:
    parts = Parts(2)
    names = [parts.looks(i, i) for i in range(2)]
    assert parts.cell(names[0]) == parts.cell(names[1]) == [WorkerKey(0, 0), WorkerKey(1, 0)]
    parts.ready(0, 0)
    assert parts.world.coordinator.job.agreement.plan.worker_ids == (0,)


def test_a_worker_is_shown_once_with_the_host_of_each_process() -> None:
    parts = Parts(2)
    for i in range(2):
        parts.looks(i, i)
    parts.ready(0, 0)
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
    parts = Parts(3, slots=3)
    for i in range(2):
        parts.looks(i, i)
    parts.ready(0, 0)
    parts.world.clear()
    parts.world.exited(1, agent="a1")
    killed = parts.world.last(m.KillWorker, "a0")
    assert (killed.worker_id, killed.incarnation) == (0, 0)
    assert "its part on host a1 (slot 1) was lost" in killed.reason
    parts.world.exited(0, agent="a0")
    parts.looks(0, 0, 1)
    assert parts.cell(parts.looks(2, 2)) == [WorkerKey(0, 1), WorkerKey(2, 0)]


def test_the_head_that_dies_ends_its_parts() -> None:
    parts = Parts(2)
    for i in range(2):
        parts.looks(i, i)
    parts.ready(0, 0)
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


def test_a_part_of_a_head_that_has_a_newer_life_is_sent_away() -> None:
    parts = Parts(2)
    parts.looks(0, 0, 1)
    name = parts.looks(1, 1, cell=(CellPart(0, 0, "a0:1"), CellPart(1, 0, "a1:1")))
    assert parts.world.last(m.Dismissed, name).drained is False
