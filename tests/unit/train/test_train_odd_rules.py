"""Rules that a job follows without a word: when epochs are saved, which batches are new, beside plain counts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from everstep.base.config import load_config
from everstep.order.cursor import SampleOrder
from everstep.train import shapes
from everstep.train.saving import saving_of
from everstep.train.shapes import Shapes


def link_of(run_dir: Any = "/run", task: str = "t", regular: bool = True, **config: Any) -> Any:
    return SimpleNamespace(config=load_config([("test", config)]), run_dir=run_dir, task=task, regular_saves=regular)


@given(st.integers(1, 4), st.integers(1, 3), st.integers(0, 30), st.integers(1, 4), st.booleans())
def test_an_epoch_ends_with_the_step_that_takes_its_last_sample(
    lanes: int, micro_batch: int, more: int, epochs: int, regular: bool
) -> None:
    """The last step of the job is no such end, and a life of a rehearsal has none."""
    size = lanes * micro_batch + more
    order = SampleOrder(1, size, lanes, micro_batch, epochs=epochs)
    rules = saving_of(link_of(regular=regular), False, order)
    taken, over = 0, list[int]()
    for step in range(1, order.total_steps + 1):
        before, taken = taken // size, taken + lanes * micro_batch
        crossed = taken // size if taken // size > before and step < order.total_steps and regular else 0
        over += [crossed] if crossed else []
        assert rules.epoch_ends(step) == crossed
    assert over == (list(range(1, epochs))[: len(over)] if regular else []) and len(over) <= epochs


TENSORS = st.builds(
    torch.zeros, st.lists(st.integers(0, 2), max_size=2), dtype=st.sampled_from([torch.float32, torch.int64])
)
BATCHES = st.recursive(
    TENSORS | st.integers(0, 1),
    lambda inner: st.tuples(inner, inner) | st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("ab"), inner),
    max_leaves=3,
)


def _told(batch: Any) -> str:
    """All tensors of a batch in words, in their order."""
    if isinstance(batch, torch.Tensor):
        return f"{list(batch.shape)} {batch.dtype};"
    inner = batch.values() if isinstance(batch, dict) else batch if isinstance(batch, list | tuple) else ()
    return "".join(_told(one) for one in inner)


@given(st.lists(BATCHES, max_size=12), st.integers(1, 5))
def test_a_batch_is_new_once_by_its_tensors(batches: list[Any], most: int) -> None:
    """Up to a limit: then none is new any more."""
    seen, told = Shapes(), list[str]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shapes, "_MOST", most)
        for batch in batches:
            new = _told(batch) not in told and len(told) < most
            assert seen.new(batch) is new
            told += [_told(batch)] if new else []
