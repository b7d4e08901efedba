"""What a host with a directory of its own brings to the job's: all of it, once, whatever becomes of the connection."""

from __future__ import annotations

import errno
import json
import queue
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from everstep.base.below import write_atomically
from everstep.observe.events import EventLog, format_event, read_events
from everstep.protocol import messages as m
from everstep.protocol.messages import FilePiece, PieceTaken
from everstep.runtime.files import carrier as carrier_module
from everstep.runtime.files.carrier import HELD_FILE, TOLD_FILE, Carrier
from everstep.runtime.files.files_desk import FilesDesk, Pages
from everstep.runtime.files.gathering import ASK_AGAIN, Receiving, digest_of

SOURCE = "0123456789abcdef"
PATIENCE_S = 60.0


class Wire:
    """Between a carrier and a gathering; the test says what passes."""

    def __init__(self, base: Path) -> None:
        self.own, self.job = base / "own", base / "job"
        for folder in (self.own, self.job):
            folder.mkdir()
        self.gathering = Receiving(self.job)
        self.sent: queue.Queue[FilePiece] = queue.Queue()
        self.passing = True
        self.taken: list[PieceTaken] = []
        self.carrier = Carrier(self.own, SOURCE, "host2", self._send)

    def _send(self, piece: FilePiece) -> None:
        if self.passing:
            self.answer(piece)
        else:
            self.sent.put(piece)

    def answer(self, piece: FilePiece) -> None:
        """The piece arrives, and so does the answer."""
        taken = self.gathering.take(piece)
        self.taken.append(taken)
        self.carrier.taken(taken)

    def restart(self) -> None:
        """Another coordinator goes on, which has read nothing yet."""
        self.gathering = Receiving(self.job)


def through(folder: Path) -> int:
    """What the processes of a host know of the job's log."""
    found: int = json.loads((folder / TOLD_FILE).read_text())["through"]
    return found


@pytest.fixture
def wire(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Wire]:
    monkeypatch.setattr(carrier_module, "PIECE_BYTES", 256)
    found = Wire(tmp_path)
    yield found
    found.carrier.close()


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
    assert wire.carrier.finish(PATIENCE_S)
    assert steps(wire.job) == list(range(1, 40))
    assert (wire.job / f"ledger/worker-1-0-{SOURCE}.jsonl").read_bytes() == (
        wire.own / "ledger/worker-1-0.jsonl"
    ).read_bytes()
    for name in ("metrics/host2.jsonl", "logs/output.log", "final/model.safetensors", "final/digest.json"):
        assert (wire.job / name).read_bytes() == (wire.own / name).read_bytes()
    assert sorted(path.name for path in (wire.job / "final").iterdir()) == ["digest.json", "model.safetensors"]
    assert not (wire.job / "job.json").exists()
    held = json.loads((wire.own / HELD_FILE).read_text())
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
        piece = wire.sent.get(timeout=PATIENCE_S)
        if number % 3 == 0:  # it came, but its answer did not
            wire.gathering.take(piece)
        if number % 2:
            wire.carrier.begin_anew()
            continue
        if number % 5 == 0:
            wire.restart()
        wire.answer(piece)
        wire.answer(piece)  # a piece that comes twice
        if number > 100:
            wire.passing = True
            break
    wire.carrier.begin_anew()
    assert wire.carrier.finish(PATIENCE_S)
    assert steps(wire.job) == list(range(1, 30))
    assert [e["reason"] for e in read_events(wire.job / "events.jsonl") if e["kind"] == "warning"] == [
        f"at {step}" for step in range(1, 30)
    ]
    assert (wire.job / f"ledger/worker-1-0-{SOURCE}.jsonl").read_bytes() == ledger.read_bytes()


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
    assert wire.carrier.finish(PATIENCE_S)
    assert sorted(steps(wire.job)) == [1, 2, 3, 4, 5, 6, 7]
    kinds = [(e["kind"], e["step"]) for e in read_events(wire.job / "events.jsonl")]
    assert kinds.count(("evaluated", 3)) == 1 and ("evaluated", 6) in kinds and ("fault_injected", 3) in kinds


def test_a_file_that_is_written_anew_is_brought_anew(wire: Wire) -> None:
    path = wire.own / "rehearsed.json"
    for text in ("1" * 1000, "2" * 300):
        draft = wire.own / "draft"
        draft.write_text(text)
        draft.replace(path)
        assert wire.carrier.finish(PATIENCE_S)
        assert (wire.job / "rehearsed.json").read_text() == text


@pytest.mark.parametrize(
    "path",
    ["job.json", "token", "../x.jsonl", "ledger/../../x", "final/x", "/etc/passwd", "ledger/worker-1-0.jsonl/x", ""],
)
def test_other_names_are_not_written(wire: Wire, path: str) -> None:
    piece = FilePiece(agent_id="a", path=path, source=SOURCE, at=0, data=b"{}\n", size=3, digest="0" * 32)
    assert wire.gathering.take(piece).at == ASK_AGAIN
    assert not list(wire.job.iterdir())
    foreign = FilePiece(agent_id="a", path="events.jsonl", source="../x", at=0, data=b"{}\n")
    assert wire.gathering.take(foreign).at == ASK_AGAIN


def test_a_whole_file_that_is_not_what_its_digest_says_is_not_there(wire: Wire) -> None:
    piece = FilePiece(
        agent_id="a", path="final/digest.json", source=SOURCE, at=0, data=b"{}\n", size=3, digest="0" * 32
    )
    assert wire.gathering.take(piece).at == ASK_AGAIN
    assert not list((wire.job / "final").iterdir())


def test_pages_are_told_when_they_change(tmp_path: Path) -> None:
    pages = Pages(tmp_path)
    assert pages.changed() == [] and pages.all() == []
    (tmp_path / "rehearsed.json").write_text("{}")
    assert [page.text for page in pages.changed()] == ["{}"]
    assert pages.changed() == [] and [page.name for page in pages.all()] == ["rehearsed.json"]


def test_a_fault_is_claimed_once_in_a_job(tmp_path: Path) -> None:
    desk = FilesDesk(tmp_path)

    def claim(name: str, text: str) -> list[tuple[str, m.AnyMessage]] | None:
        return desk.take("w", m.ClaimFault(worker_id=1, incarnation=0, request=4, name=name, text=text))

    assert claim("0", "[1,2]") == [("w", m.FaultClaimed(request=4, first=True, text="[1,2]"))]
    assert claim("0", "[3]") == [("w", m.FaultClaimed(request=4, first=False, text="[1,2]"))]
    assert FilesDesk(tmp_path).take("w", m.ClaimFault(worker_id=1, incarnation=0, request=5, name="0", text="")) == [
        ("w", m.FaultClaimed(request=5, first=False, text="[1,2]"))
    ], "another coordinator knows it too"
    for name in ("../x", "", "a", "0/1"):
        assert claim(name, "") == []
    assert sorted(path.name for path in (tmp_path / "chaos").iterdir()) == ["0"]


def test_who_asks_for_logs_is_answered_by_the_host_or_told_that_it_is_gone(tmp_path: Path) -> None:
    desk = FilesDesk(tmp_path)
    ask = m.Command(request=7, name="logs", args={"host": "host2", "name": "worker-1.jsonl", "start": 30})
    refused = desk.take("p", ask)
    assert refused is not None and isinstance(refused[0][1], m.CommandReply) and "everstep hosts" in refused[0][1].error
    assert desk.take("a", m.HostPlace(agent_id="host2", apart=True, disk="host host2")) is None
    assert desk.take("p", ask) == [("a", m.HostAsk(request=1, name="worker-1.jsonl", start=30))]
    assert desk.take("b", m.HostTold(agent_id="host3", request=2)) == [], "nobody asked"
    answer = m.HostTold(agent_id="host2", request=1, logs={"worker-1.jsonl": (5, 31)}, data=b"x")
    result = {"logs": {"worker-1.jsonl": (5, 31)}, "data": b"x"}
    assert desk.take("a", answer) == [("p", m.CommandReply(request=7, ok=True, error="", result=result))]
    desk.take("p", ask)
    gone = desk.gone("a")
    assert [name for name, _ in gone] == ["p"] and not getattr(gone[0][1], "ok", True)
    assert desk.take("p", m.Command(request=8, name="status", args={})) is None


def test_a_host_knows_up_to_which_step_all_have_been_told(wire: Wire) -> None:
    """Not those after one that is lacking: whoever knows that may have to tell it."""
    log, others = EventLog(wire.own / "events.jsonl"), EventLog(wire.job / "events.jsonl")
    others.write("job_started", step=0)
    for number in (1, 2, 4):
        log.write("step_committed", step=number)
    assert wire.carrier.finish(PATIENCE_S)
    wire.carrier.close()
    assert through(wire.own) == 2
    others.write("step_committed", step=3)  # of a host that sees the log itself
    piece = FilePiece(agent_id="host2", path="metrics/host2.jsonl", source=SOURCE, at=0)
    assert wire.gathering.take(piece).told == 4
    others.write("job_started", step=0)  # what was before was given up
    assert wire.gathering.take(piece).told == 0


def test_a_host_begins_without_a_word_of_an_earlier_run(tmp_path: Path) -> None:
    (tmp_path / TOLD_FILE).write_text('{"through": 1000}')
    Carrier(tmp_path, SOURCE, "host2", lambda piece: None).close()
    assert not (tmp_path / TOLD_FILE).exists()


def test_a_host_whose_disk_is_full_brings_what_it_has(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, text: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(carrier_module, "write_atomically", full)
    (wire.job / "events.jsonl").write_bytes(format_event("step_committed", 1, {"step": 4}))
    (wire.own / "events.jsonl").write_bytes(format_event("step_committed", 2, {"step": 5}))
    (wire.own / "final").mkdir()
    (wire.own / "final" / "digest.json").write_text("{}")
    (wire.own / "rehearsed.json").write_text("{}")
    assert wire.carrier.finish(PATIENCE_S)
    assert steps(wire.job) == [4, 5]
    assert (wire.job / "final" / "digest.json").read_text() == "{}"
    monkeypatch.setattr(carrier_module, "write_atomically", write_atomically)
    assert wire.carrier.finish(PATIENCE_S), "there is room again, and all of it is noted"
    assert set(json.loads((wire.own / HELD_FILE).read_text())) == {"final/digest.json", "rehearsed.json"}


def test_what_cannot_be_read_has_not_arrived_and_holds_up_nothing_else(
    wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked = threading.Semaphore(0)

    def damaged(path: Path, folders: int) -> str:
        if path.name == "rehearsed.json":
            looked.release()
            raise OSError(errno.EIO, "Input/output error")
        return digest_of(path, folders)

    monkeypatch.setattr(carrier_module, "digest_of", damaged)
    (wire.own / "rehearsed.json").write_text("{}")
    (wire.own / "dataset.json").write_text("{}")
    while not (wire.job / "dataset.json").exists():
        assert looked.acquire(timeout=PATIENCE_S)
    assert not wire.carrier.finish(0.5)
    monkeypatch.setattr(carrier_module, "digest_of", digest_of)
    assert wire.carrier.finish(PATIENCE_S)
    assert (wire.job / "rehearsed.json").exists()
