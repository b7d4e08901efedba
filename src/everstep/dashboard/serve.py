"""Runs the dashboard, or the metrics alone: socket, uvicorn, threads; says where it is."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.parse import quote

import uvicorn
from starlette.applications import Starlette

from everstep.base.errors import ConfigError
from everstep.dashboard.app import make_app, make_metrics_app
from everstep.dashboard.feed import Audit, Feeds
from everstep.dashboard.guard import METRICS, TOKEN_PARAMETER, checked_token, is_loopback, kept_token
from everstep.runtime.address import METRICS_TOKEN_FILE


def serve(
    run_dirs: Sequence[Path],
    host: str,
    port: int,
    token: str | None,
    audit: Audit,
    tell: Callable[[str], None],
    public: bool = False,
) -> None:
    """Serve the dashboard until interrupted. `tell` is given its address, which lets in whoever opens it, once it
    listens; port 0 is any that is free. public: who only reads needs no token.

    Raises: ConfigError for an address that cannot be had, or one beyond loopback without a token.
    """
    token = checked_token(host, token)
    feeds = Feeds(run_dirs, audit)
    app = make_app(feeds, host, token, public)
    _serve(app, feeds, host, port, lambda base: tell(f"{base}/?{_parameter(token)}"))


def serve_metrics(
    run_dir: Path, host: str, port: int, token: str | None, tell: Callable[[str], None], public: bool = False
) -> None:
    """As `serve`, but only the metrics of one run. On loopback the token, where none is given, is the one that the run
    directory keeps for scrapers.

    Raises: ConfigError, likewise.
    """
    file = run_dir / METRICS_TOKEN_FILE
    kept = None if public or token is not None or not is_loopback(host) else kept_token(file)
    secret = checked_token("localhost" if public else host, token or kept, "give --token or EVERSTEP_METRICS_TOKEN")
    feeds = Feeds([run_dir])

    def tell_all(base: str) -> None:
        tell(base + METRICS + ("" if public else f"?{_parameter(secret)}"))
        if kept is not None:
            tell(f"for Prometheus: authorization.credentials_file is {file}")

    _serve(make_metrics_app(feeds, host, secret, public), feeds, host, port, tell_all)


def _parameter(token: str) -> str:
    return f"{TOKEN_PARAMETER}={quote(token, safe='')}"


def _serve(app: Starlette, feeds: Feeds, host: str, port: int, tell: Callable[[str], None]) -> None:
    listener = _listen(host, port)
    shown = f"[{host}]" if ":" in host else host
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=1,
        limit_concurrency=256,
        ws="none",
    )
    feeds.start()
    try:
        tell(f"http://{shown}:{listener.getsockname()[1]}")
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
