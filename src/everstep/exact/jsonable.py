"""State of optimizers, schedulers and the like as JSON, with its tensors pulled out by name. No pickle.

Apart from `state` because it knows nothing of models: it is a codec that brings back the same types and the same bits.
Unknown types are refused by name, rather than restored as something else.

JSON strings, integers, booleans, null and lists stand for themselves; everything else is an object with one key: f
(float, hexadecimal), tuple, dict (pairs, in order), counter, ordered, defaultdict, deque, set, frozenset, bytes,
tensor, array, scalar (numpy), dtype, device, undigested.
"""

from __future__ import annotations

import json
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from everstep.base.errors import CheckpointCorrupt, ConfigError
from everstep.exact.digest import bytes_of, dtype_of, tensor_of_bytes

_MAX_DEPTH = 64


class Undigested(dict[str, Any]):
    """A value of a dict that is saved, and that digests leave out: it may differ where all bits are the same."""


class TypedValues(dict[str, Any]):
    """Values in which frozensets and dicts with defaults keep their types, too; other kinds of dicts are refused."""


def encode(value: Any, path: str, tensors: dict[str, Tensor] | None, depth: int = 0, typed: bool = False) -> Any:
    """The value as JSON. path: its name; tensors in it are put into `tensors` under names that begin with it. With
    None, their dtype, shape and bytes are in the JSON. typed: it is in `TypedValues`.

    Raises: ConfigError naming a part that is of another type, or nested too deeply (a cycle).
    """
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return {"f": value.hex()}
    if depth > _MAX_DEPTH:
        raise ConfigError(f"state {path[:200]} is nested more than {_MAX_DEPTH} deep; does it contain itself?")
    if isinstance(value, Tensor):
        return {"tensor": _pull(value.detach(), path, tensors)}
    if kind in (set, frozenset):
        items = sorted((encode(v, path, tensors, depth + 1, typed) for v in value), key=json.dumps)
        return {kind.__name__ if typed else "set": items}
    if kind in (list, tuple, torch.Size, deque):
        items = [encode(v, f"{path}/{k}", tensors, depth + 1, typed) for k, v in enumerate(value)]
        return items if kind is list else {"deque": [value.maxlen, items]} if kind is deque else {"tuple": items}
    if isinstance(value, dict):
        typed = typed or kind is TypedValues
        pairs = [_pair(path, k, v, tensors, depth, typed) for k, v in value.items()]
        tag = _DICTS.get(kind, "" if typed else "dict")
        return {tag: pairs} if tag else _with_defaults(value, path, pairs)
    return _encode_rare(value, path, tensors)


def _with_defaults(value: Any, path: str, pairs: list[Any]) -> Any:
    factory: Any = value.default_factory if type(value) is defaultdict else None
    if factory in _FACTORIES.values():
        return {"defaultdict": [factory.__name__, {"dict": pairs}]}
    raise ConfigError(f"state {path} is a {type(value).__name__}, which would come back as another kind: use a dict")


def _pair(path: str, key: Any, value: Any, tensors: dict[str, Tensor] | None, depth: int, typed: bool) -> list[Any]:
    if not isinstance(key, str | int | float | bool | tuple | None):
        raise ConfigError(f"state {path} has a key of type {type(key).__name__}; keys must be strings or numbers")
    name = key if isinstance(key, str) else repr(key)
    return [encode(key, path, tensors, depth + 1, typed), encode(value, f"{path}/{name}", tensors, depth + 1, typed)]


def _pull(tensor: Tensor, path: str, tensors: dict[str, Tensor] | None) -> Any:
    """Put the tensor aside under a unique name (keys may contain slashes), if it is to be aside."""
    if tensors is None:
        return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), bytes_of(tensor).hex()]
    while path in tensors:
        path += "~"
    tensors[path] = tensor
    return path


def _encode_rare(value: Any, path: str, tensors: dict[str, Tensor] | None) -> Any:
    if type(value) is bytes:
        return {"bytes": value.hex()}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if isinstance(value, np.generic) and value.dtype.kind in "biuf":
        return {"scalar": [value.dtype.str, value.tobytes().hex()]}
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf" and value.dtype.isnative:
        return {"array": _pull(torch.from_numpy(np.array(value, order="C")), path, tensors)}
    raise ConfigError(
        f"state {path} is a {type(value).__name__}, which cannot be saved; use numbers, strings, tensors and "
        "containers of these in state_dict()"
    )


def decode(node: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Inverse of `encode`. tensors: by name.

    Raises: CheckpointCorrupt if `encode` cannot have made it.
    """
    if node is None or isinstance(node, bool | int | str):
        return node
    if isinstance(node, list):
        return [decode(v, tensors) for v in node]
    if not isinstance(node, dict) or len(node) != 1:
        raise CheckpointCorrupt(f"state holds {str(node)[:80]!r}, which Everstep did not write")
    try:
        ((tag, body),) = node.items()
        return _DECODERS[tag](body, tensors)
    except (AttributeError, LookupError, OverflowError, RuntimeError, TypeError, ValueError) as error:
        raise CheckpointCorrupt(f"state holds {str(node)[:80]!r}, which Everstep did not write: {error}") from error


def canonical(node: Any) -> Any:
    """The JSON with dict entries in a fixed order, for digests that ignore the order of insertion, and `Undigested`."""
    if isinstance(node, list):
        return [canonical(v) for v in node]
    if isinstance(node, dict):
        ((tag, body),) = node.items()
        rest = canonical([pair for pair in body if not _undigested(pair[1])] if tag == "dict" else body)
        return {tag: sorted(rest, key=lambda pair: json.dumps(pair[0])) if tag in ("dict", "counter") else rest}
    return node


def _undigested(node: Any) -> bool:
    return isinstance(node, dict) and "undigested" in node


def _pairs(body: Any, tensors: Mapping[str, Tensor]) -> list[tuple[Any, Any]]:
    return [(decode(k, tensors), decode(v, tensors)) for k, v in body]


def _pulled(body: Any, tensors: Mapping[str, Tensor]) -> Tensor:
    if isinstance(body, str):
        return tensors[body]
    kind, shape, data = body
    return tensor_of_bytes(kind, shape, bytes.fromhex(data))


_DICTS: dict[type, str] = {dict: "dict", TypedValues: "dict", Counter: "counter", OrderedDict: "ordered"}
_DICTS[Undigested] = "undigested"
_FACTORIES = {kind.__name__: kind for kind in (int, float, bool, str, list, dict, set, tuple, deque, Counter)}
_DECODERS: dict[str, Any] = {
    "f": lambda body, _: float.fromhex(body),
    "tuple": lambda body, tensors: tuple(decode(v, tensors) for v in body),
    "set": lambda body, tensors: {decode(v, tensors) for v in body},
    "frozenset": lambda body, tensors: frozenset(decode(v, tensors) for v in body),
    "defaultdict": lambda body, tensors: defaultdict(_FACTORIES[body[0]], decode(body[1], tensors)),
    "deque": lambda body, tensors: deque((decode(v, tensors) for v in body[1]), maxlen=body[0]),
    "dict": lambda body, tensors: dict(_pairs(body, tensors)),
    "undigested": lambda body, tensors: Undigested(_pairs(body, tensors)),
    "ordered": lambda body, tensors: OrderedDict(_pairs(body, tensors)),
    "counter": lambda body, tensors: Counter(dict(_pairs(body, tensors))),
    "bytes": lambda body, _: bytes.fromhex(body),
    "dtype": lambda body, _: dtype_of(body),
    "device": lambda body, _: torch.device(body),
    "scalar": lambda body, _: np.frombuffer(bytes.fromhex(body[1]), dtype=np.dtype(body[0]))[0],
    "tensor": _pulled,
    "array": lambda body, tensors: _pulled(body, tensors).cpu().numpy(),
}
