"""Tags by which a job knows its own entries in etcd: only the job's token makes them, and only for this life.

A job's life is from its start to its end; the next job with the same token has another one. The tag of an entry of the
journal covers the tag of the entry before, so none can be left out, put back or moved. The newest entry that a
coordinator knows is noted in its run directory: if the journal ends before it, somebody has cut it.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import re
import zlib
from pathlib import Path
from typing import Any, NamedTuple

from everstep.base.below import open_below
from everstep.base.errors import ProtocolError
from everstep.base.given import read_given
from everstep.runtime.link.handshake import role_token

TAG_BYTES = 32
BEGIN = bytes(TAG_BYTES)
"""Stands for the tag before the first entry."""
_ROLE = "etcd"
_MOST_BYTES = 64 << 20
_NOTE = re.compile(r"([0-9a-f]{32}) (\d{10}) ([0-9a-f]{64})\n")
_NOTE_BYTES = 109


class EtcdSeals:
    """Tags of one life of a job, or (life "") of the entry that announces the life. prefix: of all keys."""

    def __init__(self, token: bytes, prefix: str, life: str = "") -> None:
        self.life, self._prefix = life, prefix
        key = role_token(token, _ROLE)
        self._key = hmac.digest(key, f"life {life}".encode(), "sha256") if life else key

    def closed(self, name: str, said: dict[str, Any], before: bytes = b"") -> bytes:
        """Value with its tag in front. name: of its key, without the prefix. before: the tag before it, in a chain."""
        body = zlib.compress(json.dumps(said, separators=(",", ":")).encode(), 1)
        return self._tag(name, body, before) + body

    def opened(self, name: str, value: bytes, before: bytes = b"") -> dict[str, Any]:
        """Content of a value. Raises: ProtocolError if its tag is wrong."""
        tag, body = value[:TAG_BYTES], value[TAG_BYTES:]
        with contextlib.suppress(ValueError, RecursionError, zlib.error):
            if hmac.compare_digest(tag, self._tag(name, body, before)):
                said = json.loads(zlib.decompressobj().decompress(body, _MOST_BYTES))
                if isinstance(said, dict):
                    return said
        raise ProtocolError(
            f"what etcd has under {self._prefix}{name} is of no job with this token, or of another run or place of it: "
            "choose another prefix or token"
        )

    def _tag(self, name: str, body: bytes, before: bytes) -> bytes:
        return hmac.digest(self._key, f"{self._prefix}{name}\0".encode() + before + body, "sha256")


class NewestEntry(NamedTuple):
    """The newest known entry of a journal. key, revision: the key of the entry, or of the snapshot that ends with it,
    and its revision there; "" for none."""

    number: int = 0
    tag: bytes = BEGIN
    key: str = ""
    revision: int = 0


class Chain:
    """The journal of one life as this process knows it. path: of the note of its newest entry, None for none."""

    def __init__(self, life: str, path: Path | None) -> None:
        self.newest = NewestEntry()
        self._life, self._path, self._fd = life, path, -1
        self._tags = {0: BEGIN}
        self._read = False

    def tag(self, number: int) -> bytes:
        """Tag of a known entry. Raises: ProtocolError."""
        if number not in self._tags:
            raise ProtocolError(f"expected entry {number} of the journal to be known, got {self.newest.number} entries")
        return self._tags[number]

    def loaded(self, rows: list[NewestEntry]) -> None:
        """Take in a loaded journal, oldest first: the newest entry that the snapshot stands for, and all after it.

        Raises: ProtocolError if this process, or an earlier one in this directory, knows more of it.
        """
        tags = {row.number: row.tag for row in rows}
        for number, tag in filter(None, (self._noted(), self.newest[:2] if self._read else None)):
            if number >= rows[0].number and tags.get(number) != tag:
                raise ProtocolError(
                    f"the journal in etcd ends with entry {rows[-1].number}, or has another entry {number} than this "
                    "host has seen: somebody has put an older one in its place, and only a new job can go on (--fresh)"
                )
        self._tags, self._read = tags, True
        self._know(rows[-1])

    def add(self, row: NewestEntry) -> None:
        self._tags[row.number], self._read = row.tag, True
        self._know(row)

    def shortened(self, through: int, key: str, revision: int) -> None:
        """Take in that a snapshot stands for all entries up to this number."""
        self._tags = {number: tag for number, tag in self._tags.items() if number >= through}
        if through == self.newest.number:
            self.newest = self.newest._replace(key=key, revision=revision)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd, self._path = -1, None

    def _know(self, row: NewestEntry) -> None:
        self.newest = row
        if self._path is not None:
            with contextlib.suppress(OSError):  # for example a full disk: then a later check knows less
                if self._fd < 0:
                    self._fd = open_below(self._path, os.O_WRONLY | os.O_CREAT)
                os.pwrite(self._fd, f"{self._life} {row.number:010d} {row.tag.hex()}\n".encode(), 0)

    def _noted(self) -> tuple[int, bytes] | None:
        with contextlib.suppress(OSError, UnicodeDecodeError):
            found = _NOTE.fullmatch(read_given(self._path, _NOTE_BYTES).decode()) if self._path else None
            if found is not None and found[1] == self._life:
                return int(found[2]), bytes.fromhex(found[3])
        return None
