"""A real etcd of some members for tests: on loopback, or each on a host of its own."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import ssl
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from certificates import own_ca

if TYPE_CHECKING:
    from net import Host

Start = Callable[[int, Sequence[str], Path], "subprocess.Popen[bytes]"]
LIMIT_S = 60.0


def etcd_there() -> None:
    """Skips with the reason where there is no etcd."""
    if shutil.which("etcd") is None:
        pytest.skip("etcd is not installed: tests/install_etcd.sh installs it where it can")


def free_ports(count: int) -> list[int]:
    """Of loopback."""
    with contextlib.ExitStack() as held:
        socks = [held.enter_context(socket.socket()) for _ in range(count)]
        for sock in socks:
            sock.bind(("127.0.0.1", 0))
        return [int(sock.getsockname()[1]) for sock in socks]


def _spawn(number: int, command: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    with open(log, "ab") as out:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True)


class EtcdMembers:
    """Members 0, 1, ... of one etcd, started; `close` ends them and removes what they kept.

    A dead leader is replaced within a second. addresses: as "host:port", for clients.
    """

    def __init__(
        self, hosts: Sequence[str] = ("127.0.0.1",) * 3, spawn: Start = _spawn, ca_seed: bytes | None = None
    ) -> None:
        """ca_seed: of the CA of their certificates, and of those that they want of clients; None: no TLS."""
        self._folder = Path(tempfile.mkdtemp(prefix="etcd-members-", dir="/dev/shm"))
        self._spawn = spawn
        ports = free_ports(2 * len(hosts))
        self.addresses = [f"{host}:{ports[2 * i]}" for i, host in enumerate(hosts)]
        self._peers = [f"http://{host}:{ports[2 * i + 1]}" for i, host in enumerate(hosts)]
        self._processes: list[subprocess.Popen[bytes] | None] = [None] * len(hosts)
        self.secured = ca_seed is not None
        self._certificates = Path(tempfile.mkdtemp(prefix="everstep-etcd-")) if self.secured else self._folder
        for number, host in enumerate(hosts if ca_seed is not None else ()):
            self._show(f"m{number}", host, ca_seed or b"", "member")
        if self.secured:
            self._show("client", hosts[0], ca_seed or b"", "")
        for number in range(len(hosts)):
            self.start(number)

    def url(self, prefix: str = "/jobs/test") -> str:
        """For `control.etcd`."""
        return f"{'etcds' if self.secured else 'etcd'}://{','.join(self.addresses)}{prefix}"

    def _show(self, who: str, host: str, seed: bytes, name: str) -> None:
        made = own_ca(host, seed=seed, name=name)
        for kind, text in (("cert", made.cert), ("key", made.key), ("ca", made.ca)):
            path = self.file(who, kind)
            path.touch(mode=0o600)
            path.write_text(text)

    def file(self, who: str, kind: str) -> Path:
        """The "cert", "key" or "ca" of "m0", "m1", ... or of the "client"."""
        return self._certificates / f"{who}.{kind}.pem"  # hosts have each their own /dev/shm

    def files(self, who: str = "client") -> dict[str, str]:
        """What hosts find them by in their environment."""
        return {f"EVERSTEP_ETCD_{kind.upper()}": str(self.file(who, kind)) for kind in ("ca", "cert", "key")}

    def start(self, number: int) -> None:
        """Start a member, or start it again."""
        cluster = ",".join(f"m{i}={peer}" for i, peer in enumerate(self._peers))
        client = f"{'https' if self.secured else 'http'}://{self.addresses[number]}"
        command = ["etcd", "--name", f"m{number}", "--data-dir", str(self._folder / f"m{number}")]
        command += ["--listen-client-urls", client, "--advertise-client-urls", client]
        command += ["--listen-peer-urls", self._peers[number], "--initial-advertise-peer-urls", self._peers[number]]
        command += ["--initial-cluster", cluster, "--initial-cluster-state", "new", "--logger", "zap"]
        command += ["--heartbeat-interval", "50", "--election-timeout", "500", "--log-level", "error"]
        if self.secured:
            mine = {kind: str(self.file(f"m{number}", kind)) for kind in ("cert", "key", "ca")}
            command += ["--cert-file", mine["cert"], "--key-file", mine["key"], "--trusted-ca-file", mine["ca"]]
            command += ["--client-cert-auth", "--bcrypt-cost", "4"]
        self._processes[number] = self._spawn(number, command, self._folder / f"m{number}.log")

    def wait(self, fetch: Callable[[str], str] | None = None) -> None:
        """Until all that run know a leader. fetch: gets a page of the first member, from where it can be reached."""
        end_s = time.monotonic() + LIMIT_S
        while time.monotonic() < end_s:
            with contextlib.suppress(OSError, subprocess.SubprocessError):
                running = [k for k, process in enumerate(self._processes) if process and process.poll() is None]
                pages = [fetch("/health")] if fetch else [self._page("/health", k) for k in running]
                if all('"true"' in page for page in pages):
                    return
            time.sleep(0.05)
        logs = "\n".join(path.read_text(errors="replace")[-500:] for path in sorted(self._folder.glob("*.log")))
        raise AssertionError(f"no leader of etcd within {LIMIT_S:g} s\n{logs}")

    def _page(self, path: str, number: int) -> str:
        context = None
        if self.secured:
            context = ssl.create_default_context(cafile=self.file("client", "ca"))
            context.load_cert_chain(self.file("client", "cert"), self.file("client", "key"))
        url = f"{'https' if self.secured else 'http'}://{self.addresses[number]}{path}"
        with urllib.request.urlopen(url, timeout=2, context=context) as answer:
            return str(answer.read(1000), "utf-8", "replace")

    def signal(self, number: int, what: signal.Signals) -> None:
        """To a member."""
        process = self._processes[number]
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, what)
            if what == signal.SIGKILL:
                process.wait()

    def close(self) -> None:
        """End them."""
        for number in range(len(self._processes)):
            self.signal(number, signal.SIGKILL)
        for folder in (self._folder, self._certificates):
            shutil.rmtree(folder, ignore_errors=True)


_FETCH = """
import ssl, sys, urllib.request
context = None
if len(sys.argv) > 2:
    context = ssl.create_default_context(cafile=sys.argv[2])
    context.load_cert_chain(sys.argv[3], sys.argv[4])
print(urllib.request.urlopen(sys.argv[1], timeout=2, context=context).read(999).decode())
"""


def etcd_on(hosts: Sequence[Host], ca_seed: bytes | None = None, addresses: Sequence[str] = ()) -> EtcdMembers:
    """One with a member on each of these hosts, which can be used now. ca_seed: as for `EtcdMembers`. addresses: of the
    members, if these are not those of the hosts."""

    def spawn(number: int, command: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
        return hosts[number].start(command, log)

    def page(path: str) -> str:
        where, files = f"{'https' if members.secured else 'http'}://{members.addresses[0]}{path}", members.files()
        return hosts[0].run("python3", "-c", _FETCH, where, *(files.values() if members.secured else ())).stdout

    members = EtcdMembers(addresses or [host.address for host in hosts], spawn, ca_seed)
    try:
        members.wait(page)
    except AssertionError:
        members.close()
        raise
    return members
