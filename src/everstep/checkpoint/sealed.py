"""Small JSON files in which any changed byte shows: the first line bears a format and a digest of all that follows."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from everstep.base.errors import CheckpointCorrupt, ConfigError
from everstep.exact.digest import digest_bytes

FORMAT = 1
_HEAD = re.compile(rb'\{"everstep_([a-z]{1,20})":(\d{1,9}),"digest":"([0-9a-f]{32})","body":\n')
_TAIL = b"}\n"


def seal(kind: str, body: Mapping[str, Any], version: int = FORMAT) -> bytes:
    """The file's bytes. kind: lower-case letters."""
    text = json.dumps(body, separators=(",", ":")).encode()
    return _head(kind.encode(), version, text) + text + _TAIL


def unseal(kind: str, data: bytes | bytearray | memoryview, name: str) -> dict[str, Any]:
    """The body that a file of the one format there is bears. Raises: as `unseal_one_of`."""
    return unseal_one_of(kind, data, name, (FORMAT,))[1]


def unseal_one_of(
    kind: str, data: bytes | bytearray | memoryview, name: str, formats: Sequence[int]
) -> tuple[int, dict[str, Any]]:
    """The format of a file and the body that it bears. name: of the file, for messages. formats: those that are read.

    Raises: CheckpointCorrupt if a byte differs. ConfigError if it is whole, but of a format that is not read here.
    """
    text = bytes(data)
    found = _HEAD.match(text)
    if found is None or not text.endswith(_TAIL):
        raise CheckpointCorrupt(f"{name} is no whole {kind} ({len(text)} bytes): altered, truncated or foreign")
    version, body = int(found[2]), text[found.end() : -len(_TAIL)]
    if _head(found[1], version, body) != found[0]:
        raise CheckpointCorrupt(f"{name} does not match its digest: it was altered")
    if found[1] != kind.encode():
        raise CheckpointCorrupt(f"{name} is no {kind} but a {found[1].decode()}")
    if version not in formats:
        read = " and ".join(map(str, formats))
        raise ConfigError(f"{name} has format {version}; this version of Everstep reads {read}: use a newer one")
    try:
        loaded = json.loads(body)
        if b"\\ud" in body.lower():  # halves of characters cannot be written again, nor shown
            json.dumps(loaded, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        said = error if isinstance(error, json.JSONDecodeError) else type(error).__name__
        raise CheckpointCorrupt(f"{name} is not as Everstep writes it: {said}") from None
    if not isinstance(loaded, dict):
        raise CheckpointCorrupt(f"{name} is not as Everstep writes it: expected an object")
    return version, loaded


def _head(kind: bytes, version: int, body: bytes) -> bytes:
    digest = digest_bytes(b"%s %d\n" % (kind, version) + body)
    return b'{"everstep_%s":%d,"digest":"%s","body":\n' % (kind, version, digest.encode())
