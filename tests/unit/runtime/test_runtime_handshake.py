"""The handshake and the tags: what somebody without the token may try on the way, and what comes of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from fake_coordinator import both_ends
from hypothesis import given
from hypothesis import strategies as st

from everstep.base.errors import ProtocolError
from everstep.protocol.roles import CONTROL_ROLES, PEOPLE, READ, WORKER
from everstep.runtime.link import wire
from everstep.runtime.link.handshake import (
    MAX_ANSWER_BYTES,
    MAX_NAME_BYTES,
    PEER,
    Caller,
    Ends,
    Greeter,
    keys_of,
    peer_keys,
    role_token,
)

TOKEN = b"t" * 32
HERE = "10.0.0.1:5"
ENDS = Ends("10.0.0.2:7", HERE)


def greeter(token: bytes = TOKEN, here: str = HERE) -> Greeter:
    return Greeter(keys_of(token, CONTROL_ROLES), here)


def caller(role: str = "agent", name: str = "a", *, key: bytes | None = None, ends: Ends = ENDS) -> Caller:
    return Caller(role_token(TOKEN, role) if key is None else key, role, name, ends)


def test_both_sides_prove_the_token() -> None:
    server, client = greeter(), caller("agent", "host-1")
    there = client.accept(server.feed(client.answer(server.greeting)))
    here = server.seals
    assert here is not None and (here.role, here.name) == (there.role, there.name) == ("agent", "host-1")
    here.check(there.tag(b"hello"), b"hello")
    there.check(here.tag(b"what", b" now"), b"what now")


@given(st.integers(1, 50))
def test_an_answer_may_come_in_pieces(size: int) -> None:
    server, client = greeter(), caller()
    answer = client.answer(server.greeting)
    replies = [server.feed(answer[at : at + size]) for at in range(0, len(answer), size)]
    client.accept(b"".join(replies))


@pytest.mark.parametrize("role", sorted(CONTROL_ROLES))
def test_a_token_is_good_for_its_role_alone(role: str) -> None:
    for other in CONTROL_ROLES - {role}:
        server = greeter()
        with pytest.raises(ProtocolError, match="a wrong one"):
            server.feed(caller(other, key=role_token(TOKEN, role)).answer(server.greeting))


def test_each_life_of_a_worker_has_a_token_of_its_own() -> None:
    server = greeter()
    with pytest.raises(ProtocolError, match="a wrong one"):
        server.feed(caller("worker", "2.0", key=role_token(TOKEN, "worker", "2.1")).answer(server.greeting))
    server = greeter()
    server.feed(caller("worker", "2.1", key=role_token(TOKEN, "worker", "2.1")).answer(server.greeting))
    assert server.seals is not None and server.seals.name == "2.1"


def test_who_takes_peers_takes_nobody_else() -> None:
    server = Greeter(peer_keys(TOKEN), HERE)
    with pytest.raises(ProtocolError, match="a role that is served here, got 'agent'"):
        server.feed(caller("agent", key=TOKEN).answer(server.greeting))


def test_an_answer_to_another_greeting_is_worth_nothing() -> None:
    recorded = caller().answer(greeter().greeting)
    with pytest.raises(ProtocolError, match="a wrong one"):
        greeter().feed(recorded)


def test_a_connection_cannot_be_passed_on_to_another_server() -> None:
    """A relay that listens elsewhere hands the real greeting on, and the real answer back."""
    server = greeter(here="10.0.0.3:9")
    with pytest.raises(ProtocolError, match=r"expected a client of 10\.0\.0\.3:9, .*'10\.0\.0\.1:5'"):
        server.feed(caller().answer(server.greeting))


def test_a_server_that_does_not_know_the_token_is_not_believed() -> None:
    server, client = greeter(), caller()
    answer = client.answer(server.greeting)
    with pytest.raises(ProtocolError, match="another job"):
        client.accept(bytes(32))
    with pytest.raises(ProtocolError, match="another job"):
        client.accept(answer[-32:])  # the client's own proof, reflected


def test_servers_of_another_kind_or_version_are_named() -> None:
    with pytest.raises(ProtocolError, match="something else answered"):
        caller().answer(b"HTTP/1.1 400 Bad Request\r\n" + b" " * 20)
    greeting = greeter().greeting
    with pytest.raises(ProtocolError, match="the server speaks 99"):
        caller().answer(greeting[:4] + (99).to_bytes(2, "big") + greeting[6:])


def test_a_name_is_bounded() -> None:
    for name in ("x" * (MAX_NAME_BYTES + 1), "a\0b"):
        with pytest.raises(ProtocolError, match="a name of at most"):
            caller(name=name).answer(greeter().greeting)
    server = greeter()
    server.feed(caller(name="ü" * (MAX_NAME_BYTES // 2)).answer(server.greeting))
    assert server.seals is not None


@given(st.binary(max_size=2 * MAX_ANSWER_BYTES))
def test_what_a_stranger_says_is_bounded_and_proves_nothing(data: bytes) -> None:
    server = greeter()
    try:
        reply = server.feed(data)
    except ProtocolError:
        return
    assert reply == b"" and server.seals is None and len(data) <= MAX_ANSWER_BYTES + 2


def test_nothing_follows_the_answer_before_the_proof() -> None:
    server = greeter()
    with pytest.raises(ProtocolError, match="until the token is proven"):
        server.feed(caller().answer(server.greeting) + b"and more")


Attack = Callable[[list[bytes]], list[bytes]]
ATTACKS: dict[str, Attack] = {
    "injects": lambda sent: [wire.frame(b"stop") + bytes(16), *sent],
    "alters the body": lambda sent: [sent[0][:6] + bytes([sent[0][6] ^ 1]) + sent[0][7:], *sent[1:]],
    "alters the length": lambda sent: [(5).to_bytes(4, "big") + sent[0][4:], *sent[1:]],
    "says that it is deflated": lambda sent: [bytes([sent[0][0] | 0x80]) + sent[0][1:], *sent[1:]],
    "replays": lambda sent: [sent[0], sent[0], *sent[1:]],
    "reorders": lambda sent: [sent[1], sent[0], *sent[2:]],
    "leaves out": lambda sent: sent[1:],
    "puts two together": lambda sent: [sent[0][:-16] + sent[1], *sent[2:]],
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_relay_changes_nothing(attack: str) -> None:
    client, server = both_ends()
    sent = [wire.sealed(client, wire.frame(body)) for body in (b"first one", b"second one", b"third one")]
    reader = wire.FrameReader(server)
    with pytest.raises(ProtocolError, match=r"expected frame \d of the other end"):
        reader.feed(b"".join(ATTACKS[attack](sent)))


def test_a_relay_cannot_reflect_nor_take_from_another_connection() -> None:
    client, server = both_ends()
    ours = wire.sealed(client, wire.frame(b"mine"))
    with pytest.raises(ProtocolError, match="expected frame 1"):
        wire.FrameReader(client).feed(ours)
    other, _ = both_ends()
    with pytest.raises(ProtocolError, match="expected frame 1"):
        wire.FrameReader(server).feed(wire.sealed(other, wire.frame(b"mine")))


@given(st.binary(max_size=200), st.integers(0, 10_000))
def test_long_runs_of_bytes_bear_tags_between_hosts(data: bytes, at: int) -> None:
    client, server = both_ends()
    assert client.bulk_tags and server.bulk_tags
    sent, check = client.bulk_tag(), server.bulk_check()
    sent.add(data)
    check.add(data[: at % (len(data) + 1)])
    check.add(data[at % (len(data) + 1) :])
    check.check(sent.tag())
    forged = server.bulk_check()
    forged.add(data + b"!")
    with pytest.raises(ProtocolError, match="got others"):
        forged.check(client.bulk_tag().tag())


def test_and_none_on_one_host() -> None:
    server = greeter()
    client = caller(ends=Ends("10.0.0.1:7", HERE))
    assert not client.accept(server.feed(client.answer(server.greeting))).bulk_tags
    assert server.seals is not None and not server.seals.bulk_tags


def test_tokens_of_people_tell_nothing_of_others() -> None:
    made = {role_token(TOKEN, role) for role in (*PEOPLE, "agent", "job", "peer")}
    assert len(made) == 6 and TOKEN not in made


def test_a_server_has_no_token_for_roles_that_it_does_not_deal_with() -> None:
    keys = keys_of(b"t" * 32, frozenset({READ}))
    assert keys(READ, "") is not None
    assert [role for role in (PEER, WORKER, *PEOPLE, "", "nobody") if role != READ and keys(role, "")] == []
