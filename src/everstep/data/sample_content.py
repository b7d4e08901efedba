"""What a sample holds, as a digest: equal for samples that are alike, in any process.

Apart from `stream` because this looks into the user's objects and knows nothing of streams.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from hashlib import blake2b
from typing import Any

import numpy as np
from torch import Tensor

from everstep.base.errors import ConfigError
from everstep.exact.digest import bytes_of, digest_bytes

_PLAIN = bool | int | float | complex | str | bytes | None
_WRITTEN = frozenset({bool, int, float, type(None), list, tuple, dict})
_BY_CONTENT = (Tensor, np.ndarray, np.generic, str, bytes, bytearray, set, frozenset)
_IN_PART = "?"
_FIRST = 32
_MOST_WRITTEN = 1 << 20


def sample_digest(sample: Any) -> str:
    """32 hex digits over a sample as release 0.1.0 compared it, by the type alone of most objects. Where that is not
    all, 32 digits over what can be compared follow; and a mark if there is something that cannot."""
    first = _Look(by_type=True, old=True)
    found = first.digest(sample)
    if not first.missed:
        return found
    look = _Look()
    return found + look.digest(sample) + (_IN_PART if look.missed else "")


def steady_digest(sample: Any) -> str:
    """32 hex digits over what should be the same wherever a sample is read: not over objects of other types than
    containers, which may differ by an id or an address of their own, nor over the folders of absolute paths."""
    return _Look(by_type=True).digest(sample)


def joint(digests: Sequence[str]) -> str:
    """One digest of several samples' digests, marked if one of them is."""
    found, rest = _hashed(map(types_alone, digests)), [each[_FIRST:] for each in digests]
    return found + (_hashed(rest) if any(rest) else "") + (_IN_PART if any(map(in_part, digests)) else "")


def _hashed(texts: Iterable[str]) -> str:
    return blake2b("".join(texts).encode(), digest_size=16).hexdigest()


def short(digest: str) -> str:
    """16 hex digits over the digest of a sample."""
    return _hashed([digest])[:16]


def types_alone(digest: str) -> str:
    """The part of a digest that tells most objects by their types alone."""
    return digest[:_FIRST]


def alike(before: str, now: str) -> bool:
    """Whether samples are those of before, as far as both digests say what they hold."""
    short = min(len(before), len(now)) == _FIRST
    return types_alone(before) == types_alone(now) if short else before == now


def in_part(digest: str) -> bool:
    """Whether there was something that cannot be compared: samples may differ where their digests are equal."""
    return digest.endswith(_IN_PART)


class _Look:
    """A look at one sample. by_type: it tells most objects by their types alone; old: more of them, as release 0.1.0
    did. missed: it has met something that is not compared."""

    def __init__(self, by_type: bool = False, old: bool = False) -> None:
        self.missed, self._by_type, self._old = False, by_type, old
        self._cycles = 0
        self._known: dict[int, tuple[Any, str]] = {}

    def digest(self, sample: Any) -> str:
        """32 hex digits."""
        return digest_bytes(repr(self.into(sample)).encode(errors="surrogatepass"))

    def into(self, value: Any, around: tuple[int, ...] = ()) -> Any:
        """The value in a form that repr tells exactly. around: ids of the objects that it lies in; it may refer to one
        of them."""
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, np.ndarray | np.generic) and not value.dtype.hasobject:
            return str(value.dtype), value.shape, digest_bytes(value.tobytes())
        if isinstance(value, bytes | bytearray):
            return "bytes", digest_bytes(value)
        if isinstance(value, _PLAIN):
            return value if self._old or not self._by_type else _without_folders(value)
        if id(value) in around:
            self._cycles += 1
            return type(value).__name__
        inner = partial(self.into, around=(*around, id(value)))
        if isinstance(value, dict if self._old else Mapping):
            return [
                (repr(inner(key) if self._by_type and not self._old else key), inner(each))
                for key, each in value.items()
            ]
        if isinstance(value, list | tuple):
            return [inner(each) for each in value]
        pixels = getattr(value, "tobytes", None)
        if callable(pixels) and hasattr(value, "mode"):
            return type(value).__name__, digest_bytes(pixels())
        if self._old:
            self.missed = True
            return type(value).__name__, ""
        if isinstance(value, np.ndarray | np.void):
            return value.shape, [inner(each) for each in value.ravel().tolist()]
        if isinstance(value, set | frozenset):
            return sorted(repr(inner(each)) for each in value)
        if is_dataclass(value) and not isinstance(value, type):
            return [(each.name, inner(getattr(value, each.name, None))) for each in fields(value) if each.compare]
        if self._by_type:
            return type(value).__name__
        if _decodes(type(value)) and hasattr(value, "_hf_encoded"):
            return inner(value._hf_encoded)  # Hugging Face's datasets made it of this
        return type(value).__name__, self._object(value, (*around, id(value)))

    def _tensor(self, value: Tensor) -> Any:
        try:
            if value.is_nested:
                return str(value.dtype), [self._tensor(each) for each in value.unbind()]
            if self._old and value.device.type != "cpu":
                raise ConfigError("release 0.1.0 did not look at it")
            return str(value.dtype), tuple(value.shape), digest_bytes(bytes_of(value))
        except (ConfigError, RuntimeError):  # it is sparse, or quantised
            self.missed = True
            return str(value.dtype), () if value.is_nested else tuple(value.shape), ""

    def _object(self, value: Any, around: tuple[int, ...]) -> str:
        """Digest of what pickle takes of an object: its attributes, as a rule. "" if it cannot be pickled."""
        if id(value) in self._known:
            return self._known[id(value)][1]
        written, cycles, found = _Bounded(), self._cycles, ""
        try:
            if _decodes(type(value)):
                raise TypeError("its tensors hold addresses")
            _Writer(written, self, around).dump(value)
            found = digest_bytes(written.getvalue())
        except Exception:  # it is open, or runs, or was made within a function, or is large
            self.missed = True
        if self._cycles == cycles:  # else it depends on what it lies in
            self._known[id(value)] = value, found
        return found


def _without_folders(value: Any) -> Any:
    return value.rpartition("/")[2] if isinstance(value, str) and value.startswith("/") else value


class _Bounded(io.BytesIO):
    """What pickle has written of one object. What a sample refers to may be large, and each sample may refer to it."""

    def write(self, data: Any, /) -> int:
        if self.tell() + len(data) > _MOST_WRITTEN:
            raise ValueError("too large to be compared")
        return super().write(data)


class _Writer(pickle.Pickler):
    """Pickles an object so that like ones give like bytes: pickle refers to a string or the like that it has met, and
    whether two that are alike are one differs among processes. Classes need not be found by their names."""

    def __init__(self, file: io.BytesIO, look: _Look, around: tuple[int, ...]) -> None:
        super().__init__(file, 5)
        self._look, self._around = look, around

    def persistent_id(self, value: Any) -> str | None:
        """Text that is written in place of a value; None if the value itself is pickled."""
        kind = type(value)
        if kind in _WRITTEN:
            return None
        if isinstance(value, type):
            return value.__qualname__
        by_content = isinstance(value, _BY_CONTENT) or is_dataclass(value) or _decodes(kind)
        return repr(self._look.into(value, self._around)) if by_content else None


def _decodes(kind: type) -> bool:
    """Whether this is a decoder of torchcodec."""
    return any(one.__module__.startswith("torchcodec.") for one in kind.__mro__)
