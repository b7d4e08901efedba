"""What an agent can do to its host's packets, on purpose: lose them, delay them, let fewer through. Linux, root, tc.

Nothing but iproute2 is needed. Packets are lost by a filter of classic BPF that says so itself (clsact, direct action),
so that neither nftables nor tc's actions have to be there. What is done here is undone by a process of its own, which
outlives the agent.

Source: Linux, tc-bpf(8) for direct action; include/uapi/linux/filter.h for the offsets (network header, random).
"""

from __future__ import annotations

import ipaddress
import os
import shlex
import shutil
import subprocess
from collections.abc import Iterable, Sequence

from everstep.base.doors import is_loopback
from everstep.base.errors import ConfigError
from everstep.protocol.messages import StrikeNow
from everstep.runtime.interfaces import interface_of
from everstep.runtime.process import OUTLIVES_WORKERS

_NET, _RANDOM = 0xFFF00000, 0xFFFFF038
_SOURCE_AT, _TARGET_AT = 12, 16
_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_PASS, _DROP, _NO, _YES = 0xFFFFFFFF, 2, 0, 0xFFFFFFFF
_HANDLE = "e57:"
_LIMIT_S = 10.0
_MOST_PREF = 30000
_MOST_MBIT = 10_000.0
Words = list[str]


def lacking(means: Iterable[str]) -> str:
    """What this host cannot do of this (`base.strikes.MEANS`), in one line; "" if all is possible. Tried on a pair of
    interfaces that is made for it."""
    wanted = sorted(set(means) - {""})
    if not wanted:
        return ""
    if os.geteuid() != 0:
        return "only root can harm the links of a host"
    if shutil.which("tc") is None or shutil.which("ip") is None:
        return "ip and tc (iproute2) are needed to harm the links of a host"
    name = f"evs{os.getpid()}"
    try:
        _run(["ip", "link", "add", name, "type", "veth", "peer", "name", f"{name}p"])
        for mean in wanted:
            for command in _trial(mean, name):
                _run(command)
    except ConfigError as error:
        return f"this kernel cannot harm links in that way: {error}"
    finally:
        subprocess.run(["ip", "link", "del", name], capture_output=True, check=False)
    return ""


def _trial(mean: str, interface: str) -> list[Words]:
    if mean == "drop":
        return drops(interface, 1, "192.0.2.1", one_way=False, share=0.5)
    return shapes(interface, "192.0.2.1", by_s=0.001 if mean == "delay" else 0.0, mbit=10.0)


def harm(message: StrikeNow, own: str) -> None:
    """Do it to the interface of this host's address, and have it undone when its time is over.

    Raises: ConfigError if it cannot be done here.
    """
    interface = interface_of(own)
    if not interface or is_loopback(own):
        raise ConfigError(f"expected a link to other hosts, got {own} on {interface or 'no interface'}")
    pref = 1 + message.number % _MOST_PREF
    if message.kind in ("slow", "narrow"):
        undo = [["tc", "qdisc", "del", "dev", interface, "root"]]
        done = shapes(interface, message.peer, by_s=message.by_s, mbit=message.mbit)
    else:
        sides = ("egress",) if message.kind == "oneway" else ("egress", "ingress")
        undo = [["tc", "filter", "del", "dev", interface, side, "pref", str(pref)] for side in sides]
        share = message.share if message.kind == "drop" else 1.0
        done = drops(interface, pref, message.peer, one_way=message.kind == "oneway", share=share)
    _undo_after(message.for_s, undo, interface)
    for command in done:
        _run(command)


def drops(interface: str, pref: int, peer: str, *, one_way: bool, share: float) -> list[Words]:
    """What loses packets to and from this peer ("": to and from anybody), or with `one_way` only those that leave."""
    sides = [("egress", _TARGET_AT)] + ([] if one_way else [("ingress", _SOURCE_AT)])
    commands = [["tc", "qdisc", "add", "dev", interface, "clsact"]]
    for side, at in sides:
        words = ["protocol", "ip" if peer else "all", "pref", str(pref), "bpf", "da", "bytecode"]
        code = _code(at, peer, _DROP, _PASS, share)
        commands.append(["tc", "filter", "add", "dev", interface, side, *words, code])
    return commands


def shapes(interface: str, peer: str, *, by_s: float, mbit: float) -> list[Words]:
    """What delays packets to this peer ("": to anybody), and lets no more than so many Mbit/s of them leave."""
    tc, own = ["tc"], f"{_HANDLE}1"
    everybody = [] if peer else ["default", "1"]
    rate = f"{mbit or _MOST_MBIT:g}mbit"
    commands = [
        [*tc, "qdisc", "add", "dev", interface, "root", "handle", _HANDLE, "htb", *everybody],
        [*tc, "class", "add", "dev", interface, "parent", _HANDLE, "classid", own, "htb", "rate", rate],
    ]
    if by_s:
        delay = ["netem", "delay", f"{by_s * 1000:g}ms"]
        commands.append([*tc, "qdisc", "add", "dev", interface, "parent", own, *delay])
    if peer:
        words = ["protocol", "ip", "pref", "1", "bpf", "bytecode", _code(_TARGET_AT, peer, _YES, _NO), "flowid", own]
        commands.append([*tc, "filter", "add", "dev", interface, "parent", _HANDLE, *words])
    return commands


def _code(at: int, peer: str, yes: int, no: int, share: float = 1.0) -> str:
    """Classic BPF as tc reads it: `yes` for a share of the packets that have this address there, else `no`."""
    tests: list[tuple[int, int, bool]] = []  # load from, compare with, whether it has to be equal (else: less)
    if peer:
        tests.append((_NET + at, int(ipaddress.IPv4Address(peer)), True))
    if share < 1.0:
        tests.append((_RANDOM, int(share * 0xFFFFFFFF), False))
    code: list[tuple[int, int, int, int]] = []
    for k, (offset, value, equal) in enumerate(tests):
        to_no = 2 * (len(tests) - k) - 1  # over what is left of the tests, and the return of `yes`
        code.append((_LOAD, 0, 0, offset))
        code.append((_EQUAL, 0, to_no, value) if equal else (_AT_LEAST, to_no, 0, value))
    code += [(_RETURN, 0, 0, yes), (_RETURN, 0, 0, no)]
    return ",".join([str(len(code)), *(" ".join(map(str, one)) for one in code)])


def _run(command: Sequence[str]) -> None:
    """Raises: ConfigError with the command's last words."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"{command[0]}: {error}") from None
    known = "clsact" in command and "Exclusivity" in done.stderr  # it is there already
    if done.returncode and not known:
        words = " ".join(done.stderr.split())[:200] or f"exit code {done.returncode}"
        raise ConfigError(f"'{shlex.join(command[:7])} ...': {words}")


def _undo_after(for_s: float, undo: Sequence[Words], interface: str) -> None:
    """Where nothing is left of the filters, the place that they were in goes, too."""
    filters = f"tc filter show dev {interface} egress; tc filter show dev {interface} ingress"
    last = f'[ -n "$({filters})" ] || tc qdisc del dev {interface} clsact'
    script = "; ".join([f"sleep {for_s:.3f}", *(shlex.join(command) for command in undo), last])
    command = [OUTLIVES_WORKERS, "-c", f"({script}) </dev/null >/dev/null 2>&1 &"]
    subprocess.run(command, executable="/bin/sh", start_new_session=True, check=True)
