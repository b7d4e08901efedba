"""The common interface of all sinks, and their names.

Sinks are fed from the run directory, in a process of their own: workers do nothing for them, and an error in a sink
stays there.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from everstep.base.config_keys import NOTICES
from everstep.base.errors import ConfigError, EverstepError
from everstep.report.words import Event

_BEHIND = {
    "tensorboard": "everstep.sinks.tensorboard_files:TensorBoardFiles",
    "wandb": "everstep.sinks.wandb_run:WandbRun",
    "mlflow": "everstep.sinks.mlflow_run:MlflowRun",
    "otel": "everstep.sinks.otel_spans:OtelSpans",
    NOTICES: "everstep.sinks.notices:Notices",
}
OVER = ("completed", "failed", "interrupted")


class SinkFailed(EverstepError):
    """A sink could not take data; nothing delivered earlier is lost, and the data can be told again."""


@dataclass
class SinkJob:
    """The job as a sink knows it.

    folder: the sink's own, in the run directory. fresh: the sink was told nothing before; last_step: the newest step
    that it was told. memory: values that it needs when another process goes on, kept with its progress. again: the
    present news was told before (only a sink that `remembers` hears it).
    """

    run_dir: Path
    folder: Path
    name: str
    task: str
    identity: str
    created_ns: int
    fresh: bool = True
    last_step: int = 0
    memory: dict[str, str] = field(default_factory=dict)
    again: bool = False


class Sink:
    """A receiver of a job's steps and events. An exception in a method ends the sink, not the job.

    remembers: it needs everything from the start of the job, to know what is still under way; `SinkJob.again` marks
    news that it was told before.
    """

    remembers: ClassVar[bool] = False

    def begin(self, run: SinkJob, config: Mapping[str, Any]) -> None:
        """Begin; called before anything else. config: the job's effective one, nested."""

    def scalars(self, step: int, time_ns: int, values: Mapping[str, float]) -> None:
        """Take values of a step. Each name comes with rising steps, once with each."""

    def event(self, step: int, text: str, event: Event) -> None:
        """Take an event, as text and as a line of events.jsonl; `step` is the newest one told."""

    def flush(self) -> None:
        """Return when all of the above has arrived."""

    def end(self, state: str) -> None:
        """End for now. state: the job's; one of OVER if it has ended."""


def make_sink(name: str) -> Sink:
    """The sink of this name. Raises: ConfigError if its library is missing; SinkFailed if it cannot be imported."""
    check_installed([name])
    module, _, attribute = _BEHIND[name].partition(":")
    try:
        sink: Sink = getattr(importlib.import_module(module), attribute)()
    except Exception as error:  # a library that is installed but broken
        raise SinkFailed(f"the sink {name} cannot be used: {type(error).__name__}: {error}") from error
    return sink


def check_installed(names: Sequence[str]) -> None:
    """Check the libraries of these sinks. Raises: ConfigError, naming the package to install, if one is missing."""
    for name in names:
        for module in _needed(name):
            if not _found(module):
                grpc = module.endswith(".grpc")
                package = "opentelemetry-exporter-otlp-proto-grpc" if grpc else f"everstep[{name}]"
                raise ConfigError(f"the sink {name} needs {module}: pip install '{package}'")


def _needed(name: str) -> list[str]:
    """Modules that a sink needs, as the environment configures it."""
    if name == NOTICES:
        return []
    if name == "mlflow":
        return ["mlflow", *(() if os.environ.get("MLFLOW_TRACKING_URI") else ("sqlalchemy", "alembic"))]
    if name != "otel":
        return [name]
    if os.environ.get("OTEL_TRACES_EXPORTER", "otlp").strip() not in ("", "otlp"):
        return ["opentelemetry.sdk.trace"]
    way = "grpc" if otlp_protocol() == "grpc" else "http"
    return ["opentelemetry.sdk.trace", f"opentelemetry.exporter.otlp.proto.{way}"]


def otlp_protocol() -> str:
    """Protocol of spans, by the OTEL_* variables: 'http/protobuf' unless they say 'grpc'."""
    said = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL")
    return (said or "http/protobuf").strip()


def _found(module: str) -> bool:
    """Whether the module is installed; a mere folder of that name in the current directory does not count."""
    try:
        spec = importlib.util.find_spec(module)
    except ImportError:
        return False
    return spec is not None and spec.origin is not None
