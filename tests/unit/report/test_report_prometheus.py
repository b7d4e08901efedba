"""The numbers for Prometheus: what is counted, that it only grows, that a new reader arrives at the same."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest

import recorded_run as recorded

pytest.importorskip("prometheus_client", reason="the extra [dashboard] is not installed")

from prometheus_client.parser import text_string_to_metric_families

from everstep.base.cause import Cause
from everstep.report import prometheus
from everstep.report.history import History
from everstep.report.prometheus import MOST_WORKERS, Device, device_families, devices, expose, families
from everstep.report.tally import FAULTS, Tally
from everstep.runtime.host.collector import rotate

NOW_NS = recorded.T0_NS + 14 * recorded.SECOND_NS
Values = dict[tuple[str, str], float]


def text_of(history: History, *, running: bool = False, status: Any = None, now_ns: int = NOW_NS) -> str:
    return expose(families(history, running, status, now_ns))[0].decode()


def values_of(text: str) -> Values:
    """(sample's name, its label values) -> value."""
    found: Values = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation, family.name
        for sample in family.samples:
            labels = sorted(sample.labels.items(), key=lambda label: (label[0] == "le", label[0]))
            key = (sample.name, " ".join(value for _, value in labels))
            assert key not in found
            found[key] = sample.value
    return found


def growing(text: str) -> Values:
    kinds = {family.name: family.type for family in text_string_to_metric_families(text)}
    counted = {name for name, kind in kinds.items() if kind in ("counter", "histogram")}
    ends = ("_total", "_bucket", "_sum", "_count")
    own_life = {"everstep_worker_cpu_seconds", "everstep_worker_communication_bytes"}
    return {
        key: value
        for key, value in values_of(text).items()
        if key[0].endswith(ends) and key[0].rpartition("_")[0] in counted - own_life
    }


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return recorded.make_run(tmp_path_factory.mktemp("runs") / "recorded")


def test_what_a_run_looks_like(run_dir: Path) -> None:
    found = values_of(text_of(History(run_dir).load(), running=True))
    assert found["everstep_run_info", "recorded small"] == 1
    assert (found["everstep_running", ""], found["everstep_target_step", ""]) == (1, 12)
    assert (found["everstep_steps_total", ""], found["everstep_samples_total", ""]) == (10, 240)
    assert (found["everstep_step", ""], found["everstep_loss", ""]) == (10, pytest.approx(0.1))
    assert found["everstep_samples_per_second", ""] == pytest.approx(9 * 24 / 10)
    assert (found["everstep_generation", ""], found["everstep_wanted_workers", ""]) == (2, 3)
    states = {key[1]: value for key, value in found.items() if key[0] == "everstep_workers"}
    assert states == {"leader": 1, "active": 1, "standby": 0, "spare": 0, "healing": 1, "suspect": 0, "dead": 0}
    assert 0 < found["everstep_goodput_ratio", ""] < 1
    assert found["everstep_last_progress_timestamp_seconds", ""] == recorded.T0_NS / 1e9 + 13
    assert found["everstep_coordinator_restarts_total", ""] == 1


def test_recoveries_and_checkpoints(run_dir: Path) -> None:
    found = values_of(text_of(History(run_dir).load()))
    causes = {key[1]: value for key, value in found.items() if key[0] == "everstep_recoveries_total"}
    assert causes == dict.fromkeys(FAULTS, 0) | {"killed": 1}
    assert found["everstep_recovery_seconds_sum", "total"] == 1.0
    assert found["everstep_recovery_seconds_sum", "redo"] == pytest.approx(0.6)
    assert found["everstep_recovery_seconds_bucket", "total 0.5"] == 0
    assert found["everstep_recovery_seconds_bucket", "total 1.0"] == 1
    assert found["everstep_checkpoint_seconds_count", "disk"] == 1
    assert found["everstep_checkpoint_bytes", "disk"] == 4096
    assert found["everstep_last_checkpoint_timestamp_seconds", "disk"] == recorded.T0_NS / 1e9 + 8
    assert found["everstep_checkpoint_failures_total", "store object"] == 1
    assert found["everstep_checkpoint_failures_total", "slow disk"] == 0
    assert found["everstep_checkpoints_skipped_total", "busy disk"] == 0


def test_seconds_per_step(run_dir: Path) -> None:
    found = values_of(text_of(History(run_dir).load()))
    assert found["everstep_step_seconds_count", "total"] == 9
    assert found["everstep_step_seconds_bucket", "total 1.0"] == 8
    assert found["everstep_step_seconds_sum", "total"] == pytest.approx(10.0)
    # Workers 0 and 2: steps 1 to 10; worker 1: 1 to 5, then 8 to 10. That it healed to step 8 is no step.
    assert found["everstep_step_seconds_count", "backward"] == 9 + 4 + 9 + 2
    assert found["everstep_step_seconds_sum", "backward"] == pytest.approx(0.2 * 24)
    assert found["everstep_step_seconds_bucket", "backward 0.1"] == 0
    assert found["everstep_step_seconds_count", "load"] == found["everstep_step_seconds_bucket", "load 0.0001"] == 24
    assert found["everstep_communication_bytes_total", "reduce"] == 100 * (10 + 5 + 2 + 10)
    assert found["everstep_communication_bytes_total", "heal"] == 0
    assert found["everstep_cpu_seconds_total", ""] == pytest.approx(0.25 * 27)


def test_each_worker(run_dir: Path) -> None:
    found = values_of(text_of(History(run_dir).load(), running=True))
    assert {i: found["everstep_worker_step", i] for i in "012"} == {"0": 10, "1": 10, "2": 10}
    assert found["everstep_worker_samples_per_second", "1"] == 16
    assert found["everstep_worker_cpu_seconds_total", "1"] == 0.5
    assert found["everstep_worker_resident_memory_bytes", "2"] == 3000
    assert found["everstep_resident_memory_bytes", ""] == 6000
    over = values_of(text_of(History(run_dir).load()))
    assert over["everstep_resident_memory_bytes", ""] == 0, "nobody lives any more"
    assert not any(name.startswith("everstep_worker_") for name, _ in over)


def test_of_too_many_workers_only_sums(tmp_path: Path) -> None:
    count = MOST_WORKERS + 1
    (tmp_path / "metrics").mkdir()
    (tmp_path / "events.jsonl").write_bytes(recorded.plan(1, 1, list(range(count))))
    (tmp_path / "metrics" / "a.jsonl").write_bytes(
        recorded.sample(2, "a", *(recorded.row(i, 0, 4) for i in range(count)))
    )
    history = History(tmp_path).load()
    found = values_of(text_of(history, running=True))
    assert found["everstep_workers", "active"] == count - 1
    over = values_of(text_of(history))
    assert over["everstep_workers", "active"] == over["everstep_workers", "leader"] == 0  # nothing runs
    assert found["everstep_resident_memory_bytes", ""] == 1000 * count * (count + 1) / 2
    assert not any(name.startswith("everstep_worker_") for name, _ in found)


def test_a_new_reader_arrives_at_the_same_numbers(tmp_path: Path) -> None:
    live = History(tmp_path)
    (tmp_path / "metrics").mkdir()
    before: Values = {}
    lines = [("events.jsonl", line) for line in recorded.events()] + [
        ("metrics/a.jsonl", s) for s in recorded.samples()
    ]
    for number, (name, line) in enumerate(lines):
        with open(tmp_path / name, "ab") as file:
            file.write(line[: len(line) // 2])
            live.poll()
            file.write(line[len(line) // 2 :])
        live.poll()
        now = growing(text_of(live))
        assert all(now[key] >= value for key, value in before.items()), (number, line)
        before = now
    assert text_of(History(tmp_path).load()) == text_of(live)


def test_counters_only_grow_while_files_rotate(tmp_path: Path) -> None:
    current = tmp_path / "metrics" / "a.jsonl"
    current.parent.mkdir()
    live, before = History(tmp_path), growing(text_of(History(tmp_path)))
    for step in range(1, 40):
        with open(current, "ab") as file:
            file.write(recorded.sample(step, "a", recorded.row(0, 0, step)))
        if step % 4 == 0:
            rotate(current, 3)
        if step % 3 == 0:
            live.poll()
            now = growing(text_of(live))
            assert all(now[key] >= value for key, value in before.items())
            before = now
    assert before["everstep_step_seconds_count", "forward"] == 38
    assert before["everstep_communication_bytes_total", "reduce"] == 3900
    late = growing(text_of(History(tmp_path).load()))  # the first files are gone: what its counters say of a life stays
    assert late["everstep_communication_bytes_total", "reduce"] == 3900


def test_a_worker_that_moves_to_another_host(tmp_path: Path) -> None:
    folder = tmp_path / "metrics"
    folder.mkdir()
    second = [recorded.sample(20 + s, "b", recorded.row(0, 1, s)) for s in range(1, 5)]
    first = [recorded.sample(s, "a", recorded.row(0, 0, s)) for s in range(1, 4)]
    (folder / "b.jsonl").write_bytes(b"".join(second))
    (folder / "a.jsonl").write_bytes(b"".join(first))  # the newer file has the older life
    found = values_of(text_of(History(tmp_path).load()))
    assert found["everstep_step_seconds_count", "forward"] == 3 + 2
    assert found["everstep_communication_bytes_total", "reduce"] == 700
    assert History(tmp_path).load().usage.workers[0].row["incarnation"] == 1


def test_an_empty_run_and_a_spoilt_one(tmp_path: Path) -> None:
    empty = values_of(text_of(History(tmp_path).load()))
    assert (empty["everstep_steps_total", ""], empty["everstep_running", ""]) == (0, 0)
    assert ("everstep_loss", "") not in empty and ("everstep_goodput_ratio", "") not in empty
    bad = [b"{half\n", b'{"kind":"step_committed","time_unix_ns":[],"step":{},"samples":-5}\n']
    bad += [recorded.event("recovery_completed", 1, reason=["x"], phases_s=[1], duration_s="long")]
    bad += [recorded.event("recovery_completed", 1, reason="x", phases_s={"total": 1e300}, duration_s=-1)]
    bad += [recorded.event("checkpoint_completed", 2, tier={}, duration_s=None), recorded.event("job_started", 3)]
    bad += [recorded.event("checkpoint_failed", 2, tier='x"} 1\n')]
    (tmp_path / "events.jsonl").write_bytes(b"".join(bad))
    (tmp_path / "metrics").mkdir()
    odd = {"worker_id": 0, "step": "many", "seconds": [1], "bytes": {'a"\n': 1}, "rss_bytes": None, "phase": []}
    (tmp_path / "metrics" / "a.jsonl").write_bytes(recorded.sample(1, "a", odd) + recorded.sample(2, "a", odd))
    found = values_of(text_of(History(tmp_path).load()))
    assert found["everstep_unreadable_lines_total", ""] == 1
    assert (found["everstep_recoveries_total", "unknown"], found["everstep_samples_total", ""]) == (2, 0)
    assert found["everstep_checkpoint_failures_total", "unknown other"] == 1


def test_the_time_in_which_the_job_was_not_running_is_no_long_step() -> None:
    tally = Tally()
    for second in range(1, 6):
        tally.take({"kind": "step_committed", "time_unix_ns": second * 10**9, "step": second, "samples": 10})
    tally.take({"kind": "job_started", "time_unix_ns": 50 * 10**9})
    assert tally.progress_ns == 50 * 10**9
    tally.take({"kind": "step_committed", "time_unix_ns": 55 * 10**9, "step": 6, "samples": 10})
    assert list(tally.step_seconds.cumulative())[-1][1] == 4


def test_checkpoints_that_were_not_due_are_no_failures() -> None:
    tally = Tally()
    for at, (kind, cause) in enumerate(
        [("checkpoint_skipped", "busy"), ("checkpoint_failed", "busy"), ("checkpoint_failed", "disk")], 1
    ):
        tally.take({"kind": kind, "time_unix_ns": at, "tier": "disk", "step": at, "cause": cause})
    assert tally.checkpoints_skipped["disk", Cause.BUSY] == 2  # older jobs told both alike
    assert sum(tally.checkpoint_failures.values()) == tally.checkpoint_failures["disk", Cause.DISK] == 1


class _NvmlError(Exception):
    pass


def _refuse(handle: int) -> Any:
    if handle == 1:
        raise _NvmlError
    return types.SimpleNamespace(gpu=75)


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = types.ModuleType("pynvml")
    fake.__dict__.update(
        NVMLError=_NvmlError,
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetMemoryInfo=lambda handle: types.SimpleNamespace(used=10, total=20),
        nvmlDeviceGetUtilizationRates=_refuse,
    )
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    prometheus._library.cache_clear()
    try:
        assert devices() == [Device(0, 10, 20, 0.75), Device(1, 10, 20, None)]
        found = values_of(expose(device_families())[0].decode())
    finally:
        prometheus._library.cache_clear()
    assert found["everstep_device_utilization_ratio", "0"] == 0.75
    assert ("everstep_device_utilization_ratio", "1") not in found
    assert found["everstep_device_memory_used_bytes", "1"] == 10
    assert list(device_families([])) == []


def test_each_worker_has_its_device_memory_step_time_and_bytes() -> None:
    history = History(Path("/nowhere"))
    history.facts.take({"kind": "worker_joined", "time_unix_ns": 1, "worker_id": 3, "incarnation": 0, "pid": 7})
    for at_s in (1, 2):
        row = {
            "worker_id": 3,
            "incarnation": 0,
            "step": 4 * at_s,
            "seconds": {"forward": 0.5 * at_s, "reduce": 0.2 * at_s},
        }
        row |= {"bytes": {"reduce": 100 * at_s}, "device_allocated_bytes": 5, "device_reserved_bytes": 8}
        history.usage.take({"t": at_s * 10**9, "host": "h", "workers": [row]})
    found = values_of(text_of(history, running=True))
    assert found["everstep_worker_device_allocated_bytes", "3"] == 5
    assert found["everstep_worker_device_reserved_bytes", "3"] == 8
    assert found["everstep_worker_step_seconds", "3"] == 0.25
    assert found["everstep_worker_communication_seconds", "3"] == pytest.approx(0.05)
    assert found["everstep_worker_busy_ratio", "3"] == 0.5
    assert found["everstep_worker_communication_bytes_total", "reduce 3"] == 200
