"""A model whose parameters have places and no values yet: the processes of a worker make these together.

Each makes some of the modules, and puts what its host holds of them where all find it. So no process makes the whole
model, and no host has more of it at a time than it is to hold, and one module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from everstep.base.own_pages import is_untouched, own_pages
from everstep.exact.layout import ALIGN_BYTES, round_up
from everstep.train.stage import There, fill_by_module
from everstep.train.touched import Touched, memory_in

Put = Callable[[str, Tensor], None]
"""Takes a parameter that was made, by its name."""
_ARENA_BYTES = 64 << 20


class Skeleton:
    """A model on the meta device, of which modules can be made."""

    def __init__(self, build: Callable[[], nn.Module], units_of: Callable[[nn.Module], Sequence[nn.Module]]) -> None:
        with torch.device("meta"):
            self.model = build()
        self._units = list(units_of(self.model))

    def fill(
        self, seed: int, device: torch.device, wanted: Iterable[int] | None, put: Put, first: int, step: int
    ) -> None:
        """Make every `step`-th module, beginning with number `first`, one after the other. seed, device, wanted: as
        of `build_by_module`."""
        fill_by_module(self.model, self._units, seed, device, wanted, put, first, step)

    def is_left_alone(self, act: Callable[[nn.Module], Any]) -> bool:
        """Whether this neither reads the values of the model's parameters nor writes them."""
        before = self._facts()
        try:
            with Touched(memory_in(self.model.parameters())) as seen:
                act(self.model)
        except Exception:  # the real call will raise the same error and say what is wrong
            return False
        return not seen.touched and self._facts() == before

    def _facts(self) -> list[tuple[object, ...]]:
        return [(name, id(p), p.untyped_storage()._cdata) for name, p in self.model.named_parameters()]


def blank_parameters() -> There:
    """Gives each parameter a place that takes no memory until it is touched."""
    arena, used = own_pages(_ARENA_BYTES), 0

    def place(name: str, like: nn.Parameter) -> Tensor:
        nonlocal arena, used
        size = round_up(max(like.numel(), 1) * like.element_size(), ALIGN_BYTES)
        if used + size > len(arena):
            arena, used = own_pages(max(size, _ARENA_BYTES)), 0
        flat = torch.frombuffer(arena, dtype=like.dtype, count=max(like.numel(), 1), offset=used)
        used += size
        return flat.as_strided(like.shape, torch.empty_like(like).stride(), 0)

    return place


def are_blank(parameters: Iterable[nn.Parameter]) -> bool:
    """Whether nobody has read or written these places."""
    return all(is_untouched(p.data_ptr(), p.nbytes) for p in parameters if not p.is_meta)
