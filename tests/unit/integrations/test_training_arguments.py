"""Arguments of a `transformers.Trainer`: honoured as config keys, or refused by name; defaults never are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from everstep.base.errors import ConfigError, Misused  # noqa: E402
from everstep.integrations.training_arguments import (  # noqa: E402
    REFUSED,
    job_settings,
    lanes_of,
    refuse_arguments,
)
from everstep.integrations.training_order import Absent, PresentSamples, TrainingOrder  # noqa: E402
from everstep.integrations.training_state import CarriedTraining  # noqa: E402


def arguments(folder: Path, **given: Any) -> Any:
    return transformers.TrainingArguments(str(folder), use_cpu=True, **given)


def test_defaults_are_never_refused(tmp_path: Path) -> None:
    refuse_arguments(arguments(tmp_path))
    names = transformers.TrainingArguments.__dataclass_fields__
    assert set(REFUSED) <= set(names)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"torch_compile": True}, "model.compile"),
        ({"ddp_find_unused_parameters": False}, "DistributedDataParallel"),
        ({"ddp_timeout": 7}, "ddp_timeout=7"),
        ({"push_to_hub": True}, "save_model"),
        ({"report_to": ["tensorboard"]}, "sinks"),
        ({"train_sampling_strategy": "group_by_length"}, "sequential"),
        ({"optim": "lion_32bit"}, "optimizers=(optimizer, None)"),
        ({"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "epoch"}, "counts steps"),
        ({"auto_find_batch_size": True}, "per_device_train_batch_size"),
        ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha"),
        ({"include_num_input_tokens_seen": True}, "samples"),
        ({"accelerator_config": {"split_batches": True}}, "accelerator_config.split_batches"),
        ({"accelerator_config": {"use_seedable_sampler": False}}, "use_seedable_sampler"),
        ({"ignore_data_skip": True}, "ignore_data_skip"),
        ({"per_device_train_batch_size": 0}, "at least 1"),
        ({"debug": "underflow_overflow"}, "on_nonfinite"),
    ],
)
def test_refused_by_name(tmp_path: Path, given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        refuse_arguments(arguments(tmp_path, **given))
    said = str(refused.value)
    assert next(iter(given)).split(".")[0] in said and words in said and "\n" not in said


def test_config_that_follows(tmp_path: Path) -> None:
    assert job_settings(arguments(tmp_path), 100, 10) == {
        "steps": 100,
        "seed": 42,
        "clip_norm": 1.0,
        "checkpoint.disk.every_steps": 500,
    }
    more = arguments(tmp_path, save_strategy="epoch", save_total_limit=3, max_grad_norm=0.0, bf16=True, seed=5)
    assert job_settings(more, 100, 10) == {
        "steps": 100,
        "seed": 5,
        "precision": "bf16",
        "checkpoint.disk.every_steps": 10,
        "checkpoint.disk.keep_last": 3,
    }
    ahead = arguments(tmp_path, dataloader_prefetch_factor=3, dataloader_num_workers=1)
    assert job_settings(ahead, 9, 3)["loader.prefetch"] == 3
    assert job_settings(arguments(tmp_path, save_steps=0.25), 10, 10)["checkpoint.disk.every_steps"] == 3
    assert "checkpoint.disk.every_steps" not in job_settings(arguments(tmp_path, save_strategy="no"), 9, 3)


@pytest.mark.parametrize(("batch", "lanes"), [(8, 8), (4, 4), (12, 6), (7, 7), (11, 1), (64, 8), (1, 1)])
def test_lanes_divide_the_batch(batch: int, lanes: int) -> None:
    assert lanes_of(batch) == lanes


def test_order_without_shuffling_has_short_last_batches() -> None:
    order = TrainingOrder(list(range(10)), 2, 3, None)
    order.end_after(4)
    assert (order.passes, order.per_epoch, len(order)) == (5, 2, 24)
    rows = [[order[p] for p in range(k, k + 6)] for k in range(0, 24, 6)]
    assert rows[0] == rows[2] == [0, 1, 2, 3, 4, 5]
    assert rows[1] == rows[3] == [6, 7, 8, 9, Absent, Absent]
    assert [order.passes_of(step) for step in (1, 2, 3, 4)] == [3, 2, 3, 2]
    assert PresentSamples(sum)(rows[1]) == 30
    assert PresentSamples(sum)([Absent]) == {}


def test_order_is_that_of_accelerate() -> None:
    from accelerate.data_loader import SeedableRandomSampler

    data = list(range(23))
    sampler = SeedableRandomSampler(data, data_seed=9)
    order = TrainingOrder(data, 4, 1, 9, drop_last=True)
    order.end_after(3 * order.per_epoch)
    assert order.per_epoch == 5
    for epoch in range(3):
        sampler.set_epoch(epoch)
        assert [order[p] for p in range(20 * epoch, 20 * epoch + 20)] == list(sampler)[:20]


def test_a_method_that_is_set_on_the_trainer_itself_is_refused(tmp_path: Path) -> None:
    from everstep.integrations.huggingface import Trainer

    trainer = Trainer(model=torch.nn.Linear(2, 2), args=arguments(tmp_path), train_dataset=[{"x": 0}])
    vars(trainer).update(training_step=lambda *given: None)
    with pytest.raises(ConfigError, match="training_step would not be called"):
        trainer.train()


def test_other_overrides_are_refused(tmp_path: Path) -> None:
    from everstep.integrations.huggingface import Trainer

    class Early(transformers.TrainerCallback):  # type: ignore[misc]
        def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            pass

    model, args = torch.nn.Linear(2, 2), arguments(tmp_path)
    names = (
        *("training_step", "_get_train_sampler", "_inner_training_loop", "_clip_grad_norm", "_load_callback_state"),
        *("_save_optimizer_and_scheduler", "_save_rng_state", "_save_scaler", "_load_scaler", "_get_learning_rate"),
        "floating_point_ops",
    )
    for name in names:
        kind = type("Mine", (Trainer,), {name: lambda self, *given: None})
        with pytest.raises(ConfigError, match=f"{name} would not be called"):
            kind(model=model, args=args)
    with pytest.raises(ConfigError, match="use on_step_end"):
        Trainer(model=model, args=args, callbacks=[Early()])
    with pytest.raises(ConfigError, match="read as a stream"):
        Trainer(model=model, args=arguments(tmp_path, max_steps=2), train_dataset=Streamed()).train()


def test_an_optimizer_with_modes_is_refused(tmp_path: Path) -> None:
    from everstep.integrations.huggingface import Trainer

    class Averages(torch.optim.SGD):
        def train(self) -> None:
            pass

    model = Pairs(1, 1)
    row = {"x": torch.zeros(1), "labels": torch.zeros(1)}
    optimizers = Averages(model.parameters(), lr=0.1), None
    trainer = Trainer(model=model, args=arguments(tmp_path), train_dataset=[row] * 8, optimizers=optimizers)
    with pytest.raises(ConfigError, match="Averages has modes"):
        trainer.train()


class Pairs(torch.nn.Linear):
    def forward(self, x: Any, labels: Any) -> Any:
        return {"loss": (super().forward(x) - labels).square().mean()}


def test_a_best_model_that_another_host_has_is_not_replaced_by_the_last_one(tmp_path: Path) -> None:
    from everstep.integrations.huggingface import Trainer

    class Elsewhere(transformers.TrainerCallback):  # type: ignore[misc]
        def on_save(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            if state.best_global_step == state.global_step:
                Path(state.best_model_checkpoint).rename(tmp_path / "elsewhere")

    often = {"eval_strategy": "steps", "eval_steps": 2, "save_steps": 2, "max_steps": 2}
    args = arguments(tmp_path / "out", load_best_model_at_end=True, disable_tqdm=True, **often)
    rows = [{"x": torch.zeros(1), "labels": torch.zeros(1)}] * 8
    data = {"train_dataset": rows, "eval_dataset": rows}
    trainer = Trainer(model=Pairs(1, 1), args=args, callbacks=[Elsewhere()], **data)
    with pytest.raises(Misused, match="an output_dir that all hosts share"):
        trainer.train()
    vars(trainer).update(is_world_process_zero=lambda: False)
    trainer._refuse_absent()
    trainer.save_model(str(tmp_path / "hub"), _internal_call=True)  # as in push_to_hub
    assert not (tmp_path / "hub").exists()


class Patient(transformers.EarlyStoppingCallback):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__(early_stopping_patience=2)
        self.seen: list[float] = []


def test_a_callback_derived_from_one_of_transformers_keeps_what_both_keep(tmp_path: Path) -> None:
    from everstep.integrations.huggingface import Trainer

    def carried(*callbacks: Any) -> CarriedTraining:
        trainer = Trainer(model=torch.nn.Linear(2, 2), args=arguments(tmp_path), callbacks=list(callbacks))
        vars(trainer).update(_tr_loss=torch.tensor(0.0), _total_loss_scalar=0.0, _globalstep_last_logged=0)
        return CarriedTraining(trainer, seed=None)

    trained, resumed = Patient(), Patient()
    trained.early_stopping_patience_counter = 1
    trained.seen.append(0.5)
    carried(resumed).load_state_dict(carried(trained).state_dict())
    assert (resumed.early_stopping_patience_counter, resumed.seen) == (1, [0.5])

    class Seen(transformers.TrainerCallback):  # type: ignore[misc]
        seen: tuple[float, ...] = ()

    shows = transformers.PrinterCallback
    saved, other = carried(trained, shows()).state_dict(), Seen()
    for given in ((other, shows()), (Patient(),)):
        with pytest.raises(ConfigError, match=r"expected .*Patient, .*whose state the job has, got "):
            carried(*given).load_state_dict(saved)
    assert not vars(other)
    carried(Patient(), transformers.ProgressCallback()).load_state_dict(saved)
    del saved["kinds"]  # as in older checkpoints
    carried(Patient(), shows()).load_state_dict(saved)


def test_at_the_end_only_the_job_s_own_checkpoints_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not by transformers, which would do it in each worker."""
    from everstep.integrations import huggingface

    args = arguments(tmp_path, save_total_limit=1)
    trainer = huggingface.Trainer(model=torch.nn.Linear(2, 2), args=args)
    monkeypatch.setattr(huggingface.Trainer, "_job", "job")
    folders = [Path(args.output_dir) / f"checkpoint-{k}" for k in (1, 2, 3)]
    for folder, job in zip(folders, ("job", "job", "another"), strict=True):
        folder.mkdir(parents=True)
        (folder / huggingface._WRITER).write_text(job)
    vars(trainer.state).update(best_model_checkpoint=str(folders[0]))
    limits = []
    vars(trainer).update(_finalize_training=lambda *given: limits.append(args.save_total_limit))
    trainer._finish(8, 0.0)
    assert limits == [None] and args.save_total_limit == 1
    assert [folder.exists() for folder in folders] == [True, False, True]


class Streamed(torch.utils.data.IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(3))
