"""Parameters whose optimizer's state the members of a pool may divide, and their places where each stays whole."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from everstep.exact.image import OPTIMIZER, Spot, is_kind
from everstep.exact.layout import ALIGN_ELEMENTS, BLOCK_ELEMENTS, round_up

_ONCE = (bool, int, float, str, type(None))


def divisible(parameter: Tensor) -> bool:
    """Whether members may divide the optimizer's state of a parameter: its elements are one range of memory, in order,
    and not to be taken for what an optimizer keeps once for each parameter."""
    return parameter.is_contiguous() and parameter.dtype is torch.float32 and parameter.numel() > 1


def kept_like(optimizer: Optimizer, parameter: Tensor) -> frozenset[str] | None:
    """Keys of what an optimizer keeps for each element of a parameter, in float32. None if it keeps other things than
    these and single values: then it cannot be divided."""
    found = set()
    for key, value in optimizer.state.get(parameter, {}).items():
        if isinstance(value, Tensor) and value.numel() != 1:
            alike = value.shape == parameter.shape and value.dtype is torch.float32
            if not alike or not is_kind(f"{OPTIMIZER}/{key}"):
                return None
            found.add(str(key))
        elif not isinstance(value, (Tensor, *_ONCE)):
            return None
    return frozenset(found)


def keeps_any(optimizer: Optimizer) -> bool:
    """Whether an optimizer keeps anything yet: what was looked up, and never filled, is nothing."""
    return any(optimizer.state.values())


def tensor_bytes(kept: object) -> int:
    """Bytes of the tensors that an optimizer keeps for a parameter."""
    values = kept.values() if isinstance(kept, Mapping) else ()
    return sum(value.numel() * value.element_size() for value in values if isinstance(value, Tensor))


def divided_parameters(optimizer: Optimizer, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Those of these divisible parameters whose state is divided: the optimizer keeps the same for each of them, since
    what is kept for other parameters as well would have other blocks. Of several kinds the one that takes most
    memory."""
    kinds: dict[frozenset[str], list[nn.Parameter]] = {}
    for parameter in parameters:
        if keys := kept_like(optimizer, parameter):
            kinds.setdefault(keys, []).append(parameter)
    sizes = {keys: len(keys) * sum(p.numel() for p in found) for keys, found in kinds.items()}
    return kinds[max(sizes, key=lambda keys: (sizes[keys], sorted(keys)))] if sizes else []


def block_range(parameter: Tensor, start: int) -> range:
    """Element blocks that hold a part of a parameter. start: of its first element on the grid."""
    return range(start // BLOCK_ELEMENTS, (start + parameter.numel() - 1) // BLOCK_ELEMENTS + 1)


def whole_spots(spots: Mapping[str, Spot]) -> tuple[dict[str, Spot], dict[int, int]]:
    """Places for parameters such that one that crosses the border of a block begins at one: so members can divide
    blocks and leave parameters whole. Also the number of element blocks of each unit. The order stays."""
    found: dict[str, Spot] = {}
    sizes: dict[int, int] = {}
    at, start, unit = 0, 0, -1
    for name, spot in sorted(spots.items(), key=lambda item: item[1].offset):
        if spot.unit != unit:
            at = start = round_up(at, BLOCK_ELEMENTS)
            unit = spot.unit
        size = torch.Size(spot.shape).numel()
        if at % BLOCK_ELEMENTS + size > BLOCK_ELEMENTS:
            at = round_up(at, BLOCK_ELEMENTS)
        found[name] = replace(spot, start=start, offset=at)
        at = round_up(at + size, ALIGN_ELEMENTS)
        sizes[unit] = (round_up(at, BLOCK_ELEMENTS) - start) // BLOCK_ELEMENTS
    return found, sizes
