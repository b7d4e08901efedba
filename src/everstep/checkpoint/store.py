"""Where checkpoints lie: blobs by name, in a directory or an object store, behind one small protocol.

Apart so that reader, verifier and retention know nothing of files or buckets. Names are relative, with slashes.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Protocol

from everstep.base.errors import BlobExists, BlobMissing, ConfigError, StoreError, check

Bytes = bytes | bytearray | memoryview

TEMPORARY = ".tmp-"
"""Begins the names of files that are being written; nobody lists or reads them."""


_MOST_VIEWS = 1024
"""One call of the system takes no more."""


class BlobStore(Protocol):
    """Named byte strings that never change once written. Thread-safe. Every failure is a `StoreError`."""

    @property
    def url(self) -> str:
        """What a user would type to name it."""
        ...

    def list(self, prefix: str = "") -> list[str]:
        """The names that begin with the prefix (any text, no pattern), sorted; none if there is nothing at all."""
        ...

    def size(self, name: str) -> int:
        """In bytes. Raises: BlobMissing."""
        ...

    def read(self, name: str, start: int = 0, length: int | None = None) -> Bytes:
        """`length` bytes from `start` (to the end by default); fewer only where the blob ends. Raises: BlobMissing."""
        ...

    def read_into(self, name: str, start: int, views: Sequence[memoryview]) -> int:
        """Reads from `start` into one view after the other; how many bytes there were. Raises: BlobMissing."""
        ...

    def write(self, name: str, chunks: Iterable[Bytes], size: int, if_absent: bool = False) -> None:
        """Writes a blob, all or nothing, durable when it returns; replaces an older one unless `if_absent`.

        size: the sum of the chunks' lengths, known beforehand. A chunk may be changed by its maker once the next one
        is asked for.

        Raises: BlobExists with if_absent, if it is there already.
        """
        ...

    def delete(self, name: str) -> None:
        """Of no effect if it is not there."""
        ...

    def move(self, old: str, new: str) -> None:
        """Gives a blob another name, that is free. Raises: BlobMissing, BlobExists."""
        ...


class DirectoryStore:
    """Blobs are files below a directory. Writing is atomic (temporary name, sync, rename, sync of the directory)."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._count = 0
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        return str(self.path)

    def list(self, prefix: str = "") -> list[str]:
        names: list[str] = []
        top = self.path / prefix.rpartition("/")[0]  # what begins with a/b/c lies below a/b
        try:
            for folder, _, files in os.walk(top, onerror=_raise):
                base = Path(folder).relative_to(self.path).as_posix()
                found = [f if base == "." else f"{base}/{f}" for f in files if not f.startswith(TEMPORARY)]
                names += [name for name in found if name.startswith(prefix)]
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise StoreError(f"cannot list {top}: {error.strerror or error}") from None
        return sorted(names)

    def size(self, name: str) -> int:
        try:
            return self.file(name).stat().st_size
        except OSError as error:
            raise _translated(error, "read", self.file(name)) from None

    def read(self, name: str, start: int = 0, length: int | None = None) -> Bytes:
        try:
            fd = os.open(self.file(name), os.O_RDONLY | os.O_CLOEXEC)
            try:
                end = os.fstat(fd).st_size
                stop = end if length is None else min(end, start + length)
                buffer = bytearray(max(0, stop - start))
                return memoryview(buffer)[: read_into(fd, memoryview(buffer), start)]
            finally:
                os.close(fd)
        except OSError as error:
            raise _translated(error, "read", self.file(name)) from None

    def read_into(self, name: str, start: int, views: Sequence[memoryview]) -> int:
        try:
            fd = os.open(self.file(name), os.O_RDONLY | os.O_CLOEXEC)
            try:
                return read_views(fd, views, start)
            finally:
                os.close(fd)
        except OSError as error:
            raise _translated(error, "read", self.file(name)) from None

    def write(self, name: str, chunks: Iterable[Bytes], size: int, if_absent: bool = False) -> None:
        """As the protocol says. What a failed attempt wrote is removed."""
        target = self.file(name)
        temporary = self.temporary(name)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
            try:
                at = 0
                for chunk in chunks:
                    at += write_all(fd, memoryview(chunk).cast("B"), at)
                check(at == size, f"{name} was to have {size} bytes and has {at}")
                os.fsync(fd)
            finally:
                os.close(fd)
            self.publish(temporary, name, if_absent=if_absent)
        except OSError as error:
            raise _translated(error, "write", target) from None
        finally:
            with suppress(OSError):
                os.unlink(temporary)

    def delete(self, name: str) -> None:
        target = self.file(name)
        try:
            target.unlink()
            if target.parent != self.path:
                target.parent.rmdir()  # of no effect while other files are in it
        except FileNotFoundError:
            return
        except OSError as error:
            if target.exists():
                raise _translated(error, "delete", target) from None

    def move(self, old: str, new: str) -> None:
        try:
            os.link(self.file(old), self.file(new))
            os.unlink(self.file(old))
            sync_directory(self.file(old).parent)
        except OSError as error:
            raise _translated(error, "move", self.file(old)) from None

    # ---- for those who write files themselves

    def file(self, name: str) -> Path:
        """The file of a name."""
        return self.path / name

    def temporary(self, name: str) -> Path:
        """A file beside that of the name, for writing it before it has the name. Nobody else gets the same."""
        with self._lock:
            self._count += 1
            number = self._count
        target = self.file(name)
        return target.with_name(f"{TEMPORARY}{target.name}-{os.getpid()}-{id(self):x}-{number}")

    def publish(self, temporary: Path, name: str, *, if_absent: bool = False) -> None:
        """Gives a synced temporary file its name, durably. Raises: OSError, FileExistsError with if_absent."""
        target = self.file(name)
        if if_absent:
            os.link(temporary, target)
        else:
            os.replace(temporary, target)
        sync_directory(target.parent)
        if target.parent != self.path:
            sync_directory(target.parent.parent)  # the folder may be new itself

    def drop_temporaries(self, folder: str, older_than_s: float = 0.0) -> None:
        """Removes what writers that died left behind in a folder."""
        now = time.time()
        with suppress(OSError):
            for path in self.file(folder).glob(f"{TEMPORARY}*"):
                with suppress(OSError):
                    if now - path.stat().st_mtime >= older_than_s:
                        path.unlink()


def open_store(url: str, endpoint: str | None = None, region: str | None = None) -> BlobStore:
    """The store at a path or URL (`file://`, or an object store's such as `s3://bucket/prefix`). endpoint, region: of
    an object store; None: from the environment.

    Raises: ConfigError for a URL of an unknown kind.
    """
    scheme, found, rest = url.partition("://")
    if not found:
        return DirectoryStore(url)
    if scheme == "file":
        return DirectoryStore(rest)
    try:
        module = import_module("everstep.checkpoint.object_store")
    except ModuleNotFoundError as error:
        raise ConfigError(f"cannot open {url}: {error}; give a directory, or install the missing package") from None
    store: BlobStore = module.open_object_store(url, endpoint, region)
    return store


def write_all(fd: int, data: memoryview, at: int) -> int:
    """Writes everything at a position, without the interpreter lock; returns how much that was."""
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done:], at + done)
    return done


def read_into(fd: int, out: memoryview, at: int) -> int:
    """Reads from a position until `out` is full or the file ends, without the interpreter lock; returns how much."""
    done = 0
    while done < len(out):
        got = os.preadv(fd, [out[done:]], at + done)
        if got == 0:
            break
        done += got
    return done


def read_views(fd: int, views: Sequence[memoryview], at: int) -> int:
    """Reads from a position into one view after the other until all are full or the file ends; returns how much."""
    done = 0
    left = list(views)
    while left:
        got = os.preadv(fd, left[:_MOST_VIEWS], at + done)
        if got == 0:
            break
        done += got
        while left and got >= len(left[0]):
            got -= len(left.pop(0))
        if got:
            left[0] = left[0][got:]
    return done


def sync_directory(path: Path) -> None:
    """Makes renames in a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _raise(error: OSError) -> None:
    raise error


def _translated(error: OSError, verb: str, path: Path) -> StoreError:
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return BlobMissing(f"cannot {verb} {path}: it does not exist")
    if isinstance(error, FileExistsError):
        return BlobExists(f"cannot {verb} {path}: it exists already")
    return StoreError(f"cannot {verb} {path}: {error.strerror or error}", error.strerror or "")
