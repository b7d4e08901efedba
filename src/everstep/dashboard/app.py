"""The web application: one page, its files, one stream of server-sent events, the actions, and the metrics."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator
from importlib import resources
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from everstep.dashboard.actions import act
from everstep.dashboard.feed import Feeds, RunFeed
from everstep.dashboard.guard import KNOWN, METRICS, UNLOCK, Guard
from everstep.dashboard.view import PageCursor, now_ms, patch
from everstep.report.prometheus import device_families, expose, families

_TYPES = {"html": "text/html", "js": "text/javascript", "css": "text/css", "svg": "image/svg+xml", "txt": "text/plain"}
_FILES = (
    "index.html",
    "page.css",
    "uPlot.min.css",
    "uPlot.iife.min.js",
    "uPlot.LICENSE.txt",
    "dom.js",
    "charts.js",
    "workers.js",
    "panels.js",
    "stream.js",
    "page.js",
    "icon.svg",
)
_TICK_S = 0.5
_ALIVE_S = 10.0
_MOST_STREAMS = 64
_MOST_BODY = 4096
_encode = msgspec.json.Encoder().encode


def make_app(feeds: Feeds, host: str, token: str, public: bool = False) -> Starlette:
    """The application over these runs; `host`, `token` and `public` decide who may ask."""
    files = {name: (resources.files(__package__) / "static" / name).read_bytes() for name in _FILES}
    streams = threading.BoundedSemaphore(_MOST_STREAMS)

    async def page(request: Request) -> Response:
        return _file(files, "index.html")

    async def static(request: Request) -> Response:
        return _file(files, request.path_params["name"])

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
        Route("/", page),
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


def _file(files: dict[str, bytes], name: str) -> Response:
    if name not in files:
        return JSONResponse({"ok": False, "error": "there is no such file"}, status_code=404)
    return Response(files[name], media_type=_TYPES[name.rpartition(".")[2]])


def _numbered(feeds: Feeds, text: str) -> RunFeed | None:
    """The run with this number: what a URL says is never more than an index."""
    known = {str(number): run for number, run in enumerate(feeds.runs)}
    return known.get(text)


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
