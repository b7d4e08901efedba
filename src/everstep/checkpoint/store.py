"""Where checkpoints lie: blobs by name, in a directory or an object store, behind one small protocol.

Apart so that reader, verifier and retention know nothing of files or buckets. Names are relative, with slashes.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol
from uuid import uuid4

from everstep.base.below import refuse_moved, refuse_others
from everstep.base.errors import BlobExists, BlobForeign, BlobMissing, StoreError, check
from everstep.checkpoint.names import PART_EXAMPLE, is_plain

BytesLike = bytes | bytearray | memoryview

TEMPORARY = ".tmp-"
"""Prefix of files that are being written; they are never listed or read."""


_MOST_VIEWS = 1024
"""Limit of one system call."""
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_SHOWN = 100


class BlobStore(Protocol):
    """Named byte strings that never change once written. Thread-safe. Every failure is a `StoreError`: a
    `BlobForeign` for a name that leads elsewhere, and for a file that Everstep did not write."""

    @property
    def url(self) -> str:
        """The store's name as a user would type it."""

    def list(self, prefix: str = "") -> list[str]:
        """The names that begin with the prefix (any text, no pattern), sorted; none if there is nothing at all."""

    def size(self, name: str) -> int:
        """In bytes. Raises: BlobMissing."""

    def read(self, name: str, start: int = 0, length: int | None = None) -> BytesLike:
        """`length` bytes from `start` (to the end by default); fewer only where the blob ends. Raises: BlobMissing."""

    def read_into(self, name: str, start: int, views: Sequence[memoryview]) -> int:
        """Reads from `start` into one view after the other; how many bytes there were. Raises: BlobMissing."""

    def write(self, name: str, chunks: Iterable[BytesLike], size: int, if_absent: bool = False) -> None:
        """Writes a blob, all or nothing, durable when it returns; replaces an older one unless `if_absent`.

        size: the sum of the chunks' lengths, known beforehand. A chunk may be changed by its maker once the next one
        is asked for.

        Raises: BlobExists with if_absent, if it is there already.
        """

    def delete(self, name: str) -> None:
        """Delete a blob, if it is there."""

    def move(self, old: str, new: str) -> None:
        """Gives a blob another name, that is free. Raises: BlobMissing, BlobExists."""


class Draft:
    """A file that is being written beside those that have names: `fd`. It vanishes unless it is published."""

    def __init__(self, fd: int, folders: Sequence[int], temporary: str) -> None:
        self.fd = fd
        self._folders, self._temporary = folders, temporary

    def publish(self, name: str, *, if_absent: bool = False) -> None:
        """Gives the synced file its name, in the folder that it was made in, durably.

        Raises: OSError, FileExistsError with if_absent.
        """
        folder, last = self._folders[-1], words_of(name)[-1]
        if if_absent:
            os.link(self._temporary, last, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)
        else:
            os.replace(self._temporary, last, src_dir_fd=folder, dst_dir_fd=folder)
        try:
            for fd in self._folders[-2:]:  # the folder may be new itself
                os.fsync(fd)
        except OSError:
            with suppress(OSError):
                there = os.stat(last, dir_fd=folder, follow_symlinks=False)
                if if_absent and os.path.samestat(os.fstat(self.fd), there):
                    os.unlink(last, dir_fd=folder)
            raise


class DirectoryStore:
    """Blobs are files below a directory. Writing is atomic (temporary name, sync, rename, sync of the directory).

    The directory may hold what others put there: below it no symbolic link is followed, nothing is read that is no
    regular file, and nothing is written to folders or files of another user. The directory itself is where a user says.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    @property
    def url(self) -> str:
        return str(self.path)

    def list(self, prefix: str = "") -> list[str]:
        names: list[str] = []
        below = prefix.rpartition("/")[0]  # what begins with a/b/c lies below a/b
        if below and not is_plain(below):
            return []
        try:
            with self._folder(f"{below}/any" if below else "any", "list") as folders:
                for folder, _, files, _ in os.fwalk(".", dir_fd=folders[-1], onerror=_raise_unless_gone):
                    words = [word for word in (below, folder[2:]) if word]
                    names += ["/".join([*words, file]) for file in files if not file.startswith(TEMPORARY)]
        except (BlobMissing, BlobForeign):
            return []
        return sorted(name for name in names if name.startswith(prefix) and is_plain(name))

    def size(self, name: str) -> int:
        with self._folder(name, "read") as folders:
            found = os.stat(words_of(name)[-1], dir_fd=folders[-1], follow_symlinks=False)
            self._refuse_foreign(name, found)
            return found.st_size

    def read(self, name: str, start: int = 0, length: int | None = None) -> BytesLike:
        with self._open(name, "read", os.O_RDONLY) as fd:
            end = os.fstat(fd).st_size
            stop = end if length is None else min(end, start + length)
            buffer = room_for(max(0, stop - start), str(self.path / name))
            return memoryview(buffer)[: read_views(fd, [memoryview(buffer)], start)]

    def read_into(self, name: str, start: int, views: Sequence[memoryview]) -> int:
        with self._open(name, "read", os.O_RDONLY) as fd:
            return read_views(fd, views, start)

    def write(self, name: str, chunks: Iterable[BytesLike], size: int, if_absent: bool = False) -> None:
        """As the protocol says. What a failed attempt wrote is removed."""
        with self.draft(name) as draft:
            at = 0
            for chunk in chunks:
                at += write_all(draft.fd, memoryview(chunk).cast("B"), at)
            check(at == size, f"{name}: expected {size} bytes, got {at}")
            os.fsync(draft.fd)
            draft.publish(name, if_absent=if_absent)

    def delete(self, name: str) -> None:
        *above, last = words_of(name)
        with suppress(BlobMissing), self._folder(name, "delete", writes=True) as folders:
            os.unlink(last, dir_fd=folders[-1])
            if above:
                with suppress(OSError):
                    os.rmdir(above[-1], dir_fd=folders[-2])  # of no effect while other files are in it

    def move(self, old: str, new: str) -> None:
        here, there = words_of(old)[-1], words_of(new)[-1]
        with self._folder(new, "move", writes=True) as target, self._folder(old, "move", writes=True) as source:
            os.link(here, there, src_dir_fd=source[-1], dst_dir_fd=target[-1], follow_symlinks=False)
            os.unlink(here, dir_fd=source[-1])
            os.fsync(source[-1])

    # ---- for those who write files themselves

    @contextmanager
    def draft(self, name: str) -> Iterator[Draft]:
        """A new file beside that of the name, for writing it before it has the name."""
        with self._folder(name, "write", make=True) as folders:
            temporary = f"{TEMPORARY}{words_of(name)[-1]}-{uuid4().hex}"
            fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=folders[-1])
            try:
                yield Draft(fd, folders, temporary)
            finally:
                os.close(fd)
                with suppress(OSError):
                    os.unlink(temporary, dir_fd=folders[-1])

    def mend(self, name: str, at: int, data: memoryview) -> None:
        """Overwrite damaged bytes of a blob with the right ones. For readers meanwhile, and for writers that do the
        same, nothing changes but the damage. Durable when it returns. Raises: BlobMissing."""
        with self._open(name, "mend", os.O_WRONLY) as fd:
            write_all(fd, data, at)
            os.fsync(fd)

    def drop_leftovers(self) -> None:
        """Remove temporary files that interrupted writers left behind. No writer may be active."""
        with suppress(OSError):
            for folder in ("", *(path.name for path in self.path.iterdir() if path.is_dir())):
                self.drop_temporaries(folder)

    def drop_temporaries(self, folder: str, of: Sequence[str] = ("",)) -> None:
        """Removes what writers that died left behind in a folder ("": the store's own). of: names begin like this."""
        left = tuple(f"{TEMPORARY}{name}" for name in of)
        any_name = f"{folder}/any" if folder else "any"
        with suppress(OSError, StoreError), self._folder(any_name, "list", writes=True) as folders:
            for name in os.listdir(folders[-1]):
                if name.startswith(left):
                    with suppress(OSError):
                        os.unlink(name, dir_fd=folders[-1])

    # ---- the way to a file

    @contextmanager
    def _folder(self, name: str, verb: str, *, make: bool = False, writes: bool = False) -> Iterator[Sequence[int]]:
        """The folders on the way to a name, open, the store's own first. What goes wrong meanwhile is a StoreError.
        make: those that are missing; with it, or with `writes`, none of them is another user's."""
        opened: list[int] = []
        words = words_of(name)
        try:
            if make or writes:
                refuse_moved(self.path)
            if make:
                self.path.mkdir(parents=True, exist_ok=True)
            opened.append(os.open(self.path, _FOLDER))
            for word in words[:-1]:
                opened.append(_enter(opened[-1], word, make))
                if make or writes:
                    refuse_others(os.fstat(opened[-1]).st_uid, opened[-1], root_too=True)
            yield opened
        except OSError as error:
            raise _translated(error, verb, self.path / name) from None
        finally:
            for fd in opened:
                os.close(fd)

    @contextmanager
    def _open(self, name: str, verb: str, mode: int) -> Iterator[int]:
        writes = mode != os.O_RDONLY
        with self._folder(name, verb, writes=writes) as folders:
            how = mode | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # a pipe that nobody is at the other end of
            fd = os.open(words_of(name)[-1], how, dir_fd=folders[-1])
            try:
                found = os.fstat(fd)
                self._refuse_foreign(name, found)
                if writes:
                    refuse_others(found.st_uid, folders[-1])
                yield fd
            finally:
                os.close(fd)

    def _refuse_foreign(self, name: str, found: os.stat_result) -> None:
        if not stat.S_ISREG(found.st_mode):
            kind = "a symbolic link" if stat.S_ISLNK(found.st_mode) else "not a regular file"
            raise BlobForeign(f"{self.path / name} is {kind}: expected a file that Everstep wrote")


def write_all(fd: int, data: memoryview, at: int) -> int:
    """Writes everything at a position, without the interpreter lock; returns how much that was."""
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done:], at + done)
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


def words_of(name: str) -> list[str]:
    """The words of a name, between its slashes. Raises: BlobForeign if it is no name, so that it leads nowhere else."""
    if not is_plain(name):
        raise BlobForeign(f"{name[:_SHOWN]!a} is no name of a file here: expected one such as {PART_EXAMPLE}")
    return name.split("/")


def room_for(size: int, where: str) -> bytearray:
    """Memory for so many bytes. Raises: BlobForeign if there is not as much: nothing of ours is as large."""
    try:
        return bytearray(size)
    except (MemoryError, OverflowError):
        raise BlobForeign(f"{where} claims {size} bytes, more than there is memory") from None


def _enter(folder: int, word: str, make: bool) -> int:
    """A folder in a folder. Raises: OSError, ELOOP if it is a symbolic link."""
    if make:
        with suppress(FileExistsError):
            os.mkdir(word, dir_fd=folder)
    try:
        return os.open(word, _FOLDER | os.O_NOFOLLOW, dir_fd=folder)
    except NotADirectoryError:
        if stat.S_ISLNK(os.stat(word, dir_fd=folder, follow_symlinks=False).st_mode):
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP)) from None
        raise


def _raise_unless_gone(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


def _translated(error: OSError, verb: str, path: Path) -> StoreError:
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return BlobMissing(f"cannot {verb} {path}: it does not exist")
    if isinstance(error, FileExistsError):
        return BlobExists(f"cannot {verb} {path}: it exists already")
    if error.errno in (errno.ELOOP, errno.ENXIO):
        kind = "a symbolic link, or lies behind one" if error.errno == errno.ELOOP else "not a regular file"
        return BlobForeign(f"{path} is {kind}: expected a file that Everstep wrote")
    return StoreError(f"cannot {verb} {path}: {error.strerror or error}", error.strerror or "")
