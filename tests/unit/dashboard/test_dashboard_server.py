"""The dashboard's server: who may ask what, what the stream says, what actions answer. A real server on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette", reason="the extra [dashboard] is not installed")
uvicorn = pytest.importorskip("uvicorn", reason="the extra [dashboard] is not installed")

from everstep.base.doors import is_loopback  # noqa: E402
from everstep.base.errors import ConfigError  # noqa: E402
from everstep.cli.main import run_command  # noqa: E402
from everstep.cli.status import read_status  # noqa: E402
from everstep.dashboard.app import _MOST_STREAMS, make_app, make_metrics_app  # noqa: E402
from everstep.dashboard.catalog import Catalog, holds_runs, list_row  # noqa: E402
from everstep.dashboard.feed import Feeds, RunFeed  # noqa: E402
from everstep.dashboard.guard import checked_token, kept_token  # noqa: E402
from everstep.dashboard.run_view import PageCursor, head, patch, worker_rows  # noqa: E402
from everstep.observe.events import format_event  # noqa: E402
from everstep.observe.logs import WorkerLog  # noqa: E402
from everstep.report.facts import Facts  # noqa: E402
from everstep.report.history import History  # noqa: E402
from everstep.report.notes import Notes  # noqa: E402
from everstep.runtime import commands  # noqa: E402
from everstep.runtime.files.run_lock import run_lock  # noqa: E402
from everstep.runtime.link.address import METRICS_TOKEN_FILE  # noqa: E402

TOKEN = "a-token-of-many-characters"
T0 = 1_800_000_000 * 10**9
JSON = {"content-type": "application/json"}
OWNER = {"authorization": f"Bearer {TOKEN}"}


def event(kind: str, at_s: float, **fields: Any) -> bytes:
    return format_event(kind, T0 + int(at_s * 1e9), fields)


def make_run(base: Path, name: str = "run") -> Path:
    run_dir = base / name
    run_dir.mkdir()
    lines = [
        event("job_started", 0, workers=2),
        event("worker_joined", 1, worker_id=0, incarnation=0, pid=1, host="<script>alert(1)</script>"),
        event("worker_joined", 1, worker_id=1, incarnation=0, pid=2, host="h"),
        event("generation_started", 2, generation=1, seats=[[0, 0, "active", [0]], [1, 0, "active", [1]]], leaders=[0]),
        *(event("step_committed", 2 + s, step=s, generation=1, loss=1.0 / s, samples=4, lr=[0.1]) for s in range(1, 5)),
    ]
    (run_dir / "events.jsonl").write_bytes(b"".join(lines))
    (run_dir / "job.json").write_text('{"task": "t", "config": {"steps": 9}}')
    return run_dir


class Server:
    """The application on a port of the kernel's."""

    def __init__(
        self,
        *run_dirs: Path,
        host: str = "127.0.0.1",
        make: Any = make_app,
        load: bool = True,
        public: bool = False,
        top: Path | None = None,
    ) -> None:
        self.feeds = Feeds(run_dirs, top=top)
        while load and self.feeds.catalog is not None and self.feeds.catalog.advance():
            pass
        for feed in self.feeds.runs.values() if load else ():
            feed.load()
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        app = make(self.feeds, host, TOKEN, public)
        config = uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1, lifespan="off")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._socket]}, daemon=True)
        self._thread.start()

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any, dict[str, str]]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        data = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
        connection.request(method, path, data, names)
        answer = connection.getresponse()
        content = answer.read()
        connection.close()
        kind = answer.headers.get_content_type()
        return answer.status, json.loads(content) if kind == "application/json" else content, dict(answer.headers)

    def first_message(self, query: str = "", **headers: str) -> dict[str, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        connection.request("GET", f"/api/stream{query}", headers={n.replace("_", "-"): v for n, v in headers.items()})
        answer = connection.getresponse()
        assert answer.status == 200
        while True:
            line = answer.readline()
            assert line
            if line.startswith(b"data: "):
                connection.close()
                message: dict[str, Any] = json.loads(line[6:])
                return message

    def close(self) -> None:
        self.feeds.stop()
        self._server.should_exit = True
        self._thread.join(30)
        self._socket.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """To be read by everybody; what it changes needs the token."""
    server = Server(make_run(tmp_path_factory.mktemp("runs")), public=True)
    yield server
    server.close()


@pytest.fixture(scope="module")
def closed_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Without the token, nothing."""
    server = Server(make_run(tmp_path_factory.mktemp("runs")))
    yield server
    server.close()


def test_the_page_comes_with_a_strict_policy(server: Server) -> None:
    status, page, headers = server.ask("GET", "/")
    assert (status, b"<title>everstep</title>" in page) == (200, True)
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "://" not in policy
    assert headers["x-frame-options"] == "DENY"
    assert "set-cookie" not in headers and "access-control-allow-origin" not in headers
    assert b"style=" not in page and b"onclick" not in page and b"://" not in page


def test_only_its_own_files_are_served(server: Server) -> None:
    assert server.ask("GET", "/static/page.js")[0] == 200
    for path in ("/static/..%2fapp.py", "/static/../app.py", "/static/app.py", "/static/", "/etc/passwd", "/api/x"):
        assert server.ask("GET", path)[0] in (404, 405), path


def test_the_stream_begins_with_everything(server: Server) -> None:
    run = server.first_message()["runs"]["0"]
    assert run["reset"] is True
    assert (run["head"]["step"], run["head"]["total"], run["head"]["members"]) == (4, 9, 0)  # nothing runs
    fields = run["workers"]["fields"]
    assert run["workers"]["rows"]["0"][fields.index("state")] == "ended"
    assert run["workers"]["rows"]["0"][fields.index("host")] == "<script>alert(1)</script>"
    assert run["curves"]["steps"]["x"] == [1, 2, 3, 4]
    assert [line[3] for line in run["log"]][:2] == ["job_started", "worker_joined"]


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "", "127.0.0.2:1"])
def test_names_that_are_not_ours_are_refused(server: Server, host: str) -> None:
    assert server.ask("GET", "/", host=host)[0] in (400, 403)
    assert server.ask("GET", "/api/stream", host=host)[0] in (400, 403)


def test_other_sites_are_refused(server: Server) -> None:
    for path in ("/", "/api/stream"):
        assert server.ask("GET", path, origin="http://evil.example")[0] == 403
        assert server.ask("GET", path, origin="null")[0] == 403
        assert server.ask("GET", path, origin=f"http://127.0.0.1:{server.port + 1}")[0] == 403
    for site in ("cross-site", "same-site"):
        assert server.ask("GET", "/api/stream", sec_fetch_site=site)[0] == 403
        assert server.ask("POST", "/api/token", {}, x_everstep_token=TOKEN, sec_fetch_site=site, **JSON)[0] == 403
    assert server.ask("POST", "/api/token", {}, x_everstep_token=TOKEN, origin="http://evil.example", **JSON)[0] == 403
    assert server.ask("OPTIONS", "/api/runs/0/scale", origin="http://evil.example")[0] == 403


def test_no_action_without_the_token(server: Server) -> None:
    for name in ("checkpoint", "drain", "scale", "chaos", "ledger"):
        for given in (
            {},
            {"x_everstep_token": ""},
            {"x_everstep_token": TOKEN[:-1]},
            {"x_everstep_token": TOKEN + "x"},
        ):
            assert server.ask("POST", f"/api/runs/0/{name}", {}, **given, **JSON)[0] == 401
        assert server.ask("GET", f"/api/runs/0/{name}?token={TOKEN}")[0] == 405
        assert server.ask("POST", f"/api/runs/0/{name}?token={TOKEN}", {}, cookie=f"token={TOKEN}", **JSON)[0] == 401
    assert server.ask("POST", "/api/token", {}, x_everstep_token=TOKEN, **JSON)[0] == 200
    assert server.ask("POST", "/api/token", {}, x_everstep_token=TOKEN, content_type="text/plain")[0] == 415


PATHS = ("/", "/static/page.js", "/api/stream", "/api/token", "/metrics", "/api/runs/0/workers/1", "/nowhere")


def test_everything_needs_the_token(closed_server: Server) -> None:
    for path in PATHS:
        for given in (
            {},
            {"authorization": f"Bearer {TOKEN}x"},
            {"authorization": "Bearer "},
            {"authorization": f"Basic {TOKEN}"},
            {"x_everstep_token": TOKEN[:-1]},
            {"cookie": f"token={TOKEN}"},
        ):
            for method in ("GET", "HEAD"):
                status, text, headers = closed_server.ask(method, path, **given)
                assert (status, headers["www-authenticate"], "set-cookie" in headers) == (401, "Bearer", False), path
            text = closed_server.ask("GET", path, **given)[1]
            assert b"token" in text and text.count(b"\n") == 1
        assert closed_server.ask("GET", f"{path}?token={TOKEN}x")[0] == 401
    for path, status in zip(PATHS, (200, 200, 200, 200, 200, 200, 404), strict=True):
        if path != "/api/stream":
            assert closed_server.ask("GET", path, **OWNER)[0] == status
            assert closed_server.ask("GET", path, x_everstep_token=TOKEN)[0] == status
    assert closed_server.first_message(**OWNER)["count"] == 1


def test_the_address_lets_a_browser_in_by_a_cookie(closed_server: Server) -> None:
    status, text, headers = closed_server.ask("GET", f"/?token={TOKEN}")
    assert (status, headers["location"], text) == (303, "/", b"")
    cookie, *rules = [part.strip() for part in headers["set-cookie"].split(";")]
    assert {rule.lower() for rule in rules} == {"path=/", "httponly", "samesite=strict"}
    assert TOKEN not in cookie
    assert b"<title>" in closed_server.ask("GET", "/", cookie=f"other=1; {cookie}")[1]
    assert closed_server.first_message(cookie=cookie)["count"] == 1
    assert closed_server.ask("POST", "/api/token", {}, cookie=cookie, **JSON)[0] == 200
    assert closed_server.ask("GET", "/", cookie=f"{cookie}x")[0] == 401
    foreign = {"cookie": cookie, "origin": "http://evil.example"}
    assert closed_server.ask("POST", "/api/runs/0/scale", {}, **foreign, **JSON)[0] == 403
    where = closed_server.ask("GET", f"/metrics?run=0&token={TOKEN}", accept="text/html,*/*")[2]["location"]
    assert where == "/metrics?run=0"
    where = closed_server.ask("GET", f"//evil.example/%0d%0a?token={TOKEN}")[2]["location"]
    assert where == "/evil.example/%0D%0A"
    where = closed_server.ask("GET", f"/%5Cevil.example?token={TOKEN}")[2]["location"]
    assert where == "/%5Cevil.example"


def test_whoever_unlocks_gets_the_cookie(server: Server) -> None:
    assert server.ask("GET", "/api/token")[1] == {"ok": False}
    headers = server.ask("POST", "/api/token", {}, x_everstep_token=TOKEN, **JSON)[2]
    cookie = headers["set-cookie"].partition(";")[0]
    assert server.ask("GET", "/api/token", cookie=cookie)[1] == {"ok": True}
    assert server.ask("POST", "/api/runs/0/stop", {}, **JSON)[0] == 401
    assert server.ask("POST", "/api/runs/0/stop", {}, cookie=cookie, **JSON)[0] == 200


def test_actions_answer_in_one_line(server: Server) -> None:
    def act(name: str, body: Any) -> tuple[int, Any]:
        return server.ask("POST", f"/api/runs/0/{name}", body, x_everstep_token=TOKEN, **JSON)[:2]

    for name, body, words in [
        ("scale", {"workers": "3"}, "whole number"),
        ("scale", {"workers": True}, "whole number"),
        ("scale", {"workers": 3}, "no job is running"),
        ("drain", {}, "whole number"),
        ("chaos", {"fault": "explode:target=worker:1"}, "explode"),
        ("checkpoint", {}, "no job is running"),
        ("stop", {}, "no job is running"),
        ("profile", {"steps": 0, "workers": [0]}, "from 1 to 100"),
        ("profile", {"steps": 5, "workers": ["0"]}, "list of worker ids"),
        ("profile", {"steps": 5, "workers": [0]}, "no job is running"),
        ("pause", {}, "unknown action"),
    ]:
        status, answer = act(name, body)
        assert (status, answer["ok"]) == (200, False)
        assert words in answer["error"] and "\n" not in answer["error"]
    assert act("scale", [1])[0] == 400
    assert act("scale", b"{")[0] == 400
    assert act("scale", b'{"a":"' + b"x" * 5000 + b'"}')[0] == 400
    for run in ("7", "-1", "00", "%D9%A0", "9" * 5000, "..", "%2e%2e%2frun", "run", "0%00"):
        assert server.ask("POST", f"/api/runs/{run}/scale", {}, x_everstep_token=TOKEN, **JSON)[0] == 404, run
        assert server.ask("GET", f"/metrics?run={run}")[0] == 404, run


def test_actions_reach_the_coordinator(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, Any]] = []

    def ask(run_dir: Path, name: str, args: Any = None, timeout_s: float = 0) -> dict[str, Any]:
        asked.append((name, args))
        return {"workers": 2, "before": 3}

    monkeypatch.setattr(commands, "ask", ask)
    given = {"x_everstep_token": TOKEN, **JSON}
    assert server.ask("POST", "/api/runs/0/scale", {"workers": 2}, **given)[1]["text"] == "from 3 to 2 workers"
    assert server.ask("POST", "/api/runs/0/drain", {"worker_id": 1}, **given)[1]["ok"]
    sent = server.ask("POST", "/api/runs/0/chaos", {"fault": "kill:target=leader:1"}, **given)[1]
    assert sent["text"] == "kill:target=leader:1 is on its way"
    assert asked == [
        ("scale", {"workers": 2}),
        ("drain", {"worker_id": 1}),
        ("chaos", {"fault": "kill:target=leader:1", "workers": [], "stages": [1]}),
    ]


def test_a_moment_and_a_worker_are_told_when_asked(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path)
    (run_dir / "logs").mkdir()
    said = WorkerLog(1, 0)
    lines = [said.line("info", "mine", f"line {i}", time_ns=T0 + i) for i in range(60)]
    raised = said.line("error", "mine", "it broke", exception="Traceback\nKeyError: <b>", time_ns=T0 + 70)
    (run_dir / "logs" / "worker-1.jsonl").write_bytes(b"".join([*lines, raised]))
    folder = run_dir / "profiles" / "20260101-000000"
    folder.mkdir(parents=True)
    (folder / "worker-1.json.gz").write_bytes(b"trace")
    (run_dir / "profiles" / "worker-1.json.gz").write_bytes(b"not here")
    server = Server(run_dir, public=True)
    try:
        found = server.ask("GET", f"/api/runs/0/log?at={(T0 + 10**9) // 10**6}&worker=0")[1]
        assert [line[6] for line in found["lines"]][:2] == ["started", "worker 0 has joined"]
        assert not any("line 3" in line[6] for line in found["lines"])
        assert any("line 3" in line[6] for line in server.ask("GET", f"/api/runs/0/log?at={T0 // 10**6}")[1]["lines"])
        for query in ("", "?at=-1", "?at=1e9", "?at=99999999999999999999", "?at=1&worker=x", "?at=%D9%A1"):
            assert server.ask("GET", f"/api/runs/0/log{query}")[1]["ok"] is False, query
        found = server.ask("GET", "/api/runs/0/workers/1")[1]
        assert (len(found["log"]), found["traceback"]) == (40, "mine: it broke\n    Traceback\n    KeyError: <b>")
        assert found["traces"] == ["20260101-000000/worker-1.json.gz"]
        assert server.ask("GET", "/api/runs/0/workers/7")[1] == {
            "ok": True,
            "log": [],
            "traceback": "",
            "traceback_ms": 0,
            "traces": [],
        }
        status, trace, headers = server.ask("GET", f"/api/runs/0/profiles/{found['traces'][0]}")
        assert (status, trace) == (200, b"trace") and "20260101-000000-worker-1" in headers["content-disposition"]
        for path in (
            "../worker-1.json.gz",
            "..%2f..",
            "20260101-000000/..%2f..%2fjob.json",
            "20260101-000000/job.json",
        ):
            assert server.ask("GET", f"/api/runs/0/profiles/{path}")[0] == 404, path
        assert server.ask("GET", "/api/runs/1/workers/1")[0] == 404
        assert server.ask("GET", "/api/runs/0/workers/x")[0] == 404
    finally:
        server.close()


def test_lives_are_drawn_of_those_with_trouble(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path)
    joined = [event("worker_joined", 7, worker_id=i, incarnation=0, pid=i, host="h") for i in range(2, 100)]
    dead = event("worker_evicted", 8, worker_id=99, incarnation=0, reason="killed", cause="killed")
    with open(run_dir / "events.jsonl", "ab") as file:
        file.write(b"".join([*joined, dead]))
    feed = RunFeed(run_dir)
    feed.load()
    lives = patch(feed, PageCursor())["lives"]
    ids = {span[0] for span in lives["spans"]}
    assert (len(ids), lives["hidden"], 99 in ids, 98 in ids) == (64, 36, True, False)
    assert [span[1:] for span in lives["spans"] if span[0] == 99][-1] == [0, "dead", (T0 + 8 * 10**9) // 10**6, None]


def test_a_folder_of_runs_is_a_list(tmp_path: Path) -> None:
    assert not holds_runs(make_run(tmp_path, "one")) and not holds_runs(tmp_path / "none")
    two = make_run(tmp_path, "two")
    with open(two / "events.jsonl", "ab") as file:
        file.write(event("job_completed", 9, step=4, exit_code=0))
    (two / "final").mkdir()
    (two / "final" / "digest.json").write_text('{"state": "abc", "model": "d"}')
    (tmp_path / "no run").mkdir()
    assert holds_runs(tmp_path)
    server = Server(public=True, top=tmp_path)
    try:
        message = server.first_message()
        rows = message["list"]["rows"]
        assert (message["count"], message["keys"], message["folder"]) == (0, [], str(tmp_path))
        assert sorted(rows) == ["one", "two"]
        assert (rows["one"]["state"], rows["one"]["step"], rows["one"]["digest"]) == ("interrupted", 4, "")
        assert (rows["two"]["state"], rows["two"]["loss"], rows["two"]["digest"]) == ("completed", 0.25, "abc")
        given = {"x_everstep_token": TOKEN, **JSON}
        note = {"key": "one", "tags": ["good", " good ", "<b>"], "note": "as it\nwas"}
        assert server.ask("POST", "/api/notes", note, **JSON)[0] == 401
        assert server.ask("POST", "/api/notes", note, **given)[1]["ok"]
        assert (tmp_path / "one" / "notes.json").stat().st_mode & 0o077 == 0
        for wrong in (
            {"key": "../one"},
            {"tags": "x"},
            {"tags": ["x" * 41]},
            {"tags": list("abcdefghijklm")},
            {"note": 3},
        ):
            refused = server.ask("POST", "/api/notes", {**note, **wrong}, **given)[1]
            assert not refused["ok"] and "\n" not in refused["error"]
        assert server.ask("POST", "/api/notes", {}, **given)[0] == 400
        assert server.feeds.catalog is not None and not server.feeds.catalog.advance()
        row = server.first_message()["list"]["rows"]["one"]
        assert (row["tags"], row["note"]) == (["good", "<b>"], "as it was")
        message = server.first_message("?run=two&run=..&run=no%20run&run=%2Fetc&run=one")
        assert (message["count"], message["keys"]) == (2, [0, 1])
        assert server.first_message("?run=one")["keys"] == [1]
        assert server.ask("GET", "/api/runs/1/workers/1")[1]["ok"]
        assert server.ask("GET", "/api/runs/2/workers/1")[0] == 404
    finally:
        server.close()


def test_of_a_run_that_is_over_only_the_row_is_kept(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path)
    catalog = Catalog(tmp_path)
    while catalog.advance():
        pass
    row = catalog.rows["run"]
    catalog.advance()
    assert catalog.rows["run"] is row, "nothing changed, so nothing is read"
    with open(run_dir / "events.jsonl", "ab") as file:
        file.write(event("step_committed", 7, step=5, generation=1, loss=0.1, samples=4))
    catalog.advance()
    assert catalog.rows["run"]["step"] == 5
    run_dir.rename(tmp_path / "moved")
    catalog.advance()
    assert list(catalog.rows) == ["moved"]


def test_runs_that_no_page_shows_make_room(tmp_path: Path) -> None:
    names = [make_run(tmp_path, f"run{i}").name for i in range(40)]
    feeds = Feeds([], top=tmp_path)
    assert feeds.catalog is not None
    feeds.catalog.advance()
    kept = feeds.open(names[:2])
    for name in names[2:]:
        feeds.close(feeds.open([name]))
    assert set(kept) <= set(feeds.runs) and len(feeds.runs) <= 33
    assert feeds.open(names[:2]) == kept


@pytest.mark.parametrize("breaks", [False, True], ids=["gone", "unreadable"])
def test_a_page_that_goes_at_once_gives_its_place_back(tmp_path: Path, breaks: bool, monkeypatch: Any) -> None:
    feeds = Feeds([make_run(tmp_path)])
    app = make_app(feeds, "127.0.0.1", TOKEN, public=True)
    headers = [(b"host", b"127.0.0.1")]
    scope = {"type": "http", "method": "GET", "path": "/api/stream", "headers": headers, "query_string": b""}
    statuses = []

    async def gone() -> dict[str, str]:
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        statuses.extend([message["status"]] if message["type"] == "http.response.start" else [])

    async def many_pages() -> None:
        for _ in range(2 * _MOST_STREAMS):
            with contextlib.suppress(OSError, ExceptionGroup):
                await app({**scope, "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80)}, gone, send)
        opening = asyncio.all_tasks() - {asyncio.current_task()}  # the end of the loop would cancel what still opens
        await asyncio.gather(*opening, return_exceptions=True)
        await asyncio.sleep(0)

    if breaks:
        monkeypatch.setattr(feeds, "open", lambda names: os.listdir(tmp_path / "nowhere"))
    asyncio.run(many_pages())
    assert 503 not in statuses and not feeds._looked_at[0]


def test_patches_hold_only_what_changed(tmp_path: Path) -> None:
    feed = RunFeed(make_run(tmp_path))
    feed.load()
    cursor = PageCursor()
    assert patch(feed, cursor)["reset"]
    assert patch(feed, cursor) == {}
    with open(feed.run_dir / "events.jsonl", "ab") as file:
        file.write(event("step_committed", 7, step=5, generation=1, loss=0.1, samples=4))
    feed.read()
    changed = patch(feed, cursor)
    assert changed["curves"]["steps"] == {
        "version": 0,
        "start": 3,
        "x": [4, 5],
        "columns": changed["curves"]["steps"]["columns"],
    }
    assert "log" not in changed and "generations" not in changed
    (feed.run_dir / "logs").mkdir(exist_ok=True)
    said = WorkerLog(1, 0).line("critical", "mine", "it broke", exception="Traceback", time_ns=8)
    (feed.run_dir / "logs" / "worker-1.jsonl").write_bytes(said)
    feed.read()
    (line,) = patch(feed, cursor)["log"]
    assert line[2:] == ["error", "log", 1, 0, "worker 1: mine: it broke | Traceback"]
    (feed.run_dir / "events.jsonl").write_bytes(event("job_started", 100, workers=1))
    feed.read()
    again = patch(feed, cursor)
    assert (again["reset"], again["head"]["step"]) == (True, 0)


def test_the_coordinators_word_counts_for_the_living(tmp_path: Path) -> None:
    feed = RunFeed(make_run(tmp_path))
    feed.load()
    seen = {
        "worker_id": 1,
        "incarnation": 1,
        "pid": 9,
        "host": "x",
        "stages": [],
        "role": "joining",
        "step": 3,
        "lanes": [],
    }
    feed.running, feed.status = True, {"state": "recovering", "target": 2, "workers": [{**seen, "samples_per_s": 0.0}]}
    shown = patch(feed, PageCursor())
    fields, rows = shown["workers"]["fields"], shown["workers"]["rows"]
    assert dict(zip(fields, rows["1"], strict=True))["state"] == "healing"
    assert shown["head"]["state"] == "recovering"
    with open(feed.run_dir / "events.jsonl", "ab") as file:
        file.write(event("worker_evicted", 99.0, worker_id=1, incarnation=1, cause="killed", reason="SIGKILL"))
    feed.read()
    for role, state in (("joining", "dead"), ("active", "active")):  # the next life only starts; it takes part
        feed.running, feed.status = True, {"workers": [{**seen, "incarnation": 2, "role": role}]}
        assert worker_rows(feed)[1].state == state


def test_a_worker_with_a_free_place_heals_wherever_it_is_shown(tmp_path: Path) -> None:
    """Before the coordinator has given it the place."""
    run_dir = make_run(tmp_path)
    with (run_dir / "events.jsonl").open("ab") as file:
        file.write(event("worker_evicted", 7, worker_id=1, incarnation=0, cause="killed", reason="killed"))
        file.write(
            event("generation_started", 8, generation=2, target=2, seats=[[0, 0, "active", [0, 1]]], leaders=[0])
        )
        file.write(event("worker_joined", 9, worker_id=1, incarnation=1, pid=3, host="h"))
    feed = RunFeed(run_dir)
    feed.load()
    said = {"worker_id": 1, "incarnation": 1, "pid": 3, "host": "x", "role": "spare", "step": 0, "lanes": []}
    feed.running, feed.status = True, {"workers": [said]}
    feed.history.begins = lambda running: False  # type: ignore[method-assign]
    assert worker_rows(feed)[1].state == "healing" == feed.history.facts.crew.workers[1].state


def test_the_step_is_the_coordinators_while_no_events_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Facts, "stands_still", lambda *_: True)
    feed = RunFeed(make_run(tmp_path))
    feed.load()
    told = feed.history.facts.course.step
    behind = {"worker_id": 1, "incarnation": 1, "pid": 9, "host": "x", "stages": [0], "role": "active", "lanes": [0]}
    for ahead, loss_step in ((0, None), (1, told), (40, told)):
        live = {"state": "running", "step": told + ahead, "target": 2, "workers": [{**behind, "step": told - 1}]}
        feed.running, feed.status = True, live
        rows = worker_rows(feed)
        shown = head(feed, rows)
        step = told + ahead
        assert (shown["step"], shown["loss_step"], rows[1].step) == (step, loss_step, step)
        assert loss_step is None or shown["rate"] is None, "nobody has said how fast it is"
    feed.status = {**live, "state": "starting", "step": 0, "workers": []}
    history = feed.history
    assert history.told_state(True, feed.status) == history.state(True), "a new coordinator knows of no job yet"
    assert history.told_state(True, None) == history.state(True)


def test_training_that_nobody_can_tell_of_is_not_stalled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Facts, "stands_still", lambda *_: True)
    feed = RunFeed(make_run(tmp_path))
    feed.load()
    feed.running = True
    monkeypatch.setattr(time, "time_ns", lambda: feed.history.facts.told_ns + 5000 * 1_000_000_000)
    told = patch(feed, PageCursor())
    assert told["account"]["stalled"] > 1000 and told["head"]["goodput"] < 0.5
    feed.status = {"state": "running", "step": 90, "target": 2, "workers": []}
    told = patch(feed, PageCursor())
    assert "stalled" not in told["account"] and told["head"]["goodput"] > 0.5


def test_a_user_without_a_token_has_not_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For whom the coordinator is not silent: the page and `status` show what the files tell."""

    def refused(*_: Any, **__: Any) -> Any:
        raise commands.NotAllowed("no token")

    monkeypatch.setattr(commands, "ask", refused)
    run_dir = make_run(tmp_path)
    feed = RunFeed(run_dir)
    feed.load()
    monkeypatch.setattr(feed.history, "begins", lambda running: False)
    with run_lock(run_dir):
        feed.ask()
        shown = head(feed, worker_rows(feed))
    assert shown["answers"] and not feed.silent
    assert "does not answer" not in shown["headline"]["text"]


def test_addresses_and_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert [is_loopback(h) for h in ("127.0.0.1", "localhost", "::1", "127.9.9.9")] == [True] * 4
    assert [is_loopback(h) for h in ("0.0.0.0", "::", "10.0.0.1", "example.org", "")] == [False] * 5
    assert len(checked_token("127.0.0.1", None)) >= 24
    for host, token in (("0.0.0.0", None), ("0.0.0.0", "short"), ("127.0.0.1", ""), ("127.0.0.1", "zwei wörter")):
        with pytest.raises(ConfigError):
            checked_token(host, token)
    assert run_command(["dashboard", str(tmp_path), "--host", "0.0.0.0"]) == 2
    assert run_command(["dashboard", str(tmp_path / "nowhere")]) == 2
    assert "--token" in capsys.readouterr().err


def test_the_token_for_scrapers_is_kept(tmp_path: Path) -> None:
    file = tmp_path / METRICS_TOKEN_FILE
    token = kept_token(file)
    assert token is not None and len(token) >= 24 and file.read_text() == token
    assert (file.stat().st_mode & 0o777, kept_token(file), os.listdir(tmp_path)) == (0o600, token, [file.name])
    file.chmod(0o640)
    assert kept_token(file) not in (token, None)
    assert file.stat().st_mode & 0o777 == 0o600
    file.write_text("short")
    assert kept_token(file) is None
    assert kept_token(tmp_path / "nowhere" / "token") is None


def test_metrics_have_the_same_guard(server: Server, closed_server: Server) -> None:
    status, text, headers = server.ask("GET", "/metrics")
    assert (status, headers["content-type"].partition(";")[0]) == (200, "text/plain")
    assert b"\neverstep_steps_total 4.0\n" in text
    openmetrics = server.ask("GET", "/metrics", accept="application/openmetrics-text; version=1.0.0")
    assert openmetrics[2]["content-type"].startswith("application/openmetrics-text") and openmetrics[1].endswith(
        b"# EOF\n"
    )
    assert server.ask("GET", "/metrics", host="evil.example")[0] == 403
    assert server.ask("GET", "/metrics", origin="http://evil.example")[0] == 403
    assert server.ask("GET", "/metrics", sec_fetch_site="cross-site")[0] == 403
    assert server.ask("POST", "/metrics", {}, x_everstep_token=TOKEN, **JSON)[0] == 405
    for run in ("1", "x", "-1", "9" * 5000):
        assert server.ask("GET", f"/metrics?run={run}")[0] == 404
    status, text, headers = closed_server.ask("GET", f"/metrics?token={TOKEN}")  # who scrapes may not keep cookies
    assert (status, b"everstep_steps_total" in text, "set-cookie" in headers) == (200, True, False)


def test_metrics_wait_until_everything_was_read(tmp_path: Path) -> None:
    runs = (make_run(tmp_path, "one"), make_run(tmp_path, "two"))
    server = Server(*runs, make=make_metrics_app, load=False, public=True)
    try:
        status, text, _ = server.ask("GET", "/metrics?run=1")
        assert (status, b"still being read" in text) == (503, True)
        server.feeds.runs[1].history.load()
        assert b"everstep_steps_total 4.0" in server.ask("GET", "/metrics?run=1")[1]
        status, text, _ = server.ask("GET", "/metrics")
        assert (status, b"run=0 to 1" in text) == (404, True)
        assert b"/metrics" in server.ask("GET", "/")[1]
        assert server.ask("GET", "/api/stream")[0] == 404
    finally:
        server.close()


def test_what_a_worker_uses_is_that_of_its_present_life(tmp_path: Path) -> None:
    feed = RunFeed(make_run(tmp_path))
    feed.history.load()
    sample = {"incarnation": 0, "step": 4, "samples": 16, "rss_bytes": 7, "phase": "reduce", "seconds": {}}
    feed.history.usage.take({"t": T0, "workers": [{**sample, "worker_id": i} for i in (0, 1)]})
    feed.running = True
    feed.history.facts.crew.workers[1].incarnation = 1
    shown = patch(feed, PageCursor())["workers"]
    rows = {i: dict(zip(shown["fields"], row, strict=True)) for i, row in shown["rows"].items()}
    assert (rows["0"]["rss"], rows["0"]["phase"]) == (7, "reduce")
    assert (rows["1"]["rss"], rows["1"]["phase"]) == (None, "")


def test_the_hosts_of_a_workers_processes_are_named(tmp_path: Path) -> None:
    feed = RunFeed(make_run(tmp_path))
    feed.history.load()
    said = {"worker_id": 1, "incarnation": 0, "pid": 3, "host": "x", "role": "active", "step": 0, "lanes": [0]}
    feed.running, feed.status = True, {"workers": [{**said, "pids": [3, 4], "hosts": ["x", "y"]}]}
    feed.history.begins = lambda running: False  # type: ignore[method-assign]
    row = worker_rows(feed)[1]
    assert (row.host, row.cell) == ("x, y", "0: 3 on x, 1: 4 on y")
    assert worker_rows(feed)[0].cell == ""


def test_skipped_checkpoints_have_their_own_count(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path)
    told = [
        format_event("checkpoint_completed", T0 + 1, {"tier": "disk", "step": 4, "size_bytes": 9, "duration_s": 0.5}),
        format_event("checkpoint_failed", T0 + 2, {"tier": "disk", "step": 5, "cause": "disk", "reason": "it is full"}),
        format_event("checkpoint_skipped", T0 + 3, {"tier": "disk", "step": 6, "cause": "busy", "reason": "not done"}),
        format_event("checkpoint_failed", T0 + 4, {"tier": "disk", "step": 7, "cause": "busy", "reason": "of before"}),
    ]
    with (run_dir / "events.jsonl").open("ab") as file:
        file.write(b"".join(told))
    feed = RunFeed(run_dir)
    feed.load()
    shown = patch(feed, PageCursor())["checkpoints"]
    assert shown["tiers"] == [{"tier": "disk", "newest": [4, 9, 0.5, 0.0], "skipped": 2, "failed": 1}]
    assert (shown["newest"][:2], shown["missed"]) == (["disk", 4], ["disk", 7, True, "busy", "of before"])
    with (run_dir / "events.jsonl").open("ab") as file:
        file.write(format_event("checkpoint_completed", T0 + 5, {"tier": "memory", "step": 9}))
    feed.load()
    assert patch(feed, PageCursor())["checkpoints"]["newest"][:2] == ["disk", 4], "memory is gone with the processes"
    feed.running = True
    assert patch(feed, PageCursor())["checkpoints"]["newest"][:2] == ["memory", 9]


def test_a_job_that_runs_is_known_to_run_before_its_coordinator_is_asked(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path)
    feed = RunFeed(run_dir)
    feed.load()
    assert head(feed, worker_rows(feed))["headline"]["level"] == "bad"
    with run_lock(run_dir):
        feed.read()
        shown = head(feed, worker_rows(feed))
    assert shown["running"] and "died" not in shown["headline"]["text"]
    feed.read()
    assert "died without a word" in head(feed, worker_rows(feed))["headline"]["text"]


def test_a_row_of_the_list_has_the_settings_that_somebody_chose(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path)
    config = {"steps": 9, "lanes": 4, "checkpoint": {"disk": {"every_steps": 5}}, "notify": {"command": "curl secret"}}
    config |= {"shuffle": False, "clip_norm": None}
    explicit = ["steps", "checkpoint.disk.every_steps", "notify.command", "shuffle", "clip_norm", "gone", 3]
    (run_dir / "job.json").write_text(json.dumps({"task": "t", "config": config, "explicit": explicit}))
    row = list_row(History(run_dir).load(), False, Notes())
    others = {"notify.command": "(not shown)", "shuffle": "false", "clip_norm": "none"}
    assert row["settings"] == {"steps": "9", "checkpoint.disk.every_steps": "5", **others}


def test_a_row_of_the_list_says_what_the_runs_own_page_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the list a job that hangs, or whose coordinator is silent, is as red as on its own page."""
    run_dir = make_run(tmp_path)
    feed = RunFeed(run_dir)
    feed.load()
    monkeypatch.setattr(time, "time_ns", lambda: T0 + 300 * 10**9)
    for running, silent in ((True, False), (True, True), (False, False)):
        feed.running, feed.silent = running, silent
        said, row = head(feed, worker_rows(feed))["headline"], feed.list_row()
        assert row["said"]["level"] == said["level"] == "bad"
        assert row["said"]["text"] == said["text"]
    assert row["state"] == "interrupted" and "ago" not in row["said"]["text"], "it is kept as it is"


def test_a_start_that_was_refused_is_none(tmp_path: Path) -> None:
    (tmp_path / "job.json").write_text('{"task": "t", "argv": [], "config": {"steps": 9}}')
    shown, status = shown_of(tmp_path)["head"], read_status(tmp_path)
    assert shown["headline"] == status["headline"]
    assert shown["headline"]["text"] == "The job has not started: it wrote no events."
    row = list_row(History(tmp_path).load(), False, Notes())
    assert row["state"] == shown["state"] == status["state"] == "interrupted"
    assert row["said"]["level"] == shown["headline"]["level"] == "warning"


def test_a_job_that_failed_as_it_was_to_go_on_after_its_end_has_failed(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path)
    (run_dir / "job.json").write_text('{"task": "t", "argv": [], "config": {"steps": 9}}')
    (run_dir / "final").mkdir()
    (run_dir / "final" / "digest.json").write_text('{"step": 4, "model": "ab", "state": "cd"}')
    assert shown_of(run_dir)["head"]["state"] == read_status(run_dir)["state"] == "completed"
    with (run_dir / "events.jsonl").open("ab") as file:
        file.write(event("job_started", 500, step=4, workers=1))
        file.write(event("job_failed", 501, step=4, state="failed", cause="exception", reason="x"))
    shown, status = shown_of(run_dir)["head"], read_status(run_dir)
    assert shown["state"] == status["state"] == "failed" and shown["headline"] == status["headline"]
    assert shown["headline"]["text"].startswith("Failed after step 4")


def test_a_script_by_itself_is_shown_alike_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds no directory, and tells neither its begin nor its end."""
    run_dir, catalog, now_s = tmp_path / "run", Catalog(tmp_path), [4]
    (run_dir / "final").mkdir(parents=True)
    (run_dir / "dataset.json").write_text('{"lanes": 1, "micro_batch": 4, "steps": 9}')
    monkeypatch.setattr(time, "time_ns", lambda: T0 + now_s[0] * 10**9)

    def row(digest_step: int | None, at_s: int, steps: int) -> tuple[str, str, str]:
        said = (event("step_committed", s, step=s, generation=1, loss=0.1, samples=4) for s in range(1, steps + 1))
        (run_dir / "events.jsonl").write_bytes(b"".join(said))
        if digest_step is not None:
            (run_dir / "final" / "digest.json").write_text(json.dumps({"step": digest_step, "state": "ab"}))
        now_s[0] = at_s
        while catalog.advance():
            pass
        shown, found = shown_of(run_dir), catalog.rows["run"]
        assert (found["state"], found["said"]["text"]) == (shown["head"]["state"], shown["head"]["headline"]["text"])
        assert found["said"]["level"] == shown["head"]["headline"]["level"]
        assert not shown["incidents"] and not shown["marks"] and not shown["head"]["faults"]
        return found["state"], found["said"]["level"], found["said"]["text"]

    assert row(None, 5, 3) == ("running", "good", "Step 3 of 9, last heard of 2 s ago.")
    assert row(None, 15, 3) == ("running", "good", "Step 3 of 9, last heard of 12 s ago."), "without any news"
    assert row(None, 90, 3) == ("interrupted", "warning", "Step 3 of 9: it may have ended.")
    assert row(3, 90, 3) == ("completed", "good", "Finished: all 3 steps are done.")
    assert row(3, 90, 4) == ("interrupted", "warning", "Step 4 of 9: it may have ended."), "run again, and stopped"


def test_a_job_whose_coordinator_answers_runs_though_its_lock_is_not_seen_from_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = make_run(tmp_path)
    (run_dir / "job.json").write_text('{"task": "t", "argv": [], "config": {"steps": 9}}')
    (run_dir / "coordinator.json").write_text('{"host": "h", "port": 1, "pid": 2}')
    answer = {"state": "running", "step": 1, "workers": [], "generation": 1, "target": 2}
    monkeypatch.setattr(commands, "ask", lambda *given, **more: dict(answer))
    said = read_status(run_dir)
    assert said["state"] == "running" and "died without a word" not in said["headline"]["text"]


def test_a_launcher_that_died_is_a_fault_with_a_mark_and_leaves_no_process(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path)
    (run_dir / "job.json").write_text('{"task": "t", "argv": [], "config": {"steps": 9}}')
    with run_lock(run_dir):
        before = shown_of(run_dir)
    after = shown_of(run_dir)
    assert after["head"]["faults"] == before["head"]["faults"] + 1
    assert [mark[2] for mark in after["marks"]][len(before["marks"]) :] == ["launcher"]
    assert after["incidents"][-1][6] == "the launcher of the job died without a word; nobody leads it any more"
    status = read_status(run_dir)
    assert status["workers"] == []
    assert status["incidents"][-1]["sentence"] == after["incidents"][-1][6]
    assert "died without a word" in status["headline"]["text"] and "ago" in status["headline"]["more"]
    with (run_dir / "events.jsonl").open("ab") as file:
        file.write(event("job_started", 500, step=0, workers=1))
    with run_lock(run_dir):
        again = shown_of(run_dir)
    assert again["head"]["faults"] == after["head"]["faults"]
    assert [mark[2] for mark in again["marks"]] == [mark[2] for mark in after["marks"]]
    assert again["incidents"][-1][6] == "the launcher of the job died without a word; the job was started again"


def shown_of(run_dir: Path) -> dict[str, Any]:
    """What a page is told of the run."""
    feed = RunFeed(run_dir)
    feed.load()
    feed.ask()
    return patch(feed, PageCursor())


def test_a_page_is_told_what_the_code_raised(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path)
    (run_dir / "logs").mkdir()
    said = {"time_unix_ns": T0 + 7 * 10**9, "level": "critical", "message": "ValueError: x", "exception": "damaged"}
    (run_dir / "logs" / "worker-1.jsonl").write_text(json.dumps(said) + "\n")
    with (run_dir / "events.jsonl").open("ab") as file:
        file.write(event("job_failed", 8, state="failed", cause="exception", reason="x", exit_code=1))
    feed = RunFeed(run_dir)
    feed.load()
    feed.look_for_raised()
    logs = f"traceback and log: everstep logs {run_dir} --worker 1 --level error"
    ended = "the job ended after step 4, without a checkpoint"
    assert patch(feed, PageCursor())["head"]["raised"] == ["ValueError: x", "in worker 1", ended, logs]
