"""What a host with a directory of its own brings to the job's: all of it, once, whatever becomes of the connection."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import queue
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from everstep.base.below import write_atomically
from everstep.observe.events import EventLog, format_event, read_events
from everstep.protocol import messages as m
from everstep.protocol.messages import FilePiece, FilePieces
from everstep.runtime.files import agent_files, file_sender
from everstep.runtime.files.agent_files import AgentFiles, DirectorySender
from everstep.runtime.files.file_receiver import HeadReceiver
from everstep.runtime.files.file_sender import digest_of
from everstep.runtime.files.host_directory import ARRIVED_FILE, SOURCE_FILE, Place

SOURCE = "0123456789abcdef"
PATIENCE_S = 60.0


class Wire:
    """Between a host's own directory and the head; the test says what passes."""

    def __init__(self, base: Path, around: str = "") -> None:
        self.own, self.job, self.led = base / "own", base / "job", around
        for folder in (self.own, self.job):
            folder.mkdir()
        (self.own / SOURCE_FILE).write_text(SOURCE)
        self.receiver = HeadReceiver(self.job)
        self.sent: queue.Queue[FilePieces] = queue.Queue()
        self.passing = True
        self.sender = DirectorySender(Place(self.own, apart=True, around=around), self._send, lambda: bool(self.led))

    def _send(self, pieces: m.AnyMessage) -> None:
        assert isinstance(pieces, FilePieces)
        if self.passing:
            self.answer(pieces)
        else:
            self.sent.put(pieces)

    def answer(self, pieces: FilePieces) -> None:
        """The pieces arrive, and so does the answer."""
        self.sender.answered(self.receiver.take(pieces))

    def restart(self) -> None:
        """Another coordinator goes on, which has read nothing yet."""
        self.receiver = HeadReceiver(self.job)

    def arrives(self, timeout_s: float = PATIENCE_S) -> bool:
        return self.sender.finish(time.monotonic(), timeout_s)


def pieces(path: str, source: str = SOURCE, **piece: Any) -> FilePieces:
    """A message with one piece."""
    return FilePieces(source=source, number=1, pieces=[FilePiece(**{"path": path, "version": "1", "at": 0, **piece})])


def agent_with(wire: Wire) -> Any:
    """Files of an agent whose directory is removed when the job is done."""
    place = Place(wire.own, apart=True, passing=True)
    client, around = (
        SimpleNamespace(connected=True),
        {"run_dir": wire.own, "_server": None, "_held": contextlib.ExitStack()},
    )
    return SimpleNamespace(_place=place, _sender=wire.sender, _client=client, _is_led_around=lambda: False, **around)


def through(folder: Path) -> int:
    """What the processes of a host know of the job's log."""
    found: int = json.loads((folder / ARRIVED_FILE).read_text())["through"]
    return found


@pytest.fixture
def wire(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Wire]:
    monkeypatch.setattr(file_sender, "PIECE_BYTES", 256)
    found = Wire(tmp_path)
    yield found
    found.sender.close()


def steps(path: Path) -> list[int]:
    return [event["step"] for event in read_events(path / "events.jsonl") if event["kind"] == "step_committed"]


def test_lines_and_files_arrive_as_they_are(wire: Wire) -> None:
    log = EventLog(wire.own / "events.jsonl", worker_id=1)
    for step in range(1, 40):
        log.write("step_committed", step=step)
    for name in ("ledger/worker-1-0.jsonl", "metrics/host2.jsonl", "logs/output.log"):
        (wire.own / name).parent.mkdir()
        (wire.own / name).write_text("".join(f'{{"t":{n}}}\n' for n in range(100)))
    (wire.own / "final").mkdir()
    (wire.own / "final" / "model.safetensors").write_bytes(bytes(range(256)) * 9)
    (wire.own / "final" / "digest.json").write_text("{}")
    (wire.own / "final" / ".model-7.partial").write_text("not whole")
    (wire.own / "job.json").write_text("{}")
    assert wire.arrives()
    assert steps(wire.job) == list(range(1, 40))
    assert (wire.job / f"ledger/worker-1-0-{SOURCE}.jsonl").read_bytes() == (
        wire.own / "ledger/worker-1-0.jsonl"
    ).read_bytes()
    for name in ("metrics/host2.jsonl", "logs/output.log", "final/model.safetensors", "final/digest.json"):
        assert (wire.job / name).read_bytes() == (wire.own / name).read_bytes()
    assert sorted(path.name for path in (wire.job / "final").iterdir()) == ["digest.json", "model.safetensors"]
    assert not (wire.job / "job.json").exists()
    held = json.loads((wire.own / ARRIVED_FILE).read_text())["files"]
    assert held["final/digest.json"] == digest_of(wire.own / "final" / "digest.json")


def test_what_was_on_its_way_when_a_connection_broke_arrives_once(wire: Wire) -> None:
    wire.passing = False
    log = EventLog(wire.own / "events.jsonl")
    ledger = wire.own / "ledger" / "worker-1-0.jsonl"
    ledger.parent.mkdir()
    for step in range(1, 30):
        log.write("step_committed", step=step)
        log.write("warning", reason=f"at {step}")
        with ledger.open("a") as file:
            file.write(f'{{"step":{step}}}\n')
    for number in range(200):
        said = wire.sent.get(timeout=PATIENCE_S)
        if number % 3 == 0:  # it came, but its answer did not
            wire.receiver.take(said)
        if number % 2:
            wire.sender.ask_again()
            continue
        if number % 5 == 0:
            wire.restart()
        wire.answer(said)
        wire.answer(said)  # pieces that come twice
        if number > 60:  # each of the cases above has met each other one
            wire.passing = True
            break
    wire.sender.ask_again()
    assert wire.arrives()
    assert steps(wire.job) == list(range(1, 30))
    assert [e["reason"] for e in read_events(wire.job / "events.jsonl") if e["kind"] == "warning"] == [
        f"at {step}" for step in range(1, 30)
    ]
    assert (wire.job / f"ledger/worker-1-0-{SOURCE}.jsonl").read_bytes() == ledger.read_bytes()


def write_in_place(path: Path, text: str) -> None:
    """Write a file that gets the inode number of the one before, as file systems give them again at once."""
    with path.open("r+") as file:
        os.pwrite(file.fileno(), text.encode(), 0)
        os.ftruncate(file.fileno(), len(text))


@pytest.mark.parametrize("rows", [1, 2, 3, 9])
def test_another_file_of_the_same_name_and_number_is_sent_too(wire: Wire, rows: int) -> None:
    """For example the first of an agent that is started again, or one after two rotations."""
    old, new = '{"t":1}\n{"t":2}\n', '{"t":3}\n' * rows
    (wire.own / "metrics").mkdir()
    (wire.own / "metrics" / "host2.jsonl").write_text(old)
    assert wire.arrives()
    wire.sender.close()
    write_in_place(wire.own / "metrics" / "host2.jsonl", new)
    wire.sender = DirectorySender(Place(wire.own, apart=True), wire._send)
    assert wire.arrives()
    assert (wire.job / "metrics" / "host2.jsonl").read_text() == old + new
    third = '{"t":4}\n' * (rows + 1)
    write_in_place(wire.own / "metrics" / "host2.jsonl", third)
    assert wire.arrives()
    assert (wire.job / "metrics" / "host2.jsonl").read_text() == old + new + third


def test_what_another_host_has_told_is_not_told_again(wire: Wire) -> None:
    here = EventLog(wire.job / "events.jsonl")
    for step in (1, 2, 3, 6):
        here.write("step_committed", step=step)
    here.write("evaluated", step=3)
    there = EventLog(wire.own / "events.jsonl")
    for step in (3, 4, 5, 6, 7):
        there.write("step_committed", step=step)
    there.write("evaluated", step=3)
    there.write("evaluated", step=6)
    there.write("fault_injected", step=3)
    assert wire.arrives()
    assert sorted(steps(wire.job)) == [1, 2, 3, 4, 5, 6, 7]
    kinds = [(e["kind"], e["step"]) for e in read_events(wire.job / "events.jsonl")]
    assert kinds.count(("evaluated", 3)) == 1 and ("evaluated", 6) in kinds and ("fault_injected", 3) in kinds


@pytest.mark.parametrize(
    "path",
    ["job.json", "token", "../x.jsonl", "ledger/../../x", "final/x", "/etc/passwd", "ledger/worker-1-0.jsonl/x", ""],
)
def test_other_names_are_not_written(wire: Wire, path: str) -> None:
    for piece in (pieces(path, data=b"{}\n"), pieces(path, data=b"{}\n", size=3, version="0" * 32)):
        assert wire.receiver.take(piece).held == {}
    assert wire.receiver.take(pieces("events.jsonl", source="../x", data=b"{}\n")).held == {}
    assert not list(wire.job.iterdir())


def test_the_digest_of_the_weights_comes_once_the_weights_are_there(
    wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the disk of the head refuses the weights for a while."""
    replace, refused = os.replace, []

    def full(draft: str, name: str, **folders: int) -> None:
        if name == "model.safetensors" and len(refused) < 3:
            refused.append((wire.job / "final" / "digest.json").exists())
            raise OSError(errno.ENOSPC, "No space left on device")
        replace(draft, name, **folders)

    monkeypatch.setattr(os, "replace", full)
    (wire.own / "final").mkdir()
    (wire.own / "final" / "model.safetensors").write_bytes(bytes(range(100)) * 7)
    (wire.own / "final" / "digest.json").write_text("{}")
    assert wire.arrives()
    assert refused == [False] * 3


def test_a_host_knows_up_to_which_step_all_have_been_told(wire: Wire) -> None:
    """Not those after one that is lacking: whoever knows that may have to tell it."""
    log, others = EventLog(wire.own / "events.jsonl"), EventLog(wire.job / "events.jsonl")
    others.write("job_started", step=0)
    for number in (1, 2, 4):
        log.write("step_committed", step=number)
    assert wire.arrives()
    wire.sender.close()
    assert through(wire.own) == 2
    others.write("step_committed", step=3)  # of a host that sees the log itself
    question = pieces("metrics/host2.jsonl")
    assert wire.receiver.take(question).told == 4
    others.write("job_started", step=0)  # what was before was given up
    assert wire.receiver.take(question).told == 0


def test_a_host_begins_without_a_word_of_an_earlier_run(tmp_path: Path) -> None:
    (tmp_path / ARRIVED_FILE).write_text('{"through": 1000}')
    DirectorySender(Place(tmp_path, apart=True), lambda said: None).close()
    assert not (tmp_path / ARRIVED_FILE).exists()


def test_a_host_whose_disk_is_full_brings_what_it_has(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, text: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(agent_files, "write_atomically", full)
    (wire.job / "events.jsonl").write_bytes(format_event("step_committed", 1, {"step": 4}))
    (wire.own / "events.jsonl").write_bytes(format_event("step_committed", 2, {"step": 5}))
    (wire.own / "final").mkdir()
    (wire.own / "final" / "digest.json").write_text("{}")
    (wire.own / "rehearsed.json").write_text("{}")
    assert wire.arrives()
    assert steps(wire.job) == [4, 5]
    assert (wire.job / "final" / "digest.json").read_text() == "{}"
    monkeypatch.setattr(agent_files, "write_atomically", write_atomically)
    assert wire.arrives(), "there is room again, and all of it is noted"
    assert set(json.loads((wire.own / ARRIVED_FILE).read_text())["files"]) == {"final/digest.json", "rehearsed.json"}


def test_what_cannot_be_read_has_not_arrived_and_holds_up_nothing_else(
    wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked = threading.Semaphore(0)

    def damaged(path: Path, folders: int) -> str:
        if path.name == "rehearsed.json":
            looked.release()
            raise OSError(errno.EIO, "Input/output error")
        return digest_of(path, folders)

    monkeypatch.setattr(file_sender, "digest_of", damaged)
    (wire.own / "rehearsed.json").write_text("{}")
    (wire.own / "dataset.json").write_text("{}")
    while not (wire.job / "dataset.json").exists():
        assert looked.acquire(timeout=PATIENCE_S)
    assert not wire.arrives(0.5)
    monkeypatch.setattr(file_sender, "digest_of", digest_of)
    assert wire.arrives()
    assert (wire.job / "rehearsed.json").exists()


def test_the_digest_of_weights_that_cannot_be_read_is_not_sent(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    looked = threading.Semaphore(0)

    def damaged(path: Path, folders: int) -> str:
        if path.name == "model.safetensors":
            looked.release()
            raise OSError(errno.EIO, "Input/output error")
        return digest_of(path, folders)

    monkeypatch.setattr(file_sender, "digest_of", damaged)
    (wire.own / "final").mkdir()
    for name in ("model.safetensors", "digest.json"):
        (wire.own / "final" / name).write_text("{}")
    for _ in range(5):  # a look, a question, a piece, and more
        assert looked.acquire(timeout=PATIENCE_S)
    assert not (wire.job / "final").exists()
    monkeypatch.setattr(file_sender, "digest_of", digest_of)
    assert wire.arrives() and (wire.job / "final" / "digest.json").exists()


def test_another_head_gets_also_what_the_one_before_had_whole(wire: Wire) -> None:
    (wire.own / "final").mkdir()
    (wire.own / "final" / "model.safetensors").write_bytes(bytes(range(99)))
    (wire.own / "final" / "digest.json").write_text("{}")
    EventLog(wire.own / "events.jsonl").write("step_committed", step=1)
    assert wire.arrives()
    wire.job = wire.job.with_name("another")
    wire.job.mkdir()
    wire.restart()
    wire.sender.ask_again()
    assert wire.arrives()
    assert (wire.job / "final" / "model.safetensors").read_bytes() == bytes(range(99)) and steps(wire.job) == [1]


def test_in_the_directory_around_its_own_weights_get_a_second_name_and_another_head_gets_them(tmp_path: Path) -> None:
    """So they take the room of one copy there. It counts no more once another host leads in another directory."""
    around = tmp_path / "around"
    around.mkdir()
    wire = Wire(tmp_path, str(around))
    try:
        (wire.own / "final").mkdir()
        for name, text in (("model.safetensors", "weights"), ("digest.json", "{}")):
            (wire.own / "final" / name).write_text(text)
        EventLog(wire.own / "events.jsonl").write("step_committed", step=1)
        assert wire.arrives() and steps(wire.job) == [1] and not (wire.job / "final").exists()
        for name in ("model.safetensors", "digest.json"):
            assert (around / "final" / name).samefile(wire.own / "final" / name)
        there = json.loads((wire.own / ARRIVED_FILE).read_text())["files"]
        assert there == {"final/digest.json": file_sender.digest_of(wire.own / "final" / "digest.json", 1)}
        wire.led = ""
        wire.sender.ask_again()
        assert wire.arrives() and (wire.job / "final" / "model.safetensors").read_text() == "weights"
    finally:
        wire.sender.close()


def test_weights_are_sent_as_others_where_a_file_has_one_name_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(path: Path, other: Path) -> None:
        raise PermissionError("no links here")

    monkeypatch.setattr(agent_files, "hard_link", refuses)
    wire = Wire(tmp_path, str(tmp_path / "job"))
    (wire.own / "final").mkdir()
    (wire.own / "final" / "digest.json").write_text("{}")
    assert wire.arrives() and (wire.job / "final" / "digest.json").read_text() == "{}"
    wire.sender.close()


def test_what_cannot_be_stored_for_another_reason_than_a_full_disk_is_noted_until_it_can(wire: Wire) -> None:
    """Nobody would know what to wait for."""

    def noted() -> dict[str, str]:
        with contextlib.suppress(OSError):
            return dict(json.loads((wire.own / ARRIVED_FILE).read_text())["refused"])
        return {}

    (wire.job / "final").touch()
    (wire.own / "final").mkdir()
    (wire.own / "final" / "digest.json").write_text("{}")
    EventLog(wire.own / "events.jsonl").write("step_committed", step=1)
    end_s = time.monotonic() + PATIENCE_S
    while not (noted() and steps(wire.job)):
        assert time.monotonic() < end_s
        time.sleep(0.01)
    assert noted() == {"final/digest.json": "Not a directory"} and steps(wire.job) == [1]
    (wire.job / "final").unlink()
    assert wire.arrives() and noted() == {}


def test_what_one_head_has_refused_counts_no_more_over_another_connection(wire: Wire) -> None:
    (wire.job / "final").touch()
    (wire.own / "final").mkdir()
    (wire.own / "final" / "digest.json").write_text("{}")
    assert not wire.arrives(0.0)
    end_s = time.monotonic() + PATIENCE_S
    while not wire.sender.refused:
        assert time.monotonic() < end_s
        time.sleep(0.01)
    wire.passing = False
    wire.sent.get(timeout=PATIENCE_S)  # so nothing is being answered
    wire.sender.ask_again()
    assert not wire.sender.refused


def test_an_agent_that_leaves_goes_on_sending_though_a_file_cannot_arrive(
    wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not for what cannot arrive, but for rows that a slow link, or a full disk, holds up."""
    tries, write = iter(range(3)), wire.receiver._events

    def full(source: str, piece: FilePiece) -> int | None:
        if next(tries, None) is not None:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(source, piece)

    monkeypatch.setattr(wire.receiver, "_events", full)
    monkeypatch.setattr(agent_files, "_TURN_S", 0.01)
    monkeypatch.setattr(agent_files, "_CUT_OFF_S", 1.0)  # more than the time for which a message holds that file alone
    (wire.job / "final").touch()
    EventLog(wire.own / "events.jsonl").write("step_committed", step=1)
    (wire.own / "final").mkdir()
    (wire.own / "final" / "digest.json").write_text("{}")
    assert not AgentFiles.finish(agent_with(wire), PATIENCE_S)
    assert steps(wire.job) == [1] and set(wire.sender.refused) == {"final/digest.json"}


@pytest.mark.parametrize("passing", [True, False])
def test_when_the_job_is_done_only_a_directory_whose_files_have_all_arrived_is_removed(
    wire: Wire, capsys: pytest.CaptureFixture[str], passing: bool
) -> None:
    wire.passing = passing
    (wire.own / "final").mkdir()
    (wire.own / "final" / "model.safetensors").write_bytes(bytes(999))
    files = agent_with(wire)
    assert AgentFiles.finish(files, PATIENCE_S if passing else 0.0) == passing
    AgentFiles.close(files, done=True)
    assert (wire.own / "final" / "model.safetensors").exists() != passing
    assert (f"{wire.own} is kept" in capsys.readouterr().err) != passing
