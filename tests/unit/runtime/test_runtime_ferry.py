"""The process that carries a host's connections: members that meet through two of them, callers that are none, and what
it makes of the transfers that torch has."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import select
import signal
import socket
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from everstep.base.config_keys import TlsConfig
from everstep.base.errors import CollectiveAborted, ConfigError
from everstep.parallel import peers
from everstep.parallel.fence import Fence
from everstep.parallel.peers import Meeting, PeerSockets
from everstep.protocol.ferrying import Ferry, Message, Saying, Word
from everstep.runtime.link import ferry as ferry_process
from everstep.runtime.link import landing as landings
from everstep.runtime.link.ferry import Pier, TorchMail, carry
from everstep.runtime.link.landing import READY, VARIABLE, FerryHere, Landing, check_ferry
from everstep.runtime.link.tls import Tls, shown_by

KEY = bytes(40)
LIMIT_S = 30.0


class Calm:
    """Moves messages in memory. carried: bytes of what processes have sent."""

    def __init__(self) -> None:
        self.boxes: dict[int, deque[Message]] = {0: deque(), 1: deque()}
        self.carried = 0

    def mail(self, rank: int) -> Any:
        sea = self

        class Mail:
            sent = True

            def send(self, message: Message) -> None:
                sea.carried += len(message.content) if message.word.kind == Saying.BYTES else 0
                sea.boxes[message.rank].append(message._replace(rank=rank))

            def turn(self) -> list[Message]:
                box = sea.boxes[rank]
                return [box.popleft() for _ in range(len(box))]

        return Mail()


class Shore:
    """Two ferries that run, and where each host's processes find its own."""

    def __init__(self) -> None:
        self.sea = Calm()
        self.landings = [Landing(rank, secrets.token_hex(16)) for rank in (0, 1)]
        self._leaving = [os.pipe() for _ in self.landings]
        listeners = [landing.listen(16) for landing in self.landings]
        self.threads = [threading.Thread(target=self._run, args=place, daemon=True) for place in enumerate(listeners)]
        for thread in self.threads:
            thread.start()

    def _run(self, rank: int, listener: socket.socket) -> None:
        machine = Ferry(rank, [1 - rank], time.monotonic())
        with listener:
            carry(machine, self.sea.mail(rank), Pier(machine, listener), self._leaving[rank][0])

    def close(self) -> None:
        for _, end in self._leaving:
            os.close(end)
        for thread in self.threads:
            thread.join(LIMIT_S)
        for end, _ in self._leaving:
            os.close(end)


@pytest.fixture
def shore() -> Iterator[Shore]:
    found = Shore()
    yield found
    found.close()
    assert not any(thread.is_alive() for thread in found.threads), "they leave when both do"


Meet = Callable[[list[Landing | None]], list[PeerSockets]]


@pytest.fixture(params=["plain", "tls"])
def meet(request: pytest.FixtureRequest) -> Iterator[Meet]:
    """Members 3 and 7 of one generation, with these landings."""
    tls = Tls.of(shown_by(TlsConfig("on"), b"t" * 32, "127.0.0.1")) if request.param == "tls" else None
    found: list[PeerSockets] = []

    def made(places: list[Landing | None]) -> list[PeerSockets]:
        fence, store = Fence(), HashStore()
        fence.enter(1)
        said = store, "127.0.0.1", fence, b"k" * 32, tls
        found.extend(
            PeerSockets(Meeting((3, 7), me, *said, place), lambda: None)
            for me, place in zip((3, 7), places, strict=True)
        )
        return found

    yield made
    for peer in found:
        peer.retire()


def together(*calls: Callable[[], Any]) -> list[Any]:
    """All at once; returns what they return, or the error."""
    found: dict[int, Any] = {}

    def run(at: int, call: Callable[[], Any]) -> None:
        try:
            found[at] = call()
        except Exception as error:
            found[at] = error

    threads = [threading.Thread(target=run, args=entry, daemon=True) for entry in enumerate(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    return [found[at] for at in range(len(calls))]


def families(pair: list[PeerSockets]) -> list[int]:
    return [sock.family for peer in pair for sock in peer._sockets.values()]


def test_members_meet_by_their_ferries(shore: Shore, meet: Meet) -> None:
    pair = meet([*shore.landings])
    assert together(pair[0].connect, pair[1].connect) == [None, None]
    assert families(pair) == [socket.AF_INET, socket.AF_UNIX], "7 has called"
    sent = [secrets.token_bytes(6_000_000), secrets.token_bytes(9_000_000)]
    gathered = together(*(lambda k=k: pair[k].gather(KEY, sent[k]) for k in (0, 1)))  # type: ignore[misc]
    assert gathered == [{3: sent[0], 7: sent[1]}] * 2
    assert shore.sea.carried > 15_000_000
    pair[1].retire()
    with pytest.raises(CollectiveAborted) as caught:
        pair[0].gather(KEY, b"x" * 10_000_000)
    assert caught.value.accused == (7,)


@pytest.mark.parametrize("here", [0, 1])
def test_members_meet_without_a_ferry_that_has_ended(here: int, shore: Shore, meet: Meet) -> None:
    """Its own, or one that leads to nobody."""
    gone = Landing(1, secrets.token_hex(16)) if here else Landing(5, shore.landings[0].name)
    pair = meet([shore.landings[0] if here else gone, gone if here else shore.landings[1]])
    assert together(pair[0].connect, pair[1].connect) == [None, None]
    assert families(pair) == [socket.AF_INET] * 2
    assert together(lambda: pair[0].gather(KEY, b"a"), lambda: pair[1].gather(KEY, b"b")) == [{3: b"a", 7: b"b"}] * 2


def test_members_meet_without_a_ferry_that_says_nothing(
    shore: Shore, meet: Meet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "LINK_SILENT_S", 1.0)
    frozen = Landing(1, secrets.token_hex(16))
    with frozen.listen(16):
        pair = meet([shore.landings[0], frozen])
        assert together(pair[0].connect, pair[1].connect) == [None, None]
    assert families(pair) == [socket.AF_INET] * 2


def test_who_was_held_up_throws_no_call_away(shore: Shore, meet: Meet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "LINK_SILENT_S", 0.2)
    pair = meet([*shore.landings])
    monkeypatch.setattr(pair[1], "_tick", lambda: time.sleep(0.3))
    assert together(pair[0].connect, pair[1].connect) == [None, None]
    assert families(pair) == [socket.AF_INET, socket.AF_UNIX]


def test_of_one_host_nothing_crosses(shore: Shore, meet: Meet) -> None:
    pair = meet([shore.landings[0], shore.landings[0]])
    assert together(pair[0].connect, pair[1].connect) == [None, None]
    assert families(pair) == [socket.AF_INET] * 2


@pytest.mark.parametrize("address", ["127.0.0.1:1", "nonsense", "127.0.0.1:x", "[::1]:1", "host:5", "127.0.0.1:99999"])
def test_where_nobody_listens_there_is_the_end(shore: Shore, address: str) -> None:
    with shore.landings[0].cross(1, address) as sock:
        ended(sock)


def test_a_caller_that_says_nonsense_is_sent_off(shore: Shore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ferry_process, "_STRANGER_S", 0.5)
    for said in (b"\0\0\0\1\xff", b"\0\0\0\1\5nobod", b"\0\0\0\1\2\xc3\xa9", b""):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.connect(shore.landings[0]._address())
            sock.sendall(said)
            ended(sock)


def test_another_user_is_sent_off(shore: Shore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ferry_process, "is_own", lambda sock: False)
    with contextlib.suppress(BrokenPipeError):  # it may hang up before the caller has said whom it wants
        with shore.landings[0].cross(1, "127.0.0.1:1") as sock:
            ended(sock)
    monkeypatch.setattr(landings, "is_own", lambda sock: False)
    with pytest.raises(ConnectionError, match="another user's"):
        shore.landings[0].cross(1, "127.0.0.1:1")


def ended(sock: socket.socket) -> None:
    """The other end hangs up, and has said nothing."""
    poller = select.poll()
    poller.register(sock, select.POLLIN)
    assert poller.poll(LIMIT_S * 1000)
    sock.setblocking(True)
    try:
        assert sock.recv(1) == b""
    except ConnectionError:
        pass  # with something unread


def test_without_descriptors_others_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    landing = Landing(0, secrets.token_hex(16))
    with landing.listen(4) as listener, landing.cross(1, "127.0.0.1:5") as sock:

        class Listener:
            refuses = True

            def fileno(self) -> int:
                return listener.fileno()

            def accept(self) -> tuple[socket.socket, Any]:
                if self.refuses:
                    raise OSError(errno.EMFILE, "too many")
                return listener.accept()

        found = Listener()
        ferry = Ferry(0, [1], 100.0)
        pier = Pier(ferry, found)  # type: ignore[arg-type]
        assert [pier.turn(100.0), pier.turn(100.1)] == [True, False], "it spins"
        found.refuses = False
        pier.look(100.2)
        assert [pier.turn(100.3), pier.turn(100.4)] == [True, True]
        assert [message.word.kind for message in ferry.out] == [Saying.ASK, Saying.OPEN]
        pier.do(ferry.leave(), 100.5)
        ended(sock)


def test_what_cannot_be_sent_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a ferry that is through with all others, of which some are silent."""
    monkeypatch.setattr(ferry_process, "SILENT_S", 0.2)

    class Stuck:
        sent = False

        def send(self, message: Message) -> None:
            pass

        def turn(self) -> list[Message]:
            return []

    end, other = os.pipe()
    os.close(other)
    with Landing(0, secrets.token_hex(16)).listen(4) as listener:
        ferry = Ferry(0, [1], time.monotonic() - 100.0)
        monkeypatch.setattr("everstep.protocol.ferrying.SILENT_S", 0.5)
        carry(ferry, Stuck(), Pier(ferry, listener), end)  # type: ignore[arg-type]
    os.close(end)
    assert ferry.through


def test_what_is_made_of_torchs_transfers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transfers of one size, in order, some of which take a while."""
    under_way: dict[tuple[int, int, int], deque[torch.Tensor]] = defaultdict(deque)

    class Received:
        def __init__(self, tensor: torch.Tensor, lane: tuple[int, int, int]) -> None:
            self._tensor, self._lane, self._done = tensor, lane, False

        def is_completed(self) -> bool:
            if not self._done and under_way[self._lane]:
                self._tensor.copy_(under_way[self._lane].popleft())
                self._done = True
            return self._done

    class Sent:
        asked = 0

        def is_completed(self) -> bool:
            self.asked += 1
            return self.asked > 1

    me = [0]

    def isend(tensor: torch.Tensor, dst: int, tag: int) -> Sent:
        under_way[me[0], dst, tag].append(tensor)
        return Sent()

    monkeypatch.setattr(torch.distributed, "isend", isend)
    monkeypatch.setattr(torch.distributed, "irecv", lambda tensor, src, tag: Received(tensor, (src, me[0], tag)))
    mails = []
    for me[0] in (0, 1):
        mails.append(TorchMail([1 - me[0]]))
    me[0] = 0
    words = [Word(Saying.OPEN, True, 1, 5), Word(Saying.ASK), Word(Saying.BYTES, True, 1, 3), Word(Saying.LAST)]
    contents = [b"there", b"", b"abc", b""]
    for word, content in zip(words, contents, strict=True):
        mails[0].send(Message(1, word, memoryview(bytearray(content))))
    assert not mails[0].sent
    me[0] = 1
    found = mails[1].turn()
    assert [(m.rank, m.word, bytes(m.content)) for m in found] == [
        (0, word, content) for word, content in zip(words, contents, strict=True)
    ]
    assert mails[1].whole, "nothing follows the last word"
    for _ in range(3):
        mails[0].turn()
    assert mails[0].sent and not mails[0].whole


def test_a_torch_without_mpi_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_mpi_available", lambda: False)
    check_ferry("auto")
    for refused in (lambda: check_ferry("mpi"), lambda: FerryHere(0, 2)):
        with pytest.raises(ConfigError, match=r"with which this torch .* was not built: give e.g. transport=auto"):
            refused()


@pytest.mark.parametrize("value", ["", "0", "0 xyz", "-1 " + "a" * 32])
def test_a_process_without_a_rank_is_refused(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_mpi_available", lambda: True)
    monkeypatch.setenv(VARIABLE, value)
    with pytest.raises(ConfigError, match="got one that has no rank of MPI's"):
        check_ferry("mpi")
    monkeypatch.setenv(VARIABLE, Landing(3, "a" * 32).text())
    check_ferry("mpi")


@pytest.mark.parametrize(
    ("does", "said"),
    [
        ("print('this process is 0 of 1 in the world of MPI'); import sys; sys.exit(2)", "0 of 1 in the world of MPI"),
        ("import sys; sys.exit(7)", "MPI has not begun: exit code 7, expected process 1 of 3"),
    ],
)
def test_where_mpi_does_not_begin_nothing_does(does: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_mpi_available", lambda: True)
    monkeypatch.setattr(landings, "lasting_command", lambda *words: [sys.executable, "-c", does])
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(ConfigError, match=said):
        FerryHere(1, 3)
    assert VARIABLE not in os.environ


@pytest.mark.parametrize("in_order", [True, False])
def test_a_ferry_is_told_when_it_is_needed_no_more(in_order: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_mpi_available", lambda: True)
    does = f"import sys; print({READY!r}, flush=True); sys.stdin.read()"
    monkeypatch.setattr(landings, "lasting_command", lambda *words: [sys.executable, "-c", does])
    monkeypatch.setenv(VARIABLE, "")
    here = FerryHere(1, 3)
    found = Landing.here(os.environ)
    assert found is not None and found.rank == 1
    here.close(in_order=in_order)
    assert here._process.returncode == (0 if in_order else -signal.SIGKILL)
