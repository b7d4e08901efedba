"""Hosts as network namespaces on one bridge, each with processes, a host name and a /dev/shm of its own.

Needs root and Linux. The bridge is in a namespace too, so that nothing here can be reached from this machine's own
interfaces, nor the other way.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

_CLONE_NEWNET = 0x40000000
BOGUS = "02:00:00:00:00:ff"
HIDE = "EVERSTEP_TEST_HIDE"
"""Names a directory that a host is not to see: nothing in it can be opened or made."""
_INSIDE = (
    'hostname "$0" && mount -t tmpfs tmpfs /dev/shm && '
    f'{{ [ -z "${HIDE}" ] || mount -t tmpfs -o ro tmpfs "${HIDE}"; }} && exec "$@"'
)


def why_not() -> str:
    """Why there can be no such hosts here; "" if there can."""
    if os.geteuid() != 0:
        return "hosts as network namespaces need root"
    if shutil.which("ip") is None or shutil.which("unshare") is None:
        return "hosts as network namespaces need ip and unshare"
    name = f"evt{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode:
        return f"no network namespace can be made here: {made.stderr.strip()}"
    inside = subprocess.run(["ip", "netns", "exec", name, *_apart("t"), "true"], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return f"no process can have namespaces of its own: {inside.stderr.strip()}" if inside.returncode else ""


def _apart(name: str) -> list[str]:
    """What starts a command whose end is that of all that it has started."""
    return ["unshare", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c", _INSIDE, name]


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr}"


def _enter(namespace: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.setns(namespace, _CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())


class Host:
    """One of `Net`'s. Of what it runs all is ended at once by `kill`."""

    def __init__(self, net: Net, number: int) -> None:
        self.number = number
        self.name = f"host{number}"
        self.address = f"{net.prefix}{number}"
        self.namespace = f"{net.name}h{number}"
        self._path = f"/run/netns/{self.namespace}"
        self._net = net
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(
        self, command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Start a command, as if the host had just booted for it."""
        words = ["ip", "netns", "exec", self.namespace, *_apart(self.name), *command]
        with open(log, "ab") as out:
            process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(environment or {})},
                start_new_session=True,
            )
        self._processes.append(process)
        return process

    def run(self, *command: str, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
        """Run a command on this host, which sees all processes."""
        words = ["ip", "netns", "exec", self.namespace, *command]
        return subprocess.run(words, capture_output=True, text=True, timeout=timeout_s)

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Meanwhile this thread is on this host's network: what it opens and starts belongs there."""
        home, there = os.open("/proc/thread-self/ns/net", os.O_RDONLY), os.open(self._path, os.O_RDONLY)
        try:
            _enter(there)
            yield
        finally:
            _enter(home)
            os.close(home)
            os.close(there)

    def pids(self) -> list[int]:
        """Of all its processes, as this machine calls them."""
        found = subprocess.run(["ip", "netns", "pids", self.namespace], capture_output=True, text=True)
        return [int(pid) for pid in found.stdout.split()]

    def kill(self) -> None:
        """SIGKILL to all its processes; the kernel still ends their connections."""
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGKILL)
            process.wait()
        self._processes.clear()
        subprocess.run(
            f"ip netns pids {self.namespace} | xargs -r kill -9", shell=True, stdout=subprocess.DEVNULL, check=False
        )

    def crash(self) -> None:
        """What a power cut looks like to others: nothing is heard of it any more, not even the end of a connection."""
        self.cut()
        self.kill()

    def cut(self) -> None:
        """Its link is down: no packet passes."""
        _ip("-n", self._net.switch, "link", "set", f"v{self.number}", "down")

    def heal(self) -> None:
        """Its link is up again."""
        _ip("-n", self._net.switch, "link", "set", f"v{self.number}", "up")

    def second(self) -> str:
        """Another address of it, for a service that can be cut off alone."""
        address = f"{self._net.prefix}{100 + self.number}"
        _ip("-n", self.namespace, "addr", "add", f"{address}/24", "dev", "eth0")
        return address

    def drop_to(self, other: Host | str) -> None:
        """What it sends to the other, or to this address, vanishes; the other way it goes on."""
        address = other if isinstance(other, str) else other.address
        neighbour = ("neigh", "replace", address, "lladdr", BOGUS, "nud", "permanent", "dev", "eth0")
        _ip("-n", self.namespace, *neighbour)

    def undrop_to(self, other: Host | str) -> None:
        """What it sends there arrives again."""
        address = other if isinstance(other, str) else other.address
        _ip("-n", self.namespace, "neigh", "del", address, "dev", "eth0")


class Net:
    """Hosts 10.77.0.1, .2, ... on one bridge, or fd00:77::1, ... alone (six); all is removed in the end."""

    def __init__(self, hosts: int, name: str = "", *, six: bool = False) -> None:
        self.prefix = "fd00:77::" if six else "10.77.0."
        self.name = name or f"ev{os.getpid()}"
        self.switch = f"{self.name}sw"
        self.hosts = [Host(self, number) for number in range(1, hosts + 1)]
        _ip("netns", "add", self.switch)
        _ip("-n", self.switch, "link", "add", "br0", "type", "bridge")
        _ip("-n", self.switch, "link", "set", "br0", "up")
        for host in self.hosts:
            end = f"v{host.number}"
            _ip("netns", "add", host.namespace)
            pair = ("link", "add", end, "netns", self.switch, "type", "veth", "peer", "name", "eth0")
            _ip(*pair, "netns", host.namespace)
            _ip("-n", self.switch, "link", "set", end, "master", "br0", "up")
            _ip("-n", host.namespace, "link", "set", "lo", "up")
            _ip("-n", host.namespace, "link", "set", "eth0", "up")
            at = [f"{host.address}/64", "nodad"] if six else [f"{host.address}/24"]
            _ip("-n", host.namespace, "addr", "add", *at, "dev", "eth0")

    def close(self) -> None:
        """End everything, and remove it. A second time does nothing."""
        hosts, self.hosts = self.hosts, []
        for host in hosts:
            host.kill()
            subprocess.run(["ip", "netns", "del", host.namespace], capture_output=True)
        subprocess.run(["ip", "netns", "del", self.switch], capture_output=True)
