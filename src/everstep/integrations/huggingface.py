"""`Trainer`: `transformers.Trainer`, whose training is a job. One import of a script changes, and nothing else.

What the class does apart from the loop is its own: arguments, optimizer, scheduler, collation, loss, callbacks, logs,
evaluation, files in the hub's format. Only the loop over updates is `everstep.join`, in the order of samples that a
Trainer has in one process.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from everstep.base.below import write_atomically
from everstep.base.errors import ConfigError, Misused
from everstep.base.given import read_given
from everstep.base.package_versions import refuse_versions
from everstep.data.batch import to_device
from everstep.exact.seeding import preserve_rng
from everstep.integrations.lane_loss import LaneLoss
from everstep.integrations.training_arguments import job_settings, lanes_of, refuse_arguments
from everstep.integrations.training_order import PresentSamples, TrainingOrder
from everstep.integrations.training_state import CarriedTraining, without_times
from everstep.script.foreign_trainers import one_process
from everstep.script.watched_life import IN_REHEARSAL
from everstep.train import join as joining
from everstep.train.precision import autocast
from everstep.train.run import Run, Step, gradient_norm_of, looking, view_of
from everstep.train.script_errors import say_in_one_line

one_process()
say_in_one_line()
refuse_versions("torch", "transformers", "accelerate")
try:
    _hf: Any = import_module("transformers")
    _files: Any = import_module("transformers.trainer_utils")
    _causal: Any = import_module("transformers.models.auto.modeling_auto")
    import_module("accelerate")
except ImportError as missing:
    raise ConfigError(
        f"everstep.integrations.huggingface: {missing.name or 'a package'} cannot be imported: "
        "pip install 'everstep[huggingface]'"
    ) from None

_LIFE = "everstep-"
_CHECKPOINT = re.compile(r"checkpoint-\d+")
_WRITER = "everstep_job"
_MOST_SAMPLES = 16
_BY_THE_JOB = (
    (
        ("training_step", "_prepare_context_parallel_inputs"),
        "a job computes the gradients of an update in lanes: put the loss into compute_loss",
    ),
    (
        (
            *("get_train_dataloader", "get_batch_samples", "_get_train_sampler", "_get_dataloader"),
            *("_inner_training_loop", "_run_epoch", "set_initial_training_values", "get_total_train_batch_size"),
        ),
        "a job deals its batches out itself: put the order into the dataset, and the sizes into TrainingArguments",
    ),
    (
        ("_clip_grad_norm", "_get_grad_norm"),
        "a job clips the gradient of an update itself: set max_grad_norm of TrainingArguments",
    ),
    (
        ("_wrap_model", "_prepare_for_training"),
        "a job takes the model, optimizer and schedule as they are: prepare them before Trainer(...), or in "
        "create_optimizer and create_scheduler",
    ),
    (
        (
            *("_init_training_state", "_load_rng_state", "_load_from_checkpoint", "_load_optimizer_and_scheduler"),
            *("_save_optimizer_and_scheduler", "_save_rng_state", "_save_scaler", "_load_scaler"),
            *("_load_callback_state", "_track_num_input_tokens"),
        ),
        "a job carries the state of the training, and heals it, itself: keep more of it in a callback",
    ),
    (
        ("_get_learning_rate",),
        "a job logs the rate of its optimizer: log another one in a callback",
    ),
    (
        ("floating_point_ops",),
        "a job does not count total_flos: log them in a callback",
    ),
)
_FEWER_OR_MORE = (
    "for more workers, raise gradient_accumulation_steps, and lower per_device_train_batch_size by the same factor"
)
_EVENTS_WITHIN = ("on_pre_optimizer_step", "on_optimizer_step", "on_substep_end")


class Trainer(_hf.Trainer):  # type: ignore[misc]
    """`transformers.Trainer`, with its arguments and methods. `train()` is a job: under `everstep run` on its workers,
    by itself on one, with the same bits.

    The global batch is per_device_train_batch_size x gradient_accumulation_steps, as on one device, whatever the
    number of workers; its lanes share it. The job goes on in its run directory; a script that is run by itself goes on
    with `train(resume_from_checkpoint=True)`.

    Raises: ConfigError for what cannot be honoured, with the argument's name.
    """

    state: Any
    control: Any
    lr_scheduler: Any
    _created_lr_scheduler: bool
    __everstep_carried__ = ("_tr_loss", "_total_loss_scalar", "_globalstep_last_logged")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        say_in_one_line()
        self._run: Run | None = None
        self._goes_on = self._writes = False
        given = kwargs.get("args", args[1] if len(args) > 1 else None)
        if given is not None:
            refuse_arguments(given)
        super().__init__(*args, **kwargs)
        self._refuse_overridden()

    def _refuse_overridden(self) -> None:
        for names, reason in _BY_THE_JOB:
            for name in names:
                if name in vars(self) or getattr(type(self), name, None) is not getattr(Trainer, name, None):
                    raise ConfigError(f"{type(self).__name__}.{name} would not be called, because {reason}")
        for callback in self.callback_handler.callbacks:
            for name in _EVENTS_WITHIN:
                if getattr(type(callback), name) is not getattr(_hf.TrainerCallback, name):
                    raise ConfigError(
                        f"{type(callback).__name__}.{name} would not be called, because an update is made in one go on "
                        "all workers: use on_step_end"
                    )

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        """Accelerate's own autocast would change the model; a lane has one of the job's."""
        return {**super()._build_accelerator_args(**kwargs), "mixed_precision": "no"}

    # ---- who this process is

    def is_world_process_zero(self) -> bool:
        """Whether this worker leads the job at the moment; before the first step, whether it probably will."""
        if self._run is None:
            return True
        leads, me = self._run.leads, view_of(self._run).link.me
        return (me.worker_id, me.incarnation) == (0, 0) if leads is None else bool(leads)

    def is_local_process_zero(self) -> bool:
        """As `is_world_process_zero`: a job has one leader."""
        return self.is_world_process_zero()

    # ---- training

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> Any:
        """Train, as `transformers.Trainer.train`. resume_from_checkpoint: whether a script that is run by itself
        goes on from its newest checkpoint (or that one's path); a job of `everstep run` goes on in its run directory.

        Raises: ConfigError.
        """
        if trial is not None:
            raise ConfigError(
                "train(trial=...) cannot be honoured: start one job per trial, with its values as arguments"
            )
        self._refuse_overridden()
        self._goes_on = bool(resume_from_checkpoint)
        if isinstance(resume_from_checkpoint, str | os.PathLike):
            self._refuse_older(Path(resume_from_checkpoint))
        return super().train(None, None, ignore_keys_for_eval)

    def _refuse_older(self, asked: Path) -> None:
        output = Path(self.args.output_dir)
        if joining.is_launched() and asked.resolve().parent == output.resolve() and _CHECKPOINT.fullmatch(asked.name):
            return  # other workers may have saved a newer one since the script asked, and removed this one
        newest = _files.get_last_checkpoint(self.args.output_dir) if os.path.isdir(self.args.output_dir) else None
        if newest is None or asked.resolve() != Path(newest).resolve():
            raise ConfigError(
                f"resume_from_checkpoint: expected True, or the newest checkpoint of output_dir ({newest}), got "
                f"{asked}: a checkpoint of another job is given to everstep run as --resume-from, and weights alone to "
                "from_pretrained"
            )

    def _refuse_unread(self, step: Step) -> None:
        """Raises: ConfigError if the script goes on from a checkpoint, and its job begins."""
        if step.number > 1 or not self._goes_on or self._job is None or IN_REHEARSAL in os.environ:
            return
        foreign = [path for path in self._checkpoints() if not self._wrote(path)]
        if foreign:
            raise ConfigError(
                f"resume_from_checkpoint: this job begins at step 1, and has not written {foreign[-1]}: continue the "
                "job that has (everstep run --resume-from), or leave it out or give another output_dir, and give "
                "weights alone to from_pretrained"
            )

    def _refuse_absent(self) -> None:
        """Raises: Misused if the leader is to load the best model, which lies on another host."""
        best = self.state.best_model_checkpoint if self.args.load_best_model_at_end else None
        if best is None or os.path.isdir(best) or IN_REHEARSAL in os.environ or not self.is_world_process_zero():
            return  # what another worker has is not saved
        raise Misused(
            f"load_best_model_at_end: the leader's host has no {best}: give an output_dir that all hosts share"
        )

    def _inner_training_loop(
        self,
        batch_size: int | None = None,
        args: Any = None,
        resume_from_checkpoint: str | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> Any:
        """The loop over updates, which `train` of transformers calls."""
        loader = self.get_train_dataloader()
        order = self._order(loader.dataset)
        self._begin_state(order)
        carried = CarriedTraining(self, order.seed)
        collate = lambda samples: to_device(loader.collate_fn(samples), self.args.device)  # noqa: E731
        passes = self.args.gradient_accumulation_steps
        loss = LaneLoss(self, self._spread_samples(order), collate, passes, self._shifts())
        self._run = run = self._join(loader, order, carried, loss.why)
        self._check_batch(run, order, loss.why)
        start = time.time()
        self.callback_handler.train_dataloader = loader
        self._update_roles()
        self.control = self.callback_handler.on_train_begin(self.args, self.state, self.control)
        if self.args.eval_on_start and not self.state.global_step:
            self._evaluate_first = True
        for step in run:
            self._refuse_unread(step)
            self._update_roles()
            self._before(step, order, ignore_keys_for_eval)
            for inputs in step:
                loss.backward(step, inputs, order.passes_of(step.number))
            self._after(step, order, carried, start, ignore_keys_for_eval)
        self._refuse_absent()
        return self._finish(order.global_batch * order.steps, start)

    def _finish(self, samples: int, start: float) -> Any:
        """What a training ends with. All but the best checkpoint are removed here if just one is to stay: transformers
        would do so in each worker, with those of other jobs."""
        limit, best = self.args.save_total_limit, self.state.best_model_checkpoint
        given: dict[str, Any] = self.args.__dict__
        given.update(save_total_limit=None)
        try:
            found = self._finalize_training(None, samples, start)
        finally:
            given.update(save_total_limit=limit)
        if limit == 1 and best is not None and IN_REHEARSAL not in os.environ and self.is_world_process_zero():
            for path in self._checkpoints():
                if path != Path(best) and (self._job is None or self._wrote(path)):
                    shutil.rmtree(path, ignore_errors=True)
        return found

    def _order(self, dataset: Any) -> TrainingOrder:
        """The samples of all updates. Raises: ConfigError for a stream."""
        args = self.args
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
            raise ConfigError(
                "train_dataset is read as a stream, whose order a Trainer does not fix: give a dataset with __len__ "
                "and __getitem__, or write the loop with everstep.join, which takes streams"
            )
        if not len(dataset):
            raise ConfigError("train_dataset has no samples: give one with at least one")
        shuffles = args.train_sampling_strategy == "random"
        seed = torch.initial_seed() if args.data_seed is None else args.data_seed  # as in accelerate
        order = TrainingOrder(
            dataset,
            args.per_device_train_batch_size,
            args.gradient_accumulation_steps,
            seed if shuffles else None,
            drop_last=args.dataloader_drop_last,
        )
        if not order.passes:
            raise ConfigError(
                f"train_dataset: expected at least {args.per_device_train_batch_size} samples (the batch size), with "
                f"dataloader_drop_last, got {len(dataset)}: lower per_device_train_batch_size"
            )
        epochs = math.ceil(args.num_train_epochs * order.per_epoch)
        order.end_after(args.max_steps if args.max_steps > 0 else epochs)
        return order

    def _begin_state(self, order: TrainingOrder) -> None:
        """A training that has not begun."""
        args = self.args
        stateful = [c for c in [*self.callback_handler.callbacks, self.control] if hasattr(c, "state")]
        self.state = _hf.TrainerState(stateful_callbacks=stateful)
        self.state.train_batch_size = args.per_device_train_batch_size
        self.state.compute_steps(args, order.steps)
        self.state.init_training_references(self, order.steps, -(-order.steps // order.per_epoch), None)
        self._tr_loss = torch.tensor(0.0, dtype=torch.float64)
        self._total_loss_scalar = 0.0
        self._globalstep_last_logged = self._initial_global_step = 0
        self._evaluate_first = False

    def _spread_samples(self, order: TrainingOrder) -> list[Any]:
        """Samples from all over the first epoch."""
        with preserve_rng():
            epoch = min(order.used, len(order))
            size = min(epoch, _MOST_SAMPLES)
            return [order[k * epoch // size] for k in range(size)]

    def _join(self, loader: Any, order: TrainingOrder, carried: CarriedTraining, why: str) -> Run:
        """The job's steps. why: why a lane has a whole forward pass, if it has. Raises: ConfigError."""
        args = self.args
        active = joining.active_workers()
        if why and active > args.gradient_accumulation_steps:
            raise ConfigError(f"workers: {self._too_many(why)}, got {active}: {_FEWER_OR_MORE}")
        if self._created_lr_scheduler:
            self.lr_scheduler, self._created_lr_scheduler = None, False
        self.create_optimizer()
        if callable(getattr(self.optimizer, "train", None)):
            raise ConfigError(
                f"optimizer: {type(self.optimizer).__name__} has modes (train() and eval()), which a job does not "
                "switch: give one without"
            )
        self.create_scheduler(order.steps, self.optimizer)
        for name in ("model", "optimizer", "lr_scheduler"):
            setattr(self.callback_handler, name, getattr(self, name))
        if self.model not in self.accelerator._models:  # else an evaluation keeps on the trainer how long that took
            self.accelerator._models.append(self.model)
        self.model.train()
        carried.begin()
        lanes = args.gradient_accumulation_steps if why else lanes_of(order.global_batch)
        data = DataLoader(
            order,
            batch_size=order.global_batch,
            collate_fn=PresentSamples(loader.collate_fn),
            num_workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory and args.device.type == "cuda",
        )
        return joining.join(
            self.model,
            self.optimizer,
            data,
            lanes=lanes,
            scheduler=self.lr_scheduler,
            state={"trainer": carried},
            run_dir=self._own_directory(),
            **job_settings(args, order.steps, order.per_epoch),
        )

    def _too_many(self, why: str) -> str:
        return f"expected at most {self.args.gradient_accumulation_steps} (gradient_accumulation_steps), because {why}"

    def _shifts(self) -> bool:
        """Whether the model predicts the next token, so that the first label of a row has no prediction."""
        model = self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model
        return type(model).__name__ in _causal.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()

    def _own_directory(self) -> Path | None:
        """Run directory of a script that is run by itself: the newest one below output_dir if it goes on, else another
        one. None without checkpoints. Raises: ConfigError if there is none to go on in."""
        if joining.is_launched() or self.args.save_strategy == "no":
            return None
        output = Path(self.args.output_dir)
        known = [int(p.name[len(_LIFE) :]) for p in output.glob(f"{_LIFE}*") if p.name[len(_LIFE) :].isdecimal()]
        if self._goes_on and not known:
            raise ConfigError(f"resume_from_checkpoint: there is no job to go on with in {output}: leave it out")
        return output / f"{_LIFE}{max(known) if self._goes_on else max(known, default=0) + 1}"

    def _check_batch(self, run: Run, order: TrainingOrder, why: str) -> None:
        """Raises: ConfigError if the user of the command has set what the arguments say."""
        config = view_of(run).config
        each = order.global_batch // self.args.gradient_accumulation_steps
        if config.lanes * config.micro_batch != order.global_batch:
            raise ConfigError(
                f"the global batch: expected {order.global_batch} samples (per_device_train_batch_size x "
                f"gradient_accumulation_steps), got {config.lanes * config.micro_batch}: leave --batch-size out, and "
                "set TrainingArguments"
            )
        if why and config.micro_batch != each:
            raise ConfigError(
                f"lanes: {self._too_many(why)}, got {config.lanes}: leave --set lanes out; {_FEWER_OR_MORE}"
            )
        if config.batch != "constant":
            raise ConfigError(
                f"batch: expected constant, because the order is a Trainer's, got {config.batch}: leave it out"
            )
        if run.total_steps > order.steps:
            raise ConfigError(
                f"steps: expected at most {order.steps}, where the schedule of the learning rate ends, got "
                f"{run.total_steps}: set max_steps or num_train_epochs of TrainingArguments"
            )

    # ---- one update

    def _update_roles(self) -> None:
        zero = self.is_world_process_zero()
        vars(self.state).update(is_world_process_zero=zero, is_local_process_zero=zero)

    def _before(self, step: Step, order: TrainingOrder, ignore_keys: list[str] | None) -> None:
        if self._evaluate_first and step.number == 1 and not step.done:
            self._evaluate_first = False
            self._evaluate(None, ignore_keys, skip_scheduler=True)
        if (step.number - 1) % order.per_epoch == 0:
            self.control = self.callback_handler.on_epoch_begin(self.args, self.state, self.control)
        self.control = self.callback_handler.on_step_begin(self.args, self.state, self.control)

    def _after(
        self, step: Step, order: TrainingOrder, carried: CarriedTraining, start: float, ignore_keys: list[str] | None
    ) -> None:
        self._tr_loss += step.loss
        rate = carried.next_rate()
        epoch, update = divmod(step.number - 1, order.per_epoch)
        done = min((update + 1) * self.args.gradient_accumulation_steps, order.passes)
        vars(self.state).update(global_step=step.number, epoch=epoch + done / order.passes)
        self.control = self.callback_handler.on_step_end(self.args, self.state, self.control)
        norm = gradient_norm_of(self._run) if self._run is not None else math.nan
        about = (None if math.isnan(norm) else norm, self.model, None, epoch, ignore_keys, start, rate)
        self._maybe_log_save_evaluate(self._tr_loss, *about)
        if update + 1 == order.per_epoch or self.control.should_training_stop or step.number == order.steps:
            self.control = self.callback_handler.on_epoch_end(self.args, self.state, self.control)
            self._maybe_log_save_evaluate(self._tr_loss, *about)
        if self.control.should_epoch_stop:
            raise Misused(
                "should_epoch_stop cannot be honoured: an epoch has all of its samples; use should_training_stop"
            )
        if self.control.should_training_stop and self._run is not None:
            self._run.stop()

    # ---- evaluation

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        """As of transformers, in the precision that is trained in."""
        precision = "bf16" if self.args.bf16 else "fp16" if self.args.fp16 else "fp32"
        with autocast(precision, self.args.device):
            return super().prediction_step(*args, **kwargs)

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        """As of transformers, in each worker for itself: the numbers do not depend on the number of workers, and
        `compute_metrics` gets all predictions."""
        if self._run is None:
            return super().evaluation_loop(dataloader, *args, **kwargs)
        with looking(self._run) as tick:
            return super().evaluation_loop(_Ticking(dataloader, tick), *args, **kwargs)

    # ---- what is told and written

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """As of transformers; numbers are also shown where those of the job are."""
        super().log(logs, start_time)
        run = self._run
        if run is None or joining.over():
            return
        numbers = {
            k: float(v) for k, v in without_times(logs).items() if isinstance(v, int | float) and math.isfinite(v)
        }
        if any(name.startswith("eval_") for name in numbers):
            run.report("evaluated", metrics=numbers)
        else:
            run.log(**numbers)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the model in the hub's format: the leader does it."""
        if self._run is None or self._writes or self.is_world_process_zero():
            super().save_model(output_dir, _internal_call)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Write checkpoint-N in the hub's format, once, even if workers die meanwhile. To go on, a job has
        checkpoints of its own."""
        folder = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
        if self.state.best_global_step == self.state.global_step:
            vars(self.state).update(best_model_checkpoint=str(folder))
        if self._run is None or IN_REHEARSAL in os.environ:
            return

        def write(_: Any) -> dict[str, Any]:
            draft = folder.with_name(f".{folder.name}.{os.getpid()}")
            self._writes = True
            try:
                self.save_model(str(draft), _internal_call=True)
            finally:
                self._writes = False
            self.state.save_to_json(str(draft / "trainer_state.json"))
            if self._job is not None:
                write_atomically(draft / _WRITER, self._job)
            if folder.exists():
                shutil.rmtree(folder)
            draft.rename(folder)
            self._rotate()
            return {"saved": 1}

        self._run.evaluate(write, [0], batch_size=1)

    def _rotate(self) -> None:
        """Remove the oldest checkpoints of this job beyond save_total_limit, not the best nor the newest one."""
        limit = self.args.save_total_limit
        if self._job is None:
            _files.rotate_checkpoints(
                output_dir=self.args.output_dir,
                save_total_limit=limit,
                best_model_checkpoint=self.state.best_model_checkpoint,
                use_mtime=True,
            )
        elif limit is not None and limit > 0:
            own = [path for path in self._checkpoints(use_mtime=True) if self._wrote(path)]
            best = self.state.best_model_checkpoint
            spare = [path for path in own[:-1] if best is None or path != Path(best)]
            for path in spare[: max(0, len(own) - limit)]:
                shutil.rmtree(path, ignore_errors=True)

    @property
    def _job(self) -> str | None:
        """What names the job of `everstep run`; None in a script that is run by itself."""
        created = None if self._run is None else view_of(self._run).link.job.get("created_unix_ns")
        return None if created is None else str(created)

    def _checkpoints(self, use_mtime: bool = False) -> list[Path]:
        """checkpoint-N of output_dir, the oldest first."""
        found = map(Path, _files.sort_checkpoints(self.args.output_dir, use_mtime=use_mtime))
        return [path for path in found if _CHECKPOINT.fullmatch(path.name)]

    def _wrote(self, checkpoint: Path) -> bool:
        try:
            return self._job is not None and read_given(checkpoint / _WRITER) == self._job.encode()
        except OSError:
            return False


class _Ticking:
    """A data loader whose batches are counted as progress. tick: called for each."""

    def __init__(self, loader: Any, tick: Any) -> None:
        self._loader, self._tick = loader, tick

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Any:
        for batch in self._loader:
            self._tick()
            yield batch
