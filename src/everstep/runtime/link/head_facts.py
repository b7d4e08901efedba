"""Questions of a host to a job's head before it takes part: does it answer, is the token right, what time is it?"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

from everstep.base.config_keys import TlsConfig
from everstep.base.errors import EverstepError, ProtocolError, TlsDiffers, TokenRefused, Untrusted
from everstep.protocol.messages import AnyMessage, Command, CommandReply, TermBegun, decode, encode
from everstep.protocol.roles import READ
from everstep.runtime.link import wire
from everstep.runtime.link.handshake import role_token
from everstep.runtime.link.interfaces import interface_of, mtu_of
from everstep.runtime.link.tls import Tls, shown_by

ABOUT = "about"
_OF_JOB = ("task", "config", "code", "lane_digest")
_PIECES, _AHEAD = 64, 4
CLOCK_LIMIT_S = 5.0
FULL_PACKETS_BYTES = 32 << 10
"""Bytes sent both ways, so many that packets of full size have to arrive."""


class HeadFacts(NamedTuple):
    """Answers of the head's host. rtt_s: of the question; ahead_s: lead of its clock over this host's. job: facts of
    the job, if they were asked for: task, config, code, lane_digest."""

    rtt_s: float
    ahead_s: float
    versions: dict[str, str]
    mtu: int
    job: Mapping[str, Any] = MappingProxyType({})


def answer(
    args: Mapping[str, Any],
    versions: Mapping[str, str],
    address: str,
    clock: Callable[[], int],
    job: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Any]:
    """Answer of a head about itself. args: as `ask_about` sends them. clock: Unix nanoseconds. job: of job.json."""
    padding = args.get("padding")
    padding = padding[:FULL_PACKETS_BYTES] if isinstance(padding, str) else ""
    mtu = mtu_of(interface_of(address))
    told = {"job": {name: job.get(name) for name in _OF_JOB}} if args.get("job") is True else {}
    return {"time_unix_ns": clock(), "versions": dict(versions), "mtu": mtu, "padding": padding, **told}


def ask_about(
    where: tuple[str, int], token: bytes, tls: TlsConfig, own: str, padding: int = 0, *, job: bool = False
) -> HeadFacts:
    """Ask the head that listens there. own: this host's address. padding: bytes that go there and back. job: ask for
    facts of the job, too.

    Raises: TokenRefused if it has another token; TlsDiffers if it uses TLS and this host does not, or the other way
    round; ProtocolError if it is no head, or of another version; ConfigError if this host cannot speak TLS; OSError if
    it does not answer.
    """
    try:
        return _asked(where, token, tls, own, {"padding": _noise(padding), **({"job": True} if job else {})})
    except TokenRefused:
        raise
    except (ProtocolError, TimeoutError):
        check_mode(where, token, tls, own)
        raise


def _noise(size: int) -> str:
    """Text of so many bytes that no compression makes shorter by much."""
    return secrets.token_hex(size // 2)


def bandwidth(where: tuple[str, int], token: bytes, tls: TlsConfig, own: str) -> float:
    """Bytes per second that pass between this host and the head over one connection, in each direction at once: a few
    megabytes are sent there and back. Raises: as `ask_about`."""
    with _connected(where, token, tls, own) as sock:
        seals = wire.handshake_client(sock, role_token(token, READ), READ, f"agent-{os.getpid()}")
        body = encode(Command(request=1, name=ABOUT, args={"padding": _noise(FULL_PACKETS_BYTES)}))
        begin_s, heard = time.monotonic(), 0
        for number in range(_PIECES + _AHEAD):
            if number < _PIECES:
                wire.send_frame(sock, seals, body)
            while number >= _AHEAD and heard < number - _AHEAD + 1:
                heard += not isinstance(decode(wire.recv_frame(sock, seals)), TermBegun)
        return _PIECES * FULL_PACKETS_BYTES / max(time.monotonic() - begin_s, 1e-6)


def _asked(where: tuple[str, int], token: bytes, tls: TlsConfig, own: str, args: dict[str, Any]) -> HeadFacts:
    with _connected(where, token, tls, own) as sock:
        seals = wire.handshake_client(sock, role_token(token, READ), READ, f"agent-{os.getpid()}")
        begin_ns = time.time_ns()
        wire.send_frame(sock, seals, encode(Command(request=1, name=ABOUT, args=args)))
        reply = decode(wire.recv_frame(sock, seals))
        if isinstance(reply, TermBegun):  # each connection begins with that
            reply = decode(wire.recv_frame(sock, seals))
        end_ns = time.time_ns()
    return heard_of(reply, begin_ns, end_ns)


def heard_of(reply: AnyMessage, begin_ns: int, end_ns: int) -> HeadFacts:
    """Facts in a reply. begin_ns, end_ns: Unix nanoseconds of the question and of the reply.

    Raises: ProtocolError if the reply is malformed.
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
    job = said.get("job")
    return HeadFacts((end_ns - begin_ns) / 1e9, ahead_s, named, mtu, job if isinstance(job, dict) else {})


def check_mode(where: tuple[str, int], token: bytes, tls: TlsConfig, own: str) -> None:
    """Raises: TlsDiffers if the job answers there, but with TLS where this host has none, or the other way round."""
    for mode in ("on", "off"):
        with contextlib.suppress(EverstepError, OSError):
            other = replace(tls, mode=mode)
            with _connected(where, token, other, own) as sock:
                wire.handshake_client(sock, role_token(token, READ), READ, f"agent-{os.getpid()}")
            if (shown_by(tls, token, own) is None) == (mode == "off"):
                return
            break
    else:
        return
    there = "uses TLS" if mode == "on" else "does not use TLS"
    raise TlsDiffers(
        f"the job there {there}, and security.tls.mode is {tls.mode} here: it has to be the same everywhere"
    )


def _connected(where: tuple[str, int], token: bytes, tls: TlsConfig, own: str) -> socket.socket:
    sock = socket.create_connection(where, wire.HANDSHAKE_TIMEOUT_S)
    try:
        return wire.secured(sock, Tls.of(shown_by(tls, token, own)))
    except ProtocolError as error:
        raise as_refused(error, tls) from None


def as_refused(error: ProtocolError, tls: TlsConfig) -> ProtocolError:
    """Error to report if no connection was made: with certificates from tokens, an untrusted server has another
    token."""
    made = tls.cert is None  # both certificates are made of the tokens
    return TokenRefused(str(error)) if made and isinstance(error, Untrusted) else error


def refusal_words(error: ProtocolError) -> str:
    """The error in words for people."""
    return f"that head has another token ({error})" if isinstance(error, TokenRefused) else str(error)


def clock_words(heard: HeadFacts) -> str:
    """Words about the difference of the two clocks; "" if it is small."""
    if abs(heard.ahead_s) <= CLOCK_LIMIT_S + heard.rtt_s:
        return ""
    which = "behind" if heard.ahead_s > 0 else "ahead of"
    ahead = f"this host's clock is {abs(heard.ahead_s):.1f} s {which} that of the job's head"
    return f"{ahead}: training is not affected, but times in events and logs will not match; set the clocks (NTP)"
