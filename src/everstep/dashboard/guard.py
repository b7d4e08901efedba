"""Access control: Host, Origin and token are checked before any other code sees a request. ASGI middleware.

Every user of this machine reaches a port on loopback, a page of another site can make a browser send requests here, and
a name that resolves to 127.0.0.1 makes them look local. So the Host must be one of ours, requests that a browser calls
foreign are refused, and everything needs the token. A browser shows it once in the URL, and gets a cookie in exchange;
a scraper sends `Authorization: Bearer`. With `public` only actions need it.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode

from starlette.datastructures import Headers
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from everstep.base.below import drafted
from everstep.base.doors import is_loopback
from everstep.base.errors import ConfigError
from everstep.base.given import read_given

TOKEN_HEADER = "x-everstep-token"
TOKEN_PARAMETER = "token"
API = "/api/"
UNLOCK = "/api/token"
METRICS = "/metrics"
KNOWN = "everstep.known"
"""Entry of a request's scope: whether it has the token."""
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


def checked_token(host: str, token: str | None, how: str = "give --token or EVERSTEP_DASHBOARD_TOKEN") -> str:
    """Token to use; on loopback a new one is made if none is given. how: advice to the user.

    Raises: ConfigError if it is missing or weak and others could reach the server.
    """
    if token is None:
        if not is_loopback(host):
            raise ConfigError(
                f"{host} can be reached by others: {how}, a secret of at least {SHORTEST_TOKEN} characters"
            )
        return secrets.token_urlsafe(24)
    if not is_loopback(host) and len(token) < SHORTEST_TOKEN:
        raise ConfigError(f"token: expected at least {SHORTEST_TOKEN} characters for {host}, got {len(token)}")
    if not is_loopback(host) and len(set(token)) < SHORTEST_TOKEN // 2:
        raise ConfigError(f"token: expected a random one for {host}, got one that repeats itself: openssl rand -hex 32")
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError("token: expected printable ASCII characters without spaces")
    return token


def kept_token(path: Path, like: str | None = None) -> str | None:
    """Token in this file, made once and readable by its owner alone, so that scrapers can be given the file. like:
    required value, if any. None if the file cannot be used."""
    try:
        if path.exists() and path.stat().st_mode & 0o077:
            path.unlink()  # a file that others could read holds no secret
        if like is not None and path.exists() and read_given(path).decode().strip() != like:
            path.unlink()
        if not path.exists():
            _make_token(path, like or secrets.token_urlsafe(24))
        return checked_token("", read_given(path).decode().strip())
    except (OSError, ValueError, ConfigError):
        return None


def _make_token(path: Path, token: str) -> None:
    with drafted(path) as draft:
        draft.write_bytes(token.encode())
        with contextlib.suppress(FileExistsError):  # another process was quicker
            os.link(draft, draft.with_name(path.name))


class Guard:
    """Refuses foreign requests, and puts the same headers on every answer.

    host: address where the server listens. public: reading needs no token.
    """

    def __init__(self, app: ASGIApp, host: str, token: str, public: bool = False) -> None:
        self._app = app
        self._loopback = is_loopback(host)
        self._names = {"127.0.0.1", "localhost", "[::1]", host.lower(), f"[{host.lower()}]"}
        self._token = token
        self._public = public
        # A browser shares cookies among all ports of a host: each token has its own cookie, which does not show it.
        self._cookie = f"everstep-{hashlib.sha256(token.encode()).hexdigest()[:12]}"
        self._pass = hmac.new(token.encode(), b"cookie", hashlib.sha256).hexdigest()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return
        scope[KNOWN] = self._has_token(scope)
        answer: Any = self._refusal(scope) or self._redirect_without_token(scope) or self._app
        lets_in = scope[KNOWN] and scope["method"] == "POST" and scope["path"] == UNLOCK

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [
                    *((k, v) for k, v in message["headers"] if k.decode("latin-1") not in _HEADERS),
                    *((name.encode(), value.encode()) for name, value in _HEADERS.items()),
                    *([(b"set-cookie", self._set_cookie().encode())] if lets_in else []),
                ]
            await send(message)

        await answer(scope, receive, send_with_headers)

    def _refusal(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        host = headers.get("host", "").lower()
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
        if self._loopback and name not in self._names:
            return _refuse(403, f"this server is not called {name[:80]!r}: open it as http://127.0.0.1 or localhost")
        path = str(scope["path"])
        origin = headers.get("origin")
        if origin is not None and origin.partition("://")[2].lower() != host:
            return _refuse(403, "requests from other sites are refused")
        is_data = path.startswith(API) or path == METRICS
        if is_data and headers.get("sec-fetch-site", "none") not in ("same-origin", "none"):
            return _refuse(403, "requests from other sites are refused")
        writes = not _only_reads(scope)
        if writes and not path.startswith(API):
            return _refuse(405, "only /api/ takes actions")
        if not scope[KNOWN] and (writes or not self._public):
            what = "actions need" if writes and self._public else "this server needs"
            return PlainTextResponse(
                f"{what} the token with which it was started: open the address that it printed then, or send the token "
                "as 'Authorization: Bearer TOKEN'\n",
                status_code=401,
                headers={"www-authenticate": "Bearer"},
            )
        if writes and headers.get("content-type", "").partition(";")[0] != "application/json":
            return _refuse(415, "expected application/json")
        return None

    def _has_token(self, scope: Scope) -> bool:
        """Whether a request has the token: in a header; as a cookie; or, for reading, in the URL."""
        headers = Headers(scope=scope)
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        given = [headers.get(TOKEN_HEADER, ""), bearer if scheme.lower() == "bearer" else ""]
        if _only_reads(scope):
            given += [value for name, value in _query(scope) if name == TOKEN_PARAMETER]
        return any(_same(token, self._token) for token in given) or _same(self._shown(headers), self._pass)

    def _shown(self, headers: Headers) -> str:
        """Value of our cookie, "" if there is none."""
        for line in headers.getlist("cookie"):
            for part in line.split(";"):
                name, _, value = part.strip().partition("=")
                if name == self._cookie:
                    return value
        return ""

    def _redirect_without_token(self, scope: Scope) -> Response | None:
        """Redirect for a page opened with the token in its URL: to the same page without it, with a cookie. Programs
        may not keep cookies, and are answered at once."""
        rest = [(name, value) for name, value in _query(scope) if name != TOKEN_PARAMETER]
        path = str(scope["path"])
        if not scope[KNOWN] or not _only_reads(scope) or len(rest) == len(_query(scope)):
            return None
        if path.startswith(API) or (path == METRICS and "text/html" not in Headers(scope=scope).get("accept", "")):
            return None
        where = "/" + quote(path.lstrip("/")) + (f"?{urlencode(rest)}" if rest else "")
        return RedirectResponse(where, status_code=303, headers={"set-cookie": self._set_cookie()})

    def _set_cookie(self) -> str:
        return f"{self._cookie}={self._pass}; Path=/; HttpOnly; SameSite=Strict"


def _only_reads(scope: Scope) -> bool:
    return scope["method"] in ("GET", "HEAD")


def _query(scope: Scope) -> list[tuple[str, str]]:
    return parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)


def _same(given: str, expected: str) -> bool:
    return hmac.compare_digest(given.encode(), expected.encode())


def _refuse(code: int, reason: str) -> JSONResponse:
    return JSONResponse({"ok": False, "error": reason}, status_code=code)
