"""Samples per second of a stream and of tar shards through our loader, beside torch's DataLoader doing the same work.

    python bench/streams.py [--samples 2000] [--work 20000] [--workers 1] [--step-ms 0]

work: numbers that are summed for each sample. Prints one JSON object; rates are samples per second, the ratio is ours
to torch's. With --step-ms each step of 64 samples waits so long, as for a device, and `step_ms` is what one takes.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from everstep.base.config_keys import LoaderConfig
from everstep.data.loader import LaneLoader, Recipe
from everstep.data.stream import Stream, StreamReader
from everstep.order.cursor import SampleOrder

LANES, MICRO = 8, 8


class Worked(IterableDataset[Any]):
    """samples: of a pass. work: numbers summed for each."""

    def __init__(self, samples: int, work: int) -> None:
        self.samples, self.work = samples, work

    def __len__(self) -> int:
        return self.samples

    def __iter__(self) -> Iterator[Any]:
        for index in range(self.samples):
            yield torch.arange(self.work, dtype=torch.float32).sum() + index


def ours(data: Worked, workers: int, step_s: float) -> float:
    order = SampleOrder(0, len(data), LANES, MICRO, epochs=1, shuffle=False)
    reader = StreamReader(Stream.of(data, len(data), 0), order.global_batch, 4)
    recipe = Recipe(reader, order, torch.utils.data.default_collate, 0)
    loads = LaneLoader(recipe, LoaderConfig(workers=workers))
    began_s = time.perf_counter()
    for step in range(1, order.total_steps + 1):
        loads.schedule(step, range(LANES))
        for lane in range(LANES):
            loads.batch(step, lane)
        time.sleep(step_s)
    rate = len(data) / (time.perf_counter() - began_s)
    loads.close()
    return rate


def theirs(data: Worked, workers: int, step_s: float) -> float:
    torch.set_num_threads(1)
    began_s = time.perf_counter()
    for number, _ in enumerate(DataLoader(data, batch_size=MICRO, num_workers=workers), 1):
        time.sleep(0.0 if number % LANES else step_s)
    return len(data) / (time.perf_counter() - began_s)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--samples", type=int, default=2000)
    options.add_argument("--work", type=int, default=20_000)
    options.add_argument("--workers", type=int, default=1, help="loader processes; torch's reads a stream with 0 or 1")
    options.add_argument("--step-ms", type=float, default=0.0)
    given = options.parse_args()
    data, how = Worked(given.samples, given.work), (given.workers, given.step_ms / 1000)
    rates = {"everstep": ours(data, *how), "torch": theirs(data, *how)}
    step_ms = {name: 1000 * LANES * MICRO / rate for name, rate in rates.items()} if given.step_ms else {}
    print(
        json.dumps({**rates, "ratio": rates["everstep"] / rates["torch"], **({"step_ms": step_ms} if step_ms else {})})
    )


if __name__ == "__main__":
    main()
