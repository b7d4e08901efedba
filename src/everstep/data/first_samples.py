"""What some samples of a map-style dataset hold: a job that goes on is to be trained on the data of before, and all its
workers on the same.

They are read in a process of their own, beside the start: a dataset may count its reads, keep files open or print. Not
compared: streams, samples that differ when they are read again, datasets that take long or raise, and jobs without a
run directory; between workers neither jobs that are inexact by their settings, nor what limbs of a cell read.
"""

from __future__ import annotations

import logging
import time
from typing import Any

from everstep.base.readable import readable
from everstep.data.loader_process import Failure, LoaderDied, LoaderProcess
from everstep.data.sample_content import joint, sample_digest, short, steady_digest, types_alone
from everstep.exact.seeding import sample_seed, seed_all

log = logging.getLogger(__name__)

_NUMBER = 4
_PATIENCE_S = 10.0
"""A dataset that takes longer is not compared: reading it must not hold up the job."""


class FirstSamples:
    """Reads samples, from the first to the last, as in epoch 0. size: of the dataset; seed: the job's.

    Raises: TaskError if no process can be had; LoaderDied.
    """

    def __init__(self, dataset: Any, size: int, seed: int) -> None:
        last = max(size - 1, 0)
        self._indices = sorted({last * k // (_NUMBER - 1) for k in range(_NUMBER)})
        self._dataset, self._seed = dataset, seed
        self._process = LoaderProcess(lambda step, lane: self._read())
        self._process.ask(1, 0, 0)
        self._process.ask(2, 0, 0, last=True)  # a worker that reads no samples itself may never ask for the answers

    def close(self) -> tuple[str, str, dict[int, str]]:
        """Wait for the samples. Returns a digest of what they hold, "" if they could not be read, or if one is another
        when it is read again; a line about that one, "" if there is none; and digests of those that are the same, by
        index. Objects that differ then are told by their types alone, and are so among workers."""
        until_s = time.monotonic() + _PATIENCE_S
        try:
            first, again = self._answer(until_s), self._answer(until_s)
        except LoaderDied:
            return "", "", {}
        finally:
            self._process.close()
        pairs = list(zip(self._indices, map(_steady, first), map(_steady, again), strict=False))
        other = [f"the dataset gives another sample {i} when it is read again" for i, one, two in pairs if one != two]
        same = {i: short(one) for i, one, two in pairs if one == two}
        if other:
            return "", other[0], same
        found = joint([each for each, _ in first]) if first else ""
        for i, one, two in zip(self._indices, first, again, strict=False):
            if one != two:
                log.warning("sample %d differs when it is read again; whether by content cannot be told", i)
                break
        return found if first == again else types_alone(found), "", same

    def _answer(self, until_s: float) -> list[tuple[str, str]]:
        """Digests of the samples; none if they could not be read."""
        if not readable([self._process.fileno()], max(until_s - time.monotonic(), 0)):
            return []
        answer = self._process.receive()[1]
        return [] if isinstance(answer, Failure) else answer

    def _read(self) -> list[tuple[str, str]]:
        found = []
        for index in self._indices:
            seed_all(sample_seed(self._seed, 0, index))
            digest = sample_digest(sample := self._dataset[index])
            found.append((digest, "" if digest == types_alone(digest) else steady_digest(sample)))
        return found


def _steady(digests: tuple[str, str]) -> str:
    """What a sample is told by, leaving out what objects alone tell."""
    found, steady = digests
    return types_alone(found) + steady
