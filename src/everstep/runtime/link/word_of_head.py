"""Word of the job's head from another host's agent: the question, its answer, and which answers count.

For a host that reaches neither the head that it knew nor etcd. An agent names only the head that it is connected to, so
nobody repeats hearsay. Pure.
"""

from __future__ import annotations

import ipaddress
from typing import Annotated, Any, NamedTuple

import msgspec

from everstep.base.errors import ProtocolError
from everstep.protocol.converter import converter

QUESTION = {"kind": "head"}
MOST_BYTES = 512
"""Limit of an answer."""


class HeadReached(NamedTuple):
    """The head that a process is connected to. host: its address. term: the newest that this process has heard
    of, 0 if the job has had no other head."""

    host: Annotated[str, msgspec.Meta(max_length=45)]
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    term: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


def answer_with(head: HeadReached | None) -> list[Any]:
    """Answer of an agent, as JSON. head: None while it is connected to none."""
    return [] if head is None else list(head)


def place_told(said: Any, least_term: int) -> tuple[str, int] | None:
    """The address in an answer; None if it names no head, or one of an older term than least_term.

    Raises: ProtocolError if it is no answer.
    """
    if said == []:
        return None
    try:
        told = _reached(said)
        if "%" in str(ipaddress.ip_address(told.host)):  # the name of a link means something on its own host alone
            raise ValueError(told.host)
    except (msgspec.ValidationError, ValueError):
        raise ProtocolError("expected a head's address and term from an agent, got something else") from None
    return (told.host, told.port) if told.term >= least_term else None


_reached = converter(HeadReached)
