"""Several workers' checkpointers in one process: they save together, while the state goes on changing."""

from __future__ import annotations

import gc
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint_saving import advance, identity_of, make_state
from everstep.base.cause import Cause, Why
from everstep.base.config_keys import CheckpointConfig, DiskTierConfig
from everstep.base.errors import CheckpointCorrupt, ConfigError, EverstepError, PartsAway, StoreError
from everstep.base.extents import WHOLE, Extents
from everstep.base.plan import Member, Plan, Rank, Seat
from everstep.checkpoint import checkpointer, manifest_writer, part
from everstep.checkpoint.checkpointer import Checkpointer
from everstep.checkpoint.manifest_assembly import Assembly
from everstep.checkpoint.manifest_writer import Extent, WriteOutcome
from everstep.checkpoint.names import is_damaged, manifest_name, step_name
from everstep.checkpoint.part import Base, LiveState, PartJob, PartReport, PartWriter, check_of
from everstep.checkpoint.reader import Checkpoint, open_checkpoint, steps_in
from everstep.checkpoint.store import DirectoryStore, Draft
from everstep.exact.image import BLOCK_BYTES
from everstep.protocol.driver.policy import Due

DISK = Due(("disk",), "for the test")


class Job:
    """Workers with equal states, and what their checkpointers tell."""

    def __init__(self, directory: Path, workers: int, config: CheckpointConfig | None = None) -> None:
        self.began_s = time.monotonic()
        self.states = [make_state(1) for _ in range(workers)]
        self.plan = plan_of(workers)
        self.told: list[tuple[str, dict[str, Any]]] = []
        self.changed = threading.Condition()
        self.collected: list[int] = []
        self.ended: list[WriteOutcome] = []
        self.workers = [
            Checkpointer(
                directory,
                config or CheckpointConfig(),
                identity_of(self.states[0]),
                worker_id,
                send=lambda data: self.workers[0].report(data),
                events=self._tell,
                collected=self.collected.append,
                ended=self.ended.append,
            )
            for worker_id in range(workers)
        ]

    def _tell(self, kind: str, fields: dict[str, Any]) -> None:
        with self.changed:
            self.told.append((kind, fields))
            self.changed.notify_all()

    def wait_told(self, count: int) -> list[tuple[str, dict[str, Any]]]:
        with self.changed:
            if not self.changed.wait_for(lambda: len(self.told) >= count, 60.0):
                raise TimeoutError(f"{self.told}")
        return self.told

    def save(self, step: int, due: Due = DISK, only: int | None = None) -> None:
        for worker_id, worker in enumerate(self.workers[:only]):
            worker.start(Extent(step, due, b"records", {"loop": b"state"}), {0: self.states[worker_id]}, self.plan)

    def wait_kept(self, steps: list[int]) -> None:
        """What need not be kept is deleted a moment after the newest one was told."""
        store, end_s = self.workers[0].store, time.monotonic() + 60.0
        while (found := steps_in(store)) != steps:
            assert time.monotonic() < end_s, f"{found} are there, not {steps}"
            time.sleep(0.001)

    def update(self, seed: int) -> None:
        for worker, state in zip(self.workers, self.states, strict=True):
            worker.before_update()
            advance(state, seed)

    def close(self) -> None:
        """And no time that was told is longer than all of this took."""
        for worker in self.workers:
            worker.close()
        most_s = time.monotonic() - self.began_s
        times = [f.get(name, 0.0) for _, f in self.told for name in ("duration_s", "stall_s")]
        assert all(0.0 <= found <= most_s for found in [*times, *(one.cost_s / 2 for one in self.ended)])


def plan_of(workers: int, generation: int = 1) -> Plan:
    lanes = 4
    share = lanes // workers
    seats = tuple(Seat(k, 0, "active", tuple(range(k * share, (k + 1) * share))) for k in range(workers))
    members = tuple(Member(k, 0, "here") for k in range(workers))
    return Plan(generation, "test", members, seats, lanes)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    jobs: list[Job] = []

    def make(workers: int, config: CheckpointConfig | None = None) -> Job:
        jobs.append(Job(tmp_path / "checkpoints", workers, config))
        return jobs[-1]

    yield make
    for job in jobs:
        job.close()


def test_the_parts_of_a_cell_name_its_rank(start: Callable[..., Job]) -> None:
    job = start(2)
    plan = plan_of(2)
    head, other = plan.members
    job.plan = replace(plan, members=(head, replace(other, limbs=(Rank(7),))))
    job.save(1)
    assert job.wait_told(1)[-1][0] == "checkpoint_completed"
    store = job.workers[0].store
    names = [file.name for file in open_checkpoint(store, 1).manifest.files]
    assert sorted(names) == [f"step-0000000001/part-s0-w{who}-g1.safetensors" for who in ("0", "1-r0")]
    later = start(1)
    later.workers[0].load(1, {0: later.states[0]})
    assert later.states[0].manifest() == job.states[0].manifest()


def test_saved_while_the_state_changes_and_loaded_by_others(start: Callable[..., Job]) -> None:
    job = start(4)
    expected = {}
    for step in (1, 2, 3):
        job.save(step)
        expected[step] = job.states[0].manifest()
        job.update(step)
        kind, fields = job.wait_told(step)[-1]
        assert kind == "checkpoint_completed", fields
        assert (fields["tier"], fields["step"], fields["reason"]) == ("disk", step, "for the test")
        assert 0 < fields["written_bytes"] <= fields["size_bytes"]
    store = job.workers[0].store
    job.wait_kept([2, 3])
    for step in (2, 3):
        assert open_checkpoint(store, step).manifest.state == expected[step]
    later = start(1)
    assert later.workers[0].restorable(most=5) == (2, 3)
    restored = later.workers[0].load(3, {0: later.states[0]})
    assert (restored.records, restored.application) == (b"records", {"loop": b"state"})
    assert later.states[0].manifest() == expected[3]


def test_a_part_that_never_comes(start: Callable[..., Job]) -> None:
    job = start(2)
    job.save(1, only=1)
    job.workers[0]._parts[0].join(60.0)
    job.workers[0].abandon(Why(Cause.REGROUPED, "worker 1 died"), plan_of(1, 2))
    kind, fields = job.wait_told(1)[0]
    assert kind == "checkpoint_skipped" and fields["skipped"] == 1
    assert fields["reason"].startswith("worker 1 died before it was whole (missing: blocks ")
    job.update(1)
    job.save(2)
    assert job.wait_told(2)[1][0] == "checkpoint_completed"
    assert steps_in(job.workers[0].store) == [2]
    assert not (job.workers[0].store.path / "step-0000000001").exists()


def test_a_worker_that_lacks_a_block_of_its_share_writes_no_part(start: Callable[..., Job]) -> None:
    """It would be zeros, with digests that are right."""
    job = start(2)
    of = job.states[1].shape.sizes
    job.save(1, only=1)
    job.workers[1].start(Extent(1, DISK), {0: job.states[1]}, job.plan, {0: WHOLE - Extents.numbered(of, [0])})
    kind, fields = job.wait_told(1)[0]
    assert kind == "checkpoint_skipped" and "worker 1 lacks a part of it" in fields["reason"], fields
    assert steps_in(job.workers[0].store) == []


def test_the_main_hears_when_nothing_is_lacking_and_what_came_of_it(start: Callable[..., Job]) -> None:
    job = start(2)
    main = job.workers[0]
    job.save(1, only=1)
    assert job.collected == [] and not main.drain(0.0)
    job.workers[1].start(Extent(1, DISK), {0: job.states[1]}, job.plan)
    assert main.drain(60.0) and job.workers[1].drain(60.0)
    job.update(1)
    job.save(2, only=1)
    main.abandon(Why(Cause.SLOW, "too long"))
    assert main.drain(60.0)
    assert job.collected == [1, 2]
    assert [outcome.step for outcome in job.ended] == [1, 2]
    whole, given_up = job.ended
    assert whole.manifest is not None and whole.failed is None and whole.cost_s > 0 and whole.why.reason == DISK.reason
    assert given_up.manifest is None and given_up.failed is not None and given_up.failed.cause is Cause.SLOW


def test_damaged_ones_are_passed_over(start: Callable[..., Job]) -> None:
    job = start(2)
    for step in (1, 2):
        job.save(step)
        job.update(step)
        job.wait_told(step)
    store = job.workers[0].store
    path = next(iter(store.path.glob("step-0000000002/*.safetensors")))
    os.truncate(path, 5000)
    assert job.workers[1].restorable() == (1,)
    assert [kind for kind, _ in job.told] == ["checkpoint_completed", "checkpoint_completed", "fallback"]
    path = next(iter(store.path.glob("step-0000000001/*.safetensors")))
    os.truncate(path, 5000)
    with pytest.raises(CheckpointCorrupt, match="truncated"):
        job.workers[1].load(1, {0: job.states[0]})
    assert job.workers[1].restorable() == ()


@pytest.mark.parametrize(
    ("error", "comes_back"), [(PartsAway("its host is away", ["b"]), True), (StoreError("the disk is broken"), False)]
)
def test_what_is_on_hosts_that_are_away_is_read_once_they_are_back(
    error: StoreError, comes_back: bool, start: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a disk could not give is not tried again by this life: its members have heard that it cannot read it."""
    job = start(1)
    job.save(1)
    job.wait_told(1)
    check, worker, away = Checkpoint.check_files, job.workers[0], [error]

    def found(checkpoint: Checkpoint) -> None:
        if away:
            raise away[0]
        check(checkpoint)

    monkeypatch.setattr(Checkpoint, "check_files", found)
    for _ in range(2):
        with pytest.raises(type(error)):
            worker.load(1, {0: job.states[0]})
    away.clear()
    if comes_back:
        assert worker.load(1, {0: job.states[0]}).step == 1
        return
    with pytest.raises(StoreError, match="disk is broken"):
        worker.load(1, {0: job.states[0]})


def test_one_that_cannot_be_read_is_not_taken_for_none(
    start: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = start(1)
    for step in (1, 2):
        job.save(step)
        job.update(step)
        job.wait_told(step)
    read = DirectoryStore.read
    bad = {"step-0000000002"}

    def broken(store: DirectoryStore, name: str, *where: Any) -> Any:
        if name.partition("/")[0] in bad:
            raise StoreError(f"cannot read {name}: Input/output error")
        return read(store, name, *where)

    monkeypatch.setattr(DirectoryStore, "read", broken)
    worker = job.workers[0]
    assert worker.restorable() == (1,) and worker.unreadable is None, "an older one can be read"
    assert "Input/output error" in job.told[-1][1]["reason"]
    assert worker.restorable() == (1,) and [kind for kind, _ in job.told].count("fallback") == 1, "told once"
    bad.add("step-0000000001")
    other = start(1).workers[0]
    assert other.restorable() == () and "Input/output error" in str(other.unreadable)
    assert other.restorable(limit=0) == () and other.unreadable is None


@pytest.mark.parametrize("error", [StoreError, CheckpointCorrupt])
def test_one_whose_data_could_not_be_read_is_stated_no_more_and_not_taken_for_none(
    start: Callable[..., Job], monkeypatch: pytest.MonkeyPatch, error: type[EverstepError]
) -> None:
    """Its manifest and the beginnings of its files can be read, and it may not be possible to set it aside. What is
    known of it keeps no state alive."""
    job = start(1)
    for step in (1, 2):
        job.save(step)
        job.update(step)
        job.wait_told(step)

    def broken(store: DirectoryStore, name: str, *where: Any) -> Any:
        raise error(f"cannot read {name}: Input/output error")

    def data_broken(store: DirectoryStore, name: str, start: int = 0, length: int | None = None) -> Any:
        return broken(store, name) if start else read(store, name, start, length)

    read = DirectoryStore.read
    monkeypatch.setattr(DirectoryStore, "read", data_broken)
    monkeypatch.setattr(DirectoryStore, "read_into", broken)
    monkeypatch.setattr(DirectoryStore, "move", broken)
    worker = job.workers[0]
    assert worker.restorable(verify=False, most=2) == (1, 2)
    for bad in (2, 1):
        state = make_state(1)
        alive = weakref.ref(state)
        with suppress(error):
            worker.load(bad, {0: state})
        assert worker.restorable(verify=False, most=2) == tuple(range(1, bad))
        del state
        gc.collect()
        assert alive() is None
    assert (worker.unreadable is not None) == (error is StoreError)
    assert {e["cause"] for kind, e in job.told if kind == "fallback"} == {error.cause}
    assert worker.restorable(verify=False, limit=0) == () and worker.unreadable is None
    monkeypatch.undo()
    job.update(3)
    assert start(1).workers[0].restorable(most=2) == (1, 2), "another life may look again"


@pytest.mark.parametrize("twice", [False, True])
def test_a_reader_shows_that_it_does_not_hang(start: Callable[..., Job], twice: bool) -> None:
    job, ticks = start(1), list[int]()
    job.save(1)
    job.wait_told(1)
    before = list[int]()
    ready = lambda: before.append(len(ticks))  # noqa: E731
    job.workers[0].load(1, {0: job.states[0]}, ready=ready, twice=twice, tick=lambda: ticks.append(1))
    assert (before[0] > 0) == twice and len(ticks) > before[0]


def test_of_another_job(start: Callable[..., Job]) -> None:
    job = start(1)
    job.save(1)
    job.wait_told(1)
    config = CheckpointConfig()
    for allowed in (False, True):
        identity = identity_of(job.states[0], seed=99)
        other = Checkpointer(
            job.workers[0].store.path, replace(config, allow_mismatch=allowed), identity, 0, send=lambda data: None
        )
        if allowed:
            assert other.restorable() == (1,)
        else:
            with pytest.raises(ConfigError, match="seed is 3 there, 99 here"):
                other.restorable()


def test_a_dead_disk_stops_nothing(start: Callable[..., Job], tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file where the directory was to be")
    job = start(2)
    job.save(1)
    job.update(1)
    kind, fields = job.wait_told(1)[0]
    assert kind == "checkpoint_failed" and "worker " in fields["reason"]
    assert job.workers[0].drain(10.0)


def test_what_turned_out_wrong_is_set_aside_and_may_be_saved_anew(start: Callable[..., Job]) -> None:
    job = start(2)
    for step in (1, 2, 3):
        job.save(step)
        job.update(step)
        job.wait_told(step)
    for worker in job.workers:
        worker.invalidate(2, with_objects=False)
    assert steps_in(job.workers[0].store) == [2] and job.workers[1].restorable(limit=2) == (2,)
    job.save(3)
    job.update(9)
    assert job.wait_told(4)[-1][0] == "checkpoint_completed"
    assert job.workers[1].restorable(limit=2) == (2,) and job.workers[1].restorable() == (3,)


def test_what_turned_out_wrong_and_stays_is_said_and_not_read_again(
    start: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One manifest cannot be read, so its parts stay; another cannot be set aside. The others are."""
    job = start(1, CheckpointConfig(disk=DiskTierConfig(keep_last=4)))
    for step in (1, 2, 3, 4):
        job.save(step)
        job.update(step)
        job.wait_told(step)
    store = job.workers[0].store
    move, read = DirectoryStore.move, DirectoryStore.read
    stuck, unread = {manifest_name(3)}, {manifest_name(4)}

    def moving(self: DirectoryStore, old: str, new: str) -> None:
        if old in stuck:
            raise StoreError(f"cannot move {old}: Operation not permitted")
        move(self, old, new)

    def reading(self: DirectoryStore, name: str, *where: Any) -> Any:
        if name in unread:
            raise StoreError(f"cannot read {name}: Input/output error")
        return read(self, name, *where)

    monkeypatch.setattr(DirectoryStore, "move", moving)
    monkeypatch.setattr(DirectoryStore, "read", reading)
    worker = job.workers[0]
    worker.invalidate(2, with_objects=False)
    assert steps_in(store) == [1, 2, 3]
    kind, fields = job.told[-1]
    assert kind == "warning" and "cannot move step-0000000003" in fields["reason"] and fields["step"] == 2
    assert worker.restorable() == (2,)
    stuck.clear()
    assert worker.restorable() == (2,) and steps_in(store) == [1, 2]
    job.save(3)
    assert worker.drain(60.0) and worker.restorable() == (3,), "the one that was done again counts"


@pytest.mark.parametrize("again", [False, True])
def test_a_frozen_leader_that_wakes_completes_nothing_that_was_discarded(
    start: Callable[..., Job], monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    """It has all parts and is about to write the manifest when the others find that this state was wrong. again: a
    checkpoint of that step had been discarded before, so its folder holds something that was set aside."""
    asked, wakes, write = threading.Event(), threading.Event(), DirectoryStore.write

    def frozen(self: DirectoryStore, name: str, *args: Any, **options: Any) -> None:
        if "step-0000000003/manifest" in name and threading.current_thread().name == "everstep-manifest" and not held:
            held.append(name)
            asked.set()
            wakes.wait(60.0)
        write(self, name, *args, **options)

    held: list[str] = ["not this time"] if again else []
    monkeypatch.setattr(DirectoryStore, "write", frozen)
    job = start(2)
    for step in (1, 2, *([3] if again else [])):
        job.save(step)
        job.update(step)
        job.wait_told(step)
    if again:
        job.workers[1].invalidate(2, with_objects=False)
        held.clear()
        job.plan = plan_of(2, generation=2)
    job.save(3)
    job.update(3)
    assert asked.wait(60.0)
    job.workers[1].invalidate(2, with_objects=False)
    wakes.set()
    assert job.workers[0].drain(60.0)
    assert 3 in steps_in(job.workers[1].store)  # its manifest was written, and must count for nothing
    assert job.workers[1].restorable() == (2,)
    job.plan = plan_of(2, generation=3)
    job.save(3)
    job.update(9)
    assert job.workers[0].drain(60.0) and job.workers[1].restorable() == (3,)


def test_a_manifest_that_another_leader_has_written_meanwhile_stays(
    start: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    job, write, theirs = start(1), DirectoryStore.write, b"of the leader that did the step again"
    worker = job.workers[0]

    def writing(self: DirectoryStore, name: str, *args: Any, **options: Any) -> None:
        write(self, name, *args, **options)
        if name == manifest_name(2):
            worker.invalidate(1, with_objects=False)
            (self.path / name).write_bytes(theirs)

    monkeypatch.setattr(checkpointer, "_DRAIN_S", 0.0)
    monkeypatch.setattr(DirectoryStore, "write", writing)
    job.save(2)
    job.update(2)
    assert worker.drain(60.0)
    assert (worker.store.path / manifest_name(2)).read_bytes() == theirs and job.ended[-1].manifest is None


@pytest.mark.parametrize("sound", [2, 3])
@pytest.mark.parametrize("again", [False, True])
def test_what_is_discarded_while_the_leader_writes_its_manifest_is_not_published(
    start: Callable[..., Job], monkeypatch: pytest.MonkeyPatch, again: bool, sound: int
) -> None:
    """again: it has just read all blocks, since an earlier checkpoint of the step is damaged; that may take minutes.
    A step that is sound is completed all the same."""
    asked, wakes = threading.Event(), threading.Event()
    verify, write = manifest_writer.verify_blocks, DirectoryStore.write

    def wait() -> None:
        asked.set()
        wakes.wait(60.0)

    def verifying(found: Checkpoint) -> None:
        verify(found)
        wait()

    def writing(self: DirectoryStore, name: str, *args: Any, **options: Any) -> None:
        if name == manifest_name(3):
            wait()
        write(self, name, *args, **options)

    monkeypatch.setattr(checkpointer, "_DRAIN_S", 0.0)
    job = start(2)
    for step in (1, 2, *([3] if again else [])):
        job.save(step)
        job.update(step)
        job.wait_told(step)
    worker, store = job.workers[0], job.workers[0].store
    if again:
        (store.path / manifest_name(3)).write_bytes(b"damaged")
        monkeypatch.setattr(manifest_writer, "verify_blocks", verifying)
    else:
        monkeypatch.setattr(DirectoryStore, "write", writing)
    job.plan = plan_of(2, generation=2)
    job.save(3)
    job.update(3)
    assert asked.wait(60.0)
    worker.invalidate(sound, with_objects=False)
    wakes.set()
    assert worker.drain(60.0)
    assert (3 in steps_in(store)) == (job.ended[-1].manifest is not None) == (sound == 3)
    assert job.workers[1].restorable() == (sound,)
    aside = [name for name in store.list(step_name(3)) if is_damaged(name)]
    assert len(aside) == (1 if again or sound == 2 else 0), "what is known to be wrong is not even written"
    job.plan = plan_of(2, generation=3)
    job.save(3)
    assert worker.drain(60.0) and job.workers[1].restorable() == (3,)


def test_draining_waits_for_what_began(start: Callable[..., Job]) -> None:
    job = start(3)
    job.save(5, Due(("disk",), "SIGTERM"))
    assert all(worker.drain(60.0) for worker in reversed(job.workers))
    assert steps_in(job.workers[0].store) == [5]


class Gate(DirectoryStore):
    """A disk that stands still until it is told to go on."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.open = threading.Event()

    @contextmanager
    def draft(self, name: str) -> Iterator[Draft]:
        self.open.wait(60.0)
        with super().draft(name) as draft:
            yield draft


def test_what_began_is_known_until_the_disk_has_it_however_many_updates_come(
    start: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, draft = threading.Event(), DirectoryStore.draft

    @contextmanager
    def slow(self: DirectoryStore, name: str) -> Iterator[Draft]:
        opened.wait(60.0)
        with draft(self, name) as found:
            yield found

    monkeypatch.setattr(DirectoryStore, "draft", slow)
    job = start(2)
    job.save(1)
    for seed in (1, 2):
        job.update(seed)
        assert not any(worker.drain(0.0) for worker in job.workers)
    for worker in reversed(job.workers):
        worker.start(Extent(2, DISK), {0: job.states[1]}, job.plan)
    assert "still being written" in job.wait_told(2)[1][1]["reason"], "not two at once"
    opened.set()
    assert all(worker.drain(60.0) for worker in reversed(job.workers))


@pytest.mark.parametrize("updates", [1, 3])
@pytest.mark.parametrize("limit_blocks", [100, 3])
def test_updates_before_the_disk_is_ready(tmp_path: Path, limit_blocks: int, updates: int) -> None:
    """What is not written yet is copied, up to the limit; beyond, the part is given up. Never is it torn, however many
    steps the disk takes."""
    state = make_state(1)
    expected = state.manifest()["blocks"]
    live = LiveState(state)
    store = Gate(tmp_path)
    reports: list[PartReport] = []
    job = PartJob(PartReport(1, 1, 0, 0, ((0, live.n_blocks),)), True, limit_blocks * BLOCK_BYTES)
    writer = PartWriter(store, job, live, Base, reports.append)
    threading.Thread(target=writer.run, daemon=True).start()
    for _ in range(updates):
        kept = writer.before_update(0.01)
        with torch.no_grad():
            for parameter in state.model.parameters():
                parameter.add_(1)
    store.open.set()
    assert writer.join(60.0)
    assert kept == (limit_blocks == 100)
    if kept:
        assert [reports[0].digests[k : k + 32] for k in range(0, len(reports[0].digests), 32)] == expected
    else:
        assert "staging_mb" in reports[0].error and reports[0].file is None
        assert list(tmp_path.rglob("*.safetensors")) == []


def test_a_disk_that_refuses_while_the_update_waits_gives_the_part_up_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker goes on: the thread has let go of the state meanwhile, which is no error of the training."""
    live = LiveState(make_state(1))
    job = PartJob(PartReport(1, 1, 0, 0, ((0, live.n_blocks),)), True, 100 * BLOCK_BYTES)
    writer = PartWriter(DirectoryStore(tmp_path), job, live, Base, lambda report: None)

    def refuses(predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        writer._stop = Why(Cause.DISK, "No space left on device")
        live.release()
        return True

    monkeypatch.setattr(writer._changed, "wait_for", refuses)
    assert not writer.before_update()


def test_a_part_right_after_the_update_has_time_to_be_written_where_memory_lacks_room(tmp_path: Path) -> None:
    """Meanwhile the worker is seen not to hang."""
    live, store, reports = LiveState(make_state(1)), Gate(tmp_path), list[PartReport]()
    job = PartJob(PartReport(1, 1, 0, 0, ((0, live.n_blocks),)), True, 3 * BLOCK_BYTES)
    writer = PartWriter(store, job, live, Base, reports.append)
    threading.Thread(target=writer.run, daemon=True).start()
    assert writer.before_update(60.0, store.open.set)
    assert writer.join(60.0) and not reports[0].error


def test_memory_for_what_is_not_written_is_what_is_left_or_what_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(part, "available_bytes", lambda: 80 * BLOCK_BYTES)
    report = PartReport(1, 1, 0, 0)
    assert PartJob(report, True, None, 0.125).staging_blocks() == 10
    assert PartJob(report, True, 7 * BLOCK_BYTES, 0.125).staging_blocks() == 7
    assert PartJob(report, True, 0).staging_blocks() == 0


def test_workers_of_a_host_share_what_is_left(start: Callable[..., Job], monkeypatch: pytest.MonkeyPatch) -> None:
    shares: list[float] = []

    def spy(*args: Any, **more: Any) -> PartJob:
        shares.append(args[3])
        return PartJob(*args, **more)

    monkeypatch.setattr(checkpointer, "PartJob", spy)
    start(2).save(5)
    assert shares == [0.25, 0.25]


@pytest.mark.parametrize("updates", [1, 3])
@pytest.mark.parametrize("limit_blocks", [100, 3])
def test_what_others_write_is_compared_too_and_takes_no_memory(tmp_path: Path, limit_blocks: int, updates: int) -> None:
    """Whatever is read by the writer or, since the update comes too early, before that."""
    state = make_state(1)
    live = LiveState(state)
    expected = b"".join(check_of(state.read_block(k)) for k in range(len(state.manifest()["blocks"])))
    store, reports = Gate(tmp_path), list[PartReport]()
    report = PartReport(1, 1, 0, 0, ((live.n_blocks - 2, live.n_blocks),))
    job = PartJob(report, True, limit_blocks * BLOCK_BYTES, compare=True)
    writer = PartWriter(store, job, live, Base, reports.append)
    threading.Thread(target=writer.run, daemon=True).start()
    for _ in range(updates):
        assert writer.before_update(0.01)
        with torch.no_grad():
            for parameter in state.model.parameters():
                parameter.add_(1)
    store.open.set()
    assert writer.join(60.0)
    assert reports[0].checks == expected and len(reports[0].digests) == 2 * 32
    assert {"what it consists of", "groups/0", "state"} <= set(reports[0].facts)


def test_parts_may_be_of_any_blocks(tmp_path: Path) -> None:
    """Blocks of one worker lie between those of others, in the middle of tensors: the manifest is that of one writer.

    Each block is in one file; what is not there yet is said.
    """
    state = make_state(1)
    n_blocks = LiveState(state).n_blocks
    turns = [tuple((k, k + 1) for k in range(first, n_blocks, 3)) for first in range(3)]
    assembly = Assembly(1, 1, 1)
    for worker_id, runs in enumerate(turns):
        if worker_id:
            assert f"blocks {worker_id} to " in assembly.missing()
        job = PartJob(PartReport(1, 1, 0, worker_id, runs), worker_id == 0, 0, compare=worker_id == 1)
        PartWriter(DirectoryStore(tmp_path), job, LiveState(state), Base, assembly.add).run()
    assert n_blocks > 6 and assembly.missing() == ""
    alone = state.manifest()
    assert {key: assembly.stage_manifest(0)[key] for key in alone} == alone
    assert sorted(assembly.written(0)) == list(range(n_blocks))


def test_a_checkpoint_of_different_states_does_not_count(start: Callable[..., Job]) -> None:
    job = start(2)
    name, parameter = next(iter(job.states[1].model.named_parameters()))
    with torch.no_grad():
        parameter.mul_(0.999)
    job.save(5)
    assert job.workers[0].drain(60.0)
    assert steps_in(job.workers[0].store) == [] and job.ended[-1].differs
    failed = job.ended[-1].failed
    assert failed is not None and failed.cause is Cause.CORRUPT
    assert failed.reason.startswith("workers 0, 1 hold different states of step 5, in the blocks of ")
    assert name in failed.reason
    assert list(job.workers[0].store.list("step-0000000005/")) == []
    with torch.no_grad():
        parameter.copy_(next(job.states[0].model.parameters()))
    job.states[1].optimizer.param_groups[0]["lr"] = 0.5
    job.save(6)
    assert job.workers[0].drain(60.0)
    assert "in the blocks of groups/0" in str(job.ended[-1].failed)


def test_a_manifest_names_no_part_that_is_elsewhere(start: Callable[..., Job], tmp_path: Path) -> None:
    job = start(2)
    job.workers[1].close()
    job.workers[1] = Checkpointer(
        tmp_path / "elsewhere",
        CheckpointConfig(),
        identity_of(job.states[0]),
        1,
        send=lambda data: job.workers[0].report(data),
    )
    job.save(5)
    assert job.workers[0].drain(60.0)
    assert steps_in(job.workers[0].store) == []
    assert "set checkpoint.shared=no if hosts do not share" in str(job.ended[-1].failed)
