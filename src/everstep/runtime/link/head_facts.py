"""What a host asks a job's head before it takes part: does it answer, is the token right, what time is it there?"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from everstep.base.config_keys import TlsConfig
from everstep.base.errors import ProtocolError, TokenRefused, Untrusted
from everstep.protocol.messages import AnyMessage, Command, CommandReply, TermBegun, decode, encode
from everstep.protocol.roles import READ
from everstep.runtime.link import wire
from everstep.runtime.link.handshake import role_token
from everstep.runtime.link.interfaces import interface_of, mtu_of
from everstep.runtime.link.tls import Tls, shown_by

ABOUT = "about"
CLOCK_LIMIT_S = 5.0
FULL_PACKETS_BYTES = 32 << 10
"""So much is said both ways that packets of full size have to arrive."""


class HeadFacts(NamedTuple):
    """What the head's host says. rtt_s: of the question; ahead_s: by how much its clock is ahead of this host's."""

    rtt_s: float
    ahead_s: float
    versions: dict[str, str]
    mtu: int


def answer(
    args: Mapping[str, Any], versions: Mapping[str, str], address: str, clock: Callable[[], int]
) -> dict[str, Any]:
    """What the head says of itself. args: as `ask_about` sends them. clock: Unix nanoseconds."""
    padding = args.get("padding")
    padding = padding[:FULL_PACKETS_BYTES] if isinstance(padding, str) else ""
    mtu = mtu_of(interface_of(address))
    return {"time_unix_ns": clock(), "versions": dict(versions), "mtu": mtu, "padding": padding}


def ask_about(where: tuple[str, int], token: bytes, tls: TlsConfig, own: str, padding: int = 0) -> HeadFacts:
    """Ask the head that listens there. own: this host's address. padding: bytes that go there and back.

    Raises: TokenRefused if it has another token; ProtocolError if it is no head, or of another version; ConfigError if
    this host cannot speak TLS; OSError if it does not answer.
    """
    with _connected(where, token, tls, own) as sock:
        seals = wire.handshake_client(sock, role_token(token, READ), READ, f"agent-{os.getpid()}")
        begin_ns = time.time_ns()
        wire.send_frame(sock, seals, encode(Command(request=1, name=ABOUT, args={"padding": "." * padding})))
        reply = decode(wire.recv_frame(sock, seals))
        if isinstance(reply, TermBegun):  # where there is a lease, each connection begins with that
            reply = decode(wire.recv_frame(sock, seals))
        end_ns = time.time_ns()
    return heard_of(reply, begin_ns, end_ns)


def heard_of(reply: AnyMessage, begin_ns: int, end_ns: int) -> HeadFacts:
    """What a reply says, to a question of that moment (Unix nanoseconds) that was answered at the other.

    Raises: ProtocolError if it is none.
    """
    said = reply.result if isinstance(reply, CommandReply) and reply.ok else {}
    then_ns, versions, mtu = said.get("time_unix_ns"), said.get("versions"), said.get("mtu")
    if (
        not isinstance(then_ns, int)
        or abs(then_ns) >= 1 << 63
        or not isinstance(versions, dict)
        or not isinstance(mtu, int)
    ):
        raise ProtocolError("expected time, versions and mtu of the head, got something else: use one release")
    ahead_s = (then_ns - (begin_ns + end_ns) / 2) / 1e9
    named = {str(name)[:100]: str(text)[:100] for name, text in list(versions.items())[:16]}
    return HeadFacts((end_ns - begin_ns) / 1e9, ahead_s, named, mtu)


def _connected(where: tuple[str, int], token: bytes, tls: TlsConfig, own: str) -> socket.socket:
    sock = socket.create_connection(where, wire.HANDSHAKE_TIMEOUT_S)
    try:
        return wire.secured(sock, Tls.of(shown_by(tls, token, own)))
    except ProtocolError as error:
        raise as_refused(error, tls) from None


def as_refused(error: ProtocolError, tls: TlsConfig) -> ProtocolError:
    """What it means that a server could not be spoken with: it has another token, where that is not believed."""
    made = tls.cert is None  # both certificates are made of the tokens
    return TokenRefused(str(error)) if made and isinstance(error, Untrusted) else error


def refusal_words(error: ProtocolError) -> str:
    """What people are told of it."""
    return f"that head has another token ({error})" if isinstance(error, TokenRefused) else str(error)


def clock_words(heard: HeadFacts) -> str:
    """What there is to say about the two clocks; "" if nothing."""
    if abs(heard.ahead_s) <= CLOCK_LIMIT_S + heard.rtt_s:
        return ""
    which = "behind" if heard.ahead_s > 0 else "ahead of"
    ahead = f"this host's clock is {abs(heard.ahead_s):.1f} s {which} that of the job's head"
    return f"{ahead}: training is not affected, but times in events and logs will not match; set the clocks (NTP)"
