"""Runs the dashboard: socket, uvicorn, threads; prints where it is."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

import uvicorn

from everstep.base.errors import ConfigError
from everstep.dashboard.app import make_app
from everstep.dashboard.feed import Audit, Feeds
from everstep.dashboard.guard import is_loopback

_SHORTEST_TOKEN = 16


def serve(
    run_dirs: Sequence[Path], host: str, port: int, token: str | None, audit: Audit, tell: Callable[[str], None]
) -> None:
    """Serve until interrupted. `tell` is given the address once it listens; port 0 takes any that is free.

    Raises: ConfigError for an address that cannot be had, or one beyond loopback without a token.
    """
    token = checked_token(host, token)
    listener = _listen(host, port)
    shown = f"[{host}]" if ":" in host else host
    feeds = Feeds(run_dirs, audit)
    config = uvicorn.Config(
        make_app(feeds, host, token),
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=1,
        limit_concurrency=256,
        ws="none",
    )
    feeds.start()
    try:
        tell(f"http://{shown}:{listener.getsockname()[1]}/#token={token}")
        uvicorn.Server(config).run(sockets=[listener])
    finally:
        feeds.stop()
        listener.close()


def checked_token(host: str, token: str | None) -> str:
    """The token to use; one is made up on loopback.

    Raises: ConfigError if it is missing or short where others could reach the server.
    """
    if token is None:
        if not is_loopback(host):
            raise ConfigError(
                f"--host {host} can be reached by others: give --token (or EVERSTEP_DASHBOARD_TOKEN), at least "
                f"{_SHORTEST_TOKEN} characters"
            )
        return secrets.token_urlsafe(24)
    if not is_loopback(host) and len(token) < _SHORTEST_TOKEN:
        raise ConfigError(
            f"--token: expected at least {_SHORTEST_TOKEN} characters for --host {host}, got {len(token)}"
        )
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError("--token: expected printable ASCII characters without spaces")
    return token


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
