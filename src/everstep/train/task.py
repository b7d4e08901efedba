"""`Task`: the user's code, as methods to fill in. Everything but model, dataset, optimizer and loss has a default.

And how it is called: what it raises becomes one line that names the method and the line.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterable, Mapping
from numbers import Integral
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset, default_collate

from everstep.base.errors import ConfigError, EverstepError, Misused, TaskError
from everstep.exact.shard_sums import ShardMesh

_PACKAGE = str(Path(__file__).resolve().parents[1])


class Task:
    """One thing to train. Subclass it, or use a ready one from the zoo.

    `defaults` are config values that the task wants unless the user says otherwise (keys as in the config).
    `config` is the effective config, set before any method is called.
    """

    defaults: ClassVar[Mapping[str, Any]] = {}
    config: Any = None

    def build_model(self) -> nn.Module:
        """The model, freshly initialised. Generators are seeded before the call, so every worker builds the same."""
        raise ConfigError(f"{type(self).__name__} must define build_model(self) -> nn.Module")

    def build_dataset(self, split: str) -> Dataset[Any]:
        """A map-style dataset with a length. split: "train" or "test"."""
        raise ConfigError(f"{type(self).__name__} must define build_dataset(self, split) -> Dataset")

    def build_optimizer(self, params: Iterable[nn.Parameter]) -> Optimizer:
        """Any deterministic torch.optim optimizer over `params` (those of the model)."""
        raise ConfigError(f"{type(self).__name__} must define build_optimizer(self, params) -> Optimizer")

    def build_scheduler(self, optimizer: Optimizer) -> LRScheduler | None:
        """Stepped once per update."""
        return None

    def units(self, model: nn.Module) -> list[nn.Module]:
        """The finest places where the model may be cut, in order; together they hold all its parameters."""
        return [model]

    def cuts(self, model: nn.Module, parts: int) -> list[int] | None:
        """How many units each of so many parts should have, in order; None: balanced by their parameters."""
        return None

    def parallelize(self, model: nn.Module, mesh: ShardMesh) -> None:
        """Cut the model into virtual shards, in place: `shard_model(model, plan, mesh)`. Its parameters stay whole."""
        raise ConfigError(
            f"cell.shards: {type(self).__name__} has no plan of what is cut, got {mesh.shards} shards: define "
            "parallelize(self, model, mesh), or set cell.tp=1 and cell.shards=1"
        )

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """The micro-batch's mean loss (scalar), or (sum, weight), both scalars: weight is the number of tokens, say."""
        raise ConfigError(f"{type(self).__name__} must define loss(self, model, batch)")

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
        """For evaluation, without gradient: name -> tensor([sum, count]). Reported as sum / count over the split.

        By default the loss.
        """
        value = self.loss(model, batch)
        if isinstance(value, tuple):
            return {"loss": torch.stack([value[0].detach().double(), value[1].detach().double()])}
        return {"loss": torch.stack([value.detach().double(), torch.ones((), dtype=torch.float64)])}

    def evaluation_batch(self) -> int:
        """Samples of one batch of an evaluation."""
        return 64

    def collate(self, samples: list[Any]) -> Any:
        """Samples of one micro-batch -> batch."""
        return default_collate(samples)

    def notes(self) -> list[str]:
        """What users should know before the job starts, one line each."""
        return []


def calling(task: Task, method: str, *arguments: Any) -> Any:
    """Call one of the task's methods.

    Raises: TaskError from the exception that it raised, naming the method and the user's line.
    """
    try:
        return getattr(task, method)(*arguments)
    except EverstepError:
        raise
    except Exception as error:
        name = f"{type(task).__name__}.{method}"
        raise TaskError(f"{name} raised {type(error).__name__}: {error}{where(error)}") from error


def samples_evaluated_at_once(task: Task) -> int:
    """The task's `evaluation_batch`. Raises: TaskError if it is no whole number of at least 1."""
    size = calling(task, "evaluation_batch")
    if not isinstance(size, Integral) or size < 1:
        name = f"{type(task).__name__}.evaluation_batch"
        raise TaskError(f"{name}: expected a whole number of at least 1, got {size!r}")
    return int(size)


def place_of(error: BaseException) -> tuple[str, int]:
    """File and line of the user's own code that an exception has passed last, or that it names; else of any code;
    ("", 0) if of none."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if not f.filename.startswith((_PACKAGE, "<")) and "site-packages" not in f.filename]
    found = (own or list(frames))[-1:]
    told = error.line if isinstance(error, Misused) else 0
    return (os.path.basename(found[0].filename), told or found[0].lineno or 0) if found else ("", 0)


def where(error: BaseException) -> str:
    """`place_of` as " (file.py:12)"; "" if it is unknown."""
    file, line = place_of(error)
    return f" ({file}:{line})" if line else ""
