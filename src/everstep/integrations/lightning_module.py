"""A LightningModule as a job sees it: what of it is called here, its optimizer and schedulers, and what it logs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, SequentialSampler, Subset

from everstep.base.errors import ConfigError, Misused
from everstep.train.run import Step

_REFUSED = {
    "it would run on one worker's part of a batch: do this in training_step or validation_step": (
        "on_train_batch_start on_train_batch_end on_validation_batch_start on_validation_batch_end "
        "on_test_batch_start on_test_batch_end"
    ),
    "validation batches are shared by the workers, so none has all outputs: self.log(name, value) in the step itself "
    "gives the mean over all of them": "on_validation_epoch_end on_test_epoch_end on_validation_end on_test_end",
    "the update is the job's own: gradient_clip_val, and the optimizer and schedulers of configure_optimizers, stand "
    "for it": (
        "backward optimizer_step optimizer_zero_grad configure_gradient_clipping lr_scheduler_step "
        "on_before_optimizer_step on_before_zero_grad on_before_backward on_after_backward clip_gradients"
    ),
    "write it into collate_fn, or into training_step": (
        "transfer_batch_to_device on_before_batch_transfer on_after_batch_transfer"
    ),
    "give callbacks=[...] to the Trainer": "configure_callbacks",
    "the mode is set around each evaluation": (
        "on_validation_model_eval on_validation_model_train on_test_model_eval on_test_model_train "
        "on_validation_model_zero_grad"
    ),
    "use configure_model, and everstep's own options for sharding": "configure_sharded_model",
}
STEP, EPOCH = "_step", "_epoch"


def refuse_hooks(module: Any) -> None:
    """Check which methods a module overrides. Raises: ConfigError naming one that is not called here."""
    import lightning

    if not isinstance(module, lightning.LightningModule):
        older = any(base.__module__.startswith("pytorch_lightning") for base in type(module).__mro__)
        remedy = "derive it from lightning.LightningModule (import lightning, not pytorch_lightning)"
        raise ConfigError(
            f"Trainer.fit: expected a LightningModule, got {type(module).__name__}: {remedy if older else 'give one'}"
        )
    kind = type(module)
    if not module.automatic_optimization:
        raise ConfigError(
            f"{kind.__name__}.automatic_optimization=False is not carried: write a loop with everstep.join, which "
            "takes several optimizers (step.backward(loss, optimizer=opt))"
        )
    _refuse_overridden(kind, lightning.LightningModule)
    for name in ("training_step", "configure_optimizers"):
        if getattr(kind, name) is getattr(lightning.LightningModule, name):
            raise ConfigError(f"{kind.__name__} has no {name}, which a job needs: write it")


def refuse_data_hooks(datamodule: Any) -> None:
    """Check which methods a LightningDataModule overrides. Raises: ConfigError naming one that is not called here."""
    import lightning

    _refuse_overridden(type(datamodule), lightning.LightningDataModule)


def _refuse_overridden(kind: type, base: type) -> None:
    for remedy, names in _REFUSED.items():
        for name in names.split():
            theirs = getattr(base, name, None)  # without one Lightning calls none: the name is the user's
            if theirs is not None and getattr(kind, name) is not theirs:
                raise ConfigError(f"{kind.__name__}.{name} is not called here: {remedy}")


def optimizer_and_schedulers(module: Any) -> tuple[Any, list[Any]]:
    """What configure_optimizers gives: the optimizer, and Lightning's LRSchedulerConfig of each scheduler.

    Raises: ConfigError for several optimizers, or a form that Lightning does not know.
    """
    from lightning.fabric.utilities.exceptions import MisconfigurationException
    from lightning.pytorch.core import optimizer as forms

    given = module.configure_optimizers()
    of = f"{type(module).__name__}.configure_optimizers"
    if given is None:
        raise ConfigError(f"{of} returned None, and a job needs an optimizer: return a torch.optim.Optimizer")
    try:
        optimizers, schedulers, monitor = forms._configure_optimizers(given)
        configs = forms._configure_schedulers_automatic_opt(schedulers, monitor)
    except MisconfigurationException as error:
        raise ConfigError(f"{of}: {' '.join(str(error).split())}") from None
    if len(optimizers) != 1:
        raise ConfigError(
            f"{of} returned {len(optimizers)} optimizers, which needs manual optimization: write a loop with "
            "everstep.join, which takes several (step.backward(loss, optimizer=opt))"
        )
    return optimizers[0], configs


def training_loader(loader: Any, limit: int | float | None) -> Any:
    """The loader, whose dataset ends with the last batch that an epoch of Lightning's would have.

    limit: batches of an epoch, or a share of them; None: all. Raises: ConfigError for something that is no DataLoader,
    or a limit on samples that are shuffled.
    """
    if not isinstance(loader, DataLoader):
        raise ConfigError(
            f"expected one torch.utils.data.DataLoader for training, got {type(loader).__name__}: give one (of a "
            "torch.utils.data.ConcatDataset, say)"
        )
    if limit is None and not loader.drop_last:
        return loader
    in_order = type(loader.sampler) is SequentialSampler and loader.batch_size is not None
    if limit is not None and not in_order:
        raise ConfigError(
            f"Trainer(limit_train_batches={limit}) is not carried for a loader that shuffles: give a part of the "
            "dataset (torch.utils.data.Subset)"
        )
    return _first_batches(loader, limit, whole=loader.drop_last) if in_order else loader


def _first_batches(loader: Any, limit: int | float | None, whole: bool) -> Any:
    size, each = len(loader.dataset), int(loader.batch_size)
    batches = size // each if whole else -(-size // each)
    wanted = batches if limit is None else int(limit * batches) if isinstance(limit, float) else min(limit, batches)
    count = min(wanted * each, size)
    if count == size:
        return loader
    return DataLoader(
        Subset(loader.dataset, range(count)),
        batch_size=each,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        worker_init_fn=loader.worker_init_fn,
    )


class _Numbered:
    """A dataset whose samples come with the number of the batch that they are in."""

    def __init__(self, dataset: Any, batch_size: int) -> None:
        self._dataset, self._batch_size = dataset, batch_size

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> tuple[int, Any]:
        return index // self._batch_size, self._dataset[index]


def evaluated(loader: Any, limit: int | float | None, kind: str) -> tuple[Any, Any, int]:
    """Dataset, collate and batch size to evaluate a loader with; batches come as (number, batch). kind: val or test.

    Raises: ConfigError for something that is no single DataLoader with a batch size.
    """
    if isinstance(loader, list | tuple) and len(loader) == 1:
        loader = loader[0]
    if not isinstance(loader, DataLoader) or loader.batch_size is None or isinstance(loader.dataset, IterableDataset):
        raise ConfigError(
            f"expected one DataLoader with a batch_size and a map-style dataset for {kind}, got "
            f"{type(loader).__name__}: give one"
        )
    kept = _first_batches(loader, limit, whole=loader.drop_last)

    def collate(pairs: list[tuple[int, Any]]) -> tuple[int, Any]:
        return pairs[0][0], kept.collate_fn([sample for _, sample in pairs])

    return _Numbered(kept.dataset, kept.batch_size), collate, kept.batch_size


@dataclass
class ModuleLog:
    """Stands for `LightningModule.log` while a job runs. Values of training batches are told to the step, those of an
    evaluation added up in `found`, as (sum, count), and those of hooks in `numbers`."""

    step: Step | None = None
    found: dict[str, Tensor] | None = None
    numbers: dict[str, float] = field(default_factory=dict)
    batch: Any = None

    @contextlib.contextmanager
    def training(self, step: Step, batch: Any) -> Iterator[None]:
        """Inside, values are those of a batch of this step."""
        self.step, self.batch = step, batch
        try:
            yield
        finally:
            self.step = self.batch = None

    @contextlib.contextmanager
    def evaluating(self, batch: Any) -> Iterator[dict[str, Tensor]]:
        """Inside, values are those of a batch that is evaluated."""
        self.found, self.batch = {}, batch
        try:
            yield self.found
        finally:
            self.found = self.batch = None

    def log(
        self,
        name: str,
        value: Any,
        prog_bar: bool = False,
        logger: bool | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: Any = "mean",
        **said: Any,
    ) -> None:
        """As Lightning's, with reduce_fx="mean". A value that is for the epoch, too, is told as NAME_step.

        Raises: Misused for a torchmetrics.Metric, or another reduction.
        """
        if reduce_fx not in ("mean", torch.mean):
            raise Misused(f"self.log({name!r}): expected reduce_fx='mean', got {reduce_fx!r:.60}: log a mean")
        if not isinstance(value, Tensor | int | float) or (isinstance(value, Tensor) and value.numel() != 1):
            raise Misused(
                f"self.log({name!r}): expected a number or a tensor of one element, got {type(value).__name__}: log "
                "the value of the batch, as torchmetrics.functional computes it"
            )
        number = float(value.detach() if isinstance(value, Tensor) else value)
        if self.found is not None:
            count = self._count(said)
            before = self.found.get(name, torch.zeros(2, dtype=torch.float64))
            self.found[name] = before + torch.tensor([number * count, count], dtype=torch.float64)
        elif self.step is not None:
            count = self._count(said)
            told = f"{name}{STEP}" if on_epoch else name
            self.step.log(**{told: (number * count, count)})
        else:
            self.numbers[name] = number

    def _count(self, said: dict[str, Any]) -> int:
        from lightning.pytorch.utilities.data import extract_batch_size

        return int(said.get("batch_size") or extract_batch_size(self.batch))
