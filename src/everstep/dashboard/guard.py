"""Who may ask what: Host, Origin and token are checked before anything else sees a request. ASGI middleware.

A page of another site can make a browser send requests here, and a name that resolves to 127.0.0.1 makes them look
local. So: the Host must be one of ours, requests that a browser calls foreign are refused, there are no cookies, and
every action needs a token in a header, which no foreign page can set. Scrapers send it as `Authorization: Bearer`.
"""

from __future__ import annotations

import hmac
import ipaddress
import secrets
from typing import Any

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from everstep.base.errors import ConfigError

TOKEN_HEADER = "x-everstep-token"
API = "/api/"
METRICS = "/metrics"
SHORTEST_TOKEN = 16
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches that address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def checked_token(host: str, token: str | None, how: str = "give --token or EVERSTEP_DASHBOARD_TOKEN") -> str:
    """The token to use; one is made up on loopback. how: what the user is told to do.

    Raises: ConfigError if it is missing or short where others could reach the server.
    """
    if token is None:
        if not is_loopback(host):
            raise ConfigError(
                f"{host} can be reached by others: {how}, a secret of at least {SHORTEST_TOKEN} characters"
            )
        return secrets.token_urlsafe(24)
    if not is_loopback(host) and len(token) < SHORTEST_TOKEN:
        raise ConfigError(f"token: expected at least {SHORTEST_TOKEN} characters for {host}, got {len(token)}")
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError("token: expected printable ASCII characters without spaces")
    return token


class Guard:
    """Refuses what is not ours, and puts the same headers on every answer.

    host: where the server listens; beyond loopback every request for data needs the token, on loopback only actions do.
    """

    def __init__(self, app: ASGIApp, host: str, token: str) -> None:
        self._app = app
        self._loopback = is_loopback(host)
        self._names = {"127.0.0.1", "localhost", "[::1]", host.lower(), f"[{host.lower()}]"}
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return
        refusal = self._refusal(scope)

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [
                    *((k, v) for k, v in message["headers"] if k.decode("latin-1") not in _HEADERS),
                    *((name.encode(), value.encode()) for name, value in _HEADERS.items()),
                ]
            await send(message)

        answer: Any = self._app if refusal is None else refusal
        await answer(scope, receive, send_with_headers)

    def _refusal(self, scope: Scope) -> JSONResponse | None:
        headers = Headers(scope=scope)
        host = headers.get("host", "").lower()
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
        if self._loopback and name not in self._names:
            return _no(403, f"this server is not called {name[:80]!r}: open it as http://127.0.0.1 or localhost")
        path = str(scope["path"])
        origin = headers.get("origin")
        if origin is not None and origin.partition("://")[2].lower() != host:
            return _no(403, "requests from other sites are refused")
        is_data = path.startswith(API) or path == METRICS
        if is_data and headers.get("sec-fetch-site", "none") not in ("same-origin", "none"):
            return _no(403, "requests from other sites are refused")
        writes = scope["method"] not in ("GET", "HEAD")
        if writes and not path.startswith(API):
            return _no(405, "only /api/ takes actions")
        if not is_data or (self._loopback and not writes):
            return None
        given = headers.get(TOKEN_HEADER) or headers.get("authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(given.encode(), self._token.encode()):
            what = "actions need" if writes else "this server needs"
            return _no(401, f"{what} the token with which it was started, or that it printed then")
        if writes and headers.get("content-type", "").partition(";")[0] != "application/json":
            return _no(415, "expected application/json")
        return None


def _no(code: int, reason: str) -> JSONResponse:
    return JSONResponse({"ok": False, "error": reason}, status_code=code)
