"""Snapshots that a worker keeps in memory: which go when another one comes."""

from __future__ import annotations

from everstep.base.config_keys import MemoryTierConfig
from everstep.base.extents import WHOLE, BlockRun, Extents
from everstep.protocol.moving.memory_retention import Retention

HALF = Extents.part((("model", 2),), [BlockRun("model", 0, 1)])


def keeping(*complete: int, most_blocks: int = 100, keep_last: int = 2) -> Retention:
    """Snapshots of stage 0, of two blocks each, of steps that all stages have."""
    kept = Retention(MemoryTierConfig(keep_last=keep_last), most_blocks)
    for step in complete:
        kept.put(0, step, 2)
        kept.retire(step)
    return kept


def test_a_snapshot_displaces_what_is_neither_complete_nor_the_newest_of_its_stage() -> None:
    kept = Retention(MemoryTierConfig(keep_last=1), most_blocks=100)
    assert kept.put(0, 2, 1) == (True, [])
    assert kept.put(0, 4, 1) == (True, []), "the newest one may be complete by now"
    assert kept.put(1, 4, 1) == (True, []), "of another stage"
    assert kept.put(0, 6, 1) == (True, [(0, 2)])
    assert kept.there == {(0, 4): WHOLE, (0, 6): WHOLE, (1, 4): WHOLE}, "what is displaced is not held any more"
    assert kept.retire(6) == [(0, 4), (1, 4)]
    assert kept.put(0, 8, 1) == (True, []), "a complete one stays"
    assert kept.there == {(0, 6): WHOLE, (0, 8): WHOLE}


def test_room_is_counted_without_what_a_snapshot_displaces() -> None:
    kept = Retention(MemoryTierConfig(keep_last=1), most_blocks=5)
    assert kept.put(0, 2, 2) == (True, [])
    assert kept.put(0, 4, 2) == (True, [])
    assert kept.put(0, 6, 4) == (False, []), "the newest one stays, and leaves too little"
    assert kept.put(0, 6, 3) == (True, [(0, 2)])
    assert kept.there.keys() == {(0, 4), (0, 6)}


def test_the_newest_is_that_of_its_own_stage() -> None:
    kept = keeping()
    kept.put(0, 2, 1)
    kept.put(0, 4, 1)
    kept.put(1, 6, 1)
    assert kept.put(0, 6, 1) == (True, [(0, 2)])


def test_one_that_comes_again_takes_the_place_of_the_first() -> None:
    kept = keeping(2)
    assert kept.put(0, 2, 1, HALF) == (True, [(0, 2)])
    assert kept.there == {(0, 2): HALF}


def test_where_there_is_no_room_the_newest_complete_one_alone_stays() -> None:
    kept = keeping(2, 4, most_blocks=6)
    assert kept.make_room(0, 2) == (True, []) and kept.there.keys() == {(0, 2), (0, 4)}
    assert kept.make_room(0, 3) == (True, [(0, 2)]) and kept.there.keys() == {(0, 4)}
    assert kept.make_room(0, 5) == (False, [])
    kept = keeping(most_blocks=3)
    kept.put(0, 2, 2)
    assert kept.make_room(0, 2) == (False, []) and kept.there.keys() == {(0, 2)}, "it may be complete by now"


def test_of_older_ones_stays_what_the_rule_keeps_and_the_newest_that_is_proven() -> None:
    kept = keeping(1, 2)
    kept.put(0, 3, 2)
    kept.put(0, 4, 2)
    kept.put(0, 5, 2)
    assert kept.retire(4) == [(0, 1)], "older than the newest complete one, and beyond the two that are kept"
    assert kept.there.keys() == {(0, 2), (0, 4), (0, 5)}
    assert keeping(1, keep_last=1).retire(3) == [(0, 1)]
    assert keeping(1, keep_last=1).retire(3, proven=1) == []
    kept = keeping(2)
    kept.put(1, 3, 2)
    assert kept.retire(4) == [(1, 3)], "it is incomplete, and there is a newer one"


def test_what_is_done_again_is_forgotten_and_complete_no_more() -> None:
    kept = keeping(2, 4)
    assert kept.forget(2) == [(0, 4)] and kept.there.keys() == {(0, 2)}
    for step in (4, 6):
        assert kept.put(0, step, 2) == (True, [])
    assert kept.put(0, 8, 2) == (True, [(0, 4)])
    assert kept.there.keys() == {(0, 2), (0, 6), (0, 8)}


def test_blocks_that_are_lost_are_not_there() -> None:
    kept = keeping(2)
    kept.lose(0, 4, HALF)
    kept.lose(0, 2, HALF)
    assert kept.there == {(0, 2): WHOLE - HALF}
    kept.lose(0, 2, WHOLE)
    assert kept.there == {}
