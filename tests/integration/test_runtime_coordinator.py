"""The coordinator as a process of its own: light, strict towards strangers, and one job per directory."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from everstep.base.config import load_config, to_dict
from everstep.base.config_keys import TlsConfig
from everstep.base.doors import is_loopback
from everstep.base.errors import ConfigError, EverstepError, ProtocolError
from everstep.observe.events import read_events
from everstep.protocol.messages import MAX_FRAME_BYTES, Command, CommandReply, TermBegun, decode, encode
from everstep.protocol.roles import COMMANDS, PEOPLE
from everstep.runtime.commands import NoJobRunning, ask
from everstep.runtime.files.led_directory import MOVED
from everstep.runtime.files.run_lock import run_lock
from everstep.runtime.host.board import Board
from everstep.runtime.host.fork_server_client import DEFAULT_PRELOAD, start_fork_server
from everstep.runtime.lead.journal import Journal, begin_term
from everstep.runtime.link import wire
from everstep.runtime.link.address import EVENTS_FILE, JOURNAL_FILE, read_address, role_file
from everstep.runtime.link.context import WorkerContext
from everstep.runtime.link.handshake import Seals, role_token
from everstep.runtime.link.interfaces import addresses
from everstep.runtime.link.tls import Shown, Tls, shown_by

HERE = Path(__file__).parent
PATIENCE_S = 60.0
PORTS = {"network.ports": "29700-29799", "network.trusted": True}
ELSEWHERE = [address for address in addresses() if not is_loopback(address)]


@pytest.fixture
def run_dir(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A directory with a coordinator. A parameter: its settings."""
    wire.write_token(tmp_path / "token", wire.new_token())
    config = load_config([("test", getattr(request, "param", {}))])
    (tmp_path / "job.json").write_text(json.dumps({"config": to_dict(config)}))
    process = subprocess.Popen([sys.executable, "-m", "everstep.runtime.lead.coordinator_main", str(tmp_path)])
    end = time.monotonic() + PATIENCE_S
    while not (tmp_path / "coordinator.json").exists() and time.monotonic() < end:
        time.sleep(0.005)
    yield tmp_path
    process.kill()
    process.wait()


def _connect(run_dir: Path) -> socket.socket:
    address = read_address(run_dir / "coordinator.json")
    return socket.create_connection((address.host, address.port), timeout=PATIENCE_S)


def _prove(sock: socket.socket, run_dir: Path, role: str) -> Seals:
    key = role_token(wire.read_token(run_dir / "token"), role)
    return wire.handshake_client(sock, key, role, "x")


def _closed(sock: socket.socket) -> bool:
    with contextlib.suppress(ConnectionError):
        while sock.recv(65536):
            pass
    return True


def test_it_does_not_import_torch() -> None:
    script = (
        "import sys, everstep.runtime.lead.coordinator_main, everstep.runtime.job, everstep.runtime.host.host_agent;"
        "import everstep.runtime.commands;"
        "sys.exit(sorted(m for m in sys.modules if m.split('.')[0] in ('torch', 'numpy')) or 0)"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_status_before_anybody_came(run_dir: Path) -> None:
    status = ask(run_dir, "status")
    assert status["state"] == "starting" and status["workers"] == [] and status["generation"] == 0


@pytest.mark.skipif(not ELSEWHERE, reason="this machine has no address that other hosts could reach")
@pytest.mark.parametrize("run_dir", [{"network.address": "".join(ELSEWHERE[:1]), **PORTS}], indirect=True)
def test_it_listens_where_a_firewall_lets_other_hosts_through(run_dir: Path) -> None:
    assert 29700 <= read_address(run_dir / "coordinator.json").port <= 29799
    assert ask(run_dir, "status")["state"] == "starting"


def test_a_frame_beyond_the_limit_ends_only_its_connection(run_dir: Path) -> None:
    with _connect(run_dir) as sock:
        _prove(sock, run_dir, "operate")
        sock.sendall((MAX_FRAME_BYTES + 1).to_bytes(4, "big"))
        assert _closed(sock)
    with _connect(run_dir) as sock:
        seals = _prove(sock, run_dir, "operate")
        wire.send_frame(sock, seals, b"\xc1 no message")
        assert _closed(sock)
    assert ask(run_dir, "status")["state"] == "starting"
    reasons = [e["reason"] for e in read_events(run_dir / "events.jsonl") if e["kind"] == "warning"]
    assert any("at most" in reason for reason in reasons)


def test_unknown_roles_are_refused(run_dir: Path) -> None:
    with _connect(run_dir) as sock:
        with contextlib.suppress(EverstepError):
            _prove(sock, run_dir, "king")
        assert _closed(sock)


def test_each_token_is_good_for_what_it_is_handed_out_for(run_dir: Path, tmp_path: Path) -> None:
    """With the address and one token's file, and nothing else of the directory."""
    token = wire.read_token(run_dir / "token")
    for role in PEOPLE:
        other = tmp_path / role
        other.mkdir()
        (other / "coordinator.json").write_bytes((run_dir / "coordinator.json").read_bytes())
        wire.write_token(other / role_file(role), role_token(token, role))
        for name in ("status", "scale", "chaos"):
            if COMMANDS[name] == role:
                with contextlib.suppress(ConfigError):  # it says why it cannot, since nobody trains
                    ask(other, name, {})
            else:
                with pytest.raises(ConfigError, match=f"expected the token for '{COMMANDS[name]}'"):
                    ask(other, name, {})
        with _connect(run_dir) as sock:
            seals = wire.handshake_client(sock, role_token(token, role), role, "x")
            assert decode(wire.recv_frame(sock, seals)) == TermBegun(term=0)
            for name in ("stop", "chaos"):
                if COMMANDS[name] != role:
                    wire.send_frame(sock, seals, encode(Command(request=1, name=name, args={})))
                    reply = decode(wire.recv_frame(sock, seals))
                    assert (
                        isinstance(reply, CommandReply) and f"expected the token for '{COMMANDS[name]}'" in reply.error
                    )
                    assert _closed(sock)
                    break
    assert ask(run_dir, "status")["state"] == "starting"
    told = [
        (e["command"], e["role"], e["cause"]) for e in read_events(run_dir / "events.jsonl") if e["kind"] == "commanded"
    ]
    assert ("scale", "operate", "requested") in told and ("stop", "read", "refused") in told


def test_silent_strangers_are_in_nobodys_way(run_dir: Path) -> None:
    with contextlib.ExitStack() as stack:
        for number in range(300):
            sock = stack.enter_context(_connect(run_dir))
            if number % 2:
                sock.send(b"\0")
        for _ in range(5):
            assert ask(run_dir, "status")["state"] == "starting"
        for _ in range(300):
            with _connect(run_dir) as sock:
                sock.send(b"\xff" * 700)
    assert ask(run_dir, "status")["state"] == "starting"
    refused = [e for e in read_events(run_dir / "events.jsonl") if e["kind"] == "warning"]
    assert 1 <= len(refused) < 10, "not a line for each"


def test_asking_where_nobody_runs(tmp_path: Path) -> None:
    with pytest.raises(NoJobRunning, match="no job is running"):
        ask(tmp_path, "status")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    (tmp_path / "coordinator.json").write_text(
        json.dumps({"pid": 1, "host": "127.0.0.1", "port": port, "started_unix_ns": 1})
    )
    wire.write_token(tmp_path / "token", wire.new_token())
    with pytest.raises(NoJobRunning, match="no job is running"):
        ask(tmp_path, "status")


def test_one_job_per_directory(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from everstep.runtime.files.run_lock import run_lock\n"
        "with run_lock(Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], **pipes) as holder:  # type: ignore[call-overload]
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(ConfigError, match="still running"), run_lock(tmp_path):
            pass
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    with run_lock(tmp_path):
        pass


def test_a_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written to"), run_lock(tmp_path / "file" / "run"):
        pass


def test_the_fork_server_imports_torch_without_starting_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]))
    board = Board.create(2)
    fork_server = start_fork_server(tmp_path / "fork-server.log", board.fd, 1, DEFAULT_PRELOAD)
    try:
        ready = fork_server.receive()[0]
        assert ready["op"] == "ready" and ready["threads"] == 1 and ready["skipped"] == []
        context = WorkerContext(str(tmp_path), 1, 0, "h", "00" * 32, "", board.fd, {}, "task")
        log = tmp_path / "worker.log"
        lifeline, owner = os.pipe()
        outputs = [(os.open(log, os.O_WRONLY | os.O_CREAT), os.dup(2))]
        fork_server.start("runtime_fake_worker:trains", context, outputs, lifeline)
        seen = []
        while not seen or seen[-1]["op"] != "exited":
            seen += fork_server.receive()
        assert seen[-1]["status"] == 0, log.read_text()
        os.close(owner)
    finally:
        fork_server.close(5.0)
        board.close()


@pytest.mark.parametrize("run_dir", [{"security.tls.mode": "on"}], indirect=True)
def test_over_tls_people_need_their_token_alone_and_all_others_a_certificate(run_dir: Path, tmp_path: Path) -> None:
    token = wire.read_token(run_dir / "token")
    other = tmp_path / "other"
    other.mkdir()
    (other / "coordinator.json").write_bytes((run_dir / "coordinator.json").read_bytes())
    wire.write_token(other / role_file("read"), role_token(token, "read"))
    assert ask(other, "status")["state"] == "starting"

    own, strange = (shown_by(TlsConfig("on"), secret, "127.0.0.1") for secret in (token, b"u" * 32))
    assert own is not None and strange is not None
    with wire.secured(_connect(run_dir), Tls(own)) as sock:
        _prove(sock, run_dir, "agent")
    with wire.secured(_connect(run_dir), Tls(Shown("", "", own.ca, True))) as sock:
        with pytest.raises(ProtocolError, match="refused"):
            _prove(sock, run_dir, "agent")
    with wire.secured(_connect(run_dir), Tls(replace(strange, ca=own.ca))) as sock:
        with pytest.raises(ProtocolError, match=r"it refused the certificate of this end"):
            _prove(sock, run_dir, "agent")
    with pytest.raises(ProtocolError, match="its certificate is not trusted here"):
        wire.secured(_connect(run_dir), Tls(strange))
    with _connect(run_dir) as plain:
        plain.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert _closed(plain)
    assert ask(run_dir, "status")["state"] == "starting"
    reasons = [e["reason"] for e in read_events(run_dir / "events.jsonl") if e["kind"] == "warning"]
    assert 1 <= len(reasons) <= 4 and not any("\n" in reason for reason in reasons), reasons
    assert "expected a certificate from a client with the role 'agent', got none" in reasons[0]


def test_one_whose_events_cannot_be_read_goes_on_from_its_journal(tmp_path: Path) -> None:
    wire.write_token(tmp_path / "token", wire.new_token())
    (tmp_path / "job.json").write_text(json.dumps({"config": to_dict(load_config([("test", {})]))}))
    (tmp_path / EVENTS_FILE).symlink_to(tmp_path / "elsewhere")
    journal = Journal(tmp_path / JOURNAL_FILE)
    assert journal.append({"kind": "target", "target": 3, "slots": [0, 1, 2]})
    journal.close()
    process = subprocess.Popen([sys.executable, "-m", "everstep.runtime.lead.coordinator_main", str(tmp_path)])
    try:
        while not (tmp_path / "coordinator.json").exists():
            assert process.poll() is None
            time.sleep(0.005)
        assert ask(tmp_path, "status")["target"] == 3
    finally:
        process.kill()
        process.wait()


def test_one_that_is_started_again_while_the_disk_is_full_serves(tmp_path: Path) -> None:
    """Nothing can be written: where it is, is told when there is room; until then it is where the one before it was."""
    wire.write_token(tmp_path / "token", wire.new_token())
    (tmp_path / "job.json").write_text(json.dumps({"config": to_dict(load_config([("test", {})]))}))
    path = tmp_path / "coordinator.json"
    command = [sys.executable, "-m", "everstep.runtime.lead.coordinator_main", str(tmp_path)]
    first = subprocess.Popen(command)
    while not path.exists():
        assert first.poll() is None
        time.sleep(0.005)
    first.kill()
    first.wait()
    port = read_address(path).port
    full = "import resource as r, os, sys; r.setrlimit(r.RLIMIT_FSIZE, (0, -1)); os.execv(sys.argv[1], sys.argv[1:])"
    again = subprocess.Popen([sys.executable, "-c", full, *command, "--port", str(port)])
    try:
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end and again.poll() is None:
            with contextlib.suppress(EverstepError, OSError):
                assert ask(tmp_path, "status")["state"] == "starting"
                break
            time.sleep(0.005)
        assert again.poll() is None and read_address(path).pid == first.pid
        resource.prlimit(again.pid, resource.RLIMIT_FSIZE, (-1, -1))
        while time.monotonic() < end and read_address(path).pid != again.pid:
            time.sleep(0.005)
        assert (read_address(path).pid, read_address(path).port) == (again.pid, port)
        assert not list(tmp_path.glob(".coordinator.json.*"))
    finally:
        again.kill()
        again.wait()


def test_one_that_was_taken_over_from_writes_nothing_more_and_does_not_lead_again(tmp_path: Path) -> None:
    """It lost its hosts and the lock, and comes back while its successor leads; then its job starts it once more."""
    token, path, before = wire.new_token(), tmp_path / "coordinator.json", tmp_path / "before"
    wire.write_token(tmp_path / "token", token)
    (tmp_path / "job.json").write_text(json.dumps({"config": to_dict(load_config([("test", {})]))}))
    command = [sys.executable, "-m", "everstep.runtime.lead.coordinator_main", str(tmp_path)]
    with contextlib.ExitStack() as last_first:

        def started(*words: str) -> subprocess.Popen[bytes]:
            process = last_first.enter_context(subprocess.Popen([*command, *words], stderr=subprocess.PIPE))
            last_first.callback(process.kill)
            while not path.exists() or read_address(path).pid != process.pid:
                assert process.poll() is None
                time.sleep(0.005)
            return process

        first = started()
        ask(tmp_path, "scale", {"workers": 5})
        before.mkdir()
        (before / "coordinator.json").write_bytes(path.read_bytes())
        wire.write_token(before / "token", token)
        assert begin_term(tmp_path / JOURNAL_FILE) == 1
        second = started("--term", "1")
        there = (tmp_path / JOURNAL_FILE).read_bytes()
        with pytest.raises(EverstepError):
            ask(before, "scale", {"workers": 7})
        assert first.wait(PATIENCE_S) == MOVED
        again = subprocess.run(command, stderr=subprocess.PIPE, text=True)
        assert again.returncode == MOVED and again.stderr.startswith("the job was taken over (term 1 in ")
        assert (tmp_path / JOURNAL_FILE).read_bytes() == there and read_address(path).pid == second.pid
        assert ask(tmp_path, "status")["target"] == 5
        second.kill()
        second.wait()
        started("--term", "1")
        assert ask(tmp_path, "status")["target"] == 5


def test_a_coordinator_notices_that_the_host_of_a_client_is_silent(run_dir: Path) -> None:
    """Else a lost host's connection stands for ever, and keeps out who follows it."""
    there = read_address(run_dir / "coordinator.json")
    with socket.create_connection((there.host, there.port)) as sock:
        ends = tuple(f":{port:04X}" for port in (there.port, sock.getsockname()[1]))
        end, timer = time.monotonic() + PATIENCE_S, ""
        while timer != "02" and time.monotonic() < end:
            rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
            timer = "".join(row[5][:2] for row in rows if row[1].endswith(ends[0]) and row[2].endswith(ends[1]))
        assert timer == "02", "the kernel's timer for questions to a silent host"
