"""Values that one part of a model hands to the next: trees of tensors and plain values, taken apart and put together.

Apart because senders, receivers and the passes must agree on it. Tensors keep their exact form on the way: strides,
also of views, and their place within 64 bytes, because kernels choose their path, and so the bits, by both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch import Tensor

from everstep.base.errors import TaskError, check
from everstep.exact.layout import ALIGN_BYTES, dense_stride

_encode = msgspec.msgpack.encode
_PLAIN = (bool, int, float, str)


@dataclass
class Bundle:
    """A tree taken apart. tensors: each once, however often the tree has it. meta: the rest, as bytes."""

    tensors: list[Tensor]
    meta: bytes

    def tree(self, tensors: Sequence[Tensor] | None = None) -> Any:
        """The tree, with these tensors in the places of its own."""
        node, _ = msgspec.msgpack.decode(self.meta, strict=False)
        return _build(node, self.tensors if tensors is None else tensors)

    @property
    def wants_gradient(self) -> list[bool]:
        """For each tensor whether a gradient is to come back for it."""
        return list(msgspec.msgpack.decode(self.meta)[1])


def bundle(tree: Any, whose: Callable[[], str]) -> Bundle:
    """Take a tree of dict, list and tuple apart. whose: names its owner, for the error.

    Raises: TaskError if it holds anything but tensors, numbers, text and None.
    """
    tensors: list[Tensor] = []
    node = _take(tree, tensors, {}, whose)
    return Bundle(tensors, _encode((node, [t.requires_grad for t in tensors])))


def gradients(found: Sequence[Tensor | None]) -> Bundle:
    """The gradients of a bundle's tensors, for the way back."""
    node = [k for k, gradient in enumerate(found) if gradient is not None]
    return Bundle([g for g in found if g is not None], _encode((node, len(found))))


def open_gradients(back: Bundle) -> list[Tensor | None]:
    """Inverse of `gradients`: one for each tensor of the bundle, None where there is none."""
    indices, count = msgspec.msgpack.decode(back.meta)
    found: list[Tensor | None] = [None] * count
    for k, gradient in zip(indices, back.tensors, strict=True):
        found[k] = gradient
    return found


def _take(tree: Any, tensors: list[Tensor], seen: dict[int, int], whose: Callable[[], str]) -> Any:
    kind = type(tree)
    if isinstance(tree, Tensor):
        if tree.layout is not torch.strided:
            raise TaskError(f"{whose()} has a tensor of layout {tree.layout}; a model is cut where tensors are dense")
        if id(tree) not in seen:
            seen[id(tree)] = len(tensors)
            tensors.append(tree)
        return ["t", seen[id(tree)]]
    if tree is None or kind in _PLAIN:
        return ["v", tree]
    if kind in (list, tuple, torch.Size):
        return ["l" if kind is list else "u", [_take(v, tensors, seen, whose) for v in tree]]
    if kind is dict:
        return ["d", [[_take(k, tensors, seen, whose), _take(v, tensors, seen, whose)] for k, v in tree.items()]]
    raise TaskError(
        f"{whose()} has a {kind.__name__}; where a model is cut it must be tensors, numbers, text and None, in dicts, "
        "lists and tuples"
    )


def _build(node: Any, tensors: Sequence[Tensor]) -> Any:
    tag, body = node
    if tag == "t":
        return tensors[body]
    if tag == "v":
        return body
    if tag == "d":
        return {_build(k, tensors): _build(v, tensors) for k, v in body}
    values = [_build(v, tensors) for v in body]
    return values if tag == "l" else tuple(values)


# ---- on the wire


def to_wire(sent: Bundle) -> tuple[list[Tensor], bytes]:
    """(tensors, bytes) for a channel that keeps bits, dtypes and shapes, and the strides of dense tensors."""
    formed = [_form_of(tensor.detach()) for tensor in sent.tensors]
    return [flat for _, flat in formed], _encode((sent.meta, [form for form, _ in formed]))


def from_wire(tensors: Sequence[Tensor], data: bytes) -> Bundle:
    """Inverse of `to_wire`, for tensors that begin at 64-byte boundaries."""
    meta, forms = msgspec.msgpack.decode(data)
    check(len(forms) == len(tensors), f"{len(tensors)} tensors came, {len(forms)} were announced")
    return Bundle([_restore(t, f) for t, f in zip(tensors, forms, strict=True)], meta)


def _form_of(tensor: Tensor) -> tuple[list[Any] | None, Tensor]:
    """(None, tensor) for an ordinary tensor; else its form, and a tensor to send."""
    if tensor.numel() == 0:
        return None, tensor
    shift = tensor.data_ptr() % ALIGN_BYTES // tensor.element_size() if tensor.device.type == "cpu" else 0
    stride = tuple(tensor.stride())
    if shift == 0 and dense_stride(tensor) == stride:
        return None, tensor
    span = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, stride, strict=True))
    values = _without_repeats(tensor)
    whole = _overlaps(values)
    sent = tensor.as_strided((span,), (1,)) if whole else values.contiguous()
    return [list(tensor.shape), list(stride), shift, span, whole], sent


def _without_repeats(tensor: Tensor) -> Tensor:
    """The tensor without the repeats of `expand`."""
    for dim, step in enumerate(tensor.stride()):
        if step == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _overlaps(tensor: Tensor) -> bool:
    """Whether some elements share memory (for example windows of `unfold`); True if in doubt."""
    reach = 1
    for step, size in sorted(
        (step, size) for step, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1
    ):
        if step < reach:
            return True
        reach += (size - 1) * step
    return False


def _restore(tensor: Tensor, form: list[Any] | None) -> Tensor:
    if form is None:
        return tensor
    shape, stride, shift, span, whole = form
    spare = ALIGN_BYTES // tensor.element_size()
    raw = torch.zeros(span + shift + spare, dtype=tensor.dtype, device=tensor.device)
    start = -raw.data_ptr() % ALIGN_BYTES // tensor.element_size() + shift
    target = raw.as_strided(shape, stride, start)
    if whole:
        raw[start : start + span].copy_(tensor)
    else:
        _without_repeats(target).copy_(tensor)
    return target


def faithful_clone(tensor: Tensor) -> Tensor:
    """Copy of the same bits in the very same form."""
    form, flat = _form_of(tensor.detach())
    if form is not None:
        return _restore(flat, form)
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device).copy_(flat)
