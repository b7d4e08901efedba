"""Ways between processes of different hosts, as two ferries and more carry them."""

from __future__ import annotations

import pytest

from everstep.base.errors import ProtocolError
from everstep.protocol.ferrying import (
    PIECE_BYTES,
    SILENT_S,
    WINDOW_BYTES,
    DialDoor,
    End,
    Ferry,
    FerryEffect,
    Give,
    Go,
    Message,
    Saying,
    Way,
    Word,
)


class Sea:
    """Ferries, and what has become of their words. held: by rank, what has yet to reach those that are silent."""

    def __init__(self, size: int) -> None:
        self.now_s = 100.0
        ranks = range(size)
        self.ferries = [Ferry(rank, [other for other in ranks if other != rank], self.now_s) for rank in ranks]
        self.done: list[list[FerryEffect]] = [[] for _ in ranks]
        self.silent: set[int] = set()
        self.held: list[list[tuple[int, Word, memoryview]]] = [[] for _ in ranks]
        self.last: set[tuple[int, int]] = set()

    def calm(self) -> None:
        """Carry everything until nobody says anything more."""
        while any(f.out or self.held[f.rank] for f in self.ferries if f.rank not in self.silent):
            for ferry in self.ferries:
                while ferry.out and ferry.rank not in self.silent:
                    to, word, content = ferry.out.popleft()
                    word = Word.read(word.packed())
                    assert len(content) == word.content
                    assert (ferry.rank, to) not in self.last, f"{word} after the last word"
                    if word.last:
                        self.last.add((ferry.rank, to))
                    self.held[to].append((ferry.rank, word, content))
            for to, held in enumerate(self.held):
                while held and to not in self.silent:
                    self.done[to] += self.ferries[to].heard(*held.pop(0), self.now_s)

    def wait(self, seconds: float) -> None:
        for _ in range(int(seconds * 4)):
            self.now_s += 0.25
            for ferry in self.ferries:
                if ferry.rank not in self.silent:
                    self.done[ferry.rank] += ferry.look(self.now_s)
            self.calm()

    def way(self, rank: int = 0, to: int = 1) -> tuple[Way, Way]:
        """One that was opened, as both ends have it."""
        own = self.ferries[rank].open(to, "10.0.0.7:5", self.now_s)
        self.calm()
        dial = self.done[to].pop()
        assert own is not None and isinstance(dial, DialDoor) and dial.address == "10.0.0.7:5"
        return own, dial.way


def content(size: int) -> memoryview:
    return memoryview(bytes(size))


def test_bytes_cross_both_ways_in_order_and_then_the_end() -> None:
    sea = Sea(2)
    near, far = sea.way()
    sea.ferries[0].said(near, memoryview(b"one"))
    sea.ferries[0].said(near, memoryview(b"two"))
    sea.ferries[1].said(far, memoryview(b"three"))
    sea.ferries[0].hung_up(near)
    sea.calm()
    assert sea.done[1] == [Give(far, memoryview(b"one")), Give(far, memoryview(b"two")), End(far)]
    assert sea.done[0] == [], "nobody is there any more"
    assert not sea.ferries[0]._ways and not sea.ferries[1]._ways


def test_ways_of_both_sides_are_told_apart() -> None:
    sea = Sea(2)
    (a, far_a), (b, far_b) = sea.way(0, 1), sea.way(1, 0)
    assert a.number == b.number
    sea.ferries[0].said(a, memoryview(b"a"))
    sea.ferries[0].said(far_b, memoryview(b"b"))
    sea.calm()
    assert sea.done[1] == [Give(far_a, memoryview(b"a")), Give(b, memoryview(b"b"))]


def test_so_much_is_under_way_and_no_more() -> None:
    sea = Sea(2)
    near, far = sea.way()
    for _ in range(WINDOW_BYTES // PIECE_BYTES):
        sea.ferries[0].said(near, content(PIECE_BYTES))
    sea.calm()
    assert near.room == 0 and far.due == WINDOW_BYTES
    for _ in range(WINDOW_BYTES // PIECE_BYTES):
        sea.ferries[1].took(far, PIECE_BYTES)
    sea.calm()
    assert near.room == WINDOW_BYTES and sea.done[0] and set(sea.done[0]) == {Go(near)}


def test_who_sends_more_than_there_is_room_for_is_none_of_ours() -> None:
    sea = Sea(2)
    near, _ = sea.way()
    for _ in range(WINDOW_BYTES // PIECE_BYTES + 1):
        sea.ferries[0].said(near, content(PIECE_BYTES))
    with pytest.raises(ProtocolError, match="more than there is room for"):
        sea.calm()


@pytest.mark.parametrize(
    ("word", "came", "said"),
    [
        (Word(Saying.TAKEN, True, 1, 1), b"", "has taken more than was sent"),
        (Word(Saying.OPEN, True, 1, 1), b"x", "opens a way that is open"),
    ],
)
def test_words_that_no_ferry_says(word: Word, came: bytes, said: str) -> None:
    sea = Sea(2)
    sea.way(0, 1)
    with pytest.raises(ProtocolError, match=said):
        sea.ferries[1].heard(0, word, memoryview(came), sea.now_s)


@pytest.mark.parametrize(
    "packed", [bytes(14), b"\x09" + bytes(13), Word(Saying.BYTES, True, 1, PIECE_BYTES + 1).packed()]
)
def test_what_is_no_word(packed: bytes) -> None:
    with pytest.raises(ProtocolError, match="expected a word of a ferry"):
        Word.read(packed)


def test_what_is_said_of_a_way_that_has_ended_is_nothing() -> None:
    sea = Sea(2)
    near, far = sea.way()
    sea.ferries[1].hung_up(far)
    sea.ferries[1].took(far, WINDOW_BYTES)
    sea.ferries[1].hung_up(far)
    sea.ferries[0].said(near, memoryview(b"late"))
    sea.ferries[0].took(near, WINDOW_BYTES)
    sea.calm()
    assert sea.done == [[End(near)], []]


def test_a_way_to_what_is_no_address_is_refused() -> None:
    ferry = Sea(2).ferries[1]
    assert ferry.heard(0, Word(Saying.OPEN, True, 1, 2), memoryview("é".encode()), 100.0) == []
    assert list(ferry.out) == [Message(0, Word(Saying.CLOSE, False, 1))]


def test_too_many_ways_are_refused() -> None:
    sea = Sea(2)
    for number in range(1, 4098):
        word = Word(Saying.OPEN, True, number, 1)
        sea.done[1] += sea.ferries[1].heard(0, word, memoryview(b"x"), sea.now_s)
    assert len(sea.done[1]) == 4096
    assert list(sea.ferries[1].out) == [Message(0, Word(Saying.CLOSE, False, 4097))]


def test_ways_to_who_is_silent_end_and_others_go_on() -> None:
    sea = Sea(3)
    (lost, far), (kept, _) = sea.way(0, 1), sea.way(0, 2)
    sea.wait(20)
    assert sea.done == [[], [], []], "they answer"
    sea.silent.add(1)
    sea.wait(SILENT_S + 3)
    assert sea.done == [[End(lost)], [], []]
    assert sea.ferries[0].open(1, "10.0.0.7:5", sea.now_s) is None
    sea.ferries[0].said(kept, memoryview(b"x"))
    sea.calm()
    assert len(sea.done[2]) == 1
    sea.silent.clear()
    sea.calm()
    assert sea.done[1] == [End(far)], "it hears of it when it is back"
    sea.done[1].clear()
    sea.way(0, 1)


def test_who_is_called_is_asked_at_once_and_found_silent_by_calls_alone() -> None:
    """Each of which is given up before that."""
    sea = Sea(2)
    sea.silent.add(1)
    for _ in range(4):
        way = sea.ferries[0].open(1, "10.0.0.7:5", sea.now_s)
        assert way is not None
        sea.wait(SILENT_S / 4)
        sea.ferries[0].hung_up(way)
    sea.wait(1)
    assert sea.ferries[0].open(1, "10.0.0.7:5", sea.now_s) is None


def test_who_had_nothing_to_answer_is_not_silent() -> None:
    sea = Sea(2)
    near, _ = sea.way()
    sea.ferries[0].hung_up(near)
    sea.calm()
    sea.now_s += 1000
    sea.done = [[], []]
    sea.way()
    sea.wait(SILENT_S + 2)
    assert sea.done == [[], []]


def test_who_was_stopped_itself_takes_nobody_for_silent() -> None:
    sea = Sea(2)
    sea.way()
    sea.wait(3)
    sea.now_s += 1.1
    sea.ferries[0].look(sea.now_s)  # asks, and is stopped before it hears the answer
    sea.now_s += 100
    assert sea.ferries[0].look(sea.now_s) == []
    sea.calm()
    sea.wait(20)
    assert sea.done == [[], []]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 1, 0, 2)])
@pytest.mark.parametrize("pause_s", [0, 20])
def test_all_leave_when_all_have_said_so(order: tuple[int, ...], pause_s: float) -> None:
    sea = Sea(3)
    sea.way(0, 1)
    for rank in order:
        assert not any(ferry.through for ferry in sea.ferries)
        sea.ferries[rank].leave()
        sea.calm()
        sea.wait(pause_s)
    assert all(ferry.through and not ferry._ways for ferry in sea.ferries)
    assert len(sea.last) == 6, "each has heard the last word of each"


def test_the_last_word_is_waited_for() -> None:
    """Something may be under way before it."""
    ferry = Ferry(0, [1], 100.0)
    ferry.leave()
    nothing = memoryview(b"")
    assert ferry.heard(1, Word(Saying.LEAVE), nothing, 100.0) == [] and not ferry.through
    assert ferry.heard(1, Word(Saying.ASK), nothing, 100.0) == []
    assert ferry.heard(1, Word(Saying.LAST), nothing, 100.0) == [] and ferry.through
    assert [message.word.kind for message in ferry.out] == [Saying.LEAVE, Saying.LAST], "nothing is said after it"


def test_all_leave_at_once() -> None:
    sea = Sea(4)
    for ferry in sea.ferries:
        ferry.leave()
    sea.calm()
    assert all(ferry.through for ferry in sea.ferries) and len(sea.last) == 12


def test_who_leaves_opens_no_way_and_takes_none() -> None:
    sea = Sea(2)
    near, far = sea.way(1, 0)
    assert sea.ferries[1].leave() == [End(near)]
    sea.ferries[1].said(near, memoryview(b"late"))
    sea.calm()
    assert sea.done[0] == [End(far)]
    assert sea.ferries[0].open(1, "10.0.0.7:5", sea.now_s) is None, "it leaves"
    assert sea.ferries[1].open(0, "10.0.0.7:5", sea.now_s) is None
    assert sea.ferries[1].heard(0, Word(Saying.OPEN, True, 1, 1), memoryview(b"x"), sea.now_s) == []
    sea.calm()
    sea.ferries[0].leave()
    sea.calm()
    assert sea.ferries[0].through and sea.ferries[1].through


def test_who_leaves_does_not_wait_for_the_silent() -> None:
    sea = Sea(3)
    sea.silent.add(2)
    for ferry in sea.ferries[:2]:
        ferry.leave()
    sea.calm()
    assert not sea.ferries[0].through
    sea.wait(SILENT_S + 3)
    assert sea.ferries[0].through and sea.ferries[1].through


def test_who_was_silent_once_is_waited_for() -> None:
    sea = Sea(2)
    sea.way()
    sea.silent.add(1)
    sea.wait(SILENT_S + 3)
    sea.silent.clear()
    sea.calm()
    sea.ferries[0].leave()
    sea.calm()
    sea.wait(30)
    assert not sea.ferries[0].through
    sea.ferries[1].leave()
    sea.calm()
    assert sea.ferries[0].through and sea.ferries[1].through


@pytest.mark.parametrize("address", ["é:1", "x" * 256])
def test_no_way_leads_to_what_is_no_address(address: str) -> None:
    assert Sea(2).ferries[0].open(1, address, 100.0) is None
