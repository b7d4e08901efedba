"""One store made of the checkpoint directories of several hosts that do not share one.

A part is stored where its worker wrote it, with copies on other hosts; all other files are small and stored on every
host. So a reader finds everything as long as one host of each part is there, and readers and writers need not know
of the hosts.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from everstep.base.domains import Domains, ordered
from everstep.base.errors import BlobExists, BlobMissing, EverstepError, PartsAway, StoreError
from everstep.checkpoint.host_files import BUSY, CHUNK_BYTES, KIND, Call, result_of, send_file
from everstep.checkpoint.manifest import PartFile
from everstep.checkpoint.names import is_part
from everstep.checkpoint.store import BytesLike, DirectoryStore
from everstep.placement.domain_spread import Crowd
from everstep.runtime.link.peer import PeerConnection

log = logging.getLogger(__name__)

_AVOID_S = 3.0
_IDLE_S = 15.0
_MOST_IDLE = 4
_THREADS = 4
_AWAY = "away"
_Answers = list[tuple[str, Any]]
_Names = list[str]


class HostsStore(DirectoryStore):
    """This host's directory, and those of others. me: this host's name. others: returns the hosts that are there
    now, with their addresses; call: connects to one. apart: there are others, perhaps later. domains: failure
    domains of the hosts, by name. Without others it is a `DirectoryStore`."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        me: str,
        others: Callable[[], Mapping[str, str]],
        call: Call,
        *,
        apart: bool = False,
        domains: Callable[[], Mapping[str, Domains]] = dict,
    ) -> None:
        super().__init__(path)
        self._apart = apart
        self._domains = domains
        self._me = me
        self._others = others
        self._call = call
        self._lines = _Lines(call)

    @property
    def scattered(self) -> bool:
        """Whether files that are not here may be on another host."""
        return self._apart or bool(self._others())

    def away(self, hosts: Iterable[str]) -> _Names:
        there = {self._me, *self._others()}
        return sorted(set(hosts) - there)

    # ---- as a store

    def list(self, prefix: str = "") -> list[str]:
        names = set(super().list(prefix))
        for host, answer in self._ask_all({"op": "list", "prefix": prefix}, errors=True):
            if isinstance(answer, StoreError):  # what it has is not known, and it may be the newest
                raise PartsAway(f"some files of {self.path} are on {host}, which does not answer", [host])
            names |= {name for name in answer if isinstance(name, str)}
        return sorted(names)

    def size(self, name: str) -> int:
        with suppress(BlobMissing):
            return super().size(name)
        return int(self._elsewhere(name, lambda address: _size(self._lines, address, name)))

    def read(self, name: str, start: int = 0, length: int | None = None) -> BytesLike:
        with suppress(BlobMissing):
            return super().read(name, start, length)
        most = self.size(name) - start if length is None else length
        data = bytearray()
        while len(data) < most:
            wanted = min(CHUNK_BYTES, most - len(data))
            more = self.read_elsewhere(name, start + len(data), wanted)
            data += more
            if len(more) < wanted:
                break
        return memoryview(data)

    def read_into(self, name: str, start: int, views: Sequence[memoryview]) -> int:
        with suppress(BlobMissing):
            return super().read_into(name, start, views)
        data = memoryview(self.read(name, start, sum(view.nbytes for view in views)))
        at = 0
        for view in views:
            piece = data[at : at + view.nbytes]
            view.cast("B")[: len(piece)] = piece
            at += len(piece)
        return len(data)

    def write(self, name: str, chunks: Iterable[BytesLike], size: int, if_absent: bool = False) -> None:
        """A part here; all else on every host, and on the first that answers it is decided whether it is new."""
        others = self._others()
        if is_part(name) or not others:
            super().write(name, chunks, size, if_absent)
            return
        data, decided = b"".join(bytes(chunk) for chunk in chunks), False
        for host in sorted([self._me, *others]):
            try:
                self._write_at(host, others, name, data, if_absent and not decided)
                decided = True
            except BlobExists:
                if host == self._me or not _has(self._lines, others[host], name, data):
                    raise
                decided = True  # the reply to an earlier attempt was lost
            except StoreError as error:
                if not (decided or error.trouble == _AWAY):
                    raise
                log.warning("%s is not on %s: %s", name, host, error)

    def delete(self, name: str) -> None:
        super().delete(name)
        for _ in self._ask_all({"op": "delete", "name": name}):
            pass

    def move(self, old: str, new: str) -> None:
        moved, problem = 0, None
        try:
            super().move(old, new)
            moved += 1
        except StoreError as error:
            problem = error
        for _, answer in self._ask_all({"op": "move", "old": old, "new": new}, errors=True):
            moved += not isinstance(answer, StoreError)
        if problem is not None and not moved:
            raise problem

    # ---- copies

    def spread(self, files: Sequence[PartFile], copies: int) -> dict[str, tuple[str, ...]]:
        """Sees to it that each part is on so many hosts, as far as there are so many, of which as few as can be die
        together; returns who has which, by name.

        Raises: StoreError if one is nowhere.
        """
        others = self._others()
        if not others:
            return {}
        holders = self._holders(files)
        hosts, domains = sorted([self._me, *others]), self._domains()

        def copy(file: PartFile) -> tuple[str, tuple[str, ...]]:
            found = holders[file.name]
            if not found:
                raise StoreError(f"{file.name} is on none of the hosts {', '.join(hosts)}")
            at = hosts.index(found[0])
            left = [host for host in (*hosts[at + 1 :], *hosts[:at]) if host not in found]
            while left and len(found) < copies:
                target = next_host(left, found, domains)
                left.remove(target)
                if self._copy(file.name, found[0], target, others):
                    found = [*found, target]
            return file.name, tuple(sorted(found))

        with ThreadPoolExecutor(_THREADS) as pool:
            return dict(pool.map(copy, files))

    def _holders(self, files: Sequence[PartFile]) -> dict[str, _Names]:
        found: dict[str, _Names] = {file.name: [] for file in files}
        for file in files:
            with suppress(BlobMissing):
                if DirectoryStore.size(self, file.name) == file.size:
                    found[file.name].append(self._me)
        for host, sizes in self._ask_all({"op": "sizes", "names": [file.name for file in files]}):
            for file in files:
                if isinstance(sizes, dict) and sizes.get(file.name) == file.size:
                    found[file.name].append(host)
        return found

    def _copy(self, name: str, source: str, target: str, others: Mapping[str, str]) -> bool:
        """Whether it is there. To this host it comes as it is read."""
        try:
            if source == self._me:
                send_file(self, name, self._call, others[target])
            elif target == self._me:
                size = int(_size(self._lines, others[source], name))
                pieces = (
                    self._lines.read(others[source], name, at, min(CHUNK_BYTES, size - at))
                    for at in range(0, size, CHUNK_BYTES)
                )
                DirectoryStore.write(self, name, pieces, size, if_absent=True)
            else:
                self._lines.ask(others[source], {"op": "copy", "name": name, "to": others[target]})
        except BlobExists:
            return True
        except EverstepError as error:
            log.warning("no copy of %s on %s: %s", name, target, error)
            return False
        return True

    # ---- other hosts

    def _write_at(self, host: str, others: Mapping[str, str], name: str, data: bytes, if_absent: bool) -> None:
        if host == self._me:
            super().write(name, [data], len(data), if_absent)
        else:
            request = {"op": "write", "name": name, "size": len(data), "if_absent": if_absent}
            self._lines.ask(others[host], request, data)

    def _ask_all(self, request: dict[str, Any], errors: bool = False) -> _Answers:
        """Answers of the hosts that answer; errors: include those that hosts raise."""
        found: _Answers = []
        for host, address in sorted(self._others().items()):
            try:
                found.append((host, self._lines.ask(address, request)))
            except StoreError as error:
                if errors:
                    found.append((host, error))
        return found

    def read_elsewhere(self, name: str, start: int, length: int) -> bytearray:
        """As another host has it. Raises: as `read`."""
        found: bytearray = self._elsewhere(name, lambda address: self._lines.read(address, name, start, length))
        return found

    def _elsewhere(self, name: str, ask: Callable[[str], Any]) -> Any:
        """Result from the first host that has it. Raises: BlobMissing if none has; StoreError if one did not answer."""
        silent: dict[str, str] = {}
        for host, address in sorted(self._others().items()):
            try:
                return ask(address)
            except BlobMissing:
                continue
            except StoreError as error:
                silent[host] = str(error)
        if silent:
            raise PartsAway(f"{name} is not here, and {'; '.join(silent.values())}", sorted(silent))
        raise BlobMissing(f"{self.path / name} does not exist here, nor on another host")


def next_host(hosts: Sequence[str], holders: Sequence[str], domains: Mapping[str, Domains]) -> str:
    """Which of these hosts gets the next copy: one that dies with the fewest of the holders, the widest domains first;
    of equals the first one. domains: in which a host is; of who is not in it nothing is known but its name. Pure."""
    names = [*hosts, *holders]
    known = {n: domains.get(name) or ordered({}, name) for n, name in enumerate(names)}
    crowd = Crowd(range(len(hosts), len(names)), known)
    return hosts[min(range(len(hosts)), key=crowd.near_worker)]


def _size(lines: _Lines, address: str, name: str) -> int:
    sizes = lines.ask(address, {"op": "sizes", "names": [name]})
    if not isinstance(sizes, dict) or type(sizes.get(name)) is not int:
        raise BlobMissing(f"{name} is not there")
    return int(sizes[name])


def _has(lines: _Lines, address: str, name: str, data: bytes) -> bool:
    """Whether a host has a file with exactly these bytes."""
    pieces = (lines.read(address, name, at, CHUNK_BYTES) for at in range(0, len(data) + 1, CHUNK_BYTES))
    return b"".join(pieces) == data


class _Lines:
    """Connections to other hosts, kept for a while. Thread-safe; all that goes wrong is a StoreError."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._idle: dict[str, list[tuple[float, PeerConnection]]] = {}
        self._avoid_s: dict[str, float] = {}
        self._lock = threading.Lock()

    def ask(self, address: str, request: dict[str, Any], data: bytes = b"") -> Any:
        """The answer to a request, which is followed by these bytes."""

        def talk(connection: PeerConnection) -> Any:
            for at in range(0, len(data), CHUNK_BYTES):
                connection.send_bytes([data[at : at + CHUNK_BYTES]])
            answer = connection.recv_json()
            while answer == BUSY:
                answer = connection.recv_json()
            return result_of(answer)

        return self._talk(address, request, talk)

    def read(self, address: str, name: str, start: int, length: int) -> bytearray:
        """Bytes of a file; fewer where it ends."""

        def talk(connection: PeerConnection) -> bytearray:
            answer = connection.recv_json()
            if isinstance(answer, dict) and "bytes" in answer:
                found = connection.recv_bytes(length)
                result_of(connection.recv_json())
                return found
            result_of(answer)
            raise StoreError(f"{address} sent no bytes of {name}")

        found: bytearray = self._talk(address, {"op": "read", "name": name, "start": start, "length": length}, talk)
        return found

    def _talk(self, address: str, request: dict[str, Any], talk: Callable[[PeerConnection], Any]) -> Any:
        """Over a connection that is there, or else a new one."""
        request = {"kind": KIND, **request}
        known = self._take(address)
        if known is not None:
            try:
                known.send_json(request)
                return self._finish(address, known, talk)
            except StoreError:
                raise
            except EverstepError:
                known.close()  # it has ended meanwhile
        if time.monotonic() < self._avoid_s.get(address, 0.0):
            raise StoreError(f"{address} did not answer a moment ago", _AWAY)
        try:
            return self._finish(address, self._call(address, request), talk)
        except StoreError:
            raise
        except EverstepError as error:
            self._avoid_s[address] = time.monotonic() + _AVOID_S
            raise StoreError(f"{address} does not answer: {error}", _AWAY) from None

    def _finish(self, address: str, connection: PeerConnection, talk: Callable[[PeerConnection], Any]) -> Any:
        whole = False
        try:
            found = talk(connection)
            whole = True
            return found
        except StoreError:
            whole = True
            raise
        finally:
            if whole:
                self._keep(address, connection)
            else:
                connection.close()

    def _take(self, address: str) -> PeerConnection | None:
        with self._lock:
            idle = self._idle.get(address, [])
            while idle:
                since_s, connection = idle.pop()
                if time.monotonic() - since_s < _IDLE_S:
                    return connection
                connection.close()
            return None

    def _keep(self, address: str, connection: PeerConnection) -> None:
        with self._lock:
            idle = self._idle.setdefault(address, [])
            idle.append((time.monotonic(), connection))
            while len(idle) > _MOST_IDLE:
                idle.pop(0)[1].close()
