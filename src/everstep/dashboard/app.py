"""The web application: one page, its files, one stream of server-sent events, the actions, and the metrics; and the
server that it runs in, alone or with the metrics alone.
"""

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

from everstep.base.errors import ConfigError, EverstepError
from everstep.chaos.spec import parse_now
from everstep.dashboard.door import MAX_HEADER_BYTES, Doorkeeper
from everstep.dashboard.feed import Audit, Feeds, RunFeed
from everstep.dashboard.guard import (
    KNOWN,
    METRICS,
    TOKEN_PARAMETER,
    UNLOCK,
    Guard,
    checked_token,
    is_loopback,
    kept_token,
)
from everstep.dashboard.view import PageCursor, now_ms, patch
from everstep.report.prometheus import device_families, expose, families
from everstep.runtime import commands
from everstep.runtime.address import METRICS_TOKEN_FILE

_TYPES = {"html": "text/html", "js": "text/javascript", "css": "text/css", "svg": "image/svg+xml", "txt": "text/plain"}
_TICK_S = 0.5
_ALIVE_S = 10.0
_MOST_STREAMS = 64
_MOST_BODY = 4096
_encode = msgspec.json.Encoder().encode
_PATIENCE_S = 10.0
_CHECKPOINT_S = 120.0


def make_app(feeds: Feeds, host: str, token: str, public: bool = False) -> Starlette:
    """The application over these runs; `host`, `token` and `public` decide who may ask."""
    files = {file.name: file.read_bytes() for file in (resources.files(__package__) / "static").iterdir()}
    streams = threading.BoundedSemaphore(_MOST_STREAMS)

    async def static(request: Request) -> Response:
        name = request.path_params.get("name", "index.html")
        if name not in files:
            return JSONResponse({"ok": False, "error": "there is no such file"}, status_code=404)
        return Response(files[name], media_type=_TYPES[name.rpartition(".")[2]])

    async def stream(request: Request) -> Response:
        if not streams.acquire(blocking=False):
            return JSONResponse({"ok": False, "error": f"more than {_MOST_STREAMS} pages are open"}, status_code=503)
        return StreamingResponse(_events(feeds, streams), media_type="text/event-stream")

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
        """Whether whoever asks has the token. The guard has answered already to who posts another."""
        return JSONResponse({"ok": request.scope[KNOWN]})

    routes = [
        Route("/", static),
        Route("/static/{name}", static),
        Route("/api/stream", stream),
        Route(UNLOCK, me, methods=["GET", "POST"]),
        Route("/api/runs/{run}/{name}", action, methods=["POST"]),
        metrics_route(feeds),
    ]
    return _guarded(routes, host, token, public)


def make_metrics_app(feeds: Feeds, host: str, token: str, public: bool = False) -> Starlette:
    """Only the metrics, for a job that needs no page."""

    async def hint(request: Request) -> Response:
        return PlainTextResponse(f"the metrics are at {METRICS}\n")

    return _guarded([Route("/", hint), metrics_route(feeds)], host, token, public)


def metrics_route(feeds: Feeds) -> Route:
    """/metrics of the one run; where there are several, /metrics?run=N of the N-th, from 0."""

    async def metrics(request: Request) -> Response:
        last = len(feeds.runs) - 1
        run = _numbered(feeds, request.query_params.get("run", "" if last else "0"))
        if run is None:
            text = f"there are {last + 1} runs: expected {METRICS}?run=0 to {last}\n"
            return PlainTextResponse(text, status_code=404)
        accept = request.headers.get("accept", "")
        content, media_type = await asyncio.to_thread(_scrape, run, accept)
        if not content:  # numbers that are still growing to what they were would look like a new start
            return PlainTextResponse("the files of the run are still being read\n", status_code=503)
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


def _numbered(feeds: Feeds, text: str) -> RunFeed | None:
    """The run with this number: what a URL says is never more than an index."""
    return {str(number): run for number, run in enumerate(feeds.runs)}.get(text)


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


async def _events(feeds: Feeds, streams: threading.BoundedSemaphore) -> AsyncIterator[bytes]:
    """Patches of all runs, twice a second where something changed; a comment now and then keeps the line open."""
    cursors = [PageCursor() for _ in feeds.runs]
    silent_s = 0.0
    try:
        yield b"retry: 1000\n\n"
        while not feeds.stopped:
            data = await asyncio.to_thread(_changes, feeds, cursors)
            if data is not None:
                silent_s = 0.0
                yield b"data: " + data + b"\n\n"
            elif silent_s >= _ALIVE_S:
                silent_s = 0.0
                yield b": alive\n\n"
            silent_s += _TICK_S
            await asyncio.sleep(_TICK_S)
    finally:
        streams.release()


def _changes(feeds: Feeds, cursors: list[PageCursor]) -> bytes | None:
    found = {}
    for i, (run, cursor) in enumerate(zip(feeds.runs, cursors, strict=True)):
        with run.lock:
            changed = patch(run, cursor)
        if changed:
            found[str(i)] = changed
    return _encode({"now_ms": now_ms(), "count": len(feeds.runs), "runs": found}) if found else None


def act(run_dir: Path, name: str, args: Mapping[str, Any]) -> dict[str, Any]:
    """Do what a page asks of a running job, or say in one line why not: {"ok": true, "text"} or {"ok": false, "error"}.
    Everything is checked before it is sent."""
    try:
        if name not in _ACTIONS:
            raise ConfigError(f"unknown action {name!r}: expected one of {', '.join(_ACTIONS)}")
        checked, words = _ACTIONS[name]
        wanted = checked(args)
        patience_s = _CHECKPOINT_S if name == "checkpoint" else _PATIENCE_S
        result = commands.ask(run_dir, name, wanted, timeout_s=patience_s)
    except EverstepError as error:
        return {"ok": False, "error": " ".join(str(error).split())}
    text = words.format_map(defaultdict(lambda: "?", {**result, **wanted}))
    return {"ok": True, "text": text, "result": result}


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


_ACTIONS: dict[str, tuple[Callable[[Mapping[str, Any]], dict[str, Any]], str]] = {
    "checkpoint": (lambda args: {}, "checkpoint of step {step} in {path}"),
    "drain": (lambda args: _whole(args, "worker_id"), "worker {worker_id} is leaving, {workers} stay"),
    "scale": (lambda args: _whole(args, "workers"), "from {before} to {workers} workers"),
    "chaos": (_fault, "{fault} is on its way"),
}
"""What a page may ask of a running job: how its arguments are checked, and what is said when it is done."""


def serve(run_dirs: Sequence[Path], host: str, port: int, token: str | None, audit: Audit, public: bool) -> None:
    """Serve the dashboard until interrupted. Prints its address, which lets in whoever opens it, once it listens; port
    0 is any that is free. public: who only reads needs no token.

    Raises: ConfigError for an address that cannot be had, or one beyond loopback without a token.
    """
    token = checked_token(host, token)
    feeds = Feeds(run_dirs, audit)
    _serve(make_app(feeds, host, token, public), feeds, host, port, f"/?{_parameter(token)}")


def serve_metrics(run_dir: Path, host: str, port: int, token: str | None, public: bool) -> None:
    """As `serve`, but only the metrics of one run. On loopback the token, where none is given, is the one that the run
    directory keeps for scrapers.

    Raises: ConfigError, likewise.
    """
    file = run_dir / METRICS_TOKEN_FILE
    kept = None if public or token is not None or not is_loopback(host) else kept_token(file)
    secret = checked_token("localhost" if public else host, token or kept, "give --token or EVERSTEP_METRICS_TOKEN")
    feeds = Feeds([run_dir])
    path = METRICS + ("" if public else f"?{_parameter(secret)}")
    more = "" if kept is None else f"\nfor Prometheus: authorization.credentials_file is {file}"
    _serve(make_metrics_app(feeds, host, secret, public), feeds, host, port, path + more)


def _parameter(token: str) -> str:
    return f"{TOKEN_PARAMETER}={quote(token, safe='')}"


def _serve(app: Starlette, feeds: Feeds, host: str, port: int, path: str) -> None:
    listener = _listen(host, port)
    shown = f"[{host}]" if ":" in host else host
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
        print(f"http://{shown}:{listener.getsockname()[1]}{path}", flush=True)
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
        raise ConfigError(f"cannot listen on {host}:{port}: {getattr(error, 'strerror', None) or error}") from None
    return listener
