"""The web application: one page, its files, one stream of server-sent events, the actions, and the metrics; and its
server, with everything or with the metrics alone."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import threading
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from everstep.base.doors import at_port, is_loopback
from everstep.base.errors import ConfigError, EverstepError
from everstep.chaos.spec import parse_now
from everstep.dashboard.catalog import ListRow, holds_runs
from everstep.dashboard.details import log_at, trace, whole, worker_detail
from everstep.dashboard.door import MAX_HEADER_BYTES, Doorkeeper
from everstep.dashboard.feed import Audit, Feeds, RunFeed
from everstep.dashboard.guard import (
    KNOWN,
    METRICS,
    TOKEN_PARAMETER,
    UNLOCK,
    Guard,
    checked_token,
    kept_token,
)
from everstep.dashboard.run_view import PageCursor, now_ms, patch
from everstep.report.history import History
from everstep.report.prometheus import device_families, expose, families
from everstep.report.words import as_dict, number
from everstep.runtime import commands
from everstep.runtime.link.address import METRICS_TOKEN_FILE
from everstep.runtime.targets import TARGETS_TOKEN_FILE, shared_folder

_TYPES = {"html": "text/html", "js": "text/javascript", "css": "text/css", "svg": "image/svg+xml", "txt": "text/plain"}
_TICK_S = 0.5
_ALIVE_S = 2.0
_MOST_STREAMS = 64
_MOST_TRACES = 4
_MOST_BODY = 4096
_encode = msgspec.json.Encoder().encode
_PATIENCE_S = 10.0
_MOST_PROFILED = 100
STOPPED = "stopped from the dashboard"
_CHECKPOINT_S = 120.0


def make_app(feeds: Feeds, host: str, token: str, public: bool = False) -> Starlette:
    """Application over these runs; `host`, `token` and `public` decide who may ask."""
    files = {file.name: file.read_bytes() for file in (resources.files(__package__) / "static").iterdir()}
    streams = threading.BoundedSemaphore(_MOST_STREAMS)

    async def static(request: Request) -> Response:
        name = request.path_params.get("name", "index.html")
        if name not in files:
            return _not_found("there is no such file")
        return Response(files[name], media_type=_TYPES[name.rpartition(".")[2]])

    async def stream(request: Request) -> Response:
        if not streams.acquire(blocking=False):
            return JSONResponse({"ok": False, "error": f"more than {_MOST_STREAMS} pages are open"}, status_code=503)
        content = _events(feeds, request.query_params.getlist("run"))
        return _Placed(streams, StreamingResponse(content, media_type="text/event-stream"))

    async def action(request: Request) -> Response:
        run = _numbered(feeds, request.path_params["run"])
        body = await _body(request)
        if run is None or body is None:
            error = "there is no such run" if run is None else "expected a JSON object of at most 4 kB"
            return JSONResponse({"ok": False, "error": error}, status_code=404 if run is None else 400)
        name = request.path_params["name"]
        if name == "ledger":
            return JSONResponse({"ok": True, "text": "checked", "result": await asyncio.to_thread(run.check_ledger)})
        return JSONResponse(await asyncio.to_thread(act, run.run_dir, name, body))  # a refusal is an answer, too

    async def me(request: Request) -> Response:
        """Whether the request has the token. The guard has already refused posts with another one."""
        return JSONResponse({"ok": request.scope[KNOWN]})

    routes = [
        Route("/", static),
        Route("/static/{name}", static),
        Route("/api/stream", stream),
        Route(UNLOCK, me, methods=["GET", "POST"]),
        *_details(feeds),
        Route("/api/runs/{run}/{name}", action, methods=["POST"]),
        metrics_route(feeds),
    ]
    return _guarded(routes, host, token, public)


def _details(feeds: Feeds) -> list[Route]:
    """Routes that a page asks for beside the stream, and the route that takes its notes."""
    traces = threading.BoundedSemaphore(_MOST_TRACES)

    async def notes(request: Request) -> Response:
        body = await _body(request)
        if body is None or not isinstance(body.get("key"), str):
            return JSONResponse({"ok": False, "error": "expected key, tags and note"}, status_code=400)
        try:
            await asyncio.to_thread(feeds.note, body["key"], body)
        except ConfigError as error:
            return JSONResponse({"ok": False, "error": str(error)})
        return JSONResponse({"ok": True, "text": "noted"})

    async def moment(request: Request) -> Response:
        run, asked = _numbered(feeds, request.path_params["run"]), request.query_params
        if run is None:
            return _not_found("there is no such run")
        return JSONResponse(await asyncio.to_thread(log_at, run.run_dir, asked.get("at"), asked.get("worker")))

    async def worker(request: Request) -> Response:
        run, worker_id = _numbered(feeds, request.path_params["run"]), whole(request.path_params["worker"], 1_000_000)
        if run is None or worker_id is None:
            return _not_found("there is no such run or worker")
        return JSONResponse(await asyncio.to_thread(worker_detail, run.run_dir, worker_id))

    async def profile(request: Request) -> Response:
        run, asked = _numbered(feeds, request.path_params["run"]), request.path_params
        if not traces.acquire(blocking=False):
            return JSONResponse({"ok": False, "error": "too many traces are being read: try again"}, status_code=503)
        try:
            found = None if run is None else await asyncio.to_thread(trace, run.run_dir, asked["folder"], asked["name"])
        except BaseException:
            traces.release()
            raise
        headers = {"content-disposition": f'attachment; filename="{asked["folder"]}-{asked["name"]}"'}
        answer = Response(found, media_type="application/gzip", headers=headers)
        return _Placed(traces, _not_found("there is no such trace") if found is None else answer)

    return [
        Route("/api/notes", notes, methods=["POST"]),
        Route("/api/runs/{run}/log", moment),
        Route("/api/runs/{run}/workers/{worker}", worker),
        Route("/api/runs/{run}/profiles/{folder}/{name}", profile),
    ]


def make_metrics_app(feeds: Feeds, host: str, token: str, public: bool = False) -> Starlette:
    """Application with only the metrics, for a job that needs no page."""

    async def hint(request: Request) -> Response:
        return PlainTextResponse(f"the metrics are at {METRICS}\n")

    return _guarded([Route("/", hint), metrics_route(feeds)], host, token, public)


def metrics_route(feeds: Feeds) -> Route:
    """Route of /metrics of a single run; with several runs, /metrics?run=N of the N-th, from 0."""

    async def metrics(request: Request) -> Response:
        last = max(feeds.runs, default=0)
        run = _numbered(feeds, request.query_params.get("run", "" if len(feeds.runs) > 1 else "0"))
        if run is None:
            text = f"there are {last + 1} runs: expected {METRICS}?run=0 to {last}\n"
            return PlainTextResponse(text, status_code=404)
        accept = request.headers.get("accept", "")
        content, media_type = await asyncio.to_thread(_scrape, run, accept)
        if not content:  # half-read counters would look like a new start
            why = run.history.trouble
            said = (
                f"the events of the run cannot be read: {why}" if why else "the files of the run are still being read"
            )
            return PlainTextResponse(f"{said}\n", status_code=503)
        return Response(content, media_type=media_type)

    return Route(METRICS, metrics)


def _scrape(run: RunFeed, accept: str) -> tuple[bytes, str]:
    with run.lock:
        if not run.history.loaded:
            return b"", ""
        found = list(families(run.history, run.history.running(), run.status, time.time_ns()))
    return expose([*found, *device_families()], accept)


def _guarded(routes: list[Route], host: str, token: str, public: bool) -> Starlette:
    return Starlette(routes=routes, middleware=[Middleware(Guard, host=host, token=token, public=public)])


def _not_found(error: str) -> Response:
    return JSONResponse({"ok": False, "error": error}, status_code=404)


def _numbered(feeds: Feeds, text: str) -> RunFeed | None:
    """Run with this number, which a URL may name only by its index."""
    return {str(number): run for number, run in feeds.runs.items()}.get(text)


async def _body(request: Request) -> dict[str, Any] | None:
    data = b""
    try:
        async for chunk in request.stream():
            data += chunk
            if len(data) > _MOST_BODY:
                return None
        found = json.loads(data or b"{}")
    except (ValueError, ClientDisconnect, RecursionError):
        return None
    return found if isinstance(found, dict) else None


class _Placed(Response):
    """A response that has one of a few places. However it ends, also before its first byte, it gives the place back."""

    def __init__(self, places: threading.BoundedSemaphore, response: Response) -> None:
        self._places, self._response = places, response

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._response(scope, receive, send)
        finally:
            self._places.release()


async def _events(feeds: Feeds, names: Sequence[str]) -> AsyncIterator[bytes]:
    """Patches of the runs, twice a second if something changed; a comment now and then keeps the connection open.
    names: runs that are wanted from a list."""

    def close(opened: asyncio.Future[list[int]]) -> None:
        if not opened.cancelled() and opened.exception() is None:
            feeds.close(opened.result())

    opening = asyncio.ensure_future(asyncio.to_thread(feeds.open, names))
    listed: dict[str, ListRow] = {}
    silent_s = 0.0
    try:
        runs = [(number, feeds.runs[number], PageCursor()) for number in await asyncio.shield(opening)]
        yield b"retry: 1000\n\n"
        first = True
        while not feeds.stopped:
            data = await asyncio.to_thread(_changes, feeds, runs, listed, first)
            first = False
            if data is not None:
                silent_s = 0.0
                yield b"data: " + data + b"\n\n"
            elif silent_s >= _ALIVE_S:
                silent_s = 0.0
                yield b": alive\n\n"
            silent_s += _TICK_S
            await asyncio.sleep(_TICK_S)
    finally:
        opening.add_done_callback(close)


def _changes(
    feeds: Feeds, runs: Sequence[tuple[int, RunFeed, PageCursor]], listed: dict[str, ListRow], first: bool
) -> bytes | None:
    """News for a page; None if there is none. listed: rows of the list that the page has, which is updated."""
    found: dict[str, Any] = {}
    for i, (_, run, cursor) in enumerate(runs):
        with run.lock:
            changed = patch(run, cursor)
        if changed:
            found[str(i)] = changed
    message: dict[str, Any] = {"now_ms": now_ms(), "count": len(runs), "runs": found}
    rows = feeds.list_rows()
    changed_rows = {key: row for key, row in rows.items() if listed.get(key) != row}
    gone = [key for key in listed if key not in rows]
    if changed_rows or gone:
        message["list"] = {"rows": changed_rows, "gone": gone}
        listed.clear()
        listed.update(rows)
    if first:
        message |= {"keys": [number for number, _, _ in runs], "folder": _folder(feeds)}
    return _encode(message) if found or changed_rows or gone or first else None


def _folder(feeds: Feeds) -> str | None:
    """Folder whose runs are listed; None if a page has all runs."""
    return None if feeds.catalog is None else str(feeds.catalog.top)


def act(run_dir: Path, name: str, args: Mapping[str, Any]) -> dict[str, Any]:
    """Carry out a page's action on a running job, or refuse it in one line: {"ok": true, "text"} or {"ok": false,
    "error"}. All arguments are checked before they are sent."""
    try:
        if name not in _ACTIONS:
            raise ConfigError(f"unknown action {name!r}: expected one of {', '.join(_ACTIONS)}")
        checked, words = _ACTIONS[name]
        wanted = checked(args)
        patience_s = _CHECKPOINT_S if name == "checkpoint" else _PATIENCE_S
        more = {"grace_s": 0.8 * _grace_s(run_dir)} if name == "stop" else {}
        result = commands.ask(run_dir, name, {**wanted, **more}, timeout_s=patience_s)
    except EverstepError as error:
        return {"ok": False, "error": " ".join(str(error).split())}
    text = words.format_map(defaultdict(lambda: "?", {**result, **wanted}))
    return {"ok": True, "text": text, "result": result}


def _grace_s(run_dir: Path) -> float:
    """Seconds that a job may take for its last checkpoint, by its config."""
    config = as_dict(History(run_dir).job.get("config"))
    rule = as_dict(config.get("checkpoint"))
    return number(rule.get("grace_s"))


def _whole(args: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = args.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1_000_000:
        raise ConfigError(f"{name}: expected a whole number, got {str(value)[:40]!r}")
    return {name: value}


def _fault(args: Mapping[str, Any]) -> dict[str, Any]:
    fault = args.get("fault")
    if not isinstance(fault, str) or not 0 < len(fault) <= 500:
        raise ConfigError("expected a fault such as kill:target=worker:2")
    return parse_now(fault).request()


def _profile(args: Mapping[str, Any]) -> dict[str, Any]:
    steps, workers = args.get("steps"), args.get("workers")
    if not isinstance(steps, int) or isinstance(steps, bool) or not 1 <= steps <= _MOST_PROFILED:
        raise ConfigError(f"steps: expected a whole number from 1 to {_MOST_PROFILED}, got {str(steps)[:40]!r}")
    if not isinstance(workers, list) or not all(type(i) is int and 0 <= i < 1_000_000 for i in workers[:1000]):
        raise ConfigError("workers: expected a list of worker ids")
    return {"folder": time.strftime("%Y%m%d-%H%M%S"), "steps": steps, "workers": workers[:1000]}


_ACTIONS: dict[str, tuple[Callable[[Mapping[str, Any]], dict[str, Any]], str]] = {
    "checkpoint": (lambda args: {}, "checkpoint of step {step} in {path}"),
    "drain": (lambda args: _whole(args, "worker_id"), "worker {worker_id} is leaving, {workers} stay"),
    "scale": (lambda args: _whole(args, "workers"), "from {before} to {workers} workers"),
    "chaos": (_fault, "{fault} is on its way"),
    "profile": (_profile, "steps {first_step} on are recorded into profiles/{name}"),
    "stop": (lambda args: {"cause": "requested", "reason": STOPPED}, "the job ends, with a checkpoint if it has any"),
}
"""Actions of a page on a running job: check of the arguments, and text after success."""


def serve(run_dirs: Sequence[Path], host: str, port: int, token: str | None, audit: Audit, public: bool) -> None:
    """Serve the dashboard until interrupted; over one folder of runs it begins with a list of them. Prints its address,
    with the token, once it listens; port 0: any free port. public: reading needs no token.

    Raises: ConfigError for an address that cannot be used, or one beyond loopback without a token.
    """
    token = checked_token(host, token)
    top = run_dirs[0] if len(run_dirs) == 1 and holds_runs(run_dirs[0]) else None
    feeds = Feeds([] if top is not None else run_dirs, audit, top)
    _serve(make_app(feeds, host, token, public), feeds, host, port, f"/?{_parameter(token)}")


def serve_metrics(run_dir: Path, host: str, port: int, token: str | None, public: bool) -> None:
    """Serve only the metrics of one run, until interrupted. On loopback, if no token is given, it is the one that the
    run directory keeps for scrapers.

    Raises: ConfigError, as `serve`.
    """
    file = run_dir / METRICS_TOKEN_FILE
    folder = shared_folder(run_dir)
    like = None if folder is None else folder / TARGETS_TOKEN_FILE
    own = not public and token is None and is_loopback(host)
    kept = kept_token(file, None if like is None else kept_token(like)) if own else None
    secret = checked_token("localhost" if public else host, token or kept, "give --token or EVERSTEP_METRICS_TOKEN")
    feeds = Feeds([run_dir])
    path = METRICS + ("" if public else f"?{_parameter(secret)}")
    more = "" if kept is None else f"\nfor Prometheus: authorization.credentials_file is {file}"
    _serve(make_metrics_app(feeds, host, secret, public), feeds, host, port, path + more)


def _parameter(token: str) -> str:
    return f"{TOKEN_PARAMETER}={quote(token, safe='')}"


def _serve(app: Starlette, feeds: Feeds, host: str, port: int, path: str) -> None:
    listener = _listen(host, port)
    door = Doorkeeper()
    logging.getLogger("uvicorn.error").addFilter(door)
    config = uvicorn.Config(
        app,
        http=door,  # type: ignore[arg-type]
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=1,
        ws="none",
    )
    feeds.start()
    try:
        print(f"http://{at_port(host, listener.getsockname()[1])}{path}", flush=True)
        uvicorn.Server(config).run(sockets=[listener])
    finally:
        feeds.stop()
        listener.close()


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(128)
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"cannot listen on {at_port(host, port)}: {getattr(error, 'strerror', None) or error}"
        ) from None
    return listener
