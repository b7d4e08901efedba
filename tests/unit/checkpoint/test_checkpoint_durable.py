"""What has a name is durable, and what somebody may still need is not swept away."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import pytest

from checkpoint_saving import advance, make_state, save
from everstep.checkpoint.names import manifest_name, step_name
from everstep.checkpoint.retention import Shelf
from everstep.checkpoint.store import DirectoryStore


class Syncs:
    """What was synced, by inode, and which names were given since their folder was."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.synced: set[int] = set()
        self.named: dict[str, int] = {}  # name -> inode of the folder
        self.early: list[str] = []
        self.count = 0
        sync, link, replace = os.fsync, os.link, os.replace

        def fsync(fd: int) -> None:
            sync(fd)
            found = os.fstat(fd)
            if stat.S_ISDIR(found.st_mode):
                self.named = {name: folder for name, folder in self.named.items() if folder != found.st_ino}
            else:
                self.synced.add(found.st_ino)

        def naming(give: Any) -> Any:
            def act(old: str, new: str, *, src_dir_fd: int, dst_dir_fd: int, **rest: Any) -> None:
                if os.stat(old, dir_fd=src_dir_fd).st_ino not in self.synced:
                    self.early.append(new)
                give(old, new, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd, **rest)
                self.named[new] = os.fstat(dst_dir_fd).st_ino
                self.count += 1

            return act

        monkeypatch.setattr(os, "fsync", fsync)
        monkeypatch.setattr(os, "link", naming(link))
        monkeypatch.setattr(os, "replace", naming(replace))


def test_a_file_has_its_name_once_it_is_synced_and_then_the_name_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    syncs = Syncs(monkeypatch)
    store = DirectoryStore(tmp_path)
    store.write("latest", [b"text"], 4)
    store.write(manifest_name(3), [b"text"], 4, if_absent=True)
    assert syncs.count == 2
    save(tmp_path, make_state(1), 7, workers=2)
    assert syncs.count >= 5 and not syncs.early and not syncs.named


def parts(folder: Path, step: int) -> set[str]:
    return {p.name for p in (folder / step_name(step)).iterdir()} - {"manifest.json"}


def two(folder: Path) -> DirectoryStore:
    state = make_state(1)
    save(folder, state, 1)
    advance(state, 2)
    save(folder, state, 2)
    return DirectoryStore(folder)


def test_nothing_is_swept_while_a_manifest_cannot_be_read(tmp_path: Path) -> None:
    store, before = two(tmp_path), parts(tmp_path, 1)
    path = tmp_path / manifest_name(1)
    path.write_bytes(path.read_bytes()[:-20])
    shelf = Shelf.read(store)
    assert list(shelf.broken) == [1]
    shelf.sweep()
    assert parts(tmp_path, 1) == before != set()


def test_parts_of_a_step_that_others_write_are_not_swept(tmp_path: Path) -> None:
    store, name = two(tmp_path), next(iter(parts(tmp_path, 2)))
    for step in (1, 9):
        (tmp_path / step_name(step)).mkdir(exist_ok=True)
        (tmp_path / step_name(step) / f"{name.removesuffix('.safetensors')}9.safetensors").write_bytes(b"part")
    before = parts(tmp_path, 1), parts(tmp_path, 9)
    Shelf.read(store).sweep()
    assert parts(tmp_path, 9) == before[1]
    assert len(parts(tmp_path, 1)) == len(before[0]) - 1, "what nobody needs, or writes, is swept"
