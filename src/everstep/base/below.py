"""The one way to read and write files below a run directory.

Another user may have prepared the directory. Links that lead to it are followed; links below it are not. Only regular
files are opened. A written file has the owner that any file made there gets, and gets its name when it is whole.
Opening never waits: a pipe without another end is refused. `folders` is the number of folders above a file that lie
below DIR: 0 for DIR/job.json, 1 for DIR/logs/output.log.
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
_ROOT, OTHERS = 0, 0o077
APPEND = os.O_WRONLY | os.O_APPEND | os.O_CREAT
ANEW = os.O_WRONLY | os.O_TRUNC | os.O_CREAT
NEW = os.O_WRONLY | os.O_EXCL | os.O_CREAT
DRAFT = re.compile(r"\..+\.(\d{1,20}|partial)")
"""Names of drafts, and of files that were still coming from another host."""
_ANOTHER = "it is not the directory that this process began in"
_makers: dict[int, int] = {}
_homes: dict[Path, int] = {}


def write_privately() -> None:
    """From now on this process, and what it starts, makes files and folders for their owner alone."""
    os.umask(OTHERS)


def keep_to(directory: Path) -> None:
    """From now on this process writes below this path only while it is the same directory. A directory that was moved,
    or removed and made again, is another job's. Raises: OSError."""
    if directory not in _homes:
        _homes[directory] = os.open(directory, _FOLDER)  # kept open, so that no other one gets its number


def leave(directory: Path) -> None:
    """Forget this directory: this process writes there no more."""
    fd = _homes.pop(directory, None)
    if fd is not None:
        os.close(fd)


def kept_descriptors() -> set[int]:
    """Descriptors by which this process knows the directories that it keeps to; a fork that closes all others needs
    them."""
    return set(_homes.values())


def moved(directory: Path) -> str:
    """Words for what happened to a directory that this process keeps to: removed or moved; "" if it is where it was."""
    try:
        if directory not in _homes or _is_home(directory, os.stat(directory)):
            return ""
    except FileNotFoundError:
        pass
    except OSError:
        return ""  # for example a file server that does not answer: nobody knows
    there = home(directory)
    return "was removed" if there is None else f"was moved to {os.readlink(there)}"


def home(directory: Path) -> Path | None:
    """Present path of a directory that this process keeps to, even if it was moved; None if it was removed."""
    there = Path(f"/proc/self/fd/{_homes[directory]}")
    return None if os.readlink(there).endswith(" (deleted)") else there


def refuse_moved(path: Path) -> None:
    """Check a path before something is written below it by other means. Raises: OSError if a directory that this
    process keeps to is not there any more."""
    for directory in (path, *path.parents):
        if directory in _homes and not _is_home(directory, os.stat(directory)):
            raise OSError(errno.ESTALE, _ANOTHER, str(directory))


def _is_home(directory: Path, found: os.stat_result) -> bool:
    return os.path.samestat(found, os.fstat(_homes[directory]))


def open_below(path: str | os.PathLike[str], flags: int = os.O_RDONLY, folders: int = 0, *, make: bool = False) -> int:
    """Descriptor of a regular file. make: create folders below DIR, too. Raises: OSError that names the path."""
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
    """Descriptor of the folder of a file. writes: also check that the folder belongs to the right user.

    Raises: OSError; its message names the path.
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
    """Path of a draft, which `placed` renames to the file. It lies beside the file under a name that nobody can guess,
    also not on another host that sees the directory. It is removed at the end. folders None: a user named this very
    file, so its folder may belong to anybody. Raises: OSError."""
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


def hard_link(path: Path, other: Path) -> None:
    """Give a file a second name, in another folder below the run directory; its content takes no more room. Raises:
    OSError, for example if the two are not on one file system."""
    with folder_of(path, 1) as here, folder_of(other, 1, make=True) as there:
        with contextlib.suppress(FileNotFoundError):
            found = os.stat(path.name, dir_fd=here, follow_symlinks=False)
            if os.path.samestat(found, os.stat(other.name, dir_fd=there, follow_symlinks=False)):
                return
        draft = f".{other.name}.{secrets.randbits(64)}"
        os.link(path.name, draft, src_dir_fd=here, dst_dir_fd=there, follow_symlinks=False)
        try:
            os.replace(draft, other.name, src_dir_fd=there, dst_dir_fd=there)
        except OSError:
            os.unlink(draft, dir_fd=there)
            raise


def write_atomically(
    path: str | os.PathLike[str], content: str | bytes, folders: int | None = 0, *, make: bool = False
) -> None:
    """Write a file so that readers see the old or the new content, never a part. Raises: OSError; nothing is left
    then."""
    with drafted(path, folders, make=make) as draft:
        draft.write_bytes(content.encode() if isinstance(content, str) else content)
        placed(draft, Path(path).name)


def whose(folder: Path) -> tuple[int, int]:
    """The owner of a folder, and the owner that a file made in it by this process gets. Raises: OSError."""
    fd = os.open(folder, _FOLDER)
    try:
        owner = os.fstat(fd).st_uid
        return owner, owner if owner == os.geteuid() else _new_file_owner(fd)
    finally:
        os.close(fd)


def refuse_others(owner: int, folder: int, *, root_too: bool = False) -> None:
    """Check, before a write into the folder of this descriptor, that `owner` is no other user. root_too: root counts as
    no other user. Root itself may write everywhere. Raises: PermissionError."""
    own = os.geteuid()
    if owner == own or own == _ROOT or (root_too and owner == _ROOT):
        return
    own = _new_file_owner(folder)
    if owner != own:
        words = f"it belongs to another user ({owner}; files of this process belong to {own})"
        raise PermissionError(errno.EPERM, words)


def _new_file_owner(folder: int) -> int:
    """Owner of a new file in the folder. File servers and user namespaces may choose another than this process's."""
    device = os.fstat(folder).st_dev
    if device not in _makers:
        name = f".owner.{secrets.randbits(64)}"
        try:
            fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _SAFELY, 0o600, dir_fd=folder)
        except OSError:
            return os.geteuid()  # nothing can be made there at all; the next call says so
        try:
            _makers[device] = os.fstat(fd).st_uid
        finally:
            os.close(fd)
            os.unlink(name, dir_fd=folder)
    return _makers[device]


@contextmanager
def _named(path: Path, name: str, folder: int) -> Iterator[None]:
    """Errors of calls relative to a folder name the whole path and the trouble."""
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
