"""The loop's arithmetic for a LightningModule: epochs, values over an epoch, schedulers, early stopping.

Apart from the Trainer because each is a rule of Lightning's by itself.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from everstep.base.errors import ConfigError
from everstep.integrations.lightning_module import EPOCH, STEP
from everstep.script.loop_values import LoopValues


@dataclass(frozen=True)
class Epochs:
    """Epochs of a job, which are counted in steps: one ends with the step that takes its last sample. size: samples of
    an epoch; batch: of a step; accumulate: batches in a step."""

    size: int
    batch: int
    accumulate: int

    def steps_before(self, epoch: int) -> int:
        """Steps up to the end of the epoch before; epochs count from 0."""
        return -(-epoch * self.size // self.batch)

    def of(self, step: int) -> int:
        """The epoch of a step; steps count from 1."""
        return (step - 1) * self.batch // self.size

    def begins(self, step: int) -> bool:
        """Whether the step is the first of an epoch."""
        return step - 1 == self.steps_before(self.of(step))

    def ends(self, step: int) -> bool:
        """Whether the step is the last of an epoch."""
        return step == self.steps_before(self.of(step) + 1)

    def batches(self, step: int) -> int:
        """Batches of the step's epoch up to its end."""
        return (step - self.steps_before(self.of(step))) * self.accumulate

    @property
    def length(self) -> int:
        """Batches of an epoch, as Lightning counts them."""
        return -(-self.size * self.accumulate // self.batch)

    def due(self, step: int, every: int | float, every_epochs: int | None, ends: bool) -> bool:
        """Whether a validation follows this step. every, every_epochs: as in TrainerOptions. ends: the epoch."""
        done = self.batches(step)
        if every_epochs is None:
            done = step * self.accumulate
        elif (self.of(step) + 1) % every_epochs:
            return False
        if isinstance(every, float) and every == 1.0:
            return ends
        count = max(1, int(every * self.length)) if isinstance(every, float) else every
        return any(n % count == 0 for n in range(done - self.accumulate + 1, done + 1))


class EpochValues:
    """Values that steps and validations have told: the newest ones, and those of an epoch so far. kept: `metrics` and
    `sums` of the loop's state, which all workers have alike."""

    def __init__(self, kept: LoopValues) -> None:
        self._kept: Any = kept

    @property
    def metrics(self) -> dict[str, float]:
        """The newest ones, by name."""
        found: dict[str, float] = self._kept.metrics
        return found

    def add(self, values: Mapping[str, float], samples: int) -> None:
        """Take the values of a step, which are means over its samples."""
        for name, value in values.items():
            self.metrics[name] = value
            if name.endswith(STEP):
                total, count = self._kept.sums.get(name, (0.0, 0))
                self._kept.sums[name] = total + value * samples, count + samples

    def close(self) -> dict[str, float]:
        """The epoch is over: returns means over it, by name."""
        means = {name.removesuffix(STEP): total / count for name, (total, count) in self._kept.sums.items()}
        self._kept.sums.clear()
        told = {f"{name}{EPOCH}": value for name, value in means.items()}
        self.metrics.update({**means, **told})
        return told

    def newest(self, name: str, strict: bool = True) -> float | None:
        """The newest value. Raises: ConfigError for a name that no step has logged, if strict."""
        if name in self.metrics:
            return float(self.metrics[name])
        if not strict:
            return None
        have = ", ".join(sorted(self.metrics)) or "nothing"
        raise ConfigError(
            f"monitor={name!r}: expected a name that training_step or validation_step has logged, which have logged "
            f"{have}: log it there"
        )


def step_schedulers(configs: Sequence[Any], epochs: Epochs, step: int, ends: bool, values: EpochValues | None) -> None:
    """Step the schedulers that are due after this step, as their LRSchedulerConfig says. ends: the epoch. values: then
    it is the turn of those that go by a metric, else of the others."""
    for one in configs:
        done = epochs.batches(step) if one.interval == "step" else epochs.of(step) + 1
        if (
            one.reduce_on_plateau != (values is not None)
            or done % one.frequency
            or (one.interval == "epoch" and not ends)
        ):
            continue
        if values is None:
            one.scheduler.step()
        elif (value := values.newest(one.monitor, one.strict)) is not None:
            one.scheduler.step(value)


class StoppingRule:
    """An EarlyStopping callback of Lightning's, as state of the loop."""

    def __init__(self, callback: Any) -> None:
        self._callback = callback

    def due(self, validated: bool, ends: bool, validates: bool) -> bool:
        """Whether it is asked after this step: after a validation, or at the end of an epoch."""
        return ends if self._callback._check_on_train_epoch_end or not validates else validated

    def asked(self, metric: Callable[[str, bool], float | None]) -> bool:
        """Whether to stop. metric: gives the newest value of a name."""
        value = metric(self._callback.monitor, self._callback.strict)
        return value is not None and bool(self._callback._evaluate_stopping_criteria(torch.tensor(value))[0])

    def state_dict(self) -> dict[str, Any]:
        """The callback's own."""
        return dict(self._callback.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with it."""
        self._callback.load_state_dict(state)


def shown_alone(callback: Any) -> bool:
    """Whether a callback only shows something."""
    callbacks = importlib.import_module("lightning.pytorch.callbacks")
    return isinstance(callback, callbacks.ProgressBar | callbacks.ModelSummary)


def stopping(callback: Any) -> StoppingRule:
    """The callback as a part of the loop. Raises: ConfigError for another one than EarlyStopping."""
    callbacks = importlib.import_module("lightning.pytorch.callbacks")
    name = type(callback).__name__
    if type(callback) is callbacks.EarlyStopping:
        return StoppingRule(callback)
    remedies = {
        "ModelCheckpoint": "the job takes checkpoints by itself (checkpoint.best_metric, checkpoint.disk.keep_best); "
        "trainer.save_checkpoint(path) after fit writes one for Lightning",
        "LearningRateMonitor": "write self.log('lr', self.optimizers().param_groups[0]['lr']) into training_step",
    }
    remedy = remedies.get(name, "write what it does into the module (on_train_epoch_start, on_train_epoch_end)")
    raise ConfigError(f"the callback {name} is not carried: {remedy}")
