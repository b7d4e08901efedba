"""Snapshots that a worker keeps in memory: which go when another one comes."""

from __future__ import annotations

from everstep.base.config_keys import MemoryTierConfig
from everstep.base.extents import WHOLE
from everstep.protocol.moving.memory_retention import Retention


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
