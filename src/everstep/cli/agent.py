"""`everstep agent`: this host runs workers of a job that another host has started and that listens for hosts."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from everstep.base.config import Config, load_config, parse_set
from everstep.base.doors import at_port, canonical, is_loopback
from everstep.base.errors import ConfigError, EverstepError
from everstep.base.etcd_address import SCHEMES
from everstep.base.exit_codes import NO_HEAD
from everstep.base.leaving import temporary_folder
from everstep.cli.config_file import said_layers
from everstep.cli.main import complain
from everstep.cli.meeting import Met, folder_of, looking, moves, places_in, wait_for_job
from everstep.cli.starting import DOMAIN_HELP, start_here
from everstep.cli.task_loading import parse_task
from everstep.cli.tokens import TOKEN_VARIABLE, given_token, token_in
from everstep.protocol.roles import OPERATE
from everstep.runtime import commands
from everstep.runtime.host.devices import default_slots
from everstep.runtime.link.address import COORDINATOR_FILE, TOKEN_FILE
from everstep.runtime.link.handshake import role_token
from everstep.runtime.link.interfaces import check_own
from everstep.runtime.link.tls import Tls, shown_by
from everstep.runtime.start import Start

_OWN_GROUPS = ("security.", "control.etcd_")
_OWN_KEYS = ("network.interface", "network.trusted", "hosts.wait_s")
STANDBYS_OWN = ("network.interface", "hosts.wait_s")
"""Keys of its own that a standby host takes: the job has all others, and this host may have to lead it."""
_ANSWER_S = 10.0
_MOST_NAME_BYTES = 200
_AGAIN_S = 1.0


@click.command()
@click.option(
    "--join",
    "address",
    metavar="ADDR:PORT[,...]|etcd[s]://...|file://DIR",
    required=True,
    help="Where to find the job: an address that it may listen on (run --listen), its control.etcd, or its directory.",
)
@click.option("--standby", is_flag=True, help="With --join etcd[s]://: take over the job if its coordinator is lost.")
@click.option(
    "--slots",
    type=click.IntRange(0, 65_535),
    help="Largest number of workers on this host (one per device, or 1). 0, with --standby: only stand by.",
)
@click.option(
    "--token-file",
    type=click.Path(path_type=Path),
    help=f"File with the job's token. Default: ${TOKEN_VARIABLE}, or the file in --run-dir.",
)
@click.option(
    "--run-dir",
    type=click.Path(path_type=Path),
    help="The job's directory as this host sees it, or a directory for this host's own files.",
)
@click.option("--host-name", help="Name of this host in the job; must be unique.")
@click.option(
    "--address", "own", metavar="IP", help="Address that other hosts use for this one (that of the route to the job)."
)
@click.option(
    "--stay", is_flag=True, help="Stay when the job's process ends or gets SIGTERM, and wait for the next one."
)
@click.option(
    "--refill",
    metavar="N",
    type=click.IntRange(1),
    help="Ask for N workers in total, because other hosts have handed over.",
)
@click.option("--domain", metavar="K=V,...", help=DOMAIN_HELP)
@click.option("--task", metavar="TASK", help="Run only this task, and refuse a job with another one.")
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="KEY=VALUE",
    help="For this host: a key of security.*, control.etcd_*, network.interface, network.trusted or hosts.wait_s.",
)
def command(
    address: str,
    standby: bool,
    slots: int | None,
    token_file: Path | None,
    run_dir: Path | None,
    host_name: str | None,
    own: str | None,
    stay: bool,
    refill: int | None,
    domain: str | None,
    task: str | None,
    settings: tuple[str, ...],
) -> int:
    """Take part in a running job until it is over: run the workers that it gives to this host.

    A host that does not see the job's directory keeps its own files in --run-dir, or in a private directory. Ctrl-C
    ends the workers of this host, and the job goes on. SIGUSR1 makes the workers and the agent leave in order, as
    `everstep drain DIR --host NAME` does.
    """
    folder = folder_of(address)
    if folder is not None and run_dir is not None:
        raise ConfigError("--run-dir: expected none with --join file://DIR, which already names the directory")
    config = own_settings(settings)
    if own is not None:
        own = check_own("--address", own)
    if host_name is not None:
        _check_name(host_name)
    if task is not None:
        task = parse_task(task).canonical
    if standby:
        others = [text for text in settings if parse_set(text)[0] not in STANDBYS_OWN]
        _check_standby(address, {"--task": task, "--set": others})
    if slots == 0 and not standby:
        raise ConfigError("--slots: expected at least 1, got 0: a host without workers is of use with --standby alone")
    known = {"run_dir": run_dir, "host": host_name or os.uname().nodename, "own": own or "", "task": task or ""}
    begun = start_of_agent(config, address, token_file, domain, room=slots, **known)
    if not standby:
        return take_part_in(begun, stay=stay, refill=refill)
    from everstep.cli.standby import stand_by

    met = None if refill is None else functools.partial(_refill, begun, most=refill)
    return stand_by(replace(begun, stays=stay), met)


def _check_standby(address: str, beside: Mapping[str, object]) -> None:
    """Check options next to --standby. beside: their values by option. Raises: ConfigError if one does not fit."""
    if not address.startswith(SCHEMES):
        raise ConfigError(f"--standby: expected --join etcd://..., which holds the lease, got {address!r}")
    if unfit := [name for name, value in beside.items() if value]:
        raise ConfigError(
            f"--standby: expected it without {', '.join(unfit)}: drop these, because this host may have to lead the job"
        )


def start_of_agent(
    config: Config, where: str, token_file: Path | None = None, domain: str | None = None, **known: Any
) -> Start:
    """Start of an agent. The address is "host:port", several of these, etcd, or "file://DIR".

    config: this host's own keys. known: as `start_here` takes it; room None: one worker per device, or one.
    """
    places_in(where)
    room = default_slots() if known.get("room") is None else known["room"]
    begun = start_here(config, domain, **{**known, "where": where, "room": room})
    if token_file is None and config.security.token_file is not None:
        token_file = Path(config.security.token_file)
    in_folder = folder_of(where) is not None and token_file is None
    return replace(begun, token=given_token() or b"" if in_folder else _token(token_file, begun.run_dir))


def take_part_in(
    begun: Start, *, stay: bool = False, refill: int | None = None, patient: bool = False, apart: bool = False
) -> int:
    """Be an agent of the job until it is over. Returns the exit code: that of the job if it failed. patient: keep
    waiting if a process answers that does not prove the token, because one that does may follow it. apart: 0 but for
    signals, since a launcher would end the host that leads for another code; the line says what was wrong."""
    from everstep.runtime.host.host_agent import take_part

    folder, look, follows = folder_of(begun.where), looking(begun), moves(begun.where)
    there = begun.where if folder is None else str(folder / COORDINATOR_FILE)
    with temporary_folder("everstep-agent-") as kept:
        address = str(kept / COORDINATOR_FILE) if follows else there
        while True:
            met = wait_for_job(begun, look, patient=patient)
            if met is None:
                print(f"the job in {folder} is over", file=sys.stderr, flush=True)
                return 0
            if refill is not None:
                _refill(begun, met, refill)
            more = {"run_dir": str(folder or begun.run_dir or ""), "task": begun.task, "said": begun.where}
            left = take_part(begun.joining(address, own=met.own, **more), met.token, look if follows else None)
            if left.words and left.exit_code:
                complain(left.words)
            elif left.words:
                print(left.words, file=sys.stderr, flush=True)
            if not stay or not (left.later or left.exit_code == NO_HEAD):
                return 0 if apart and left.exit_code < 128 else left.exit_code
            patient = True
            time.sleep(_AGAIN_S)  # the process that answered may still be there


def _refill(begun: Start, met: Met, most: int) -> None:
    """Ask the job for as many more workers as this host has room for, but at most `most`."""
    with contextlib.suppress(EverstepError, OSError):  # the job may have ended meanwhile; joining will show that
        key, tls = role_token(met.token, OPERATE), Tls.of(shown_by(begun.config.security.tls, met.token, met.own))
        target = commands.ask_at(met.place, OPERATE, key, tls, "status", {}, _ANSWER_S).result.get("target")
        wanted = refilled(target, most, begun.room or 0) if isinstance(target, int) else 0
        if wanted:
            commands.ask_at(met.place, OPERATE, key, tls, "scale", {"workers": wanted}, _ANSWER_S)


def refilled(target: int, most: int, room: int) -> int:
    """Number of workers to ask for when a host with this much room joins (room 0: unlimited); 0: ask for nothing."""
    wanted = min(most, target + room) if room else most
    return wanted if wanted > target else 0


def _check_name(name: str) -> None:
    try:
        good = 0 < len(name.encode()) <= _MOST_NAME_BYTES and name.isprintable()
    except UnicodeEncodeError:
        good = False
    if not good:
        came = ascii(name[:40])
        raise ConfigError(f"--host-name: expected 1 to {_MOST_NAME_BYTES} bytes of printable UTF-8, got {came}")


def place(rank: int | None, size: int | None, address: str | None, port: int | None, listen: str | None) -> str:
    """Address where hosts meet that are started one by one with a rank each, as "address:port".

    Raises: ConfigError that names a missing or unfit option.
    """
    given = {"--rank": rank, "--world-size": size, "--master-addr": address, "--master-port": port}
    missing = [name for name, value in given.items() if value is None]
    if missing or rank is None or size is None:
        raise ConfigError(f"expected {', '.join(given)} together, got none for {', '.join(missing)}")
    if listen is not None:
        raise ConfigError("--listen: expected none with --rank, as host 0 listens on --master-addr")
    if rank >= size:
        raise ConfigError(f"--rank: expected 0 to {size - 1} (--world-size {size}), got {rank}")
    if size > 1 and is_loopback(str(address)):
        raise ConfigError(f"--master-addr: expected an address that {size} hosts can reach, got {address} (loopback)")
    return at_port(canonical(str(address)), int(port or 0))


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


def says_itself(key: str) -> bool:
    """Whether each host sets this config key for itself."""
    return key in _OWN_KEYS or key.startswith(_OWN_GROUPS)


def own_settings(settings: tuple[str, ...]) -> Config:
    """Config of the keys that this host sets for itself, beside the job's config.

    Raises: ConfigError for keys that only the job sets, or values that contradict each other.
    """
    for text in settings:
        if not says_itself(parse_set(text)[0]):
            own = ", ".join((*(f"{group}*" for group in _OWN_GROUPS), *_OWN_KEYS))
            raise ConfigError(f"--set: expected a key of {own}, got {text!r}: the job sets all other keys")
    return load_config(said_layers(None, settings))
