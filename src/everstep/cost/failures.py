"""How often machines fail: probability, expected number, rates by cause. Pure.

Failures are taken as independent, at a constant rate: exponential times with a mean of MTBF hours for each node.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

DEFAULT_MTBF_H = 100_000.0
FORMULA = "exponential failures: 1 - exp(-nodes x hours / MTBF), nodes x hours / MTBF"
LECTURE = "probability x nodes"
LECTURE_REASON = (
    "the probability is that of the whole cluster already; once more times nodes counts every node that often. The "
    "expected number is nodes x hours / MTBF"
)


class UsualJob(NamedTuple):
    """A usual job: so many nodes for so many hours."""

    name: str
    nodes: int
    hours: float


SCENARIOS = (
    UsualJob("a small job", 8, 24),
    UsualJob("a week", 64, 7 * 24),
    UsualJob("a month", 256, 30 * 24),
    UsualJob("three months", 1024, 90 * 24),
)


@dataclass(frozen=True)
class FailureForecast:
    """What a job of so many nodes is to expect. probability: of at least one failure. lecture: probability x nodes,
    which is no expected number. mtbf_s: of the job, seconds between its failures."""

    nodes: int
    hours: float
    probability: float
    expected: float
    lecture: float
    mtbf_s: float


def forecast(nodes: int, hours: float, mtbf_h: float = DEFAULT_MTBF_H) -> FailureForecast:
    """Failures of a job. mtbf_h: mean hours between failures of one node."""
    expected = nodes * hours / mtbf_h
    probability = -math.expm1(-expected)
    return FailureForecast(nodes, hours, probability, expected, probability * nodes, mtbf_h * 3600 / nodes)


@dataclass(frozen=True)
class Observed:
    """Interruptions of a cluster by cause. hits: cause -> the harm: `process` (the device goes on), `device` or
    `host`."""

    counts: Mapping[str, int]
    hits: Mapping[str, str]
    days: float
    devices: int
    source: str

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    @property
    def per_device_hour(self) -> float:
        """Interruptions per hour of one device."""
        return self.total / (self.devices * self.days * 24)

    def mttf_s(self, devices: int) -> float:
        """Seconds between interruptions of a job of so many devices."""
        return 3600 / (self.per_device_hour * devices)

    @property
    def shares(self) -> tuple[float, float, float]:
        """Shares of the interruptions that harm a process, a device and a host, in 0..1."""
        sums = dict.fromkeys(("process", "device", "host"), 0)
        for cause, count in self.counts.items():
            sums[self.hits.get(cause, "host")] += count
        process, device, host = (count / self.total for count in sums.values())
        return process, device, host


_OF_DEVICES = (
    "Faulty GPU",
    "GPU HBM3 Memory",
    "GPU SRAM Memory",
    "GPU System Processor",
    "GPU Thermal Interface+Sensor",
)
_OF_PROCESSES = ("Software Bug", "NCCL Watchdog Timeouts", "Silent Data Corruption", "Dependency")
LLAMA3 = Observed(
    {
        "Faulty GPU": 148,
        "GPU HBM3 Memory": 72,
        "Software Bug": 54,
        "Network Switch/Cable": 35,
        "Host Maintenance": 32,
        "GPU SRAM Memory": 19,
        "GPU System Processor": 17,
        "NIC": 7,
        "NCCL Watchdog Timeouts": 7,
        "Silent Data Corruption": 6,
        "GPU Thermal Interface+Sensor": 6,
        "SSD": 3,
        "Power Supply": 3,
        "Server Chassis": 2,
        "IO Expansion Board": 2,
        "Dependency": 2,
        "CPU": 2,
        "System Memory": 2,
    },
    {**dict.fromkeys(_OF_DEVICES, "device"), **dict.fromkeys(_OF_PROCESSES, "process")},
    54,
    16384,
    "Llama 3 (arXiv 2407.21783, table 5): 54 days on 16,384 GPUs; which harm a cause does is our reading",
)
LLAMA3_LOST = 0.1
"""Share of the time that was lost, at most: the paper's "higher than 90 % effective training time" (recalled)."""


class NodeRate(NamedTuple):
    """Failures per day of a node of 8 GPUs, of one kind of jobs. name: what the times to failure with it are."""

    name: str
    per_day: float
    source: str

    def mttf_s(self, gpus: int) -> float:
        """Seconds between failures of a job of so many GPUs: nodes fail independently, at this rate."""
        return 86400 / (self.per_day * gpus / 8)


_OBSERVED_AT_8_D, _OBSERVED_AT_1024_H = 47.7, 7.9
TIMES_SOURCE = "Kokolis et al., arXiv 2410.21680, cluster RSC-1 (recalled, then checked: as others quote it)"
OBSERVED = NodeRate(
    "observed",
    math.sqrt((1 / _OBSERVED_AT_8_D) * (24 / _OBSERVED_AT_1024_H / 128)),
    f"{TIMES_SOURCE}: jobs of all sizes, fitted to 47.7 days with 8 GPUs and 7.9 h with 1,024",
)
PROJECTED = NodeRate("projected", 6.5e-3, f"{TIMES_SOURCE}: 6.5 failures per 1,000 node-days")


class TimeToFailure(NamedTuple):
    """A published time to failure of a job, and the rate that it goes by."""

    gpus: int
    hours: float
    rate: NodeRate


TIMES_TO_FAILURE = (
    TimeToFailure(8, _OBSERVED_AT_8_D * 24, OBSERVED),
    TimeToFailure(1024, _OBSERVED_AT_1024_H, OBSERVED),
    TimeToFailure(16384, 1.8, PROJECTED),
    TimeToFailure(131072, 14 / 60, PROJECTED),
)
TWO_RATES = (
    "one formula, 1 / (nodes x rate), with two rates: jobs up to 1,024 GPUs were observed, and lose "
    f"{1000 * OBSERVED.per_day:.1f} per 1,000 node-days; larger ones are projected by the paper with "
    f"{1000 * PROJECTED.per_day:g}. No single rate gives both"
)
