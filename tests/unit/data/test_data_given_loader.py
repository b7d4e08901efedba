"""Reading a user's DataLoader: what is taken from it, and what is refused by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    default_collate,
)

from everstep.base.errors import ConfigError
from everstep.data.given_loader import read_data

DATA: Any = [torch.tensor(float(i)) for i in range(12)]


class Numbers(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(4))


class Ordered:
    """Gives these indices, `passes` of them in turn."""

    def __init__(self, *passes: Any) -> None:
        self.passes = list(passes)

    def __iter__(self) -> Iterator[Any]:
        self.passes = [*self.passes[1:], self.passes[0]]
        return iter(self.passes[-1])


class Endless:
    def __iter__(self) -> Iterator[int]:
        while True:
            yield 1


class Sized(Endless):
    def __init__(self, length: Any) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length  # type: ignore[no-any-return]


class Epochs(Ordered):
    def set_epoch(self, epoch: int) -> None:
        pass


class Own(DataLoader[Any]):
    def __iter__(self) -> Any:
        return iter(())


def test_a_dataset_is_taken_as_it_is() -> None:
    found = read_data(DATA, None)
    assert (found.dataset, found.collate, found.batch_size, found.settings) == (DATA, default_collate, None, {})


@pytest.mark.parametrize("shuffle", [True, False])
def test_what_is_read_from_a_loader(shuffle: bool) -> None:
    found = read_data(DataLoader(DATA, 4, shuffle=shuffle, collate_fn=list, num_workers=3, pin_memory=True), None)
    assert found.dataset is DATA and found.collate is list and found.batch_size == 4
    assert found.settings == {"loader.workers": 3, "loader.pin_memory": True, "shuffle": shuffle}


def test_a_sampler_with_an_order_of_its_own() -> None:
    before = torch.random.get_rng_state()
    found = read_data(DataLoader(DATA, 2, sampler=[7, 1, -1]), None)
    assert [int(found.dataset[k]) for k in range(len(found.dataset))] == [7, 1, 11]
    assert found.settings["shuffle"] is False and torch.equal(before, torch.random.get_rng_state())
    state = found.extras["everstep.sampler"].state_dict()
    read_data(DataLoader(DATA, 2, sampler=[7, 1, -1]), None).extras["everstep.sampler"].load_state_dict(state)
    with pytest.raises(ConfigError, match="the sampler list gives another order than the one that was trained in"):
        read_data(DataLoader(DATA, 2, sampler=[1, 7, -1]), None).extras["everstep.sampler"].load_state_dict(state)


def test_an_iterable_dataset_is_handed_on() -> None:
    data = Numbers()
    found = read_data(DataLoader(data, 4), None)
    assert found.dataset is data and found.batch_size == 4 and "shuffle" not in found.settings


def test_a_stream_of_batches_is_refused() -> None:
    with pytest.raises(ConfigError, match="batch_size=None, so each item of the stream is a batch"):
        read_data(DataLoader(Numbers(), batch_size=None), None)


def test_a_pipeline_that_makes_batches_itself_is_refused() -> None:
    webdataset = pytest.importorskip("webdataset")
    loader, samples = webdataset.WebLoader(Numbers(), batch_size=4), webdataset.DataPipeline(Numbers())
    batches = webdataset.DataPipeline(Numbers(), webdataset.batched(4))
    inside = webdataset.WebLoader(batches, batch_size=None)
    for given in (loader, batches, inside, loader.unbatched().batched(2), DataLoader(batches, 2)):
        with pytest.raises(ConfigError, match="makes batches itself, and each would be taken for a sample"):
            read_data(given, None)
    for given in (samples, webdataset.WebLoader(samples, batch_size=None), inside.unbatched(), DataLoader(samples, 2)):
        assert read_data(given, None).dataset in (given, samples)


@pytest.mark.parametrize("data", ["data/train", Path("data/train")])
def test_a_path_is_no_dataset(data: Any) -> None:
    with pytest.raises(ConfigError, match=r"dataset: expected samples, got the .* 'data/train': open what lies there"):
        read_data(data, None)


def test_the_name_of_a_collate_is_none() -> None:
    with pytest.raises(ConfigError, match="collate: expected a function from samples to a batch, got str"):
        read_data(DATA, "pad")  # type: ignore[arg-type]


def seeding(worker: int) -> None:
    del worker


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "batch sampler": (
        lambda: DataLoader(DATA, batch_sampler=BatchSampler(SequentialSampler(DATA), 4, False)),
        "DataLoader has a batch_sampler of your own",
    ),
    "no batches": (lambda: DataLoader(DATA, batch_size=None), "DataLoader has batch_size=None"),
    "weights": (
        lambda: DataLoader(DATA, 4, sampler=WeightedRandomSampler([1.0] * 12, 12)),
        "the sampler WeightedRandomSampler gives another order in each pass, so a worker that is resumed or healed "
        "would train on other samples: give the DataLoader "
        "torch.utils.data.Subset(dataset, list(sampler)) with shuffle=True",
    ),
    "a part": (
        lambda: DataLoader(DATA, 4, sampler=SubsetRandomSampler(range(8))),
        "the sampler SubsetRandomSampler gives another order in each pass",
    ),
    "with replacement": (
        lambda: DataLoader(DATA, 4, sampler=RandomSampler(DATA, replacement=True)),
        "the sampler RandomSampler gives another order in each pass",
    ),
    "others' ranks": (
        lambda: DataLoader(DATA, 4, sampler=DistributedSampler(DATA, 1, 0)),  # type: ignore[arg-type]
        "DistributedSampler deals the samples out",
    ),
    "two passes": (
        lambda: DataLoader(DATA, 4, sampler=Ordered([1, 2], [2, 1])),  # type: ignore[arg-type]
        "the sampler Ordered gives another order in each pass",
    ),
    "endless": (lambda: DataLoader(DATA, 4, sampler=Endless()), "the sampler Endless gives 1048576 indices, and more"),  # type: ignore[arg-type]
    "as good as endless": (
        lambda: DataLoader(DATA, 4, sampler=Sized(1 << 40)),  # type: ignore[arg-type]
        "the sampler Sized says that it has 1099511627776 indices: expected at most 16777216 for 12 samples, or use",
    ),
    "infinity": (
        lambda: DataLoader(DATA, 4, sampler=Sized(float("inf"))),  # type: ignore[arg-type]
        "the sampler Sized gives 1048576 indices, and more",
    ),
    "many": (
        lambda: DataLoader(DATA, 4, sampler=RandomSampler(DATA, replacement=True, num_samples=20_000_000)),
        "the sampler RandomSampler says that it has 20000000 indices: expected at most 16777216 for 12 samples",
    ),
    "no length at all": (
        lambda: DataLoader(DATA, 4, sampler=Sized(-1)),  # type: ignore[arg-type]
        "the sampler Sized does not say how many indices it has",
    ),
    "tensors by name": (
        lambda: {"x": torch.ones(12, 2), "y": torch.ones(12)},
        "dataset: expected samples, got 2 tensors in a dict: give torch.utils.data.TensorDataset",
    ),
    "one by name": (lambda: {"x": torch.ones(12, 2)}, "dataset: expected samples, got 1 tensors in a dict"),
    "of other numbers": (
        lambda: (torch.ones(12), torch.ones(12, dtype=torch.int64)),
        "dataset: expected samples, got 2 tensors in a tuple",
    ),
    "two loaders": (lambda: [DataLoader(DATA, 4)] * 2, "dataset: expected one dataset or DataLoader, got 2 in a list"),
    "loaders by name": (lambda: {"a": DataLoader(DATA, 4)}, "dataset: expected one dataset or DataLoader, got 1 in a"),
    "inputs and labels": (lambda: (torch.ones(12, 2), torch.ones(12)), "dataset: expected samples, got 2 tensors in a"),
    "epochs": (lambda: DataLoader(DATA, 4, sampler=Epochs([1])), "the sampler Epochs follows set_epoch"),  # type: ignore[arg-type]
    "no index": (lambda: DataLoader(DATA, 4, sampler=["a"]), "the sampler list: expected indices into the dataset"),
    "beyond": (lambda: DataLoader(DATA, 4, sampler=[12]), "the sampler list: expected indices below 12"),
    "own loop": (lambda: Own(DATA, 4), "Own has an __iter__ of its own"),
    "seeding": (
        lambda: DataLoader(DATA, 4, num_workers=1, worker_init_fn=seeding),
        "DataLoader: expected no worker_init_fn",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_followed_is_refused_in_one_line(case: str) -> None:
    loader, said = REFUSED[case]
    with pytest.raises(ConfigError) as refused:
        read_data(loader(), None)
    assert str(refused.value).startswith(said) and "\n" not in str(refused.value)


SAMPLES: dict[str, Any] = {
    "a dict by index": {0: torch.ones(12), 1: torch.zeros(12)},
    "names, and other sizes": {"0": torch.ones(12), "1": torch.zeros(11)},
    "a tuple": (torch.ones(12, 2), torch.zeros(12, 2)),
    "a tuple of numbers": (torch.tensor(1.0), torch.tensor(2.0)),
    "a tuple of one row": (torch.ones(1, 2), torch.zeros(1, 3)),
    "a tuple of other sizes": (torch.ones(12), torch.zeros(11)),
}


@pytest.mark.parametrize("case", SAMPLES)
def test_tensors_that_may_be_samples_are_taken(case: str) -> None:
    assert read_data(SAMPLES[case], None).dataset is SAMPLES[case]


def test_samples_of_other_shapes_need_a_collate() -> None:
    pictures = (torch.ones(3, 4, 4), torch.ones(3, 5, 5))
    assert read_data(pictures, list).dataset is pictures
    with pytest.raises(ConfigError, match="got 2 tensors in a tuple"):
        read_data(pictures, None)


@pytest.mark.parametrize("error", [NotImplementedError, TypeError])
def test_a_sampler_that_does_not_know_its_length_is_read_to_its_end(error: type[Exception]) -> None:
    class Unknown(Ordered):
        def __len__(self) -> int:
            raise error

    found = read_data(DataLoader(DATA, 2, sampler=Unknown([3, 1])), None)  # type: ignore[arg-type]
    assert [int(found.dataset[k]) for k in range(len(found.dataset))] == [3, 1]


def test_collate_is_given_once() -> None:
    with pytest.raises(ConfigError, match="collate: expected none together with a DataLoader"):
        read_data(DataLoader(DATA, 4), list)
