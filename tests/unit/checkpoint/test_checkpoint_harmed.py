"""Stores that were moved or cut, memory that is too small, and a store that fails for a while."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_checkpoint_upload import LIMIT_S, QUICK, Events, Spoiled

from checkpoint_saving import make_state, save
from everstep.base import below
from everstep.base.config_keys import MemoryTierConfig
from everstep.base.errors import CheckpointCorrupt, StoreError
from everstep.checkpoint.names import LATEST
from everstep.checkpoint.reader import open_checkpoint, steps_in
from everstep.checkpoint.store import TEMPORARY, DirectoryStore
from everstep.checkpoint.transfer import Uploader
from everstep.checkpoint.vault import StageState, Vault
from everstep.exact.image import BLOCK_BYTES
from exchange_cases import write_step


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def _draft(store: DirectoryStore) -> None:
    with store.draft("a/new") as draft:
        draft.publish("a/new")


WRITES: dict[str, Callable[[DirectoryStore], Any]] = {
    "write": lambda store: store.write("a/new", [b"x"], 1),
    "write if absent": lambda store: store.write("new", [b"x"], 1, if_absent=True),
    "delete": lambda store: store.delete("a/old"),
    "move": lambda store: store.move("a/old", "a/new"),
    "mend": lambda store: store.mend("a/old", 0, memoryview(b"X")),
    "draft": _draft,
}


@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize("what", WRITES)
def test_in_the_place_of_a_directory_that_was_moved_nothing_changes(tmp_path: Path, what: str, deep: bool) -> None:
    """Another job has the path meanwhile; without a move, the same is done."""
    home = tmp_path / "run"
    path = home / "checkpoints" if deep else home
    (path / "a").mkdir(parents=True)
    (path / "a" / "old").write_bytes(b"old")
    below.keep_to(home)
    try:
        home.rename(tmp_path / "moved")
        (path / "a").mkdir(parents=True)
        for name in ("old", f"{TEMPORARY}{LATEST}-they-write"):
            (path / "a" / name).write_bytes(b"theirs")
        before = files(tmp_path)
        with pytest.raises(StoreError):
            WRITES[what](DirectoryStore(path))
        DirectoryStore(path).drop_leftovers()
        assert files(tmp_path) == before
    finally:
        below.leave(home)
    WRITES[what](DirectoryStore(path))
    assert files(tmp_path) != before


@pytest.mark.parametrize("zeros", [False, True])
def test_what_a_file_lacks_is_never_taken_for_zeros(tmp_path: Path, zeros: bool) -> None:
    """Wherever it ends: blocks before the end are read, and of the first that is not whole the message says how much of
    it there is."""
    state = make_state(1)
    if zeros:
        with torch.no_grad():
            for tensor in (*state.model.parameters(), *state.model.buffers()):
                tensor.zero_()
    manifest = save(tmp_path, state, 1)
    [file] = manifest.files
    path, store, drawn = tmp_path / file.name, DirectoryStore(tmp_path), random.Random(5)
    data, checkpoint = path.read_bytes(), open_checkpoint(store, 1)
    count = len(manifest.state["blocks"])
    places = {index: manifest.place(index)[1] for index in range(count)}
    for end in (*sorted(places.values()), *(drawn.randrange(file.data_at, len(data)) for _ in range(4))):
        path.write_bytes(data[:end])
        for index, at in places.items():
            there = min(BLOCK_BYTES, max(0, end - at))
            if there == BLOCK_BYTES:
                list(checkpoint.read_blocks([index]))
                continue
            with pytest.raises(CheckpointCorrupt, match=rf"block {index} .*\({there} bytes\)"):
                list(checkpoint.read_blocks([index]))


@given(st.integers(1, 9), st.lists(st.integers(1, 24), max_size=12), st.integers(1, 3))
def test_no_more_is_held_than_the_limit_in_megabytes(limit_mb: int, sizes: list[int], keep: int) -> None:
    """Snapshots of so many blocks, one step after the other; what does not fit is refused, and no more than that."""
    vault, room = Vault(MemoryTierConfig(limit_mb=limit_mb, keep_last=keep)), (limit_mb << 20) // BLOCK_BYTES
    block = memoryview(bytes(1))
    for step, n_blocks in enumerate(sizes, 1):
        made: Any = {"blocks": [""] * n_blocks, "entries": []}
        fits = vault.put(0, step, StageState(made, [block] * n_blocks))
        held = {at: found.n_blocks for (_, at), found in vault._held.items()}
        assert sum(held.values()) <= room and (step in held) is fits
        assert fits or n_blocks + sum(held.values()) > room
        vault.retire(step)


@pytest.mark.parametrize("newer", [[2], [2, 3], [4, 3]])
def test_while_a_store_fails_the_newest_is_tried_and_no_other(tmp_path: Path, newer: list[int]) -> None:
    """The newest by step: each that it has overtaken is skipped, and never tried again."""
    source, tried = DirectoryStore(tmp_path / "disk"), list[int]()
    for step in (1, *sorted(newer)):
        write_step(source, step, seed=step)
    failed, go = threading.Event(), threading.Event()

    def before(name: str) -> None:
        tried.append(int(name[5:15]))
        if tried[-1] == 1:
            failed.set()
            assert go.wait(LIMIT_S)
            raise StoreError("the network is down")

    events, target = Events(), Spoiled(tmp_path / "far", before)
    uploader = Uploader(source, target, events, backoff=QUICK)
    uploader.offer(1)
    assert failed.wait(LIMIT_S)
    for step in newer:
        uploader.offer(step)
    go.set()
    assert uploader.finish(LIMIT_S)
    assert steps_in(target) == [max(newer)] and tried.count(1) == 1
    assert sorted(uploader._skipped) == sorted({1, *newer} - {max(newer)}) and uploader.idle
