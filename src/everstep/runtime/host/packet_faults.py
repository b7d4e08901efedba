"""Scripted faults of a host's packets: an agent loses them, delays them, or lets fewer through. Linux, root, tc.

Losing packets takes only iproute2: a filter of classic BPF decides itself (clsact, direct action), so that neither
nftables nor tc's actions have to be there. To delay packets, the same kind of filter redirects them (act_mirred) into a
TAP interface, and a process sends them on later (`chaos/packet_delay.py`). Every fault is undone, whatever becomes of
the agent (`undoing.py`).

Source: Linux, tc-bpf(8) for direct action; include/uapi/linux/filter.h for the offsets (network header, mark, random).
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import re
import shlex
import shutil
import struct
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from everstep.base.doors import is_loopback
from everstep.base.errors import ConfigError
from everstep.base.readable import readable
from everstep.protocol.messages import StrikeNow
from everstep.runtime.host.undoing import Undone, Words
from everstep.runtime.link.interfaces import interface_of, mtu_of
from everstep.runtime.process import lasting_command

MARK = 0x65767374
"""Mark of delayed packets; other programs are unlikely to use it."""
_DELAYER = "everstep.chaos.packet_delay"
_QUEUE_PACKETS = 10_000  # so many may wait in the interface while the process is busy
_TUN = "/dev/net/tun"
_TUNSETIFF, _TAP, _NO_INFO = 0x400454CA, 2, 0x1000
_NAME_BYTES = 16
_MOST_WORDS_BYTES = 300

_NET, _MARK, _RANDOM = 0xFFF00000, 0xFFFFF014, 0xFFFFF038
_SOURCE_AT, _TARGET_AT = {4: 12, 6: 8}, {4: 16, 6: 24}  # in the header, by IP's version
_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_PASS, _DROP, _NO, _YES = 0xFFFFFFFF, 2, 0, 0xFFFFFFFF
_HANDLE = "e57:"
_LIMIT_S = 10.0
_MOST_PREF = 30000
_NOBODY = "192.0.2.1"
_ASTRAY = re.compile(
    rf"^filter [^\n]* pref (\d{{1,5}}) bpf [^\n]*bytecode '[^\n]* {MARK},[^\n]*\n"
    r"\s*action order 1: mirred \(Egress Redirect to device \*\)",
    re.MULTILINE,
)


class Detour:
    """Interface for packets on their way through a process. It exists from now on, down, until the process ends.

    name: chosen by the kernel.

    Raises: ConfigError if it cannot be made here.
    """

    def __init__(self) -> None:
        try:
            self._end = os.fdopen(os.open(_TUN, os.O_RDWR | os.O_NONBLOCK), "r+b", buffering=0)
            answer = fcntl.ioctl(self._end, _TUNSETIFF, struct.pack(f"{_NAME_BYTES}sH22x", b"evs%d", _TAP | _NO_INFO))
        except OSError as error:
            raise ConfigError(f"{_TUN}: {error.strerror or error}") from None
        self.name = answer[:_NAME_BYTES].split(b"\0")[0].decode()

    def start(self, interface: str, by_s: float) -> subprocess.Popen[bytes]:
        """Start the process, which keeps each packet for `by_s` and sends it out by `interface`; returns when it is
        ready.

        Raises: ConfigError with the process's words if it fails.
        """
        command = lasting_command(_DELAYER, interface, self.name, repr(by_s), str(MARK))
        with self._end as end:
            process = subprocess.Popen(
                command, stdin=end, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
            )
        words = ""
        if process.stdout is not None:
            with process.stdout as said:
                if readable([said.fileno()], _LIMIT_S):
                    words = said.readline(_MOST_WORDS_BYTES).decode(errors="replace").strip()
        if words != self.name:
            process.kill()
            process.wait()
            raise ConfigError(words or "the process that delays packets did not begin")
        return process


def lacking(means: Iterable[str]) -> str:
    """Means (`base.strikes.MEANS`) that this host lacks, in one line; "" if all work. They are tried on a pair of
    interfaces made for it."""
    wanted = sorted(set(means) - {""})
    if not wanted:
        return ""
    if os.geteuid() != 0:
        return "only root can inject faults into links"
    if shutil.which("tc") is None or shutil.which("ip") is None:
        return "faults of links need ip and tc (iproute2)"
    name = f"evt{os.getpid()}"
    try:
        _run(["ip", "link", "add", name, "type", "veth", "peer", "name", f"{name}p"])
        for mean in wanted:
            _try(mean, name)
    except ConfigError as error:
        return f"this host cannot inject this fault into links: {error}"
    finally:
        subprocess.run(["ip", "link", "del", name], capture_output=True, check=False)
    return ""


def _try(mean: str, interface: str) -> None:
    detour = Detour() if mean == "delay" else None
    process = detour.start(interface, 0.0) if detour is not None else None
    try:
        if detour is not None:
            commands = delays(interface, 1, _NOBODY, detour.name, mtu_of(interface))
        elif mean == "drop":
            commands = drops(interface, 1, _NOBODY, one_way=False, share=0.5)
        else:
            commands = narrows(interface, _NOBODY, mbit=10.0)
        for command in commands:
            _run(command)
    finally:
        if process is not None:
            process.kill()
            process.wait()


def harm(message: StrikeNow, own: str) -> Undone:
    """Carry out a fault on the interface of this host's address, and have it undone when its time is over, or sooner.

    Raises: ConfigError if this host cannot do it.
    """
    interface = interface_of(own)
    if not interface or is_loopback(own):
        raise ConfigError(f"expected a link to other hosts, got {own or 'no address'} on {interface or 'no interface'}")
    pref = 1 + message.number % _MOST_PREF
    detour = Detour() if message.kind == "slow" else None
    if detour is not None:
        undo = [_gone(interface, "egress", pref), ["ip", "link", "del", "dev", detour.name]]
        done = delays(interface, pref, message.peer, detour.name, mtu_of(interface))
    elif message.kind == "narrow":
        undo = [["tc", "qdisc", "del", "dev", interface, "root"]]
        done = narrows(interface, message.peer, mbit=message.mbit)
    else:
        sides = ("egress",) if message.kind == "oneway" else ("egress", "ingress")
        undo = [_gone(interface, side, pref) for side in sides]
        share = message.share if message.kind == "drop" else 1.0
        done = drops(interface, pref, message.peer, one_way=message.kind == "oneway", share=share)
    undone = Undone(message.for_s, undo, _last(interface))
    try:
        if detour is not None:
            undone.needs(detour.start(interface, message.by_s))
        for command in done:
            _run(command)
        undone.begin()
    except (ConfigError, OSError):
        undone.close()
        raise
    return undone


def clear(own: str) -> None:
    """Remove filters that redirect packets to an interface that is gone, where the packets are lost. An agent that
    delayed packets may have been killed together with the process that would undo it, in a network that outlives
    processes: for example in a container that starts again."""
    interface = interface_of(own)
    if os.geteuid() != 0 or not interface or is_loopback(own) or shutil.which("tc") is None:
        return
    with contextlib.suppress(ConfigError):
        for pref in astray(_run(["tc", "filter", "show", "dev", interface, "egress"])):
            _run(_gone(interface, "egress", pref))


def astray(filters: str) -> list[int]:
    """Numbers (`pref`) of our own filters, in tc's list, that redirect to an interface that is gone."""
    return [int(found) for found in _ASTRAY.findall(filters)]


def _gone(interface: str, side: str, pref: int) -> Words:
    return ["tc", "filter", "del", "dev", interface, side, "pref", str(pref)]


def _last(interface: str) -> str:
    """Shell that removes the place of the filters (clsact) once no filter is left."""
    filters = f"tc filter show dev {interface} egress; tc filter show dev {interface} ingress"
    return f'[ -n "$({filters})" ] || tc qdisc del dev {interface} clsact'


def drops(interface: str, pref: int, peer: str, *, one_way: bool, share: float) -> list[Words]:
    """Commands that drop packets to and from this peer ("": to and from anybody), or with `one_way` only those to
    it."""
    sides = [("egress", _TARGET_AT)] + ([] if one_way else [("ingress", _SOURCE_AT)])
    commands = [_place(interface)]
    for side, at in sides:
        code = _code([*_address(at, peer), _share(share)], _DROP, _PASS)
        commands.append([*_filter(interface, side, pref, peer), "da", "bytecode", code])
    return commands


def delays(interface: str, pref: int, peer: str, detour: str, mtu: int) -> list[Words]:
    """Commands that send packets to this peer ("": anybody) through a detour, once. mtu: of the interface, in bytes."""
    size = ["mtu", str(mtu), "txqueuelen", str(_QUEUE_PACKETS)]
    code = _code([_unmarked(), *_address(_TARGET_AT, peer)], _YES, _NO)
    there = ["action", "mirred", "egress", "redirect", "dev", detour]
    return [
        ["ip", "link", "set", "dev", detour, *size, "up"],
        _place(interface),
        [*_filter(interface, "egress", pref, peer), "bytecode", code, *there],
    ]


def narrows(interface: str, peer: str, *, mbit: float) -> list[Words]:
    """Commands that limit packets to this peer ("": to anybody) to so many Mbit/s."""
    own, everybody = f"{_HANDLE}1", [] if peer else ["default", "1"]
    words = ["tc", "class", "add", "dev", interface, "parent", _HANDLE, "classid", own]
    commands = [
        ["tc", "qdisc", "add", "dev", interface, "root", "handle", _HANDLE, "htb", *everybody],
        [*words, "htb", "rate", f"{mbit:g}mbit"],
    ]
    if peer:
        code = _code(_address(_TARGET_AT, peer), _YES, _NO)
        words = ["tc", "filter", "add", "dev", interface, "parent", _HANDLE, "protocol", _protocol(peer)]
        commands.append([*words, "pref", "1", "bpf", "bytecode", code, "flowid", own])
    return commands


def _place(interface: str) -> Words:
    return ["tc", "qdisc", "add", "dev", interface, "clsact"]


def _filter(interface: str, side: str, pref: int, peer: str) -> Words:
    words = ["protocol", _protocol(peer) if peer else "all", "pref", str(pref), "bpf"]
    return ["tc", "filter", "add", "dev", interface, side, *words]


@dataclass(frozen=True)
class _Test:
    """Test of a packet: the word at that offset compares so with `value`, or, if not `wanted`, does not."""

    at: int
    how: int
    value: int
    wanted: bool


def _address(at: Mapping[int, int], peer: str) -> list[_Test]:
    """Tests of a packet's address, one per word; none for any peer. Raises: ConfigError if a text is no address."""
    if not peer:
        return []
    found = _read_address(peer)
    words = struct.unpack(f"!{len(found.packed) // 4}I", found.packed)
    return [_Test(_NET + at[found.version] + 4 * k, _EQUAL, word, wanted=True) for k, word in enumerate(words)]


def _protocol(peer: str) -> str:
    return "ipv6" if _read_address(peer).version == 6 else "ip"


def _read_address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        raise ConfigError(f"expected the address of another host, got {text!r}") from None


def _share(share: float) -> _Test | None:
    return _Test(_RANDOM, _AT_LEAST, int(share * 0xFFFFFFFF), wanted=False) if share < 1.0 else None


def _unmarked() -> _Test:
    return _Test(_MARK, _EQUAL, MARK, wanted=False)


def _code(tests: Iterable[_Test | None], yes: int, no: int) -> str:
    """Classic BPF in tc's form: `yes` for packets that pass all of these tests, else `no`."""
    given = [test for test in tests if test is not None]
    code: list[tuple[int, int, int, int]] = []
    for k, test in enumerate(given):
        to_no = 2 * (len(given) - k) - 1  # over the rest of the tests, and the return of `yes`
        code.append((_LOAD, 0, 0, test.at))
        code.append((test.how, 0, to_no, test.value) if test.wanted else (test.how, to_no, 0, test.value))
    code += [(_RETURN, 0, 0, yes), (_RETURN, 0, 0, no)]
    return ",".join([str(len(code)), *(" ".join(map(str, one)) for one in code)])


def _run(command: Sequence[str]) -> str:
    """Run a command; returns its output. Raises: ConfigError with its last words."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"{command[0]}: {error}") from None
    known = "clsact" in command and "Exclusivity" in done.stderr  # it is there already
    if done.returncode and not known:
        words = " ".join(done.stderr.split())[:200] or f"exit code {done.returncode}"
        raise ConfigError(f"'{shlex.join(command[:7])} ...': {words}")
    return done.stdout
