"""The one way to files below a run directory, for reading and for writing.

Somebody else may have prepared the directory. Links that lead to it are followed, below it none; what is opened is a
regular file; what is written has the owner that a file made there gets, and gets its name when it is whole. Opening
never waits: a pipe without another end is refused. `folders` is how many of the folders above a file lie below DIR: 0
for DIR/job.json, 1 for DIR/logs/output.log.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_SAFELY = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_WRITES = os.O_WRONLY | os.O_RDWR
_ROOT = 0
APPEND = os.O_WRONLY | os.O_APPEND | os.O_CREAT
ANEW = os.O_WRONLY | os.O_TRUNC | os.O_CREAT
NEW = os.O_WRONLY | os.O_EXCL | os.O_CREAT
DRAFT = re.compile(r"\..+\.\d{1,20}")
"""Names of drafts."""
_ANOTHER = "it is not the directory that this process began in"
_makers: dict[int, int] = {}
_homes: dict[Path, int] = {}


def keep_to(directory: Path) -> None:
    """From now on this process writes below this path only while that is the very directory of now: one that is moved,
    or removed and made anew, is another job's. Raises: OSError."""
    if directory not in _homes:
        _homes[directory] = os.open(directory, _FOLDER)  # kept open, so that no other one gets its number


def leave(directory: Path) -> None:
    """This process has nothing to do there any more."""
    fd = _homes.pop(directory, None)
    if fd is not None:
        os.close(fd)


def kept_descriptors() -> set[int]:
    """By which this process knows the directories that it keeps to: a fork that closes all others needs them."""
    return set(_homes.values())


def moved(directory: Path) -> str:
    """What has become of a directory that this process keeps to, in words; "" if it is where it was."""
    try:
        if directory not in _homes or _is_home(directory, os.stat(directory)):
            return ""
    except FileNotFoundError:
        pass
    except OSError:
        return ""  # a file server that does not answer, say: nobody knows
    there = home(directory)
    return "was removed" if there is None else f"was moved to {os.readlink(there)}"


def home(directory: Path) -> Path | None:
    """A path to a directory that this process keeps to, wherever it is by now; None if it is nowhere."""
    there = Path(f"/proc/self/fd/{_homes[directory]}")
    return None if os.readlink(there).endswith(" (deleted)") else there


def refuse_moved(path: Path) -> None:
    """Before something is written below a path by other means. Raises: OSError if the directory that this process keeps
    to is not there any more."""
    for directory in (path, *path.parents):
        if directory in _homes and not _is_home(directory, os.stat(directory)):
            raise OSError(errno.ESTALE, _ANOTHER, str(directory))


def _is_home(directory: Path, found: os.stat_result) -> bool:
    return os.path.samestat(found, os.fstat(_homes[directory]))


def open_below(path: str | os.PathLike[str], flags: int = os.O_RDONLY, folders: int = 0, *, make: bool = False) -> int:
    """A descriptor of a regular file. make: the folders below DIR, too. Raises: OSError, with its own words."""
    path = Path(path)
    with folder_of(path, folders, make=make, writes=bool(flags & _WRITES)) as folder, _named(path, path.name, folder):
        fd = os.open(path.name, (flags & ~os.O_TRUNC) | _SAFELY, 0o600, dir_fd=folder)
        try:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode):
                is_folder = stat.S_ISDIR(found.st_mode)
                kind = "a directory" if is_folder else "not a regular file"
                raise OSError(errno.EISDIR if is_folder else errno.EINVAL, f"it is {kind}")
            if flags & _WRITES:
                refuse_others(found.st_uid, folder)
            if flags & os.O_TRUNC:
                os.ftruncate(fd, 0)
        except BaseException:
            os.close(fd)
            raise
        return fd


@contextmanager
def folder_of(
    path: str | os.PathLike[str], folders: int = 0, *, make: bool = False, writes: bool = True
) -> Iterator[int]:
    """A descriptor of the folder that a file lies in, or is to lie in; with `writes` that folder is the right user's.

    Raises: OSError, with its own words.
    """
    path = Path(path)
    top = path.parents[folders]
    fd = os.open(top, _FOLDER)
    try:
        if writes and top in _homes and not _is_home(top, os.fstat(fd)):
            raise OSError(errno.ESTALE, _ANOTHER, str(top))
        for depth in range(folders, 0, -1):
            inner, above = path.parents[depth - 1], fd
            with _named(inner, inner.name, fd):
                if make:
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(inner.name, dir_fd=fd)
                fd = os.open(inner.name, _FOLDER | os.O_NOFOLLOW, dir_fd=fd)
            os.close(above)
        if writes:
            with _named(path.parent, "", fd):
                refuse_others(os.fstat(fd).st_uid, fd, root_too=True)
        yield fd
    finally:
        os.close(fd)


@contextmanager
def drafted(path: str | os.PathLike[str], folders: int | None = 0, *, make: bool = False) -> Iterator[Path]:
    """Where to write a file before `placed` gives it its name: beside it, under a name that nobody can guess, on
    another host of the same directory neither. Nothing is left there. folders None: a user named this very file, so
    its folder may be anybody's. Raises: OSError."""
    path = Path(path)
    with folder_of(path, folders or 0, make=make, writes=folders is not None) as folder:
        draft = Path(f"/proc/self/fd/{folder}/.{path.name}.{secrets.randbits(64)}")  # this very folder
        try:
            os.close(os.open(draft.name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _SAFELY, 0o600, dir_fd=folder))
            yield draft
        except OSError as error:
            raise _said(error, path) from None
        finally:
            with contextlib.suppress(OSError):
                os.unlink(draft.name, dir_fd=folder)


def placed(draft: Path, name: str) -> None:
    """Give a draft its name, in the folder that it was made in. Raises: OSError."""
    os.replace(draft, draft.with_name(name))


def write_atomically(
    path: str | os.PathLike[str], content: str | bytes, folders: int | None = 0, *, make: bool = False
) -> None:
    """Readers see the old content or the new one, never a part. Raises: OSError; then nothing is left of it."""
    with drafted(path, folders, make=make) as draft:
        draft.write_bytes(content.encode() if isinstance(content, str) else content)
        placed(draft, Path(path).name)


def whose(folder: Path) -> tuple[int, int]:
    """The owner of a folder, and the owner that a file made in it by this process gets. Raises: OSError."""
    fd = os.open(folder, _FOLDER)
    try:
        owner = os.fstat(fd).st_uid
        return owner, owner if owner == os.geteuid() else _maker(fd)
    finally:
        os.close(fd)


def refuse_others(owner: int, folder: int, *, root_too: bool = False) -> None:
    """Before something that this owner has is written, in the folder of this descriptor: it is no other user's.
    root_too: what is root's is no other user's. Root itself writes everywhere. Raises: PermissionError."""
    own = os.geteuid()
    if owner == own or own == _ROOT or (root_too and owner == _ROOT):
        return
    own = _maker(folder)
    if owner != own:
        words = f"it belongs to another user ({owner}; files of this process belong to {own})"
        raise PermissionError(errno.EPERM, words)


def _maker(folder: int) -> int:
    """The owner that a new file gets: file servers and user namespaces may have it be another than this process's."""
    device = os.fstat(folder).st_dev
    if device not in _makers:
        name = f".owner.{secrets.randbits(64)}"
        try:
            fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _SAFELY, 0o600, dir_fd=folder)
        except OSError:
            return os.geteuid()  # nothing can be made there at all, which the next call says
        try:
            _makers[device] = os.fstat(fd).st_uid
        finally:
            os.close(fd)
            os.unlink(name, dir_fd=folder)
    return _makers[device]


@contextmanager
def _named(path: Path, name: str, folder: int) -> Iterator[None]:
    """Errors of calls relative to a folder say the whole path, and what is wrong with it."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR) and _is_link(name, folder):
            error = OSError(errno.ELOOP, "it is a symbolic link, and links below a run directory are not followed")
        raise _said(error, path) from None


def _is_link(name: str, folder: int) -> bool:
    with contextlib.suppress(OSError):
        return stat.S_ISLNK(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)
    return False


def _said(error: OSError, path: Path) -> OSError:
    words = "it is not a regular file" if error.errno == errno.ENXIO else error.strerror or str(error)
    return OSError(error.errno, words, str(path))
