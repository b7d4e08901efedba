"""WebDataset's tar shards by index: a sample is read where it lies, so a job has its own order and every place at once.

Nothing is unpacked: the headers say where each file lies, links are refused, and nothing pickled is read. The package
webdataset is not needed; its own `WebDataset` has no position, and is read as a stream.
"""

from __future__ import annotations

import contextlib
import glob
import io
import json
import mmap
import os
import stat
import tarfile
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import blake2b
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from everstep.base.below import write_atomically
from everstep.base.errors import ConfigError, TaskError
from everstep.base.given import open_given, portions
from everstep.data.token_stream import cache_folder
from everstep.exact.digest import digest_bytes

PICTURES = frozenset({"jpg", "jpeg", "png", "ppm", "pgm", "webp", "bmp", "tif", "tiff"})
PICKLED = frozenset({"pyd", "pkl", "pickle", "pth", "pt"})
_DIGEST_BYTES = 16
_FILES_KEPT = 64
_CACHE_FORMAT = "2\n"
"""Of what `places` keeps: an older one may have been made of a shard that is refused now."""
_MOST_HEADER_BYTES = 1 << 20

Sample = dict[str, Any]


class TarShards(Dataset[Any]):
    """Samples of WebDataset shards: the files of a tar with the same name up to the first dot of the last part.

    shards: paths, or a pattern (`"data/train-*.tar"`), which is sorted. transform: makes a sample of a dict with
    `__key__` and one entry per ending. decode: entries are decoded by their ending (pictures to (3, height, width)
    uint8, cls and id to int, txt to str, json, npy); otherwise they are bytes.

    The headers of shards are read once, which takes about a second per 10,000 samples and shard, and kept in the
    user's cache folder for as long as the shards keep size and time.

    Raises: ConfigError for what is no such shard, naming it.
    """

    def __init__(
        self, shards: str | Iterable[str], transform: Callable[[Sample], Any] | None = None, decode: bool = True
    ) -> None:
        self._paths = _paths(shards)
        self._transform, self._decode = transform, decode
        self._stats = [_stat(path) for path in self._paths]
        counts, self._starts = places(self._paths, self._stats)
        self._ends = list(accumulate(counts))
        self._open: OrderedDict[int, int] = OrderedDict()
        self._owner = os.getpid()
        if not self._ends[-1]:
            raise ConfigError(f"expected samples in {self._paths[0]} and the others, got none: a name needs an ending")

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Any:
        """Raises: TaskError naming shard and sample."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} is not in 0..{len(self) - 1}")
        number = bisect_right(self._ends, index)
        start, stop = self._starts[index + number : index + number + 2].tolist()  # each shard has one more, its end
        where = self._paths[number]
        sample: Sample = {}
        for key, ending, data in files_of(self._read(number, start, stop - start), where):
            sample["__key__"] = key
            try:
                sample[ending] = decoded(ending, data) if self._decode else data
            except Exception as error:
                said = str(error) if isinstance(error, TaskError) else f"{type(error).__name__}: {error}"
                raise TaskError(f"{where}: {key}.{ending} cannot be decoded: {said}") from error
        return sample if self._transform is None else self._transform(sample)

    def files_read(self) -> list[tuple[str, int]]:
        """Names and sizes in bytes of the shards, by which a job that goes on knows them again."""
        return [(os.path.basename(path), found.st_size) for path, found in zip(self._paths, self._stats, strict=True)]

    def _read(self, number: int, offset: int, size: int) -> bytes:
        """Raises: TaskError if the shard has changed, or cannot be read."""
        data = b""
        try:
            data = os.pread(self._descriptor(number), size, offset)
        except OSError as error:
            raise TaskError(f"cannot read {self._paths[number]}: {error.strerror or error}") from error
        if len(data) != size:
            raise TaskError(f"{self._paths[number]} became shorter while the job ran")
        return data

    def _descriptor(self, number: int) -> int:
        if self._owner != os.getpid():  # a process that was forked leaves its parent's alone
            self._open, self._owner = OrderedDict(), os.getpid()
        if number in self._open:
            self._open.move_to_end(number)
            return self._open[number]
        while len(self._open) >= _FILES_KEPT:
            os.close(self._open.popitem(last=False)[1])
        descriptor = os.open(self._paths[number], os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        self._open[number] = descriptor
        now, then = os.fstat(descriptor), self._stats[number]
        if (now.st_size, now.st_mtime_ns) != (then.st_size, then.st_mtime_ns):
            raise TaskError(f"{self._paths[number]} was changed while the job ran")
        return descriptor

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": OrderedDict(), "_owner": 0}


def _paths(shards: str | Iterable[str]) -> list[str]:
    paths = sorted(glob.glob(shards)) if isinstance(shards, str) else [os.fspath(path) for path in shards]
    if not paths:
        raise ConfigError(f"expected tar files, got none at {shards!r}: name a pattern such as 'data/train-*.tar'")
    twice = {path for path in paths if paths.count(path) > 1} if len(set(paths)) < len(paths) else ()
    if twice:
        raise ConfigError(f"{min(twice)} is given twice, so its samples would count twice: name each shard once")
    return paths


def _stat(path: str) -> os.stat_result:
    try:
        found = os.stat(path)
    except OSError as error:
        raise ConfigError(f"cannot read the shard {path}: {error.strerror or error}") from None
    if not stat.S_ISREG(found.st_mode):
        raise ConfigError(f"expected a tar file, got {path}, which is no regular file")
    return found


# ---- where samples lie


def _members(raw: Any, where: str, size: int) -> Iterator[tuple[str, str, tarfile.TarInfo]]:
    """Key and ending of each file in a tar. Raises: ConfigError naming the shard and what is wrong with it."""
    try:
        headers: Any = _Headers(raw)
        with tarfile.open(fileobj=headers, mode="r:") as tar:
            for member in tar:
                if member.size < 0 or "\0" in member.name:
                    raise ValueError("a header has a size below 0, or a name with NUL")
                if member.isdir():
                    continue
                if not member.isreg() or member.issparse():
                    raise ConfigError(
                        f"{where}: {member.name[:100]} is a link or the like: expected regular files alone"
                    )
                if member.offset_data + member.size > size:
                    raise ConfigError(f"{where} is cut off within {member.name[:100]}: copy it again")
                folder, _, name = member.name.rpartition("/")
                stem, dot, ending = name.partition(".")
                if dot and stem:  # others are notes beside the samples, as for webdataset
                    yield f"{folder}/{stem}" if folder else stem, ending.lower(), member
            raw.seek(tar.offset)
            if any(data.strip(b"\0") for data in portions(raw)):  # tarfile takes a damaged header for the end
                raise ValueError(f"the header at byte {tar.offset} is damaged, or another tar follows")
    except (tarfile.TarError, EOFError, OSError, ValueError, OverflowError, RecursionError) as error:
        raise ConfigError(f"{where} is no tar file that can be read by place ({error}): unpack it if packed") from None


class _Headers:
    """A tar file for a reader of headers, of which none is large."""

    def __init__(self, raw: Any) -> None:
        self.seek, self.tell, self._read = raw.seek, raw.tell, raw.read

    def read(self, size: int) -> Any:
        if size > _MOST_HEADER_BYTES:
            raise tarfile.ReadError(f"a header of {size} bytes, expected at most {_MOST_HEADER_BYTES}")
        return self._read(size)


def files_of(data: bytes, where: str) -> Iterator[tuple[str, str, bytes]]:
    """Key, ending and content of the files in a piece of a tar. Raises: as `scan`."""
    for key, ending, member in _members(io.BytesIO(data), where, len(data)):
        yield key, ending, data[member.offset_data : member.offset_data + member.size]


def scan(path: str) -> list[int]:
    """Where the samples of a shard begin, in bytes, and where the last one ends.

    Raises: ConfigError naming the shard and what is wrong with it.
    """
    starts: list[int] = []
    end, seen, endings = 0, set[str](), set[str]()
    last = None
    with open_given(path, links=True) as raw:
        for key, ending, member in _members(raw, path, os.stat(path).st_size):
            if key != last:
                if key in seen:
                    raise ConfigError(f"{path}: the files of sample {key} do not lie together: write one after another")
                seen.add(key)
                starts.append(member.offset)
                last, endings = key, set()
            if ending in endings:
                raise ConfigError(f"{path}: sample {key} has two files .{ending}: expected one")
            endings.add(ending)
            end = member.offset_data + -(-member.size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
    return [*starts, end]


def places(paths: Sequence[str], stats: Sequence[os.stat_result]) -> tuple[list[int], Any]:
    """Number of samples in each shard, and where they begin: for each shard what `scan` finds, one after the other.

    Raises: ConfigError, as `scan`.
    """
    said = (f"{os.path.abspath(p)}\0{s.st_size}\0{s.st_mtime_ns}\n" for p, s in zip(paths, stats, strict=True))
    name = blake2b(f"{_CACHE_FORMAT}{''.join(said)}".encode(errors="surrogateescape"), digest_size=16).hexdigest()
    file = cache_folder() / f"shards-{name}"
    found = _stored(file, len(paths))
    if found is not None:
        return found
    scanned = [np.asarray(scan(path), dtype="<i8") for path in paths]
    counts = [len(starts) - 1 for starts in scanned]
    every = np.concatenate([np.asarray(counts, dtype="<i8"), *scanned])
    with contextlib.suppress(OSError):  # without room for it, they are looked for again next time
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, bytes.fromhex(digest_bytes(every.data.cast("B"))) + every.tobytes(), None)
    return counts, every[len(paths) :]


def _stored(file: Path, shards: int) -> tuple[list[int], Any] | None:
    try:
        if file.stat().st_size < _DIGEST_BYTES + 16 * shards:
            return None
        with open(file, "rb") as kept:
            memory = mmap.mmap(kept.fileno(), 0, access=mmap.ACCESS_READ)
        every = np.frombuffer(memory, dtype="<i8", offset=_DIGEST_BYTES)
        if memory[:_DIGEST_BYTES].hex() != digest_bytes(every.data.cast("B")):
            return None
    except (OSError, ValueError):
        return None
    counts = every[:shards].tolist()
    return (counts, every[shards:]) if len(every) == 2 * shards + sum(counts) else None


# ---- what is in a file


def decoded(ending: str, data: bytes) -> Any:
    """The content of a file by its ending; bytes if that says nothing. Raises: TaskError for what is pickled."""
    kind = ending.rpartition(".")[2]
    if kind in PICKLED:
        raise TaskError("it is pickled, and nothing is unpickled: write .npy, .json or bytes, or use decode=False")
    if kind in PICTURES:
        return _picture(data)
    if kind in ("cls", "cls2", "class", "id", "inx", "index", "count"):
        return int(data)
    if kind in ("txt", "text"):
        return data.decode()
    if kind == "json":
        return json.loads(data)
    if kind == "npy":
        return np.lib.format.read_array(io.BytesIO(data), allow_pickle=False)
    return data


def _picture(data: bytes) -> torch.Tensor:
    try:
        import PIL.Image
    except ImportError:
        raise TaskError("reading pictures needs Pillow: pip install 'everstep[images]'") from None
    with PIL.Image.open(io.BytesIO(data)) as picture:
        pixels = picture.convert("RGB")
    flat = torch.frombuffer(bytearray(pixels.tobytes()), dtype=torch.uint8)
    return flat.view(pixels.height, pixels.width, 3).permute(2, 0, 1).contiguous()
