"""Which of `transformers.TrainingArguments` a job takes, which it refuses, and the config that follows. Nothing of
transformers is imported.

An argument that is honoured by the class itself, by its Trainer's own methods, or that has no effect in one process is
in neither table.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from everstep.base.errors import ConfigError

OPTIMIZERS = frozenset({"adamw_torch", "adamw_torch_fused", "adafactor", "sgd", "adagrad", "rmsprop"})
_NOT_FOR_METRICS = frozenset({"reduce_lr_on_plateau", "greedy"})
_STRATEGIES = frozenset({"random", "sequential"})
_SHARES = "Everstep itself shares the batches out among the workers: leave it out"
_NO_WRAPPER = "no DistributedDataParallel is made: leave it out"
_CUT = "leave it out; zero.stage=1 (--set) divides the optimizer's state"
_NO_HUB = "leave it out, and push the directory that save_model() has written"

REFUSED: Mapping[str, str] = {
    "deepspeed": _CUT,
    "fsdp": _CUT,
    "fsdp_config": _CUT,
    "parallelism_config": _SHARES,
    "ddp_backend": _NO_WRAPPER,
    "ddp_find_unused_parameters": _NO_WRAPPER,
    "ddp_bucket_cap_mb": _NO_WRAPPER,
    "ddp_broadcast_buffers": _NO_WRAPPER,
    "ddp_static_graph": _NO_WRAPPER,
    "ddp_timeout": _NO_WRAPPER,
    "torch_compile": "leave it out, and call model.compile() before the Trainer is made",
    "torch_compile_backend": "leave it out, and call model.compile(backend=...) before the Trainer is made",
    "torch_compile_mode": "leave it out, and call model.compile(mode=...) before the Trainer is made",
    "push_to_hub": _NO_HUB,
    "hub_model_id": _NO_HUB,
    "hub_token": _NO_HUB,
    "auto_find_batch_size": "the batch is part of the result: leave it out, and set per_device_train_batch_size",
    "use_liger_kernel": "leave it out, and apply the kernels to the model before the Trainer is made",
    "neftune_noise_alpha": "leave it out, and add the noise in a module of the model's own",
    "optim_target_modules": "leave it out, and give the optimizer: Trainer(optimizers=(optimizer, None))",
    "torch_empty_cache_steps": "leave it out; PYTORCH_CUDA_ALLOC_CONF sets how torch keeps memory",
    "include_num_input_tokens_seen": "leave it out; everstep status and the reports count samples",
    "bf16_full_eval": "leave it out, and convert the model before you evaluate it",
    "fp16_full_eval": "leave it out, and convert the model before you evaluate it",
    "save_on_each_node": "leave it out; checkpoint.copies (--set) keeps copies on several hosts",
    "enable_jit_checkpoint": "leave it out; a job that is told to end takes a checkpoint anyway",
    "ignore_data_skip": "leave it out; a job that goes on never trains twice on a sample, and skips none",
    "dataloader_multiprocessing_context": "leave it out; dataloader_num_workers alone counts",
    "debug": "leave it out; on_nonfinite (--set) says what follows from values that are not finite",
    "skip_memory_metrics": "leave it out; everstep profile shows memory",
    "report_to": "report_to='none', and --set sinks=... (tensorboard, wandb, mlflow), which shows all workers' values",
}
"""Remedies for arguments that are refused unless they have their default."""


def refuse_arguments(args: Any) -> None:
    """Check all arguments. args: a `TrainingArguments`. Raises: ConfigError naming one that cannot be honoured."""
    for item in dataclasses.fields(args):
        value = getattr(args, item.name)
        if item.name in REFUSED and value and value != item.default:
            raise _refusal(item.name, value, REFUSED[item.name])
        if item.name == "ddp_find_unused_parameters" and value is not None:
            raise _refusal(item.name, value, _NO_WRAPPER)
    for name in ("per_device_train_batch_size", "gradient_accumulation_steps"):
        if getattr(args, name) < 1:
            raise ConfigError(f"TrainingArguments: {name}: expected at least 1, got {getattr(args, name)}: raise it")
    checks = (
        ("optim", OPTIMIZERS, "give the optimizer itself: Trainer(optimizers=(optimizer, None))"),
        ("train_sampling_strategy", _STRATEGIES, "sort or group the dataset itself, with 'sequential'"),
    )
    for name, known, remedy in checks:
        if str(_text(getattr(args, name))) not in known:
            raise _refusal(name, _text(getattr(args, name)), f"expected {', '.join(sorted(known))}; or {remedy}")
    if _text(args.lr_scheduler_type) in _NOT_FOR_METRICS:
        raise _refusal(
            "lr_scheduler_type",
            _text(args.lr_scheduler_type),
            "it goes by a metric, which an update does not have: use one that counts steps",
        )
    _refuse_accelerator(args.accelerator_config)


def _refuse_accelerator(config: Any) -> None:
    for item in dataclasses.fields(config):
        value = getattr(config, item.name, item.default)
        if value != item.default and not (item.default is None and not value):
            raise _refusal(f"accelerator_config.{item.name}", value, _SHARES)


def _refusal(name: str, value: Any, remedy: str) -> ConfigError:
    return ConfigError(f"TrainingArguments: {name}={value!r:.100} cannot be honoured: {remedy}")


def _text(value: Any) -> Any:
    """Value of an enumeration's member."""
    return getattr(value, "value", value)


def job_settings(args: Any, steps: int, per_epoch: int) -> dict[str, Any]:
    """Config keys, dotted, that follow from the arguments. steps: of the job; per_epoch: updates of one epoch."""
    found: dict[str, Any] = {"steps": steps, "seed": args.seed}
    if args.max_grad_norm and args.max_grad_norm > 0:
        found["clip_norm"] = float(args.max_grad_norm)
    if args.bf16 or args.fp16:
        found["precision"] = "bf16" if args.bf16 else "fp16"
    if args.device.type != "cpu":
        found["device"] = args.device.type
    strategy = _text(args.save_strategy)
    if strategy == "epoch":
        found["checkpoint.disk.every_steps"] = per_epoch
    elif strategy == "steps":
        every = args.save_steps if args.save_steps >= 1 else math.ceil(steps * args.save_steps)
        found["checkpoint.disk.every_steps"] = max(1, int(every))
    if args.dataloader_prefetch_factor is not None:
        found["loader.prefetch"] = args.dataloader_prefetch_factor
    if args.save_total_limit:
        found["checkpoint.disk.keep_last"] = args.save_total_limit
    return found


def lanes_of(global_batch: int, at_most: int = 8) -> int:
    """Number of lanes that share a global batch where nobody says it: the largest divisor up to the usual number."""
    return max(n for n in range(1, at_most + 1) if global_batch % n == 0)
