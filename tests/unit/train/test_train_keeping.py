"""Snapshots in memory that are copied of another pool: what is kept of them."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from checkpoint_saving import make_state
from everstep.base.config_keys import CheckpointConfig, MemoryTierConfig
from everstep.checkpoint.vault import StageState
from everstep.exact.state import ModelState
from everstep.protocol.driver.operations import ForgetKept, InMemory, NotKept, OthersKept
from everstep.protocol.step_types import Key
from everstep.train.heal import Donor, ReceivedOffer
from everstep.train.keeping import SnapshotKeeper


def copied(state: ModelState) -> StageState:
    manifest = state.manifest()
    return StageState(manifest, [memoryview(bytes(state.read_block(k))) for k in range(state.n_blocks)])


def test_a_snapshot_that_comes_while_all_go_back_does_not_take_the_place_of_what_its_step_comes_to_then() -> None:
    notes: list[Any] = []
    view: Any = SimpleNamespace(config=SimpleNamespace(checkpoint=CheckpointConfig()))
    keeper, spoilt, right = SnapshotKeeper(view, Donor(), notes.append), make_state(1), make_state(2)

    def copy(step: int, state: ModelState, meanwhile: Callable[[], None] = lambda: None) -> None:
        def kept(effect: Any) -> list[ReceivedOffer]:
            meanwhile()
            return [ReceivedOffer(position=Key(step, 0), states={1: copied(state)})]

        keeper._copier = SimpleNamespace(kept=kept)  # type: ignore[assignment]
        effect: Any = SimpleNamespace(step=step)
        keeper._copy(effect, keeper._vault.times_forgotten)

    copy(10, spoilt)
    assert isinstance(notes[0], InMemory) and notes[1] == OthersKept(10, True) and keeper.held(10)
    notes.clear()
    copy(20, spoilt, lambda: keeper.forget(ForgetKept(10)))
    assert not keeper.held(20) and not [one for one in notes if isinstance(one, OthersKept)]
    copy(20, right)
    assert keeper.held(20)[1][0].manifest() == right.manifest() and notes[-1] == OthersKept(20, True)
    keeper.close()


def test_a_snapshot_of_another_pool_that_has_no_room_is_not_taken_for_kept() -> None:
    notes: list[Any] = []
    memory = MemoryTierConfig(limit_mb=1)
    view: Any = SimpleNamespace(config=SimpleNamespace(checkpoint=CheckpointConfig(memory=memory)))
    keeper, large = SnapshotKeeper(view, Donor(), notes.append), make_state(1, {"w": (512, 1024)})
    offer = ReceivedOffer(position=Key(10, 0), states={1: copied(large)})
    keeper._copier = SimpleNamespace(kept=lambda effect: [offer])  # type: ignore[assignment]
    keeper._copy(SimpleNamespace(step=10), keeper._vault.times_forgotten)  # type: ignore[arg-type]
    assert not keeper.held(10) and isinstance(notes[-1], NotKept) and notes[-1].step == 10
    assert "checkpoint.memory.limit_mb=1" in notes[-1].why.reason


def test_a_copy_does_not_take_the_place_of_a_whole_one_that_is_there() -> None:
    view: Any = SimpleNamespace(config=SimpleNamespace(checkpoint=CheckpointConfig()))
    keeper, first, other = SnapshotKeeper(view, Donor(), lambda note: None), make_state(1), make_state(2)
    for state in (first, other):
        offer = ReceivedOffer(position=Key(10, 0), states={1: copied(state)})
        keeper._copier = SimpleNamespace(kept=lambda effect, offer=offer: [offer])  # type: ignore[assignment]
        keeper._copy(SimpleNamespace(step=10), keeper._vault.times_forgotten)  # type: ignore[arg-type]
    assert keeper.held(10)[1][0].manifest() == first.manifest()
