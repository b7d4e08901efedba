"""`everstep.integrations.lightning`: a LightningModule as a job. A script changes one import.

`from everstep.integrations.lightning import Trainer`, or `import everstep.integrations.lightning as L`: all other names
are Lightning's own. The loop here is one over `everstep.join`, so `everstep run script.py --workers N` gives the bits
of `python script.py`.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import os
from collections.abc import Iterable, Mapping
from inspect import Parameter
from math import gcd
from pathlib import Path
from typing import Any

import torch

from everstep.base.errors import ConfigError
from everstep.base.package_versions import refuse_versions
from everstep.checkpoint.interchange_formats import save_torch
from everstep.integrations.lightning_checkpoint import lightning_checkpoint
from everstep.integrations.lightning_loop import Epochs, EpochValues, shown_alone, step_schedulers, stopping
from everstep.integrations.lightning_module import (
    ModuleLog,
    evaluated,
    optimizer_and_schedulers,
    refuse_data_hooks,
    refuse_hooks,
    training_loader,
)
from everstep.integrations.lightning_options import TrainerOptions, trainer_options
from everstep.script.loop_values import state as loop_state
from everstep.script.watched_life import IN_REHEARSAL, TRIED
from everstep.train.join import device_for, in_turn, join
from everstep.train.precision import resolve_device
from everstep.train.run import Run, Step, view_of
from everstep.train.script_errors import say_in_one_line

log = logging.getLogger(__name__)

_LANES = 8


def __getattr__(name: str) -> Any:
    """Lightning's own names. Raises: AttributeError for unknown ones; ConfigError if Lightning is not installed."""
    if name.startswith("__"):
        raise AttributeError(name)
    return getattr(_lightning(), name)


def _lightning() -> Any:
    say_in_one_line()
    refuse_versions("lightning")
    try:
        return importlib.import_module("lightning")
    except ModuleNotFoundError:
        raise ConfigError(
            "everstep.integrations.lightning needs lightning: pip install 'everstep[lightning]'"
        ) from None


class NotCarried(ConfigError, AttributeError):
    """An attribute that only Lightning's own Trainer has."""


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
        _lightning()
        self._options: TrainerOptions = trainer_options(arguments)
        self._stopping = [stopping(one) for one in self._options.callbacks if not shown_alone(one)]
        self._lanes, self._run_dir, self._config = lanes, run_dir, dict(config or {})
        self._logged = ModuleLog()
        self._kept = loop_state(metrics={}, sums={})
        self._values = EpochValues(self._kept)
        self._run: Run | None = None
        self._module: Any = None
        self.optimizers: list[Any] = []
        self.lr_scheduler_configs: list[Any] = []
        self._data: tuple[Any, Any, Any] = (None, None, None)
        self._epochs = Epochs(1, 1, 1)
        self._at = (0, 0)
        self._estimate: int | None = None

    def __getattr__(self, name: str) -> Any:
        """Raises: NotCarried for names that only Lightning's own has."""
        raise NotCarried(f"trainer.{name} is not carried by everstep.integrations.lightning: leave it out")

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
        return {name: torch.tensor(value) for name, value in self._values.metrics.items()}

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
        optimizer, self.lr_scheduler_configs = optimizer_and_schedulers(model)
        self.optimizers = [optimizer]
        vars(model).update(log=self._logged.log, optimizers=lambda use_pl_optimizer=True: optimizer)
        try:
            self._run = run = self._join(train)
            self._follow(run, check)
        finally:
            vars(model).pop("log", None)
            vars(model).pop("optimizers", None)
        self._leave_checkpoint(run)
        _tear_down((self.datamodule, model), "fit")

    def _leave_checkpoint(self, run: Run) -> None:
        """Without it the job is complete all the same, so what prevents it is told alone."""
        run_dir, divided = view_of(run).link.run_dir, view_of(run).config.zero.stage > 0
        if run_dir is None:
            return
        path = run_dir / "lightning.ckpt"
        try:
            self.save_checkpoint(path, weights_only=divided)
        except Exception as error:
            log.warning("%s is not written: %s: %s", path, type(error).__name__, error)
            return
        if divided and run.is_main:
            log.warning("%s has the weights alone: with zero.stage each worker has a part of the optimizer's", path)

    def _loaders(self, train: Any, check: Any, datamodule: Any) -> tuple[Any, Any]:
        lightning = _lightning()
        if isinstance(train, lightning.LightningDataModule):
            train, datamodule = None, train
        if datamodule is not None and (train is not None or check is not None):
            raise ConfigError("Trainer.fit: expected a datamodule or DataLoaders, got both: give one of the two")
        if datamodule is not None:
            refuse_data_hooks(datamodule)
        for one in filter(None, (datamodule, self._module)):
            one.trainer = self
            with in_turn():
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
        carried = {f"lightning.scheduler{n}": one.scheduler for n, one in enumerate(self.lr_scheduler_configs)}
        carried |= {f"lightning.stopping{n}": one for n, one in enumerate(self._stopping)}
        settings = {"steps": self._options.steps, "epochs": self._options.epochs, **self._options.settings}
        settings |= self._config
        self._module.to(resolve_device(device_for(settings.get("device"))))
        run = join(
            self._module,
            self.optimizers[0],
            train,
            lanes=self._lanes or gcd(each, _LANES),
            accumulate=self._options.accumulate,
            state={**carried, "lightning.kept": self._kept},
            run_dir=self._run_dir,
            **settings,
        )
        if self._estimate not in (None, run.total_steps) and os.environ.get(IN_REHEARSAL) != TRIED:
            raise ConfigError(
                f"trainer.estimated_stepping_batches said {self._estimate}, the job has {run.total_steps} steps: give "
                "its length and batch size in the script, not by options of 'everstep run'"
            )
        order = view_of(run).order
        self._epochs = Epochs(order.dataset_size, order.global_batch, self._options.accumulate)
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
        number, ends, options = step.number, self._epochs.ends(step.number), self._options
        self._at = self._at[0], number
        order = view_of(run).order
        self._values.add(step.metrics, sum(len(order.samples(number, lane)) for lane in range(order.lanes)))
        step_schedulers(self.lr_scheduler_configs, self._epochs, number, ends, None)
        told = self._values.close() if ends else {}
        validated = self._epochs.due(number, options.check_every, options.every_epochs, ends)
        if check is not None and validated:
            self._begin_evaluation("validation")
            told |= (found := self._evaluate(run, check, "val"))
            self._values.metrics.update(found)
        asked = [one for one in self._stopping if one.due(validated, ends, check is not None)]
        stops = True in [one.asked(self._values.newest) for one in asked]  # all are asked: each keeps count
        if stops:
            run.stop()
        closes = ends or stops or number == run.total_steps  # the last epoch may end early
        if closes:
            told |= self._values.close()
            self._module.on_train_epoch_end()
        step_schedulers(self.lr_scheduler_configs, self._epochs, number, ends, self._values)
        if told | self._logged.numbers:
            run.log(**{**told, **self._logged.numbers})
        self._logged.numbers.clear()
        if closes:
            self._at = self._epochs.of(number) + 1, number

    # ---- evaluation and the result

    def _begin_evaluation(self, name: str) -> None:
        getattr(self._module, f"on_{name}_start")()
        getattr(self._module, f"on_{name}_epoch_start")()

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
        if datamodule is not None:
            refuse_data_hooks(datamodule)
        source = datamodule or self.datamodule or self._module
        own = loaders is None
        if own:
            source.setup(stage)
            loaders = getattr(source, f"{kind}_dataloader")()
        vars(self._module)["log"] = self._logged.log
        self._logged.numbers.clear()
        try:
            self._begin_evaluation("validation" if kind == "val" else kind)
            found = {**self._logged.numbers, **self._evaluate(self._run, loaders, kind)}
        finally:
            vars(self._module).pop("log", None)
        if own:
            _tear_down((source,), stage)
        if verbose and self._run.is_main:
            print(", ".join(f"{name} {value:.6g}" for name, value in found.items()), flush=True)
        return [found]

    def save_checkpoint(self, filepath: str | Path, weights_only: bool = False, storage_options: Any = None) -> None:
        """Write a checkpoint that Lightning loads, once: by the worker that leads. Raises: ConfigError before fit;
        StoreError."""
        if self._run is None or storage_options is not None:
            raise ConfigError("Trainer.save_checkpoint: expected a call after fit, with a path: leave out the rest")
        if self._run.is_main:
            optimizer, at = None if weights_only else self.optimizers[0], {"epoch": self._at[0], "step": self._at[1]}
            content = lightning_checkpoint(self._module, self.datamodule, optimizer, self.lr_scheduler_configs, **at)
            save_torch(content, Path(filepath))


def _tear_down(parts: Iterable[Any], stage: str) -> None:
    """Not in a rehearsal: the job's own workers still use what a method may delete."""
    if IN_REHEARSAL not in os.environ:
        for one in filter(None, parts):
            one.teardown(stage)


def _overrides(instance: Any, method: str) -> bool:
    lightning = _lightning()
    bases = (lightning.LightningModule, lightning.LightningDataModule)
    return all(getattr(type(instance), method, None) is not getattr(base, method, None) for base in bases)


def _arguments(method: Any, batch: Any, index: int) -> tuple[Any, ...]:
    """What a step method, decorated or not, takes: the batch, and its number if it asks for that."""
    kinds = [parameter.kind for parameter in inspect.signature(method).parameters.values()]
    asked = sum(kind in (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD) for kind in kinds)
    return (batch, index) if asked > 1 or Parameter.VAR_POSITIONAL in kinds else (batch,)


def _loss(module: Any, found: Any) -> torch.Tensor:
    loss = found.get("loss") if isinstance(found, Mapping) else found
    if not isinstance(loss, torch.Tensor):
        raise ConfigError(
            f"{type(module).__name__}.training_step: expected a loss, or a dict with 'loss', got "
            f"{type(found).__name__}: return one for each batch"
        )
    return loss
