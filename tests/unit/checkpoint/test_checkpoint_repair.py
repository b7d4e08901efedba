"""A flipped bit in a part is repaired from wherever the block lies besides; only what is nowhere else is damage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from checkpoint_saving import advance, identity_of, make_state, save
from everstep.base.cause import Cause
from everstep.base.config_keys import CheckpointConfig, ObjectTierConfig
from everstep.base.errors import CheckpointCorrupt, StoreError
from everstep.checkpoint.checkpointer import Checkpointer
from everstep.checkpoint.reader import manifests_of, newest_complete, open_checkpoint, steps_in, verify_store
from everstep.checkpoint.repair import Copy, Elsewhere, Lost, Repairer
from everstep.checkpoint.store import DirectoryStore
from everstep.checkpoint.transfer import transfer
from everstep.exact.image import BLOCK_BYTES
from everstep.exact.state import ModelState

Told = list[tuple[str, dict[str, Any]]]


def flip(folder: Path, step: int, index: int) -> str:
    """Flips one bit in the middle of a block; returns the name of its file."""
    file, at = open_checkpoint(DirectoryStore(folder), step).manifest.place(index)
    with open(folder / file.name, "r+b") as part:
        part.seek(at + BLOCK_BYTES // 2)
        byte = part.read(1)
        part.seek(at + BLOCK_BYTES // 2)
        part.write(bytes([byte[0] ^ 4]))
    return file.name


def checkpointer(folder: Path, state: ModelState, told: Told, **more: Any) -> Checkpointer:
    config = CheckpointConfig(object=ObjectTierConfig(url=more.pop("url", None)))
    return Checkpointer(
        folder,
        config,
        identity_of(state),
        0,
        send=lambda data: None,
        events=lambda kind, fields: told.append((kind, fields)),
        **more,
    )


def test_from_another_checkpoint_of_the_store(tmp_path: Path) -> None:
    state = make_state(1)
    save(tmp_path, state, 1)
    save(tmp_path, state, 2)  # not incremental: it has the same blocks in files of its own
    store, told = DirectoryStore(tmp_path), list[tuple[int, str]]()
    damaged = [0, 2, 5]
    for index in damaged:
        name = flip(tmp_path, 2, index)
    found = newest_complete(
        store,
        repair=Repairer([Elsewhere(lambda: store, manifests_of)], lambda step, reason: told.append((step, reason))),
    )
    assert found is not None and found.step == 2 and steps_in(store) == [1, 2]
    assert sorted(int(reason.split(": block ")[1].split()[0]) for _, reason in told) == damaged
    for step, reason in told:
        assert step == 2 and name in reason and "repaired from byte " in reason and "step-0000000001/part" in reason
    assert verify_store(store) == [], "the file is whole again"


@pytest.mark.parametrize("twice", [False, True])
def test_from_the_object_tier(tmp_path: Path, twice: bool) -> None:
    state, folder, far = make_state(1), tmp_path / "disk", tmp_path / "far"
    save(folder, state, 4, workers=2)
    transfer(DirectoryStore(folder), DirectoryStore(far), 4)
    name = flip(folder, 4, 3)
    told: Told = []
    mine = checkpointer(folder, state, told, url=f"file://{far}")
    fresh = make_state(9)
    mine.load(4, {0: fresh}, twice=twice)
    assert fresh.state_digest(4) == state.state_digest(4)
    ((kind, fields),) = told
    assert (kind, fields["cause"], fields["step"], fields["what"]) == ("warning", Cause.CORRUPT, 4, "block")
    assert f"{name}: block 3 (" in fields["reason"] and f"of {far}/{name}" in fields["reason"]
    assert verify_store(DirectoryStore(folder)) == []
    mine.close()


def test_from_whoever_is_asked(tmp_path: Path) -> None:
    state = make_state(1)
    save(tmp_path, state, 3)
    manifest = open_checkpoint(DirectoryStore(tmp_path), 3).manifest
    name = flip(tmp_path, 3, 1)
    asked: list[Lost] = []

    def refuses(lost: Lost) -> Copy | None:
        asked.append(lost)
        raise StoreError("is gone")

    def lies(lost: Lost) -> Copy | None:
        return Copy(bytes(BLOCK_BYTES), "a liar")

    def knows(lost: Lost) -> Copy | None:
        return Copy(state.read_block(manifest.state["blocks"].index(lost.digest)), "worker 7's memory")

    told: Told = []
    mine = checkpointer(tmp_path, state, told, sources=[refuses, lies, knows])
    fresh = make_state(9)
    mine.load(3, {0: fresh})
    assert fresh.state_digest(3) == state.state_digest(3)
    file, at = manifest.place(1)
    assert asked == [Lost(3, 1, manifest.state["blocks"][1], 0, file.name, at)] and file.name == name
    assert [fields["reason"].endswith(": repaired from worker 7's memory") for _, fields in told] == [True]
    mine.close()


def test_a_source_that_fails_is_not_asked_again(tmp_path: Path) -> None:
    state = make_state(1)
    save(tmp_path, state, 3)
    for index in range(4):
        flip(tmp_path, 3, index)
    asked: list[int] = []

    def refuses(lost: Lost) -> Copy | None:
        asked.append(lost.index)
        raise OSError("is gone")

    checkpoint = open_checkpoint(DirectoryStore(tmp_path), 3, Repairer([refuses], lambda step, reason: None))
    for index in range(4):
        with pytest.raises(CheckpointCorrupt, match=f"block {index} "):
            next(checkpoint.read_blocks([index]))
    assert asked == [0]


def test_what_is_nowhere_else_is_set_aside(tmp_path: Path) -> None:
    state = make_state(1)
    save(tmp_path, state, 1)
    advance(state, 2)
    save(tmp_path, state, 2)
    flip(tmp_path, 2, 0)
    told: Told = []
    mine = checkpointer(tmp_path, state, told)
    assert mine.restorable(most=2) == (1,)
    assert [(kind, fields["cause"]) for kind, fields in told] == [("fallback", Cause.CORRUPT)]
    mine.close()


def test_a_file_that_cannot_be_written_is_read_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = make_state(1)
    save(tmp_path, state, 1)
    save(tmp_path, state, 2)
    flip(tmp_path, 2, 0)

    def full(*args: Any) -> None:
        raise StoreError("cannot mend: No space left on device")

    monkeypatch.setattr(DirectoryStore, "mend", full)
    told: Told = []
    mine, fresh = checkpointer(tmp_path, state, told), make_state(9)
    mine.load(2, {0: fresh})
    assert fresh.state_digest(2) == state.state_digest(2)
    assert told[0][1]["reason"].endswith("; the file stays as it is: cannot mend: No space left on device")
    assert [problem.step for problem in verify_store(DirectoryStore(tmp_path))] == [2]
    mine.close()
