"""Copies of the job's directory: all of it arrives, byte for byte, and nothing else is ever written."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import queue
from pathlib import Path
from typing import Any

import msgspec
import pytest

from everstep.base.below import write_atomically
from everstep.observe.events import EventLog
from everstep.protocol.messages import AnyMessage, FilePiece, FilePieces, FilesHeld, StandbyHello
from everstep.runtime.files import file_sender
from everstep.runtime.files.file_sender import FileSender, digest_of
from everstep.runtime.files.file_sets import TO_STANDBY
from everstep.runtime.files.head_files import HeadFiles
from everstep.runtime.files.host_directory import COPY_FILE, PLACE_FILE, leave_word
from everstep.runtime.files.led_directory import MOVED, LedDirectory, led_directory
from everstep.runtime.files.standby_files import LATE_S, CopyState, DirectoryCopy, copied
from everstep.runtime.files.standby_senders import InStep, StandbyHosts

SOURCE, OTHER = "ab" * 16, "cd" * 16


def files(folder: Path) -> dict[str, bytes]:
    """What a copy is to have."""
    return {name: (folder / name).read_bytes() for name in copied(folder)}


class Filled:
    """A copy, and what sends to it; the test passes the messages on."""

    def __init__(self, job: Path, copy: DirectoryCopy, source: str = SOURCE) -> None:
        self.copy = copy
        self.sent: queue.Queue[FilePieces] = queue.Queue()
        self.sender = FileSender(TO_STANDBY, lambda: TO_STANDBY.found(job), source, self.sent.put, mirrors=True)

    def __enter__(self) -> Filled:
        return self

    def __exit__(self, *error: object) -> None:
        self.sender.close()

    def bring(self) -> tuple[FilePieces, FilesHeld]:
        """The next message, and the answer."""
        message = self.sent.get(timeout=60)
        answer = self.copy.take(message)
        self.sender.answered(answer if answer.number else FilesHeld(number=message.number))
        return message, answer


def fill(job: Path, copy: DirectoryCopy, source: str = SOURCE) -> int:
    """Until it has all; returns how many bytes came."""
    count = 0
    with Filled(job, copy, source) as filled:
        for _ in range(1000):
            message, answer = filled.bring()
            count += sum(len(piece.data) for piece in message.pieces)
            if answer.has_all(message):
                return count
    raise AssertionError("there is always more")


@pytest.fixture
def job(tmp_path: Path) -> Path:
    found = tmp_path / "job"
    for folder in ("ledger", "final", "chaos", "metrics", "logs", "checkpoints"):
        (found / folder).mkdir(parents=True)
    (found / "job.json").write_text("{}")
    (found / "events.jsonl").write_text('{"kind":"a"}\n{"kind":"b"}\n')
    (found / "ledger" / "worker-0-0.jsonl").write_text("x\n")
    (found / "ledger" / "worker-1-0-0123456789abcdef.jsonl").write_text("y\n")
    (found / "final" / "model.safetensors").write_bytes(os.urandom(5 << 19))
    (found / "final" / "digest.json").write_text("{}")
    (found / "chaos" / "0").write_text("5")
    (found / "token").write_text("secret")
    (found / "hosts.json").write_text("{}")
    leave_word(found, None, SOURCE)
    return found


def test_all_arrives_and_no_more_than_that(job: Path, tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    copy = DirectoryCopy(own)
    assert not copy.state(None).complete
    assert fill(job, copy) == sum(map(len, files(job).values()))
    assert files(own) == files(job) and len(files(own)) == 7
    assert copy.state(None).complete and copy.source == SOURCE
    assert not any((own / name).exists() for name in ("token", "hosts.json", PLACE_FILE, "checkpoints"))
    assert fill(job, DirectoryCopy(own)) == 0, "what is there does not come again, also after a restart"


def test_files_grow_by_whole_lines_and_begin_anew_where_they_are_others(job: Path, tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    copy = DirectoryCopy(own)
    fill(job, copy)
    with open(job / "events.jsonl", "a") as events:
        events.write('{"kind":"c"}\n{"ki')
    fill(job, copy)
    assert (own / "events.jsonl").read_text() == '{"kind":"a"}\n{"kind":"b"}\n{"kind":"c"}\n'
    with open(job / "events.jsonl", "a") as events:
        events.write('nd":"d"}\n')
    (job / "metrics" / "h.jsonl").write_text("1\n")
    fill(job, copy)
    os.replace(job / "metrics" / "h.jsonl", job / "metrics" / "h.1.jsonl")
    (job / "metrics" / "h.jsonl").write_text("2\n3\n")
    (job / "newest-checkpoint.json").write_text("1")
    fill(job, copy)
    (job / "new").write_text("22")
    os.replace(job / "new", job / "newest-checkpoint.json")
    fill(job, copy)
    assert files(own) == files(job)


def test_a_copy_of_another_directory_begins_anew(job: Path, tmp_path: Path) -> None:
    """Its files may go on otherwise than those of who leads now."""
    own, later = tmp_path / "own", tmp_path / "later"
    own.mkdir()
    copy = DirectoryCopy(own)
    fill(job, copy)
    later.mkdir()
    (later / "events.jsonl").write_text('{"kind":"z"}\n')
    copy.take(FilePieces(source=OTHER, number=1, rest=True))
    assert files(own) == {} and copy.state(None) == CopyState(False, None, before=True)
    fill(later, copy, OTHER)
    assert files(own) == {"events.jsonl": b'{"kind":"z"}\n'}
    assert DirectoryCopy(own).source == OTHER and DirectoryCopy(own).state(None) == CopyState(True, None)


def test_what_was_complete_is_gone_on_from_if_who_fills_it_anew_is_lost(job: Path, tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    copy = DirectoryCopy(own)
    fill(job, copy)
    half = FilePiece(path="events.jsonl", version="9", at=0, data=b"{}\n")
    copy.take(FilePieces(source=OTHER, number=1, pieces=[half], rest=True))
    assert files(own) == {"events.jsonl": b"{}\n"}
    copy.take(FilePieces(source="ef" * 16, number=1, rest=True))
    DirectoryCopy(own).fall_back()
    assert files(own) == files(job)
    DirectoryCopy(own).fall_back()
    assert files(own) == files(job) and not list(own.glob(".before*"))


def cut_off(now: pytest.MonkeyPatch, renamed: int) -> None:
    """The process ends after so many renamings."""
    rename, left = os.replace, iter(range(renamed))

    def renames(*names: Any, **more: Any) -> None:
        if next(left, None) is None:
            raise KeyboardInterrupt
        rename(*names, **more)

    now.setattr(os, "replace", renames)


@pytest.mark.parametrize("renamed", range(12))
@pytest.mark.parametrize("head", ["none", "the same", "another"])
@pytest.mark.parametrize("act", ["a fall back", "a beginning"])
def test_an_act_that_was_cut_off_between_two_files_loses_none(
    job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, act: str, head: str, renamed: int
) -> None:
    own = tmp_path / "own"
    own.mkdir()
    copy = DirectoryCopy(own)
    fill(job, copy)
    half = FilePieces(
        source=OTHER,
        number=1,
        pieces=[FilePiece(path="events.jsonl", version="9", at=0, data=b"{}\n")],
        rest=True,
    )
    if act == "a fall back":
        copy.take(half)
    with monkeypatch.context() as now, contextlib.suppress(KeyboardInterrupt):
        cut_off(now, renamed)
        if act == "a fall back":
            copy.fall_back()
        else:
            copy.take(half)
    copy = DirectoryCopy(own)
    assert copy.state(None).usable
    if head != "none":
        assert copy.take(msgspec.structs.replace(half, source=OTHER if head == "the same" else "ef" * 16)).number
        copy = DirectoryCopy(own)
        assert copy.state(None) == CopyState(False, None, before=True)
    copy.fall_back()
    assert files(own) == files(job) and copy.state(None) == CopyState(True, None)
    assert DirectoryCopy(own).state(None) == CopyState(True, None) and not list(own.glob(".*"))


def test_after_a_fall_back_the_head_that_was_lost_fills_the_copy_from_its_first_file(job: Path, tmp_path: Path) -> None:
    """What it had sent is gone, so no note may say that it is there."""
    own, later = tmp_path / "own", tmp_path / "later"
    for folder in (own, later):
        folder.mkdir()
    copy = DirectoryCopy(own)
    fill(job, copy)
    (later / "job.json").write_text("[]")
    came = FilePiece(path="job.json", version=digest_of(later / "job.json"), at=0, data=b"[]", size=2)
    copy.take(FilePieces(source=OTHER, number=1, pieces=[came], rest=True))
    copy.fall_back()
    assert files(own) == files(job)
    copy = DirectoryCopy(own)
    fill(later, copy, OTHER)
    assert files(own) == files(later)


def test_pieces_that_do_not_fit_have_no_effect(tmp_path: Path) -> None:
    copy = DirectoryCopy(tmp_path)

    def held(path: str, at: int = 0, data: bytes = b"x\n", size: int = 0, version: str = "1") -> int | None:
        piece = FilePiece(path=path, version=version, at=at, data=data, size=size)
        return copy.take(FilePieces(source=SOURCE, number=1, pieces=[piece])).held.get(path)

    for path in ("../events.jsonl", "/etc/x", "token", "hosts.json", "place", "replica.json", "ledger/../token"):
        assert held(path) is None and held(path, size=2, version="0" * 32) is None
    assert {path.name for path in tmp_path.iterdir()} == {COPY_FILE}
    assert held("events.jsonl", at=5) == 0
    assert held("events.jsonl") == 2 and held("events.jsonl", at=2) == 4 and held("events.jsonl", at=2) == 4
    assert held("events.jsonl", at=9) == 4 and held("events.jsonl") == 4
    assert (tmp_path / "events.jsonl").read_bytes() == b"x\nx\n"
    (tmp_path / "data").write_bytes(b"x\n")
    digest = digest_of(tmp_path / "data")
    assert held("job.json", size=2, version="0" * 32) is None, "it was altered on the way"
    assert held("job.json", size=1, version=digest) == 0 and held("job.json", at=1, size=3, version=digest) == 0
    assert held("job.json", size=1 << 50, data=b"", version=digest) == 0
    assert not (tmp_path / "job.json").exists()
    assert held("job.json", size=2, version=digest) == 2
    os.symlink(tmp_path / "data", tmp_path / "dataset.json")
    os.makedirs(tmp_path / "ledger")
    os.symlink(tmp_path / "data", tmp_path / "ledger" / "worker-0-0.jsonl")
    assert held("ledger/worker-0-0.jsonl") is None
    (tmp_path / "elsewhere").mkdir()
    os.symlink(tmp_path / "elsewhere", tmp_path / "final")
    assert held("final/digest.json", size=2, version=digest) is None and not list((tmp_path / "elsewhere").iterdir())
    assert (tmp_path / "data").read_bytes() == b"x\n"


def test_a_file_that_gets_the_number_of_the_one_before_is_no_longer_one_of_the_same(job: Path, tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    copy = DirectoryCopy(own)
    fill(job, copy)
    with open(job / "events.jsonl", "r+") as events:
        events.write('{"kind":"y"}\n' * 9)
    fill(job, copy)
    assert files(own) == files(job)


def test_a_file_that_shrank_is_sent_from_its_first_byte(job: Path, tmp_path: Path) -> None:
    """The disk of the head lost power, say."""
    own = tmp_path / "own"
    own.mkdir()
    copy = DirectoryCopy(own)
    fill(job, copy)
    with open(job / "events.jsonl", "r+") as events:
        events.truncate(len('{"kind":"a"}\n'))
    with Filled(job, copy) as filled:
        while files(own) != files(job):
            filled.bring()


@pytest.mark.parametrize("new", ["what is new", "longer than it was before", "short"])
def test_a_file_that_did_not_fit_comes_again(
    job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, new: str
) -> None:
    """A whole one is there as it was until all of the new one is; one that grows is begun anew."""
    own = tmp_path / "own"
    own.mkdir()
    (job / "job.json").write_text("what was old")
    (job / "logs" / "output.log").write_text("what was old\n")
    copy = DirectoryCopy(own)
    fill(job, copy)
    for name in ("job.json", "logs/output.log"):
        (tmp_path / "new").write_text(f"{new}\n")
        os.replace(tmp_path / "new", job / name)
    write = os.pwrite

    def full(*arguments: object, **more: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with Filled(job, copy) as filled:
        for name, refuses in (
            ("pwrite", lambda fd, data, at: write(fd, data[:3], at)),
            ("pwrite", full),
            ("replace", full),
        ):
            with monkeypatch.context() as now:
                now.setattr(os, name, refuses)
                for _ in range(4):
                    message, answer = filled.bring()
                    assert not answer.has_all(message)
            assert (own / "job.json").read_text() == "what was old"
        while not answer.has_all(message):
            message, answer = filled.bring()
    assert files(own) == files(job)


def test_what_has_taken_its_place_again_is_kept_though_that_could_not_be_noted(
    job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, text: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    own = tmp_path / "own"
    own.mkdir()
    copy = DirectoryCopy(own)
    fill(job, copy)
    copy.take(FilePieces(source=OTHER, number=1, rest=True))
    with monkeypatch.context() as disk, pytest.raises(OSError, match="No space"):
        disk.setattr("everstep.runtime.files.standby_files.write_atomically", full)
        copy.fall_back()
    again = DirectoryCopy(own)
    assert again.state(None).usable
    again.fall_back()
    assert files(own) == files(job) and again.state(None).complete


@pytest.mark.parametrize("refused", [1, 2])
def test_a_copy_that_could_not_begin_anew_is_no_mixture(
    job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: int
) -> None:
    own, other = tmp_path / "own", tmp_path / "other"
    for folder in (own, other):
        folder.mkdir()
    (other / "job.json").write_text("{}")
    copy, count = DirectoryCopy(own), 0
    fill(job, copy)

    def full(path: Path, text: str) -> None:
        nonlocal count
        count += 1
        if count == refused:
            raise OSError(errno.ENOSPC, "No space left on device")
        write_atomically(path, text)

    monkeypatch.setattr("everstep.runtime.files.standby_files.write_atomically", full)
    assert copy.take(FilePieces(source=OTHER, number=1)).number == 0
    assert copy.state(None).usable, "what was complete is there still"
    again = DirectoryCopy(own)
    assert again.source != OTHER and again.state(None).usable
    fill(other, copy, OTHER)
    assert files(own) == files(other)


def test_an_empty_file_that_was_not_taken_comes_again(job: Path, tmp_path: Path) -> None:
    (job / "job.json").write_text("")
    with Filled(job, DirectoryCopy(tmp_path)) as filled:
        for _ in range(2):
            message = filled.sent.get(timeout=60)
            assert "job.json" in {piece.path for piece in message.pieces}
            filled.sender.answered(FilesHeld(number=message.number))


@pytest.mark.parametrize("trouble", ["a file", "the list", "a folder"])
def test_a_copy_is_not_complete_without_what_could_not_be_read(
    job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], trouble: str
) -> None:
    """Another try brings it; the user hears of it once."""
    own = tmp_path / "own"
    own.mkdir()
    copy, open_file, listed = DirectoryCopy(own), file_sender.open_given, os.listdir
    error = OSError(errno.EMFILE, "Too many open files")

    def opens(path: Path, *more: Any) -> Any:
        if path.name == "job.json":
            raise error
        return open_file(path, *more)

    def lists(path: Any) -> Any:
        if Path(path) == (job if trouble == "the list" else job / "ledger"):
            raise error
        return listed(path)

    with monkeypatch.context() as now:
        if trouble == "a file":
            now.setattr(file_sender, "open_given", opens)
        else:
            now.setattr(os, "listdir", lists)
        with Filled(job, copy) as filled:
            for _ in range(12):  # more than it takes to bring the others
                message, answer = filled.bring()
                assert message.rest and not answer.has_all(message) and not copy.state(None).complete
            assert capsys.readouterr().err.count("Too many open files") == 1
            now.undo()
            while not answer.has_all(message):
                message, answer = filled.bring()
    assert files(own) == files(job)


def test_no_more_is_said_to_be_told_than_copies_have() -> None:
    """One that has fallen silent is waited for, but not for ever; one that is still being filled never."""
    found = InStep()
    assert found.least(0.0, 9) == 9
    found.said("b", 1.0)
    assert found.least(1.0, 9) == 9
    found.had("a", 1.0, 5, 0.5)
    found.had("b", 2.0, 7, 1.5)
    assert found.least(2.0, 9) == 5 and found.least(2.0, 4) == 4
    found.had("a", 3.0, 3, 2.5)
    assert found.least(3.0, 9) == 5, "it had more before"
    found.said("b", LATE_S + 2.0)
    assert found.least(LATE_S + 3.0, 9) == 7
    assert found.least(2 * LATE_S + 3.0, 9) == 9


def test_the_end_waits_for_those_that_are_behind() -> None:
    found = InStep()
    assert not found.behind(5.0, 5.0), "nobody is counted on"
    found.had("a", 4.0, 1, 3.9)
    found.had("b", 6.0, 1, 5.5)
    assert found.behind(5.0, 6.0) and not found.behind(3.0, 6.0)
    assert not found.behind(5.0, 4.5 + LATE_S), "one that is silent is not waited for"


def test_who_may_lead() -> None:
    assert not CopyState(False, 10.0).may_lead(9.0, 10.0)
    assert not CopyState(False, None).may_lead(0.0, 1e6)
    assert CopyState(True, 10.0).may_lead(10.0 + LATE_S, 11.0 + LATE_S)
    late = CopyState(True, 10.0)
    assert not late.may_lead(11.0 + LATE_S, 12.0 + LATE_S)
    assert late.may_lead(11.0 + LATE_S, 11.0 + 2 * LATE_S)
    assert not CopyState(True, None).may_lead(1.0, 2.0)
    assert not CopyState(False, 10.0, before=True).may_lead(10.0, 11.0)
    assert CopyState(False, 10.0, before=True).may_lead(10.0, 10.0 + LATE_S)
    assert CopyState(True, None).may_lead(1.0, 1.0 + LATE_S)
    assert CopyState(True, 10.0).words(10.5) == ""
    assert "7 s old" in CopyState(True, 10.0).words(17.0)
    assert "earlier" in CopyState(True, None).words(17.0)


def test_a_message_has_bounds(job: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(file_sender, "MOST_PIECES", 2)
    for number in range(5):
        (job / "ledger" / f"worker-{number}-7.jsonl").write_text("r\n")
    own = tmp_path / "own"
    own.mkdir()
    with Filled(job, DirectoryCopy(own)) as filled:
        for _ in range(20):
            message, answer = filled.bring()
            assert len(message.pieces) <= 2
        while not answer.has_all(message):
            message, answer = filled.bring()
    assert files(own) == files(job)


class Guest:
    """A host that stands by, over one connection; what it has heard is answered when the test says so."""

    def __init__(self, job: Path, own: Path, looked: tuple[int, int]) -> None:
        own.mkdir()
        self.copy = DirectoryCopy(own)
        self.heard: asyncio.Queue[FilePieces] = asyncio.Queue()
        self.hosts = StandbyHosts(job, SOURCE, self._hear, lambda: looked)
        assert self.hosts.take("c1", StandbyHello(host="h"))

    def _hear(self, connection: str, message: AnyMessage) -> None:
        assert connection == "c1" and isinstance(message, FilePieces)
        self.heard.put_nowait(message)

    async def answer(self) -> bool:
        """The next message; whether it was all that there is."""
        message = await asyncio.wait_for(self.heard.get(), 60)
        assert self.hosts.take("c1", self.copy.take(message))
        return not message.rest


def test_hosts_hear_that_steps_are_told_when_copies_have_them(job: Path, tmp_path: Path) -> None:
    events = (job / "events.jsonl").stat().st_size

    async def stand_by() -> None:
        guest = Guest(job, tmp_path / "own", (8, events))
        assert guest.hosts.told(9) == 9, "it has not had all yet: nobody counts on it"
        while not await guest.answer():
            pass
        assert guest.hosts.told(9) == 8 and guest.hosts.told(7) == 7
        waits = asyncio.create_task(guest.hosts.caught_up())
        for _ in range(2):
            await guest.answer()
        await asyncio.wait_for(waits, 60)
        guest.hosts.gone(["c1"])
        assert guest.hosts.told(9) == 8, "it may be back in a moment"

    asyncio.run(stand_by())
    assert files(tmp_path / "own") == files(job)


def test_a_host_is_told_no_more_than_that(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    for step in (1, 2, 3):
        log.write("step_committed", step=step, generation=1)
    piece = FilePiece(path="events.jsonl", version="1", at=0)
    question = FilePieces(source="0123456789abcdef", number=1, pieces=[piece])
    for through in (3, 2):
        answers = HeadFiles(tmp_path, lambda known, most=through: min(known, most)).take("c", question)
        assert answers is not None and isinstance(answers[0][1], FilesHeld)
        assert answers[0][1].told == through


def test_a_directory_of_before_is_not_led_in(
    job: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def leave(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr("everstep.runtime.files.led_directory.os._exit", leave)
    found = led_directory(job, "", bytes(32), None, 2.0)
    assert found.word == SOURCE and found.may_lead() and found.taken(None) == ""
    found.saw("")
    found.saw(SOURCE)
    with pytest.raises(SystemExit, match=str(MOVED)):
        found.saw(OTHER)
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and f"{job} is out of date" in said
    leave_word(job, None, OTHER)
    found.saw(OTHER)  # the job has begun anew in the same directory
    assert type(led_directory(job, "host", bytes(32), None, 2.0)) is LedDirectory, "one that has been led in is no copy"
