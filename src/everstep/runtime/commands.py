"""Asking a running job from another process: status, scale, drain, stop; and who may run in a directory."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from everstep.base.errors import ConfigError, EverstepError, ProtocolError
from everstep.protocol.messages import Command, CommandReply, decode, encode
from everstep.runtime import wire
from everstep.runtime.address import COORDINATOR_FILE, TOKEN_FILE, read_address

LOCK_FILE = "lock"


class NoJobRunning(EverstepError):
    """Nobody answers for this run directory."""


class NoAnswer(EverstepError):
    """A job runs there, but its coordinator is silent: stopped, starved, or being restarted."""


def ask(run_dir: Path, name: str, args: dict[str, Any] | None = None, timeout_s: float = 10.0) -> dict[str, Any]:
    """Ask the coordinator of the job that runs in `run_dir`; returns the reply's result.

    Raises: NoJobRunning if none runs there; NoAnswer if its coordinator is silent; ConfigError with the coordinator's
    one line if it refuses.
    """
    try:
        address = read_address(run_dir / COORDINATOR_FILE)
        token = wire.read_token(run_dir / TOKEN_FILE)
    except (FileNotFoundError, NotADirectoryError):
        raise NoJobRunning(f"no job is running in {run_dir}") from None
    except OSError as error:
        raise EverstepError(f"cannot read {run_dir}: {error.strerror or error}") from None
    try:
        with socket.create_connection((address.host, address.port), timeout=timeout_s) as sock:
            sock.settimeout(timeout_s)
            wire.handshake_client(sock, token, "client", f"everstep-{os.getpid()}")
            wire.send_frame(sock, encode(Command(request=1, name=name, args=args or {})))
            while True:
                reply = decode(wire.recv_frame(sock))
                if isinstance(reply, CommandReply):
                    break
    except ProtocolError as error:
        raise NoJobRunning(f"no job is running in {run_dir}: {error}") from None
    except TimeoutError:
        raise NoAnswer(f"the coordinator of {run_dir} did not answer within {timeout_s:g} s: try again") from None
    except OSError as error:
        raise NoJobRunning(f"no job is running in {run_dir} ({error.strerror or error})") from None
    if not reply.ok:
        raise ConfigError(reply.error)
    return reply.result


def is_locked(run_dir: Path) -> bool:
    """Whether a launcher holds the directory: a job is running there."""
    try:
        with open(run_dir / LOCK_FILE, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


@contextlib.contextmanager
def run_lock(run_dir: Path) -> Iterator[None]:
    """Hold the directory's lock, which ends with this process at the latest.

    Raises: ConfigError if another process holds it, or if the directory cannot be made or written.
    """
    held = f"a job is still running in {run_dir}: wait for it, stop it, or choose another --run-dir"
    with sole_holder(run_dir / LOCK_FILE, held, f"the run directory {run_dir}"):
        yield


@contextlib.contextmanager
def sole_holder(path: Path, held: str, folder: str) -> Iterator[None]:
    """Hold a lock file, made with its folder if need be; the lock ends with this process at the latest.

    Raises: ConfigError, saying `held`, if another process holds it; naming `folder`, if that cannot be made or written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise ConfigError(f"cannot write to {folder}: {error.strerror or error}") from None
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(held) from None
        yield
    finally:
        os.close(fd)
