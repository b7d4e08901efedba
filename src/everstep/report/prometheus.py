"""A job's metrics for Prometheus, as a text exposition. Names, types and labels are contracts.

They are made from the data in `History`, so a scrape reads nothing. All counts follow from the files alone: a restarted
exporter goes on with the same numbers. Unknown values are left out, not zero.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import inf, nan
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from everstep.report.facts import present_speed
from everstep.report.history import History
from everstep.report.tally import TOTAL, Histogram
from everstep.report.told_facts import WorkerFact
from everstep.report.usage import Newest
from everstep.report.words import as_dict, number, one_line, whole_number
from everstep.runtime.host.board import OPERATIONS

Family = type[CounterMetricFamily] | type[GaugeMetricFamily]
STATES = ("leader", "active", "standby", "spare", "healing", "suspect", "dead")
_MOST_SIZES = 64
MOST_WORKERS = 1000
"""Most workers with series of their own; of more, only sums are exported, as each would be several time series."""


class _Given(Collector):
    """Metrics that are already made."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def expose(families: Iterable[Metric], accept: str = "") -> tuple[bytes, str]:
    """The exposition, and its content type. accept: header of the request, which decides the format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Given(families))
    encode, content_type = choose_encoder(accept)
    return encode(registry), content_type


def families(history: History, running: bool, status: Mapping[str, Any] | None, now_ns: int) -> Iterator[Metric]:
    """All metrics of a job. status: the coordinator's answer, None if it is silent. now_ns: since 1970.

    Consume it under the lock that is held while files are read into `history`.
    """
    yield from _progress(history, running, now_ns)
    yield from _workers(history, running, status)
    yield from _recoveries(history)
    yield from _checkpoints(history)
    yield from _spent(history, running)
    yield from _each_worker(history, running)


def device_families(found: Iterable[Device] | None = None) -> Iterator[Metric]:
    """The GPUs of this host; none if there is none."""
    known = list(devices() if found is None else found)
    if not known:
        return
    used = GaugeMetricFamily("everstep_device_memory_used_bytes", "GPU memory in use on this host.", labels=["device"])
    total = GaugeMetricFamily("everstep_device_memory_total_bytes", "GPU memory there is.", labels=["device"])
    text = "Share of the time in which the GPU was at work, as its driver says."
    share = GaugeMetricFamily("everstep_device_utilization_ratio", text, labels=["device"])
    for device in known:
        label = [str(device.index)]
        used.add_metric(label, device.memory_used_bytes)
        total.add_metric(label, device.memory_total_bytes)
        if device.used_share is not None:
            share.add_metric(label, device.used_share)
    yield from (used, total, share)


def _progress(history: History, running: bool, now_ns: int) -> Iterator[Metric]:
    facts, tally, job = history.facts, history.tally, history.job
    strange = facts.course.loss is None and facts.course.loss_text
    info = GaugeMetricFamily("everstep_run_info", "The run: its directory's name and its task.", labels=["run", "task"])
    info.add_metric([one_line(history.name, 120), one_line(job.get("task"), 200)], 1)
    yield info
    yield _gauge("running", "1 while a job holds the run directory, else 0.", float(running))
    yield _counter("steps", "Updates committed, those that a new start from step 0 did again included.", tally.steps)
    yield _counter("samples", "Samples trained in committed steps.", tally.samples)
    yield _gauge("step", "Newest committed step.", facts.course.step)
    yield _gauge("target_step", "Step after which the job ends, where it is known.", history.total_steps)
    yield _gauge(
        "loss", "Loss of the newest committed step, NaN if it is not finite.", nan if strange else facts.course.loss
    )
    text = "Newest value of the gradient norm, and of each that the script logs."
    yield _by_label(GaugeMetricFamily, "logged_value", text, "name", facts.logged.newest)
    text = "Steps whose loss or gradient was not finite."
    yield _counter("nonfinite_steps", text, tally.nonfinite_steps)
    rate = (present_speed(facts, now_ns) or 0.0) if running else 0.0
    yield _gauge("samples_per_second", "Samples trained per second, over the newest steps.", rate)
    yield _gauge("generation", "Number of the newest generation.", facts.crew.generation)
    text = "Share of the time since the first start, stops left out, that was training."
    yield _gauge("goodput_ratio", text, history.goodput(running))
    text = "The same, each moment counted for the share of the wanted workers that took part."
    yield _gauge("goodput_by_capacity_ratio", text, history.goodput_by_capacity(running))
    yield from _scaling(history)
    yield _gauge("start_timestamp_seconds", "When the job was last started.", _seconds(tally.started_ns))
    text = "When the newest step was committed, or the job was started if that is later."
    yield _gauge("last_progress_timestamp_seconds", text, _seconds(tally.progress_ns))
    yield _counter("coordinator_restarts", "Restarts of the coordinator.", tally.coordinator_restarts)
    yield _counter("unreadable_lines", "Lines of the job's files that could not be read.", history.foreign)


def _scaling(history: History) -> Iterator[Metric]:
    """By number of workers, of which enough steps were measured."""
    found = history.facts.course.efficiency()
    text = "Fewest workers of which enough steps were measured: what the other scaling metrics are relative to."
    yield _gauge("scaling_base_workers", text, found[0]["workers"] if found else None)
    for name, key, text in (
        ("scaling_efficiency_ratio", "efficiency", "Speed-up over the ideal one, by number of workers."),
        ("scaling_speedup_ratio", "speed_up", "Samples per second over those of everstep_scaling_base_workers."),
        ("scaling_ideal_ratio", "ideal", "Number of workers over everstep_scaling_base_workers."),
    ):
        values = {f"{one['workers']:.0f}": one[key] for one in found[:_MOST_SIZES]}
        yield _by_label(GaugeMetricFamily, name, text, "workers", values)


def _workers(history: History, running: bool, status: Mapping[str, Any] | None) -> Iterator[Metric]:
    states = [worker.state for worker in history.facts.crew.workers.values()]
    if not running:  # workers that lived at the job's end live no more
        states = [state if state == "dead" else "left" for state in states]
    counts = {state: states.count(state) for state in STATES}
    yield _by_label(GaugeMetricFamily, "workers", "Workers by state.", "state", counts)
    wanted = whole_number((status or {}).get("target")) or history.facts.crew.wanted
    yield _gauge("wanted_workers", "Workers that the job was told to have.", wanted or None)


def _recoveries(history: History) -> Iterator[Metric]:
    tally = history.tally
    text = "Recoveries, by the cause of the event that began them."
    yield _by_label(CounterMetricFamily, "recoveries", text, "cause", {str(k): n for k, n in tally.recoveries.items()})
    text = (
        f"Seconds from a fault to the next committed step (phase {TOTAL}), and in each phase of a recovery; phases of "
        "different workers overlap."
    )
    yield _histograms("recovery_seconds", text, "phase", tally.recovery_seconds)


def _checkpoints(history: History) -> Iterator[Metric]:
    tally = history.tally
    text = "Seconds from the beginning of a checkpoint until it was complete."
    yield _histograms("checkpoint_seconds", text, "tier", tally.checkpoint_seconds)
    yield _by_label(
        GaugeMetricFamily, "checkpoint_bytes", "Size of the newest checkpoint.", "tier", tally.checkpoint_bytes
    )
    rules = as_dict(as_dict(history.job.get("config")).get("checkpoint"))
    text = "1 if the job takes checkpoints, else 0."
    yield _gauge("checkpoints_wanted", text, float(rules.get("enabled") is not False))
    times = {tier: time_ns / 1e9 for tier, time_ns in tally.checkpoint_ns.items()}
    text = "When the newest checkpoint was complete."
    yield _by_label(GaugeMetricFamily, "last_checkpoint_timestamp_seconds", text, "tier", times)
    counted = (
        ("everstep_checkpoint_failures", "Checkpoints that failed.", tally.checkpoint_failures),
        ("everstep_checkpoints_skipped", "Checkpoints that were not due after all.", tally.checkpoints_skipped),
    )
    for name, text, counts in counted:
        family = CounterMetricFamily(name, text, labels=["tier", "cause"])
        for labels, count in counts.items():
            family.add_metric(list(labels), count)
        yield family


def _spent(history: History, running: bool) -> Iterator[Metric]:
    usage = history.usage
    text = f"Seconds per step: of the job from commit to commit (phase {TOTAL}), and of each worker in each phase of a"
    spent = {TOTAL: history.tally.step_seconds, **usage.step_seconds}
    yield _histograms("step_seconds", f"{text} step.", "phase", spent)
    sent = dict.fromkeys(OPERATIONS, 0.0) | usage.total_bytes
    yield _by_label(CounterMetricFamily, "communication_bytes", "Bytes that workers sent.", "operation", sent)
    yield _counter("cpu_seconds", "Processor time of all workers and their former lives.", usage.cpu_us / 1e6)
    resident = sum(number(newest.row.get("rss_bytes")) for _, newest in _living(history, running))
    yield _gauge("resident_memory_bytes", "Resident memory of all living workers.", resident)


_EACH: tuple[tuple[str, str, Family, Callable[[Newest], Any]], ...] = (
    ("step", "Step at which a worker is.", GaugeMetricFamily, lambda n: n.row.get("step")),
    ("samples_per_second", "Samples that a worker trains per second.", GaugeMetricFamily, lambda n: n.samples_per_s),
    ("resident_memory_bytes", "Resident memory of a worker.", GaugeMetricFamily, lambda n: n.row.get("rss_bytes")),
    ("cpu_seconds", "Processor time of a worker's life.", CounterMetricFamily, lambda n: n.row.get("cpu_s")),
    (
        *("device_allocated_bytes", "Device memory that a worker's tensors take.", GaugeMetricFamily),
        lambda n: n.row.get("device_allocated_bytes"),
    ),
    (
        *("device_reserved_bytes", "Device memory that its allocator holds for them.", GaugeMetricFamily),
        lambda n: n.row.get("device_reserved_bytes"),
    ),
    (
        *("step_seconds", "Seconds per step, over the newest samples of a worker.", GaugeMetricFamily),
        lambda n: n.spent and n.spent.step_s,
    ),
    (
        *("communication_seconds", "Of these, in which it exchanged gradients and records.", GaugeMetricFamily),
        lambda n: n.spent and n.spent.communication_s,
    ),
    (
        *("busy_ratio", "Share of the time in which a worker loads, computes or updates.", GaugeMetricFamily),
        lambda n: n.spent and n.spent.busy,
    ),
)


def _each_worker(history: History, running: bool) -> Iterator[Metric]:
    """One series per living worker and metric, unless there are too many."""
    living = list(_living(history, running))
    shown = living if len(living) <= MOST_WORKERS else []
    for name, text, kind, value_of in _EACH:
        family = kind(f"everstep_worker_{name}", text, labels=["worker_id"])
        for worker, newest in shown:
            value = value_of(newest)
            if value is not None:
                family.add_metric([str(worker.worker_id)], number(value))
        yield family
    text = "Bytes that a worker's life has given to others, by operation."
    sent = CounterMetricFamily("everstep_worker_communication_bytes", text, labels=["worker_id", "operation"])
    for worker, newest in shown:
        for operation in OPERATIONS:
            sent.add_metric([str(worker.worker_id), operation], number(as_dict(newest.row.get("bytes")).get(operation)))
    yield sent


def _living(history: History, running: bool) -> Iterator[tuple[WorkerFact, Newest]]:
    """Workers with their newest samples; none of a job that does not run."""
    if not running:
        return
    measured = history.usage.workers
    for worker_id, worker in sorted(history.facts.crew.workers.items()):
        newest = measured.get(worker_id)
        if newest is not None and worker.state not in ("dead", "left"):
            yield worker, newest


def _gauge(name: str, text: str, value: float | None) -> Metric:
    family = GaugeMetricFamily(f"everstep_{name}", text)
    if value is not None:
        family.add_metric([], value if isinstance(value, float) else number(value))
    return family


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(f"everstep_{name}", text, value=value)


def _by_label(kind: Family, name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    family = kind(f"everstep_{name}", text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family


def _histograms(name: str, text: str, label: str, found: Mapping[str, Histogram]) -> Metric:
    family = HistogramMetricFamily(f"everstep_{name}", text, labels=[label])
    for key, histogram in found.items():
        buckets = [("+Inf" if bound == inf else str(bound), float(n)) for bound, n in histogram.cumulative()]
        family.add_metric([key], buckets, histogram.sum)
    return family


def _seconds(time_ns: int) -> float | None:
    return time_ns / 1e9 if time_ns else None


@dataclass(frozen=True)
class Device:
    """One GPU. `index` as in nvidia-smi; used_share: 0 to 1, of the time in which a kernel ran, None where unknown."""

    index: int
    memory_used_bytes: int
    memory_total_bytes: int
    used_share: float | None


def devices() -> list[Device]:
    """All GPUs as they are now; a few ms."""
    nvml = _library()
    if nvml is None:
        return []
    found = []
    try:
        for index in range(nvml.nvmlDeviceGetCount()):
            found.append(_device(nvml, index))
    except nvml.NVMLError:  # a driver that is being replaced, a GPU that fell off the bus
        return found
    return found


def _device(nvml: Any, index: int) -> Device:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    try:
        used_share = nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100
    except nvml.NVMLError:  # the driver gives no share for a GPU that is cut into instances
        used_share = None
    return Device(index, int(memory.used), int(memory.total), used_share)


@functools.cache
def _library() -> Any:
    """pynvml with an open connection to the driver, None if there is none."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml
