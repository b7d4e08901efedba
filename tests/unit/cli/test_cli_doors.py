"""Addresses, ports and hosts that a job may not have, and what is said of them: one line, and the exit code."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch

import everstep
from everstep.base.config import load_config, to_dict
from everstep.base.doors import check_ports, is_loopback, parse_ports
from everstep.base.errors import ConfigError, EverstepError, ProtocolError, TlsDiffers
from everstep.cli import doctor
from everstep.cli.doctor_task import compared
from everstep.cli.doors import head_doors, slots_here
from everstep.cli.lane_digest import look_here
from everstep.cli.main import run_command
from everstep.cli.meeting import places_in
from everstep.protocol import messages as m
from everstep.runtime.files.run_lock import run_lock
from everstep.runtime.host.admission import why_not
from everstep.runtime.host.devices import check_slots, default_slots, device_count
from everstep.runtime.lead.finding import among
from everstep.runtime.link import listening, wire
from everstep.runtime.link.address import address_of, announce
from everstep.runtime.link.context import Joining
from everstep.runtime.link.handshake import MAGIC, Seals, keys_of
from everstep.runtime.link.head_facts import answer, check_mode
from everstep.runtime.link.interfaces import address_on, addresses, bind_collectives, interface_of, own_address
from everstep.runtime.versions import task_digest, versions

sys.path.insert(0, str(Path(__file__).parents[1] / "runtime"))
from fake_coordinator import handshake_server

from everstep.protocol.roles import CONTROL_ROLES

NOBODYS = "192.0.2.77"
TOKEN = sha256(b"door").digest()


class FakeHead:
    """Answers what hosts ask before they join. clock: Unix nanoseconds there. versions: likewise."""

    def __init__(self, token: bytes = TOKEN) -> None:
        self.clock: Callable[[], int] = time.time_ns
        self.versions = versions()
        self.token = token
        self.job: dict[str, Any] = {}
        self.cut_after = 1 << 30
        self._over = False
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.name = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            sock, _ = self._listener.accept()
            with sock:
                try:
                    seals = handshake_server(sock, keys_of(self.token, CONTROL_ROLES))
                    while self._answer(sock, seals):
                        pass
                except (OSError, EverstepError):
                    if self._over:
                        return

    def _answer(self, sock: socket.socket, seals: Seals) -> bool:
        asked = m.decode(wire.recv_frame(sock, seals))
        assert isinstance(asked, m.Command)
        if len(asked.args["padding"]) > self.cut_after:
            return False
        said = answer(asked.args, self.versions, "127.0.0.1", self.clock, self.job)
        wire.send_frame(sock, seals, m.encode(m.CommandReply(request=1, ok=True, error="", result=said)))
        return True

    def close(self) -> None:
        self._over = True
        socket.create_connection(("127.0.0.1", int(self.name.rpartition(":")[2]))).close()
        self._thread.join(30)
        self._listener.close()


class Stranger:
    """Says always the same, and hangs up. Entered, it is where it listens."""

    def __init__(self, says: bytes) -> None:
        self._says = says
        self._over = False
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._thread = threading.Thread(target=self._serve)

    def _serve(self) -> None:
        while True:
            sock, _ = self._listener.accept()
            with sock, contextlib.suppress(OSError):  # whoever only looks whether anybody is there
                if self._over:
                    return
                sock.sendall(self._says)
                sock.shutdown(socket.SHUT_WR)
                while sock.recv(1 << 16):
                    pass

    def __enter__(self) -> str:
        self._thread.start()
        return f"127.0.0.1:{self._listener.getsockname()[1]}"

    def __exit__(self, *how: object) -> None:
        self._over = True
        socket.create_connection(self._listener.getsockname()).close()
        self._thread.join(30)
        self._listener.close()


@pytest.fixture
def head() -> Iterator[FakeHead]:
    found = FakeHead()
    yield found
    found.close()


@pytest.fixture
def token_file(tmp_path: Path) -> str:
    wire.write_token(tmp_path / "token", TOKEN)
    return str(tmp_path / "token")


def said(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str]:
    code = run_command(list(argv))
    return code, capsys.readouterr().err


# ---- where a job listens


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--listen", "0.0.0.0:0"], "--listen: expected --address IP"),
        (["--listen", "0.0.0.0:0", "--address", NOBODYS], "--address: expected one of this host's addresses"),
        (
            ["--listen", "0.0.0.0:0", "--address", "127.0.0.1"],
            "network.listen: expected an address of a private network",
        ),
        (
            ["--listen", "127.0.0.1:0", "--address", "127.0.0.2"],
            "--address: expected it only with --listen 0.0.0.0:PORT",
        ),
        (["--address", "127.0.0.1"], "--address: expected --listen 0.0.0.0:PORT with it"),
        (["--listen", "8.8.8.8:0"], "network.address: expected an address of a private network, got 8.8.8.8 (public)"),
        (["--listen", f"{NOBODYS}:0"], f"network.address: expected an address of this host, got {NOBODYS}"),
        (["--listen", "nowhere0:0"], "--listen: expected an interface of this host"),
        (["--listen", "lo:0", "--set", "network.interface=eth77"], "expected an interface of this host"),
        (["--listen", "lo:0", "--set", "hosts.min=2"], "expected an address that 2 hosts (hosts.min) can reach"),
        (["--set", "network.interface=eth77"], "network.interface: expected an interface of this host"),
        (["--set", "network.ports=5-9"], "network.ports: expected FIRST-LAST from 1024 to 65535, got '5-9'"),
        (["--set", "network.ports=many"], "network.ports: expected text or none, like 29500-29599"),
        (
            ["--set", "network.ports=29500-29503", "--workers", "3"],
            "expected at least 6 ports for 3 workers on a host (2 for each), got 4 (29500-29503)",
        ),
        (["--set", "network.ports=29500-29599", "--set", "transport=nccl"], "network.ports: expected transport auto, "),
        (["--set", "network.listen=300.1.1.1"], "network.listen: expected one IPv4 address"),
        (["--set", "hosts.min=0"], "hosts.min: expected whole number, at least 1"),
    ],
)
def test_where_a_job_cannot_listen(
    argv: list[str], expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "script.py").touch()
    code, words = said(capsys, "run", str(tmp_path / "script.py"), "--dry-run", *argv)
    assert code == 2 and expected in words and words.count("\n") == 1, words


def test_mpi_is_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = (
        "transport=mpi is not available: an MPI world can neither lose nor gain a process; use transport=auto, which "
        "also works under mpirun"
    )
    (tmp_path / "script.py").touch()
    run = ["run", str(tmp_path / "script.py"), "--set", "transport=mpi"]
    launch = ["launch", "ssh", str(tmp_path / "script.py"), "--hosts", "a", "--print", "--set", "transport=mpi"]
    for argv in (run, [*run, "--dry-run"], [*run, "--run-dir", str(tmp_path / "run")], [*launch, "--run-dir", "r"]):
        assert said(capsys, *argv) == (2, f"error: {expected}\n")
    model = torch.nn.Linear(1, 1)
    with pytest.raises(ConfigError) as refusal:
        everstep.join(model, torch.optim.SGD(model.parameters(), lr=1.0), [], transport="mpi")
    assert str(refusal.value) == expected
    assert [path.name for path in tmp_path.iterdir()] == ["script.py"]


def test_what_a_job_tells_others() -> None:
    assert head_doors("127.0.0.1:5", None, {}, local=True) == ({"network.address": "127.0.0.1"}, 5)
    assert head_doors("lo:5", None, {}, local=False) == ({"network.address": "127.0.0.1"}, 5)
    everywhere = {"network.listen": "0.0.0.0", "network.address": "127.0.0.1"}
    assert head_doors("0.0.0.0:5", "127.0.0.1", {}, local=True) == (everywhere, 5)
    assert head_doors(None, None, {"network.interface": "lo"}, local=True) == ({"network.address": "127.0.0.1"}, None)
    assert head_doors(None, None, {}, local=True) == ({}, None)
    trusted = load_config([("test", {"network.address": "8.8.8.8", "network.trusted": True})])
    assert trusted.network.address == "8.8.8.8"


def test_addresses_and_interfaces() -> None:
    assert addresses()["127.0.0.1"] == "lo" == interface_of("127.0.0.1") and address_on("lo") == "127.0.0.1"
    assert bind_collectives("127.0.0.1") == {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}
    assert interface_of(NOBODYS) == "" and bind_collectives(NOBODYS) == {}
    network = load_config([]).network
    assert own_address(network, None, "127.0.0.1") == "127.0.0.1"
    others = [address for address in addresses() if not is_loopback(address)]
    if others:
        with pytest.raises(ConfigError, match="expected an address that the job's other hosts can reach"):
            own_address(network, "127.0.0.1", others[0])
        assert own_address(network, None, others[0]) == others[0]
    chosen = load_config([("test", {"network.interface": "lo"})]).network
    assert own_address(chosen, None, "127.0.0.1") == "127.0.0.1"
    with pytest.raises(ConfigError, match="expected an address of the interface lo"):
        own_address(chosen, NOBODYS, "127.0.0.1")


# ---- ports


def test_ports_of_a_range() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        first = taken.getsockname()[1]
        ports = parse_ports(f"{first}-{min(first + 3, 65535)}")
        assert ports is not None
        listening.keep_within(ports)
        try:
            held: list[socket.socket] = []
            with pytest.raises(ConfigError, match=r"network.ports: all of .* are taken at 127\.0\.0\.1"):
                while True:
                    held.append(listening.listen("127.0.0.1", 5))
            assert all(ports.first < sock.getsockname()[1] <= ports.last for sock in held)
            for sock in held:
                sock.close()
        finally:
            listening.keep_within(None)
    with listening.listen("127.0.0.1", 5) as anywhere:
        assert anywhere.getsockname()[1] > 0


def test_how_many_ports_are_needed() -> None:
    check_ports(None, 100)
    check_ports("29500-29507", 4)
    with pytest.raises(ConfigError, match="expected at least 10 ports for 5 workers on a host"):
        check_ports("29500-29508", 5)
    check_ports("29500-29512", 4, ["its agent"], spans=True)
    with pytest.raises(ConfigError, match=r"at least 13 ports .*3 for each, 1 for its agent"):
        check_ports("29500-29511", 4, ["its agent"], spans=True)


def test_hosts_are_listed_with_the_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told = {"state": "live", "slots": None, "workers": [0], "rtt_ms": 1.0, "domains": {}, "versions": {}}
    places = {"10.0.0.1": "10.0.0.1", "b": "10.0.0.1", "c": "10.0.0.3"}
    found = [{"name": name, "id": name, "address": address, **told} for name, address in places.items()]
    monkeypatch.setattr("everstep.cli.running.ask_running", lambda *asked: {"hosts": copy.deepcopy(found)})
    for address, head in (("10.0.0.1", "10.0.0.1"), ("10.0.0.3", "c"), ("10.0.0.9", None)):
        announce(tmp_path / "coordinator.json", address_of(address, 29400))
        assert run_command(["hosts", str(tmp_path), "--json"]) == 0
        listed = json.loads(capsys.readouterr().out)
        assert [host["name"] for host in listed if host["is_head"]] == ([head] if head else [])
        assert [host["name"] for host in listed] == list(places)
    announce(tmp_path / "coordinator.json", address_of("10.0.0.3", 29400))
    assert run_command(["hosts", str(tmp_path)]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[:2] for line in lines[1:]] == [["10.0.0.1", "agent"], ["b", "agent"], ["c", "head"]]
    assert lines[3][5:7] == ["1", "(0)"]
    found[2] |= {"state": "gone", "workers": []}
    for host, state, end in (("c", "leads", "has no workers any more"), ("b", "live", "")):
        assert run_command(["drain", str(tmp_path), "--host", host, "--grace", "0"]) == int(not end)
        words = capsys.readouterr().out
        assert ("leads the job, and goes on leading it without workers" in words) == bool(end) and end in words, words
        assert run_command(["hosts", str(tmp_path), "--json"]) == 0
        assert {one["name"]: one["state"] for one in json.loads(capsys.readouterr().out)}[host] == state


def test_who_asks_a_job_whose_head_cannot_be_reached_is_told_where_that_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("everstep.cli.running.read_job", lambda run_dir: None)
    monkeypatch.setattr("everstep.cli.running._PATIENCE_S", 0.0)
    wire.write_token(tmp_path / "token", TOKEN)
    with socket.socket() as deaf, run_lock(tmp_path):
        deaf.bind(("127.0.0.1", 0))
        port = deaf.getsockname()[1]
        announce(tmp_path / "coordinator.json", address_of("127.0.0.1", port))
        code, words = said(capsys, "hosts", str(tmp_path))
    assert code and f"cannot be reached at 127.0.0.1:{port} from here (connection refused): try again" in words


def test_whether_others_answer(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as there, socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))  # and does not listen
        names = [f"127.0.0.1:{sock.getsockname()[1]}" for sock in (there, deaf)]
        assert run_command(["ports", "--check", names[0]]) == 0
        assert capsys.readouterr().out.split() == [names[0], "answers"]
        assert run_command(["ports", "--check", *names]) == 1
        assert "connection refused" in capsys.readouterr().out
    assert run_command(["ports", "--check"]) == run_command(["ports", "10.0.0.1:5"]) == 2


# ---- a host that wants to join


def test_no_head(token_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        name = f"127.0.0.1:{deaf.getsockname()[1]}"
        argv = ["agent", "--join", name, "--token-file", token_file, "--set", "hosts.wait_s=0"]
        code, words = said(capsys, *argv)
    assert code == 4 and f"no head at {name} (connection refused) for 0 s" in words and words.count("\n") == 1


def test_another_token(head: FakeHead, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wire.write_token(tmp_path / "other", wire.new_token())
    code, words = said(capsys, "agent", "--join", head.name, "--token-file", str(tmp_path / "other"))
    assert code == 2 and "that head has another token" in words and words.count("\n") == 1
    assert TOKEN.hex() not in words and (tmp_path / "other").read_text() not in words


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (
            ["--set", "lanes=4"],
            "--set: expected a key of security.*, control.etcd_*, network.interface, network.trusted, hosts.wait_s",
        ),
        (["--set", "network.interface=eth77"], "network.interface: expected an interface of this host"),
        (["--set", "network.interface=lo", "--address", "{other}"], "expected an address of the interface lo"),
        (["--task", "nowhere.py"], "there is no file nowhere.py"),
        (["--slots", "0"], "--slots"),
    ],
)
def test_an_agent_that_cannot_be(
    argv: list[str], expected: str, head: FakeHead, token_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    other = next((address for address in addresses() if not is_loopback(address)), None)
    if other is None and "{other}" in argv:
        pytest.skip("this machine has no address beside loopback")
    given = [word.format(other=other) for word in argv]
    code, words = said(capsys, "agent", "--join", head.name, "--token-file", token_file, *given)
    assert code == 2 and expected in words and words.count("\n") == 1, words


def facts(task: str = "resnet18-digits", **config: object) -> m.JobFacts:
    said = to_dict(load_config([("test", config)]))
    own = {**versions(), "task file": ""}
    return m.JobFacts(
        task=task, argv=[], config=said, run_dir="/", coordinator_file="/c", job_pid=0, machine="m", versions=own
    )


def refusal(told: m.JobFacts, room: int = 1, task: str = "") -> str:
    joining = Joining("127.0.0.1:5", "m:f", [], "here", room=room, task=task)
    return why_not(told, load_config([("test", told.config)]), joining)


def test_why_a_host_has_to_stay_out(monkeypatch: pytest.MonkeyPatch) -> None:
    assert refusal(facts()) == ""
    assert refusal(facts(), task="resnet18-digits") == ""
    assert refusal(facts(), task="/a/train.py") == (
        "--task: expected a job that runs /a/train.py, got one that runs resnet18-digits"
    )
    newer = m.JobFacts(
        **{**{f: getattr(facts(), f) for f in m.JobFacts.__struct_fields__}, "versions": {"torch": "9.9"}}
    )
    words = refusal(newer)
    assert words.startswith("this host would not compute the same bits: torch is") and "the job's host has 9.9" in words
    narrow = {"network.ports": "29500-29503"}
    assert refusal(facts(**narrow), room=2) == "" and "at least 6 ports" in refusal(facts(**narrow), room=3)
    monkeypatch.setattr("everstep.runtime.host.devices.device_count", lambda: 2)
    assert refusal(facts(device="cuda"), room=2) == ""
    assert (
        refusal(facts(device="cuda"), room=3) == "--slots: expected at most 2, one for each device of this host, got 3"
    )
    assert refusal(facts(), room=3) == "", "processors have no such limit"
    monkeypatch.setattr("everstep.runtime.host.devices.device_count", lambda: 0)
    assert "this host has no such device" in refusal(facts(device="cuda"))


def test_slots_are_as_many_as_devices_or_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert device_count({}, tmp_path) == 3
    assert device_count({"CUDA_VISIBLE_DEVICES": "0,2"}, tmp_path) == 2
    assert (
        device_count({"CUDA_VISIBLE_DEVICES": ""}, tmp_path)
        == device_count({"CUDA_VISIBLE_DEVICES": "-1"}, tmp_path)
        == 0
    )
    assert device_count({}, tmp_path / "nowhere") == 0
    monkeypatch.setattr("everstep.runtime.host.devices.device_count", lambda: 0)
    assert default_slots() == 1
    monkeypatch.setattr("everstep.runtime.host.devices.device_count", lambda: 4)
    assert default_slots() == 4
    check_slots("cpu", 100)


def test_how_many_workers_a_host_runs_if_nobody_says(monkeypatch: pytest.MonkeyPatch) -> None:
    for devices, given, world_size, slots in (
        (0, {"workers": 8}, None, 1),
        (4, {"workers": 8}, None, 4),
        (0, {"workers": 8}, 3, 3),
        (4, {"workers": 8}, 3, 4),
        (0, {"stages": 2, "pool": 3}, 2, 3),
        (0, {"workers": 6, "hosts.min": 2}, None, 3),
        (0, {}, 2, 1),
    ):
        monkeypatch.setattr("everstep.runtime.host.devices.device_count", lambda devices=devices: devices)
        assert slots_here(given, world_size) == slots, (devices, given, world_size)


def test_hosts_that_are_started_one_by_one_are_all_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("everstep.runtime.host.devices.device_count", lambda: 4)
    for given, slots, found in (
        ({}, None, {"hosts.min": 3, "workers": 12}),
        ({"workers": 5}, None, {"hosts.min": 3}),
        ({"stages": 2}, 1, {"hosts.min": 3}),
        ({"hosts.min": 2}, 2, {"workers": 6}),
    ):
        doors, port = head_doors("10.0.0.1:5", None, given, local=True, slots=slots, world_size=3)
        assert (doors, port) == ({"network.address": "10.0.0.1", **found}, 5)
    doors, _ = head_doors("10.0.0.1:5", None, {}, local=False, world_size=3)
    assert doors["hosts.min"] == 2 and doors["workers"] == 8, "this host has no workers, and does not count"


def test_an_agent_offers_so_many_and_warns_of_a_clock_that_is_off(
    head: FakeHead, token_file: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from everstep.runtime.host import host_agent

    seen: list[Joining] = []
    monkeypatch.setattr(
        host_agent, "take_part", lambda joining, token, look=None: seen.append(joining) or host_agent.Left(0)
    )
    argv = ["agent", "--join", head.name, "--token-file", token_file]
    assert said(capsys, *argv) == (0, "")
    head.clock = lambda: time.time_ns() + 8_000_000_000
    code, words = said(capsys, *argv, "--slots", "3", "--task", "resnet18-digits", "--host-name", "b")
    assert code == 0 and words.startswith("warning: this host's clock is 8.0 s behind that of the job's head")
    head.clock = lambda: time.time_ns() - 4_000_000_000
    assert said(capsys, *argv) == (0, "")
    assert [joining.room for joining in seen] == [default_slots(), 3, default_slots()]
    assert (seen[1].host, seen[1].task, seen[1].own) == ("b", "resnet18-digits", "127.0.0.1")
    assert seen[0].host == os.uname().nodename


# ---- doctor


def findings(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, dict[str, tuple[str, str]]]:
    code = run_command(["doctor", *argv, "--json"])
    told = json.loads(capsys.readouterr().out)
    assert told["ok"] == (code == 0)
    return code, {one["name"]: (one["state"], one["text"]) for one in told["findings"]}


def test_a_host_that_could_take_part(head: FakeHead, token_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    config = load_config([("", {"steps": 3, "lanes": 2})])
    question = {"task": f"{Path(__file__).parents[2] / 'job_tasks.py'}:Text", "config": to_dict(config)}
    here = look_here(question)
    head.job = {**question, "lane_digest": here["lane"]}
    head.versions["task file"] = task_digest(question["task"])
    code, found = findings(capsys, "--join", head.name, "--token-file", token_file, "--ports", "20000-29999")
    assert code == 0 and {state for name, (state, _) in found.items() if name != "own name"} == {"ok"}, found
    wanted = {"name", "own name", "route", "devices", "packets", "ports", "head", "token", "clock", "versions"}
    wanted |= {"full packets", "disk", "shared memory", "open files", "bandwidth", "modules", "data"}
    assert set(found) == wanted and "127.0.0.1, on lo" in found["route"][1]
    other, unsaid = (list(compared(here, {**head.job, "lane_digest": digest}))[-1] for digest in ("0" * 16, ""))
    assert other.state == "wrong" and "bring the same data" in other.text
    assert unsaid.state == "ok" and "does not say its own" in unsaid.text
    head.job["task"] = str(Path(__file__))  # a script: its code and data are compared later
    head.versions["task file"] = task_digest(str(Path(__file__)))
    assert run_command(["doctor", "--join", head.name, "--token-file", token_file]) == 0
    assert "get through both ways" in capsys.readouterr().out


def test_a_host_that_could_not(
    head: FakeHead, token_file: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("EVERSTEP_TOKEN", raising=False)
    code, found = findings(capsys, "--join", head.name)
    assert code == 0 and found["token"][0] == "warning" and "clock" not in found
    head.clock = lambda: time.time_ns() - 60_000_000_000
    head.versions = {**versions(), "torch": "9.9"}
    head.cut_after = 100
    code, found = findings(
        capsys, "--join", head.name, "--token-file", token_file, "--ports", "1024-1025", "--slots", "2"
    )
    assert code == 1
    assert {name for name, (state, _) in found.items() if state == "wrong"} == {"ports", "versions", "full packets"}
    assert found["clock"][0] == "warning" and "60.0 s ahead of" in found["clock"][1]
    assert "torch is" in found["versions"][1] and "4 ports in 1024-1025 are needed" in found["ports"][1]
    head.token = wire.new_token()
    code, found = findings(capsys, "--join", head.name, "--token-file", token_file)
    assert code == 1 and found["token"][0] == "wrong"
    assert found["token"][1].startswith("that head has another token (the server refused this job's token")


def test_the_ports_that_the_job_says_also_serve_a_host_that_stands_by(
    head: FakeHead, token_file: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two for each worker, and with files of its own one for its agent and one for the head that it may become."""
    monkeypatch.setattr(doctor, "_is_free", lambda own, port: True)
    options = ["--join", head.name, "--token-file", token_file, "--slots", "2"]
    for size, state in ((3, "wrong"), (4, "warning"), (5, "warning"), (6, "ok")):
        said = {"network.ports": f"29500-{29499 + size}", "control.etcd": "etcd://10.0.0.1/jobs/a"}
        head.job = {"task": "x.py", "config": to_dict(load_config([("a test", said)]))}
        found = findings(capsys, *options)[1]["ports"]
        assert found[0] == state and (state == "wrong" or "one for the job's head" in found[1]), found
    spanning = {"network.ports": "29500-29504", "cell.hosts": 2, "cell.fsdp": 2, "workers": 2}
    head.job = {"task": "x.py", "config": to_dict(load_config([("a test", spanning)]))}
    assert findings(capsys, *options)[1]["ports"][0] == "wrong"


def test_another_token_at_one_of_several_addresses(
    head: FakeHead, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As at a single one: nobody has to wait for that."""
    wire.write_token(tmp_path / "other", wire.new_token())
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        names = f"127.0.0.1:{deaf.getsockname()[1]},{head.name}"
        argv = ["agent", "--join", names, "--token-file", str(tmp_path / "other"), "--set", "hosts.wait_s=0"]
        code, words = said(capsys, *argv)
    assert code == 2 and f"--join {names}: that head has another token (" in words and words.count("\n") == 1


def test_none_of_several_addresses(token_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as one, socket.socket() as other:
        for deaf in (one, other):
            deaf.bind(("127.0.0.1", 0))
        names = ",".join(f"127.0.0.1:{deaf.getsockname()[1]}" for deaf in (one, other))
        code, words = said(capsys, "agent", "--join", names, "--token-file", token_file, "--set", "hosts.wait_s=0")
    assert code == 4 and f"no head at {names} (none of them answers)" in words and words.count("\n") == 1


def test_who_answers_at_one_of_several_addresses_counts(head: FakeHead) -> None:
    """Beside one that is of another job."""
    with Stranger(b"HTTP/1.1 400 Bad Request\r\n\r\n" + bytes(20)) as name:
        places = places_in(f"{name},{head.name}")
        found = among(places, TOKEN, None)
        with pytest.raises(ProtocolError, match="expected an Everstep server"):
            among(places[:1], TOKEN, None)
    assert found is not None and found["port"] == places[1][1]


@pytest.mark.parametrize("answers", [b"HTTP/1.1 400 Bad Request\r\n\r\n", MAGIC + bytes(34)], ids=["web", "plain"])
def test_what_speaks_no_tls_has_no_other_token(
    answers: bytes, token_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A web server, or a job that speaks without: agent and doctor say the same."""
    words = "it speaks no TLS there (wrong version number): security.tls.mode has to be the same everywhere"
    options = ["--token-file", token_file, "--set", "security.tls.mode=on"]
    with Stranger(answers) as name:
        code, told = said(capsys, "agent", "--join", name, *options)
        assert code == 2 and f"--join {name}: {words}" in told and told.count("\n") == 1
        code, found = findings(capsys, "--join", name, *options)
        assert code == 1 and words in found["job"][1] and "token" not in found


def test_a_job_without_tls_is_refused_by_a_host_with_it(
    head: FakeHead, token_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """At its address, at one of several, and by its directory: never waited for."""
    wire.write_token(tmp_path / "job-token", TOKEN)
    announce(tmp_path / "coordinator.json", address_of("127.0.0.1", int(head.name.rpartition(":")[2])))
    for where in (head.name, f"file://{tmp_path}"):
        argv = ["agent", "--join", where, "--token-file", token_file, "--set", "security.tls.mode=on"]
        code, words = said(capsys, *argv)
        assert code == 2 and "the job there does not use TLS, and security.tls.mode is on here" in words, words


def test_a_head_that_was_slow_to_answer_has_the_mode_that_it_has_in_effect(head: FakeHead) -> None:
    """Without TLS on loopback, be it by auto or by off."""
    place, tls = ("127.0.0.1", int(head.name.rpartition(":")[2])), load_config([]).security.tls
    for mode in ("auto", "off"):
        check_mode(place, TOKEN, replace(tls, mode=mode), "127.0.0.1")
    with pytest.raises(TlsDiffers, match=r"the job there does not use TLS, and security\.tls\.mode is on here"):
        check_mode(place, TOKEN, replace(tls, mode="on"), "127.0.0.1")


def test_what_hangs_up_before_it_has_said_anything_may_expect_tls(
    token_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "the connection ended after 0 of 38 bytes: is security.tls.mode the same here and there?"
    options = ["--token-file", token_file, "--set", "security.tls.mode=off"]
    with Stranger(b"") as name:
        code, told = said(capsys, "agent", "--join", name, *options)
        assert code == 2 and words in told and "another token" not in told
        code, found = findings(capsys, "--join", name, *options)
        assert code == 1 and found["job"] == ("wrong", words)


def test_a_head_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        code, found = findings(capsys, "--join", f"127.0.0.1:{deaf.getsockname()[1]}")
    assert code == 1 and "connection refused" in found["head"][1]
    code, found = findings(capsys, "--join", "no.such.name.invalid:5")
    assert code == 1 and set(found) == {"name", "own name"} and found["name"][0] == "wrong"
    assert run_command(["doctor", "--join", "nowhere"]) == 2
    code, found = findings(capsys, "--join", "127.0.0.1:5", "--address", NOBODYS)
    assert code == 1 and "one of this host's addresses" in found["route"][1]
