"""Files that anybody may have written: opened without waiting, read within bounds, taken as data.

Files in a run directory, in a checkpoint folder, or named by a user are read this way. A pipe without a writer, an
endless device, a sparse file of a terabyte and JSON nested a thousand deep cost no more than a refusal. Every trouble
is an `OSError` with a clear message or a `ValueError`, so that the reader can add what the file was for.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import resource
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

from everstep.base.below import open_below
from everstep.base.readable import readable

MOST_BYTES = 16 << 20
"""Limit of a file that is read whole, unless said otherwise."""
_PORTION_BYTES = 1 << 20
_PIPE_PATIENCE_S = 10.0
_LIBRARY_BYTES, _THREAD_BYTES = 1 << 30, 16 << 20
_bounding = threading.Lock()


@contextmanager
def open_given(
    path: str | os.PathLike[str], folders: int = 0, *, links: bool = False, pipes: bool = False
) -> Iterator[BinaryIO]:
    """A regular file, open for reading. folders: as in `base.below`. links: follow links, because a user named this
    very file. pipes: follow links and also accept a pipe, such as `<(command)`; reads of it do not wait.

    Raises: OSError, also if it is no such file.
    """
    if links or pipes:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    else:
        fd = open_below(path, os.O_RDONLY, folders)
    with open(fd, "rb", buffering=0 if pipes else -1) as file:
        mode = os.fstat(fd).st_mode
        if not (stat.S_ISREG(mode) or (pipes and stat.S_ISFIFO(mode))):
            kind = "a directory" if stat.S_ISDIR(mode) else "not a regular file"
            raise OSError(errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL, f"it is {kind}", os.fspath(path))
        yield file  # type: ignore[misc]


def read_given(
    path: str | os.PathLike[str],
    most_bytes: int = MOST_BYTES,
    folders: int = 0,
    *,
    links: bool = False,
    pipes: bool = False,
) -> bytes:
    """Content of a file. folders, links, pipes: as in `open_given`; a silent pipe is given up after ten seconds.

    Raises: OSError, also if the file has more than `most_bytes`.
    """
    with open_given(path, folders, links=links, pipes=pipes) as file:
        if stat.S_ISFIFO(os.fstat(file.fileno()).st_mode):
            data = _drained(file.fileno(), most_bytes)
        else:
            data = file.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise OSError(errno.EFBIG, f"it has more than {most_bytes} bytes", os.fspath(path))
    return data


def _drained(fd: int, most_bytes: int) -> bytes:
    """Bytes of a pipe until it ends, at most one more than `most_bytes`."""
    data = bytearray()
    deadline_s = time.monotonic() + _PIPE_PATIENCE_S
    while len(data) <= most_bytes:
        if not readable([fd], deadline_s - time.monotonic()):
            raise OSError(errno.ETIMEDOUT, "it is a pipe that never ends")
        with contextlib.suppress(BlockingIOError):
            chunk = os.read(fd, _PORTION_BYTES)
            if not chunk:
                break
            data += chunk
    return bytes(data[: most_bytes + 1])


@contextmanager
def bounded_memory(size_bytes: int) -> Iterator[int]:
    """While a library reads a file of this size, the process takes at most four times the size more, and what the
    library itself and its threads need. Gives this limit in bytes; an allocation beyond it fails."""
    limit = 4 * size_bytes + _LIBRARY_BYTES + _THREAD_BYTES * (os.cpu_count() or 1)
    with _bounding:
        soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
        with open("/proc/self/statm") as file:
            top = int(file.read().split()[5]) * resource.getpagesize() + limit
        if soft == resource.RLIM_INFINITY or top < soft:
            resource.setrlimit(resource.RLIMIT_DATA, (top, hard))
        try:
            yield limit
        finally:
            resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def portions(file: BinaryIO) -> Iterator[bytes]:
    """The rest of a file, a megabyte at a time; holes in the file are skipped."""
    while data := file.read(_PORTION_BYTES):
        skip_hole(file, data)
        yield data


def skip_hole(file: BinaryIO, data: bytes) -> None:
    """If the file has a hole here, move the position to its end. data: the bytes read just before."""
    if data.strip(b"\0"):
        return
    at = file.tell()
    with contextlib.suppress(OSError):
        try:
            found = os.lseek(file.fileno(), at, os.SEEK_DATA)
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
            found = os.fstat(file.fileno()).st_size
        file.seek(max(at, found))


def parse_json(text: bytes | str) -> Any:
    """Value of a JSON text. Keys of an object must be distinct, numbers finite.

    Raises: ValueError for any trouble.
    """
    try:
        return json.loads(text, object_pairs_hook=_once, parse_constant=_refuse, parse_float=_finite)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_json(
    path: str | os.PathLike[str], most_bytes: int = MOST_BYTES, folders: int = 0, *, links: bool = False
) -> Any:
    """Value of a JSON file. folders, links: as in `open_given`. Raises: OSError; ValueError."""
    return parse_json(read_given(path, most_bytes, folders, links=links))


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key is given twice")
    return found


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"{text[:40]} is too large a number")
    return number


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")
