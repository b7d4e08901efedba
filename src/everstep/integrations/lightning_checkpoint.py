"""A checkpoint as Lightning writes it, of a job's module, optimizer and schedulers."""

from __future__ import annotations

import importlib
import logging
import warnings
from collections.abc import Sequence
from typing import Any

from everstep.base.errors import ConfigError


def lightning_checkpoint(
    module: Any, datamodule: Any, optimizer: Any, schedulers: Sequence[Any], *, epoch: int, step: int
) -> dict[str, Any]:
    """Content of a .ckpt file. schedulers: LRSchedulerConfig of each; epoch, step: those that are over. optimizer None:
    the weights alone. Raises: ConfigError if the optimizer's state is divided among workers."""
    lightning = importlib.import_module("lightning")
    content = {
        "epoch": epoch,
        "global_step": step,
        "pytorch-lightning_version": lightning.__version__,
        "state_dict": module.state_dict(),
        "loops": _loops(lightning, epoch, step),
    }
    if optimizer is not None:
        content |= {
            "callbacks": {},
            "optimizer_states": [_whole_state(optimizer)],
            "lr_schedulers": [one.scheduler.state_dict() for one in schedulers],
        }
    for one in filter(None, (module, datamodule)):
        if one.hparams:
            content[one.CHECKPOINT_HYPER_PARAMS_NAME] = one._hparams_name
            content[one.CHECKPOINT_HYPER_PARAMS_KEY] = dict(one.hparams)
    module.on_save_checkpoint(content)
    return content


def _whole_state(optimizer: Any) -> dict[str, Any]:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    state = optimizer.state
    if any(v.numel() == 0 < p.numel() for p in parameters for v in state.get(p, {}).values() if hasattr(v, "numel")):
        raise ConfigError(
            "a Lightning checkpoint needs the whole optimizer state, and with zero.stage each worker has a part: set "
            "zero.stage=0, or save_checkpoint(path, weights_only=True)"
        )
    found: dict[str, Any] = optimizer.state_dict()
    return found


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
