"""Values of known types out of plain ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import msgspec

_T = TypeVar("_T")


def converter(kind: type[_T], *, strict: bool = True, builtin_types: tuple[type, ...] = ()) -> Callable[[object], _T]:
    """`msgspec.convert` into a kind. Call it when a module is imported, as decoders are made: msgspec 0.22 ends the
    process if two threads look at a class for the first time at once.

    strict, builtin_types: as msgspec has them. The function that is returned raises msgspec.ValidationError.
    """
    msgspec.msgpack.Decoder(kind)  # what it finds out about the classes is kept with them
    return lambda value: msgspec.convert(value, kind, strict=strict, builtin_types=builtin_types)
