"""Files that anybody may have written: opened without waiting, read within bounds, taken as data.

All that a run directory, a checkpoint folder or a user names is read this way: a pipe nobody writes to, a device
without an end, a file of a terabyte of nothing and JSON nested a thousand deep cost no more than a refusal. Whatever is
wrong is an `OSError` with words of its own, or a `ValueError`, so that who reads says what for.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

from everstep.base.below import open_below
from everstep.base.readable import readable

MOST_BYTES = 16 << 20
"""Of a file that is read whole, unless said otherwise."""
_PORTION_BYTES = 1 << 20
_PIPE_PATIENCE_S = 10.0


@contextmanager
def open_given(
    path: str | os.PathLike[str], folders: int = 0, *, links: bool = False, pipes: bool = False
) -> Iterator[BinaryIO]:
    """A regular file, open for reading. folders: as for `base.below`. links: a user names this very file, so links are
    followed. pipes: so, too, and it may be a pipe, such as `<(command)`; reads of it do not wait.

    Raises: OSError, also for what is no such file.
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
    """A file's bytes. folders, links, pipes: as for `open_given`; a pipe that says nothing is waited for ten seconds.

    Raises: OSError, also if there are more than `most_bytes`.
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
    """What comes out of a pipe until it ends, and a byte more than the most."""
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


def portions(file: BinaryIO) -> Iterator[bytes]:
    """What is left of a file, a megabyte at a time; runs of bytes that were never written are passed over."""
    while data := file.read(_PORTION_BYTES):
        skip_hole(file, data)
        yield data


def skip_hole(file: BinaryIO, data: bytes) -> None:
    """Where nothing was ever written, moves the position to where something was, or to the end. data: read before."""
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
    """What a JSON text says, in which every key of an object is said once, and every number is finite.

    Raises: ValueError, whatever is wrong.
    """
    try:
        return json.loads(text, object_pairs_hook=_once, parse_constant=_refuse, parse_float=_finite)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_json(
    path: str | os.PathLike[str], most_bytes: int = MOST_BYTES, folders: int = 0, *, links: bool = False
) -> Any:
    """What a JSON file says. folders, links: as for `open_given`. Raises: OSError; ValueError."""
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
