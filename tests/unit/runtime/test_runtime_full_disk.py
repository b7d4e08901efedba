"""What a coordinator stands on, on a disk that is full: what is only told waits, or is lost, and nothing ends by it."""

from __future__ import annotations

import asyncio
import errno
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from everstep.base.cause import Cause, Why
from everstep.base.config import load_config
from everstep.base.errors import EverstepError
from everstep.observe.events import EventLog, read_events
from everstep.protocol.lease.candidate import Candidate
from everstep.protocol.lease.requests import Holder, HolderSeen, Look, StoreAnswer, StoreRequest, Unanswered
from everstep.runtime.files.led_directory import LedDirectory
from everstep.runtime.lead import journal_and_lease
from everstep.runtime.lead.journal_and_lease import (
    DEPOSED,
    Asker,
    JournalStore,
    Post,
    Tenure,
    decline,
    make_known,
    open_journal,
    stand_down,
    warn,
)
from everstep.runtime.link import address
from everstep.runtime.link.address import COORDINATOR_FILE, EVENTS_FILE, address_of, read_address

PATIENCE_S = 20.0
HERE, THERE = address_of("10.0.0.3", 1234, pid=8), address_of("10.0.0.2", 1234, pid=9)


class Ended(EverstepError):
    """Instead of the process's end."""


class Full:
    """A stream into a file on such a disk."""

    def write(self, text: str = "") -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    flush = write


class Etcd:
    """Says that another one holds the lease. looked: how often it was asked."""

    looked = 0

    def ask(self, request: StoreRequest) -> StoreAnswer:
        if not isinstance(request, Look):
            return Unanswered("")
        self.looked += 1
        return HolderSeen(Holder("other", THERE, 1, 1))

    def trouble(self) -> str:
        return ""

    def resign(self, lease: int) -> None: ...


def fill_disk(disk: pytest.MonkeyPatch) -> None:
    def full(path: Path, text: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    disk.setattr(address, "write_atomically", full)


def test_who_leads_is_told_when_there_is_room_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, events = tmp_path / COORDINATOR_FILE, EventLog(tmp_path / EVENTS_FILE)
    tries: list[float] = []

    async def asleep(seconds: float) -> None:
        tries.append(seconds)
        if len(tries) == 3:
            disk.undo()

    with monkeypatch.context() as disk:
        fill_disk(disk)
        disk.setattr(asyncio, "sleep", asleep)
        asyncio.run(make_known(path, HERE, events))
    assert len(tries) == 3 and vars(read_address(path)) == HERE
    (said,) = read_events(tmp_path / EVENTS_FILE)
    assert said["kind"] == "warning" and said["cause"] == Cause.DISK and str(path) in said["reason"]


def test_a_host_stands_by_whatever_its_disk_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    etcd = Etcd()
    path = tmp_path / COORDINATOR_FILE
    monkeypatch.setattr(journal_and_lease, "Etcd", lambda *arguments: etcd)
    monkeypatch.setattr(journal_and_lease, "find_access", lambda *arguments: None)
    monkeypatch.setattr(journal_and_lease, "listens", lambda *arguments: asyncio.sleep(0, None))
    config = load_config([("test", {"control.etcd": "etcd://10.0.0.9:2379/job", "control.lease_s": 1.0, "steps": 1})])
    post, events = Post(tmp_path, owner="me"), EventLog(tmp_path / EVENTS_FILE)

    async def stand() -> None:
        waiting = asyncio.ensure_future(open_journal(post, config, b"x" * 32, HERE, events, LedDirectory(tmp_path)))
        with monkeypatch.context() as disk:
            fill_disk(disk)
            while etcd.looked < 3 and not waiting.done():
                await asyncio.sleep(0.01)
        while not path.exists() and not waiting.done():
            await asyncio.sleep(0.01)
        assert not waiting.done()
        waiting.cancel()

    asyncio.run(asyncio.wait_for(stand(), PATIENCE_S))
    assert vars(read_address(path)) == THERE


def test_who_cannot_lead_lets_others_have_the_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[Any] = []

    class Won(Tenure):
        async def resign(self) -> None:
            done.append("resigned")

    monkeypatch.setattr(os, "_exit", done.append)
    tenure = Won(Asker(Etcd(), done.append), Candidate("me", HERE, 1.0), done.append)  # type: ignore[arg-type]
    events = EventLog(tmp_path / EVENTS_FILE)
    asyncio.run(decline(tenure, events, OSError(errno.ENOSPC, "No space left on device", "place")))
    assert done == ["resigned", DEPOSED]
    (said,) = read_events(tmp_path / EVENTS_FILE)
    assert "No space left on device, place" in said["reason"]


def test_words_that_cannot_be_written_keep_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def end(code: int) -> None:
        raise Ended(str(code))

    monkeypatch.setattr(os, "_exit", end)
    monkeypatch.setattr(sys, "stderr", Full())
    warn(EventLog(tmp_path / EVENTS_FILE), Why(Cause.DISK, "it is full"))
    assert [event["reason"] for event in read_events(tmp_path / EVENTS_FILE)] == ["it is full"]
    with pytest.raises(Ended, match=str(DEPOSED)):
        stand_down("its lease is over")
    (tmp_path / "place").write_text("word\n")
    with pytest.raises(Ended):
        LedDirectory(tmp_path).saw("another word")


def opened(run_dir: Path) -> JournalStore:
    config, events = load_config([("test", {"steps": 1})]), EventLog(run_dir / EVENTS_FILE)
    return asyncio.run(open_journal(Post(run_dir), config, b"", HERE, events, LedDirectory(run_dir)))[1]


def test_a_coordinator_decides_though_its_journal_and_its_words_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    async def append(generation: int) -> None:
        journal.append([{"kind": "entered", "generation": generation}])

    journal, safe = opened(tmp_path), []
    journal.on_written(safe.append)
    with monkeypatch.context() as disk:
        disk.setattr(os, "pwrite", full)
        disk.setattr(sys, "stderr", Full())
        asyncio.run(append(1))
    assert safe == [1]
    asyncio.run(append(2))
    assert [entry["generation"] for entry in opened(tmp_path).entries] == [1, 2]
    assert [event["cause"] for event in read_events(tmp_path / EVENTS_FILE)] == [Cause.DISK]
