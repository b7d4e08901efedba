"""The adapters of Weights & Biases and MLflow, against small stand-ins for their libraries."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from sink_cases import at, killed_run, publish, run_dir_of

from everstep.sinks.publication import read_cursor


@pytest.fixture(autouse=True)
def real_modules_stay(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("NETRC", os.devnull)
    for name in ("WANDB_MODE", "WANDB_API_KEY", "MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(name, raising=False)
    yield
    for name in ("everstep.sinks.wandb_run", "everstep.sinks.mlflow_run"):
        sys.modules.pop(name, None)


@dataclass
class FakeWandbRun:
    """What a run of wandb was told."""

    options: dict[str, Any]
    rows: list[dict[str, Any]] = field(default_factory=list)
    metrics: list[tuple[str, str | None]] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    exit_code: int | None = None

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self.metrics.append((name, step_metric))

    def log(self, row: dict[str, Any]) -> None:
        self.rows.append(row)

    def finish(self, exit_code: int) -> None:
        self.exit_code = exit_code


@pytest.fixture
def wandb_runs(monkeypatch: pytest.MonkeyPatch) -> list[FakeWandbRun]:
    runs: list[FakeWandbRun] = []

    def init(**options: Any) -> FakeWandbRun:
        runs.append(FakeWandbRun(options))
        return runs[-1]

    fake = ModuleType("wandb")
    vars(fake).update(init=init, Settings=SimpleNamespace)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return runs


def test_wandb_is_offline_without_a_key_and_goes_on_with_its_run(
    tmp_path: Path, wandb_runs: list[FakeWandbRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    make = importlib.import_module("everstep.sinks.wandb_run").WandbRun
    lines = killed_run()
    run_dir = run_dir_of(tmp_path / "mine", lines[:12])
    publish(run_dir, "wandb", make(), over=False)
    (run_dir / "events.jsonl").write_bytes(b"".join(lines))
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password k")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    publish(run_dir, "wandb", make())
    first, second = wandb_runs
    assert (first.options["mode"], first.options["project"], first.options["name"]) == ("offline", "everstep", "mine")
    assert first.options["config"]["lanes"] == 4 and first.options["dir"] == str(run_dir)
    assert (second.options["mode"], second.options["id"]) == ("online", first.options["id"])
    assert first.metrics == [("step", None), ("*", "step")]
    rows = first.rows + second.rows
    losses = {row["step"]: row["train/loss"] for row in rows if "train/loss" in row}
    assert losses == {n: 1 / n for n in range(1, 11)}
    [evicted] = [row for row in rows if "events/worker_evicted" in row]
    assert (evicted["step"], evicted["_timestamp"]) == (5, at(8.625) / 1e9)
    assert (first.exit_code, second.exit_code, second.summary["state"]) == (0, 0, "completed")


@dataclass
class FakeMlflow:
    """A tracking server: what is known of its runs."""

    uris: list[str] = field(default_factory=list)
    experiments: dict[str, str] = field(default_factory=dict)
    runs: list[dict[str, Any]] = field(default_factory=list)
    refuses: bool = False

    def client(self, tracking_uri: str) -> FakeMlflow:
        self.uris.append(tracking_uri)
        return self

    def get_experiment_by_name(self, name: str) -> Any:
        return SimpleNamespace(experiment_id=self.experiments[name]) if name in self.experiments else None

    def create_experiment(self, name: str, artifact_location: str | None) -> str:
        return self.experiments.setdefault(name, f"e{len(self.experiments)}")

    def create_run(self, experiment_id: str, start_time: int, run_name: str) -> Any:
        made = {"experiment": experiment_id, "start": start_time, "name": run_name, "status": "RUNNING"}
        self.runs.append({**made, "metrics": [], "params": {}, "texts": {}})
        return SimpleNamespace(info=SimpleNamespace(run_id=str(len(self.runs) - 1)))

    def update_run(self, run_id: str, status: str) -> None:
        self.runs[int(run_id)]["status"] = status

    def log_batch(self, run_id: str, metrics: Any = (), params: Any = (), tags: Any = ()) -> None:
        if self.refuses:
            raise ConnectionError("nobody there")
        assert len(metrics) <= 1000 and len(params) <= 100
        self.runs[int(run_id)]["metrics"] += metrics
        self.runs[int(run_id)]["params"] |= dict(params)

    def log_text(self, run_id: str, text: str, artifact_file: str) -> None:
        self.runs[int(run_id)]["texts"][artifact_file] = text

    def set_terminated(self, run_id: str, status: str, end_time: int) -> None:
        self.runs[int(run_id)] |= {"status": status, "end": end_time}


@pytest.fixture
def mlflow_server(monkeypatch: pytest.MonkeyPatch) -> FakeMlflow:
    server = FakeMlflow()
    entities, tracking = ModuleType("mlflow.entities"), ModuleType("mlflow.tracking")
    together = lambda *parts: parts  # noqa: E731
    vars(entities).update(Metric=together, Param=together, RunTag=together)
    vars(tracking).update(MlflowClient=server.client)
    for module in (ModuleType("mlflow"), entities, tracking):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return server


def test_mlflow_goes_on_with_its_run(tmp_path: Path, mlflow_server: FakeMlflow) -> None:
    make = importlib.import_module("everstep.sinks.mlflow_run").MlflowRun
    lines = killed_run()
    run_dir = run_dir_of(tmp_path / "mine", lines[:12])
    publish(run_dir, "mlflow", make(), over=False)
    [run] = mlflow_server.runs
    assert (run["name"], run["status"], run["params"]["lanes"]) == ("mine", "RUNNING", "4")
    (run_dir / "events.jsonl").write_bytes(b"".join(lines))
    mlflow_server.refuses = True
    with pytest.raises(Exception, match="nobody there"):
        publish(run_dir, "mlflow", make())
    mlflow_server.refuses = False
    publish(run_dir, "mlflow", make())
    assert len(mlflow_server.runs) == 1 and mlflow_server.uris[0].startswith("sqlite:////")
    losses = [(step, value, time_ms) for name, value, time_ms, step in run["metrics"] if name == "train/loss"]
    assert [loss[:2] for loss in losses] == [(n, 1 / n) for n in range(1, 11)]
    assert losses[0][2] == at(4) // 10**6
    assert (run["status"], run["end"]) == ("FINISHED", at(14.5) // 10**6)
    told = "".join(run["texts"].values()).splitlines()
    assert len(told) == 11 and sum("killed by SIGKILL" in line for line in told) >= 1
    assert read_cursor(run_dir / "mlflow").memory["run_id"] == "0"
