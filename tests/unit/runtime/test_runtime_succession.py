"""Whether this process's coordinator decides, where another host's may take its place."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from everstep.base.errors import ConfigError
from everstep.runtime.files.host_directory import leave_word
from everstep.runtime.files.led_directory import MOVED
from everstep.runtime.lead import journal_and_lease
from everstep.runtime.lead.journal import Journal, JournalTaken, begin_term, term_in_file
from everstep.runtime.lead.journal_and_lease import FileStore
from everstep.runtime.lead.succession import Lead, Succession
from everstep.runtime.link.address import COORDINATOR_FILE, JOURNAL_FILE, announce

WORD, OTHER = "ab" * 16, "cd" * 16


def says(run_dir: Path, host: str, pid: int) -> None:
    """The directory has the address of this coordinator."""
    announce(run_dir / COORDINATOR_FILE, {"host": host, "port": 7000, "pid": pid})


def test_a_coordinator_that_was_restarted_is_another_one(tmp_path: Path) -> None:
    """Also if nobody has written the address anew yet: it is that of the one before, and no other host leads."""
    told: list[str] = []
    lead = Lead(tmp_path, Succession(owner="o"), "10.0.0.1", told.append)
    says(tmp_path, "10.0.0.1", 41)
    lead.look(41)
    assert lead.here and told == ["coordinator_leads"]
    lead.look(42)
    assert not lead.here and not lead.by_another
    says(tmp_path, "10.0.0.1", 42)
    lead.look(42)
    assert lead.here and told == ["coordinator_leads"]
    says(tmp_path, "10.0.0.2", 42)
    lead.look(42)
    assert not lead.here and lead.by_another, "the same number on another host"
    assert told[1:] == ["coordinator_follows"]


def test_who_leads_is_known_from_the_start(tmp_path: Path) -> None:
    """Nobody else where the job begins; and where one stands by that has not heard of another one, another one."""
    for guest in (False, True):
        lead = Lead(tmp_path, Succession(guest, "o"), "10.0.0.1", lambda kind: None)
        lead.look(41)
        assert not lead.here and lead.by_another == guest


def test_it_hears_from_another_one_that_it_is_not_the_one(tmp_path: Path) -> None:
    """Where etcd does not answer, nobody else says so."""
    told: list[str] = []
    lead = Lead(tmp_path, Succession(owner="o"), "10.0.0.1", told.append)
    lead.heard(OTHER)
    assert not lead.elsewhere, "it has never led here"
    leave_word(tmp_path, None, WORD)
    for place, elsewhere in ((WORD, False), ("", False), (OTHER, True), (OTHER, True)):
        lead.heard(place)
        assert lead.elsewhere == elsewhere
    assert told == ["led_elsewhere"]
    without = Lead(tmp_path, Succession(), "10.0.0.1", told.append)
    without.heard(OTHER)
    assert not without.elsewhere


def test_without_a_lease_it_always_decides(tmp_path: Path) -> None:
    told: list[str] = []
    lead = Lead(tmp_path, Succession(), "10.0.0.1", told.append)
    says(tmp_path, "10.0.0.2", 41)
    lead.look(42)
    assert lead.here and not told


# ---- taken over by hand


def opened(tmp_path: Path, term: int) -> FileStore:
    events: Any = None
    return FileStore(Journal(tmp_path / JOURNAL_FILE), events, term)


def test_who_takes_a_job_over_writes_that_and_all_lives_of_its_coordinator_find_it(tmp_path: Path) -> None:
    """It goes on with a job that was to be stopped (`Saving.replay_stop`). A journal of before has such terms, too."""
    path = tmp_path / JOURNAL_FILE
    stop = {"kind": "stop", "cause": "requested", "reason": "stopped", "exit_code": 130, "grace_ns": 1}
    Journal(path).append(stop)
    terms = [{"kind": "term", "term": term} for term in (1, 2)]
    for count in (1, 2):
        assert begin_term(path) == term_in_file(path) == count
        for _ in range(2):
            store = opened(tmp_path, count)
            assert store.fence() == count and store.entries == [stop, *terms[:count]]


def test_a_job_that_begins_after_a_takeover_has_a_term_and_nothing_to_go_on_from(tmp_path: Path) -> None:
    assert term_in_file(tmp_path / JOURNAL_FILE) == 0
    assert begin_term(tmp_path / JOURNAL_FILE, 3) == 3
    store = opened(tmp_path, 3)
    assert store.fence() == 3 and store.entries == []
    begins, hand = Succession(term=3), Succession(by_hand=True, term=3)
    assert begins.begins and begins.words("10.0.0.1") == ["--term", "3"]
    assert not hand.begins and hand.words("10.0.0.1") == ["--host", "10.0.0.1", "--term", "3"]


@pytest.mark.parametrize(("own", "there"), [(0, 1), (1, 2), (1, 0), (2, 0)])
def test_a_head_leads_by_its_own_term_alone(tmp_path: Path, own: int, there: int) -> None:
    """Its job's process starts its coordinator again, and knows nothing of a takeover, or of a job that began anew."""
    journal = tmp_path / JOURNAL_FILE
    if there:
        begin_term(journal, there)
    before = journal.read_bytes() if there else b""
    with pytest.raises(JournalTaken, match=rf"taken over .term {there} in .*, of term {own}, ends"):
        opened(tmp_path, own).fence()
    assert journal.read_bytes() == before


def test_a_term_that_cannot_be_written_is_not_led_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next takeover would get the same one."""
    path = tmp_path / JOURNAL_FILE
    before, there = opened(tmp_path, 0), path.read_bytes()

    def full(fd: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr(os, "write", full)
        with pytest.raises(ConfigError, match=r"cannot write into .* who leads the job: No space left on device"):
            begin_term(path)
    assert path.read_bytes() == there and before.fence() == 0
    assert begin_term(path) == 1


def test_the_coordinator_that_was_taken_over_from_ends_before_it_acts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, safe, said = opened(tmp_path, 0), [], []
    before._events = Mock(timing=lambda path: contextlib.nullcontext())
    before.on_written(safe.append)
    before.append([{"kind": "ticket", "ticket": 1}])
    begin_term(tmp_path / JOURNAL_FILE)

    def ends(reason: str, exit_code: int) -> None:
        said.append((reason, exit_code))
        raise SystemExit

    monkeypatch.setattr(journal_and_lease, "stand_down", ends)
    with pytest.raises(SystemExit):
        before.append([{"kind": "ended"}])
    assert safe == [1] and said == [(f"another coordinator writes {tmp_path / JOURNAL_FILE} by now", MOVED)]


def test_entries_that_a_full_disk_refused_are_tried_again_without_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_and_lease, "_REFUSED_S", 0.01)
    real, tries = os.pwrite, []

    def full(fd: int, data: bytes, offset: int) -> int:
        tries.append(len(data))
        if len(tries) < 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, data, offset)

    async def refused() -> None:
        store = opened(tmp_path, 0)
        store._events = Mock(timing=lambda path: contextlib.nullcontext())
        monkeypatch.setattr(os, "pwrite", full)
        store.append([{"kind": "ticket", "ticket": 1}])
        async with asyncio.timeout(60):
            while store._journal.pending:
                await asyncio.sleep(0)
        assert store._again is None and store._events.write.call_count == 1

    asyncio.run(refused())
    assert len(tries) == 3 and Journal(tmp_path / JOURNAL_FILE).entries == [{"kind": "ticket", "ticket": 1}]
