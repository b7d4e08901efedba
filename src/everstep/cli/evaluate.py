"""`everstep eval`: what the task's own metrics say about trained weights, on its test split."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from everstep.base.config import Config
from everstep.base.errors import ConfigError, EverstepError, TaskError
from everstep.cli.job import Request, effective_config, read_job
from everstep.cli.task_loading import make_task, parse_task
from everstep.cli.verify import find_weights, read_weights
from everstep.runtime.address import JOB_FILE

if TYPE_CHECKING:
    from torch import nn

    from everstep.train.task import Task

_BATCH = 64


@click.command()
@click.argument("task")
@click.option(
    "--from",
    "source",
    required=True,
    type=click.Path(path_type=Path),
    metavar="DIR_OR_CHECKPOINT",
    help="A run directory, a checkpoint, or a safetensors file.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def command(task: str, source: Path, as_json: bool) -> int:
    """Evaluate trained weights of TASK on its test split."""
    weights = find_weights(source)
    read_weights(weights)
    metrics, samples = evaluate_task(task, source, weights)
    if as_json:
        finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        print(json.dumps({"task": task, "from": str(weights), "split": "test", "samples": samples, "metrics": finite}))
        return 0
    print(f"{weights}: {samples} test samples")
    for name, value in metrics.items():
        print(f"{name:<16} {value:.4f}")
    return 0


def evaluate_task(text: str, source: Path, weights: Path) -> tuple[dict[str, float], int]:
    """Metrics by name, and the number of samples they were taken over.

    Raises: ConfigError if the weights do not fit the task's model; TaskError for what the task raises.
    """
    import torch

    from everstep.data.batch import to_device
    from everstep.train.evaluation import evaluate
    from everstep.train.precision import prepare_torch
    from everstep.train.task import calling

    spec = parse_task(text)
    if spec.kind == "script":
        raise ConfigError(f"task {text!r} is a script: only a Task can be evaluated from outside")
    task = make_task(spec)
    task.config = _config(task, source)
    device = prepare_torch(task.config)
    model = calling(task, "build_model").to(device)
    _load(model, weights)
    dataset = calling(task, "build_dataset", "test")
    size = len(dataset)
    if not size:
        raise ConfigError(f"task {text!r}: its test split is empty")

    def load(chunk: int) -> Any:
        indices = range(chunk * _BATCH, min(size, (chunk + 1) * _BATCH))
        return calling(task, "collate", [dataset[i] for i in indices])

    model.eval()
    try:
        with torch.no_grad():
            metrics = evaluate(
                lambda batch: calling(task, "metrics", model, to_device(batch, device)),
                -(-size // _BATCH),
                load,
                gather=lambda data: {0: data},
                members=lambda: (0, (0,)),
                seed=task.config.seed,
            )
    except EverstepError:
        raise
    except Exception as error:
        raise TaskError(f"evaluating {text!r} raised {type(error).__name__}: {error}") from error
    return metrics, size


def _config(task: Task, source: Path) -> Config:
    """That of the job the weights come from; else the task's own defaults."""
    for folder in (source, *source.parents[:2]):
        if (folder / JOB_FILE).is_file():
            return read_job(folder).config
    return effective_config(task.defaults, Request(()), script=True)


def _load(model: nn.Module, weights: Path) -> None:
    from safetensors.torch import load_file

    from everstep.exact.extra_state import from_file, is_extra

    try:
        found = load_file(weights)
        model.load_state_dict({name: from_file(t) if is_extra(name) else t for name, t in found.items()})
    except RuntimeError as error:
        raise ConfigError(f"{weights} does not fit the task's model: {' '.join(str(error).split())[:400]}") from None
