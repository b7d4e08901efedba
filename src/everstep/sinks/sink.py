"""The one interface behind which everything lives that a job is told to, and who is behind each name.

Sinks are fed from the run directory, in a process of their own: workers do nothing for them, and what fails in a sink
fails there.
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
    """A sink could not take what it was told; nothing that came before is lost, and it can be told again."""


@dataclass
class SinkJob:
    """The job as a sink knows it.

    folder: the sink's own, in the run directory. fresh: it was told nothing before; last_step: the newest step that it
    was told of. memory: what it wants to know again when another process goes on, kept with how far it got. again: what
    comes now was told before (only a sink that `remembers` hears it).
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
    """Something that a job is told to. What a method raises ends the sink, not the job.

    remembers: it needs everything from the start of the job, to know what is still under way; `SinkJob.again` says what
    it has told before.
    """

    remembers: ClassVar[bool] = False

    def begin(self, run: SinkJob, config: Mapping[str, Any]) -> None:
        """Before anything else. config: the job's effective one, nested."""

    def scalars(self, step: int, time_ns: int, values: Mapping[str, float]) -> None:
        """Values of a step. A name comes with rising steps, once with each."""

    def event(self, step: int, text: str, event: Event) -> None:
        """What happened, in words and as a line of events.jsonl; `step` is the newest one that was told of."""

    def flush(self) -> None:
        """All of the above must have arrived when this returns."""

    def end(self, state: str) -> None:
        """No more for now. state: the job's; one of OVER if it has ended."""


def make_sink(name: str) -> Sink:
    """The sink of this name. Raises: ConfigError if its library is missing; SinkFailed if it cannot be imported."""
    check_installed([name])
    module, _, attribute = _BEHIND[name].partition(":")
    try:
        sink: Sink = getattr(importlib.import_module(module), attribute)()
    except Exception as error:  # a library that is there and broken
        raise SinkFailed(f"the sink {name} cannot be used: {type(error).__name__}: {error}") from error
    return sink


def check_installed(names: Sequence[str]) -> None:
    """Raises: ConfigError, naming what to install, if the library of one of these sinks is missing."""
    for name in names:
        for module in _needed(name):
            if not _found(module):
                grpc = module.endswith(".grpc")
                package = "opentelemetry-exporter-otlp-proto-grpc" if grpc else f"everstep[{name}]"
                raise ConfigError(f"the sink {name} needs {module}: pip install '{package}'")


def _needed(name: str) -> list[str]:
    """The modules that a sink needs, as the environment configures it."""
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
    """How spans travel, as the OTEL_* variables say: 'http/protobuf' unless they say 'grpc'."""
    said = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL")
    return (said or "http/protobuf").strip()


def _found(module: str) -> bool:
    """Whether it is installed; a mere folder of that name in the current directory is not it."""
    try:
        spec = importlib.util.find_spec(module)
    except ImportError:
        return False
    return spec is not None and spec.origin is not None
