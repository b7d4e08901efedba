"""A job over ssh on three hosts: by a stand-in for ssh that runs everything here, and by a real sshd."""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from engines_harness import Launched, check, hold, places
from etcd_members import EtcdMembers, etcd_there

STAND_IN = """#!/bin/sh
# ssh OPTIONS -- HOST COMMAND
while [ "$1" != -- ]; do shift; done
echo "$$ $2" >> "$SSH_LOG"
shift 2
exec sh -c "$*"
"""
SSHD = shutil.which("sshd") or "/usr/sbin/sshd"


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def launch(run_dir: Path, script: Path, hosts: str, *options: str, **environment: str) -> Launched:
    words = ["launch", "ssh", str(script), "--hosts", hosts, "--address", "127.0.0.1", "--port", str(free_port())]
    words += ["--run-dir", str(run_dir), *options, "--set", "lanes=4", "--", str(run_dir)]
    return Launched(run_dir, [sys.executable, "-P", "-m", "everstep", *words], environment)


@pytest.mark.longer
def test_an_agent_whose_ssh_is_killed_comes_back(tmp_path: Path, script: Path, alone: Path) -> None:
    run_dir, log = tmp_path / "run", tmp_path / "ssh.log"
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "ssh").write_text(STAND_IN)
    (tmp_path / "bin" / "ssh").chmod(0o755)
    held = hold(run_dir, 4.0)
    job = launch(run_dir, script, "a,b,c", PATH=f"{tmp_path / 'bin'}:{os.environ['PATH']}", SSH_LOG=str(log))
    try:
        full = job.wait_for("generation_started", lambda e: len(e["workers"]) == 3)
        pid = next(int(line.split()[0]) for line in log.read_text().splitlines() if line.endswith(" c"))
        os.kill(pid, signal.SIGKILL)
        gone = job.wait_for("worker_evicted")
        again = job.wait_for("worker_joined", lambda e: e["time_unix_ns"] > gone["time_unix_ns"])
        assert again["host"] == "host-2"
        job.wait_for(
            "generation_started", lambda e: e["generation"] > full["generation"] + 1 and len(e["workers"]) == 3
        )
        held.unlink()
        check(job, alone)
    finally:
        job.close()
    assert "c ended with -9: again in 1 s" in job.said
    token = [word for word in Path("/proc/self/environ").read_text().split("\0") if word.startswith("EVERSTEP_TOKEN")]
    assert not token and "Traceback" not in job.said


@pytest.mark.longer
def test_the_first_host_is_lost_and_comes_back_to_one_that_leads_by_etcd(
    tmp_path: Path, script: Path, alone: Path
) -> None:
    """All see the same directory. It stands by; then a notice has it leave in order, and the job ends elsewhere."""
    etcd_there()
    run_dir, log = tmp_path / "run", tmp_path / "ssh.log"
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "ssh").write_text(STAND_IN)
    (tmp_path / "bin" / "ssh").chmod(0o755)
    held = hold(run_dir, 2.0)
    environment = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "SSH_LOG": str(log)}
    with contextlib.closing(EtcdMembers()) as members:
        members.wait()
        job = launch(run_dir, script, "a,b,c", "--set", f"control.etcd={members.url()}", **environment)
        try:
            job.wait_for("generation_started", lambda e: len(e["workers"]) == 3)
            os.kill(_everstep_of(log, "a"), signal.SIGKILL)
            job.wait_for_words(f"leads the job in {run_dir} from now on")
            gone = job.wait_for("worker_evicted")
            job.wait_for_words("127.0.0.1 stands by for the job in")
            job.wait_for(
                "worker_joined", lambda e: e["host"] == "127.0.0.1" and e["time_unix_ns"] > gone["time_unix_ns"]
            )
            again = job.wait_for(
                "generation_started", lambda e: len(e["workers"]) == 3 and e["time_unix_ns"] > gone["time_unix_ns"]
            )
            os.kill(_everstep_of(log, "a"), signal.SIGUSR1)
            job.wait_for("generation_started", lambda e: e["generation"] > again["generation"])
            held.unlink()
            check(job, alone)
        finally:
            job.close()
    evicted = [e["worker_id"] for e in job.of_kind("worker_evicted")]
    assert evicted == [gone["worker_id"]], "what left in order was not lost"
    assert "a ended with 137: again in 1 s" in job.said and "Traceback" not in job.said
    assert "refused" not in job.said and "still running" not in job.said


@pytest.mark.longer
def test_a_short_loss_of_the_connection_with_the_first_host_stops_the_job_for_a_short_time(
    tmp_path: Path, script: Path, alone: Path
) -> None:
    """What ran there ends in order, and is waited for by what begins there meanwhile; that leads then."""
    etcd_there()
    run_dir, log = tmp_path / "run", tmp_path / "ssh.log"
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "ssh").write_text(STAND_IN)
    (tmp_path / "bin" / "ssh").chmod(0o755)
    held = hold(run_dir, 4.0)
    environment = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "SSH_LOG": str(log)}
    with contextlib.closing(EtcdMembers()) as members:
        members.wait()
        job = launch(run_dir, script, "a,b", "--set", f"control.etcd={members.url()}", **environment)
        try:
            job.wait_for("step_committed")
            pid = next(int(line.split()[0]) for line in log.read_text().splitlines() if line.endswith(" a"))
            os.kill(pid, signal.SIGKILL)
            job.wait_for("job_started", lambda e: e["step"] > 0)
            held.unlink()
            check(job, alone)
        finally:
            job.close()
    assert "a ended with -9: again in 1 s" in job.said and "Traceback" not in job.said
    assert "refused" not in job.said and "still running" not in job.said


def _everstep_of(log: Path, host: str) -> int:
    """The pid of what runs on this host, which a shell of its shell has started."""
    found = [line.split()[0] for line in log.read_text().splitlines() if line.endswith(f" {host}")][-1:]
    for pid in found:
        if b"everstep" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
            return int(pid)
        found += Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    raise AssertionError(f"nothing runs on {host}")


@pytest.fixture
def sshd(tmp_path: Path) -> Iterator[list[str]]:
    """Options of ssh by which a real sshd on loopback is reached."""
    if os.geteuid() != 0 or not Path(SSHD).exists():
        pytest.skip("needs sshd and root (tests/install_engines.sh)")
    folder = tmp_path / "sshd"
    folder.mkdir(mode=0o700)
    for name in ("host", "mine"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
    Path("/run/sshd").mkdir(exist_ok=True)
    port = free_port()
    config = f"Port {port}\nListenAddress 127.0.0.1\nHostKey {folder}/host\nAuthorizedKeysFile {folder}/mine.pub\n"
    config += "StrictModes no\nUsePAM no\nPasswordAuthentication no\nPermitRootLogin prohibit-password\nPidFile none\n"
    (folder / "config").write_text(config)
    with open(folder / "log", "wb") as out:
        server = subprocess.Popen([SSHD, "-D", "-e", "-f", str(folder / "config")], stderr=out)
    end_s = time.monotonic() + 30.0
    while b"listening" not in (folder / "log").read_bytes():
        assert time.monotonic() < end_s and server.poll() is None, (folder / "log").read_text()
        time.sleep(0.05)
    options = [f"-p{port}", f"-i{folder}/mine", "-oStrictHostKeyChecking=no", f"-oUserKnownHostsFile={folder}/known"]
    yield options
    server.kill()
    server.wait()


@pytest.mark.longer
def test_a_real_sshd(sshd: list[str], tmp_path: Path, script: Path, alone: Path) -> None:
    run_dir = tmp_path / "run"
    me = getpass.getuser()
    options = [word for option in sshd for word in (f"--ssh={option}",)]
    job = launch(run_dir, script, f"{me}@127.0.0.1,{me}@localhost", *options)
    try:
        check(job, alone)
    finally:
        job.close()
    assert {e["host"] for e in job.of_kind("worker_joined")} == {"127.0.0.1", "host-1"}
    assert len(places(run_dir)) == 2


@pytest.mark.longer
def test_an_interrupt_ends_the_job_in_order(tmp_path: Path, script: Path) -> None:
    run_dir, log = tmp_path / "run", tmp_path / "ssh.log"
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "ssh").write_text(STAND_IN)
    (tmp_path / "bin" / "ssh").chmod(0o755)
    hold(run_dir, 1.0)
    job = launch(run_dir, script, "a,b", PATH=f"{tmp_path / 'bin'}:{os.environ['PATH']}", SSH_LOG=str(log))
    try:
        job.wait_for("generation_started", lambda e: len(e["workers"]) == 2)
        job.wait_for("step_committed")
        os.kill(job.process.pid, signal.SIGTERM)
        assert job.end() == 143, job.account()
    finally:
        job.close()
    assert job.of_kind("checkpoint_completed"), job.account()
