"""Both channels, several members as threads of one process: bits and strides, order, aborts, changes of generation."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest
import torch
from parallel_cases import plan_of, together
from torch.distributed import HashStore

from everstep.base.errors import CollectiveAborted, InvariantViolation
from everstep.base.plan import Member, Plan, WorkerKey
from everstep.base.ports import Channel, Hop
from everstep.exact.layout import GradientLayout
from everstep.parallel.channel import GroupChannel, SharedMemoryChannel
from everstep.parallel.group import GroupTransport

LANES = 8


class Crew:
    """Channels of workers 0..n-1 in this process."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.store = HashStore()
        self.carriers: dict[int, GroupTransport] = {}
        self.channels: dict[int, Channel] = {}
        self.ticks = 0
        self.waiting = threading.Event()

    def tick(self) -> None:
        self.ticks += 1
        self.waiting.set()

    def hire(self, i: int) -> None:
        key = WorkerKey(i, 0)
        if self.kind == "shm":
            self.channels[i] = SharedMemoryChannel(key, self.tick)
        else:
            self.carriers[i] = GroupTransport(
                key, GradientLayout((), (), 0), LANES, self.store, self.tick, key=b"k" * 32
            )
            self.channels[i] = GroupChannel(key, self.carriers[i])

    def open(self, generation: int, ids: list[int]) -> Plan:
        for i in ids:
            if i not in self.channels:
                self.hire(i)
        members = [Member(i, 0, "here", os.getpid(), "127.0.0.1:1", self.channels[i].segment) for i in ids]
        plan = plan_of(generation, members, LANES)

        def one(i: int) -> None:
            if self.carriers:
                self.carriers[i].open(plan)
            self.channels[i].open(plan)

        assert together(*(lambda i=i: one(i) for i in ids)) == [None] * len(ids)
        return plan

    def abort(self, i: int, generation: int) -> None:
        self.channels[i].abort(generation)
        if self.carriers:
            self.carriers[i].abort(generation)

    def close(self) -> None:
        for found in (*self.channels.values(), *self.carriers.values()):
            found.close()


@pytest.fixture(params=["shm", "sockets"])
def crew(request: pytest.FixtureRequest) -> Iterator[Crew]:
    found = Crew(request.param)
    yield found
    found.close()


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def zoo() -> list[torch.Tensor]:
    """All kinds of tensors whose strides are dense."""
    odd = torch.tensor([0.0, -0.0, float("nan"), float("inf"), 1e-42])
    return [
        torch.randn(3, 4).t(),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.tensor(3.5),
        torch.empty(0, 3),
        torch.tensor([True, False, True]),
        torch.arange(5) - (1 << 40),
        torch.randn(7).bfloat16(),
        torch.randn(4).half(),
        torch.randn(3).double(),
        torch.randn(5, requires_grad=True),
        torch.randn(4, 1, 3).permute(2, 1, 0),
        odd,
    ]


def test_bits_dtypes_shapes_and_dense_strides_arrive(crew: Crew) -> None:
    crew.open(1, [0, 1])
    key = Hop(1, "act", 1, 0)
    sent = zoo()
    crew.channels[0].send(1, key, sent, b"a tree")
    found, meta = crew.channels[1].recv(0, key)
    assert meta == b"a tree" and len(found) == len(sent)
    for new, old in zip(found, sent, strict=True):
        assert (new.dtype, new.shape, new.stride()) == (old.dtype, old.shape, old.stride())
        assert bits(new) == bits(old) and new.data_ptr() % 64 == 0 and not new.requires_grad


@pytest.mark.parametrize(
    "given", [torch.randn(10)[::2], torch.randn(1, 3).expand(4, 3), torch.randn(6, 6)[1:5, 2:4], torch.ones(2) * 1j]
)
def test_holes_and_overlaps_become_contiguous(crew: Crew, given: torch.Tensor) -> None:
    crew.open(1, [0, 1])
    key = Hop(1, "grad", 0, 3)
    crew.channels[1].send(0, key, [given.conj()])
    (found,), _ = crew.channels[0].recv(1, key)
    assert torch.equal(found, given.conj()) and found.is_contiguous()


def test_what_was_received_is_the_receivers_own(crew: Crew) -> None:
    """It may be changed in place, each tensor by itself, and outlives what becomes of the sender's memory."""
    crew.open(1, [0, 1])
    first, second = torch.randn(1000), torch.randn(1000)
    crew.channels[0].send(1, Hop(1, "act", 1, 0), [first, second])
    (a, b), _ = crew.channels[1].recv(0, Hop(1, "act", 1, 0))
    for channel in crew.channels.values():
        channel.forget(1)
    crew.channels[0].send(1, Hop(2, "act", 1, 0), [second, first])
    crew.channels[1].recv(0, Hop(2, "act", 1, 0))
    assert torch.equal(a, first) and torch.equal(b, second)
    version = b._version
    a.add_(1)
    assert b._version == version and torch.equal(b, second)
    a.requires_grad_()
    (a * b).sum().backward()
    assert a.grad is not None and torch.equal(a.grad, b)


def test_the_sender_may_change_its_tensor_at_once(crew: Crew) -> None:
    crew.open(1, [0, 1])
    given = torch.randn(100_000)
    expected = given.clone()
    crew.channels[0].send(1, Hop(1, "act", 1, 0), [given])
    given.zero_()
    (found,), _ = crew.channels[1].recv(0, Hop(1, "act", 1, 0))
    assert torch.equal(found, expected)


def test_many_lanes_in_flight_come_in_any_order(crew: Crew) -> None:
    """Both directions, sizes that change from lane to lane, some expected before and some not."""
    crew.open(1, [0, 1, 2])
    for step in (1, 2, 3):
        keys = [Hop(step, kind, part, lane) for kind in ("act", "grad") for part in (0, 5) for lane in range(LANES)]
        given = {
            key: torch.full((1 + 700 * ((key.lane * 3 + step) % 5),), float(100 * key.part + key.lane + len(key.kind)))
            for key in keys
        }

        def one(me: int, keys: list[Hop] = keys, given: dict[Hop, torch.Tensor] = given) -> None:
            others = [w for w in (0, 1, 2) if w != me]
            channel = crew.channels[me]
            for w in others:
                for key in keys[: 10 * me]:
                    channel.expect(w, key)
            for w in others:
                for key in keys:
                    channel.send(w, key, [given[key] + me], bytes([me, key.lane]))
            for w in reversed(others):
                for key in reversed(keys):
                    (found,), meta = channel.recv(w, key)
                    assert torch.equal(found, given[key] + w) and meta == bytes([w, key.lane])

        assert together(*(lambda me=me: one(me) for me in (0, 1, 2))) == [None] * 3
        for channel in crew.channels.values():
            channel.forget(step)


def test_a_worker_may_write_to_itself(crew: Crew) -> None:
    for generation, ids in ((1, [0]), (2, [0, 1])):
        crew.open(generation, ids)
        given = torch.randn(9)
        crew.channels[0].send(0, Hop(1, "tied", 0, 0), [given], b"m")
        (found,), meta = crew.channels[0].recv(0, Hop(1, "tied", 0, 0))
        assert torch.equal(found, given) and meta == b"m" and found.data_ptr() != given.data_ptr()


def test_a_message_without_tensors(crew: Crew) -> None:
    crew.open(1, [0, 1])
    crew.channels[0].send(1, Hop(4, "eval", 1, 2), [], b"nothing")
    assert crew.channels[1].recv(0, Hop(4, "eval", 1, 2)) == ([], b"nothing")


def test_abort_frees_who_waits_and_refuses_what_comes_after(crew: Crew) -> None:
    crew.open(3, [0, 1])
    crew.waiting.clear()

    def control() -> None:
        assert crew.waiting.wait(60)
        crew.abort(1, 3)

    (fault, _) = together(lambda: crew.channels[1].recv(0, Hop(1, "act", 1, 0)), control)
    assert isinstance(fault, CollectiveAborted) and fault.accused == ()
    for call in (
        lambda: crew.channels[1].send(0, Hop(1, "grad", 0, 0), []),
        lambda: crew.channels[1].recv(0, Hop(1, "act", 1, 0)),
    ):
        with pytest.raises(CollectiveAborted):
            call()


def test_abort_of_a_generation_before_it_begins(crew: Crew) -> None:
    crew.open(1, [0, 1])
    crew.abort(1, 2)
    with pytest.raises(CollectiveAborted):
        crew.channels[1].recv(0, Hop(1, "act", 1, 0))


def test_a_redo_never_finds_what_an_older_generation_sent(crew: Crew) -> None:
    """Received or not: the same hop in the next generation is what was sent there."""
    crew.open(1, [0, 1])
    read, unread = Hop(5, "act", 1, 0), Hop(5, "act", 1, 1)
    for key in (read, unread):
        crew.channels[0].send(1, key, [torch.full((500,), 1.0)], b"old")
    crew.channels[1].recv(0, read)
    crew.open(2, [0, 1])
    crew.waiting.clear()

    def sender() -> None:
        assert crew.waiting.wait(60)  # the receiver is looking for it
        for key in (read, unread):
            crew.channels[0].send(1, key, [torch.full((500,), 2.0)], b"new")

    def receiver() -> None:
        for key in (read, unread):
            (found,), meta = crew.channels[1].recv(0, key)
            assert meta == b"new" and bool((found == 2.0).all())

    assert together(sender, receiver) == [None, None]


def test_who_is_no_member_cannot_be_written_to(crew: Crew) -> None:
    crew.open(1, [0, 1])
    with pytest.raises(InvariantViolation, match="no member"):
        crew.channels[0].send(2, Hop(1, "act", 1, 0), [])


def test_a_receiver_that_lags_behind_notices_that_the_sender_has_left() -> None:
    """Stopped in an old generation, its message overwritten: it must not take the new bits for the old ones."""
    crew = Crew("shm")
    try:
        plan = crew.open(1, [0, 1])
        key = Hop(1, "act", 1, 0)
        crew.channels[0].send(1, key, [torch.full((100,), 1.0)])
        newer = plan_of(2, list(plan.members), LANES)
        crew.channels[0].open(newer)
        crew.channels[0].send(1, key, [torch.full((100,), 2.0)])
        with pytest.raises(CollectiveAborted, match="newer"):
            crew.channels[1].recv(0, key)
    finally:
        crew.close()


def test_a_message_that_is_overwritten_while_it_is_copied_is_thrown_away(monkeypatch: pytest.MonkeyPatch) -> None:
    crew = Crew("shm")
    try:
        plan = crew.open(1, [0, 1])
        key = Hop(1, "act", 1, 0)
        crew.channels[0].send(1, key, [torch.full((100,), 1.0)])
        newer = plan_of(2, list(plan.members), LANES)
        from everstep.parallel import channel as module

        real = module.parse_head

        def meanwhile(head: bytes) -> object:
            crew.channels[0].open(newer)
            crew.channels[0].send(1, key, [torch.full((100,), 2.0)])
            return real(head)

        monkeypatch.setattr(module, "parse_head", meanwhile)
        with pytest.raises(CollectiveAborted, match="newer"):
            crew.channels[1].recv(0, key)
    finally:
        crew.close()


def test_the_log_may_go_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """More messages than it has records, to a member that never receives any, before it does."""
    monkeypatch.setattr("everstep.parallel.channel._RECORDS", 64)
    crew = Crew("shm")
    try:
        crew.open(1, [0, 1, 2])
        for step in range(1, 30):
            for lane in range(20):
                crew.channels[0].send(2, Hop(step, "act", 1, lane), [])
            for i in (1, 0, 2):
                crew.channels[i].forget(step)
        crew.channels[0].send(1, Hop(30, "act", 1, 0), [torch.ones(3)])
        (found,), _ = crew.channels[1].recv(0, Hop(30, "act", 1, 0))
        assert torch.equal(found, torch.ones(3))
        with pytest.raises(InvariantViolation, match="forget"):
            for lane in range(64):
                crew.channels[0].send(2, Hop(31, "act", 1, lane), [])
    finally:
        crew.close()
