"""An optimizer's update of pieces of its parameters, in one call of its `step` or in several.

A *piece* is a range of a parameter's elements, in the order of its memory. While the optimizer steps, leaves stand in
its groups in the place of the parameters: one for each piece, over the memory of parameter, gradient and state. They
exist during the call alone, so groups, keys, schedulers and everything that reads the state see whole parameters.

A parameter without pieces may leave a *witness*, a leaf of no elements and as many dimensions (some optimizers ask for
two): what the optimizer keeps once for each parameter (`step`, `mu_product`) follows on it as on any other. Which
optimizers give the same bits in pieces is found out by `train.optimizer_kind`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim import optimizer as hooks_of_all

from everstep.base.errors import ConfigError, check
from everstep.exact.layout import ALIGN_ELEMENTS, aligned_like, dense_stride

Ranges = Mapping[Tensor, Sequence[tuple[int, int]]]
"""By parameter: ranges [first, stop) of its elements, or none for a witness. Parameters that are not named are left
out."""


def may_be_cut(parameter: Tensor) -> bool:
    """Whether pieces of it are ranges of its memory."""
    return parameter.layout is torch.strided and dense_stride(parameter) == tuple(parameter.stride())


def alike_in_pieces(parameter: Tensor) -> bool:
    """Whether pieces of it may be updated apart, if its optimizer treats each element by itself: kernels round the last
    elements of a range of a narrow type otherwise than those before."""
    return may_be_cut(parameter) and parameter.dtype.itemsize >= torch.float32.itemsize


def calls_of(parameters: Iterable[Tensor], most: int, cut: bool) -> list[Ranges]:
    """All of these parameters in calls of at most `most` elements each, in order. cut: whether one may lie in several
    calls; otherwise it has a call to itself if it is larger."""
    whole = {p: ((0, p.numel()),) for p in parameters}
    return in_calls(whole, most, lambda parameter: cut and alike_in_pieces(parameter))


def in_calls(ranges: Ranges, most: int, cut: Callable[[Tensor], bool]) -> list[Ranges]:
    """These ranges in calls of at most `most` elements each, in order, and every witness in one of them. cut: whether a
    range of a parameter may lie in several calls. Cuts are at multiples of 64 bytes of float32."""
    step = max(most // ALIGN_ELEMENTS, 1) * ALIGN_ELEMENTS
    calls: list[dict[Tensor, list[tuple[int, int]]]] = [{}]
    room = step
    for parameter, own in ranges.items():
        if not own:
            calls[-1][parameter] = []
        for begin, end in own:
            ends = range(begin // step * step + step, end, step) if cut(parameter) else ()
            for first, stop in zip((begin, *ends), (*ends, end), strict=True):
                if stop - first > room and calls[-1]:
                    calls.append({})
                    room = step
                calls[-1].setdefault(parameter, []).append((first, stop))
                room -= stop - first
    return [*calls]


class _Leaf(NamedTuple):
    """A leaf, and the range of a parameter's elements for which it stands."""

    leaf: nn.Parameter
    parameter: Tensor
    first: int
    stop: int


class PieceUpdate:
    """One update of an optimizer. After it `optimizer.state` holds whole tensors, as after an ordinary one; elements of
    which no piece was updated keep what they had, or nothing that counts where the update has made the tensor."""

    def __init__(self, optimizer: Optimizer, make: Callable[[Tensor], Tensor] = aligned_like) -> None:
        """The gradients lie in the parameters' `.grad`. make: gives memory for a tensor of the state that is like this
        one."""
        self._optimizer, self._make_like = optimizer, make
        self._groups = [(group, list(group["params"])) for group in optimizer.param_groups]
        self._before = {p: dict(kept) for p, kept in optimizer.state.items() if isinstance(p, Tensor) and kept}
        self._after: dict[Tensor, dict[Any, Any]] = {}

    def make(self, calls: Iterable[Ranges]) -> None:
        """Update the pieces of one call after the other. The optimizer's hooks run once, around all of them, and see
        whole parameters."""
        optimizer = self._optimizer
        with _without_hooks(optimizer) as (before, after):
            args: tuple[Any, ...] = ()
            kwargs: dict[str, Any] = {}
            for hook in before:
                args, kwargs = hook(optimizer, args, kwargs) or (args, kwargs)
            for pieces in calls:
                self._call(pieces, args, kwargs)
            self._settle()
            for hook in after:
                hook(optimizer, args, kwargs)

    def _call(self, pieces: Ranges, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        optimizer, leaves = self._optimizer, list[_Leaf]()
        for parameter in pieces:
            optimizer.state.pop(parameter, None)
        try:
            for group, parameters in self._groups:
                own = [leaf for parameter in parameters for leaf in _leaves(parameter, pieces.get(parameter))]
                group["params"] = [leaf.leaf for leaf in own]
                leaves += own
            groups = _groups_of(optimizer)
            for one in leaves:
                if known := self._before.get(one.parameter):
                    optimizer.state[one.leaf] = {key: self._given(key, one) for key in known}
            optimizer.step(*args, **kwargs)
            if _groups_of(optimizer) != groups:
                raise ConfigError(f"{type(optimizer).__name__} changes its groups, or what is in them, in an update")
        finally:
            for group, parameters in self._groups:
                group["params"] = parameters
            states = [(optimizer.state.pop(one.leaf, None), one) for one in leaves]
        for state, one in states:
            if state:
                self._take(state, one)
        for parameter in pieces:
            kept = self._after.get(parameter) or self._before.get(parameter)
            if kept:
                optimizer.state[parameter] = kept

    def _given(self, key: Any, one: _Leaf) -> Any:
        """What a leaf has of one value of the state: its part of a tensor that is like the parameter, a copy else."""
        leaf, parameter, first, stop = one
        value = self._before[parameter][key]
        if not isinstance(value, Tensor):
            return copy.deepcopy(value)
        if value.shape != parameter.shape:
            return value.clone()
        if _in_own_shape(parameter, first, stop):
            return value.to(leaf.device)
        if first < stop and value.stride() != parameter.stride():
            value = self._before[parameter][key] = self._made(parameter, value.dtype).copy_(value)
        return _part(value, first, stop).to(leaf.device)

    def _made(self, parameter: Tensor, dtype: torch.dtype) -> Tensor:
        like = parameter.detach()
        return self._make_like(like if like.dtype == dtype else like.to(dtype))

    def _take(self, state: Mapping[Any, Any], one: _Leaf) -> None:
        """What an update has left on a leaf becomes a part of the whole."""
        leaf, parameter, first, stop = one
        before, after = self._before.get(parameter, {}), self._after.setdefault(parameter, {})
        whole = _in_own_shape(parameter, first, stop)
        for key, value in state.items():
            if isinstance(value, Tensor) and value.shape == leaf.shape:
                kept = after.get(key, before.get(key))
                if not isinstance(kept, Tensor) or kept.shape != parameter.shape or kept.dtype != value.dtype:
                    kept = self._made(parameter, value.dtype)
                place = kept if whole else _part(kept, first, stop)
                if place.data_ptr() != value.data_ptr() or place.device != value.device:
                    with torch.no_grad():
                        place.copy_(value)
                after[key] = kept
            elif key not in after:
                after[key] = value

    def _settle(self) -> None:
        """Values that are kept once for each parameter go back into the tensors that held them before the update, since
        other objects may refer to those."""
        for parameter, after in self._after.items():
            before = self._before.get(parameter, {})
            after |= {key: _in_place(before.get(key), value) for key, value in after.items()}


@contextmanager
def _without_hooks(optimizer: Optimizer) -> Iterator[tuple[list[Any], list[Any]]]:
    """The hooks that run before and after a step are taken away, those of all optimizers, too."""
    of_all = hooks_of_all._global_optimizer_pre_hooks, hooks_of_all._global_optimizer_post_hooks
    own = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    places: list[Any] = [*of_all, *own]
    kept = [dict(place) for place in places]
    try:
        for place in places:
            place.clear()
        yield [*chain(kept[0].values(), kept[2].values())], [*chain(kept[1].values(), kept[3].values())]
    finally:
        for place, hooks in zip(places, kept, strict=True):
            place.update(hooks)


def _groups_of(optimizer: Optimizer) -> list[list[int]]:
    """Which groups there are, and the parameters of each, all in order."""
    return [[id(group), *map(id, group["params"])] for group in optimizer.param_groups]


def _in_own_shape(parameter: Tensor, first: int, stop: int) -> bool:
    """Whether a piece is all of its parameter, and so has its shape."""
    return first == 0 and stop == parameter.numel() and stop > 0


def _leaves(parameter: Tensor, ranges: Sequence[tuple[int, int]] | None) -> list[_Leaf]:
    """Leaves for these ranges, a witness if there are none; nothing for a parameter that is left out."""
    if ranges is None:
        return []
    return [_Leaf(_leaf(parameter, first, stop), parameter, first, stop) for first, stop in ranges or ((0, 0),)]


def _leaf(parameter: Tensor, first: int, stop: int) -> nn.Parameter:
    gradient = parameter.grad
    if _in_own_shape(parameter, first, stop):
        data = parameter.detach()
    else:
        check(first == stop or may_be_cut(parameter), "expected a parameter without holes in its memory, to be cut")
        data = _part(parameter.detach(), first, stop)
        if gradient is not None:
            if first < stop and gradient.stride() != parameter.stride():
                gradient = torch.empty_like(parameter).copy_(gradient)
            gradient = _part(gradient.detach(), first, stop)
    leaf = nn.Parameter(data, requires_grad=parameter.requires_grad)
    leaf.__dict__.update(parameter.__dict__)
    leaf.grad = gradient
    return leaf


def _part(tensor: Tensor, first: int, stop: int) -> Tensor:
    """Elements of a dense tensor, in the order of its memory, flat; if there are none, in as many dimensions."""
    if first == stop and tensor.dim():
        return tensor[:0]
    return tensor.as_strided((stop - first,), (1,), tensor.storage_offset() + first)


def _in_place(before: Any, value: Any) -> Any:
    """The new value in the old one's memory, where both are tensors alike."""
    if not isinstance(before, Tensor) or not isinstance(value, Tensor) or before is value:
        return value
    if (before.shape, before.dtype, before.device) != (value.shape, value.dtype, value.device):
        return value
    with torch.no_grad():
        return before.copy_(value)
