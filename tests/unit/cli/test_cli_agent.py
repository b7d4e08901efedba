"""`everstep agent`, and what `everstep run` wants to know of others: what is wrong is one line, and exit code 2."""

from __future__ import annotations

import random
import socket
import threading
from hashlib import sha256
from pathlib import Path

import pytest

from everstep.base.config import load_config
from everstep.base.errors import ConfigError, ProtocolError, TokenRefused
from everstep.cli import agent, meeting
from everstep.cli.job import check_network
from everstep.cli.main import run_command
from everstep.cli.meeting import moves, wait_for_job
from everstep.cli.tokens import strong, token_in
from everstep.runtime.lead.finding import Where
from everstep.runtime.link import wire
from everstep.runtime.link.head_facts import HeadFacts
from everstep.runtime.start import Start

GIVEN = sha256(b"ab").hexdigest()


def said(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str]:
    code = run_command(list(argv))
    return code, capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--join", "127.0.0.1"], "--join: expected ADDR:PORT like 127.0.0.1:29400, got '127.0.0.1'"),
        (["--join", "127.0.0.1:99999"], "--join: expected ADDR:PORT"),
        (["--join", "/tmp/somewhere"], "--join: expected ADDR:PORT"),
        (["--join", "127.0.0.1:5"], "expected the job's token, got none: give --token-file, or set EVERSTEP_TOKEN"),
        (["--join", "127.0.0.1:5", "--token-file", "/nowhere"], "cannot read the token in /nowhere"),
        (["--join", "127.0.0.1:5", "--token-file", "{dir}/bad"], "expected the job's token, at least 32 hex digits"),
        (["--join", "127.0.0.1:5", "--run-dir", "{dir}"], "expected the job's token, got none"),
        (["--join", "127.0.0.1:5", "--slots", "0"], "--slots"),
        (["--join", "127.0.0.1:5", "--standby"], "--standby: expected --join etcd://"),
        (["--join", "etcd://127.0.0.1:5/j", "--standby", "--task", "mlp-digits"], "without --task"),
        (["--join", "127.0.0.1:5", "--address", "192.0.2.7"], "--address: expected one of this host's addresses"),
        (
            ["--join", "127.0.0.1:5", "--domain", "rack r1"],
            "--domain: expected labels like rack=r1,nvlink=u7 of region",
        ),
        ([], "--join"),
        (["--join", "file://"], "--join: expected file://DIR"),
        (["--join", "file:///x", "--run-dir", "{dir}"], "--run-dir: expected none"),
        (["--join", "127.0.0.1:5", "--refill", "0"], "--refill"),
    ],
)
def test_bad_input(
    argv: list[str],
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("EVERSTEP_TOKEN", raising=False)
    (tmp_path / "bad").write_text("xyz")
    code, words = said(capsys, "agent", *(word.format(dir=tmp_path) for word in argv))
    assert code == 2 and expected in words and words.count("\n") == 1, words


def test_the_token_of_the_environment_is_for_this_process_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVERSTEP_TOKEN", GIVEN)
    assert agent.given_token() == bytes.fromhex(GIVEN)
    assert agent.given_token() is None
    monkeypatch.setenv("EVERSTEP_TOKEN", "xyz")
    with pytest.raises(ConfigError, match="hex digits, in \\$EVERSTEP_TOKEN"):
        agent.given_token()


def test_something_else_that_listens_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wire.write_token(tmp_path / "token", wire.new_token())
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            while True:  # it is asked again, with TLS and without
                found, _ = listener.accept()
                found.sendall(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n")
                found.close()

        threading.Thread(target=answer, daemon=True).start()
        where = f"127.0.0.1:{listener.getsockname()[1]}"
        code, words = said(capsys, "agent", "--join", where, "--token-file", str(tmp_path / "token"))
    assert code == 2 and "expected an Everstep server" in words


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--listen", "nowhere"], "--listen: expected HOST:PORT"),
        (["--set", "network.address=0.0.0.0"], "network.address: expected one IPv4 address of this host"),
        (["--set", "network.address=224.0.0.1"], "network.address: expected one IPv4 address of this host"),
        (["--set", "network.address=300.1.1.1"], "network.address: expected one IPv4 address of this host"),
        (["--set", "network.address=name"], "network.address: expected text, like 127.0.0.1"),
        (["--no-local-workers"], "--no-local-workers: expected --listen ADDR:PORT"),
    ],
)
def test_addresses_of_a_job(argv: list[str], expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "script.py"
    script.touch()
    code, words = said(capsys, "run", str(script), "--dry-run", *argv)
    assert code == 2 and expected in words and words.count("\n") == 1, words


def test_a_comma_in_the_name_of_a_directory_is_no_second_address() -> None:
    assert not moves("file:///runs/a,b") and not moves("10.0.0.1:29400")
    assert moves("10.0.0.1:29400,10.0.0.2:29400") and moves("etcd://10.0.0.1/jobs/mine")


def test_where_nothing_can_listen() -> None:
    config = load_config([("test", {"network.address": "192.0.2.1"})])  # TEST-NET-1: nobody's
    with pytest.raises(ConfigError, match=r"network.address: expected an address of this host, got 192\.0\.2\.1"):
        check_network(config)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        with pytest.raises(ConfigError, match=r"--listen: cannot listen at 127\.0\.0\.1:"):
            check_network(load_config([]), taken.getsockname()[1])


MEETING = ["--world-size", "2", "--master-addr", "10.0.0.1", "--master-port", "5"]


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--rank", "1"], "expected --rank, --world-size, --master-addr, --master-port together, got none for"),
        (["--rank", "2", "--world-size", "2", "--master-addr", "10.0.0.1", "--master-port", "5"], "expected 0 to 1"),
        (["--rank", "1", "--world-size", "2", "--master-addr", "127.0.0.1", "--master-port", "5"], "2 hosts can reach"),
        (
            ["--rank", "0", "--world-size", "1", "--master-addr", "127.0.0.1", "--master-port", "5", "--listen", "a:1"],
            "--listen: expected none with --rank",
        ),
        (["--rank", "1", "--world-size", "2", "--master-addr", "10.0.0.1", "--master-port", "5"], "the job's token"),
        (["--rank", "1", *MEETING, "--dry-run"], "--dry-run: expected it with --rank 0"),
        (["--rank", "1", *MEETING, "--address", "9.9.9.9"], "--address: expected one of this host's addresses"),
        (["--rank", "1", *MEETING, "--token-file", "none"], "cannot read the token in none"),
        (["--rank", "0", "--world-size", "2", "--master-addr", "localhost", "--master-port", "5"], "(loopback)"),
        (["--slots", "4"], "--slots: expected --listen ADDR:PORT or --rank"),
        (["--listen", "localhost:0"], "--listen: expected an interface of this host"),
        (["--listen", "::1:0"], "--listen: expected HOST:PORT"),
        (["--listen", "[::]:0"], "--listen: expected --address IP with ::"),
    ],
)
def test_hosts_that_are_started_with_a_rank(
    argv: list[str], expected: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("EVERSTEP_TOKEN", raising=False)
    code, words = said(capsys, "run", "resnet18-digits", *argv)
    assert code == 2 and expected in words and words.count("\n") == 1, words


TORCHRUN = {"TORCHELASTIC_RUN_ID": "x", "RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}


@pytest.mark.parametrize(
    ("environ", "argv", "expected"),
    [
        ({}, [], "on several hosts: expected the job's token in EVERSTEP_TOKEN on all of them, got none"),
        ({"EVERSTEP_TOKEN": "xyz"}, [], "hex digits, in $EVERSTEP_TOKEN"),
        (
            {"EVERSTEP_TOKEN": GIVEN},
            [],
            "started by torchrun as process 0 of 2 on several hosts: set MASTER_ADDR",
        ),
        (
            {"EVERSTEP_TOKEN": GIVEN, "MASTER_ADDR": "127.0.0.1"},
            [],
            "has the address 127.0.0.1 there, which other hosts cannot reach",
        ),
        ({"LOCAL_WORLD_SIZE": "x"}, [], "does not say how many of them are on this host"),
        ({}, ["--listen", "127.0.0.1:0"], "--listen: expected none, because this process was started by"),
    ],
)
def test_a_job_that_another_launcher_has_started_several_times(
    environ: dict[str, str],
    argv: list[str],
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("EVERSTEP_TOKEN", raising=False)
    for name, value in {**TORCHRUN, **environ}.items():
        monkeypatch.setenv(name, value)
    code, words = said(capsys, "run", "resnet18-digits", *argv)
    assert code == 2 and expected in words and words.count("\n") == 1, words


@pytest.mark.parametrize(
    ("target", "most", "room", "wanted"), [(4, 6, 2, 6), (2, 6, 2, 4), (6, 6, 2, 0), (7, 6, 2, 0), (4, 6, 0, 6)]
)
def test_as_many_workers_as_there_were(target: int, most: int, room: int, wanted: int) -> None:
    assert agent.refilled(target, most, room) == wanted


def test_a_folder_whose_job_is_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "final").mkdir()
    (tmp_path / "final" / "digest.json").write_text('{"step": 3, "model": "a", "state": "b"}')
    wire.write_token(tmp_path / "token", wire.new_token())
    code, words = said(capsys, "agent", "--join", f"file://{tmp_path}", "--stay")
    assert code == 0 and f"the job in {tmp_path} is over" in words


def test_free_ports(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert run_command(["ports", "--start", str(port), "--end", str(port)]) == 1
        captured = capsys.readouterr()
        assert not captured.out and f"0 of 1 ports from {port} to {port} are free" in captured.err
    assert run_command(["ports", "--count", "3"]) == 0
    found = [int(text) for text in capsys.readouterr().out.strip().split(",")]
    assert len(set(found)) == 3 and found == sorted(found) and found[0] >= 29500
    assert run_command(["ports", "--start", "9", "--end", "5"]) == 2


def test_which_worker_or_host_is_to_leave(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for argv in ([], ["3", "--host", "b"]):
        code, words = said(capsys, "drain", str(tmp_path), *argv)
        assert code == 2 and "expected the number of a worker, or --host NAME" in words


@pytest.mark.parametrize("value", ["nan", "inf", "-1", "1e300"])
@pytest.mark.parametrize(
    "argv", [["drain", "--host", "b", "--grace"], ["checkpoint", "--timeout"], ["profile", "--timeout"]]
)
def test_seconds_are_a_number_that_a_clock_can_reach(
    argv: list[str], value: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, words = said(capsys, argv[0], str(tmp_path), *argv[1:-1], f"{argv[-1]}={value}")
    assert code == 2 and f"Invalid value for '{argv[-1]}'" in words and words.count("\n") == 1, words
    assert run_command(["top", str(tmp_path), "--interval", "nan"]) == 2
    assert "Invalid value for '--interval'" in capsys.readouterr().err


@pytest.mark.parametrize("error", [ProtocolError("it ended after 0 of 38 bytes"), TokenRefused("refused")])
def test_whoever_is_on_the_way_out_is_no_other_job(
    error: ProtocolError, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where the job was met before, who answers in no way that proves the token is followed by one that does."""
    answers: list[Exception | HeadFacts] = [error, ConnectionRefusedError(), HeadFacts(0.0, 0.0, {}, 0)]

    def ask(*_: object) -> HeadFacts:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(meeting, "ask_about", ask)
    begun = Start(load_config([]), own="127.0.0.1", token=b"t" * 32, where="127.0.0.1:5")

    def look() -> Where:
        return {"host": "127.0.0.1", "port": 5}

    met = wait_for_job(begun, look, patient=True)
    assert met is not None and met.place == ("127.0.0.1", 5) and not answers
    assert capsys.readouterr().err == f"no job answers at 127.0.0.1:5 ({error}): waiting for it\n"
    answers.append(error)
    with pytest.raises(ConfigError):
        wait_for_job(begun, look)


@pytest.mark.parametrize("name", ["", "a\nb", "\udcff", "x" * 300])
def test_a_name_that_no_job_can_show_is_refused(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, words = said(capsys, "agent", "--join", "127.0.0.1:1", "--host-name", name)
    assert code == 2 and "--host-name: expected 1 to 200 bytes" in words and words.count("\n") == 1, words


def test_an_address_of_the_sixth_version_needs_brackets(capsys: pytest.CaptureFixture[str]) -> None:
    for address, expected in (("[::1]:29400", "the token in none"), ("::1:29400", "like [fd00::1]:29400, got '::1")):
        code, words = said(capsys, "agent", "--join", address, "--token-file", "none")
        assert code == 2 and expected in words and words.count("\n") == 1, words


@pytest.mark.parametrize("text", ["ab" * 32, "00" * 16, "0123456789abcdef" * 4, bytes(range(32)).hex(), "deadbeef" * 8])
def test_a_token_that_can_be_guessed_is_refused(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVERSTEP_TOKEN", text)
    with pytest.raises(ConfigError, match="openssl rand -hex 32"):
        agent.given_token()
    (tmp_path / "token").write_text(text)
    with pytest.raises(ConfigError, match="can be guessed"):
        token_in(tmp_path / "token")


def test_no_random_token_is_refused() -> None:
    source = random.Random(7)
    for _ in range(20_000):
        strong(source.randbytes(16), "here")
        strong(source.randbytes(32), "here")
