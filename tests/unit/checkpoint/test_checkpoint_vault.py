"""Snapshots in memory: what stays, what goes, what a peer gets."""

from __future__ import annotations

import pytest

from checkpoint_saving import advance, make_state
from everstep.base.config_keys import MemoryTierConfig
from everstep.base.errors import CheckpointCorrupt
from everstep.base.extents import WHOLE, Extents
from everstep.checkpoint.vault import StageState, Vault
from everstep.exact.image import sizes_of
from everstep.exact.snapshot import Snapshot
from everstep.exact.state import ModelState
from everstep.exact.state_memory import HeldBlock


def snapshot(state: ModelState) -> Snapshot:
    found = state.clone_snapshot()
    found.start()
    found.wait()
    return found


def whole(vault: Vault) -> tuple[tuple[int, int], ...]:
    """(stage, step) of all that have lost nothing."""
    return tuple(key for key, there in vault.there().items() if there.whole)


def test_the_newest_complete_and_what_is_newer_stay() -> None:
    state, vault = make_state(1), Vault(MemoryTierConfig())
    for step in (10, 20):
        assert vault.put(0, step, snapshot(state)) and vault.put(1, step, snapshot(state))
    assert whole(vault) == ((0, 10), (0, 20), (1, 10), (1, 20))
    vault.retire(10)
    assert vault.put(0, 30, snapshot(state))  # 20 is the newest so far, and may be complete before it is known
    assert whole(vault) == ((0, 10), (0, 20), (0, 30), (1, 10), (1, 20))
    vault.retire(20)
    vault.retire(10)  # told late
    assert whole(vault) == ((0, 20), (0, 30), (1, 20))
    vault.forget(20)
    assert whole(vault) == ((0, 20), (1, 20))
    vault.clear()
    assert whole(vault) == () and not vault._held


def test_what_a_peer_was_handing_over_when_all_went_back_is_not_kept() -> None:
    """It would stay in the place of what the same step comes to when it is done again."""
    state, vault = make_state(1), Vault(MemoryTierConfig())
    began = vault.times_forgotten
    assert vault.put(1, 10, snapshot(state), forgotten=began)
    vault.forget(10)
    late = snapshot(state)
    assert not vault.put(1, 20, late, forgotten=began) and whole(vault) == ((1, 10),)
    assert vault.put(1, 20, snapshot(state), forgotten=vault.times_forgotten) and whole(vault) == ((1, 10), (1, 20))


def test_the_limit_holds() -> None:
    state = make_state(1)
    state.manifest()
    vault = Vault(MemoryTierConfig(), 2 * state.n_blocks)
    assert vault.put(0, 1, snapshot(state)) and vault.put(0, 2, snapshot(state))
    vault.retire(1)
    assert not vault.put(0, 3, snapshot(state))
    assert whole(vault) == ((0, 1), (0, 2)) and len(vault._held) == 2
    vault.retire(2)
    assert vault.make_room(0, state.n_blocks) and vault.put(0, 3, snapshot(state))
    assert not vault.make_room(0, state.n_blocks + 1)


def test_the_rule_keeps_further_complete_ones_while_there_is_room() -> None:
    state = make_state(1)
    state.manifest()
    vault = Vault(MemoryTierConfig(keep_last=2), 4 * state.n_blocks)
    for step in (10, 20, 30, 40):
        assert vault.put(0, step, snapshot(state))
        vault.retire(step, proven=19)
    assert whole(vault) == ((0, 10), (0, 30), (0, 40)), "10 is the newest that was compared"
    assert vault.put(1, 41, snapshot(state))
    assert vault.make_room(0, state.n_blocks) and vault.put(0, 50, snapshot(state))
    assert whole(vault) == ((0, 40), (0, 50), (1, 41))


def test_a_copy_from_a_peer_is_kept_like_a_snapshot() -> None:
    state, vault = make_state(1), Vault(MemoryTierConfig())
    assert vault.put(0, 5, snapshot(state))
    expected = state.manifest()
    served, _ = vault.held(5)[0]
    assert not vault.held(4)
    advance(state, 2)  # the copy is not concerned
    copy = StageState(served.manifest(), [memoryview(bytes(served.read_block(k))) for k in range(served.n_blocks)])
    held = Vault(MemoryTierConfig())
    assert held.put(0, 5, copy) and whole(held) == ((0, 5),)
    (found, _), other = held.held(5)[0], make_state(7)
    other.load(found.manifest(), found.read_block)
    assert other.manifest() == expected
    copy.load_into(other)
    assert other.manifest() == expected


def test_a_snapshot_that_has_lost_blocks_is_a_part() -> None:
    state, vault = make_state(1), Vault(MemoryTierConfig())
    made = snapshot(state)
    of = sizes_of(made.manifest())
    assert vault.put(0, 5, made)
    vault.lose(0, 5, Extents.numbered(of, [1]))
    left = WHOLE - Extents.numbered(of, [1])
    assert whole(vault) == ()
    assert vault.there() == {(0, 5): left} and vault.held(5) == {0: (made, left)}
    newer = snapshot(state)
    assert vault.put(0, 6, newer) and vault.there()[0, 6].whole
    vault.lose(0, 6, Extents.numbered(of, [0, 2]))
    assert whole(vault) == () and vault.there()[0, 6] == WHOLE - Extents.numbered(of, [0, 2])
    vault.lose(0, 6, WHOLE)
    assert (0, 6) not in vault.there() and not vault.held(6)
    vault.forget(5)
    assert vault.there() == {(0, 5): left}
    assert vault.put(0, 6, snapshot(state)) and whole(vault) == ((0, 6),), "what was lost is of the one before"


def test_who_still_reads_what_has_gone_is_told_so() -> None:
    state, vault = make_state(1), Vault(MemoryTierConfig())
    made = snapshot(state)
    assert vault.put(0, 5, made)
    vault.clear()
    with pytest.raises(CheckpointCorrupt, match="released"):
        made.read_block(0)


def test_blocks_that_came_go_one_after_the_other_as_they_are_loaded() -> None:
    state, mine, left = make_state(1), make_state(2), list[int]()

    class Came(list[HeldBlock | None]):
        def __setitem__(self, index: object, block: object) -> None:
            super().__setitem__(index, block)  # type: ignore[call-overload]
            left.append(sum(block is not None for block in self))

    n = state.n_blocks
    came = StageState(state.manifest(), Came(memoryview(bytes(state.read_block(k))) for k in range(n)))
    came.load_into(mine)
    assert left == list(range(n))[::-1] and came.n_blocks == n
    assert mine.manifest() == state.manifest()


def test_a_block_that_changed_where_it_lies_is_read_as_it_is_and_not_loaded() -> None:
    """Who gives it to others compares it himself, and says which is damaged."""
    state, mine = make_state(1), make_state(2)
    wrong = bytes(len(bytes(state.read_block(0))))
    blocks: list[HeldBlock | None] = [lambda: memoryview(bytearray(wrong)), *[None] * (state.n_blocks - 1)]
    came = StageState(state.manifest(), blocks)
    assert bytes(came.read_block(0)) == wrong
    with pytest.raises(CheckpointCorrupt, match="block 0 is not what it was"):
        came.load_into(mine)
