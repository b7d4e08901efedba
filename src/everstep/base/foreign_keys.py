"""Names in other tools for config keys, or the way to do the same here. Pure.

The names are those of PyTorch (DataLoader, DistributedDataParallel, torchrun, torch.amp), Hugging Face's
TrainingArguments and Accelerate, Lightning, DeepSpeed, Megatron-LM and Ray Train. None of them is accepted as a key.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ForeignKey:
    """One answer. names: of other tools, in lower case, separated by spaces. keys: that the answer mentions."""

    answer: str
    names: str
    keys: tuple[str, ...] = ()


FOREIGN_KEYS = (
    # ---- batch and length
    ForeignKey(
        "the global batch is lanes x micro_batch samples: set micro_batch, or --batch-size of everstep run",
        "batch_size train_batch_size per_device_train_batch_size per_gpu_train_batch_size global_batch_size "
        "train_micro_batch_size_per_gpu micro_batch_size batch_size_per_gpu batch_size_per_device "
        "batchsize bs mini_batch_size minibatch_size",
        ("lanes", "micro_batch"),
    ),
    ForeignKey(
        "here it is accumulate: it multiplies the lanes, whose gradients are added up",
        "accumulation accumulation_steps gradient_accumulation gradient_accumulation_steps grad_accum "
        "accumulate_grad_batches grad_accum_steps update_freq no_sync num_microbatches n_microbatches micro_batches",
        ("accumulate", "lanes"),
    ),
    ForeignKey(
        "it belongs to the evaluation: run.evaluate(batch_size=...) in a loop of your own",
        "eval_batch_size eval_batchsize per_device_eval_batch_size per_gpu_eval_batch_size val_batch_size "
        "test_batch_size",
    ),
    ForeignKey(
        "here it is steps",
        "max_steps total_steps num_steps n_steps max_iters num_iters train_iters train_steps num_training_steps "
        "max_train_steps total_num_steps",
        ("steps",),
    ),
    ForeignKey(
        "here it is epochs",
        "num_epochs num_train_epochs max_epochs max_epoch n_epochs total_epochs train_epochs",
        ("epochs",),
    ),
    ForeignKey(
        "here it is eval_every, in steps, for a Task; a loop of your own calls run.evaluate",
        "eval_steps eval_interval eval_freq eval_frequency val_freq val_every val_interval val_check_interval do_eval",
        ("eval_every",),
    ),
    ForeignKey(
        "here it is eval_every in steps, or eval_every_epochs, for a Task; a loop of your own calls run.evaluate",
        "evaluation_strategy eval_strategy check_val_every_n_epoch eval_epochs",
        ("eval_every", "eval_every_epochs"),
    ),
    ForeignKey(
        "here it is log_every",
        "logging_steps log_steps log_interval log_every_n_steps log_freq print_freq print_every steps_per_print "
        "logging_strategy",
        ("log_every",),
    ),
    ForeignKey(
        "here it is log_every; 0 prints no line", "disable_tqdm progress_bar enable_progress_bar", ("log_every",)
    ),
    # ---- gradient, optimizer and loss
    ForeignKey(
        "here it is clip_norm",
        "max_grad_norm gradient_clip_val gradient_clipping gradient_clip grad_clip clip_grad_norm clip_grad_norm_ "
        "clip_grad max_norm grad_norm_clip clip_gradients",
        ("clip_norm",),
    ),
    ForeignKey(
        "set clip_norm for the global norm, clip_value for each element",
        "gradient_clip_algorithm clip_grad_value clip_grad_value_",
        ("clip_norm", "clip_value"),
    ),
    ForeignKey(
        "give it to your optimizer (Task.build_optimizer, or the one given to join); ready tasks have task.lr",
        "lr learning_rate base_lr weight_decay momentum nesterov betas beta1 beta2 adam_beta1 adam_beta2 adam_epsilon "
        "eps wd optim optim_args optimizer optimizers optimizer_type",
    ),
    ForeignKey(
        "give it to your scheduler: Task.build_scheduler, or join(scheduler=...)",
        "lr_scheduler lr_schedulers schedulers lr_scheduler_type lr_scheduler_kwargs lr_schedule scheduler "
        "warmup warmup_steps warmup_ratio num_warmup_steps warmup_num_steps warmup_epochs warmup_iters "
        "lr_decay lr_decay_iters lr_decay_steps min_lr max_lr gamma",
    ),
    ForeignKey(
        "write Task.loss, or give the loss to step.backward in a loop of your own",
        "loss loss_fn criterion compute_loss label_smoothing label_smoothing_factor",
    ),
    ForeignKey(
        "write Task.metrics, or give the function to run.evaluate in a loop of your own",
        "compute_metrics metrics_fn",
    ),
    ForeignKey(
        "it is what Task.build_model returns, or the model given to join",
        "model model_name model_name_or_path model_init pretrained_model_name_or_path",
    ),
    # ---- data
    ForeignKey("write Task.collate, or give join(collate=...)", "collate collate_fn data_collator"),
    ForeignKey(
        "give it to your dataset: Task.build_dataset, or the one given to join",
        "dataset data data_dir data_path data_root train_data train_file train_dataset transform",
    ),
    ForeignKey(
        "give it to join as its third argument, or write Task.build_dataset",
        "dataloader data_loader train_loader train_dataloader trainloader train_dl",
    ),
    ForeignKey(
        "give it to run.evaluate in a loop of your own, or write Task.build_dataset",
        "val_loader val_dataloader valid_loader test_loader test_dataloader eval_loader eval_dataloader eval_dataset "
        "val_dataset valid_dataset test_dataset val_data eval_data test_data",
    ),
    ForeignKey(
        "an evaluation goes through its whole dataset: give it a torch.utils.data.Subset",
        "eval_iters eval_batches val_batches limit_val_batches limit_test_batches max_eval_samples",
    ),
    ForeignKey(
        "samples come in an order that follows from seed, another one in each epoch, or with shuffle=false in the "
        "dataset's own",
        "sampler batch_sampler train_sampler use_distributed_sampler replace_sampler_ddp group_by_length generator "
        "shuffle_seed",
        ("seed", "shuffle"),
    ),
    ForeignKey(
        "no sample is dropped: the end of an epoch is filled up with the beginning of the next",
        "drop_last dataloader_drop_last drop_remainder even_batches",
    ),
    ForeignKey(
        "here it is loader.workers, processes that read samples; processes that train are workers",
        "num_workers dataloader_num_workers data_workers num_data_workers workers_per_loader num_loader_workers",
        ("loader.workers", "workers"),
    ),
    ForeignKey(
        "here it is loader.prefetch, in steps",
        "prefetch_factor dataloader_prefetch_factor prefetch_batches",
        ("loader.prefetch",),
    ),
    ForeignKey("here it is loader.pin_memory", "pin_memory dataloader_pin_memory", ("loader.pin_memory",)),
    ForeignKey(
        "the processes of loader.workers stay from epoch to epoch in any case",
        "persistent_workers dataloader_persistent_workers",
        ("loader.workers",),
    ),
    ForeignKey(
        "all generators are seeded for each sample, in whichever process it is read",
        "worker_init_fn seed_worker",
    ),
    # ---- numbers
    ForeignKey(
        "here it is seed",
        "data_seed random_seed manual_seed global_seed seed_everything rng_seed",
        ("seed",),
    ),
    ForeignKey(
        "here it is cell.precision: a type each for the parameters, the reduction and the buffers",
        "cell_precision param_dtype reduce_dtype buffer_dtype mp_policy",
        ("cell.precision",),
    ),
    ForeignKey("here it is precision=fp16", "fp16 float16 half use_fp16 fp16_training", ("precision",)),
    ForeignKey("here it is precision=bf16", "bf16 use_bf16 bfloat16 bf16_training", ("precision",)),
    ForeignKey(
        "here it is precision: bf16, fp16 or fp32",
        "amp use_amp native_amp autocast mixed_precision amp_dtype dtype torch_dtype half_precision_backend fp32 "
        "opt_level amp_level amp_backend precision_plugin",
        ("precision",),
    ),
    ForeignKey(
        "with precision=fp16 the loss is scaled, and the scale adapts by itself",
        "grad_scaler scaler use_grad_scaler loss_scale dynamic_loss_scale initial_scale_power loss_scale_window",
        ("precision",),
    ),
    ForeignKey(
        "deterministic algorithms are always asked of torch, and cudnn.benchmark is always off",
        "deterministic use_deterministic_algorithms full_determinism cudnn_benchmark cudnn_deterministic benchmark",
    ),
    ForeignKey(
        "call torch.set_float32_matmul_precision in your own code, before join or in Task.build_model",
        "tf32 allow_tf32 use_tf32 matmul_precision float32_matmul_precision",
    ),
    ForeignKey(
        "here it is threads", "num_threads omp_num_threads torch_num_threads num_cpu_threads_per_process", ("threads",)
    ),
    ForeignKey(
        "here it is on_nonfinite, with nonfinite_limit",
        "skip_nan skip_nan_gradients terminate_on_nan logging_nan_inf_filter check_for_nan_in_loss_and_grad",
        ("on_nonfinite", "nonfinite_limit"),
    ),
    ForeignKey(
        "call it in your own code: in Task.build_model, or before join",
        "compile torch_compile detect_anomaly channels_last memory_format",
    ),
    # ---- DistributedDataParallel
    ForeignKey(
        "parameters without a gradient need no setting",
        "find_unused_parameters ddp_find_unused_parameters static_graph",
    ),
    ForeignKey(
        "there is no DistributedDataParallel to set it for: leave it out",
        "bucket_cap_mb ddp_bucket_cap_mb gradient_as_bucket_view broadcast_buffers ddp_broadcast_buffers "
        "delay_all_reduce_named_params ddp_comm_hook output_device overlap_comm reduce_bucket_size "
        "allgather_bucket_size gradient_predivide_factor allreduce_always_fp32",
    ),
    ForeignKey(
        "batch statistics are those of one lane, micro_batch samples",
        "sync_batchnorm sync_bn syncbn convert_sync_batchnorm",
        ("micro_batch",),
    ),
    ForeignKey(
        "here it is transport", "backend ddp_backend dist_backend distributed_backend process_group", ("transport",)
    ),
    # ---- processes, devices and hosts
    ForeignKey(
        "here it is workers, the number on all hosts together (--workers of everstep run)",
        "world_size nproc nproc_per_node num_processes nprocs devices num_gpus gpus n_gpu n_gpus ngpus num_devices "
        "max_workers gpus_per_node ntasks_per_node",
        ("workers",),
    ),
    ForeignKey(
        "here it is workers, or pool in a job of several stages",
        "data_parallel_size data_parallel_degree data_parallel dp dp_size num_replicas",
        ("workers", "pool"),
    ),
    ForeignKey(
        "here it is hosts.min; each further host runs everstep agent --join",
        "nnodes num_nodes num_machines min_nodes",
        ("hosts.min",),
    ),
    ForeignKey(
        "the job numbers workers and hosts; where you start each host by hand, give --rank to everstep run",
        "node_rank machine_rank rank local_rank global_rank",
    ),
    ForeignKey(
        "give --listen ADDR:PORT to everstep run, and --join ADDR:PORT to everstep agent on other hosts",
        "master_addr master_port main_process_ip main_process_port init_method rdzv_endpoint rdzv_backend rdzv_id "
        "rdzv_conf rendezvous",
    ),
    ForeignKey(
        "give the names of the hosts to everstep launch ssh --hosts", "hostfile host_file machine_file nodelist"
    ),
    ForeignKey(
        "here it is device, or a device for each worker in map",
        "device_ids device_id cuda gpu gpu_id gpu_ids use_gpu use_cuda accelerator no_cuda use_cpu device_map",
        ("device", "map"),
    ),
    ForeignKey("here it is min_workers", "min_replica_size min_replicas min_world_size", ("min_workers",)),
    ForeignKey(
        "here it is max_restarts, of one worker within an hour",
        "max_failures max_retries num_retries restarts retries",
        ("max_restarts",),
    ),
    ForeignKey(
        "here it is quorum_wait_s for workers that are missing, hosts.wait_s for hosts",
        "join_timeout quorum_timeout quorum_timeout_ms rdzv_timeout last_call_timeout",
        ("quorum_wait_s", "hosts.wait_s"),
    ),
    ForeignKey(
        "here it is hang_limit_s for a worker that makes no progress, quorum_wait_s for workers that are missing",
        "timeout timeout_s timeout_seconds",
        ("hang_limit_s", "quorum_wait_s"),
    ),
    ForeignKey(
        "here it is hang_limit_s",
        "nccl_timeout ddp_timeout dist_timeout hang_timeout distributed_timeout_minutes",
        ("hang_limit_s",),
    ),
    ForeignKey(
        "a worker that dies is noticed at once, a silent one after heartbeat.floor_s to heartbeat.ceiling_s",
        "monitor_interval heartbeat_timeout heartbeat_timeout_ms",
        ("heartbeat.floor_s", "heartbeat.ceiling_s"),
    ),
    # ---- other kinds of parallelism
    ForeignKey(
        "here it is cell.tp, the processes of a worker that compute each lane together; cell.sp cuts the sequence, too",
        "tp tp_size tensor_parallel tensor_parallel_size tensor_parallel_degree tensor_model_parallel_size sp sp_size "
        "sequence_parallel sequence_parallel_size",
        ("cell.tp", "cell.sp"),
    ),
    ForeignKey(
        "here it is cell.hosts: hosts of each worker, which has cell.fsdp x cell.tp processes",
        "cell_nodes fsdp_nodes fsdp_hosts tp_nodes",
        ("cell.hosts", "cell.fsdp", "cell.tp"),
    ),
    ForeignKey(
        "a model is split by stages, into a pipeline, or by cell.tp",
        "cp cp_size context_parallel_size context_parallel_degree ep ep_size expert_parallel_size "
        "expert_model_parallel_size expert_parallel_degree",
        ("stages", "cell.tp"),
    ),
    ForeignKey(
        "zero.stage=1 divides the optimizer's state among workers, 2 gradients, too; cell.fsdp divides parameters "
        "among the processes of each worker",
        "zero_stage zero_optimization stage3 fsdp fsdp_config use_fsdp fully_shard sharding sharding_strategy "
        "deepspeed use_deepspeed auto_wrap_policy use_orig_params limit_all_gathers backward_prefetch "
        "distributed_optimizer use_distributed_optimizer",
        ("zero.stage", "cell.fsdp"),
    ),
    ForeignKey(
        "here it is zero.offload: cpu, or a folder for a file on disk",
        "cpu_offload offload offload_optimizer offload_optimizer_device",
        ("zero.offload",),
    ),
    ForeignKey(
        "here it is zero.offload_params=true, with a folder as zero.offload",
        "offload_param offload_param_device nvme_path",
        ("zero.offload_params", "zero.offload"),
    ),
    ForeignKey(
        "here it is stages (and pool, the workers of each)",
        "pp pp_size pipeline_parallel pipeline_parallel_size pipeline_parallel_degree pipeline_model_parallel_size "
        "num_stages n_stages pipeline_stages",
        ("stages", "pool"),
    ),
    ForeignKey(
        "here it is schedule",
        "pp_schedule pipeline_schedule pipeline_parallel_schedule schedule_type",
        ("schedule",),
    ),
    ForeignKey(
        "here it is chunks, parts of the model per stage",
        "virtual_pipeline_model_parallel_size num_virtual_stages interleave_factor",
        ("chunks",),
    ),
    ForeignKey("here it is cut", "balance partition_method split_points split_spec", ("cut",)),
    ForeignKey(
        "here it is recompute, in a job of several stages",
        "gradient_checkpointing gradient_checkpointing_enable activation_checkpointing activation_checkpoint_interval "
        "recompute_granularity recompute_activations checkpoint_activations",
        ("recompute",),
    ),
    # ---- checkpoints
    ForeignKey(
        "here it is checkpoint.disk.every_steps",
        "save_steps save_interval save_freq save_frequency save_every save_every_n_steps checkpoint_freq "
        "checkpoint_frequency checkpoint_every checkpointing_steps every_n_train_steps",
        ("checkpoint.disk.every_steps",),
    ),
    ForeignKey(
        "here it is checkpoint.disk.every_steps, or checkpoint.interval in seconds",
        "checkpoint_interval",
        ("checkpoint.disk.every_steps", "checkpoint.interval"),
    ),
    ForeignKey(
        "here it is checkpoint.disk.every_minutes",
        "train_time_interval save_every_n_minutes save_minutes",
        ("checkpoint.disk.every_minutes",),
    ),
    ForeignKey(
        "here it is checkpoint.disk.every_epochs, or checkpoint.disk.every_steps; one is taken at the end in any case",
        "save_strategy save_every_epochs every_n_epochs save_every_n_epochs save_epochs save_on_train_epoch_end "
        "save_last",
        ("checkpoint.disk.every_epochs", "checkpoint.disk.every_steps"),
    ),
    ForeignKey(
        "here it is checkpoint.disk.keep_last",
        "save_total_limit total_limit keep_last max_to_keep num_to_keep keep_checkpoints max_checkpoints",
        ("checkpoint.disk.keep_last",),
    ),
    ForeignKey(
        "here it is checkpoint.disk.keep_best, by checkpoint.best_metric",
        "save_top_k keep_best save_best save_best_only",
        ("checkpoint.disk.keep_best", "checkpoint.best_metric"),
    ),
    ForeignKey(
        "here it is checkpoint.best_metric for checkpoints, early_stop.metric for the end of a Task",
        "metric_for_best_model monitor load_best_model_at_end",
        ("checkpoint.best_metric", "early_stop.metric"),
    ),
    ForeignKey("here it is checkpoint.best_mode", "greater_is_better", ("checkpoint.best_mode",)),
    ForeignKey("here it is checkpoint.enabled", "enable_checkpointing", ("checkpoint.enabled",)),
    ForeignKey(
        "checkpoints are always written in the background",
        "async_save async_checkpoint save_async checkpoint_async",
    ),
    ForeignKey(
        "here it is checkpoint.disk.path",
        "checkpoint_dir checkpoint_path save_dir save_path ckpt_dir dirpath storage_path",
        ("checkpoint.disk.path",),
    ),
    ForeignKey(
        "a stopped job goes on when it is run again in its run directory; another checkpoint is resume_from "
        "(--resume-from of everstep run)",
        "resume auto_resume resume_from_checkpoint ckpt_path load_from load_checkpoint restore_from start_epoch "
        "start_step initial_epoch",
        ("resume_from",),
    ),
    ForeignKey(
        "here it is early_stop.patience, with early_stop.metric, for a Task; a loop of your own calls run.stop",
        "early_stopping early_stopping_patience patience",
        ("early_stop.patience", "early_stop.metric"),
    ),
    ForeignKey(
        "here it is early_stop.min_delta, for a Task",
        "early_stopping_threshold early_stopping_delta",
        ("early_stop.min_delta",),
    ),
    # ---- what a job writes and tells
    ForeignKey(
        "give --run-dir to everstep run, or join(run_dir=...)",
        "output_dir out_dir log_dir logging_dir run_dir work_dir default_root_dir project_dir",
    ),
    ForeignKey("give --fresh to everstep run", "overwrite_output_dir overwrite"),
    ForeignKey(
        "here it is sinks",
        "report_to logger loggers log_with wandb tensorboard mlflow use_wandb",
        ("sinks",),
    ),
    ForeignKey(
        "here it is sinks, with wandb among them; its own variables in the environment name the project",
        "wandb_project wandb_entity",
        ("sinks",),
    ),
    ForeignKey("here it is metrics.listen", "metrics_port prometheus_port", ("metrics.listen",)),
    ForeignKey("type everstep profile DIR while the job runs", "profiler profile use_profiler"),
    ForeignKey(
        "give --run-dir to everstep run; its name is that of the run in wandb, mlflow and the page",
        "run_name experiment_name wandb_name",
    ),
    ForeignKey(
        "call it in the loop after the batches, and give join(state=...) what it keeps",
        "ema ema_decay use_ema swa use_swa swa_lr callbacks callback",
    ),
    ForeignKey(
        "leave it out: each worker trains with the whole model, unless stages, zero.stage or cell.fsdp divide it",
        "strategy distributed_strategy use_distributed parallel_mode",
        ("stages", "zero.stage", "cell.fsdp"),
    ),
    ForeignKey("here it is steps, for a job that is tried out", "fast_dev_run limit_train_batches", ("steps",)),
)
"""The answers to names that other tools use."""

_ANSWERS = {name: foreign.answer for foreign in FOREIGN_KEYS for name in foreign.names.split()}


def known_elsewhere(name: str) -> str | None:
    """The key here for another tool's key, or how the same is done, as a clause; None if the name is not known.
    Case does not count, and dashes and dots are underscores."""
    return _ANSWERS.get(_plain(name))


def elsewhere_with(word: str) -> list[ForeignKey]:
    """The rows of which a name contains the word, written in any way that `known_elsewhere` takes."""
    return [foreign for foreign in FOREIGN_KEYS if any(_plain(word) in name for name in foreign.names.split())]


def _plain(name: str) -> str:
    return name.strip().lstrip("-").replace("-", "_").replace(".", "_").lower()
