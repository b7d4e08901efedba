"""What a job needs of a `torch.utils.data.DataLoader`: its dataset, order, collate, batch size and worker processes.

Apart from the loader of lanes because nothing is loaded through the user's own: it is read once, and put aside.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import islice
from pathlib import PurePath
from typing import Any

from torch import Tensor
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    default_collate,
)

from everstep.base.errors import ConfigError, Misused
from everstep.exact.seeding import preserve_rng

Collate = Callable[[list[Any]], Any]
_TIMES_LONGER = 64
_SEEMS_INFINITE = 1 << 20
_LONGER_IF_TOLD = 16
_SAMPLER = "everstep.sampler"
_JOBS_OWN = "use shuffle=True for the job's own order, which follows from its seed"


@dataclass(frozen=True)
class GivenData:
    """The training data of a job. batch_size: of a global batch, None where the user's loader does not say. settings:
    config keys, dotted, that the loader implies. extras: to be carried with the state."""

    dataset: Any
    collate: Collate
    batch_size: int | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    extras: dict[str, Any] = field(default_factory=dict)


class AsRead:
    """A loader that was read once, before the loop, and that the loop has no effect on."""

    def __init__(self, loader: Any, found: GivenData) -> None:
        """loader: as join has got it; found: in it."""
        self._loader, self._found = loader, found
        self._order = found.extras.get(_SAMPLER), found.settings.get("shuffle")
        self._epoch = -1

    def check(self, epoch: int) -> None:
        """Look again, in a step of this epoch; once in each at the order of a sampler. Raises: Misused if the loop has
        changed what was read."""
        loader, batches = self._loader, getattr(self._loader, "batch_sampler", None)
        if not isinstance(loader, DataLoader):
            return
        if loader.collate_fn is not self._found.collate:
            self._refuse("collate_fn", "let it depend on step.number")
        if getattr(batches, "batch_size", self._found.batch_size) != self._found.batch_size:
            self._refuse("batch_size", "train in two scripts, of which the second loads what the first leaves")
        if epoch == self._epoch or isinstance(loader.dataset, IterableDataset):
            return
        self._epoch = epoch
        sampler = getattr(batches, "sampler", loader.sampler)
        shuffle = _shuffles(loader.dataset, sampler)
        kept = _fixed(sampler, loader.dataset)[1] if shuffle is None else None
        if (kept, bool(shuffle)) != self._order:
            self._refuse("order of the sampler", "let it stay, and the dataset's __getitem__ choose by step.number")

    def _refuse(self, what: str, remedy: str) -> None:
        name = type(self._loader).__name__
        raise Misused(
            f"the {what} of the {name} has changed since join has read it, with no effect on the job: {remedy}"
        )


class FixedOrder:
    """The order of a user's sampler, as a word that a checkpoint and a healed worker can be compared by."""

    def __init__(self, name: str, indices: Sequence[int]) -> None:
        """name: of the sampler's class."""
        self._name = name
        self._digest = blake2b(array("q", indices).tobytes(), digest_size=16).hexdigest()

    def state_dict(self) -> dict[str, Any]:
        """Digest of all indices, in order."""
        return {"digest": self._digest}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FixedOrder) and self._digest == other._digest

    __hash__ = None  # type: ignore[assignment]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises: ConfigError if the state was trained in another order."""
        if state.get("digest") != self._digest:
            raise ConfigError(
                f"the sampler {self._name} gives another order than the one that was trained in so far: let it depend "
                f"on a fixed seed, or {_JOBS_OWN}"
            )


def read_data(data: Any, collate: Collate | None) -> GivenData:
    """The data that `join` was given: a dataset, or a DataLoader of one. collate: as given beside it.

    Raises: ConfigError, in one line, for a loader that cannot be followed.
    """
    if collate is not None and not callable(collate):
        raise ConfigError(
            f"collate: expected a function from samples to a batch, got {type(collate).__name__}: give one, or none"
        )
    if isinstance(data, str | bytes | PurePath):
        raise ConfigError(
            f"dataset: expected samples, got the {type(data).__name__} {str(data)[:80]!r}: open what lies there "
            "(everstep.TokenFile, everstep.TarShards, a Dataset of yours)"
        )
    if not isinstance(data, DataLoader):
        _refuse_batches(data)
        _refuse_several(data, collate)
        return GivenData(data, collate or default_collate)
    name = type(data).__name__
    if collate is not None and collate is not data.collate_fn:
        raise ConfigError(
            f"collate: expected none together with a {name}, which has its own collate_fn: give one of the two"
        )
    if type(data).__iter__ is not DataLoader.__iter__:
        raise ConfigError(f"{name} has an __iter__ of its own, which would not be called: give its dataset instead")
    if data.worker_init_fn is not None and data.num_workers:
        raise ConfigError(
            f"{name}: expected no worker_init_fn, since samples are seeded one by one, in whichever process: remove "
            "it, and open files when the dataset reads its first sample"
        )
    settings = {"loader.workers": data.num_workers, "loader.pin_memory": bool(data.pin_memory)}
    if isinstance(data.dataset, IterableDataset):
        _refuse_batches(data.dataset)
        if data.batch_size is None:
            raise ConfigError(
                f"{name} has batch_size=None, so each item of the stream is a batch, but lanes share a global batch of "
                "samples: let the stream yield samples, and give batch_size=..."
            )
        return GivenData(data.dataset, data.collate_fn, data.batch_size, settings)
    if data.batch_size is None:
        what = "batch_size=None" if data.batch_sampler is None else "a batch_sampler of your own"
        raise ConfigError(
            f"{name} has {what}, but a global batch has a fixed number of samples, which its lanes share: give "
            "batch_size=..., with shuffle or sampler"
        )
    shuffle = _shuffles(data.dataset, data.sampler)
    settings["shuffle"] = bool(shuffle)
    if shuffle is not None:
        return GivenData(data.dataset, data.collate_fn, data.batch_size, settings)
    order, kept = _fixed(data.sampler, data.dataset)
    return GivenData(Subset(data.dataset, order), data.collate_fn, data.batch_size, settings, {_SAMPLER: kept})


def _fixed(sampler: Any, dataset: Any) -> tuple[Sequence[int], FixedOrder]:
    order = _fixed_order(sampler, dataset)
    return order, FixedOrder(type(sampler).__name__, order)


def _refuse_batches(data: Any) -> None:
    """Raises: ConfigError for a pipeline of the package webdataset, as its WebLoader, that makes batches itself."""
    if _makes_batches(data):
        raise ConfigError(
            f"dataset: {type(data).__name__} makes batches itself, and each would be taken for a sample: leave out "
            ".batched() and the WebLoader, and give torch.utils.data.DataLoader(dataset, batch_size=...)"
        )


def _makes_batches(data: Any) -> bool:
    found, steps = False, getattr(data, "pipeline", None)
    for step in steps if isinstance(steps, list) else ():
        name = getattr(getattr(step, "f", None), "__name__", "")
        if isinstance(step, DataLoader):
            found = step.batch_size is not None or _makes_batches(step.dataset)
        elif name in ("_batched", "_unbatched") or hasattr(step, "pipeline"):
            found = name == "_batched" or _makes_batches(step)
    return found


def _refuse_several(data: Any, collate: Collate | None) -> None:
    """Raises: ConfigError for several loaders, or tensors that belong together, where one dataset is expected."""
    items = list(data.values()) if isinstance(data, dict) else data if isinstance(data, list | tuple) else []
    if any(isinstance(item, DataLoader) for item in items[:8]):
        raise ConfigError(
            f"dataset: expected one dataset or DataLoader, got {len(items)} in a {type(data).__name__}: give one whose "
            "samples hold the items of all (torch.utils.data.StackDataset)"
        )
    if 1 <= len(items) <= 8 and all(isinstance(item, Tensor) for item in items) and _belong_together(data, collate):
        raise ConfigError(
            f"dataset: expected samples, got {len(items)} tensors in a {type(data).__name__}: give "
            "torch.utils.data.TensorDataset of them"
        )


def _belong_together(data: Any, collate: Collate | None) -> bool:
    """Whether tensors hold one sample in each row, rather than being samples: they have equally many rows, and names,
    or no batch can be stacked of them."""
    tensors: list[Tensor] = list(data.values()) if isinstance(data, dict) else list(data)
    if len({tensor.shape[:1] for tensor in tensors}) > 1 or not tensors[0].ndim or len(tensors[0]) <= 1:
        return False
    if isinstance(data, dict):
        return all(isinstance(key, str) for key in data)
    kinds = {(tensor.shape, tensor.dtype) for tensor in tensors}
    return isinstance(data, tuple) and len(kinds) > 1 and collate in (None, default_collate)


def _shuffles(dataset: Any, sampler: Any) -> bool | None:
    """Whether the sampler shuffles the whole dataset; None if its order is one of its own. Raises: ConfigError."""
    if isinstance(sampler, DistributedSampler):
        raise ConfigError(f"DistributedSampler deals the samples out, which Everstep itself does: {_JOBS_OWN}")
    whole = sampler.data_source is dataset if isinstance(sampler, RandomSampler | SequentialSampler) else False
    if type(sampler) is SequentialSampler and whole:
        return False
    if type(sampler) is RandomSampler and whole and not sampler.replacement and sampler.num_samples == len(dataset):
        return True
    return None


def _fixed_order(sampler: Any, dataset: Any) -> Sequence[int]:
    """Indices that the sampler gives, in each epoch alike. Raises: ConfigError if it does not, or never ends."""
    name = type(sampler).__name__
    if hasattr(sampler, "set_epoch"):
        raise ConfigError(
            f"the sampler {name} follows set_epoch, so its order cannot be told from the step alone: {_JOBS_OWN}"
        )
    size = len(dataset)
    told = _told(sampler, name, size)
    most = max(_TIMES_LONGER * size, _SEEMS_INFINITE) if told is None else told
    with preserve_rng():
        first = array("q", islice(_indices(sampler, name, size), most + 1))
        again = array("q", islice(_indices(sampler, name, size), most + 1)) if len(first) <= most else first
    if len(first) > most:
        more = f"{most} indices, and more: expected one that ends, and a __len__ for so many"
        more = more if told is None else f"more indices than its length, {most}: expected one that ends"
        raise ConfigError(f"the sampler {name} gives {more}: give it another or {_JOBS_OWN}")
    if first != again:
        raise ConfigError(
            f"the sampler {name} gives another order in each pass, so a worker that is resumed or healed would train "
            "on other samples: give the DataLoader torch.utils.data.Subset(dataset, list(sampler)) with shuffle=True "
            "instead of dataset and sampler, or seed the sampler's generator in its __iter__"
        )
    return first


def _told(sampler: Any, name: str, size: int) -> int | None:
    """How many indices the sampler says that it has; None if it does not."""
    most = max(_TIMES_LONGER * size, _SEEMS_INFINITE) * _LONGER_IF_TOLD
    try:
        told = len(sampler)
    except (TypeError, RuntimeError):  # it has none, or says by this that it does not know
        return None
    except (ValueError, OverflowError) as error:
        raise ConfigError(f"the sampler {name} does not say how many indices it has ({error}): {_JOBS_OWN}") from None
    if told > most:
        raise ConfigError(
            f"the sampler {name} says that it has {told} indices: expected at most {most} for {size} samples, or "
            f"{_JOBS_OWN}"
        )
    return told


def _indices(sampler: Any, name: str, size: int) -> Iterator[int]:
    for index in sampler:
        try:
            number = int(index)
        except (TypeError, ValueError):
            got = type(index).__name__
            raise ConfigError(f"the sampler {name}: expected indices into the dataset, got {got}: give ints") from None
        if not -size <= number < size:
            raise ConfigError(f"the sampler {name}: expected indices below {size}, the dataset's length, got {number}")
        yield number
