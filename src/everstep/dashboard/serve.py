"""Runs the dashboard, or the metrics alone: socket, uvicorn, threads; says where it is."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from pathlib import Path

import uvicorn
from starlette.applications import Starlette

from everstep.base.errors import ConfigError
from everstep.dashboard.app import make_app, make_metrics_app
from everstep.dashboard.feed import Audit, Feeds
from everstep.dashboard.guard import METRICS, checked_token


def serve(
    run_dirs: Sequence[Path], host: str, port: int, token: str | None, audit: Audit, tell: Callable[[str], None]
) -> None:
    """Serve the dashboard until interrupted. `tell` is given its address once it listens; port 0 is any that is free.

    Raises: ConfigError for an address that cannot be had, or one beyond loopback without a token.
    """
    token = checked_token(host, token)
    feeds = Feeds(run_dirs, audit)
    _serve(make_app(feeds, host, token), feeds, host, port, lambda base: tell(f"{base}/#token={token}"))


def serve_metrics(run_dir: Path, host: str, port: int, token: str | None, tell: Callable[[str], None]) -> None:
    """As `serve`, but only the metrics of one run.

    Raises: ConfigError, likewise.
    """
    token = checked_token(host, token, "give --token or EVERSTEP_METRICS_TOKEN")
    feeds = Feeds([run_dir])
    _serve(make_metrics_app(feeds, host, token), feeds, host, port, lambda base: tell(base + METRICS))


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
