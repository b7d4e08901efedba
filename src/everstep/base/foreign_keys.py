"""Names here of other tools' config keys, or how the same is done. Pure.

The names are those of PyTorch's DataLoader and torchrun, Hugging Face's TrainingArguments, Lightning and DeepSpeed.
"""

from __future__ import annotations

_WAYS = {
    "the global batch is lanes x micro_batch samples: set micro_batch, or --batch-size of everstep run": "batch_size "
    "train_batch_size per_device_train_batch_size train_micro_batch_size_per_gpu global_batch_size micro_batch_size",
    "set lanes: each worker computes several, one after the other, and their gradients are added up": "accumulate "
    "accumulation_steps accumulation gradient_accumulation_steps accumulate_grad_batches grad_accum",
    "it belongs to your optimizer (Task.build_optimizer, or the one given to join); ready tasks have task.lr": "lr "
    "learning_rate weight_decay momentum betas adam_beta1 adam_beta2 adam_epsilon optim optimizer",
    "it belongs to your scheduler: Task.build_scheduler, or join(scheduler=...)": "lr_scheduler lr_scheduler_type "
    "scheduler warmup warmup_steps warmup_ratio lr_decay",
    "write Task.collate, or give join(collate=...)": "collate collate_fn data_collator",
    "it belongs to your dataset: Task.build_dataset, or the one given to join": "dataset data data_dir data_path "
    "sampler batch_sampler drop_last",
    "samples come in an order that follows from seed": "shuffle",
    "tensor parallelism is not among the keys; stages splits a model into a pipeline": "tensor_parallel_size "
    "tensor_parallel tp tp_size",
    "state is not sharded over workers; stages splits a model and its optimizer's state": "zero zero.stage zero_stage "
    "fsdp zero_optimization sharding sharding_strategy",
    "call torch.compile in your own code: in Task.build_model, or before join": "compile torch_compile",
}
"""How it is done -> names."""
_KEYS = {
    "stages (and pool), for a model that is split into a pipeline": "pipeline_parallel_size pipeline_parallel pp "
    "pp_size num_stages pipeline_stages",
    "clip_norm": "max_grad_norm gradient_clip_val gradient_clipping grad_clip clip_grad_norm clip_grad max_norm",
    "loader.workers": "num_workers dataloader_num_workers workers_per_loader",
    "loader.prefetch": "prefetch_factor dataloader_prefetch_factor",
    "loader.pin_memory": "dataloader_pin_memory",
    "steps": "max_steps total_steps num_steps max_iters train_steps num_training_steps",
    "epochs": "num_epochs num_train_epochs max_epochs n_epochs",
    "eval_every": "eval_steps eval_interval eval_freq evaluation_strategy eval_strategy val_check_interval",
    "log_every": "logging_steps log_interval log_every_n_steps log_freq",
    "checkpoint.disk.every_steps": "save_steps save_interval save_freq save_every checkpoint_freq checkpoint_interval "
    "every_n_train_steps",
    "checkpoint.disk.keep_last": "save_total_limit save_top_k keep_last keep_checkpoints",
    "checkpoint.disk.path": "checkpoint_dir checkpoint_path save_dir ckpt_dir default_root_dir",
    "--run-dir of everstep run, or join(run_dir=...)": "output_dir out_dir log_dir logging_dir run_dir",
    "resume_from; a job that was stopped goes on by itself in its run directory": "resume resume_from_checkpoint "
    "ckpt_path load_from start_epoch",
    "checkpoint.best_metric": "metric_for_best_model monitor",
    "early_stop.patience (and early_stop.metric)": "early_stopping_patience patience early_stopping",
    "workers (--workers of everstep run)": "world_size nproc_per_node num_processes devices num_gpus gpus n_gpus "
    "ngpus num_workers_per_node",
    "hosts.min, and everstep agent --join on each further host": "nnodes num_nodes num_machines",
    "network.address": "master_addr main_process_ip",
    "--listen ADDR:PORT of everstep run": "master_port main_process_port rdzv_endpoint",
    "device, or devices of each stage in map": "device_ids cuda gpu device_id accelerator no_cuda use_cpu local_rank",
    "transport": "backend ddp_backend dist_backend",
    "recompute (in a job of several stages)": "gradient_checkpointing activation_checkpointing",
    "on_nonfinite and nonfinite_limit": "detect_anomaly logging_nan_inf_filter skip_nan",
    "sinks": "report_to logger loggers wandb tensorboard mlflow",
    "min_workers": "min_nodes min_replica_size min_replicas",
    "max_restarts (of one worker within an hour)": "max_failures restarts",
    "quorum_wait_s": "timeout join_timeout quorum_timeout rdzv_timeout",
    "hang_limit_s": "nccl_timeout ddp_timeout hang_timeout monitor_interval",
    "seed": "data_seed random_seed manual_seed global_seed",
    "threads": "num_threads omp_num_threads torch_num_threads",
    "precision=fp16": "fp16 amp use_amp half",
    "precision=bf16": "bf16",
    "precision (fp32, bf16 or fp16)": "mixed_precision dtype amp_dtype",
}
"""What it is called -> names."""
_BY_NAME = {name: way for way, names in _WAYS.items() for name in names.split()}
_BY_NAME |= {name: f"here it is {key}" for key, names in _KEYS.items() for name in names.split()}


def known_elsewhere(name: str) -> str | None:
    """The name here of another tool's key, or how the same is done, as a clause; None if it is not known. Case and
    dashes do not count."""
    return _BY_NAME.get(name.strip().lstrip("-").replace("-", "_").lower())
