"""Replicas of the job's directory: all of it arrives, byte for byte, and nothing else is ever written."""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path

import pytest

from everstep.base.below import write_atomically
from everstep.observe.events import EventLog
from everstep.protocol.messages import AnyMessage, FilePiece, PieceTaken
from everstep.protocol.messages_base import ReplicaHeld, ReplicaHello, ReplicaPiece, ReplicaPieces
from everstep.runtime.files import replicas
from everstep.runtime.files.files_desk import FilesDesk
from everstep.runtime.files.following import MOVED, Premises, premises_of
from everstep.runtime.files.gathering import digest_of
from everstep.runtime.files.places import PLACE_FILE, leave_word
from everstep.runtime.files.replica import LATE_S, REPLICA_FILE, Replica, ReplicaState, replicated
from everstep.runtime.files.replicas import FileSeen, InStep, Replicas, Supply, Wanted, wanted

PLACE, OTHER = "ab" * 16, "cd" * 16


def files(folder: Path) -> dict[str, bytes]:
    """What a replica is to have."""
    return {name: (folder / name).read_bytes() for name in replicated(folder)}


def fill(job: Path, replica: Replica, place: str = PLACE) -> int:
    """Until it has all; returns in how many messages."""
    supply = Supply(job, place, ReplicaHello(host="h", place=replica.place, held=replica.held()))
    for number in range(1, 1000):
        pieces, rest = supply.next()
        lacking = replica.take(ReplicaPieces(place=place, number=number, pieces=pieces, rest=rest))
        supply.confirm(lacking)
        if not rest and not lacking:
            return number
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
    leave_word(found, None, PLACE)
    return found


def test_all_arrives_and_no_more_than_that(job: Path, tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    replica = Replica(own)
    assert not replica.state(None).complete
    assert fill(job, replica) > 2  # a large file comes in pieces
    assert files(own) == files(job) and len(files(own)) == 7
    assert replica.state(None).complete and replica.place == PLACE
    assert not any((own / name).exists() for name in ("token", "hosts.json", PLACE_FILE, "checkpoints"))
    assert fill(job, Replica(own)) == 1, "what is there does not come again, also after a restart"


def test_files_grow_by_whole_lines_and_begin_anew_where_they_are_others(job: Path, tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    replica = Replica(own)
    fill(job, replica)
    with open(job / "events.jsonl", "a") as events:
        events.write('{"kind":"c"}\n{"ki')
    fill(job, replica)
    assert (own / "events.jsonl").read_text() == '{"kind":"a"}\n{"kind":"b"}\n{"kind":"c"}\n'
    with open(job / "events.jsonl", "a") as events:
        events.write('nd":"d"}\n')
    (job / "metrics" / "h.jsonl").write_text("1\n")
    fill(job, replica)
    os.replace(job / "metrics" / "h.jsonl", job / "metrics" / "h.1.jsonl")
    (job / "metrics" / "h.jsonl").write_text("2\n3\n")
    (job / "newest-checkpoint.json").write_text("1")
    fill(job, replica)
    (job / "new").write_text("22")
    os.replace(job / "new", job / "newest-checkpoint.json")
    fill(job, replica)
    assert files(own) == files(job)


def test_a_replica_of_another_directory_begins_anew(job: Path, tmp_path: Path) -> None:
    """Its files may go on otherwise than those of who leads now."""
    own, later = tmp_path / "own", tmp_path / "later"
    own.mkdir()
    replica = Replica(own)
    fill(job, replica)
    later.mkdir()
    (later / "events.jsonl").write_text('{"kind":"z"}\n')
    replica.take(ReplicaPieces(place=OTHER, number=1, rest=True))
    assert files(own) == {} and replica.state(None) == ReplicaState(False, None, before=True)
    fill(later, replica, OTHER)
    assert files(own) == {"events.jsonl": b'{"kind":"z"}\n'}
    assert Replica(own).place == OTHER and Replica(own).state(None) == ReplicaState(True, None)


def test_what_was_complete_is_gone_on_from_if_who_fills_it_anew_is_lost(job: Path, tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    replica = Replica(own)
    fill(job, replica)
    half = ReplicaPiece(path="events.jsonl", version="9", at=0, data=b"{}\n")
    replica.take(ReplicaPieces(place=OTHER, number=1, pieces=[half], rest=True))
    assert files(own) == {"events.jsonl": b"{}\n"}
    replica.take(ReplicaPieces(place="ef" * 16, number=1, rest=True))
    Replica(own).fall_back()
    assert files(own) == files(job)
    Replica(own).fall_back()
    assert files(own) == files(job) and not list(own.glob(".before*"))


def test_pieces_that_do_not_fit_have_no_effect(tmp_path: Path) -> None:
    replica = Replica(tmp_path)
    number = iter(range(1, 100))

    def take(path: str, at: int = 0, data: bytes = b"x\n", size: int = 0, digest: str = "") -> bool:
        piece = ReplicaPiece(path=path, version="1", at=at, data=data, size=size, digest=digest)
        return not replica.take(ReplicaPieces(place=PLACE, number=next(number), pieces=[piece]))

    for path in ("../events.jsonl", "/etc/x", "token", "hosts.json", "place", "replica.json", "ledger/../token"):
        assert not take(path) and not take(path, size=2, digest="00" * 16)
    assert {path.name for path in tmp_path.iterdir()} == {REPLICA_FILE}
    assert not take("events.jsonl", at=5)
    assert take("events.jsonl") and take("events.jsonl", at=2) and not take("events.jsonl", at=2)
    assert (tmp_path / "events.jsonl").read_bytes() == b"x\nx\n"
    (tmp_path / "data").write_bytes(b"x\n")
    digest = digest_of(tmp_path / "data")
    assert not take("job.json", size=2, digest="00" * 16), "it was altered on the way"
    assert not take("job.json", size=1, digest=digest) and not take("job.json", at=1, size=3, digest=digest)
    assert not (tmp_path / "job.json").exists()
    assert take("job.json", size=2, digest=digest)
    os.symlink(tmp_path / "data", tmp_path / "dataset.json")
    os.makedirs(tmp_path / "ledger")
    os.symlink(tmp_path / "data", tmp_path / "ledger" / "worker-0-0.jsonl")
    with pytest.raises(OSError, match="symbolic"):
        take("ledger/worker-0-0.jsonl")
    assert (tmp_path / "data").read_bytes() == b"x\n"


@pytest.mark.parametrize("new", ["what is new", "longer than it was before", "short"])
def test_a_file_that_did_not_fit_comes_again(
    job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, new: str
) -> None:
    """A whole one is there as it was until all of the new one is; one that grows is begun anew."""
    own = tmp_path / "own"
    own.mkdir()
    (job / "job.json").write_text("what was old")
    (job / "logs" / "output.log").write_text("what was old\n")
    replica = Replica(own)
    fill(job, replica)
    supply = Supply(job, PLACE, ReplicaHello(host="h", place=PLACE, held=replica.held()))
    for name in ("job.json", "logs/output.log"):
        (tmp_path / "new").write_text(f"{new}\n")
        os.replace(tmp_path / "new", job / name)

    def bring() -> bool:
        pieces, _ = supply.next()
        message = ReplicaPieces(place=PLACE, number=1, pieces=pieces)
        try:
            lacking = replica.take(message)
        except OSError:
            lacking = replica.there(pieces)
        supply.confirm(lacking)
        return bool(pieces)

    write, replace = os.pwrite, os.replace

    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    for name, refuses in (
        ("pwrite", lambda fd, data, at: write(fd, data[:3], at)),
        ("pwrite", full),
        ("replace", full),
    ):
        with monkeypatch.context() as now:
            now.setattr(os, name, refuses)
            assert bring(), "it is sent again"
        assert (own / "job.json").read_text() == "what was old"
    while bring():
        assert os.replace is replace
    assert files(own) == files(job)


def test_what_has_taken_its_place_again_is_kept_though_that_could_not_be_noted(
    job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, text: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    own = tmp_path / "own"
    own.mkdir()
    replica = Replica(own)
    fill(job, replica)
    replica.take(ReplicaPieces(place=OTHER, number=1, pieces=[], rest=True))
    with monkeypatch.context() as disk, pytest.raises(OSError, match="No space"):
        disk.setattr("everstep.runtime.files.replica.write_atomically", full)
        replica.fall_back()
    again = Replica(own)
    assert again.state(None).usable
    again.fall_back()
    assert files(own) == files(job) and again.state(None).complete


@pytest.mark.parametrize("refused", [1, 2])
def test_a_replica_that_could_not_begin_anew_is_no_mixture(
    job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: int
) -> None:
    own, other = tmp_path / "own", tmp_path / "other"
    for folder in (own, other):
        folder.mkdir()
    (other / "job.json").write_text("{}")
    replica, count = Replica(own), 0
    fill(job, replica)

    def full(path: Path, text: str) -> None:
        nonlocal count
        count += 1
        if count == refused:
            raise OSError(errno.ENOSPC, "No space left on device")
        write_atomically(path, text)

    monkeypatch.setattr("everstep.runtime.files.replica.write_atomically", full)
    with pytest.raises(OSError, match="No space"):
        fill(other, replica, OTHER)
    assert replica.state(None).usable, "what was complete is there still"
    assert Replica(own).place == replica.place != OTHER
    fill(other, replica, OTHER)
    assert files(own) == files(other)


def test_an_empty_file_that_was_not_taken_comes_again(job: Path) -> None:
    (job / "job.json").write_text("")
    supply = Supply(job, PLACE, ReplicaHello(host="h", place=PLACE, held={}))
    for _ in range(2):
        pieces, _ = supply.next()
        assert "job.json" in {piece.path for piece in pieces}
        supply.confirm({"job.json": 0})
    supply.next()
    supply.confirm({})
    assert "job.json" not in {piece.path for piece in supply.next()[0]}


def test_what_a_replica_lacks_is_decided_by_versions_and_sizes() -> None:
    seen = {"a": FileSeen("1", 10), "b": FileSeen("2", 5), "c": FileSeen("3", 0), "d": FileSeen("4", 7)}
    held = {"a": ("1", 10), "b": ("1", 5), "d": ("4", 9), "e": ("5", 1)}
    assert wanted(seen, {}) == [Wanted(name, file.version, 0) for name, file in seen.items()]
    assert wanted(seen, held) == [Wanted("b", "2", 0), Wanted("c", "3", 0), Wanted("d", "4", 0)]
    assert wanted(seen, {**held, "b": ("2", 3), "c": ("3", 0), "d": ("4", 7)}) == [Wanted("b", "2", 3)]


def test_no_more_is_said_to_be_told_than_replicas_have() -> None:
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
    assert not ReplicaState(False, 10.0).may_lead(9.0, 10.0)
    assert not ReplicaState(False, None).may_lead(0.0, 1e6)
    assert ReplicaState(True, 10.0).may_lead(10.0 + LATE_S, 11.0 + LATE_S)
    late = ReplicaState(True, 10.0)
    assert not late.may_lead(11.0 + LATE_S, 12.0 + LATE_S)
    assert late.may_lead(11.0 + LATE_S, 11.0 + 2 * LATE_S)
    assert not ReplicaState(True, None).may_lead(1.0, 2.0)
    assert not ReplicaState(False, 10.0, before=True).may_lead(10.0, 11.0)
    assert ReplicaState(False, 10.0, before=True).may_lead(10.0, 10.0 + LATE_S)
    assert ReplicaState(True, None).may_lead(1.0, 1.0 + LATE_S)
    assert ReplicaState(True, 10.0).words(10.5) == ""
    assert "7 s old" in ReplicaState(True, 10.0).words(17.0)
    assert "earlier" in ReplicaState(True, None).words(17.0)


def test_a_message_has_bounds(job: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(replicas, "MOST_PIECES", 2)
    for number in range(5):
        (job / "ledger" / f"worker-{number}-7.jsonl").write_text("r\n")
    pieces, rest = Supply(job, PLACE, ReplicaHello(host="h")).next()
    assert len(pieces) == 2 and rest
    own = tmp_path / "own"
    own.mkdir()
    fill(job, Replica(own))
    assert files(own) == files(job)


class Guest:
    """A host that stands by, over one connection; what it has heard is answered when the test says so."""

    def __init__(self, job: Path, own: Path, looked: tuple[int, int]) -> None:
        own.mkdir()
        self.replica = Replica(own)
        self.heard: asyncio.Queue[ReplicaPieces] = asyncio.Queue()
        self.replicas = Replicas(job, PLACE, self._hear, lambda: looked)
        assert self.replicas.take("c1", ReplicaHello(host="h"))

    def _hear(self, connection: str, message: AnyMessage) -> None:
        assert connection == "c1" and isinstance(message, ReplicaPieces)
        self.heard.put_nowait(message)

    async def answer(self) -> bool:
        """The next message; whether it was all that there is."""
        message = await asyncio.wait_for(self.heard.get(), 60)
        lacking = self.replica.take(message)
        assert self.replicas.take("c1", ReplicaHeld(number=message.number, lacking=lacking))
        return not message.rest


def test_hosts_hear_that_steps_are_told_when_replicas_have_them(job: Path, tmp_path: Path) -> None:
    events = (job / "events.jsonl").stat().st_size

    async def stand_by() -> None:
        guest = Guest(job, tmp_path / "own", (8, events))
        assert guest.replicas.told(9) == 9, "it has not had all yet: nobody counts on it"
        while not await guest.answer():
            pass
        await guest.answer()  # what follows is sent once the answer before has been taken in
        assert guest.replicas.told(9) == 8 and guest.replicas.told(7) == 7
        waits = asyncio.create_task(guest.replicas.caught_up())
        for _ in range(2):
            await guest.answer()
        await asyncio.wait_for(waits, 60)
        guest.replicas.gone(["c1"])
        assert guest.replicas.told(9) == 8, "it may be back in a moment"

    asyncio.run(stand_by())
    assert files(tmp_path / "own") == files(job)


def test_a_host_is_told_no_more_than_that(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    for step in (1, 2, 3):
        log.write("step_committed", step=step, generation=1)
    question = FilePiece(agent_id="h", path="events.jsonl", source="0123456789abcdef", at=0)
    for through in (3, 2):
        answers = FilesDesk(tmp_path, lambda known, most=through: min(known, most)).take("c", question)
        assert answers is not None and isinstance(answers[0][1], PieceTaken)
        assert answers[0][1].told == through


def test_a_directory_of_before_is_not_led_in(
    job: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def leave(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr("everstep.runtime.files.following.os._exit", leave)
    found = premises_of(job, "", bytes(32), None, 2.0)
    assert found.word == PLACE and found.may_lead() and found.taken(None) == ""
    found.saw("")
    found.saw(PLACE)
    with pytest.raises(SystemExit, match=str(MOVED)):
        found.saw(OTHER)
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and str(job) in said and "--standby" in said
    leave_word(job, None, OTHER)
    found.saw(OTHER)  # the job has begun anew in the same directory
    assert type(premises_of(job, "host", bytes(32), None, 2.0)) is Premises, "one that has been led in is no replica"
