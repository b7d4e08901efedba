"""A job's keys in etcd, the requests about them, and what etcd answers."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any

from everstep.runtime.lead.etcd_gateway import NoReply, Pair, Reply

LEASE, JOB, SNAPSHOT, PARTS, JOURNAL = "/lease", "/job", "/snapshot", "/snapshot/", "/journal/"
TERM = "/term"
"""Key written with each lease; the next lease names the revision of it that it follows."""


class JobKeys:
    """The keys below a prefix. Names are without it. post: asks etcd."""

    def __init__(self, prefix: str, post: Callable[[str, dict[str, Any]], Reply]) -> None:
        self.prefix, self.post = prefix, post

    def span(self, name: str, end: str = "") -> dict[str, str]:
        """One key, or all up to another one."""
        return {"key": self._coded(name), **({"range_end": self._coded(end)} if end else {})}

    def compare(self, name: str, target: str, field: str, value: int) -> dict[str, Any]:
        return {"key": self._coded(name), "target": target, "result": "EQUAL", field: str(value)}

    def in_term(self, term: int) -> dict[str, Any]:
        """The condition that the lease is still the one of this term."""
        return self.compare(LEASE, "CREATE", "create_revision", term)

    def put(self, name: str, value: bytes, lease: int = 0) -> dict[str, Any]:
        text = base64.b64encode(value).decode()
        return {"request_put": {"key": self._coded(name), "value": text, "lease": str(lease)}}

    def pairs(self, name: str) -> list[Pair]:
        return self.post("kv/range", self.span(name)).kvs

    def name_of(self, pair: Pair) -> str:
        return base64.b64decode(pair.key).decode(errors="replace").removeprefix(self.prefix)

    def _coded(self, name: str) -> str:
        return base64.b64encode(f"{self.prefix}{name}".encode()).decode()


def pairs_in(reply: Reply) -> list[list[Pair]]:
    """Pairs found, by requested range."""
    return [[] if one.response_range is None else one.response_range.kvs for one in reply.responses]


def value_of(pair: Pair) -> bytes:
    """Value of a pair, empty if it cannot be read."""
    try:
        return base64.b64decode(pair.value, validate=True)
    except ValueError:
        return b""


def number_of(text: str) -> int:
    """Number in etcd's notation. Raises: NoReply for anything else."""
    if not text.isascii() or not text.isdecimal() or len(text) > 20:
        raise NoReply(f"expected a number of etcd, got {text[:40]!r}")
    return int(text)
