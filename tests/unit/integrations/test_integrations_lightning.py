"""Lightning's arguments and modules, as a job takes or refuses them; nothing is trained."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import everstep.integrations.lightning as front
from everstep.base.config import Config
from everstep.base.errors import ConfigError, TaskError
from everstep.base.plan import WorkerKey
from everstep.integrations.accelerate import Accelerator
from everstep.integrations.lightning_loop import Epochs, EpochValues, step_schedulers, stopping
from everstep.integrations.lightning_module import (
    ModuleLog,
    evaluated,
    optimizer_and_schedulers,
    refuse_data_hooks,
    refuse_hooks,
    training_loader,
)
from everstep.integrations.lightning_options import trainer_options
from everstep.script.loop_values import state
from everstep.script.watched_life import IN_REHEARSAL
from everstep.train.join import device_for


class Plain(lightning.LightningModule):
    def __init__(self, returned: Any = None) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        self.returned = returned

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layer(batch).sum()

    def configure_optimizers(self) -> Any:
        return self.returned(self) if self.returned else torch.optim.SGD(self.parameters(), lr=1.0)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"strategy": "ddp"}, r"Trainer\(strategy='ddp'\) is not carried: workers share"),
        ({"devices": 4}, "everstep run SCRIPT --workers N"),
        ({"devices": True}, r"devices=True"),
        ({"num_nodes": 2}, "everstep agent"),
        ({"precision": "64-true"}, "'16-mixed' or 'bf16-mixed'"),
        ({"precision": [16]}, r"precision=\[16\]"),
        ({"plugins": []}, "plugins"),
        ({"max_epoch": 3}, "did you mean max_epochs"),
        ({"colour": "red"}, "no such argument"),
        ({"max_epochs": 0}, "at least 1"),
        ({"max_epochs": -1}, "a job has a last step"),
        ({"max_epochs": 2.5}, "whole number"),
        ({"max_steps": 0}, "at least 1"),
        ({"accumulate_grad_batches": 0}, "at least 1"),
        ({"accumulate_grad_batches": None}, "at least 1"),
        ({"gradient_clip_val": "much"}, "a positive number"),
        ({"gradient_clip_val": 1.0, "gradient_clip_algorithm": "l1"}, "'norm' or 'value'"),
        ({"val_check_interval": 1.5}, "share of an epoch"),
        ({"val_check_interval": 0.5, "check_val_every_n_epoch": None}, "give a number of batches"),
        ({"limit_train_batches": 0}, "limit_train_batches=0"),
        ({"accelerator": "tpu"}, "'cpu' or 'gpu'"),
        ({"max_time": "00:01:00:00"}, "a clock differs"),
    ],
)
def test_arguments_that_are_refused_by_name(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        trainer_options(given)


def test_arguments_that_are_honoured() -> None:
    told = trainer_options(
        {"max_steps": 7, "max_epochs": -1, "gradient_clip_val": 2, "gradient_clip_algorithm": "value"}
        | {"precision": "bf16-mixed", "accelerator": "cpu", "accumulate_grad_batches": 3, "limit_val_batches": 0}
        | {"strategy": "auto", "devices": 1, "logger": False, "deterministic": True, "check_val_every_n_epoch": 2}
    )
    assert (told.epochs, told.steps, told.accumulate, told.every_epochs) == (None, 7, 3, 2)
    assert told.settings == {"clip_value": 2.0, "precision": "bf16", "device": "cpu"}
    assert told.limits == {"train": None, "val": 0, "test": None}
    assert trainer_options({}).epochs == 1000


def test_all_of_lightnings_arguments_are_known() -> None:
    import inspect

    for name, parameter in inspect.signature(lightning.Trainer.__init__).parameters.items():
        if name != "self":
            trainer_options({"max_epochs": 1, name: parameter.default})


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("on_train_batch_end", "on one worker's part of a batch"),
        ("optimizer_step", "the update is the job's own"),
        ("on_validation_epoch_end", "none has all outputs"),
        ("configure_callbacks", "to the Trainer"),
    ],
)
def test_hooks_that_are_refused_by_name(name: str, said: str) -> None:
    kind = type("Own", (Plain,), {name: lambda self, *args: None})
    with pytest.raises(ConfigError, match=rf"Own\.{name} is not called here.*{said}"):
        refuse_hooks(kind())


def test_modules_that_are_refused() -> None:
    refuse_hooks(Plain())
    manual = Plain()
    manual.automatic_optimization = False
    with pytest.raises(ConfigError, match="automatic_optimization=False"):
        refuse_hooks(manual)
    with pytest.raises(ConfigError, match="expected a LightningModule, got Linear"):
        refuse_hooks(torch.nn.Linear(1, 1))
    with pytest.raises(ConfigError, match="LightningModule has no training_step"):
        refuse_hooks(lightning.LightningModule())


@pytest.mark.parametrize("name", ["transfer_batch_to_device", "on_before_batch_transfer", "on_after_batch_transfer"])
def test_hooks_of_data_that_are_refused_by_name(name: str) -> None:
    """In fit before anything is prepared, and in test of other data."""
    prepared: list[str] = []
    methods = {name: lambda self, batch, *args: batch, "prepare_data": lambda self: prepared.append("data")}
    data = type("Own", (lightning.LightningDataModule,), methods)()
    with pytest.raises(ConfigError, match=rf"Own\.{name} is not called here: write it into collate_fn"):
        front.Trainer(max_steps=1).fit(Plain(), datamodule=data)
    assert not prepared
    trainer, plain = fitted(Plain())
    with pytest.raises(ConfigError, match=rf"Own\.{name} is not called here"):
        trainer.test(plain, datamodule=data)


class Told(Plain):
    """Notes which of its hooks are called."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[str] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", 1.0)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.told.append("test_step")
        self.log("test", 2.0)

    def on_validation_start(self) -> None:
        self.told.append("on_validation_start")

    def on_validation_epoch_start(self) -> None:
        self.told.append("on_validation_epoch_start")

    def on_test_start(self) -> None:
        self.told.append("on_test_start")

    def on_test_epoch_start(self) -> None:
        self.told.append("on_test_epoch_start")
        self.log("begun", 3.0)

    def on_fit_end(self) -> None:
        self.told.append("on_fit_end")

    def teardown(self, stage: str) -> None:
        self.told.append(f"teardown {stage}")


class Data(lightning.LightningDataModule):
    """As many are: with methods that have nothing to do, and names that are hooks of modules alone."""

    def __init__(self, told: list[str]) -> None:
        super().__init__()
        self.told = told

    def prepare_data(self) -> None: ...

    def setup(self, stage: str) -> None:
        self.told.append(f"data setup {stage}")

    def train_dataloader(self) -> Any:
        return DataLoader(torch.zeros(8, 2), batch_size=4)  # type: ignore[arg-type]

    def val_dataloader(self) -> Any:
        return self.train_dataloader()

    test_dataloader = val_dataloader

    def teardown(self, stage: str) -> None:
        self.told.append(f"data teardown {stage}")

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None: ...

    def on_exception(self, exception: BaseException) -> None: ...

    def on_train_batch_end(self) -> None: ...

    def backward(self) -> None: ...


def fitted(module: Plain, datamodule: Any = None, **arguments: Any) -> tuple[front.Trainer, Plain]:
    data = None if datamodule else DataLoader(torch.zeros(8, 2), batch_size=4)  # type: ignore[arg-type]
    trainer = front.Trainer(**{"max_steps": 2, "limit_val_batches": 0, **arguments})
    trainer.fit(module, data, datamodule=datamodule)
    return trainer, module


def test_hooks_at_the_ends_of_fit_and_test_and_validate(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Told()
    data = Data(module.told)
    refuse_data_hooks(data)

    trainer, _ = fitted(module, data, limit_val_batches=1.0)
    begun = ["on_validation_start", "on_validation_epoch_start"]
    assert module.told == ["data setup fit", *begun, "on_fit_end", "data teardown fit", "teardown fit"]
    module.told.clear()
    assert trainer.test(verbose=False) == [{"begun": 3.0, "test": 2.0}]
    assert module.told[:3] == ["data setup test", "on_test_start", "on_test_epoch_start"]
    assert module.told[3] == "test_step" and module.told[-1] == "data teardown test"
    module.told.clear()
    assert trainer.validate(dataloaders=data.val_dataloader(), verbose=False) == [{"val": 1.0}]
    assert module.told == begun
    monkeypatch.setenv(IN_REHEARSAL, "a")
    rehearsed = Told()
    fitted(rehearsed)
    assert rehearsed.told == ["on_fit_end"]


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_the_checkpoint_that_a_fit_leaves(stage: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = {"zero": {"stage": stage}, "rehearse": False}
    _, module = fitted(Plain(), run_dir=tmp_path / "run", config=settings)
    found = torch.load(tmp_path / "run" / "lightning.ckpt", weights_only=True)
    assert torch.equal(found["state_dict"]["layer.weight"], module.layer.weight)
    assert ("optimizer_states" in found) == (stage == 0)
    assert ("has the weights alone" in caplog.text) == (stage > 0)
    assert Plain.load_from_checkpoint(tmp_path / "run" / "lightning.ckpt").layer.weight.equal(module.layer.weight)


def test_a_checkpoint_that_cannot_be_left_ends_no_fit(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Fails(Plain):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            raise KeyError("ema")

    trainer, _ = fitted(Fails(), run_dir=tmp_path / "run", config={"rehearse": False})
    assert "lightning.ckpt is not written: KeyError: 'ema'" in caplog.text
    with pytest.raises(KeyError):
        trainer.save_checkpoint(tmp_path / "own.ckpt")


def test_the_device_that_config_names_comes_before_the_accelerator() -> None:
    trainer, module = fitted(Plain(), accelerator="gpu", config={"device": "cpu"})
    assert trainer.global_step == 2 and module.layer.weight.device.type == "cpu"
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="sees no CUDA device: --set device=cpu"):
            fitted(Plain(), accelerator="gpu")


@pytest.mark.parametrize(
    ("own", "device", "explicit", "found"),
    [
        (None, "cpu", [], "cpu"),
        ("cuda", "cpu", [], "cuda"),
        ("cuda", "cpu", ["device"], "cpu"),
        ("cpu", "cuda:1", ["device"], "cuda:1"),
        (None, "cuda", ["device"], "cuda"),
    ],
)
def test_the_device_that_the_command_names_comes_first(
    own: str | None, device: str, explicit: list[str], found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = SimpleNamespace(config=Config(device=device), job={"explicit": explicit}, me=WorkerKey(0, 0))
    assert device_for(own) == (own or "cpu")
    monkeypatch.setattr("everstep.train.join._launched", link)
    assert device_for(own) == found


def test_the_forms_of_configure_optimizers() -> None:
    def rates(module: Plain) -> Any:
        optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    optimizer, configs = optimizer_and_schedulers(Plain(rates))
    assert isinstance(optimizer, torch.optim.SGD)
    assert [(one.interval, one.frequency, one.reduce_on_plateau) for one in configs] == [("epoch", 1, False)]
    assert optimizer_and_schedulers(Plain())[1] == []
    for returned, said in (
        (lambda m: [torch.optim.SGD(m.parameters(), lr=1.0)] * 2, "returned 2 optimizers"),
        (lambda m: "sgd", "Unknown configuration"),
        (lambda m: None, "returned None"),
    ):
        with pytest.raises(ConfigError, match=said):
            optimizer_and_schedulers(Plain(returned))


def test_loaders_that_are_cut_as_lightning_does() -> None:
    data = TensorDataset(torch.arange(10))
    assert len(training_loader(DataLoader(data, batch_size=4, drop_last=True), None).dataset) == 8
    assert len(training_loader(DataLoader(data, batch_size=4), 0.5).dataset) == 4
    assert len(training_loader(DataLoader(data, batch_size=4), 9).dataset) == 10
    with pytest.raises(ConfigError, match="limit_train_batches=2"):
        training_loader(DataLoader(data, batch_size=4, shuffle=True), 2)
    with pytest.raises(ConfigError, match="got list"):
        training_loader([data], None)
    dataset, collate, each = evaluated(DataLoader(data, batch_size=4), None, "val")
    number, batch = collate([dataset[i] for i in range(8, 10)])
    assert (number, batch[0].tolist(), each, len(dataset)) == (2, [8, 9], 4, 10)
    with pytest.raises(ConfigError, match="one DataLoader"):
        evaluated([1, 2], None, "val")


def test_epochs_that_end_inside_a_step() -> None:
    epochs = Epochs(size=10, batch=4, accumulate=1)
    assert [epochs.of(step) for step in range(1, 9)] == [0, 0, 0, 1, 1, 2, 2, 2]
    assert [step for step in range(1, 9) if epochs.ends(step)] == [3, 5, 8]
    assert [step for step in range(1, 9) if epochs.begins(step)] == [1, 4, 6]
    assert [step for step in range(1, 9) if epochs.due(step, 1.0, 2, epochs.ends(step))] == [5]
    twice = Epochs(size=16, batch=4, accumulate=2)
    assert [step for step in range(1, 9) if twice.due(step, 0.5, 1, twice.ends(step))] == [2, 4, 6, 8]
    assert [step for step in range(1, 9) if twice.due(step, 6, None, twice.ends(step))] == [3, 6]


def test_values_of_an_epoch_and_what_goes_by_them() -> None:
    values = EpochValues(state(metrics={}, sums={}))
    values.add({"loss_step": 1.0, "rate": 3.0}, 4)
    values.add({"loss_step": 4.0}, 2)
    assert values.close() == {"loss_epoch": 2.0}
    assert values.metrics == {"loss_step": 4.0, "rate": 3.0, "loss": 2.0, "loss_epoch": 2.0}
    with pytest.raises(ConfigError, match=r"monitor='other'.*loss_epoch"):
        values.newest("other")
    assert values.newest("other", strict=False) is None
    seen: list[Any] = []
    one = SimpleNamespace(interval="epoch", frequency=2, reduce_on_plateau=True, monitor="loss", strict=True)
    one.scheduler = SimpleNamespace(step=seen.append)
    for step in range(1, 5):
        step_schedulers([one], Epochs(4, 4, 1), step, True, values)
        step_schedulers([one], Epochs(4, 4, 1), step, True, None)
    assert seen == [2.0, 2.0]
    rule = stopping(lightning.pytorch.callbacks.EarlyStopping("loss", patience=1))
    assert [rule.asked(lambda *asked: 1.0) for _ in range(2)] == [False, True]
    with pytest.raises(ConfigError, match="ModelCheckpoint is not carried: the job takes checkpoints"):
        stopping(lightning.pytorch.callbacks.ModelCheckpoint())


def test_what_a_module_logs() -> None:
    told: dict[str, Any] = {}
    log, step = ModuleLog(), SimpleNamespace(log=told.update)
    with log.training(step, (torch.zeros(4, 2),)):  # type: ignore[arg-type]
        log.log("loss", torch.tensor(2.0), on_epoch=True)
        log.log("rate", 0.5, batch_size=1)
    assert told == {"loss_step": (8.0, 4), "rate": (0.5, 1)}
    with log.evaluating((torch.zeros(3, 2),)) as found:
        log.log("val", 2)
    assert found["val"].tolist() == [6.0, 3.0]
    log.log("hook", 1.5)
    assert log.numbers == {"hook": 1.5}
    with pytest.raises(TaskError, match="reduce_fx"):
        log.log("sum", 1.0, reduce_fx="sum")
    with pytest.raises(TaskError, match="got list"):
        log.log("many", [1.0])


def test_a_trainer_before_it_fits() -> None:
    trainer = front.Trainer(max_epochs=3, callbacks=lightning.pytorch.callbacks.TQDMProgressBar())
    assert (trainer.current_epoch, trainer.global_step, trainer.max_epochs, trainer.max_steps) == (0, 0, 3, -1)
    assert front.LightningModule is lightning.LightningModule
    with pytest.raises(AttributeError, match=r"trainer\.strategy is not carried"):
        trainer.strategy  # noqa: B018
    for call in (trainer.validate, trainer.test, lambda: trainer.save_checkpoint("x.ckpt")):
        with pytest.raises(ConfigError, match="after fit"):
            call()
    with pytest.raises(ConfigError, match="ckpt_path"):
        trainer.fit(Plain(), ckpt_path="x.ckpt")


def test_an_accelerator_says_what_to_write() -> None:
    with pytest.raises(ConfigError, match=r"everstep\.join\(.*accumulate=4, precision='bf16'") as refusal:
        Accelerator(mixed_precision="bf16", gradient_accumulation_steps=4)
    assert "\n" not in str(refusal.value)


def test_what_a_step_method_is_given() -> None:
    class Steps:
        def alone(self, batch: Any) -> None: ...

        def both(self, batch: Any, batch_idx: int) -> None: ...

        def more(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None: ...

        def rest(self, batch: Any, *rest: Any) -> None: ...

        decorated = torch.no_grad()(both)

    steps = Steps()
    given = {name: front._arguments(getattr(steps, name), "batch", 3) for name in vars(Steps) if name[0] != "_"}
    assert given.pop("alone") == ("batch",)
    assert set(given.values()) == {("batch", 3)} and len(given) == 4
