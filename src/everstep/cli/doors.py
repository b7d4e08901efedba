"""Ways to join a job, from its command line and config: listening address, announced address, and port."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from typing import Any

from everstep.base.config import Config, default_workers
from everstep.base.doors import check_ports
from everstep.base.errors import ConfigError
from everstep.cli.beside import parse_listen
from everstep.runtime.host.devices import default_slots
from everstep.runtime.link.interfaces import address_on, check_own, interface_of

EVERYWHERE = ("0.0.0.0", "::")


def head_doors(
    listen: str | None,
    told: str | None,
    given: Mapping[str, Any],
    *,
    local: bool,
    slots: int | None = None,
    world_size: int | None = None,
) -> tuple[dict[str, Any], int | None]:
    """Config keys that follow from the options for joining a job, and the port for agents, None if none may join.

    listen: of `--listen`, where an interface may stand for its address. told: of `--address`. given: config keys that
    are set, by dotted key. local: this host has workers, too. slots: the number of those, None for one per device.
    world_size: number of hosts that take part, None if unknown.

    Returns the keys and the port.

    Raises: ConfigError for an address that is not this host's, or that others could not reach.
    """
    interface = given.get("network.interface")
    if listen is None:
        if not local:
            raise ConfigError("--no-local-workers: expected --listen ADDR:PORT with it, so that agents can join")
        if told is not None:
            raise ConfigError("--address: expected --listen 0.0.0.0:PORT with it, got none: drop --address")
        if slots is not None:
            raise ConfigError(
                "--slots: expected --listen ADDR:PORT or --rank with it, got neither: use --workers instead"
            )
        own = interface is not None and "network.address" not in given
        return ({"network.address": address_on(interface)} if own and interface is not None else {}), None
    host, port = parse_listen("--listen", listen)
    hosts = None if world_size is None else max(1, world_size - (not local))
    all_hosts = {} if hosts is None else _for_all_hosts(given, hosts, slots)
    if host in EVERYWHERE:
        if told is None:
            raise ConfigError(
                f"--listen: expected --address IP with {host}, because other hosts need an address to connect to: give "
                "one of 'ip addr'"
            )
        told = check_own("--address", told)
        return {"network.listen": host, "network.address": told, **all_hosts}, port
    if told not in (None, host):
        raise ConfigError(f"--address: expected it only with --listen 0.0.0.0:PORT, got {told} with {host}: drop it")
    host = host if _is_address(host) else address_on(host, "--listen")
    if interface is not None and interface_of(host) != interface:
        raise ConfigError(
            f"--listen: expected an address of the interface {interface} (network.interface), got {host}: "
            f"give {address_on(interface)}"
        )
    return {"network.address": host, **all_hosts}, port


def slots_here(given: Mapping[str, Any], world_size: int | None) -> int:
    """Default number of workers on this host: one per device, or one; more if the expected hosts would otherwise have
    too few. given: config keys that are set, by dotted key. world_size: number of hosts that take part, None if
    unknown."""
    hosts = world_size or given.get("hosts.min")
    if hosts is None:
        return default_slots()
    workers = given.get("workers") or default_workers(given) or 1
    return max(default_slots(), -(-workers // hosts))


def _for_all_hosts(given: Mapping[str, Any], hosts: int, slots: int | None) -> dict[str, Any]:
    """Config keys that follow from `--world-size` unless set: the job waits for all hosts with workers, and each has
    work. given: config keys that are set, by dotted key. slots: workers of each host, None for one per device."""
    found: dict[str, Any] = {} if "hosts.min" in given else {"hosts.min": hosts}
    if "workers" not in given and default_workers(given) is None:
        found["workers"] = hosts * (slots or default_slots())
    return found


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def check_own_ports(config: Config, room: int | None, *, head: bool = False, agent: bool = False) -> None:
    """Check that `network.ports` suffice. room: most workers that this host runs, 0 for as many as there are, None for
    none. head, agent: the job's head here takes one of them, too; this host's agent does, if it has workers.

    Raises: ConfigError if `network.ports` has too few ports for them.
    """
    workers = config.workers + config.spares
    beside = [*(["its agent"] if agent and room is not None else []), *(["the job's head"] if head else [])]
    most = 1 if room is None else min(room or workers, workers)
    check_ports(config.network.ports, most, beside, spans=config.cell.hosts > 1)
