"""Workers that span hosts, in the coordinator: which lives are the parts of one, and who ends with whom."""

from __future__ import annotations

from collections.abc import Sequence
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
from everstep.protocol.coordinator.cell_parts import count_cells, matched
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
    slots = [list(hosts.values()).count(host) for host in "abcde"]
    assert [count_cells(slots, size, most) for most in (0, 1, 99)] == [min(most, len(cells)) for most in (0, 1, 99)]


class Parts:
    """Hosts with room for one part each, or for these, which begin to look for others."""

    def __init__(self, hosts: int, span: int = 2, *, rooms: Sequence[int] = (), **config: Any) -> None:
        rules = replace(CONFIG.hosts, span=span, cells=shapes_over(CellShape(2 * span), span))
        self.world = World(**{"workers": 1, "slots": span, "hosts": rules, **config})
        for i in range(hosts):
            self.greets(i, room=rooms[i] if rooms else 1)

    def greets(self, host: int, **about: Any) -> None:
        """The agent of a host is here."""
        name = f"a{host}"
        self.world.connect(name, "agent")
        self.world.say(
            name, m.AgentHello(**{"agent_id": name, "host": name, "workers": [], "slots": 0, "room": 1, **about})
        )

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


def gives_up(host: int, worker_id: int) -> m.SlotLost:
    return m.SlotLost(agent_id=f"a{host}", worker_id=worker_id, cause=Cause.CRASH_LOOP, reason="it died again")


@pytest.mark.parametrize("config", [{"on_failure": "shrink"}, {}])
def test_another_host_takes_a_slot_that_is_given_up(config: dict[str, Any]) -> None:
    """Before a worker gets fewer; the host that gave it up does not get it back."""
    parts = running(2, more=1, **config)
    parts.world.clear()
    parts.world.exited(1, agent="a1")
    parts.world.exited(0, agent="a0", again=True)
    parts.world.say("a1", gives_up(1, 1))
    assert parts.world.last(m.SetSlots, "a1").worker_ids == []
    assert parts.world.last(m.SetSlots, "a2").worker_ids == [1]
    assert parts.world.report("warning")["reason"] == "host a2 takes its slot, which host a1 gave up: it died again"
    for now in (parts.world, parts.world.restart()):
        parts.world = now
        for i in (0, 2):
            parts.greets(i)
        parts.greets(1, lost=[gives_up(1, 1)])
        parts.world.wait(60 * S)
        assert parts.world.last(m.SetSlots, "a1").worker_ids == []
        assert parts.world.last(m.SetSlots, "a2").worker_ids == [1]
    parts.looks(0, 0, 1)
    assert parts.cell(parts.looks(1, 2, 1)) == [WorkerKey(0, 1), WorkerKey(1, 1)]
    assert "cell_shrunk" not in parts.world.kinds()


def test_a_slot_that_waits_for_a_host_is_not_given_up_by_one_that_had_it_before() -> None:
    """It says so again with each hello."""
    parts = running(2, more=1)
    parts.world.exited(1, agent="a1")
    parts.world.say("a1", gives_up(1, 1))
    drop(parts.world, "a2")
    parts.world.wait(2 * S)
    assert "a2" not in parts.world.coordinator.job.agents.known
    parts.greets(1, lost=[gives_up(1, 1)])
    assert not parts.world.coordinator.job.slots.lost
    parts.greets(3)
    assert parts.world.last(m.SetSlots, "a3").worker_ids == [1]


def test_when_no_host_is_left_that_has_not_given_a_slot_up_workers_get_fewer() -> None:
    parts = running(2, more=1)
    parts.world.exited(1, agent="a1")
    parts.world.exited(0, agent="a0", again=True)
    parts.world.say("a1", gives_up(1, 1))
    assert "cell_shrunk" not in parts.world.kinds()
    parts.looks(1, 2, 1)
    parts.world.exited(1, 1, agent="a2")
    parts.world.say("a2", gives_up(2, 1))
    assert "1 of the 2 hosts" in parts.world.report("cell_shrunk")["reason"]
    assert parts.cell(parts.looks(0, 0, 1)) == [WorkerKey(0, 1)]


def test_a_slot_that_was_given_up_while_there_was_no_coordinator_is_taken_once_all_are_back() -> None:
    parts = running(2, more=1)
    parts.world = parts.world.restart()
    parts.greets(0)
    parts.greets(1, lost=[gives_up(1, 1)])
    parts.greets(2)
    assert "cell_shrunk" not in parts.world.kinds()
    parts.world.wait(60 * S)
    assert parts.world.last(m.SetSlots, "a2").worker_ids == [1]
    assert parts.world.coordinator.job.progress.ended is None and "cell_shrunk" not in parts.world.kinds()


@pytest.mark.parametrize(
    "config", [{"on_failure": "shrink"}, {"on_failure": "shrink", "min_workers": 2}, {"min_workers": 2}]
)
def test_a_host_with_room_for_too_few_does_not_cost_a_worker(config: dict[str, Any]) -> None:
    """Two workers over two hosts each, of which one with two slots is lost, and another has one: with one host each
    both go on; at once, or before the job would be given up."""
    parts = Parts(3, rooms=(2, 2, 1), workers=2, slots=4, quorum_wait_ns=60 * S, **config)
    for i, host in enumerate((0, 0, 1, 1)):
        assert i in parts.world.last(m.SetSlots, f"a{host}").worker_ids
        parts.looks(i, host)
    for i in range(2):
        parts.ready(i, 0)
    assert parts.world.coordinator.job.agreement.plan.worker_ids == (0, 1)
    for name in ("a1", "p2.0", "p3.0"):
        drop(parts.world, name)
    parts.world.wait(2 * S)
    for i in range(2):
        parts.world.exited(i, agent="a0", again=True)
    assert parts.world.last(m.SetSlots, "a2").worker_ids == [2]
    parts.looks(0, 0, 1)
    names = [parts.looks(1, 0, 1), parts.looks(2, 2, 1)]
    parts.ready(0, 0, 1)
    parts.world.wait(S if config.get("on_failure") else 60 * S)
    assert parts.cell(names[0]) == [WorkerKey(1, 1)], "nobody waits for another host"
    parts.ready(1, 0, 1)
    shrunk = parts.world.report("cell_shrunk")
    assert "room for 1 of 2 workers over 2 hosts each, and for 2 over 1" in shrunk["reason"]
    assert parts.world.coordinator.job.agreement.plan.worker_ids == (0, 1)
    assert parts.world.coordinator.job.progress.ended is None


def test_a_host_that_comes_in_time_is_taken() -> None:
    parts = lost(2)
    parts.looks(0, 0, 1)
    parts.greets(9)
    parts.world.started(1, 1, "a9")
    parts.world.connect("p1.1", "worker")
    parts.world.say("p1.1", CellSought(worker_id=1, incarnation=1, address="a9:1"))
    assert parts.cell("p1.1") == [WorkerKey(0, 1), WorkerKey(1, 1)]
    assert "cell_shrunk" not in parts.world.kinds()


@pytest.mark.parametrize("restarts", [False, True])
def test_a_part_that_ends_with_another_while_its_agent_is_away_is_no_loss_of_its_own(restarts: bool) -> None:
    """Also where the coordinator that has ended it is gone by then."""
    parts = running(2)
    drop(parts.world, "a0")
    parts.world.exited(1, agent="a1")
    assert not parts.world.messages(m.KillWorker)
    if restarts:
        parts.world = parts.world.restart()
    parts.greets(0, workers=[m.WorkerLife(worker_id=0, incarnation=0, pid=1000)])
    killed = parts.world.last(m.KillWorker, "a0")
    assert (killed.worker_id, killed.reason, killed.again) == (0, "it was evicted", True)
    for _ in range(2):
        parts.world.wait(5 * S)
        parts.world.clear()
        parts.world.beat((0, 0, "idle", 0), agent="a0")
    killed = parts.world.last(m.KillWorker, "a0")
    assert (killed.worker_id, killed.reason, killed.again) == (0, "it was evicted and still runs", True)


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


# ---- slots that hosts give up


def taken_over(more: int = 3, **config: Any) -> Parts:
    """Host a1 has given slot 1 up, and a2 runs it."""
    parts = running(2, more=more, **config)
    parts.world.exited(1, agent="a1")
    parts.world.exited(0, agent="a0", again=True)
    for _ in range(2):  # a message that comes twice
        parts.world.say("a1", gives_up(1, 1))
    parts.looks(1, 2, 1)
    return parts


def has(parts: Parts, host: int) -> list[int]:
    """The slots that a host was last told to keep filled."""
    told = parts.world.last(m.SetSlots, f"a{host}")
    return [] if told is None else told.worker_ids


def back(parts: Parts, *hosts: int, **lives: list[m.WorkerLife]) -> None:
    """Another coordinator begins, and the agents of these hosts come back to it."""
    parts.world = parts.world.restart()
    for host in hosts:
        parts.greets(host, workers=lives.get(f"a{host}", []))


LIFE = m.WorkerLife(worker_id=1, incarnation=1, pid=1011)


@pytest.mark.parametrize("restarts", [False, True])
def test_a_slot_that_two_hosts_give_up_goes_to_no_third(restarts: bool) -> None:
    """Its worker ends everywhere. Another coordinator knows of the first one from the journal alone."""
    parts = taken_over()
    if restarts:
        back(parts, 0, 2, 3, 4, a2=[LIFE])
        parts.world.wait(5 * S)
        assert not parts.world.coordinator.job.slots.lost
    parts.world.exited(1, 1, agent="a2")
    parts.world.say("a2", gives_up(2, 1))
    assert set(parts.world.coordinator.job.slots.lost) == {1}
    assert has(parts, 3) == has(parts, 4) == []
    assert parts.world.report("cell_shrunk")["ranks"] == 2
    text = "its slot was given up: hosts a1, a2 gave it up in turn, last: it died again"
    assert parts.world.report("warning")["reason"] == text
    journal = [entry for entry in parts.world.journal if entry["kind"] in ("let_go", "slot_lost")]
    assert [entry["kind"] for entry in journal] == ["let_go", "let_go", "slot_lost"]


def test_a_coordinator_that_is_lost_before_it_gives_a_slot_up_has_the_next_one_do_so() -> None:
    parts = taken_over()
    parts.world.exited(1, 1, agent="a2")
    parts.world.say("a2", gives_up(2, 1))
    kept = [entry for entry in parts.world.journal if entry["kind"] not in ("slot_lost", "cell")]
    parts.world = parts.world.restart(journal=kept)
    for host in (0, 3, 4):
        parts.greets(host)
    parts.world.wait(5 * S)
    assert set(parts.world.coordinator.job.slots.lost) == {1} and has(parts, 3) == has(parts, 4) == []


def test_a_host_that_is_lost_has_given_nothing_up() -> None:
    parts = taken_over()
    for name in ("a2", "p1.1"):
        drop(parts.world, name)
    parts.world.wait(2 * S)
    assert has(parts, 3) == [1] and not parts.world.coordinator.job.slots.lost
    parts.looks(1, 3, 2)
    parts.world.exited(1, 2, agent="a3")
    parts.world.say("a3", gives_up(3, 1))
    assert set(parts.world.coordinator.job.slots.lost) == {1}


def test_a_host_does_not_get_a_slot_again_that_it_has_given_up() -> None:
    """Though it has room, since its other slot moved while it was away."""
    parts = Parts(4, rooms=(2, 2, 1, 1), workers=2, slots=4)
    assert [has(parts, i) for i in range(4)] == [[0, 1], [2, 3], [], []]
    parts.world.say("a1", gives_up(1, 3))
    assert has(parts, 2) == [3]
    drop(parts.world, "a1")
    parts.world.wait(2 * S)
    assert has(parts, 3) == [2]
    parts.greets(1, room=2)
    drop(parts.world, "a2")
    parts.world.wait(2 * S)
    assert has(parts, 1) == [], "the slot that it gave up waits for another host"
    parts.greets(5)
    assert has(parts, 5) == [3]


def test_slots_that_were_given_up_without_a_coordinator_end_the_job_with_the_reason() -> None:
    parts = running(2, quorum_wait_ns=600 * S)
    parts.world = parts.world.restart()
    for host in (0, 1):
        parts.greets(host, lost=[gives_up(host, host)])
    parts.world.wait(5 * S)
    ended = parts.world.coordinator.job.progress.ended
    assert ended is not None and ended.exit_code == 1
    assert ended.reason.startswith("slot 1 was given up (it died again); 0 of the 1 workers")


def test_a_slot_that_is_given_up_before_its_life_has_ended_is_lost_when_that_has() -> None:
    parts = running(2)
    parts.world.say("a1", gives_up(1, 1))
    assert not parts.world.coordinator.job.slots.lost
    parts.world.exited(1, agent="a1")
    assert set(parts.world.coordinator.job.slots.lost) == {1}
    assert parts.world.report("cell_shrunk")["ranks"] == 2


def test_a_job_whose_head_has_yet_to_hear_of_its_part_does_not_end() -> None:
    """The slot was given up without a coordinator; once the head has ended, too, the worker gets fewer hosts."""
    parts = running(2)
    plan = parts.world.plan
    parts.world = parts.world.restart()
    parts.greets(0, workers=[m.WorkerLife(worker_id=0, incarnation=0, pid=1000)])
    parts.world.hello(0, plan=plan, host="a0")
    parts.greets(1, lost=[gives_up(1, 1)])
    parts.world.wait(5 * S)
    assert parts.world.coordinator.job.progress.ended is None and not parts.world.coordinator.job.slots.lost
    parts.world.exited(0, agent="a0", again=True)
    assert set(parts.world.coordinator.job.slots.lost) == {1}
    assert parts.world.report("cell_shrunk")["ranks"] == 2
    assert parts.world.coordinator.job.progress.ended is None


@pytest.mark.parametrize("returns", [True, False])
def test_a_host_with_room_that_may_come_back_is_waited_for(returns: bool) -> None:
    parts = running(2, more=1)
    parts.world.exited(1, agent="a1")
    drop(parts.world, "a2")
    parts.world.say("a1", gives_up(1, 1))
    assert not parts.world.coordinator.job.slots.lost
    if returns:
        parts.greets(2)
        assert has(parts, 2) == [1]
    else:
        parts.world.wait(20 * S)
        assert set(parts.world.coordinator.job.slots.lost) == {1}


def test_a_host_that_gave_a_slot_up_has_room_for_one_less_though_the_slot_is_lost() -> None:
    """Also by the journal of an earlier version, which does not name the host."""
    parts = Parts(2, slots=3)
    parts.world.say("a1", gives_up(1, 1))
    assert set(parts.world.coordinator.job.slots.lost) == {1} and has(parts, 1) == []
    parts.world = parts.world.restart(journal=[e for e in parts.world.journal if e["kind"] != "let_go"])
    parts.greets(0)
    parts.greets(1, lost=[gives_up(1, 1)])
    parts.world.wait(5 * S)
    assert has(parts, 0) == [0] and has(parts, 1) == []


# ---- what is said of workers that get fewer hosts


@pytest.mark.parametrize("restarts", [False, True])
def test_a_worker_that_goes_on_as_it_is_gets_no_smaller_cell_before_it_ends(restarts: bool) -> None:
    parts = Parts(4, workers=2, slots=4, on_failure="shrink")
    for i in range(4):
        parts.looks(i, i)
    for i in (0, 2):
        parts.ready(i, i)
    plan = parts.world.plan
    assert plan is not None and plan.worker_ids == (0, 2)
    for name in ("a3", "p3.0"):
        drop(parts.world, name)
    parts.world.wait(2 * S)
    assert [r.fields["worker_id"] for r in parts.world.reports if r.kind == "cell_shrunk"] == [2]
    if restarts:
        plan = parts.world.plan
        lives = {f"a{i}": [m.WorkerLife(worker_id=i, incarnation=0, pid=1000 + 10 * i)] for i in (0, 1)}
        back(parts, 0, 1, 2, **lives)
        parts.world.hello(0, plan=plan, host="a0")
        parts.looks(1, 1, cell=(CellPart(0, 0, "a0:1"), CellPart(1, 0, "a1:1")))
        parts.world.wait(5 * S)
    parts.world.clear()
    parts.world.exited(1, agent="a1")
    shrunk = parts.world.report("cell_shrunk")
    assert (shrunk["worker_id"], shrunk["ranks"]) == (0, 2) and parts.world.kinds().count("cell_shrunk") == 1


def test_a_worker_that_began_over_fewer_hosts_gets_no_smaller_cell_when_it_ends() -> None:
    parts = lost(2, on_failure="shrink")
    parts.looks(0, 0, 1)
    parts.ready(0, 0, 1)
    parts.world.exited(0, 1, agent="a0")
    assert parts.world.kinds().count("cell_shrunk") == 1


@pytest.mark.parametrize("restarts", [False, True])
def test_the_host_of_a_workers_other_part_may_come_back_before_the_job_ends(restarts: bool) -> None:
    """It is lost while the slot of another host is nobody's: over one host it could go on."""
    parts = running(2, quorum_wait_ns=600 * S)
    parts.world.exited(1, agent="a1")
    parts.world.exited(0, agent="a0", again=True)
    drop(parts.world, "a0")
    if restarts:
        parts.world = parts.world.restart()
        parts.greets(1, lost=[gives_up(1, 1)])
    else:
        parts.world.say("a1", gives_up(1, 1))
    parts.world.wait(30 * S)
    assert parts.world.coordinator.job.progress.ended is None
    parts.greets(0)
    assert set(parts.world.coordinator.job.slots.lost) == {1} and has(parts, 0) == [0]
    assert parts.world.report("cell_shrunk")["ranks"] == 2


def test_what_a_host_gives_up_that_is_anothers_does_not_count() -> None:
    """While it was cut off it went on with lives of its own."""
    parts = running(2, more=3)
    for name in ("a1", "p1.0"):
        drop(parts.world, name)
    parts.world.wait(2 * S)
    assert has(parts, 2) == [1]
    parts.greets(1, lost=[gives_up(1, 1)])
    parts.looks(1, 2, 1)
    parts.world.exited(1, 1, agent="a2")
    parts.world.say("a2", gives_up(2, 1))
    assert not parts.world.coordinator.job.slots.lost and [1] in [has(parts, i) for i in (1, 3, 4)]
