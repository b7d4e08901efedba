"""A state that passes by in blocks has the digests of one that is there."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

import everstep.exact.image
from everstep.base.errors import CheckpointCorrupt, InvariantViolation
from everstep.exact.digest import bytes_of
from everstep.exact.image import Image
from everstep.exact.passing import PassingState
from everstep.exact.snapshot import StateInPlace
from everstep.exact.state import ModelState
from everstep.exact.state_memory import StateMemory


def trained() -> ModelState:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(700, 300), nn.Tanh(), nn.Linear(300, 90), nn.BatchNorm1d(90))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 700)).square().sum().backward()
    optimizer.step()
    return ModelState(model, optimizer, units=[model])


def blocks_of(image: Image, numbers: range) -> list[memoryview | None]:
    return [image.read_block(n) if n in numbers else None for n in range(image.n_blocks)]


@pytest.mark.parametrize("width", [1, 3, 100])
def test_blocks_that_pass_and_own_ones_between_them_have_the_digests_of_the_whole(width: int) -> None:
    image = trained().image()
    assert image.n_blocks > 6
    kept = {entry.name: bytearray(entry.nbytes) for entry in image.entries}

    def keep(name: str, at: int, data: memoryview) -> None:
        kept[name][at : at + len(data)] = data

    passing = PassingState(image.entries, image.read_block, keep)
    for first in range(0, image.n_blocks - 1, 2 * width):
        passing.take(blocks_of(image, range(first, first + width)))
    assert passing.rows() == image.rows() and passing.digests() == image.manifest["digests"]
    assert kept == {entry.name: bytes(image._data[k]) for k, entry in enumerate(image.entries)}


def test_a_block_that_passes_twice_or_not_at_all_is_noticed() -> None:
    image = trained().image()
    passing = PassingState(image.entries)
    passing.take(blocks_of(image, range(2)))
    with pytest.raises(InvariantViolation, match="passed twice"):
        passing.take(blocks_of(image, range(1, 2)))
    with pytest.raises(InvariantViolation, match="block 2 has not passed"):
        passing.rows()


def test_a_standing_state_is_read_until_it_may_change() -> None:
    state = trained()
    in_place, copied = state.in_place(), state.clone_snapshot()
    copied.start()
    assert in_place.n_blocks == copied.n_blocks and in_place.manifest() == copied.manifest()
    block = in_place.read_block(0)
    assert in_place.wait()
    with torch.no_grad():
        next(state.model.parameters()).zero_()
    assert block == copied.read_block(0)
    for read in (in_place.manifest, lambda: in_place.read_block(0)):
        with pytest.raises(CheckpointCorrupt, match="has changed"):
            read()


def test_who_hashes_a_standing_state_gives_up_when_it_is_to_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits until all of a large one is hashed."""
    whole, others = trained().image(), list[threading.Thread]()
    monkeypatch.setattr(everstep.exact.image, "_BLOCKS_AT_ONCE", 1)

    class Notices(StateMemory):
        def let_go(self) -> None:
            assert not others, "it went on"
            others.append(threading.Thread(target=in_place.wait))
            others[0].start()
            assert in_place._over.wait(60.0)

    in_place = StateInPlace(Image(whole.entries, whole._data, whole.values, whole.outline, Notices()))
    with pytest.raises(CheckpointCorrupt, match="has changed"):
        in_place.manifest()
    others[0].join(60.0)
    assert not others[0].is_alive()


def test_an_empty_state_has_no_rows() -> None:
    assert PassingState(()).rows() == [] and bytes_of(torch.empty(0)) == b""
