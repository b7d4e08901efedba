"""The arguments of Lightning's Trainer: what each becomes here, or why it is refused. Pure.

Apart from the Trainer because it is a table: everything that is not in it is refused by name.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from everstep.base.errors import ConfigError

_WORKERS = "the command says it: 'everstep run SCRIPT --workers N', and 'everstep agent' on further hosts"
_PRECISIONS = {None: None, 32: None, "32": None, "32-true": None, "16-mixed": "fp16", "bf16-mixed": "bf16"}
_SHOWN_ALONE = frozenset(
    {"enable_progress_bar", "enable_model_summary", "log_every_n_steps", "num_sanity_val_steps", "default_root_dir"}
    | {"enable_autolog_hparams", "inference_mode", "use_distributed_sampler", "enable_checkpointing", "deterministic"}
)
"""Arguments that change no number of a run of ours: any value is taken."""
_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "strategy": (("auto",), f"workers share the batches by themselves; {_WORKERS}"),
    "devices": (("auto", 1), _WORKERS),
    "num_nodes": ((1,), _WORKERS),
    "logger": ((None, True, False), "metrics are told by sinks: everstep run --set sinks=[tensorboard], say"),
    "fast_dev_run": ((False, 0), "use 'everstep check SCRIPT', or max_steps=1"),
    "min_epochs": ((None, 0, 1), "give EarlyStopping a longer patience"),
    "min_steps": ((None, 0), "give EarlyStopping a longer patience"),
    "max_time": ((None,), "a clock differs between workers: use max_steps, or stop the job, which can be resumed"),
    "limit_predict_batches": ((None, 1.0), "predict in a script of its own"),
    "overfit_batches": ((0, 0.0), "give a dataset of a few samples (torch.utils.data.Subset)"),
    "benchmark": ((None, False), "kernels that are chosen by their speed give other bits"),
    "profiler": ((None,), "use 'everstep profile'"),
    "detect_anomaly": ((False,), "a loss that is not finite is named, as on_nonfinite says"),
    "barebones": ((False,), "leave it out"),
    "plugins": ((None,), "precision=..., and the options of 'everstep run', stand for them"),
    "sync_batchnorm": ((False,), "a lane's statistics do not depend on the number of workers anyway"),
    "reload_dataloaders_every_n_epochs": ((0,), "a resumed worker could not tell what was loaded: use one dataset"),
    "model_registry": ((None,), "publish the result with 'everstep publish'"),
}
_HONOURED = frozenset(
    {"accelerator", "precision", "callbacks", "max_epochs", "max_steps", "limit_train_batches", "limit_val_batches"}
    | {"limit_test_batches", "val_check_interval", "check_val_every_n_epoch", "accumulate_grad_batches"}
    | {"gradient_clip_val", "gradient_clip_algorithm"}
)
_ENDLESS_EPOCHS = 1000
"""Lightning's own default where neither max_epochs nor max_steps is given."""


@dataclass(frozen=True)
class TrainerOptions:
    """What a Trainer was told. limits: batches, by train, val and test: a number, a share, or None for all. settings:
    config keys of join. check_every: batches or a share of an epoch between validations. every_epochs: None: batches
    are counted across epochs."""

    epochs: int | None
    steps: int | None
    accumulate: int
    callbacks: tuple[Any, ...]
    limits: Mapping[str, int | float | None]
    settings: Mapping[str, Any]
    check_every: int | float
    every_epochs: int | None


def trainer_options(given: Mapping[str, Any]) -> TrainerOptions:
    """The arguments of a Trainer, by Lightning's names. Raises: ConfigError naming one that cannot be honoured."""
    known = _HONOURED | _SHOWN_ALONE | _REFUSED.keys()
    for name, value in given.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            raise _refusal(
                name, value, f"did you mean {near[0]}?" if near else "lightning.Trainer has no such argument"
            )
        accepted, remedy = _REFUSED.get(name, ((value,), ""))
        if not any(value is one or (type(value) is type(one) and value == one) for one in accepted):
            raise _refusal(name, value, remedy)
    steps, epochs = _whole(given, "max_steps", -1, -1), _whole(given, "max_epochs", None, -1)
    every_epochs = _whole(given, "check_val_every_n_epoch", 1, 1)
    if epochs == -1 and steps == -1:
        raise _refusal("max_epochs", -1, "a job has a last step: give max_steps or max_epochs")
    if epochs is None and steps == -1:
        epochs = _ENDLESS_EPOCHS
    callbacks = given.get("callbacks") or ()
    return TrainerOptions(
        None if epochs == -1 else epochs,
        None if steps == -1 else steps,
        _whole(given, "accumulate_grad_batches", 1, 1) or 1,
        tuple(callbacks) if isinstance(callbacks, list | tuple) else (callbacks,),
        {kind: _limit(given, f"limit_{kind}_batches") for kind in ("train", "val", "test")},
        {**_clipping(given), **_precision(given), **_device(given)},
        _interval(given, every_epochs),
        every_epochs,
    )


def _refusal(name: str, value: Any, remedy: str) -> ConfigError:
    return ConfigError(f"Trainer({name}={value!r:.60}) is not carried: {remedy}")


def _whole(given: Mapping[str, Any], name: str, default: int | None, least: int) -> int | None:
    value = given.get(name, default)
    if value is None and (default is None or name == "check_val_every_n_epoch"):
        return None
    if type(value) is not int or value < least or (value == 0 and name.startswith("max_")):
        raise _refusal(name, value, f"give a whole number of at least {max(least, 1)}")
    return value


def _share(value: Any) -> bool:
    return type(value) is float and 0 < value <= 1


def _limit(given: Mapping[str, Any], name: str) -> int | float | None:
    value = given.get(name)
    if value is None or (value == 1.0 and type(value) is float):
        return None
    if _share(value) or (type(value) is int and value >= (1 if "train" in name else 0)):
        return value  # type: ignore[no-any-return]
    raise _refusal(name, value, "give a number of batches, or a share of them up to 1.0")


def _interval(given: Mapping[str, Any], every_epochs: int | None) -> int | float:
    value = given.get("val_check_interval")
    if value is None:
        value = 1.0
    if _share(value) and every_epochs is None:
        raise _refusal("val_check_interval", value, "without check_val_every_n_epoch, give a number of batches")
    if _share(value) or (type(value) is int and value >= 1):
        return value  # type: ignore[no-any-return]
    raise _refusal("val_check_interval", value, "give a number of batches, or a share of an epoch up to 1.0")


def _clipping(given: Mapping[str, Any]) -> dict[str, Any]:
    value, rule = given.get("gradient_clip_val"), given.get("gradient_clip_algorithm") or "norm"
    if rule not in ("norm", "value"):
        raise _refusal("gradient_clip_algorithm", rule, "give 'norm' or 'value'")
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or value < 0):
        raise _refusal("gradient_clip_val", value, "give a positive number")
    return {f"clip_{rule}": float(value)} if value else {}


def _precision(given: Mapping[str, Any]) -> dict[str, Any]:
    value = given.get("precision")
    if not isinstance(value, str | int | None) or value not in _PRECISIONS:
        raise _refusal("precision", value, "give '32-true', '16-mixed' or 'bf16-mixed'")
    return {"precision": _PRECISIONS[value]} if _PRECISIONS[value] else {}


def _device(given: Mapping[str, Any]) -> dict[str, Any]:
    value = given.get("accelerator", "auto")
    device: Callable[[], dict[str, Any]] | None = {
        "auto": dict[str, Any],
        "cpu": lambda: {"device": "cpu"},
        "gpu": lambda: {"device": "cuda"},
        "cuda": lambda: {"device": "cuda"},
    }.get(value if isinstance(value, str) else "")
    if device is None:
        raise _refusal("accelerator", value, "give 'cpu' or 'gpu'")
    return device()
