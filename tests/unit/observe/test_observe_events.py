"""events.jsonl: whole lines from many processes, readers that never see half of one, disks that are full."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from everstep.base.cause import Cause
from everstep.observe import events
from everstep.observe.events import (
    COMMON,
    MOST_LINE_BYTES,
    EventLog,
    follow,
    format_event,
    last_committed_step,
    last_generation,
    parse_events,
    read_events,
    told_lately,
)


def test_every_event_has_the_common_fields_and_its_own(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl", worker_id=3, pid=9)
    assert log.write("step_committed", step=4, generation=2, loss=0.5)
    assert log.write("warning", reason="why", worker_id=None, time_unix_ns=17)
    first, second = read_events(tmp_path / "events.jsonl")
    assert list(first)[: len(COMMON)] == list(COMMON)
    assert (first["worker_id"], first["pid"], first["step"], first["loss"]) == (3, 9, 4, 0.5)
    assert first["reason"] is None and first["incarnation"] is None
    assert second["worker_id"] is None and second["time_unix_ns"] == 17 and second["reason"] == "why"


def test_numbers_that_are_not_json_become_null(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "e")
    log.write("step_committed", step=1, loss=float("nan"), more=[float("inf"), 1.0])
    line = (tmp_path / "e").read_text()
    event = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert event["loss"] is None and event["more"] == [None, 1.0]


def test_lines_of_several_processes_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    children = []
    for worker in range(4):
        pid = os.fork()
        if pid == 0:
            log = EventLog(path, worker_id=worker)
            for step in range(300):
                log.write("step_committed", step=step + 1, filler="x" * 200)
            os._exit(0)
        children.append(pid)
    for pid in children:
        assert os.waitpid(pid, 0)[1] == 0
    lines = path.read_bytes().splitlines()
    assert len(lines) == 1200
    seen = {(e["worker_id"], e["step"]) for e in map(json.loads, lines)}
    assert len(seen) == 1200


def test_events_wait_for_a_full_disk_and_what_is_never_written_is_counted(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("everstep.observe.events.open_below", lambda *_: os.open("/dev/full", os.O_WRONLY))
    log = EventLog("/dev/full")
    assert log.write("warning")
    assert log.write("warning")
    assert capsys.readouterr().err.count("everstep:") == 1, "said once"
    log.close()
    assert "2 events of process" in capsys.readouterr().err
    with open("/dev/full", "w") as full:  # the process's own words lie on the same disk
        monkeypatch.setattr("sys.stderr", full)
        assert EventLog("/dev/full").write("warning")
        monkeypatch.undo()
        with contextlib.suppress(OSError):
            full.close()


def test_more_than_can_wait_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("everstep.observe.events.MOST_WAITING_BYTES", 1000)
    path = tmp_path / "later" / "events.jsonl"
    log = EventLog(path)
    kept = [log.write("warning", step=k) for k in range(20)]
    assert 0 < sum(kept) < 20 and kept == sorted(kept, reverse=True)
    path.parent.mkdir()
    log.close()
    *told, lost = read_events(path)
    assert [event["step"] for event in told] == list(range(sum(kept)))
    assert lost["reason"] == f"{20 - sum(kept)} events of this process were lost: {path} could not be written"


def test_it_tries_again_when_the_file_can_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "later" / "events.jsonl"
    log = EventLog(path)
    assert log.write("warning", step=1, time_unix_ns=5)
    path.parent.mkdir()
    assert log.write("warning", step=2)
    first, second = read_events(path)
    assert (first["step"], first["time_unix_ns"], second["step"]) == (1, 5, 2)
    assert log.write("warning", step=3) and len(read_events(path)) == 3
    assert "No such file" in capsys.readouterr().err


def test_an_event_of_which_only_the_line_feed_did_not_fit_is_there_once(tmp_path, monkeypatch):
    log, real_write = EventLog(tmp_path / "events.jsonl"), os.write
    with monkeypatch.context() as full:
        full.setattr(os, "write", lambda fd, data: real_write(fd, data[:-1]))
        log.write("warning", step=7)
    log.write("warning", step=8)
    log.close()
    assert [event["step"] for event in read_events(tmp_path / "events.jsonl")] == [7, 8]


def test_half_a_line_spoils_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(path)
    log.write("warning", step=1)
    real_write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real_write(fd, data[:20]))
    assert log.write("warning", step=2)
    monkeypatch.undo()
    assert EventLog(path).write("warning", step=3)  # another process, which knows nothing of it
    assert log.write("warning", step=4)
    assert len(path.read_bytes().splitlines()) == 4 + 1, "the blank line ends what stayed of the half one"
    assert [e["step"] for e in read_events(path)] == [1, 3, 2, 4]


def test_the_last_committed_step_is_found_from_the_end(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    assert last_committed_step(path) == 0
    log = EventLog(path)
    for step in range(1, 50):
        log.write("step_committed", step=step)
    assert last_committed_step(path) == 49
    for _ in range(3000):
        log.write("warning", reason="r" * 100)
    assert path.stat().st_size > 2 << 17
    assert last_committed_step(path) == 49


def test_what_was_followed_is_not_told_again_after_a_failed_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, looks = tmp_path / "events.jsonl", 0
    path.write_bytes(format_event("job_started", 1, {"step": 0}))
    opened = events.open_given

    def given(*asked: Any) -> Any:
        nonlocal looks
        looks += 1
        if looks == 2:
            path.write_bytes(path.read_bytes() + format_event("job_completed", 2, {"step": 3}))
            raise OSError(errno.EMFILE, "too many open files")
        return opened(*asked)

    monkeypatch.setattr(events, "open_given", given)
    told = follow(path, poll_s=0.0, stop=lambda: looks > 2)
    assert [event["kind"] for event in told] == ["job_started", "job_completed"]


def test_follow_sees_whole_lines_only(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    done = threading.Event()
    seen: list[int] = []
    first_seen = threading.Event()

    def read() -> None:
        for event in follow(path, poll_s=0.001, stop=done.is_set):
            seen.append(event["step"])
            first_seen.set()

    reader = threading.Thread(target=read)
    reader.start()
    with open(path, "wb", buffering=0) as file:
        file.write(b'{"kind":"warning","step":1}\n{"kind":"warn')
        assert first_seen.wait(10)
        file.write(b'ing","step":2}\n{"kind":"torn')
    done.set()
    reader.join(10)
    assert seen == [1, 2]


def test_foreign_lines_are_passed_over() -> None:
    assert [e["kind"] for e in parse_events(b'nonsense\n{"kind":"a"}\n[1]\n\n{"kind":"b"}\n')] == ["a", "b"]


def test_what_an_earlier_start_committed_does_not_count(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    log.write("step_committed", step=7)
    log.write("job_started")
    assert last_committed_step(log.path) == 0
    log.write("step_committed", step=2)
    assert last_committed_step(log.path) == 2


def test_the_generation_that_was_told_last_is_that_of_the_last_run(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    assert last_generation(log.path) == 0
    for generation in (6, 7):
        log.write("generation_started", generation=generation)
    for _ in range(3000):
        log.write("warning", reason="r" * 100)
    assert last_generation(log.path) == 7
    log.write("job_started", step=40)
    assert last_generation(log.path) == 0
    log.write("generation_started", generation=1)
    assert last_generation(log.path) == 1


def test_the_generation_that_was_told_last_is_found_among_what_only_looks_so(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    log.write("generation_started", generation=7)
    log.write("logged", job_started=1, text='"kind":"generation_started"', kinds=["generation_started"])
    log.write("generation_started", generation=1 << 60)
    whole = log.path.read_bytes()
    later = format_event("generation_started", 1, {"generation": 8})
    for more, told in [
        (b"", 7),
        (later[:-9], 7),
        (later[:-1], 8),
        (b"null\n[]\n" + later.replace(b":", b" : "), 8),
        (later[:40] + later, 8),
        (later + b"x" * (MOST_LINE_BYTES + 10) + later, 8),
        (b'"job_started" ' * (MOST_LINE_BYTES // 10) + b"\n", 7),
    ]:
        log.path.write_bytes(whole + more)
        assert last_generation(log.path) == told, more[:50]


def test_the_generation_that_was_told_last_is_found_wherever_a_block_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = format_event("generation_started", 1, {"generation": 5})
    path = tmp_path / "events.jsonl"
    path.write_bytes(format_event("job_started", 1, {"step": 0}) + line + format_event("warning", 1, {}))
    for size in range(1, 2 * len(line)):
        monkeypatch.setattr("everstep.observe.events._BLOCK_BYTES", size)
        assert last_generation(path) == 5


def test_nobody_knows_the_generation_that_was_told_last_if_the_file_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "events.jsonl"
    path.symlink_to(tmp_path / "other")
    assert last_generation(path) is None
    path.unlink()
    path.mkdir()
    assert last_generation(path) is None
    path.rmdir()
    log = EventLog(path)
    for kind in ("generation_started", "warning"):
        log.write(kind, generation=3)
    monkeypatch.setattr("everstep.observe.events.MOST_SEARCHED_BYTES", path.stat().st_size - 1)
    assert last_generation(path) is None, "it lies too far back"


def test_a_reason_never_goes_without_a_cause() -> None:
    def causes(**fields: object) -> object:
        return json.loads(format_event("warning", 1, fields))["cause"]

    assert causes() is None and causes(reason="") is None
    assert causes(reason="the disk is full") == "unknown"
    assert causes(reason="the disk is full", cause=Cause.DISK) == "disk"
    assert causes(reason="\udcff", cause=Cause.DISK) == "disk", "text that is no UTF-8"


def test_where_events_cannot_be_read_none_is_known_to_be_told(tmp_path: Path) -> None:
    assert told_lately(tmp_path) == set(), "a directory"
    assert told_lately(tmp_path / "nothing") == set()


def test_a_write_that_takes_seconds_is_told_once_with_its_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("everstep.observe.events.SLOW_S", -1.0)
    log = EventLog(tmp_path / "events.jsonl", worker_id=2)
    for step in (1, 2, 3):
        log.write("step_committed", step=step)
    with log.timing(tmp_path / "journal.jsonl"):
        pass
    events = read_events(tmp_path / "events.jsonl")
    assert [event["kind"] for event in events] == ["step_committed", "warning", "step_committed", "step_committed"]
    assert (events[1]["cause"], events[1]["worker_id"], events[1]["took_s"] > 0) == (Cause.SLOW, 2, True)
    assert f"{tmp_path} is slow: writing events.jsonl there took 0.0 s" in events[1]["reason"]


def test_a_write_that_takes_no_time_is_no_news(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    with log.timing(tmp_path / "journal.jsonl"):
        log.write("step_committed", step=1)
    assert [event["kind"] for event in read_events(tmp_path / "events.jsonl")] == ["step_committed"]


def test_a_directory_that_hangs_is_told_once_and_not_of_the_warning_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s, real_write = [0.0], os.write

    def hang(fd: int, data: bytes) -> int:
        now_s[0] += 90.0
        return real_write(fd, data)

    monkeypatch.setattr("everstep.observe.events.time.monotonic", lambda: now_s[0])
    log = EventLog(tmp_path / "events.jsonl")
    with monkeypatch.context() as hangs:
        hangs.setattr(os, "write", hang)
        log.write("step_committed", step=1)
    events = read_events(tmp_path / "events.jsonl")
    assert [(event["kind"], event.get("took_s")) for event in events] == [("step_committed", None), ("warning", 90.0)]
