"""The donor: what it gives and feeds, what it waits for, and when it lets a follower go."""

from __future__ import annotations

import json
import queue
import threading
from typing import Any

import pytest
import torch

from everstep.base.errors import ProtocolError
from everstep.base.extents import WHOLE
from everstep.base.ports import Piece, Reduced
from everstep.checkpoint.vault import StageState
from everstep.exact.reduce import TiePlace
from everstep.protocol.driver.records import encode
from everstep.protocol.moving.giver import MAX_BACKLOG
from everstep.protocol.step_types import Key, Record
from everstep.train.heal import (
    Donor,
    FollowedStep,
    Offer,
    OfferHead,
    ReceivedOffer,
    StageGradient,
    next_item,
    offered,
    receive_head,
)

RECORDS = {1: Record(0, b"r")}
GENEROUS_S = 10.0


class Snapshot:
    """Four bytes of state; remembers whether somebody waited for its copy."""

    n_blocks = 1

    def __init__(self) -> None:
        self.waited = False

    def wait(self, timeout_s: float | None = None) -> bool:
        self.waited = True
        return True

    def manifest(self) -> dict[str, Any]:
        return {"blocks": ["x"], "block_bytes": 4}

    def read_block(self, index: int) -> memoryview:
        return memoryview(b"abcd")

    def release(self) -> None:
        raise AssertionError("what is on offer is not the donor's to give back")


class End:
    """One end of a connection; what is sent waits for `open`."""

    def __init__(self, sent: queue.SimpleQueue[Any], came: queue.SimpleQueue[Any], open: threading.Event) -> None:
        self._sent, self._came, self._open = sent, came, open

    def send_json(self, value: Any) -> None:
        assert self._open.wait(GENEROUS_S)
        self._sent.put(value)

    def send_bytes(self, parts: list[Any]) -> None:
        self.send_json(b"".join(bytes(part) for part in parts))

    def recv_json(self) -> Any:
        return self._came.get(timeout=GENEROUS_S)

    def recv_bytes(self, max_bytes: int = 1 << 30) -> Any:
        found = self.recv_json()
        assert len(found) <= max_bytes
        return found

    def recv_into(self, target: Any) -> None:
        memoryview(target).cast("B")[:] = self.recv_bytes()


class Pipe:
    """Both ends of a connection; nothing passes to the joiner before `open` is set."""

    def __init__(self) -> None:
        self.open, always = threading.Event(), threading.Event()
        always.set()
        self._items: queue.SimpleQueue[Any] = queue.SimpleQueue()
        asked: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.donor, self.joiner = End(self._items, asked, self.open), End(asked, self._items, always)

    def left(self) -> list[Any]:
        found = []
        while not self._items.empty():
            found.append(self._items.get())
        return found


class Follower:
    """A joiner that has asked a donor for stages, and the handler thread that serves it."""

    def __init__(self, donor: Donor, asked: threading.Event, stages: tuple[int, ...] = (0,)) -> None:
        self.pipe = Pipe()
        asked.clear()
        request = {"kind": "heal", "stages": list(stages), "ranges": "first"}
        self.thread = threading.Thread(target=donor.handle, args=(self.pipe.donor, request), daemon=True)
        self.thread.start()
        assert asked.wait(GENEROUS_S)

    def ended(self) -> bool:
        self.thread.join(GENEROUS_S)
        return not self.thread.is_alive()

    def offer(self) -> ReceivedOffer:
        """What is offered, with its one block."""
        self.pipe.open.set()
        joiner = self.pipe.joiner
        head = receive_head(joiner)  # type: ignore[arg-type]
        joiner.send_json({"stage": 0, "blocks": [[0, 1]]})
        state = StageState(json.loads(head.manifests[0]), [memoryview(joiner.recv_bytes())])
        joiner.send_json({"enough": True})
        return offered(head, {0: state})

    def next_step(self, numel: int = 3) -> FollowedStep:
        while True:
            item = next_item(self.pipe.joiner, {0: numel})  # type: ignore[arg-type]
            if isinstance(item, FollowedStep):
                return item


def gradient(presence: bytes = b"\x01\x00") -> StageGradient:
    pieces = (Piece(0, 2, torch.tensor([1.0, 2.0])), Piece(2, 3, torch.tensor([3.0])))
    received = {TiePlace("w", 0, 1): torch.tensor([5.0]), TiePlace("v", 1, 1): None}
    return StageGradient(Reduced(4, pieces, presence, ((0, 2),)), received)


def feed(donor: Donor, step: int, stage: int = 0) -> None:
    donor.feed(step, RECORDS, {stage: gradient()}, {stage: 3}, lambda: b"loop")


def start(stages: tuple[int, ...] = (0,)) -> tuple[Donor, Follower, Snapshot]:
    """A donor that has offered its state to one follower."""
    asked = threading.Event()
    donor, snapshot = Donor(lambda joint: asked.set()), Snapshot()
    follower = Follower(donor, asked, stages)
    held = {stage: [(snapshot, WHOLE)] for stage in stages}
    told = {"records": RECORDS, "gathers": {Key(3, 0): RECORDS}, "application": b"app"}
    offer = Offer(position=Key(3, 1), held=held, **told)  # type: ignore[arg-type]
    donor.offer(lambda asked: offer)
    return donor, follower, snapshot


def test_a_follower_gets_the_state_and_then_every_step_as_it_was_reduced() -> None:
    donor, follower, _ = start()
    got = follower.offer()
    assert (got.position, got.records, got.gathers, got.application) == (
        Key(3, 1),
        RECORDS,
        {Key(3, 0): RECORDS},
        b"app",
    )
    assert bytes(got.states[0].blocks[0]) == b"abcd"
    feed(donor, 4)
    item = follower.next_step()
    assert (item.step, item.records, item.application) == (4, RECORDS, b"loop")
    found = item.gradients[0]
    assert found.reduced.presence == b"\x01\x00", "a parameter that had no gradient has none there either"
    assert found.reduced.pieces[0].data.tolist() == [1.0, 2.0, 3.0]
    tied = {p.name: None if t is None else t.tolist() for p, t in found.received.items()}
    assert tied == {"w": [5.0], "v": None}
    donor.cut()
    assert follower.ended()


def test_a_donor_that_holds_parts_of_a_gradient_feeds_these() -> None:
    """Where they begin and end is said; ranges that follow each other are one."""
    donor, follower, _ = start()
    follower.offer()
    pieces = tuple(Piece(k, k + 1, torch.tensor([10.0 + k])) for k in (0, 2, 3, 6))
    part = StageGradient(Reduced(4, pieces, b"\x01\x00", ((0, 1),)))
    donor.feed(4, RECORDS, {0: part}, {0: 7}, lambda: b"loop")
    found = follower.next_step(7).gradients[0].reduced.pieces
    assert [(p.start, p.stop, p.data.tolist()) for p in found] == [(0, 1, [10.0]), (2, 4, [12.0, 13.0]), (6, 7, [16.0])]
    donor.cut()
    assert follower.ended()


@pytest.mark.parametrize(
    "ranges", [[[0, 8]], [[-1, 7]], [[2, 4], [3, 7]], [[4, 7], [0, 2]], [[3, 3]], [[0]], "x", None]
)
def test_ranges_that_no_donor_feeds_are_refused(ranges: object) -> None:
    told = {"presence": 2, "numel": 7, "ranges": ranges, "tied": [], "absent": []}
    pipe = Pipe()
    pipe.open.set()
    pipe.donor.send_json({"kind": "step", "step": 4, "stages": {"0": told}})
    pipe.donor.send_bytes([encode(RECORDS)])
    pipe.donor.send_bytes([b"loop"])
    with pytest.raises(ProtocolError):
        next_item(pipe.joiner, {0: 7})  # type: ignore[arg-type]


def test_of_the_names_that_a_donor_tells_a_bounded_number_is_taken() -> None:
    head = OfferHead(position=Key(1, 0), changed=tuple(map(str, range(99))), manifests=[], there={})
    assert offered(head, {}).changed == tuple(map(str, range(50)))


def test_nobody_is_offered_anything_without_having_asked() -> None:
    donor = Donor()
    donor.offer(lambda asked: 1 / 0)  # type: ignore[arg-type, return-value]
    donor.feed(4, RECORDS, {}, {}, lambda: 1 / 0)  # type: ignore[arg-type, return-value]


def test_a_feed_is_cut_when_the_state_jumps() -> None:
    donor, follower, _ = start()
    follower.offer()
    donor.cut()
    assert follower.ended(), "who follows has to begin anew"


def test_a_follower_that_stays_behind_is_let_go() -> None:
    donor, follower, _ = start()
    for number in range(MAX_BACKLOG):
        feed(donor, 4 + number)
    follower.offer()
    assert [follower.next_step().step for _ in range(MAX_BACKLOG)] == list(range(4, 4 + MAX_BACKLOG))
    donor.cut()
    assert follower.ended()
    donor, follower, _ = start()
    for number in range(MAX_BACKLOG + 1):
        feed(donor, 4 + number)
    follower.offer()
    assert follower.ended() and follower.pipe.left() == [], "its memory is bounded"


def test_a_follower_of_a_stage_that_is_not_held_any_more_is_let_go() -> None:
    donor, follower, _ = start()
    feed(donor, 4, stage=1)
    follower.offer()
    assert follower.ended() and follower.pipe.left() == []


def test_an_update_waits_until_what_is_on_offer_has_been_copied() -> None:
    donor, follower, snapshot = start()
    assert not snapshot.waited
    donor.busy_snapshot()
    assert snapshot.waited
    donor.cut()
    follower.offer()
    assert follower.ended()


def test_an_update_waits_for_the_copy_of_one_that_is_let_go_too() -> None:
    """It gets the whole offer all the same, and would take a state that was half updated for a sound one."""
    donor, follower, snapshot = start()
    feed(donor, 4, stage=1)
    donor.busy_snapshot()
    assert snapshot.waited
    follower.offer()
    assert follower.ended()


def test_an_update_waits_for_what_is_on_the_shelf_and_not_for_what_was() -> None:
    donor, snapshot = Donor(), Snapshot()
    donor.shelve(("settle", 2), Offer(position=Key(3, 0), held={0: [(snapshot, WHOLE)]}))
    donor.unshelve("settle")
    donor.busy_snapshot()
    assert not snapshot.waited
    donor.shelve(("settle", 3), Offer(position=Key(3, 0), held={0: [(snapshot, WHOLE)]}))
    donor.busy_snapshot()
    assert snapshot.waited


def test_who_settles_is_given_what_is_shelved_for_its_generation() -> None:
    donor, pipe = Donor(), Pipe()
    donor.shelve(("settle", 3), Offer(position=Key(3, 0), records=RECORDS, held={0: [(Snapshot(), WHOLE)]}))
    pipe.open.set()
    request = {"kind": "settle", "generation": 3, "ranges": "first"}
    pipe.joiner.send_json({"enough": True})
    donor.handle(pipe.donor, {**request, "stages": [0]})  # type: ignore[arg-type]
    assert receive_head(pipe.joiner).records == RECORDS  # type: ignore[arg-type]
    donor.handle(pipe.donor, {**request, "stages": [1]})  # type: ignore[arg-type]
    assert pipe.left() == [], "a stage that is not there is not given"


def test_other_requests_go_where_they_belong() -> None:
    seen: list[str] = []
    donor = Donor(others={"keep": lambda connection, request: seen.append(request["kind"])})
    donor.handle(Pipe(), {"kind": "keep"})  # type: ignore[arg-type]
    donor.handle(Pipe(), {"kind": "nonsense"})  # type: ignore[arg-type]
    assert seen == ["keep"]


@pytest.mark.parametrize(
    "ranges", [[[0, 0], [0, 3]], [[0, 3], [3, 3]], [[1, 2], [0, 1]], [[0, 2], [1, 3]], [[0, 4]], [[-1, 3]], [[0]], "x"]
)
def test_pieces_of_a_fed_gradient_are_not_empty_and_ascend_inside_it(ranges: Any) -> None:
    pipe = Pipe()
    facts = {"presence": 2, "numel": 3, "ranges": ranges, "tied": [], "absent": []}
    pipe.open.set()
    for item in ({"kind": "step", "step": 4, "nbytes": [1, 1], "stages": {"0": facts}}, encode(RECORDS), b"loop"):
        pipe.donor.send_json(item)
    with pytest.raises(ProtocolError):
        next_item(pipe.joiner, {0: 3})  # type: ignore[arg-type]


def test_a_copy_that_failed_does_not_keep_the_state_from_changing() -> None:
    class Failed(Snapshot):
        def wait(self) -> None:
            super().wait()
            raise MemoryError

    donor, failed, other = Donor(), Failed(), Snapshot()
    donor.shelve(("kept", 3), Offer(position=Key(3, 0), held={0: [(failed, WHOLE)], 1: [(other, WHOLE)]}))
    donor.busy_snapshot()
    assert failed.waited and other.waited
