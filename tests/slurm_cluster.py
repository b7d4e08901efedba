"""A small Slurm for tests: one controller, and nodes that are processes of this machine, told apart by ports, or hosts
in namespaces of their own.

Needs root, and slurmctld, slurmd and munged.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from engines_harness import booted

if TYPE_CHECKING:
    from net import Host

PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "scontrol")
_CONF = """
ClusterName=everstep
SlurmctldHost={host}({address})
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge,cred_expire=10
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/controller.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=requeue_delay=1,sched_interval=1,bf_interval=1,batch_sched_delay=0
ReturnToService=2
SlurmdTimeout=10
SlurmctldTimeout=10
InactiveLimit=0
KillWait=30
JobRequeue=1
SlurmdParameters=config_overrides
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10
"""


def why_not() -> str:
    """Why there can be no Slurm here; "" if there can."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"needs Slurm ({', '.join(missing)} missing: tests/install_engines.sh)"
    return "" if os.geteuid() == 0 else "a Slurm of one's own needs root"


class Slurm:
    """Nodes n0, n1, ...; all is ended by `close`. hosts: the controller's and the nodes', who end what runs on them."""

    def __init__(self, nodes: int, hosts: Sequence[Host] = ()) -> None:
        self._hosts = hosts
        self.folder = Path(tempfile.mkdtemp(prefix="evs"))  # short: sockets lie in it
        self.environment = {"SLURM_CONF": str(self.folder / "slurm.conf")}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        (self.folder / "state").mkdir()
        self.folder.chmod(0o755)
        key = self.folder / "key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o600)
        host, port, *ports = socket.gethostname().partition(".")[0], *_ports(nodes + 1)
        shape = "CPUs=8 Boards=1 SocketsPerBoard=1 CoresPerSocket=8 ThreadsPerCore=1 RealMemory=4000 State=UNKNOWN"
        names = [(h.name, h.address) for h in hosts] or [(host, "127.0.0.1")] * (nodes + 1)
        lines = [
            f"NodeName=n{i} NodeHostname={name} NodeAddr={address} Port={its} {shape}"
            for i, (its, (name, address)) in enumerate(zip(ports, names[1:], strict=True))
        ]
        own = {"host": names[0][0], "address": names[0][1], "port": port}
        text = _CONF.format(**own, folder=self.folder, nodes="\n".join(lines))
        (self.folder / "slurm.conf").write_text(text)
        try:
            self._begin(key, nodes)
        except BaseException:
            self.close()
            raise

    def _begin(self, key: Path, nodes: int) -> None:
        munge = ["munged", "--foreground", "--force", "--key-file", str(key), "--socket", f"{self.folder}/munge"]
        for name in ("pid", "log", "seed"):
            munge += [f"--{name}-file", f"{self.folder}/munge.{name}"]
        self._start("munge", munge)
        _until(lambda: (self.folder / "munge").exists(), "munge", 30.0)
        self._start("controller", ["slurmctld", "-D", "-f", self.environment["SLURM_CONF"]], 0)
        for i in range(nodes):
            self.start(i)
        idle = ("sinfo", "-h", "-N", "-p", "main", "-t", "idle", "-o", "%N")
        _until(lambda: len(self.run(*idle).split()) == nodes, "idle nodes", 60.0)

    def run(self, *command: str) -> str:
        """What a command of Slurm prints."""
        environment = {**os.environ, **self.environment}
        inside = ("ip", "netns", "exec", self._hosts[0].namespace) if self._hosts else ()
        command = (*inside, *command)
        return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60.0).stdout

    def start(self, node: int) -> None:
        """Start a node."""
        command = ["slurmd", "-D", "-N", f"n{node}", "-f", self.environment["SLURM_CONF"], "-M"]
        self._start(f"n{node}", command, node + 1)

    def kill(self, node: int) -> None:
        """As if the node had lost its power: its daemons are stopped before anything dies, so that none reports it."""
        if self._hosts:
            self._hosts[node + 1].kill()
            return
        mark = f"SLURMD_NODENAME=n{node}".encode()
        jobs = [pid for pid in _pids() if mark in _environment(pid)]
        daemons = {self._processes[f"n{node}"].pid}
        for pid in jobs:
            while pid > 1 and _word(pid, "comm") != "slurmstepd":
                pid = _parent(pid)
            daemons |= {pid} - {0, 1}
        for number, pids in ((signal.SIGSTOP, daemons), (signal.SIGKILL, daemons), (signal.SIGKILL, set(jobs))):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)

    def close(self) -> None:
        """End everything."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.run("scancel", "--signal=KILL", "--full", "-u", "root")
        for name in [*(n for n in self._processes if n.startswith("n")), "controller", "munge"]:
            if name.startswith("n"):
                self.kill(int(name[1:]))
            process = self._processes.get(name)
            if process is not None:
                process.kill()
                process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _start(self, name: str, command: list[str], host: int | None = None) -> None:
        if host is not None and self._hosts:
            command = [*booted(self._hosts[host]), *command]
        with open(self.folder / f"{name}.out", "ab") as out:
            self._processes[name] = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
            )


def _ports(count: int) -> list[int]:
    """Free ones, below those that the kernel gives away by itself."""
    found: list[int] = []
    first = 12_000 + os.getpid() * 16 % 8_000
    for port in range(first, first + 2_000):
        with contextlib.suppress(OSError), socket.socket() as sock:
            sock.bind(("", port))
            found.append(port)
        if len(found) == count:
            break
    return found


def _until(true: object, what: str, limit_s: float) -> None:
    end_s = time.monotonic() + limit_s
    while not true():  # type: ignore[operator]
        assert time.monotonic() < end_s, f"no {what} within {limit_s:g} s"
        time.sleep(0.1)


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _environment(pid: int) -> list[bytes]:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return []


def _word(pid: int, name: str) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/{name}").read_text().strip()
    return ""


def _parent(pid: int) -> int:
    fields = _word(pid, "stat").rpartition(")")[2].split()
    return int(fields[1]) if len(fields) > 1 else 0
