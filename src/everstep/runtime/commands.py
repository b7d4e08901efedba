"""Requests to a running job from another process: status, scale, drain, stop."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from pathlib import Path
from ssl import SSLError
from typing import Any

from everstep.base.doors import at_port
from everstep.base.errors import ConfigError, EverstepError, ProtocolError
from everstep.protocol.messages import Command, CommandReply, decode, encode
from everstep.protocol.roles import COMMANDS, OPERATE
from everstep.runtime.answers import check_answer
from everstep.runtime.link import wire
from everstep.runtime.link.address import COORDINATOR_FILE, TOKEN_FILE, read_address, role_file
from everstep.runtime.link.handshake import role_token
from everstep.runtime.link.tls import Shown, Tls
from everstep.runtime.link.wire import secured

_PORTION_BYTES = 1 << 16


class NoJobRunning(EverstepError):
    """No coordinator answers for this run directory. where: its announced address, and why it cannot be reached."""

    def __init__(self, message: str, where: str = "") -> None:
        super().__init__(message)
        self.where = where


class GoneUnanswered(NoJobRunning):
    """The coordinator's connection ended after the command was sent: it may have carried it out."""


class _Ended(ProtocolError):
    """A connection ended after a command was sent over it."""


class NotAllowed(ConfigError):
    """This user can read no token for the command."""


class NoAnswer(EverstepError):
    """A job runs there, but its coordinator is silent: stopped, starved, or being restarted."""


def ask(run_dir: Path, name: str, args: dict[str, Any] | None = None, timeout_s: float = 10.0) -> dict[str, Any]:
    """Ask the coordinator of the job that runs in `run_dir`; returns the reply's result.

    The directory has to provide only the address, and the token of the command's role.

    Raises: NoJobRunning if none runs there, GoneUnanswered if it ends before it answers; NoAnswer if its coordinator is
    silent; ConfigError with the coordinator's one line if it refuses, NotAllowed if there is no token for this.
    """
    role = COMMANDS.get(name, OPERATE)
    try:
        address = read_address(run_dir / COORDINATOR_FILE)
        key = _token_for(run_dir, role)
    except (FileNotFoundError, NotADirectoryError):
        raise NoJobRunning(f"no job is running in {run_dir}") from None
    except (OSError, ProtocolError) as error:
        why = (error.strerror if isinstance(error, OSError) else None) or error
        raise ConfigError(f"cannot read {run_dir}: {why}") from None
    at = at_port(address.host, address.port)
    try:
        tls = None if address.tls == "off" else Tls(Shown("", "", address.ca, address.tls == "on"))
        reply = ask_at((address.host, address.port), role, key, tls, name, args or {}, timeout_s)
    except _Ended:
        told = f"everstep logs {run_dir} says what it has done"
        raise GoneUnanswered(f"the coordinator at {at} ended before it answered: {told}") from None
    except ProtocolError as error:
        where = f"at {at} is not to be talked to ({error})"
        raise NoJobRunning(f"no job is running in {run_dir}: its coordinator {where}", where) from None
    except TimeoutError:
        late = f"did not answer within {timeout_s:g} s"
        raise NoAnswer(f"the coordinator of {run_dir} at {at} {late}: try again") from None
    except (OSError, UnicodeError) as error:  # an impossible host name raises a UnicodeError
        said = (error.strerror if isinstance(error, OSError) else None) or error
        where = f"cannot be reached at {at} from here ({str(said).lower()})"
        raise NoJobRunning(f"no job is running in {run_dir}: its coordinator {where}", where) from None
    if not reply.ok:
        raise ConfigError(reply.error)
    check_answer(name, reply.result)
    return reply.result


def ask_at(
    where: tuple[str, int], role: str, key: bytes, tls: Tls | None, name: str, args: dict[str, Any], timeout_s: float
) -> CommandReply:
    """Ask the coordinator that listens at `where`; returns its reply. key: the role's token.

    Raises: ProtocolError if it is not this job's, or the connection ends before the reply; OSError (TimeoutError if no
    reply comes within `timeout_s`, even if other messages do).
    """
    with secured(socket.create_connection(where, timeout=timeout_s), tls) as sock:
        sock.settimeout(timeout_s)
        seals = wire.handshake_client(sock, key, role, f"everstep-{os.getpid()}")
        wire.send_frame(sock, seals, encode(Command(request=1, name=name, args=args)))
        reader, end_s = wire.FrameReader(seals), time.monotonic() + timeout_s
        while (left_s := end_s - time.monotonic()) > 0:
            sock.settimeout(left_s)
            try:
                data = sock.recv(_PORTION_BYTES)
            except (ConnectionError, SSLError):
                data = b""
            if not data:
                raise _Ended("the connection ended before an answer")
            for reply in map(decode, reader.feed(data)):
                if isinstance(reply, CommandReply):
                    return reply
        raise TimeoutError(f"there is no answer after {timeout_s:g} s")


def has_token(run_dir: Path, role: str) -> bool:
    """Whether this process can read a token for that role."""
    return any(os.access(run_dir / name, os.R_OK) for name in (role_file(role), TOKEN_FILE))


def _token_for(run_dir: Path, role: str) -> bytes:
    """Token for a role. Raises: NotAllowed if there is none; ProtocolError if the file holds no token; OSError."""
    path = run_dir / role_file(role)
    try:
        return wire.read_token(path)
    except PermissionError:
        raise NotAllowed(f"cannot read {path}, the token for {role!r}: permission denied") from None
    except FileNotFoundError:
        with contextlib.suppress(FileNotFoundError):
            return role_token(wire.read_token(run_dir / TOKEN_FILE), role)
    raise NotAllowed(f"expected the token for {role!r} in {run_dir / role_file(role)}, found none")
