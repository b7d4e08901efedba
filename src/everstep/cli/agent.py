"""`everstep agent`: this host runs workers of a job that somebody else has started and that listens for hosts."""

from __future__ import annotations

import os
import socket
import sys
import time
from dataclasses import replace
from pathlib import Path

import click

from everstep.base.config import load_config, parse_set
from everstep.base.config_keys import SecurityConfig
from everstep.base.errors import ConfigError, ProtocolError, QuorumLost
from everstep.cli.main import complain
from everstep.cli.worker import ENTRY, FILES, PRELOAD
from everstep.protocol.roles import READ
from everstep.runtime import wire
from everstep.runtime.address import TOKEN_FILE
from everstep.runtime.context import Joining
from everstep.runtime.handshake import role_token
from everstep.runtime.tls import Tls, shown_by

TOKEN_VARIABLE = "EVERSTEP_TOKEN"
_PATIENCE_S = 600.0
_AGAIN_S = 0.25


@click.command()
@click.option("--join", "address", metavar="ADDR:PORT", required=True, help="Where the job listens (run --listen).")
@click.option("--slots", type=click.IntRange(1), help="Run so many workers at most.")
@click.option(
    "--token-file",
    type=click.Path(path_type=Path),
    help=f"File with the job's token; else ${TOKEN_VARIABLE}, or the file in --run-dir.",
)
@click.option(
    "--run-dir",
    type=click.Path(path_type=Path),
    help="The job's directory, if it has another name here; else one for this host's own files.",
)
@click.option("--host-name", help="What the job calls this host; no other of its hosts may be called so.")
@click.option("--address", "own", metavar="IP", help="Of this host, for other hosts (that of the route to the job).")
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="Set a key of security.*, for this host.")
def command(
    address: str,
    slots: int | None,
    token_file: Path | None,
    run_dir: Path | None,
    host_name: str | None,
    own: str | None,
    settings: tuple[str, ...],
) -> int:
    """Take part in a running job until it is over: keep the workers running that it gives to this host.

    The job's directory need not be reachable from here: then this host keeps its files in --run-dir, or in a private
    directory. Ctrl-C ends the workers of this host, and the job goes on.
    """
    if own is not None:
        check_own(own)
    security = _security(settings)
    return take_part_in(address, slots, security, token_file=token_file, run_dir=run_dir, host_name=host_name, own=own)


def take_part_in(
    address: str,
    slots: int | None,
    security: SecurityConfig,
    *,
    token_file: Path | None = None,
    run_dir: Path | None = None,
    host_name: str | None = None,
    own: str | None = None,
) -> int:
    """Be an agent of the job that listens at "host:port". Returns the exit code."""
    from everstep.runtime.host_agent import take_part

    if token_file is None and security.token_file is not None:
        token_file = Path(security.token_file)
    joining = Joining(
        address=address,
        token_file=str(token_file or ""),
        entry=ENTRY,
        preload=list(PRELOAD),
        host=host_name or os.uname().nodename,
        room=slots or 0,
        run_dir=str(run_dir or ""),
        own=own or "",
        files=FILES,
        tls=security.tls,
    )
    where = joining.where()
    if isinstance(where, Path):
        raise ConfigError(f"--join: expected ADDR:PORT like 127.0.0.1:29400, got {address!r}")
    token = _token(token_file, run_dir)
    left = take_part(_wait_for_job(joining, where, token), token)
    if left.words:
        complain(left.words)
    return left.exit_code


def check_own(address: str) -> None:
    """Raises: ConfigError if nothing can listen at this address here."""
    with socket.socket() as sock:
        try:
            sock.bind((address, 0))
        except OSError as error:
            why = error.strerror or error
            raise ConfigError(
                f"--address: expected one of this host's addresses, got {address!r} ({why}): give one of 'ip -4 addr'"
            ) from None


def place(rank: int | None, size: int | None, address: str | None, port: int | None, listen: str | None) -> str:
    """Where hosts meet that are started one by one, each with its rank. Returns "address:port".

    Raises: ConfigError naming what is missing, or does not fit.
    """
    given = {"--rank": rank, "--world-size": size, "--master-addr": address, "--master-port": port}
    missing = [name for name, value in given.items() if value is None]
    if missing or rank is None or size is None:
        raise ConfigError(f"expected {', '.join(given)} together, got none for {', '.join(missing)}")
    if listen is not None:
        raise ConfigError("--listen: expected it without --rank, where host 0 listens at --master-addr")
    if rank >= size:
        raise ConfigError(f"--rank: expected 0 to {size - 1} (--world-size {size}), got {rank}")
    if size > 1 and str(address).startswith("127."):
        raise ConfigError(f"--master-addr: expected an address that {size} hosts can reach, got {address} (loopback)")
    return f"{address}:{port}"


def given_token() -> bytes | None:
    """The token in the environment, from which it is taken, so that no other process inherits it.

    Raises: ConfigError if it is none.
    """
    text = os.environ.pop(TOKEN_VARIABLE, "")
    try:
        return wire.token_of(text, f"${TOKEN_VARIABLE}") if text else None
    except ProtocolError as error:
        raise ConfigError(str(error)) from None


def token_in(path: Path) -> bytes:
    """Raises: ConfigError if the file holds no token, or cannot be read."""
    try:
        return wire.read_token(path)
    except OSError as error:
        raise ConfigError(f"cannot read the token in {path}: {error.strerror or error}") from None
    except (ProtocolError, UnicodeDecodeError) as error:
        raise ConfigError(f"--token-file: {error}") from None


def _token(token_file: Path | None, run_dir: Path | None) -> bytes:
    given = given_token()
    path = token_file
    if path is None and run_dir is not None and (run_dir / TOKEN_FILE).exists():
        path = run_dir / TOKEN_FILE
    if path is None:
        if given is None:
            raise ConfigError(f"expected the job's token, got none: give --token-file, or set {TOKEN_VARIABLE}")
        return given
    return token_in(path)


def _security(settings: tuple[str, ...]) -> SecurityConfig:
    """Raises: ConfigError for other keys, or values that contradict each other."""
    for text in settings:
        if not parse_set(text)[0].startswith("security."):
            raise ConfigError(f"--set: expected a key of security.*, got {text!r}: the others are the job's to say")
    return load_config([(f"--set {text}", dict([parse_set(text)])) for text in settings]).security


def _wait_for_job(joining: Joining, where: tuple[str, int], token: bytes) -> Joining:
    """Until a job answers that has this token. Returns the same with the address of this host.

    Raises: ConfigError if it has another one, or is none; QuorumLost if nobody has answered for long.
    """
    end_s, told = time.monotonic() + _PATIENCE_S, False
    while True:
        try:
            sock = socket.create_connection(where, wire.HANDSHAKE_TIMEOUT_S)
            own = joining.own or str(sock.getsockname()[0])
            tls = Tls.of(shown_by(joining.tls, token, own))
            with wire.secured(sock, tls) as sock:
                wire.handshake_client(sock, role_token(token, READ), READ, f"agent-{os.getpid()}")
                return replace(joining, own=own)
        except ProtocolError as error:
            raise ConfigError(f"--join {where[0]}:{where[1]}: {error}") from None
        except OSError as error:
            words = f"no job answers at {where[0]}:{where[1]} ({error.strerror or error})"
        if time.monotonic() > end_s:
            raise QuorumLost(f"{words} for {_PATIENCE_S:g} s")
        if not told:
            print(f"{words}: waiting for it", file=sys.stderr, flush=True)
            told = True
        time.sleep(_AGAIN_S)
