"""Fast hashes of tensors: equal exactly when the bytes are (-0.0 is not 0.0, and the payload of a NaN counts).

Apart because all code that compares or verifies state must hash the same bytes. The hash is xxh3, which is not
cryptographic: it finds accidents, not attacks; against attacks, a job's connections prove knowledge of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
import xxhash
from torch import Tensor

from everstep.base.errors import ConfigError

_ELSEWHERE: list[Callable[[Tensor], Tensor]] = []


def digest_with(whole: Callable[[Tensor], Tensor]) -> Callable[[], None]:
    """Tensors of this process may lie elsewhere in part: from now on digests are of what `whole` gives for them, the
    tensor itself or a copy. Returns the function that ends it."""
    _ELSEWHERE.append(whole)
    return lambda: _ELSEWHERE.remove(whole)


def _whole(tensor: Tensor) -> Tensor:
    for whole in _ELSEWHERE:
        tensor = whole(tensor)
    return tensor


def bytes_of(tensor: Tensor) -> memoryview:
    """Bytes of the tensor's elements in logical (row-major) order. No copy if it is contiguous and in host memory.

    Raises: ConfigError if it is not strided (sparse, quantised by a subclass, ...).
    """
    if tensor.layout is not torch.strided:
        raise ConfigError(f"only dense tensors can be hashed or saved, not {tensor.layout}")
    with torch.no_grad():
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        if flat.is_complex():
            flat = torch.view_as_real(flat.resolve_conj()).reshape(-1)
        if flat.numel() == 0:
            return memoryview(b"")
        return memoryview(flat.resolve_neg().view(torch.uint8).numpy().data)


def tensor_of_bytes(kind: str, shape: Sequence[int], data: bytes) -> Tensor:
    """Inverse of `bytes_of`. kind: the dtype's name. Raises: ValueError, RuntimeError for what is no such tensor."""
    dtype = dtype_of(kind)
    flat = torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)
    return flat.view(tuple(shape))


def dtype_of(name: str) -> torch.dtype:
    """The dtype of this name, without "torch.". Raises: ValueError if there is none."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name} is no dtype")
    return dtype


def digest_bytes(data: bytes | bytearray | memoryview) -> str:
    """xxh3, 128 bits, as 32 hex digits. Large inputs are hashed without the interpreter lock."""
    return xxhash.xxh3_128_hexdigest(data)


def digest_views(views: Sequence[memoryview]) -> str:
    """`digest_bytes` of bytes that lie in several places."""
    found = xxhash.xxh3_128()
    for view in views:
        found.update(view)
    return found.hexdigest()


def tensor_digest(tensor: Tensor) -> str:
    """32 hex digits over dtype, shape and bytes."""
    return named_digest([("", tensor)])


def named_digest(items: Iterable[tuple[str, Tensor]]) -> str:
    """32 hex digits over names, dtypes, shapes and bytes, independent of the order of the items; names are distinct.

    Two models have equal digests exactly when all their named tensors are equal bit by bit.
    """
    rows = sorted((name, str(t.dtype), tuple(t.shape), digest_bytes(bytes_of(_whole(t)))) for name, t in items)
    return digest_bytes(repr(rows).encode())
