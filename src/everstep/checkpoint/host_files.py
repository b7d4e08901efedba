"""A host's checkpoint directory, for the hosts that do not see it: each request of a peer is one call of a store.

Runs in the host's agent, which outlives workers; so neither torch nor a thread per idle worker is needed for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from everstep.base.errors import BlobExists, BlobForeign, BlobMissing, EverstepError, ProtocolError, StoreError
from everstep.checkpoint.names import PART_EXAMPLE, is_plain
from everstep.checkpoint.store import DirectoryStore
from everstep.runtime.link.peer import PeerConnection

KIND = "files"
CHUNK_BYTES = 4 << 20
MOST_NAMES = 100_000
BUSY = {"busy": True}
"""Said before an answer that takes its time."""
MOST_CHUNK_BYTES = 64 << 20
_MOST_FILE_BYTES = 1 << 44
_ERRORS: dict[str, type[StoreError]] = {"missing": BlobMissing, "exists": BlobExists, "foreign": BlobForeign}
Call = Callable[[str, dict[str, Any]], PeerConnection]
"""Connects to a peer at "host:port", and makes a request."""


class HostFiles:
    """Answers requests about one directory. call: how other hosts are reached, for copies."""

    def __init__(self, directory: Path, call: Call) -> None:
        self._store = DirectoryStore(directory)
        self._call = call
        self._operations: dict[str, Callable[[PeerConnection, dict[str, Any]], Any]] = {
            "list": self._list,
            "sizes": self._sizes,
            "read": self._read,
            "write": self._write,
            "delete": self._delete,
            "move": self._move,
            "copy": self._copy,
        }

    def __call__(self, connection: PeerConnection, request: dict[str, Any]) -> None:
        """One conversation: requests and answers, until the other side ends it."""
        while True:
            operation = self._operations.get(str(request.get("op")))
            if request.get("kind") != KIND or operation is None:
                raise ProtocolError(f"expected one of {', '.join(self._operations)} of files, got something else")
            try:
                answer = {"result": operation(connection, request)}
            except StoreError as error:
                kind = next((name for name, known in _ERRORS.items() if isinstance(error, known)), "store")
                answer = {"error": kind, "text": str(error)}
            connection.send_json(answer)
            request = connection.recv_json()
            if not isinstance(request, dict):
                raise ProtocolError("expected a request about files as a JSON object")

    def _list(self, connection: PeerConnection, request: dict[str, Any]) -> list[str]:
        prefix = request.get("prefix")
        return self._store.list(prefix) if isinstance(prefix, str) else []

    def _sizes(self, connection: PeerConnection, request: dict[str, Any]) -> dict[str, int]:
        names = request.get("names")
        found: dict[str, int] = {}
        for name in names[:MOST_NAMES] if isinstance(names, list) else []:
            try:
                found[_name(name)] = self._store.size(name)
            except BlobMissing:
                continue
        return found

    def _read(self, connection: PeerConnection, request: dict[str, Any]) -> int:
        """Send the number of bytes, then the bytes. Returns the number."""
        start, length = _number(request.get("start")), _number(request.get("length"), MOST_CHUNK_BYTES)
        data = self._store.read(_name(request.get("name")), start, length)
        connection.send_json({"bytes": len(data)})
        connection.send_bytes([data])
        return len(data)

    def _write(self, connection: PeerConnection, request: dict[str, Any]) -> None:
        """The bytes follow the request."""
        size = _number(request.get("size"))
        chunks = Incoming(connection, size)
        try:
            self._store.write(_name(request.get("name")), chunks, size, request.get("if_absent") is True)
        except StoreError:
            chunks.skip()  # what is on its way, so that the other side hears why
            raise

    def _delete(self, connection: PeerConnection, request: dict[str, Any]) -> None:
        self._store.delete(_name(request.get("name")))

    def _move(self, connection: PeerConnection, request: dict[str, Any]) -> None:
        self._store.move(_name(request.get("old")), _name(request.get("new")))

    def _copy(self, connection: PeerConnection, request: dict[str, Any]) -> None:
        """Copy from this host to another one; the asker hears that it goes on."""
        name, to = _name(request.get("name")), str(request.get("to"))
        send_file(self._store, name, self._call, to, lambda: connection.send_json(BUSY))


class Incoming:
    """The bytes that follow a request to write, some at a time."""

    def __init__(self, connection: PeerConnection, size: int) -> None:
        self._connection = connection
        self._left = size

    def __iter__(self) -> Iterator[bytearray]:
        while self._left:
            data = self._connection.recv_bytes(min(self._left, MOST_CHUNK_BYTES))
            if not data:
                raise ProtocolError("expected the bytes of a file, got none")
            self._left -= len(data)
            yield data

    def skip(self) -> None:
        """Let the rest pass."""
        for _ in self:
            pass


def send_file(
    store: DirectoryStore, name: str, call: Call, address: str, moves: Callable[[], None] = lambda: None
) -> None:
    """A copy of a blob for another host; of no effect if that has it. moves: called now and then.

    Raises: StoreError for all that can go wrong.
    """
    size = store.size(name)
    request = {"kind": KIND, "op": "write", "name": name, "size": size, "if_absent": True}
    try:
        with closing(call(address, request)) as connection:
            for at in range(0, size, CHUNK_BYTES):
                connection.send_bytes([store.read(name, at, CHUNK_BYTES)])
                moves()
            result_of(connection.recv_json())
    except BlobExists:
        return
    except StoreError:
        raise
    except EverstepError as error:
        raise StoreError(f"cannot copy {name} to {address}: {error}") from None


def result_of(answer: Any) -> Any:
    """Result in an answer. Raises: StoreError as the store over there did; ProtocolError if it is no answer."""
    if isinstance(answer, dict) and "result" in answer:
        return answer["result"]
    if isinstance(answer, dict) and "error" in answer:
        raise _ERRORS.get(str(answer["error"]), StoreError)(str(answer.get("text"))[:1000])
    raise ProtocolError("expected an answer about files, got something else")


def _name(given: Any) -> str:
    if not isinstance(given, str) or not is_plain(given):
        raise BlobForeign(f"that is no name of a file here: expected one such as {PART_EXAMPLE}")
    return given


def _number(given: Any, most: int = _MOST_FILE_BYTES) -> int:
    if type(given) is not int or not 0 <= given <= most:
        raise StoreError(f"expected a number of bytes up to {most}")
    return given
