"""MLflow: a thin adapter. Without MLFLOW_TRACKING_URI the run lives in a database of its own, in `DIR/mlflow`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from mlflow.entities import Metric, Param, RunTag
from mlflow.tracking import MlflowClient

from everstep.base.config import dotted
from everstep.report.words import Event, whole_number
from everstep.sinks.sink import Sink, SinkJob

_EXPERIMENT = "everstep"
_MOST_METRICS = 1000  # of one call of log_batch
_MOST_PARAMS = 100
_LONGEST_PARAM = 500
_STATUS = {"completed": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}


class MlflowRun(Sink):
    """Scalars as metrics, the config as parameters, events as lines in text files beneath `events`."""

    def __init__(self) -> None:
        self._metrics: list[Any] = []
        self._lines: list[str] = []
        self._last_ns = 0

    def begin(self, run: SinkJob, config: Mapping[str, Any]) -> None:
        """Begin the run, or go on with the one that was begun before. MLFLOW_EXPERIMENT_NAME works as usual."""
        uri, artifacts = os.environ.get("MLFLOW_TRACKING_URI"), None
        if not uri:  # not a folder of files: newer versions refuse that
            uri, artifacts = f"sqlite:///{(run.folder / 'mlflow.db').resolve()}", run.folder / "artifacts"
        self._client = MlflowClient(tracking_uri=uri)
        self._run = run
        self._last_ns = run.created_ns
        if "run_id" in run.memory:
            self._client.update_run(run.memory["run_id"], status="RUNNING")
            return
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or _EXPERIMENT
        known = self._client.get_experiment_by_name(name)
        if known is not None:
            experiment_id = known.experiment_id
        else:
            where = artifacts.resolve().as_uri() if artifacts is not None else None
            experiment_id = self._client.create_experiment(name, artifact_location=where)
        made = self._client.create_run(experiment_id, start_time=run.created_ns // 10**6, run_name=run.name)
        run.memory["run_id"] = made.info.run_id
        said = {"task": run.task, **dotted(config)}
        params = [Param(key, str(value)[:_LONGEST_PARAM]) for key, value in said.items()]
        tags = [RunTag("everstep.run_dir", str(run.run_dir.resolve()))]
        for start in range(0, len(params), _MOST_PARAMS):
            self._client.log_batch(made.info.run_id, params=params[start : start + _MOST_PARAMS], tags=tags)

    def scalars(self, step: int, time_ns: int, values: Mapping[str, float]) -> None:
        """Keep values until they fill a call, or until `flush`."""
        self._last_ns = max(self._last_ns, time_ns)
        self._metrics += [Metric(name, value, time_ns // 10**6, step) for name, value in values.items()]
        while len(self._metrics) >= _MOST_METRICS:
            self._send()

    def event(self, step: int, text: str, event: Event) -> None:
        """Add a line to the next text file."""
        time_ns = whole_number(event.get("time_unix_ns"))
        self._last_ns = max(self._last_ns, time_ns)
        self._lines.append(f"{time_ns / 1e9:.3f} step {step} {event['kind']}: {text}")

    def flush(self) -> None:
        """Send everything. Raises: MlflowException and others if the server refuses."""
        while self._metrics:
            self._send()
        if self._lines:
            count = int(self._run.memory.get("texts", 0)) + 1
            self._client.log_text(self._id, "\n".join(self._lines) + "\n", f"events/{count:06d}.txt")
            self._run.memory["texts"] = str(count)
            self._lines.clear()

    def end(self, state: str) -> None:
        """Set the run's status, at the time of the job's last event."""
        self.flush()
        if state in _STATUS:
            self._client.set_terminated(self._id, _STATUS[state], end_time=self._last_ns // 10**6)

    @property
    def _id(self) -> str:
        return self._run.memory["run_id"]

    def _send(self) -> None:
        self._client.log_batch(self._id, metrics=self._metrics[:_MOST_METRICS])
        del self._metrics[:_MOST_METRICS]
