"""`everstep doctor`: checks, one after the other, whether this host could take part in the job.

It starts nothing and changes nothing of the job.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import click

from everstep.base.config import Config, load_config
from everstep.base.doors import PORTS_PER_WORKER, at_port, check_private, parse_ports
from everstep.base.errors import ConfigError, EverstepError, ProtocolError, TokenRefused
from everstep.base.etcd_address import SCHEMES
from everstep.cli.agent import own_settings
from everstep.cli.beside import parse_listen
from everstep.cli.doctor_task import Checked, bandwidth_check, etcd_latency, files_check, space_checks, task_checks
from everstep.cli.meeting import etcd_at
from everstep.cli.terminal import paragraph
from everstep.cli.tokens import given_token, token_in
from everstep.report.words import aligned
from everstep.runtime.host.devices import default_slots, device_count
from everstep.runtime.lead.etcd_access import taken_secrets
from everstep.runtime.lead.finding import in_etcd
from everstep.runtime.link.head_facts import FULL_PACKETS_BYTES, HeadFacts, ask_about, clock_words, refusal_words
from everstep.runtime.link.interfaces import found_at, interface_of, mtu_of, own_address, path_mtu
from everstep.runtime.link.listening import family_of
from everstep.runtime.start import Start
from everstep.runtime.versions import differences, task_digest, versions

_CONNECT_S = 5.0
_LEAST_MTU = 576
_MOST_BYTES = 65535
"""Largest IPv4 packet, even if an interface would take larger ones."""


@click.command()
@click.option(
    "--join",
    "address",
    metavar="ADDR:PORT|etcd[s]://...",
    required=True,
    help="Address of the job, or its control.etcd.",
)
@click.option("--address", "own", metavar="IP", help="Address of this host, as for the agent.")
@click.option("--slots", type=click.IntRange(1), help="Workers that this host would run.")
@click.option("--ports", "ports", metavar="FIRST-LAST", help="The job's network.ports.")
@click.option(
    "--token-file", type=click.Path(path_type=Path), help="As for everstep agent; without a token it checks less."
)
@click.option(
    "--run-dir", type=click.Path(path_type=Path), help="As for everstep agent: where free space is looked for."
)
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="As for everstep agent.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    address: str,
    own: str | None,
    slots: int | None,
    ports: str | None,
    token_file: Path | None,
    run_dir: Path | None,
    settings: tuple[str, ...],
    as_json: bool,
) -> int:
    """Check whether this host could take part in the job at ADDR:PORT, or in the job that etcd names.

    The command checks names, route, interface, ports, clocks, versions, packet sizes, free space and limits, and how
    fast etcd answers. With the token it also checks bandwidth, and the task's modules and data: it imports the task
    that the head names, and loads one batch (of a script, it compares the file). Exit code 1: something would stop this
    host."""
    known = None if address.startswith(SCHEMES) else parse_listen("--join", address)
    config = own_settings(settings)
    parse_ports(ports)
    token = given_token() if token_file is None else token_in(token_file)
    where, found = (known, []) if known is not None else find_in_etcd(address, config, token)
    if where is not None:
        found += examine(where, config, token, own, slots or default_slots(), ports, run_dir)
    wrong = [one for one in found if one.state == "wrong"]
    if as_json:
        print(json.dumps({"ok": not wrong, "findings": [vars(one) for one in found]}))
    else:
        for line in aligned([[one.state, one.name, one.text] for one in found]):
            print(paragraph(line, sys.stdout, "  "))
    return int(bool(wrong))


def examine(
    where: tuple[str, int],
    config: Config,
    token: bytes | None,
    given: str | None,
    slots: int,
    ports: str | None,
    run_dir: Path | None,
) -> Iterator[Checked]:
    """All findings, in an order in which each check needs the ones before it; impossible checks are left out.

    where: address of the job's head. given: this host's address, if the user gave it. ports: the job's network.ports.
    run_dir: where this host would keep its files, None: in a private directory.
    """
    named = _names(where[0])
    yield named
    yield _own_name()
    if named.state == "wrong":
        return
    own, route = _route(where[0], config, given)
    yield route
    yield _devices(slots)
    yield from space_checks(run_dir)
    yield files_check()
    if own is None:
        return
    yield _mtu(own, where[0])
    reached, heard = _reached(where), list[HeadFacts]()
    yield reached
    if reached.state != "wrong":
        yield from _asked(where, config, token, own, heard)
    yield _ports(own, slots, ports, heard[0].job.get("config") if heard else None)


def find_in_etcd(address: str, config: Config, token: bytes | None) -> tuple[tuple[str, int] | None, list[Checked]]:
    """Address of the job's head (None if unknown), and the findings on the way to it.

    Raises: ConfigError for an invalid address, or for files and variables that do not fit it.
    """
    etcd = etcd_at(Start(config, where=address, token=token or b"", secrets=taken_secrets()))
    with contextlib.closing(etcd):
        try:
            if token is None:
                etcd.reach()
                return None, [Checked("etcd", "warning", "it answers; give --token-file to check more")]
            if etcd.announced() is None:
                return None, [Checked("etcd", "wrong", f"no job has begun under {etcd.address}: is the prefix right?")]
            head, latency = in_etcd(etcd), etcd_latency(etcd)
        except (EverstepError, OSError) as error:
            return None, [Checked("etcd", "wrong", str(error))]
    if head is None:
        return None, [Checked("etcd", "warning", f"nobody holds the lease of the job under {etcd.address} now")]
    place = str(head["host"]), int(head["port"])
    return place, [Checked("etcd", "ok", f"holds the job; its head is at {at_port(*place)}"), latency]


def _names(host: str) -> Checked:
    try:
        found = found_at(host, 0)[0][1][0]
    except (OSError, UnicodeError) as error:
        why = (error.strerror if isinstance(error, OSError) else None) or error
        return Checked("name", "wrong", f"this host cannot resolve {host} ({why}): give its IP address")
    return Checked("name", "ok", str(found) if found == host else f"{host} is {found}")


def _own_name() -> Checked:
    name = os.uname().nodename
    try:
        found = found_at(name, 0)[0][1][0]
    except (OSError, UnicodeError):
        text = f"this host cannot resolve its own name, {name}: Everstep does not need that, torchrun does (/etc/hosts)"
        return Checked("own name", "warning", text)
    return Checked("own name", "ok", f"{name} is {found}; Everstep does not use it")


def _route(head: str, config: Config, given: str | None) -> tuple[str | None, Checked]:
    try:
        own = own_address(config.network, given, head)
        check_private("--address", own, trusted=config.network.trusted)
    except ConfigError as error:
        return None, Checked("route", "wrong", str(error))
    except OSError as error:
        text = f"there is no route to {head} ({error.strerror or error}): see 'ip route get {head}'"
        return None, Checked("route", "wrong", text)
    text = f"other hosts will use {own}, on {interface_of(own)}; NCCL will, too"
    return own, Checked("route", "ok", text)


def _devices(slots: int) -> Checked:
    devices = device_count()
    if not devices:
        return Checked("devices", "ok", f"no GPU: {slots} worker{'s' * (slots > 1)} here")
    if slots > devices:
        return Checked("devices", "warning", f"{slots} workers for {devices} devices: too many if the job uses them")
    return Checked("devices", "ok", f"{devices}, for {slots} worker{'s' * (slots > 1)}")


def _mtu(own: str, head: str) -> Checked:
    leaves, way = mtu_of(interface_of(own)), path_mtu(head)
    text = f"this host sends packets of {leaves} bytes; {way} bytes are known to reach {head}"
    low = 0 < min(leaves or way, way) < _LEAST_MTU
    return Checked("packets", "warning" if way < min(leaves, _MOST_BYTES) or low else "ok", text)


def _ports(own: str, slots: int, ports: str | None, job: Any) -> Checked:
    """Check `network.ports`. ports: as the user gave it; job: the job's config, None if it is not known."""
    config, told = Config(), isinstance(job, dict)
    with contextlib.suppress(ConfigError):  # of another release, which is reported elsewhere
        config = load_config([("the job", job)]) if told else config
    found = parse_ports(ports or config.network.ports)
    if found is None:
        return Checked("ports", "ok", "any (no network.ports)" if told else "not checked: --ports was not given")
    needed = slots * (PORTS_PER_WORKER + (config.cell.hosts > 1))
    beside = ["its agent", *(["the job's head, if it stands by"] if config.control.etcd else [])]
    most = needed + len(beside)
    free = len(list(islice((p for p in range(found.first, found.last + 1) if _is_free(own, p)), most)))
    text = f"{needed} ports in {found} are needed for {slots} worker{'s' * (slots > 1)}"
    if free < needed:
        return Checked("ports", "wrong", f"{text}, but only {free} are free at {own}: give a larger range")
    text += f", and, if this host has files of its own, one for {' and one for '.join(beside)}"
    if free < most:
        return Checked("ports", "warning", f"{text}; {free} are free at {own}")
    return Checked("ports", "ok", f"{text}; they are free at {own}")


def _is_free(own: str, port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_server((own, port), family=family_of(own)):
        return True
    return False


def _reached(where: tuple[str, int]) -> Checked:
    begin_s = time.monotonic()
    try:
        socket.create_connection(where, _CONNECT_S).close()
    except OSError as error:
        name, why = at_port(*where), (error.strerror or str(error)).lower()
        return Checked("head", "wrong", f"no head at {name} ({why}): start it, or open the firewall")
    return Checked("head", "ok", f"answers after {(time.monotonic() - begin_s) * 1e3:.1f} ms")


def _asked(
    where: tuple[str, int], config: Config, token: bytes | None, own: str, facts: list[HeadFacts]
) -> Iterator[Checked]:
    """Findings about the job. facts: gets the head's answer, if it answers."""
    if token is None:
        text = "none given (--token-file, EVERSTEP_TOKEN): clock, versions and full packets were not checked"
        yield Checked("token", "warning", text)
        return
    try:
        heard = ask_about(where, token, config.security.tls, own, job=True)
    except ProtocolError as error:
        yield Checked("token" if isinstance(error, TokenRefused) else "job", "wrong", refusal_words(error))
        return
    except (EverstepError, OSError) as error:
        yield Checked("job", "wrong", str(error))
        return
    facts.append(heard)
    yield Checked("token", "ok", "the head has the same")
    yield from _told(heard, config)
    yield _full_packets(where, config, token, own, heard)
    yield bandwidth_check(where, config, token, own)
    yield from task_checks(heard)


def _told(heard: HeadFacts, config: Config) -> Iterator[Checked]:
    words = clock_words(heard)
    near = f"within {abs(heard.ahead_s) + heard.rtt_s / 2:.3f} s of the head's"
    yield Checked("clock", "warning" if words else "ok", words or near)
    here = {**versions(), "task file": task_digest(str(heard.job.get("task", "")))}
    differing = differences(here, heard.versions)
    yield Checked("versions", "wrong" if differing else "ok", "; ".join(differing) or "as on the head's host")


def _full_packets(where: tuple[str, int], config: Config, token: bytes, own: str, heard: HeadFacts) -> Checked:
    """Check full packets: they get lost, and small ones pass, if a tunnel is narrower than both ends believe."""
    leaves = mtu_of(interface_of(own))
    try:
        ask_about(where, token, config.security.tls, own, padding=FULL_PACKETS_BYTES)
    except (EverstepError, OSError) as error:
        text = f"packets of full size get lost on the way ({error}): lower the interface's mtu, {leaves} now"
        return Checked("full packets", "wrong", text)
    if heard.mtu and leaves and heard.mtu != leaves:
        text = f"the head's interface sends {heard.mtu} bytes at once, this one's {leaves}; both get through"
        return Checked("full packets", "warning", text)
    return Checked("full packets", "ok", "get through both ways")
