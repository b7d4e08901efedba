"""`everstep hosts | ports`: the hosts of a job, and the free ports of this host."""

from __future__ import annotations

import contextlib
import json
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from everstep.base.doors import at_port
from everstep.base.errors import ConfigError
from everstep.cli.beside import parse_listen
from everstep.cli.main import complain
from everstep.cli.running import listed_hosts
from everstep.cli.terminal import paragraph
from everstep.report.words import aligned

_CONNECT_S = 3.0


@click.command()
@click.argument("run_dir", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list with an object per host.")
def hosts(run_dir: Path, as_json: bool) -> int:
    """List the hosts of the running job in DIR, with the state of each."""
    found = listed_hosts(run_dir)
    if as_json:
        print(json.dumps(found))
        return 0
    rows = [["host", "role", "address", "state", "slots", "workers", "rtt", "domains"]]
    for host in found:
        ids = ", ".join(str(i) for i in host["workers"])
        workers = f"{len(host['workers'])} ({ids})" if ids else "0"
        room = "any" if host["slots"] is None else str(host["slots"])
        labels = ",".join(f"{kind}={name}" for kind, name in host["domains"].items() if kind != "host")
        rtt = f"{host['rtt_ms']:.1f} ms" if host["rtt_ms"] else "-"
        role = "head" if host["is_head"] else "agent"
        rows.append([host["name"], role, host["address"] or "-", host["state"], room, workers, rtt, labels or "-"])
    for line in aligned(rows):
        print(paragraph(line, sys.stdout, "  "))
    return 0


@click.command()
@click.option("--start", type=click.IntRange(1, 65535), default=29500, show_default=True, help="First port to try.")
@click.option("--end", type=click.IntRange(1, 65535), default=65535, show_default=True, help="Last port to try.")
@click.option("--count", type=click.IntRange(1), default=1, show_default=True, help="Ports to print.")
@click.option("--check", is_flag=True, help="Check whether each HOST:PORT answers instead.")
@click.argument("others", nargs=-1, metavar="[HOST:PORT]...")
def ports(start: int, end: int, count: int, check: bool, others: tuple[str, ...]) -> int:
    """Print free ports of this host, separated by commas. Exit code 1: there are too few.

    With --check HOST:PORT...: print which of them answer. Exit code 1: one does not.
    """
    if check != bool(others):
        raise ConfigError("--check: expected it together with HOST:PORT..., as in --check 10.0.0.1:29400")
    if others:
        return _check([parse_listen("--check", text) for text in others])
    if start > end:
        raise ConfigError(f"--start: expected at most --end ({end}), got {start}")
    found = free_ports(start, end, count)
    if len(found) < count:
        complain(f"{len(found)} of {count} ports from {start} to {end} are free: give a larger range")
        return 1
    print(",".join(map(str, found)))
    return 0


def _check(others: Sequence[tuple[str, int]]) -> int:
    answers = [_reach(host, port) for host, port in others]
    rows = [[at_port(host, port), words or "answers"] for (host, port), words in zip(others, answers, strict=True)]
    for line in aligned(rows):
        print(line)
    return int(any(answers))


def _reach(host: str, port: int) -> str:
    """Reason why the address cannot be reached, "" if it can."""
    try:
        socket.create_connection((host, port), _CONNECT_S).close()
    except TimeoutError:
        return f"no answer within {_CONNECT_S:g} s: a firewall, or no such host"
    except (OSError, UnicodeError, OverflowError) as error:
        said = (error.strerror if isinstance(error, OSError) else None) or str(error)
        return said.lower()
    return ""


def free_ports(start: int, end: int, count: int) -> list[int]:
    """Up to `count` ports, ascending, at which a program could listen now at any address of this host."""
    found: list[int] = []
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    for port in range(start, end + 1):
        if len(found) == count:
            break
        with contextlib.suppress(OSError), socket.socket(family) as sock:
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)  # of both kinds at once
            sock.bind(("", port))
            found.append(port)
    return found
