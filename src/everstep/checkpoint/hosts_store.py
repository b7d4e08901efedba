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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from everstep.base.domains import Domains, ordered
from everstep.base.errors import BlobExists, BlobMissing, EverstepError, PartsAway, StoreError
from everstep.checkpoint.host_files import BUSY, CHUNK_BYTES, KIND, Call, result_of, send_file
from everstep.checkpoint.manifest import PartFile
from everstep.checkpoint.names import MANIFEST, is_damaged, is_part, manifest_name, step_of
from everstep.checkpoint.store import BytesLike, DirectoryStore
from everstep.exact.digest import digest_bytes
from everstep.placement.domain_spread import Crowd
from everstep.runtime.link.peer import PeerConnection

log = logging.getLogger(__name__)

_AVOID_S = 3.0
_IDLE_S = 15.0
_MOST_IDLE = 4
_THREADS = 4
_AWAY = "away"
_Names = list[str]
_T = TypeVar("_T")


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
        self._bad: dict[str, set[str]] = {}  # hosts whose copy is not read, by name
        self._right: set[tuple[str, PartFile]] = set()  # copies that were looked at

    @property
    def scattered(self) -> bool:
        """Whether files that are not here may be on another host."""
        return self._apart or bool(self._others())

    def away(self, hosts: Iterable[str]) -> _Names:
        there = {self._me, *self._others()}
        return sorted(set(hosts) - there)

    # ---- as a store

    def list(self, prefix: str = "") -> list[str]:
        return sorted(set().union(*self.listed(prefix).values()))

    def listed(self, prefix: str, *, there: bool = False) -> dict[str, set[str]]:
        """Names by host. there: without hosts that do not answer. Raises: PartsAway for such a host."""
        names: dict[str, set[str]] = {}
        for host, store in self._each():
            try:
                names[host] = set(store.list(prefix))
            except StoreError:
                if host == self._me:
                    raise
                if not there:  # what it has is not known, and it may be the newest
                    text = f"some files of {self.path} are on {host}, which does not answer"
                    raise PartsAway(text, [host]) from None
        return names

    def heed(self) -> None:
        """A checkpoint that was set aside while a host was away is set aside there, too; where that fails, it is not
        read from there. Raises: StoreError. PartsAway for a host that does not answer."""
        stores = dict(self._each())
        names = self.listed("step-") if len(stores) > 1 else {}
        every = set().union(*names.values())
        bad: dict[str, set[str]] = {}
        for aside in sorted(name for name in every if is_damaged(name) and name.endswith(MANIFEST)):
            manifest = manifest_name(step_of(aside) or 0)
            lack = [host for host in stores if manifest in names.get(host, ()) and aside not in names[host]]
            beginning = bytes(self.read(aside, 0, CHUNK_BYTES)) if lack else b""  # a digest of all is in it
            for host in lack:
                same = False
                try:
                    same = bytes(stores[host].read(manifest, 0, CHUNK_BYTES)) == beginning
                    if same:
                        stores[host].move(manifest, aside)
                        log.warning("%s was set aside while %s was away, as %s", manifest, host, aside)
                except (BlobMissing, BlobExists):
                    continue  # another worker has just done it
                except StoreError as error:
                    if error.trouble == _AWAY:
                        raise PartsAway(str(error), [host]) from None
                    if not (same or any(manifest in names.get(other, ()) for other in stores if other != host)):
                        raise  # it may be the one that was made since
                    log.warning("%s is not set aside on %s, and not read from there: %s", manifest, host, error)
                    bad.setdefault(manifest, set()).add(host)
        for name in [*bad, *(name for name in list(self._bad) if not is_part(name))]:  # others were replaced since
            self._bad[name] = (self._bad.get(name, set()) - set(stores)) | bad.get(name, set())

    def distrust(self, file: PartFile) -> bool:
        """Copies of a file that are not right are read no more. Returns whether there is one that is.

        Raises: PartsAway if it may be on a host that does not answer.
        """
        right = {host: _is_right(store, file) for host, store in self._each()}
        if True not in right.values():
            self.list(file.name)
            return False
        self._bad[file.name] = {host for host, known in right.items() if known is False}
        return True

    def size(self, name: str) -> int:
        return self._first(name, lambda at: at.size(name))

    def read(self, name: str, start: int = 0, length: int | None = None) -> BytesLike:
        return self._first(name, lambda at: at.read(name, start, length))

    def read_each(self, name: str, most_bytes: int) -> Iterator[BytesLike]:
        """Each host's copy of a file, up to this length, if it is not known to be bad. Raises: PartsAway after all if a
        host does not answer."""
        silent: dict[str, str] = {}
        for host, store in self._each():
            if host in self._bad.get(name, ()):
                continue
            try:
                yield store.read(name, 0, most_bytes)
            except StoreError as error:
                silent |= {host: str(error)} if error.trouble == _AWAY else {}
        if silent:
            raise PartsAway(f"{name} is not right here, and {'; '.join(silent.values())}", sorted(silent))

    def read_into(self, name: str, start: int, views: Sequence[memoryview]) -> int:
        return self._first(name, lambda at: at.read_into(name, start, views))

    def read_elsewhere(self, name: str, start: int, length: int) -> BytesLike:
        """As another host has it. Raises: as `read`."""
        return self._first(name, lambda at: at.read(name, start, length), here=False)

    def write(self, name: str, chunks: Iterable[BytesLike], size: int, if_absent: bool = False) -> None:
        """A part here; all else on every host, and on the first that answers it is decided whether it is new."""
        stores = dict(self._each())
        if is_part(name) or len(stores) == 1:
            super().write(name, chunks, size, if_absent)
            return
        data, decided = b"".join(bytes(chunk) for chunk in chunks), False
        for host in sorted(stores):
            try:
                stores[host].write(name, [data], len(data), if_absent and not decided)
                decided = True
            except BlobExists:
                if host == self._me or bytes(stores[host].read(name, 0, len(data) + 1)) != data:
                    raise
                decided = True  # the reply to an earlier attempt was lost
            except StoreError as error:
                if not (decided or error.trouble == _AWAY):
                    raise
                log.warning("%s is not on %s: %s", name, host, error)

    def delete(self, name: str) -> None:
        super().delete(name)
        for _, store in self._each():
            with suppress(StoreError):
                store.delete(name)

    def move(self, old: str, new: str) -> None:
        troubles: list[StoreError] = []
        stores = dict(self._each())
        for store in stores.values():
            try:
                store.move(old, new)
            except StoreError as error:
                troubles.append(error)
        passing = [e for e in troubles if isinstance(e, BlobMissing | BlobExists) or e.trouble == _AWAY]
        lasting = [e for e in troubles if e not in passing]  # a host that is away hears of it from `heed`
        if lasting or len(troubles) == len(stores):
            raise (lasting or passing)[0]

    # ---- copies

    def spread(self, files: Sequence[PartFile], copies: int) -> dict[str, tuple[str, ...]]:
        """Sees to it that each part is on so many hosts, as far as there are so many, of which as few as can be die
        together; returns who has which, by name.

        Raises: StoreError if one is nowhere.
        """
        stores = dict(self._each())
        others = {host: store.address for host, store in stores.items() if isinstance(store, _Far)}
        if not others:
            return {}
        holders = self._holders(files)
        hosts, domains = sorted([self._me, *others]), self._domains()

        def copy(file: PartFile) -> tuple[str, tuple[str, ...]]:
            known, bad = holders[file.name], set(self._bad.get(file.name, ()))
            found = [h for h in known if h in stores and ((h, file) in self._right or _is_right(stores[h], file))]
            if self._me not in found and _is_right(stores[self._me], file) is False:
                bad.add(self._me)
            if not found:
                raise StoreError(f"{file.name} is on none of the hosts {', '.join(hosts)}")
            at = hosts.index(found[0])
            left = [host for host in (*hosts[at + 1 :], *hosts[:at]) if host not in {*found, *bad}]
            while left and len(found) < copies:
                target = next_host(left, found, domains)
                left.remove(target)
                if self._copy(file.name, found[0], target, others):
                    right = _is_right(stores[target], file)
                    found = [*found, target] if right else found
                    bad |= {target} if right is False else set()  # another file is in the way
            if bad:
                self._bad[file.name] = bad - set(found)
            return file.name, tuple(sorted(found))

        with ThreadPoolExecutor(_THREADS) as pool:
            copies_of = dict(pool.map(copy, files))
        self._right = {(host, file) for file in files for host in copies_of[file.name]}
        return copies_of

    def _holders(self, files: Sequence[PartFile]) -> dict[str, _Names]:
        found: dict[str, _Names] = {file.name: [] for file in files}
        for file in files:
            with suppress(BlobMissing):
                if DirectoryStore.size(self, file.name) == file.size:
                    found[file.name].append(self._me)
        for host, address in sorted(self._others().items()):
            with suppress(StoreError):
                sizes = self._lines.ask(address, {"op": "sizes", "names": [file.name for file in files]})
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
                size = _Far(self._lines, others[source]).size(name)
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

    def _each(self) -> Iterator[tuple[str, DirectoryStore | _Far]]:
        """Each host's directory, this one's first; without asking for others before it is their turn."""
        yield self._me, DirectoryStore(self.path)
        for host, address in sorted(self._others().items()):
            yield host, _Far(self._lines, address)

    def _first(self, name: str, ask: Callable[[DirectoryStore | _Far], _T], *, here: bool = True) -> _T:
        """Result from the first host that has a copy, one that is not known to be bad. Raises: BlobMissing if none has;
        StoreError if this host cannot read its own, or another one did not answer."""
        trouble: StoreError | None = None
        silent: dict[str, str] = {}
        for host, store in self._each():
            if host in self._bad.get(name, ()) if here else host == self._me:
                continue
            try:
                return ask(store)
            except BlobMissing:
                continue
            except StoreError as error:
                if host == self._me:
                    trouble = error
                else:
                    silent[host] = str(error)
        if silent:
            raise PartsAway(f"{name} is not here, and {'; '.join(silent.values())}", sorted(silent))
        raise trouble or BlobMissing(f"{self.path / name} does not exist here, nor on another host")


def next_host(hosts: Sequence[str], holders: Sequence[str], domains: Mapping[str, Domains]) -> str:
    """Which of these hosts gets the next copy: one that dies with the fewest of the holders, the widest domains first;
    of equals the first one. domains: in which a host is; of who is not in it nothing is known but its name. Pure."""
    names = [*hosts, *holders]
    known = {n: domains.get(name) or ordered({}, name) for n, name in enumerate(names)}
    crowd = Crowd(range(len(hosts), len(names)), known)
    return hosts[min(range(len(hosts)), key=crowd.near_worker)]


def _is_right(store: DirectoryStore | _Far, file: PartFile) -> bool | None:
    """Whether a file has the right size, and begins as it was written; None if it is not there, or cannot be read."""
    with suppress(StoreError):
        return store.size(file.name) == file.size and digest_bytes(store.read(file.name, 0, file.data_at)) == file.head
    return None


@dataclass(frozen=True)
class _Far:
    """Another host's directory, as a store."""

    lines: _Lines
    address: str

    def list(self, prefix: str) -> list[str]:
        found = self.lines.ask(self.address, {"op": "list", "prefix": prefix})
        return [name for name in found if isinstance(name, str)]

    def size(self, name: str) -> int:
        sizes = self.lines.ask(self.address, {"op": "sizes", "names": [name]})
        if not isinstance(sizes, dict) or type(sizes.get(name)) is not int:
            raise BlobMissing(f"{name} is not there")
        return int(sizes[name])

    def read(self, name: str, start: int, length: int | None) -> memoryview:
        most = self.size(name) - start if length is None else length
        data = bytearray()
        while len(data) < most:
            wanted = min(CHUNK_BYTES, most - len(data))
            more = self.lines.read(self.address, name, start + len(data), wanted)
            data += more
            if len(more) < wanted:
                break
        return memoryview(data)

    def read_into(self, name: str, start: int, views: Sequence[memoryview]) -> int:
        data = self.read(name, start, sum(view.nbytes for view in views))
        at = 0
        for view in views:
            piece = data[at : at + view.nbytes]
            view.cast("B")[: len(piece)] = piece
            at += len(piece)
        return len(data)

    def write(self, name: str, chunks: Sequence[bytes], size: int, if_absent: bool) -> None:
        request = {"op": "write", "name": name, "size": size, "if_absent": if_absent}
        self.lines.ask(self.address, request, b"".join(chunks))

    def delete(self, name: str) -> None:
        self.lines.ask(self.address, {"op": "delete", "name": name})

    def move(self, old: str, new: str) -> None:
        self.lines.ask(self.address, {"op": "move", "old": old, "new": new})


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
