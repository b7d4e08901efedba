"""Notices: what is told to a command or a server, once, tried again, bounded, and without any secret."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from everstep.base.config import load_config, to_dict
from everstep.base.errors import ConfigError
from everstep.report.history import History
from everstep.report.page import Proof, report_page
from everstep.sinks.notices import Notices, check_notify
from everstep.sinks.sink import SinkFailed, SinkJob

NOW_S = 1_800_000_000.0
SECRET = "T00/B00/a-secret-of-the-address"


def begun(folder: Path, **rule: Any) -> Notices:
    folder.mkdir(parents=True, exist_ok=True)
    notices = Notices(sleep=lambda seconds: None, clock=lambda: NOW_S)
    config = to_dict(load_config([("test", {f"notify.{name}": value for name, value in rule.items()})]))
    notices.begin(SinkJob(folder.parent, folder, "mine", "task", "id", 1), config)
    return notices


def told(notices: Notices, kind: str, at_s: float = 0.0, **fields: Any) -> None:
    event = {"kind": kind, "time_unix_ns": int((NOW_S + at_s) * 1e9), "cause": "killed", **fields}
    notices.event(7, f"{kind} happened", event)


def script(tmp_path: Path, body: str) -> str:
    path = tmp_path / "notice.sh"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o700)
    return str(path)


def test_a_command_is_told_once_what_was_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVERSTEP_TOKEN", SECRET)
    out = tmp_path / "out"
    command = script(
        tmp_path, f'cat >> {out}; echo "$EVERSTEP_EVENT|$EVERSTEP_TEXT|$EVERSTEP_RUN|$EVERSTEP_TOKEN" >> {out}'
    )
    rule = {"command": f"{command} 'an argument'", "events": ["worker_evicted", "checkpoint_failed"]}
    for _ in range(2):  # another process begins anew and hears it again
        notices = begun(tmp_path / "notify", **rule)
        told(notices, "worker_evicted", worker_id=2, reason="killed by SIGKILL")
        told(notices, "worker_joined", 1)
        told(notices, "checkpoint_failed", 2, cause="busy")
        told(notices, "worker_evicted", -7200, worker_id=1)
        notices.flush()
    lines = out.read_text().splitlines()
    notice = json.loads(lines[0])
    assert {key: notice[key] for key in ("event", "text", "step", "worker_id", "cause", "reason", "run")} == {
        "event": "worker_evicted",
        "text": "mine: worker_evicted happened",
        "step": 7,
        "worker_id": 2,
        "cause": "killed",
        "reason": "killed by SIGKILL",
        "run": "mine",
    }
    assert lines[1:] == ["worker_evicted|mine: worker_evicted happened|mine|"]


def test_what_fails_is_tried_again_and_nothing_is_told_twice(tmp_path: Path) -> None:
    out, fails = tmp_path / "out", tmp_path / "fails"
    fails.touch()
    command = script(tmp_path, f'grep -q waiting && [ -e {fails} ] && exit 3; echo "$EVERSTEP_EVENT" >> {out}')
    rule = {"command": command, "events": ["job_started", "waiting", "job_failed"]}
    notices = begun(tmp_path / "notify", **rule)
    for i, kind in enumerate(rule["events"]):
        told(notices, kind, i)
    with pytest.raises(SinkFailed, match=r"notify.command did not take a notice: '.*notice.sh' ended with 3"):
        notices.flush()
    assert out.read_text().split() == ["job_started"]
    fails.unlink()
    notices = begun(tmp_path / "notify", **rule)
    for i, kind in enumerate(rule["events"]):
        told(notices, kind, i)
    notices.flush()
    assert out.read_text().split() == ["job_started", "waiting", "job_failed"]


def test_a_way_that_fails_silences_no_other_and_hears_all_once_it_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fails, out, posted = tmp_path / "fails", tmp_path / "out", []
    fails.touch()
    monkeypatch.setenv("HOOK", "http://192.0.2.1/hook")
    monkeypatch.setattr(Notices, "_post", lambda self, url, notice: posted.append(notice["event"]) or "")
    command = script(tmp_path, f'[ -e {fails} ] && exit 3; echo "$EVERSTEP_EVENT" >> {out}')
    rule = {"command": command, "webhook": "HOOK", "events": ["job_started", "waiting", "job_failed"]}
    for broken in (True, True, False):
        notices = begun(tmp_path / "notify", **rule)
        for i, kind in enumerate(rule["events"]):
            told(notices, kind, i)
        if broken:
            with pytest.raises(SinkFailed, match=r"notify.command did not take a notice"):
                notices.flush()
            assert posted == rule["events"] and not out.exists(), "once"
        else:
            fails.unlink()
            notices.flush()
    assert posted == rule["events"] == out.read_text().split()


def test_a_notice_that_a_server_refuses_is_left_out_and_the_next_one_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def post(self: Notices, url: str, notice: dict[str, Any]) -> str:
        asked.append(notice["text"])
        return "the server answered 400" if notice["event"] == "waiting" else ""

    monkeypatch.setenv("HOOK", "http://192.0.2.1/hook")
    monkeypatch.setattr(Notices, "_post", post)
    notices = begun(tmp_path / "notify", webhook="HOOK", events=["waiting", "job_failed"])
    told(notices, "waiting")
    told(notices, "job_failed", 1)
    notices.flush()
    assert asked == [
        "mine: waiting happened",
        "mine: job_failed happened",
        "mine: and more, which are not told one by one: 1 x waiting",
    ]


def test_a_storm_becomes_a_few_notices(tmp_path: Path) -> None:
    out = tmp_path / "out"
    notices = begun(
        tmp_path / "notify", command=script(tmp_path, f'echo "$EVERSTEP_TEXT" >> {out}'), events=["waiting"]
    )
    for i in range(500):
        told(notices, "waiting", i / 1000, worker_id=i)
    notices.flush()
    lines = out.read_text().splitlines()
    assert len(lines) == 10 and lines[-1] == "mine: and more, which are not told one by one: 491 x waiting"
    for batch in range(1, 30):
        for i in range(20):
            told(notices, "waiting", batch + i / 100, worker_id=i)
        notices.flush()
    assert len(out.read_text().splitlines()) == 60, "so many in an hour"


def test_in_a_storm_the_end_of_the_job_is_told(tmp_path: Path) -> None:
    """Neither the limit of an hour nor the number of those that wait takes it away, and no count holds it."""
    out = tmp_path / "out"
    rule = {"command": script(tmp_path, f'echo "$EVERSTEP_EVENT" >> {out}'), "events": ["waiting", "job_failed"]}
    notices = begun(tmp_path / "notify", **rule)
    for batch in range(8):
        for i in range(20):
            told(notices, "waiting", batch + i / 100, worker_id=i)
        told(notices, "job_failed", batch + 0.5)
        notices.flush()
    heard = out.read_text().split()
    assert heard[:11] == [*["waiting"] * 9, "more", "job_failed"] and heard.count("job_failed") == 8
    assert len(heard) == 60 + 3, "the limit, and what comes after it: one end each"


def test_old_news_wake_nobody_but_an_end_is_told_for_a_week(tmp_path: Path) -> None:
    out = tmp_path / "out"
    rule = {"command": script(tmp_path, f'echo "$EVERSTEP_EVENT" >> {out}'), "events": ["waiting", "job_failed"]}
    notices = begun(tmp_path / "notify", **rule)
    for kind, at_s in (("waiting", -3700.0), ("job_failed", -8 * 86400.0), ("job_failed", -3700.0)):
        told(notices, kind, at_s)
    notices.flush()
    assert out.read_text().split() == ["job_failed"]


def test_what_hangs_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    command = script(tmp_path, f"sleep 1000 & echo $! > {pid}.part; mv {pid}.part {pid}; wait")
    notices = begun(tmp_path / "notify", command=command, timeout_s=1)
    told(notices, "job_failed")
    with pytest.raises(SinkFailed, match="took longer than 1 s"):
        notices.flush()
    child = int(pid.read_text())
    deadline_s = time.monotonic() + 30
    while Path(f"/proc/{child}").exists() and time.monotonic() < deadline_s:
        if Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
            break
        os.sched_yield()
    else:
        assert not Path(f"/proc/{child}").exists()


class Server(BaseHTTPRequestHandler):
    """Takes notices; answers as `answers` says, in turn."""

    answers: ClassVar[list[int]] = []
    heard: ClassVar[list[tuple[str, Any]]] = []

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        type(self).heard.append((self.path, body))
        self.send_response(type(self).answers.pop(0) if type(self).answers else 200)
        self.send_header("location", "/elsewhere")
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        return


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Server]]:
    class Mine(Server):
        answers: ClassVar[list[int]] = []
        heard: ClassVar[list[tuple[str, Any]]] = []

    found = HTTPServer(("127.0.0.1", 0), Mine)
    thread = threading.Thread(target=found.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setenv("HOOK", f"http://127.0.0.1:{found.server_port}/{SECRET}")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    yield Mine
    found.shutdown()
    thread.join()
    found.server_close()


def test_a_server_is_posted_to_until_it_takes_it(server: type[Server], tmp_path: Path) -> None:
    notices = begun(tmp_path / "notify", webhook="HOOK")
    server.answers[:] = [500, 302]
    notices.event(7, "<!channel> failed", {"kind": "job_failed", "time_unix_ns": int(NOW_S * 1e9), "cause": "killed"})
    notices.flush()
    assert [path for path, _ in server.heard] == [f"/{SECRET}"] * 3
    assert server.heard[-1][1]["text"] == "mine: ‹!channel› failed"


def test_a_server_that_does_not_is_named_without_its_address(
    server: type[Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.answers[:] = [503] * 3
    notices = begun(tmp_path / "notify", webhook="HOOK")
    told(notices, "job_failed")
    with pytest.raises(SinkFailed, match="the server answered 503") as refused:
        notices.flush()
    assert SECRET not in str(refused.value)
    monkeypatch.setenv("HOOK", f"http://127.0.0.1:1/{SECRET}")
    notices = begun(tmp_path / "notify", webhook="HOOK")
    told(notices, "job_failed")
    with pytest.raises(SinkFailed, match="cannot be reached: ConnectionRefusedError") as refused:
        notices.flush()
    assert SECRET not in str(refused.value)
    assert SECRET not in "".join(path.read_text() for path in (tmp_path / "notify").iterdir())


@pytest.mark.parametrize(
    ("rule", "variable", "said"),
    [
        ({"command": "no-such-program-here x"}, "", "expected a program that can be run"),
        ({"command": "'half"}, "", "no closing quotation"),
        ({"command": "''"}, "", "expected a program that can be run"),
        ({"webhook": "HOOK"}, "", "HOOK, it is not set"),
        ({"webhook": "HOOK"}, f"ftp://host/{SECRET}", "it holds something else"),
        ({"webhook": "HOOK"}, f"https://ho st/{SECRET}", "it holds something else"),
        ({"webhook": "HOOK"}, f"https:///{SECRET}", "it holds something else"),
        ({"webhook": f"https://host/{SECRET}"}, "", "expected text or none, like EVERSTEP_WEBHOOK, got something else"),
        ({"events": ["job_fails"], "command": "true"}, "", "notify.events: expected list of"),
        ({"timeout_s": 0}, "", "greater than 0"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(
    rule: dict[str, Any], variable: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOOK", variable)
    with pytest.raises(ConfigError) as refused:
        check_notify(load_config([("test", {"notify": rule})]).notify)
    assert said in str(refused.value) and "\n" not in str(refused.value) and SECRET not in str(refused.value)


def test_settings_show_no_arguments_of_a_command(tmp_path: Path) -> None:
    config = to_dict(load_config([("test", {"notify.command": f"curl {SECRET}"})]))
    (tmp_path / "job.json").write_text(json.dumps({"task": "t", "config": config}))
    page = report_page(History(tmp_path).load(), Proof())
    assert SECRET not in page and "(not shown)" in page
