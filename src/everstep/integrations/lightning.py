"""`everstep.integrations.lightning`: a LightningModule as a job. A script changes one import.

`from everstep.integrations.lightning import Trainer`, or `import everstep.integrations.lightning as L`: all other names
are Lightning's own. The loop here is one over `everstep.join`, so `everstep run script.py --workers N` gives the bits of
`python script.py`.
"""

from __future__ import annotations

import importlib
import logging
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import gcd
from pathlib import Path
from typing import Any

import torch

from everstep.base.errors import ConfigError
from everstep.checkpoint.interchange_formats import save_torch
from everstep.integrations.lightning_module import (
    EPOCH,
    STEP,
    Logged,
    evaluated,
    optimizer_and_schedulers,
    refuse_hooks,
    training_loader,
)
from everstep.integrations.lightning_options import TrainerOptions, trainer_options
from everstep.train.join import join
from everstep.train.loop_values import LoopValues
from everstep.train.loop_values import state as loop_state
from everstep.train.run import Run, Step
from everstep.train.script_errors import say_in_one_line

_LANES = 8


def __getattr__(name: str) -> Any:
    """Lightning's own names. Raises: AttributeError for unknown ones; ConfigError if Lightning is not installed."""
    if name.startswith("__"):
        raise AttributeError(name)
    return getattr(_lightning(), name)


def _lightning() -> Any:
    try:
        return importlib.import_module("lightning")
    except ModuleNotFoundError:
        raise ConfigError(
            "everstep.integrations.lightning needs lightning: pip install 'everstep[lightning]'"
        ) from None


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


class Trainer:
    """Lightning's Trainer, on the job's loop. Arguments have Lightning's names; one that cannot be honoured is refused.

    lanes: fixed micro-batches of a global batch, which is the DataLoader's batch times accumulate_grad_batches; by
    default the largest divisor of the batch size and 8. run_dir: of a job of one worker (`python script.py`), which
    goes on from its checkpoints there. config: further keys of everstep.join.
    """

    sanity_checking = False
    logger = None
    loggers: tuple[Any, ...] = ()
    progress_bar_callback = None

    def __init__(
        self,
        *,
        lanes: int | None = None,
        run_dir: str | Path | None = None,
        config: Mapping[str, Any] | None = None,
        **arguments: Any,
    ) -> None:
        """Raises: ConfigError naming an argument that cannot be honoured."""
        say_in_one_line()
        _lightning()
        self._options: TrainerOptions = trainer_options(arguments)
        self._stopping = [_stopping(callback) for callback in self._options.callbacks if not _shown_alone(callback)]
        self._lanes, self._run_dir, self._config = lanes, run_dir, dict(config or {})
        self._logged = Logged()
        self._kept: LoopValues = loop_state(metrics={}, sums={})
        self._run: Run | None = None
        self._module: Any = None
        self._optimizer: Any = None
        self._schedulers: list[Any] = []
        self._data: tuple[Any, Any, Any] = (None, None, None)
        self._epochs = Epochs(1, 1, 1)
        self._at = (0, 0)
        self._estimate: int | None = None

    def __getattr__(self, name: str) -> Any:
        """Raises: AttributeError for names that Lightning's Trainer has, and this one has not."""
        raise AttributeError(f"trainer.{name} is not carried by everstep.integrations.lightning: leave it out")

    # ---- what modules ask

    @property
    def lightning_module(self) -> Any:
        """The module that is trained."""
        return self._module

    @property
    def datamodule(self) -> Any:
        """The LightningDataModule, if there is one."""
        return self._data[2]

    @property
    def current_epoch(self) -> int:
        """Epochs that are over."""
        return self._at[0]

    @property
    def global_step(self) -> int:
        """Updates made so far."""
        return self._at[1]

    @property
    def max_epochs(self) -> int | None:
        """As given; -1 as in Lightning where steps alone end the job."""
        return -1 if self._options.epochs is None else self._options.epochs

    @property
    def max_steps(self) -> int:
        """As given; -1: epochs end the job."""
        return -1 if self._options.steps is None else self._options.steps

    @property
    def callback_metrics(self) -> dict[str, torch.Tensor]:
        """Newest values of training_step and validation_step, by name; the same in every worker."""
        return {name: torch.tensor(value) for name, value in self._kept.metrics.items()}

    @property
    def is_global_zero(self) -> bool:
        """Whether this worker leads at the moment."""
        return self._run is None or self._run.is_main

    @property
    def estimated_stepping_batches(self) -> int:
        """Updates of the whole job."""
        if self._run is not None:
            return self._run.total_steps
        steps, epochs = self._options.steps, self._options.epochs
        last = None if epochs is None else self._epochs.steps_before(epochs)
        self._estimate = last if steps is None else steps if last is None else min(steps, last)
        return int(self._estimate or 0)

    # ---- training

    def fit(
        self,
        model: Any,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: Any = None,
        ckpt_path: Any = None,
        weights_only: bool | None = None,
    ) -> None:
        """Train, as the job's worker. Raises: ConfigError for what cannot be carried."""
        if ckpt_path is not None:
            raise ConfigError(
                "Trainer.fit(ckpt_path=...) is not carried: a job goes on from its own checkpoints when the command is "
                "given again; load weights with LightningModule.load_from_checkpoint before fit"
            )
        if self._run is not None:
            raise ConfigError("Trainer.fit was called twice: a job has one loop; train longer with more max_epochs")
        refuse_hooks(model)
        self._module = model
        train, check = self._loaders(train_dataloaders, val_dataloaders, datamodule)
        model.trainer = self
        model.configure_model()
        self._optimizer, self._schedulers = optimizer_and_schedulers(model)
        vars(model)["log"] = self._logged.log
        try:
            self._run = run = self._join(train)
            self._follow(run, check)
        finally:
            vars(model).pop("log", None)
        self._finish(run)

    def _loaders(self, train: Any, check: Any, datamodule: Any) -> tuple[Any, Any]:
        lightning = _lightning()
        if isinstance(train, lightning.LightningDataModule):
            train, datamodule = None, train
        if datamodule is not None and (train is not None or check is not None):
            raise ConfigError("Trainer.fit: expected a datamodule or DataLoaders, got both: give one of the two")
        for one in filter(None, (datamodule, self._module)):
            one.trainer = self
            one.prepare_data()
            one.setup("fit")
        source = datamodule or self._module
        given = train if train is not None else source.train_dataloader()
        train = training_loader(given, self._options.limits["train"])
        if check is None and (datamodule is not None or _overrides(self._module, "val_dataloader")):
            check = source.val_dataloader() if _overrides(source, "val_dataloader") else None
        self._data = train, check, datamodule
        each, times = int(train.batch_size or 1), self._options.accumulate
        size = len(train.dataset) if hasattr(train.dataset, "__len__") else each
        self._epochs = Epochs(max(1, size), each * times, times)
        if self._options.limits["val"] == 0 or not _overrides(self._module, "validation_step"):
            return train, None
        return train, check

    def _join(self, train: Any) -> Run:
        each = int(train.batch_size or 1)
        carried = {f"lightning.scheduler{n}": one.scheduler for n, one in enumerate(self._schedulers)}
        carried |= {f"lightning.stopping{n}": one for n, one in enumerate(self._stopping)}
        settings = {"steps": self._options.steps, "epochs": self._options.epochs, **self._options.settings}
        device = str(self._options.settings.get("device", "cpu"))
        self._module.to(device)
        run = join(
            self._module,
            self._optimizer,
            train,
            lanes=self._lanes or gcd(each, _LANES),
            accumulate=self._options.accumulate,
            state={**carried, "lightning.kept": self._kept},
            run_dir=self._run_dir,
            **{**settings, **self._config},
        )
        if self._estimate not in (None, run.total_steps):
            raise ConfigError(
                f"trainer.estimated_stepping_batches said {self._estimate}, and the job has {run.total_steps} steps: give its "
                "length and batch size in the script, not by options of 'everstep run'"
            )
        self._epochs = Epochs(run.order.dataset_size, run.order.global_batch, self._options.accumulate)
        return run

    def _follow(self, run: Run, check: Any) -> None:
        module = self._module
        module.on_fit_start()
        module.on_train_start()
        for step in run:
            self._enter(step)
            for batch in step:
                with self._logged.training(step, batch):
                    found = module.training_step(*_arguments(module.training_step, batch, self._index(step)))
                step.backward(_loss(module, found))
            self._after(run, step, check)
        module.on_train_end()
        module.on_fit_end()

    def _index(self, step: Step) -> int:
        """Number of the step's first batch in its epoch."""
        return self._epochs.batches(step.number) - self._epochs.accumulate

    def _enter(self, step: Step) -> None:
        self._at = self._epochs.of(step.number), step.number - 1
        self._module.train()
        if self._epochs.begins(step.number):
            self._module.on_train_epoch_start()

    def _after(self, run: Run, step: Step, check: Any) -> None:
        """What follows an update, in Lightning's order: schedulers, validation, end of the epoch."""
        number, ends = step.number, self._epochs.ends(step.number) or step.number == run.total_steps
        self._at = self._at[0], number
        self._logged.numbers.clear()
        self._gather(run, step)
        self._schedule(number, False, ends)
        told = self._close_epoch() if ends else {}
        validated = check is not None and self._due(number, ends)
        if check is not None and validated:
            self._module.on_validation_start()
            self._module.on_validation_epoch_start()
            told |= (found := self._evaluate(run, check, "val"))
            self._kept.metrics.update(found)
        if any([one.asked(self._metric) for one in self._stopping if one.due(validated, ends, check is not None)]):
            run.stop()
        if ends:
            self._module.on_train_epoch_end()
        self._schedule(number, True, ends)
        if told | self._logged.numbers:
            run.log(**{**told, **self._logged.numbers})
        if ends:
            self._at = self._epochs.of(number) + 1, number

    def _gather(self, run: Run, step: Step) -> None:
        """Take the step's values, and add those that are for the epoch, too, up."""
        samples = sum(len(run.order.samples(step.number, lane)) for lane in range(run.order.lanes))
        for name, value in step.metrics.items():
            self._kept.metrics[name] = value
            if name.endswith(STEP):
                total, count = self._kept.sums.get(name, (0.0, 0))
                self._kept.sums[name] = total + value * samples, count + samples

    def _close_epoch(self) -> dict[str, float]:
        """Means over the epoch, by name."""
        means = {name.removesuffix(STEP): total / count for name, (total, count) in self._kept.sums.items()}
        self._kept.sums.clear()
        told = {f"{name}{EPOCH}": value for name, value in means.items()}
        self._kept.metrics.update({**means, **told})
        return told

    def _due(self, step: int, ends: bool) -> bool:
        """Whether a validation follows this step."""
        every, done, length = self._options.check_every, self._epochs.batches(step), self._epochs.length
        if self._options.every_epochs is None:
            done = step * self._epochs.accumulate
        elif (self._epochs.of(step) + 1) % self._options.every_epochs:
            return False
        if every == 1.0 and isinstance(every, float):
            return ends
        count = max(1, int(every * length)) if isinstance(every, float) else every
        return any(n % count == 0 for n in range(done - self._epochs.accumulate + 1, done + 1))

    def _schedule(self, step: int, by_metric: bool, ends: bool) -> None:
        """Step the schedulers that are due; those that go by a metric after the validation."""
        for one in self._schedulers:
            done = self._epochs.batches(step) if one.interval == "step" else self._epochs.of(step) + 1
            if one.reduce_on_plateau != by_metric or done % one.frequency or (one.interval == "epoch" and not ends):
                continue
            if not by_metric:
                one.scheduler.step()
            elif (value := self._metric(one.monitor, one.strict)) is not None:
                one.scheduler.step(value)

    def _metric(self, name: str, strict: bool = True) -> float | None:
        """The newest value. Raises: ConfigError for a name that no step has logged, if strict."""
        if name in self._kept.metrics:
            return float(self._kept.metrics[name])
        if not strict:
            return None
        have = ", ".join(sorted(self._kept.metrics)) or "nothing"
        raise ConfigError(
            f"monitor={name!r}: expected a name that training_step or validation_step has logged, which have logged "
            f"{have}: log it there"
        )

    # ---- evaluation and the result

    def _evaluate(self, run: Run, loader: Any, kind: str) -> dict[str, float]:
        method = getattr(self._module, "validation_step" if kind == "val" else "test_step")
        dataset, collate, batch_size = evaluated(loader, self._options.limits[kind], kind)

        def judged(numbered: tuple[int, Any]) -> dict[str, Any]:
            with self._logged.evaluating(numbered[1]) as found:
                method(*_arguments(method, numbered[1], numbered[0]))
                return dict(found)

        return run.evaluate(judged, dataset, batch_size=batch_size, collate=collate)

    def validate(self, model: Any = None, dataloaders: Any = None, **given: Any) -> list[dict[str, float]]:
        """Validate after fit, as Lightning does. Raises: ConfigError before it."""
        return self._judge("val", "validate", model, dataloaders, **given)

    def test(self, model: Any = None, dataloaders: Any = None, **given: Any) -> list[dict[str, float]]:
        """Test after fit, as Lightning does. Raises: ConfigError before it."""
        return self._judge("test", "test", model, dataloaders, **given)

    def _judge(
        self,
        kind: str,
        stage: str,
        model: Any,
        loaders: Any,
        datamodule: Any = None,
        ckpt_path: Any = None,
        verbose: bool = True,
        weights_only: bool | None = None,
    ) -> list[dict[str, float]]:
        if self._run is None or model not in (None, self._module) or ckpt_path not in (None, "last"):
            raise ConfigError(
                f"Trainer.{stage}: expected a call after fit, with the module that was trained and no ckpt_path: "
                "evaluate other weights in a script of its own"
            )
        if isinstance(loaders, _lightning().LightningDataModule):
            loaders, datamodule = None, loaders
        source = datamodule or self.datamodule or self._module
        if loaders is None:
            source.setup(stage)
            loaders = getattr(source, f"{kind}_dataloader")()
        vars(self._module)["log"] = self._logged.log
        try:
            found = self._evaluate(self._run, loaders, kind)
        finally:
            vars(self._module).pop("log", None)
        if verbose and self._run.is_main:
            print(", ".join(f"{name} {value:.6g}" for name, value in found.items()), flush=True)
        return [found]

    def save_checkpoint(self, filepath: str | Path, weights_only: bool = False, storage_options: Any = None) -> None:
        """Write a checkpoint that Lightning loads, once: by the worker that leads. Raises: ConfigError before fit;
        StoreError."""
        if self._run is None or storage_options is not None:
            raise ConfigError("Trainer.save_checkpoint: expected a call after fit, with a path: leave out the rest")
        if self._run.is_main:
            save_torch(self._checkpoint(weights_only), Path(filepath))

    def _finish(self, run: Run) -> None:
        """Leave a checkpoint for Lightning beside what the job itself writes."""
        if run.run_dir is not None and run.is_main:
            save_torch(self._checkpoint(False), run.run_dir / "lightning.ckpt")

    def _checkpoint(self, weights_only: bool) -> dict[str, Any]:
        lightning, module = _lightning(), self._module
        content = {
            "epoch": self.current_epoch,
            "global_step": self.global_step,
            "pytorch-lightning_version": lightning.__version__,
            "state_dict": module.state_dict(),
            "loops": _loops(lightning, self.current_epoch, self.global_step),
        }
        if not weights_only:
            content |= {
                "callbacks": {},
                "optimizer_states": [self._optimizer.state_dict()],
                "lr_schedulers": [one.scheduler.state_dict() for one in self._schedulers],
            }
        for one in filter(None, (module, self.datamodule)):
            if one.hparams:
                content[one.CHECKPOINT_HYPER_PARAMS_NAME] = one._hparams_name
                content[one.CHECKPOINT_HYPER_PARAMS_KEY] = dict(one.hparams)
        module.on_save_checkpoint(content)
        return content


class _Stopping:
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


def _shown_alone(callback: Any) -> bool:
    callbacks = importlib.import_module("lightning.pytorch.callbacks")
    return isinstance(callback, callbacks.ProgressBar | callbacks.ModelSummary)


def _stopping(callback: Any) -> _Stopping:
    callbacks = importlib.import_module("lightning.pytorch.callbacks")
    name = type(callback).__name__
    if type(callback) is callbacks.EarlyStopping:
        return _Stopping(callback)
    remedies = {
        "ModelCheckpoint": "the job takes checkpoints by itself (checkpoint.best_metric, checkpoint.disk.keep_best); "
        "trainer.save_checkpoint(path) after fit writes one for Lightning",
        "LearningRateMonitor": "self.log the rate in on_train_epoch_end",
    }
    remedy = remedies.get(name, "write what it does into the module (on_train_epoch_start, on_train_epoch_end)")
    raise ConfigError(f"the callback {name} is not carried: {remedy}")


def _overrides(instance: Any, method: str) -> bool:
    lightning = _lightning()
    bases = (lightning.LightningModule, lightning.LightningDataModule)
    return all(getattr(type(instance), method, None) is not getattr(base, method, None) for base in bases)


def _arguments(method: Any, batch: Any, index: int) -> tuple[Any, ...]:
    """What a step method takes: the batch, and its number if it asks for that."""
    return (batch, index)[: method.__code__.co_argcount - 1]


def _loss(module: Any, found: Any) -> torch.Tensor:
    loss = found.get("loss") if isinstance(found, Mapping) else found
    if not isinstance(loss, torch.Tensor):
        raise ConfigError(
            f"{type(module).__name__}.training_step: expected a loss, or a dict with 'loss', got "
            f"{type(found).__name__}: return one for each batch"
        )
    return loss


def _loops(lightning: Any, epoch: int, step: int) -> dict[str, Any]:
    """Progress as Lightning keeps it, so that its fit(ckpt_path=...) goes on at this epoch and step."""
    told = logging.getLogger("lightning.pytorch")
    before = told.level
    told.setLevel(logging.ERROR)  # it advertises
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = lightning.Trainer(
            accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False
        )
    told.setLevel(before)
    loops: dict[str, Any] = trainer._checkpoint_connector._get_loops_state_dict()
    fit = loops["fit_loop"]
    for progress in (fit["epoch_progress"]["total"], fit["epoch_progress"]["current"]):
        progress.update(dict.fromkeys(("ready", "started", "processed", "completed"), epoch))
    steps = fit["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]["step"]["total"]
    steps.update(ready=step, completed=step)
    fit["epoch_loop.state_dict"]["_batches_that_stepped"] = step
    return loops
