"""The uploader and what it moves, between two directories: one of them fails, is slow, or holds something else."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from everstep.base.config import load_config
from everstep.base.config_keys import CheckpointConfig, TierConfig
from everstep.base.errors import BlobMissing, CheckpointCorrupt, ConfigError, StoreError
from everstep.checkpoint.names import LATEST, manifest_name
from everstep.checkpoint.object_store import ObjectStore, StoreRefused
from everstep.checkpoint.pointers import read_pointer, write_pins
from everstep.checkpoint.reader import newest_complete, open_checkpoint, steps_in, verify_blocks
from everstep.checkpoint.retention import discard_after
from everstep.checkpoint.store import BytesLike, DirectoryStore
from everstep.checkpoint.stores.s3 import open_s3
from everstep.checkpoint.stores.store_table import open_store
from everstep.checkpoint.transfer import (
    Backoff,
    TransferStopped,
    Uploader,
    open_object_tier,
    open_uploader,
    retention,
    transfer,
)
from exchange_cases import write_step, write_unchanged

LIMIT_S = 60.0
QUICK = Backoff(initial_s=0.001, max_s=0.002, attempts=4)


class Spoiled(DirectoryStore):
    """Calls `before` with the name before it writes: that may raise, or wait."""

    def __init__(self, path: Path, before: Callable[[str], None]) -> None:
        super().__init__(path)
        self.before = before
        self.writes: list[str] = []

    def write(self, name: str, chunks: Iterable[BytesLike], size: int, if_absent: bool = False) -> None:
        self.before(name)
        super().write(name, chunks, size, if_absent)
        self.writes.append(name)


class Events:
    """What was reported, and a way to wait for it."""

    def __init__(self) -> None:
        self.all: list[tuple[str, dict[str, Any]]] = []
        self._changed = threading.Condition()

    def __call__(self, kind: str, fields: dict[str, Any]) -> None:
        with self._changed:
            self.all.append((kind, fields))
            self._changed.notify_all()

    def wait(self, kind: str, count: int = 1) -> list[dict[str, Any]]:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.of(kind)) >= count, LIMIT_S), self.all
            return self.of(kind)

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [fields for k, fields in self.all if k == kind]


def fine(name: str) -> None:
    pass


@pytest.fixture
def source(tmp_path: Path) -> DirectoryStore:
    return DirectoryStore(tmp_path / "disk")


def whole(store: DirectoryStore, step: int) -> bool:
    verify_blocks(open_checkpoint(store, step))
    return True


# ---- transfer


def test_only_what_lacks_is_moved_and_the_manifest_is_last(source: DirectoryStore, tmp_path: Path) -> None:
    first = write_step(source, 1)
    write_unchanged(source, first, 2)
    target = Spoiled(tmp_path / "far", fine)
    seen: list[tuple[int, int]] = []
    done = transfer(source, target, 2, progress=lambda at, total: seen.append((at, total)))
    assert target.writes == [first.manifest.files[0].name, manifest_name(2)]
    assert whole(target, 2) and steps_in(target) == [2]
    assert done.files == 1 and seen[-1][0] == seen[-1][1] == first.manifest.files[0].size
    again = transfer(source, target, 1)
    assert again.files == 0 and target.writes[2:] == [manifest_name(1)] and whole(target, 1)
    assert transfer(source, target, 1).bytes == 0 and len(target.writes) == 3


def test_file_of_an_interrupted_transfer_that_differs_is_written_anew(source: DirectoryStore, tmp_path: Path) -> None:
    part = write_step(source, 1).manifest.files[0]
    target = DirectoryStore(tmp_path / "far")
    data = bytearray(source.read(part.name))
    data[-1] ^= 1
    target.write(part.name, [data], len(data))
    assert transfer(source, target, 1).files == 1
    assert whole(target, 1)


def test_altered_source_is_not_spread(source: DirectoryStore, tmp_path: Path) -> None:
    part = write_step(source, 1).manifest.files[0]
    data = bytearray(source.read(part.name))
    data[part.data_at + 10] ^= 1
    source.write(part.name, [data], len(data))
    target = DirectoryStore(tmp_path / "far")
    with pytest.raises(CheckpointCorrupt, match="altered"):
        transfer(source, target, 1)
    assert target.list() == []


def test_another_runs_checkpoint_is_never_touched(source: DirectoryStore, tmp_path: Path) -> None:
    write_step(source, 1)
    other = DirectoryStore(tmp_path / "other")
    write_step(other, 1, seed=9)
    target = DirectoryStore(tmp_path / "far")
    transfer(other, target, 1)
    before = {name: bytes(target.read(name)) for name in target.list()}
    with pytest.raises(StoreError, match="already holds step 1 of another run"):
        transfer(source, target, 1)
    text = replace(open_checkpoint(source, 1).manifest, step=7).encode()  # step 7 refers to the file of the same name
    source.write(manifest_name(7), [text], len(text))
    with pytest.raises(StoreError, match=r"already holds another step-0000000001/part.*, which step 1 refers to"):
        transfer(source, target, 7)
    assert {name: bytes(target.read(name)) for name in target.list()} == before


def test_same_step_done_again_counts_as_there(source: DirectoryStore, tmp_path: Path) -> None:
    checkpoint = write_step(source, 1)
    target = DirectoryStore(tmp_path / "far")
    transfer(source, target, 1)
    text = replace(checkpoint.manifest, generation=9, created_unix_ns=5).encode()
    source.write(manifest_name(1), [text], len(text))
    assert transfer(source, target, 1).bytes == 0


@pytest.mark.parametrize("damage", ["gone", "rotten"])
def test_a_copy_mends_what_is_damaged_there(source: DirectoryStore, tmp_path: Path, damage: str) -> None:
    checkpoint = write_step(source, 1)
    target, part = DirectoryStore(tmp_path / "far"), checkpoint.manifest.files[0]
    transfer(source, target, 1)
    path = tmp_path / "far" / part.name
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-1] + b"x")
    manifest = target.read(manifest_name(1))
    done = transfer(source, target, 1)
    assert (done.files, done.bytes) == (1, part.size) and whole(target, 1)
    assert target.read(manifest_name(1)) == manifest


def test_a_step_done_again_does_not_mend_files_of_another_cut(source: DirectoryStore, tmp_path: Path) -> None:
    """The target has the same state in files of other names: they count, and go on counting."""
    first = write_step(source, 1)
    target = DirectoryStore(tmp_path / "far")
    transfer(source, target, 1)
    write_unchanged(source, first, 2)
    part = first.manifest.files[0]
    moved = part._replace(name=part.name.replace("-g", "-w9-g").replace("-w0-w9", "-w9"))
    source.write(moved.name, [source.read(part.name)], part.size)
    text = replace(first.manifest, files=(moved,)).encode()
    source.write(manifest_name(1), [text], len(text))
    found = transfer(source, target, 1)
    assert found.bytes == 0 and found.manifest.files == (part,)
    (tmp_path / "far" / part.name).unlink()
    with pytest.raises(StoreError, match="is missing or damaged"):
        transfer(source, target, 1)
    assert steps_in(target) == [1]


def test_stopping(source: DirectoryStore, tmp_path: Path) -> None:
    write_step(source, 1)
    target = DirectoryStore(tmp_path / "far")
    with pytest.raises(TransferStopped):
        transfer(source, target, 1, stopped=lambda: True)
    assert target.list() == []
    with pytest.raises(BlobMissing):
        transfer(source, target, 2)


# ---- uploader


def test_uploads_and_says_so(source: DirectoryStore, tmp_path: Path) -> None:
    write_step(source, 3)
    events, target = Events(), DirectoryStore(tmp_path / "far")
    uploader = Uploader(source, target, events)
    uploader.offer(3)
    assert uploader.finish(LIMIT_S)
    (told,) = events.of("checkpoint_completed")
    assert told["step"] == 3 and told["tier"] == "object" and told["bytes"] > 1000 and told["duration_s"] > 0
    assert not uploader._skipped and whole(target, 3) and not events.of("checkpoint_failed")


def test_trouble_is_told_once_and_its_end(source: DirectoryStore, tmp_path: Path) -> None:
    write_step(source, 1)
    failures = iter([True, True, True, False])

    def before(name: str) -> None:
        if next(failures, False):
            raise StoreError(f"cannot write {name}: the network is down")

    events = Events()
    uploader = Uploader(source, Spoiled(tmp_path / "far", before), events, backoff=QUICK)
    uploader.offer(1)
    assert uploader.finish(LIMIT_S)
    assert [kind for kind, _ in events.all] == ["checkpoint_failed", "checkpoint_completed"]
    assert "the network is down" in events.all[0][1]["reason"] and events.all[0][1]["tier"] == "object"
    assert events.all[1][1]["reason"].startswith("works again")


def test_dead_store_costs_skipped_checkpoints_only(source: DirectoryStore, tmp_path: Path) -> None:
    def before(name: str) -> None:
        raise StoreError(f"cannot write {name}: the network is down")

    events, target = Events(), Spoiled(tmp_path / "far", before)
    uploader = Uploader(source, target, events, backoff=QUICK)
    for step in (1, 2):
        write_step(source, step, seed=step)
        uploader.offer(step)
        while not uploader.idle:
            threading.Event().wait(0.001)
    assert uploader._skipped == [1, 2] and len(events.of("checkpoint_failed")) == 1
    target.before = fine
    write_step(source, 3, seed=3)
    uploader.offer(3)
    assert uploader.finish(LIMIT_S)
    assert events.of("checkpoint_completed")[0]["skipped"] == 2 and steps_in(target) == [3]


def test_refusal_is_not_tried_again(source: DirectoryStore, tmp_path: Path) -> None:
    tried: list[str] = []

    def before(name: str) -> None:
        tried.append(name)
        raise StoreRefused("the credentials have expired")

    events = Events()
    write_step(source, 1)
    uploader = Uploader(source, Spoiled(tmp_path / "far", before), events, backoff=QUICK)
    uploader.offer(1)
    assert not uploader.finish(LIMIT_S)
    assert len(tried) == 1 and len(events.of("checkpoint_failed")) == 1 and uploader._skipped == [1]


def test_newest_wins_and_training_never_waits(source: DirectoryStore, tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        write_step(source, step, seed=step)
    began, go = threading.Event(), threading.Event()

    def before(name: str) -> None:
        began.set()
        assert go.wait(LIMIT_S)

    events, target = Events(), Spoiled(tmp_path / "far", before)
    uploader = Uploader(source, target, events)
    uploader.offer(1)
    assert began.wait(LIMIT_S)
    for step in (2, 3, 4):  # returns although the store does not
        uploader.offer(step)
    assert uploader.holds == {1, 4}
    go.set()
    assert uploader.finish(LIMIT_S)
    assert uploader._skipped == [2, 3] and steps_in(target) == [1, 4] and uploader.holds == frozenset()
    slow = events.of("checkpoint_skipped")
    assert [one["step"] for one in slow] == [2, 3] and "the object store takes longer" in slow[0]["reason"]


def test_what_waits_and_counts_for_nothing_is_not_uploaded(source: DirectoryStore, tmp_path: Path) -> None:
    for step in (1, 3):
        write_step(source, step, seed=step)
    began, go = threading.Event(), threading.Event()

    def before(name: str) -> None:
        began.set()
        assert go.wait(LIMIT_S)

    target = Spoiled(tmp_path / "far", before)
    uploader = Uploader(source, target, Events())
    uploader.offer(1)
    assert began.wait(LIMIT_S)
    uploader.offer(3)
    uploader.invalidate(2)
    assert uploader.holds == {1}
    go.set()
    uploader.finish(LIMIT_S)
    assert steps_in(target) == [1]


def test_all_is_there_if_what_was_left_out_is_older_than_what_is_there(source: DirectoryStore, tmp_path: Path) -> None:
    """Of several that were left out the newest one counts."""
    for step in (1, 2, 3):
        write_step(source, step)
    for missing in (False, True):
        events, began, go = Events(), threading.Event(), threading.Event()

        def before(name: str, began: threading.Event = began, go: threading.Event = go) -> None:
            began.set()
            assert go.wait(LIMIT_S)

        uploader = Uploader(source, Spoiled(tmp_path / f"far-{missing}", before), events, backoff=QUICK)
        uploader.offer(1)
        assert began.wait(LIMIT_S)
        uploader.offer(2)
        uploader.offer(3)
        go.set()
        events.wait("checkpoint_completed", 2)
        if missing:
            uploader.offer(9)
        assert uploader.finish(LIMIT_S) != missing


def test_grace_is_kept(source: DirectoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("everstep.checkpoint.transfer._STOP_PATIENCE_S", 0.05)
    write_step(source, 1)
    began, go = threading.Event(), threading.Event()

    def before(name: str) -> None:
        began.set()
        go.wait(LIMIT_S)

    target = Spoiled(tmp_path / "far", before)
    uploader = Uploader(source, target, Events())
    uploader.offer(1)
    assert began.wait(LIMIT_S)
    assert not uploader.finish(0.05)
    go.set()
    assert uploader._skipped == [1]
    assert newest_complete(target) is None


def test_source_that_has_gone_is_told(source: DirectoryStore, tmp_path: Path) -> None:
    events = Events()
    uploader = Uploader(source, DirectoryStore(tmp_path / "far"), events, backoff=QUICK)
    uploader.offer(8)
    assert not uploader.finish(LIMIT_S)
    assert "does not exist" in events.of("checkpoint_failed")[0]["reason"]


def test_retention_of_the_far_side(source: DirectoryStore, tmp_path: Path) -> None:
    events, target = Events(), DirectoryStore(tmp_path / "far")
    first = write_step(source, 1)
    rule = TierConfig(keep_last=1, keep_every=4)
    uploader = Uploader(source, target, events, retention(rule))
    for step in (1, 2, 3, 4, 5):
        if step in (3, 4):
            write_step(source, step, seed=step)
        elif step != 1:
            write_unchanged(source, first, step)
        if step == 3:
            write_pins(target, {"good": 2})
        uploader.offer(step)
        events.wait("checkpoint_completed", step)
    assert uploader.finish(LIMIT_S)
    assert steps_in(target) == [2, 4, 5] and all(whole(target, step) for step in (2, 4, 5))
    parts = {name.partition("/")[0] for name in target.list("step-") if name.endswith(".safetensors")}
    assert parts == {"step-0000000001", "step-0000000004"}  # the first one's part is needed by 2 and 5
    assert read_pointer(target, LATEST) == 5


def test_what_is_invalidated_is_set_aside_and_may_come_again(source: DirectoryStore, tmp_path: Path) -> None:
    events, target = Events(), DirectoryStore(tmp_path / "far")
    uploader = Uploader(source, target, events, retention(TierConfig(keep_last=5)))
    for step in (1, 2, 3):
        write_step(source, step, seed=step)
        uploader.offer(step)
        events.wait("checkpoint_completed", step)
    discard_after(source, 1)
    assert steps_in(source) == [1] and read_pointer(source, LATEST) is None
    uploader.invalidate(1)
    while not uploader.idle:
        threading.Event().wait(0.001)
    assert steps_in(target) == [1] and read_pointer(target, LATEST) is None
    write_step(source, 2, seed=9)
    uploader.offer(2)
    assert uploader.finish(LIMIT_S)
    assert steps_in(target) == [1, 2] and whole(target, 2) and read_pointer(target, LATEST) == 2


# ---- config


def test_config_makes_the_uploader(source: DirectoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def config(**values: Any) -> CheckpointConfig:
        return load_config([("--set", {f"checkpoint.object.{key}": value for key, value in values.items()})]).checkpoint

    with pytest.raises(ConfigError, match="got none"):
        open_uploader(config(), source, Events())
    store = open_object_tier(config(url="s3://bucket/a/", endpoint="http://127.0.0.1:9"))
    assert isinstance(store, ObjectStore) and store.url == "s3://bucket/a"
    write_step(source, 1)
    uploader = open_uploader(config(url=f"file://{tmp_path}/far", keep_last=1), source, Events())
    uploader.offer(1)
    assert uploader.finish(LIMIT_S) and steps_in(DirectoryStore(tmp_path / "far")) == [1]
    for values in ({"url": "s3://key:secret@bucket"}, {"url": "ftp://b"}, {"endpoint": "http://key:secret@host"}):
        with pytest.raises(ConfigError, match="expected text or none, like"):
            config(**values)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://key:secret@host")
    with pytest.raises(ConfigError, match="no keys in an endpoint"):
        open_s3("s3://bucket")


def test_missing_client_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(ConfigError, match=r"pip install 'everstep\[object\]'"):
        open_store("s3://bucket/x")


def test_backoff_has_full_jitter_and_a_ceiling() -> None:
    backoff = Backoff(initial_s=0.5, max_s=60.0)
    assert [backoff.delay_s(n, lambda low, high: high) for n in (1, 2, 3, 20)] == [1.0, 2.0, 4.0, 60.0]
    assert backoff.delay_s(5, lambda low, high: low) == 0.0
