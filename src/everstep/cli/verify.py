"""`everstep verify`: compares two runs bit by bit, and shows where they differ."""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np

from everstep.base.digests import DIGEST_VERSION, version_of
from everstep.base.errors import ConfigError
from everstep.base.given import MOST_BYTES, open_given, parse_json
from everstep.cli.run_dir import read_digest

_NAMED = 5
_LENGTH = struct.Struct("<Q")
_NUMPY = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U8": np.uint8,
    "BOOL": np.uint8,
}
_BYTES = {"BF16": 2} | {name: np.dtype(kind).itemsize for name, kind in _NUMPY.items()}


@click.command()
@click.argument("dir_a", type=click.Path(path_type=Path))
@click.argument("dir_b", type=click.Path(path_type=Path))
def command(dir_a: Path, dir_b: Path) -> int:
    """Compare the final weights and digests of two finished runs. Exit code 0: bitwise equal; 1: they differ."""
    found = compare(dir_a, dir_b)
    digest, other = read_digest(dir_a), read_digest(dir_b)
    note = incomparable(digest or {}, other or {})
    if note:
        print(note)
    if not found:
        compared = digest if digest is not None and other is not None and not note else {}
        of_what = "weights, buffers and optimizer state" if compared.get("state") else "weights and buffers"
        known = digest or other or {}
        print(f"bitwise equal: {of_what}, step {known.get('step', '?')}, digest {known.get('model', '?')}")
        return 0
    for line in found:
        print(line)
    return 1


def incomparable(a: Mapping[str, Any], b: Mapping[str, Any]) -> str:
    """Reason why two runs' digests cannot be compared, in one line; "" if they can."""
    versions = [version_of(a), version_of(b)]
    if all(version == DIGEST_VERSION for version in versions):
        return ""
    shown = " and ".join(str(version)[:20] for version in versions)
    return (
        f"digests are of versions {shown}, this version of Everstep compares {DIGEST_VERSION}: only the tensors of the "
        "model are compared, not the optimizer's state"
    )


def compare(a: Path, b: Path) -> list[str]:
    """Lines about differences between two runs; none if they are bitwise equal, as far as they can be compared.

    Raises: ConfigError if one of them cannot be read.
    """
    tensors_a, tensors_b = read_weights(find_weights(a)), read_weights(find_weights(b))
    digest_a, digest_b = read_digest(a), read_digest(b)
    for path, digest in ((a, digest_a), (b, digest_b)):
        if digest is None and path.is_dir() and (path / "final").is_dir():
            raise ConfigError(f"{path} has no final/digest.json: has the job finished?")
    lines = _compare_names(tensors_a, tensors_b)
    differing = [n for n in tensors_a if n in tensors_b and not tensors_a[n].same(tensors_b[n])]
    if differing:
        lines.append(f"{len(differing)} of {len(tensors_a)} tensors differ")
        lines += [f"  {name}: {_difference(tensors_a[name], tensors_b[name])}" for name in differing[:_NAMED]]
        if len(differing) > _NAMED:
            lines.append(f"  and {len(differing) - _NAMED} more")
    if digest_a is not None and digest_b is not None:
        for key in ("step",) if incomparable(digest_a, digest_b) else ("step", "model", "state"):
            if digest_a.get(key) != digest_b.get(key):
                lines.append(f"{key} in digest.json differs: {digest_a.get(key)} and {digest_b.get(key)}")
    return lines


def _compare_names(a: dict[str, StoredTensor], b: dict[str, StoredTensor]) -> list[str]:
    lines = []
    for label, only in (("first", sorted(a.keys() - b.keys())), ("second", sorted(b.keys() - a.keys()))):
        if only:
            more = f" and {len(only) - _NAMED} more" if len(only) > _NAMED else ""
            lines.append(f"only in the {label}: {', '.join(only[:_NAMED])}{more}")
    return lines


def _difference(a: StoredTensor, b: StoredTensor) -> str:
    if a.dtype != b.dtype or a.shape != b.shape:
        return f"{a.dtype}{list(a.shape)} and {b.dtype}{list(b.shape)}"
    x, y = a.floats(), b.floats()
    if x is None or y is None:
        return "bytes differ"
    with np.errstate(invalid="ignore", over="ignore"):
        apart = np.abs(x - y)
    count = int(np.count_nonzero(~(apart == 0)))
    if not count:
        return "bytes differ, in the sign of zeros"
    largest = np.nanmax(apart) if not np.isnan(apart).all() else np.nan
    return f"{count} of {x.size} elements differ, by {largest:.3g} at most"


@dataclass(frozen=True)
class StoredTensor:
    """One tensor: dtype as safetensors names it, shape, and its bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview

    def same(self, other: StoredTensor) -> bool:
        """Equal in dtype, shape and every byte."""
        return self.dtype == other.dtype and self.shape == other.shape and self.data == other.data

    def floats(self) -> np.ndarray[Any, np.dtype[np.float64]] | None:
        """The values as float64, None for a dtype that numpy does not know."""
        if self.dtype == "BF16":
            wide = np.frombuffer(self.data, np.uint16).astype(np.uint32) << 16
            return wide.view(np.float32).astype(np.float64)
        kind = _NUMPY.get(self.dtype)
        return None if kind is None else np.frombuffer(self.data, kind).astype(np.float64)


def find_weights(path: Path) -> Path:
    """The safetensors file of a run directory (final/), of a checkpoint, or the file itself.

    Raises: ConfigError if there is none.
    """
    if not path.exists():
        raise ConfigError(f"there is no {path}")
    if path.is_file():
        return path
    for candidate in (path / "final" / "model.safetensors", path / "model.safetensors"):
        if candidate.is_file():
            return candidate
    raise ConfigError(f"{path} has no final/model.safetensors: has the job finished?")


def read_weights(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a safetensors file, by name.

    Raises: ConfigError if it cannot be read or is not one.
    """
    try:
        with open_given(path, 1, links=path.parent.name != "final") as file:
            data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        (length,) = _LENGTH.unpack_from(data)
        if length > MOST_BYTES:
            raise ValueError(f"a header of {length} bytes")
        header = parse_json(bytes(data[_LENGTH.size : _LENGTH.size + length]))
        body = data[_LENGTH.size + length :]
        tensors = {}
        for name, entry in header.items():
            if name != "__metadata__":
                start, stop = entry["data_offsets"]
                if type(start) is not int or type(stop) is not int or not 0 <= start <= stop <= len(body):
                    raise ValueError(f"{name} lies outside of the file")
                if not isinstance(entry["dtype"], str) or not all(type(n) is int and n >= 0 for n in entry["shape"]):
                    raise ValueError(f"{name} has no type and shape")
                each = _BYTES.get(entry["dtype"])
                if each is not None and stop - start != each * math.prod(entry["shape"]):
                    raise ValueError(f"{name} has {stop - start} bytes, its type and shape are of another size")
                tensors[name] = StoredTensor(entry["dtype"], tuple(entry["shape"]), body[start:stop])
        return tensors
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise ConfigError(f"cannot read {path}: not a whole safetensors file ({error})") from None
