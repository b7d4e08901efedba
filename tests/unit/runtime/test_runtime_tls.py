"""TLS between hosts: what comes through, what does not, and that each refusal is one line at either end."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from certificates import own_ca
from everstep.base.config import load_config
from everstep.base.config_keys import TlsConfig
from everstep.base.errors import CollectiveAborted, ConfigError, EverstepError, ProtocolError
from everstep.runtime.link.handshake import MAGIC, PEER, Ends, peer_keys
from everstep.runtime.link.peer import PeerConnection, PeerServer, peer_connect
from everstep.runtime.link.tls import Shown, Tls, TlsPipe, TlsSocket, fingerprint_of, shown_by
from everstep.runtime.link.unproven_connections import MAX_STRANGERS, Complaints, UnprovenConnections
from everstep.runtime.link.wire import handshake_client, secured

TOKEN, KEY = b"t" * 32, b"k" * 32
OURS, THEIRS = "127.0.0.1", "127.0.0.2"
"""Callers come from the first, so the second counts as another host."""
PATIENCE_S = 30.0


def shown(address: str, token: bytes = TOKEN) -> Shown:
    found = shown_by(TlsConfig(mode="on"), token, address)
    assert found is not None
    return replace(found, everywhere=False)


@pytest.fixture(scope="module")
def caller() -> Tls:
    return Tls(shown(OURS))


@pytest.fixture(scope="module")
def answerer() -> Tls:
    return Tls(shown(THEIRS))


class Door:
    """A unproven at the other host, and who came in; `said`: what it complained of."""

    def __init__(self, tls: Tls | None, host: str = THEIRS) -> None:
        self.said: list[str] = []
        self.known: list[socket.socket] = []
        self.came = threading.Event()
        self.complained = threading.Event()
        self._listener = socket.create_server((host, 0), backlog=1024)
        self.address: tuple[str, int] = self._listener.getsockname()
        self._unproven = UnprovenConnections(self._listener, peer_keys(KEY), Complaints(self._complain), tls)
        self._over = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _complain(self, text: str) -> None:
        self.said.append(text)
        self.complained.set()

    def _run(self) -> None:
        while not self._over:
            found = self._unproven.turn(0.05)
            self.known += [sock for sock, _ in found]
            if found:
                self.came.set()

    def call(self, tls: Tls | None, patience_s: float = PATIENCE_S) -> socket.socket:
        sock = secured(socket.create_connection(self.address, patience_s), tls)
        try:
            handshake_client(sock, KEY, PEER, "me")
        except BaseException:
            sock.close()
            raise
        return sock

    def close(self) -> None:
        self._over = True
        self._thread.join(PATIENCE_S)
        self._unproven.close()
        self._listener.close()
        for sock in self.known:
            sock.close()


@pytest.fixture
def open_door() -> Iterator[Callable[..., Door]]:
    doors: list[Door] = []

    def make(*args: object) -> Door:
        doors.append(Door(*args))  # type: ignore[arg-type]
        return doors[-1]

    yield make
    for door in doors:
        door.close()


def test_no_older_tls_is_spoken(open_door: Callable[..., Door], answerer: Tls) -> None:
    door = open_door(answerer)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_2
    with socket.create_connection(door.address, PATIENCE_S) as sock, pytest.raises(ssl.SSLError, match="VERSION"):
        context.wrap_socket(sock)


def test_between_hosts_all_is_said_over_tls_1_3(open_door: Callable[..., Door], caller: Tls, answerer: Tls) -> None:
    door = open_door(answerer)
    with door.call(caller) as sock:
        assert isinstance(sock, TlsSocket) and sock.version() == "TLSv1.3"
        assert door.came.wait(PATIENCE_S) and not door.said
        there = door.known[0]
        assert isinstance(there, TlsSocket) and there.getpeercert(binary_form=True)


def test_within_a_host_nothing_is_unless_it_is_asked_for(open_door: Callable[..., Door]) -> None:
    for everywhere in (False, True):
        tls = Tls(replace(shown(OURS), everywhere=everywhere))
        door = open_door(tls, OURS)
        with door.call(tls) as sock:
            assert isinstance(sock, TlsSocket) is everywhere


def test_the_default_is_tls_for_who_listens_beyond_loopback() -> None:
    auto = load_config([]).security.tls
    assert shown_by(auto, TOKEN, "127.0.0.1") is None and shown_by(TlsConfig("off"), TOKEN, "10.0.0.1") is None
    assert shown_by(auto, TOKEN, "10.0.0.1") is not None
    assert load_config([("x.yaml", {"security": {"tls": {"mode": False}}})]).security.tls.mode == "off"


def test_who_knows_the_token_knows_the_ca_and_nobody_else(caller: Tls) -> None:
    assert shown(OURS).ca == shown(THEIRS).ca != shown(OURS, b"u" * 32).ca
    assert shown(OURS).key != shown(OURS).key, "each has its own"


# ---- who is not let in, in one line at either end


def refusals(door: Door, tls: Tls | None, patience_s: float = PATIENCE_S) -> tuple[str, str]:
    """What the caller is told, and what the door says."""
    with pytest.raises((EverstepError, OSError)) as caught:
        door.call(tls, patience_s)
    assert door.complained.wait(PATIENCE_S) and len(door.said) == 1
    texts = str(caught.value), door.said[0]
    assert not any("\n" in text or "Traceback" in text or "_ssl" in text for text in texts), texts
    assert not door.known
    return texts


def test_a_host_with_another_token(open_door: Callable[..., Door], answerer: Tls) -> None:
    told, complaint = refusals(open_door(answerer), Tls(shown(OURS, b"u" * 32)))
    assert "its certificate is not trusted here" in told
    assert "it refused the certificate of this end (unknown ca)" in complaint


def test_a_certificate_of_another_ca_with_our_name(open_door: Callable[..., Door], answerer: Tls) -> None:
    """It believes the right CA, which is no secret, and shows something of its own."""
    alien = shown(OURS, b"u" * 32)
    told, complaint = refusals(open_door(answerer), Tls(replace(alien, ca=shown(OURS).ca)))
    assert "the server does not trust this host: it refused the certificate of this end" in told
    assert "its certificate is not trusted here" in complaint


def test_nothing_at_all_is_shown(open_door: Callable[..., Door], answerer: Tls) -> None:
    told, complaint = refusals(open_door(answerer), Tls(Shown("", "", shown(OURS).ca)))
    assert "(certificate required)" in told and "expected a certificate, it showed none" in complaint


def test_the_certificate_of_another_host(open_door: Callable[..., Door], caller: Tls) -> None:
    """A worker of a third host, which has that host's certificate, sits at this one's address."""
    told, complaint = refusals(open_door(Tls(shown("127.0.0.3"))), caller)
    assert "IP address mismatch" in told and "it refused the certificate of this end" in complaint


def test_one_that_is_over(open_door: Callable[..., Door], caller: Tls, tmp_path: Path) -> None:
    told, complaint = refusals(open_door(Tls(own_ca(THEIRS, days=-1))), Tls(own_ca(OURS)))
    assert "certificate has expired" in told and "(certificate expired)" in complaint


def test_a_plain_client_at_a_tls_port(open_door: Callable[..., Door], answerer: Tls) -> None:
    told, complaint = refusals(open_door(answerer), None, 0.3)
    assert told == "it says nothing: is security.tls.mode the same here and there?"
    assert "it hung up" in complaint or "TLS" in complaint or "EOF" in complaint


def test_a_tls_client_at_a_plain_port(open_door: Callable[..., Door], caller: Tls) -> None:
    told, complaint = refusals(open_door(None), caller)
    assert "it speaks no TLS there (wrong version number): security.tls.mode has to be the same everywhere" in told
    assert "expected a plain client, one that speaks TLS came: is security.tls.mode the same everywhere?" in complaint


class Relay:
    """Somebody on the way: takes a caller's connection with one certificate, and calls the door with another."""

    def __init__(self, door: Door, towards_caller: Tls, towards_door: Tls) -> None:
        self._listener = socket.create_server((THEIRS, 0))
        self.address = self._listener.getsockname()
        self._door = door
        self._tls = (towards_caller, towards_door)
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        taken = self._tls[0].answer(self._listener.accept()[0])
        taken.settimeout(PATIENCE_S)
        taken.do_handshake()
        there = secured(socket.create_connection(self._door.address, PATIENCE_S), self._tls[1])
        taken.sendall(there.recv(4096))
        there.sendall(taken.recv(4096))
        taken.sendall(there.recv(4096))
        self._listener.close()


def test_a_host_of_the_job_cannot_stand_between_two_others(
    open_door: Callable[..., Door], caller: Tls, answerer: Tls, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has a certificate of the CA for the right address (there are several jobs' hosts at it, say), and passes the
    handshake of the token on; the caller even takes it for whom it dialled."""
    door = open_door(answerer)
    relay = Relay(door, Tls(shown(THEIRS)), caller)
    monkeypatch.setattr("everstep.runtime.link.wire.address_text", lambda name: f"{name[0]}:{door.address[1]}")
    sock = secured(socket.create_connection(relay.address, PATIENCE_S), caller)
    with sock, pytest.raises(ProtocolError, match="refused this job's token"):
        handshake_client(sock, KEY, PEER, "me")
    assert door.complained.wait(PATIENCE_S)
    assert "got one that was shown another" in door.said[0] and not door.known


def test_a_recorded_conversation_is_worth_nothing(open_door: Callable[..., Door], caller: Tls, answerer: Tls) -> None:
    door = open_door(answerer)
    heard: list[bytes] = []
    with socket.create_server((THEIRS, 0)) as listener:

        def listen_in() -> None:
            with listener.accept()[0] as ours, socket.create_connection(door.address) as there:
                for one, other in ((ours, there), (there, ours), (ours, there)):
                    heard.append(one.recv(1 << 16))
                    other.sendall(heard[-1])
                ours.recv(1)

        thread = threading.Thread(target=listen_in)
        thread.start()
        sock = socket.create_connection(listener.getsockname(), PATIENCE_S)
        secured(sock, caller).close()
        thread.join(PATIENCE_S)
    with socket.create_connection(door.address, PATIENCE_S) as again:
        again.sendall(heard[0])
        again.recv(1 << 16)
        again.sendall(heard[2])
        with contextlib.suppress(ConnectionError):
            while again.recv(1 << 16):
                pass
    assert not door.known, "it has hung up"


# ---- strangers, and what bytes cost


def test_strangers_that_speak_tls_are_few_and_in_nobodys_way(
    open_door: Callable[..., Door], caller: Tls, answerer: Tls
) -> None:
    door = open_door(answerer)
    hello = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    outgoing = ssl.MemoryBIO()
    with pytest.raises(ssl.SSLWantReadError):
        hello.wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname="x").do_handshake()
    first = outgoing.read()
    before = len(os.listdir("/proc/self/fd"))
    crowd = []
    for number in range(MAX_STRANGERS + 100):
        crowd.append(socket.create_connection(door.address))
        crowd[-1].send((b"", first, first[:50])[number % 3])
    with door.call(caller):
        assert door.came.wait(PATIENCE_S)
    assert len(os.listdir("/proc/self/fd")) - before - len(crowd) <= MAX_STRANGERS + 2
    assert len(door.said) <= 2
    for sock in crowd:
        sock.close()


def test_bulk_arrives_both_ways_at_once_and_an_abort_ends_it(caller: Tls, answerer: Tls) -> None:
    content = os.urandom(3 << 20)

    def handle(connection: PeerConnection, request: dict[str, int]) -> None:
        back = threading.Thread(target=connection.send_bytes, args=([content],))
        back.start()
        assert bytes(connection.recv_bytes(1 << 30)) == content
        back.join(PATIENCE_S)
        connection.send_json("done")
        connection.recv_json()

    server = PeerServer(THEIRS, KEY, handle, answerer)
    with peer_connect(server.address, KEY, {}, tls=caller) as peer:
        assert not peer._seals.bulk_tags
        there = threading.Thread(target=peer.send_bytes, args=([content],))
        there.start()
        assert bytes(peer.recv_bytes(1 << 30)) == content
        there.join(PATIENCE_S)
        while not peer.readable(0.1):
            pass
        assert peer.recv_json() == "done"
        timer = threading.Timer(0.05, peer.abort)
        timer.start()
        with pytest.raises(CollectiveAborted):
            peer.recv_json()
    server.close()


def test_a_changed_record_ends_the_connection(caller: Tls, answerer: Tls) -> None:
    pipe, data = TlsPipe(answerer._answering_people), b""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = caller._calling.wrap_bio(incoming, outgoing, server_hostname=THEIRS)
    for _ in range(3):
        try:
            client.do_handshake()
        except ssl.SSLWantReadError:
            pass
        data += pipe.feed(outgoing.read())
        incoming.write(pipe.leaving())
    assert pipe.ready and pipe.shows_certificate
    client.write(b"stop")
    assert pipe.feed(outgoing.read()) == b"stop"
    client.write(b"stop")
    changed = bytearray(outgoing.read())
    changed[-1] ^= 1
    with pytest.raises(ProtocolError, match="expected the bytes that the other end sent"):
        pipe.feed(bytes(changed))


# ---- files of one's own


def settings(folder: Path, **texts: str) -> TlsConfig:
    for name, text in texts.items():
        (folder / name).write_text(text)
    return TlsConfig("auto", *(str(folder / name) for name in ("cert", "ca", "key")))


def test_files_of_ones_own_take_the_place_of_the_jobs(
    open_door: Callable[..., Door], caller: Tls, tmp_path: Path
) -> None:
    made = own_ca(THEIRS)
    found = shown_by(settings(tmp_path, cert=made.cert, key=made.key, ca=made.ca), TOKEN, "10.0.0.1")
    assert found is not None and found == made
    assert Tls(found).fingerprint == fingerprint_of(ssl.PEM_cert_to_DER_cert(made.cert))
    door = open_door(Tls(found))
    with door.call(Tls(own_ca(OURS))) as sock:
        assert isinstance(sock, TlsSocket)
    with pytest.raises(ProtocolError, match="is not trusted here"):
        door.call(caller)


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        ({"ca": "nonsense"}, "security.tls.ca: expected certificates in PEM form"),
        ({"cert": "nonsense"}, "security.tls.cert: expected a certificate in .*cert"),
        ({"key": "nonsense"}, "security.tls.cert: .*its key, without a password, in .*key"),
        ({"ca": "\xe9"}, "security.tls.ca: expected a PEM file"),
    ],
)
def test_files_that_are_none_are_named(tmp_path: Path, texts: dict[str, str], words: str) -> None:
    made = own_ca(OURS)
    given = settings(tmp_path, **{"cert": made.cert, "key": made.key, "ca": made.ca, **texts})
    with pytest.raises(ConfigError, match=words) as caught:
        shown_by(given, TOKEN, "10.0.0.1")
    assert "\n" not in str(caught.value)


def test_all_three_or_none() -> None:
    with pytest.raises(ConfigError, match=r"security\.tls\.key: expected .* together"):
        load_config([("x", {"security": {"tls": {"cert": "a", "ca": "b"}}})])


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"security\.tls\.cert: cannot read .*: No such file"):
        shown_by(settings(tmp_path), TOKEN, "10.0.0.1")


def test_what_is_covered() -> None:
    tls = Tls(shown(OURS))
    assert tls.covers(Ends("10.0.0.1:5", "10.0.0.2:5")) and not tls.covers(Ends("10.0.0.1:5", "10.0.0.1:7"))
    assert MAGIC not in tls.fingerprint.encode()
