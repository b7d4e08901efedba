"""What is in a lane's batch: the same bits whoever loads it, when, and after what."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from everstep.base.errors import TaskError
from everstep.data.batch import aligned
from everstep.exact.seeding import derive, preserve_rng, sample_seed, seed_all
from everstep.order.cursor import Order, SampleId

_COLLATE = 1 << 33
"""First number of the seeds for collating, so that they coincide with no others."""


@dataclass(frozen=True)
class Recipe:
    """Everything that a lane's batch is made from. dataset: map-style. collate: list of samples -> batch."""

    dataset: Any
    order: Order
    collate: Callable[[list[Any]], Any]
    seed: int


def fetch(recipe: Recipe, step: int, lane: int, *, preserve: bool = True) -> tuple[Any, tuple[SampleId, ...]]:
    """(batch, its samples); (None, ()) for a lane without samples.

    Each sample is fetched, and the batch collated, with all generators seeded for it, and one intra-op thread. The
    caller's generators stay as they were, unless `preserve` is off (saves 0.1 ms where they are seeded next anyway).

    Raises: TaskError naming the sample that cannot be read, or saying that collate raised.
    """
    samples = recipe.order.samples(step, lane)
    if not samples:
        return None, ()
    with preserve_rng() if preserve else nullcontext(), _one_thread():
        items = [_sample(recipe, epoch, index) for epoch, index in samples]
        seed_all(derive(_COLLATE, recipe.seed, step, lane))
        try:
            return aligned(recipe.collate(items)), samples
        except Exception as error:
            indices = ", ".join(str(index) for _, index in samples)
            raise TaskError(
                f"collate raised {type(error).__name__}: {error} (step {step}, lane {lane}, samples {indices})"
            ) from error


def _sample(recipe: Recipe, epoch: int, index: int) -> Any:
    seed_all(sample_seed(recipe.seed, epoch, index))
    try:
        return recipe.dataset[index]
    except Exception as error:
        said = str(error) if isinstance(error, TaskError) else f"{type(error).__name__}: {error}"
        raise TaskError(f"sample {index} of the dataset cannot be read (epoch {epoch}): {said}") from error


@contextmanager
def _one_thread() -> Iterator[None]:
    """Bits of larger operations depend on the number of threads, and loader processes have one."""
    threads = torch.get_num_threads()
    if threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
