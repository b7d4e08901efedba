"""A disk or a host that fails while a checkpoint is written: what a manifest names stays, and the next one is made."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint_saving import advance, identity_of, make_state, save, write_part
from everstep.base.config_keys import CheckpointConfig, DiskTierConfig
from everstep.base.errors import BlobExists, ConfigError, PartsAway, StoreError
from everstep.base.plan import Member, Plan, Seat
from everstep.checkpoint import hosts_store
from everstep.checkpoint.checkpointer import Checkpointer
from everstep.checkpoint.hosts_store import HostsStore
from everstep.checkpoint.manifest_assembly import Assembly
from everstep.checkpoint.manifest_writer import Extent, ManifestWriter, WriteOutcome, write_whole
from everstep.checkpoint.names import manifest_name, step_name
from everstep.checkpoint.part import PartReport
from everstep.checkpoint.reader import manifests_of, newest_complete, open_checkpoint, steps_in, verify_store
from everstep.checkpoint.repair import Copy, Elsewhere, Lost, Repairer
from everstep.checkpoint.retention import Shelf
from everstep.checkpoint.store import DirectoryStore
from everstep.checkpoint.transfer import retention, transfer
from everstep.protocol.driver.policy import Due

TINY = {"w": (5,)}


def parts(folder: Path, step: int) -> set[str]:
    return {path.name for path in (folder / step_name(step)).glob("*.safetensors")}


# ---- the write of a manifest


class OtherHost:
    """Stands for a host with a directory of its own; the requests of a `HostsStore` reach it, or do not."""

    def __init__(self, folder: Path) -> None:
        self.store = DirectoryStore(folder)
        self.asked: list[str] = []
        self.reply_lost = self.silent = False

    def ask(self, address: str, request: dict[str, Any], data: bytes = b"") -> Any:
        operation, name = request["op"], str(request.get("name"))
        self.asked.append(operation)
        if operation == "write" and self.reply_lost:
            self.store.write(name, [data], len(data), request["if_absent"])  # and asked once more
        if self.silent and operation == "write" and request["if_absent"]:
            self.store.write(name, [data], len(data), True)
        if self.silent:
            raise StoreError(f"{address} does not answer", hosts_store._AWAY)
        if operation == "write":
            return self.store.write(name, [data], len(data), request["if_absent"])
        if operation == "list":
            return self.store.list(request["prefix"])
        if operation == "delete":
            return self.store.delete(name)
        if operation == "move":
            return self.store.move(request["old"], request["new"])
        found = {}
        for one in request["names"]:
            if (self.store.path / one).exists():
                found[one] = self.store.size(one)
        return found

    def read(self, address: str, name: str, start: int, length: int) -> bytearray:
        if self.silent:
            raise StoreError(f"{address} does not answer", hosts_store._AWAY)
        return bytearray(self.store.read(name, start, length))


@pytest.fixture
def two_hosts(tmp_path: Path) -> tuple[HostsStore, OtherHost]:
    """The leader's store, on b; a is asked first."""

    def never(*given: Any) -> Any:
        raise AssertionError("no connection is made")

    other = OtherHost(tmp_path / "a")
    store = HostsStore(tmp_path / "b", "b", lambda: {"a": "there:1"}, never, apart=True)
    store._lines = other  # type: ignore[assignment]
    return store, other


def test_a_manifest_whose_reply_was_lost_is_the_own_one_and_goes_to_all_hosts(
    two_hosts: tuple[HostsStore, OtherHost],
) -> None:
    store, other = two_hosts
    other.reply_lost = True
    manifest = save(store, make_state(1), 1)
    for folder in (store.path, other.store.path):
        assert (folder / manifest_name(1)).is_file()
    assert verify_store(store) == [] and parts(store.path, 1) == {Path(f.name).name for f in manifest.files} != set()
    other.reply_lost = False
    with pytest.raises(BlobExists):
        store.write(manifest_name(1), [b"of another writer"], 17, if_absent=True)


@pytest.mark.parametrize("whole", [False, True])
def test_parts_stay_that_the_manifest_names_whose_reply_was_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: bool
) -> None:
    """NFS asks again, and hears that the name exists. whole: a state that one process holds."""
    link = os.link

    def twice(old: str, new: str, **more: Any) -> None:
        link(old, new, **more)
        if new == "manifest.json":
            link(old, new, **more)

    monkeypatch.setattr(os, "link", twice)
    store, state = DirectoryStore(tmp_path), make_state(1)
    if whole:
        with pytest.raises(ConfigError, match="has a checkpoint of step 1 already"):
            write_whole(store, state, identity_of(state), step=1)
    else:
        save(store, state, 1)
    assert steps_in(store) == [1] and verify_store(store) == []


def test_the_leaders_full_disk_leaves_a_checkpoint_that_another_host_has(
    two_hosts: tuple[HostsStore, OtherHost], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, _ = two_hosts
    refuse_manifests(monkeypatch, store.path)
    manifest = save(store, make_state(1), 1)
    assert steps_in(store) == [1] and not (store.path / manifest_name(1)).exists()
    assert verify_store(store) == [] and open_checkpoint(store, 1).manifest.state == manifest.state


def test_parts_stay_while_a_silent_host_may_have_their_manifest(
    two_hosts: tuple[HostsStore, OtherHost], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, other = two_hosts
    undo = refuse_manifests(monkeypatch, store.path)
    writes = store.write

    def falls_silent(name: str, *given: Any, **more: Any) -> None:
        other.silent = name.endswith("manifest.json")
        writes(name, *given, **more)

    monkeypatch.setattr(store, "write", falls_silent)
    with pytest.raises(StoreError, match="No space"):
        save(store, make_state(1), 1)
    with pytest.raises(PartsAway):
        steps_in(store)
    undo()
    other.silent = False
    assert steps_in(store) == [1] and verify_store(store) == []


def refuse_manifests(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Callable[[], None]:
    """A disk with no room for a manifest. Returns what ends that."""
    write = DirectoryStore.write

    def full(store: DirectoryStore, name: str, *given: Any, **more: Any) -> None:
        if refusing and store.path == folder and name.endswith("manifest.json"):
            raise StoreError(f"cannot write {name}: No space left on device")
        write(store, name, *given, **more)

    refusing = [True]
    monkeypatch.setattr(DirectoryStore, "write", full)
    return refusing.clear


def test_a_name_that_is_not_durable_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else there would be a manifest whose parts are gone."""
    sync = os.fsync

    def fails(fd: int) -> None:
        if stat.S_ISDIR(os.fstat(fd).st_mode) and (tmp_path / manifest_name(1)).exists():
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        sync(fd)

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(StoreError, match="Input/output error"):
        save(tmp_path, make_state(1), 1)
    assert steps_in(DirectoryStore(tmp_path)) == [] and parts(tmp_path, 1) == set()


def test_a_manifest_that_cannot_be_taken_back_keeps_its_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = DirectoryStore.write

    def fails(store: DirectoryStore, name: str, *given: Any, **more: Any) -> None:
        write(store, name, *given, **more)
        if name == manifest_name(1):
            raise StoreError("cannot write: Input/output error")

    monkeypatch.setattr(DirectoryStore, "write", fails)
    state = make_state(1)
    with pytest.raises(StoreError, match="Input/output error"):
        save(tmp_path, state, 1)
    store = DirectoryStore(tmp_path)
    assert steps_in(store) == [1] and verify_store(store) == []
    advance(state, 2)
    save(store, state, 2, incremental=True)
    assert steps_in(store) == [1, 2] and verify_store(store) == []


# ---- a checkpoint that cannot be read, made again


def due_of(step: int) -> Extent:
    return Extent(step, Due(("disk",), "for the test"))


@pytest.mark.parametrize("in_verify", [True, False])
def test_one_that_could_not_be_read_is_written_again_in_full_and_takes_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_verify: bool
) -> None:
    """in_verify: the look for checkpoints finds it, not the loading. Nothing of it is base of the new one, not even
    what did not change, and had to be read from there."""
    plan = Plan(1, "test", (Member(0, 0, "here"),), (Seat(0, 0, "active", (0, 1, 2, 3)),), 4)
    state = make_state(1)

    def life() -> Checkpointer:
        return Checkpointer(tmp_path, CheckpointConfig(), identity_of(state), 0, send=lambda data: None)

    def saved(worker: Checkpointer, step: int) -> None:
        worker.start(due_of(step), {0: state}, plan)
        assert worker.drain(60.0)

    first = life()
    saved(first, 1)
    bad = {file.name for file in open_checkpoint(first.store, 1).manifest.files}
    first.before_update()
    with torch.no_grad():
        state.model.get_parameter("deep").add_(1)
    saved(first, 2)
    first.close()
    assert bad < {file.name for file in open_checkpoint(first.store, 2).manifest.files}
    expected = state.state_digest(2)
    broken_data(monkeypatch, bad)
    worker, fresh = life(), make_state(9)
    for step in () if in_verify else (2, 1):
        assert worker.restorable(verify=False) == (step,)
        with pytest.raises(StoreError, match="Input/output error"):
            worker.load(step, {0: fresh})
    assert worker.restorable(verify=in_verify) == () and worker.unreadable is not None
    saved(worker, 2)
    assert not bad & {file.name for file in open_checkpoint(worker.store, 2).manifest.files}
    assert worker.restorable() == (2,)
    worker.load(2, {0: fresh})
    assert fresh.state_digest(2) == expected
    worker.close()


def broken_data(monkeypatch: pytest.MonkeyPatch, bad: set[str]) -> None:
    """The blocks of these files cannot be read; the beginnings can."""
    read, read_into = DirectoryStore.read, DirectoryStore.read_into

    def breaks(store: DirectoryStore, name: str, start: int = 0, length: int | None = None) -> Any:
        if name in bad and start:
            raise StoreError(f"cannot read {name}: Input/output error")
        return read(store, name, start, length)

    def breaks_into(store: DirectoryStore, name: str, start: int, views: Sequence[memoryview]) -> int:
        if name in bad:
            raise StoreError(f"cannot read {name}: Input/output error")
        return read_into(store, name, start, views)

    monkeypatch.setattr(DirectoryStore, "read", breaks)
    monkeypatch.setattr(DirectoryStore, "read_into", breaks_into)


def test_one_that_cannot_be_read_stays_if_the_new_one_needs_the_same_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be readable later, and the new one would be no better."""
    state, store = make_state(1), DirectoryStore(tmp_path)
    manifest = save(store, state, 1)
    broken_data(monkeypatch, {file.name for file in manifest.files})
    with pytest.raises(StoreError, match="Input/output error"):
        save(store, state, 1, workers=2, incremental=1, generation=2)
    monkeypatch.undo()
    assert newest_complete(store).manifest == manifest  # type: ignore[union-attr]
    assert parts(tmp_path, 1) == {Path(file.name).name for file in manifest.files}


def test_a_block_that_cannot_be_read_comes_from_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state, told = make_state(1), list[str]()
    save(tmp_path, state, 1)
    manifest = save(tmp_path, state, 2)
    store = DirectoryStore(tmp_path)
    broken_data(monkeypatch, {file.name for file in manifest.files})
    sources = [Elsewhere(lambda: store, manifests_of)]
    found = newest_complete(store, repair=Repairer(sources, lambda step, reason: told.append(reason)))
    assert found is not None and found.step == 2
    assert all("Input/output error: repaired from byte " in reason for reason in told) and told
    with pytest.raises(StoreError, match="Input/output error"):
        list(open_checkpoint(store, 2).read_blocks([0]))


@pytest.mark.parametrize("away", [True, False])
def test_a_host_that_may_come_back_is_waited_for_and_only_bad_blocks_come_from_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, away: bool
) -> None:
    """away: the file is on a host that is silent. Else one byte of it cannot be read."""
    state, asked, told = make_state(1), list[Lost](), list[str]()
    save(tmp_path, state, 1)
    manifest = save(tmp_path, state, 2)
    store, read_into = DirectoryStore(tmp_path), DirectoryStore.read_into
    bad, at = manifest.place(3)

    def breaks(store: DirectoryStore, name: str, start: int, views: Sequence[memoryview]) -> int:
        if name == bad.name and away:
            raise PartsAway(f"{name} is not here", ["b"])
        if name == bad.name and start <= at < start + sum(view.nbytes for view in views):
            raise StoreError(f"cannot read {name}: Input/output error")
        return read_into(store, name, start, views)

    def source(lost: Lost) -> Copy | None:
        asked.append(lost)
        return Elsewhere(lambda: store, manifests_of)(lost)

    monkeypatch.setattr(DirectoryStore, "read_into", breaks)
    found = open_checkpoint(store, 2, Repairer([source], lambda step, reason: told.append(reason)))
    if away:
        with pytest.raises(PartsAway):
            list(found.read_blocks(range(manifest.n_blocks)))
    else:
        list(found.read_blocks(range(manifest.n_blocks)))
    assert [lost.index for lost in asked] == ([] if away else [3]) and len(told) == len(asked)


# ---- the thread


def writer_of(store: DirectoryStore, ended: Callable[[WriteOutcome], None]) -> ManifestWriter:
    return ManifestWriter(store, identity_of(make_state(1, TINY)), DiskTierConfig(), ended)


def test_states_of_different_sizes_are_different_states(tmp_path: Path) -> None:
    """The one with fewer blocks comes last."""
    store, ended = DirectoryStore(tmp_path), list[WriteOutcome]()
    writer = writer_of(store, ended.append)
    state = make_state(1)
    first = write_part(store, state, 1)
    blocks = first.runs[0][1]
    assert blocks > 2
    checks = [bytes(8 * blocks), bytes(8 * (blocks - 1)), b"\1" * 8 * (blocks - 1)]
    writer.expect(due_of(1), 1, writers=[(0, 0), (0, 1), (0, 2)])
    writer.add(replaced(first, checks=checks[0]))
    for worker_id in (1, 2):
        writer.add(PartReport(1, 1, 0, worker_id, checks=checks[worker_id]))
    assert writer.drain(60.0)
    assert ended[0].differs and "workers 0, 1, 2 hold different states of step 1" in str(ended[0].failed)
    assert parts(tmp_path, 1) == set()
    writer.close()


def replaced(report: PartReport, **fields: Any) -> PartReport:
    return PartReport(**{name: getattr(report, name) for name in report.__struct_fields__} | fields)


@pytest.mark.parametrize("where", ["differing", "_withdraw", "_point", "_sweep", "done"])
def test_a_fault_of_any_kind_does_not_end_the_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    store, ended = DirectoryStore(tmp_path), list[WriteOutcome]()

    def fails(*given: Any) -> Any:
        if not failed:
            failed.append(where)
            raise OSError(errno.EIO, "Input/output error")
        return ""

    def done(outcome: WriteOutcome) -> None:
        ended.append(outcome)
        if where == "done":
            fails()

    failed: list[str] = []
    of = Assembly if where == "differing" else ManifestWriter
    if where != "done":
        monkeypatch.setattr(of, where, fails)
    writer, state = writer_of(store, done), make_state(1, TINY)
    for step in (1, 2):
        writer.expect(due_of(step), 1)
        if where == "_withdraw" and step == 1:
            writer.add(PartReport(1, 1, 0, 0, error="it failed"))
        else:
            writer.add(write_part(store, state, step))
        assert writer.drain(60.0)
    assert failed and [outcome.step for outcome in ended] == [1, 2]
    assert ended[1].failed is None and 2 in steps_in(store)
    assert (ended[0].failed is None) == (where not in ("differing", "_withdraw"))
    writer.close()


# ---- the sweep


@pytest.fixture
def other_job(tmp_path: Path) -> Iterator[str]:
    """A part of another job, of a step that is older than the newest of ours; its manifest is not written yet."""
    store = DirectoryStore(tmp_path)
    report = write_part(store, make_state(3), 1, generation=4, job="job-b")
    assert report.file is not None
    yield report.file.name


def test_parts_that_another_job_is_writing_in_the_same_folder_are_not_swept(tmp_path: Path, other_job: str) -> None:
    state, store = make_state(1), DirectoryStore(tmp_path)
    own = write_part(store, state, 2, workers=2, worker_id=1)
    assert own.file is not None
    save(store, state, 3)
    assert (tmp_path / other_job).exists() and not (tmp_path / own.file.name).exists()
    Shelf.read(store).sweep()
    assert not (tmp_path / other_job).exists(), "of no job in particular, as a user asks for it"


def test_parts_of_another_job_are_swept_once_their_checkpoint_is_retired(tmp_path: Path) -> None:
    """Else a folder that a second job goes on in would fill."""
    state = make_state(1)
    save(tmp_path, state, 1, job="job-b")
    save(tmp_path, state, 2, rule=DiskTierConfig(keep_last=1))
    assert parts(tmp_path, 1) == set() != parts(tmp_path, 2)


def test_a_shelf_remembers_no_parts_that_are_gone(tmp_path: Path) -> None:
    store, shelf = DirectoryStore(tmp_path), Shelf(DirectoryStore(tmp_path))
    for step in range(1, 5):
        shelf.add(save(store, make_state(step, TINY), step))
        shelf.retire(shelf.steps[:-1])
        shelf.sweep({step}, "job-a")
        assert len(shelf.named) <= 2


def test_parts_that_say_nothing_of_a_job_are_swept_and_what_cannot_be_read_is_not(
    tmp_path: Path, other_job: str
) -> None:
    path = tmp_path / other_job
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    table = json.loads(data[8 : 8 + size])
    del table["__metadata__"]["job"]
    path.write_bytes(data[:8] + json.dumps(table).encode().ljust(size) + data[8 + size :])
    junk = path.with_name("part-s0-w9-g1.safetensors")
    junk.write_bytes(b"part")
    save(tmp_path, make_state(1), 2)
    assert not path.exists() and junk.exists()


def test_what_a_manifest_names_that_another_process_wrote_is_not_swept(tmp_path: Path) -> None:
    """A leader that was frozen wakes: the others have gone back since, and made checkpoints of earlier steps."""
    state, store = make_state(1), DirectoryStore(tmp_path)
    save(store, state, 3)
    shelf = Shelf.read(store)
    save(store, state, 2, generation=2)
    shelf.sweep({3})
    assert verify_store(store) == [] and steps_in(store) == [2, 3]


@pytest.mark.parametrize("gone", [True, False])
def test_a_sweep_passes_over_a_manifest_that_is_gone_and_ends_at_one_that_is_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gone: bool
) -> None:
    """Both of another process: the damaged one may name any part."""
    store, state = DirectoryStore(tmp_path), make_state(1)
    save(store, state, 3)
    shelf = Shelf.read(store)
    save(store, state, 2, generation=2)
    own = write_part(store, state, 1, workers=2, worker_id=1)
    path, names = tmp_path / manifest_name(2), store.list("step-")
    if gone:
        path.unlink()
        monkeypatch.setattr(DirectoryStore, "list", lambda *given: names)
    else:
        path.write_bytes(path.read_bytes()[:-9])
    shelf.sweep({3})
    assert own.file is not None and (tmp_path / own.file.name).exists() != gone
    assert set(shelf.broken) == (set() if gone else {2})


def test_an_object_store_that_two_jobs_use_keeps_the_parts_of_both(tmp_path: Path, other_job: str) -> None:
    state, disk = make_state(1), tmp_path / "disk"
    for step in (2, 3):
        save(disk, state, step)
    prune = retention(DiskTierConfig(keep_last=1))
    for step in (2, 3):
        prune(DirectoryStore(tmp_path), transfer(DirectoryStore(disk), DirectoryStore(tmp_path), step).manifest)
    assert steps_in(DirectoryStore(tmp_path)) == [3] and parts(tmp_path, 2) == set()
    assert (tmp_path / other_job).exists()
