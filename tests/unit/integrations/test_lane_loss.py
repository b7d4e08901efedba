"""Losses of a `transformers.Trainer` that lanes can add up, and those that need a whole forward pass."""

from __future__ import annotations

import sys
from collections import OrderedDict, defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from everstep.integrations.lane_loss import LaneLoss, _containers


class Weighs(Trainer):
    """Classes have weights, so a mean is one over the weights."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        labels = inputs.pop("labels")
        out = model(**inputs)
        loss = functional.cross_entropy(out.logits, labels, weight=torch.tensor([1.0, 3.0]))
        return (loss, out) if return_outputs else loss


class Unmasked(Trainer):
    """The model looks at what fills rows up."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **more: Any) -> Any:
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        return super().compute_loss(model, inputs, return_outputs, **more)


@pytest.mark.parametrize(
    ("kind", "labels", "whole"),
    [
        (Trainer, [0, 1, 1, 0, 0, 1], False),
        (Weighs, [0, 1, 1, 0, 0, 1], True),
        (Weighs, [0, 0, 0, 0, 0, 0], True),  # a rare class, which no sample of these has
        (Unmasked, [0, 1, 1, 0, 0, 1], True),
    ],
)
def test_a_loss_that_is_no_mean_over_samples_needs_the_whole_batch(
    tmp_path: Path, kind: Any, labels: list[int], whole: bool
) -> None:
    assert lane_loss(made(tmp_path, kind), labels).whole is whole


def test_a_mean_over_unmasked_items_needs_the_whole_batch(tmp_path: Path) -> None:
    class Tagger(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Embedding(11, 11)

        def forward(self, input_ids: Any, labels: Any, attention_mask: Any) -> Any:
            losses = functional.cross_entropy(self.table(input_ids).mT, input_ids, reduction="none")
            return {"loss": losses[input_ids > 0].mean()}

    model = Tagger()
    torch.nn.init.zeros_(model.table.weight)  # all rows have the same loss, but not the same gradient
    trainer = Trainer(model=model, args=TrainingArguments(str(tmp_path), use_cpu=True, report_to=[]))
    assert lane_loss(trainer, [0, 1, 1, 0, 0, 1]).whole


def test_a_model_that_normalises_over_a_batch_needs_the_whole_of_it(tmp_path: Path) -> None:
    trainer = made(tmp_path, Trainer)
    trainer.model.classifier = torch.nn.Sequential(torch.nn.BatchNorm1d(8), trainer.model.classifier)
    assert lane_loss(trainer, [0, 1, 1, 0, 0, 1]).whole


def test_a_random_collation_does_not_need_the_whole_batch(tmp_path: Path) -> None:
    def masked(samples: Any) -> Any:
        batch = filled(samples)
        return {**batch, "input_ids": torch.where(torch.rand(batch["input_ids"].shape) < 0.5, 3, batch["input_ids"])}

    assert not lane_loss(made(tmp_path, Trainer), [0, 1, 1, 0, 0, 1], masked).whole


class Aside(torch.nn.Module):
    """A model of 10 classes, whose configuration does not tell how many; and a second table."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head, self.last = torch.nn.Embedding(11, 8), torch.nn.Linear(8, 10), torch.nn.Linear(8, 10)

    def forward(self, input_ids: Any, labels: Any, attention_mask: Any) -> Any:
        seen = (self.table(input_ids) * attention_mask[..., None]).sum(1)
        return {"loss": self.loss(self.head(seen), self.last(seen), labels)}

    def loss(self, one: Any, other: Any, labels: Any) -> Any:
        return functional.cross_entropy(one + other, labels)


class Rare(Aside):
    """The last class alone has another weight."""

    def loss(self, one: Any, other: Any, labels: Any) -> Any:
        return functional.cross_entropy(one, labels, weight=torch.tensor([1.0] * 9 + [5.0]))


class Auxiliary(Aside):
    """A small part compares samples, and the last matrix does not depend on it."""

    def loss(self, one: Any, other: Any, labels: Any) -> Any:
        return functional.cross_entropy(other, labels) + 0.001 * one.softmax(-1).mean(0).square().sum()


class Contrasts(Aside):
    """The samples are compared in train mode alone."""

    def loss(self, one: Any, other: Any, labels: Any) -> Any:
        return functional.cross_entropy(other, labels) + (one.mean(0).square().sum() if self.training else 0.0)


@pytest.mark.parametrize(("kind", "whole"), [(Aside, False), (Rare, True), (Auxiliary, True), (Contrasts, True)])
@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
def test_all_gradients_and_classes_are_tried(
    tmp_path: Path, kind: Any, whole: bool, bf16: bool, weights: torch.dtype
) -> None:
    arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[], bf16=bf16)
    trainer = Trainer(model=kind().to(weights), args=arguments)
    assert lane_loss(trainer, [0, 1, 1, 8 + (kind is Rare)]).whole is whole
    assert {p.dtype for p in trainer.model.parameters()} == {weights}


class Told(Aside):
    """It divides by the number of items, and adds a part that compares samples."""

    part = 0.0

    def forward(self, input_ids: Any, labels: Any, attention_mask: Any, **told: Any) -> Any:
        seen = (self.table(input_ids) * attention_mask[..., None]).sum(1)
        logits = self.head(seen) + self.last(seen)
        summed = functional.cross_entropy(logits, labels, reduction="sum") / told.get("num_items_in_batch", len(labels))
        return {"loss": summed + self.part * logits.softmax(-1).mean(0).square().sum()}


class Routed(Told):
    part = 1e-4


@pytest.mark.parametrize(("kind", "whole"), [(Told, False), (Routed, True)])
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
def test_a_small_part_that_is_not_divided_needs_the_whole_batch(
    tmp_path: Path, kind: Any, whole: bool, weights: torch.dtype
) -> None:
    assert lane_loss(plain(kind().to(weights), tmp_path), [0, 1, 1, 8]).whole is whole


def test_weights_that_compute_in_their_own_precision_alone_are_tried_in_it(tmp_path: Path) -> None:
    class Own(Aside):
        def loss(self, one: Any, other: Any, labels: Any) -> Any:
            assert one.dtype == torch.bfloat16
            return super().loss(one, other, labels)

    assert not lane_loss(plain(Own().bfloat16(), tmp_path), [0, 1, 1, 8]).whole


class Dropping(Contrasts):
    """It drops at random by a function or by a module that does so itself."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.attention = torch.nn.MultiheadAttention(10, 2, dropout=0.1)
        self.recurrent = torch.nn.LSTM(10, 10, num_layers=2, dropout=0.1)

    def loss(self, one: Any, other: Any, labels: Any) -> Any:
        if self.how == "function":
            other = functional.dropout(other, 0.1, self.training)
        elif self.how == "attention function":
            other = functional.scaled_dot_product_attention(
                *[other[:, None]] * 3, dropout_p=0.1 if self.training else 0.0
            )[:, 0]
        elif self.how == "attention":
            other = self.attention(*[other[None]] * 3)[0][0]
        elif self.how == "recurrent":
            other = self.recurrent(other[None])[0][0]
        return super().loss(one, other, labels)


@pytest.mark.parametrize("how", ["function", "attention function", "attention", "recurrent"])
def test_no_kind_of_dropout_hides_what_train_mode_does(tmp_path: Path, how: str) -> None:
    model = Dropping(how)
    assert lane_loss(plain(model, tmp_path), [0, 1, 1, 8]).whole
    assert model.training and (model.attention.dropout, model.recurrent.dropout) == (0.1, 0.1)


def test_a_trial_takes_no_more_memory_than_a_pass_and_finds_a_rare_class(tmp_path: Path) -> None:
    sizes: list[int] = []

    class Counts(Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **more: Any) -> Any:
            sizes.append(len(inputs["labels"]))
            return super().compute_loss(model, inputs, return_outputs, **more)

    arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[], per_device_train_batch_size=3)
    lane = lane_loss(Counts(model=Rare(), args=arguments), [0, 1, 2, 9, 4, 5, 6, 7, 8])
    assert lane.whole and max(sizes) == 3


def test_a_trial_that_failed_holds_no_memory_of_it_when_another_pass_is_computed(tmp_path: Path) -> None:
    held: list[Any] = []

    def pairs(samples: Any) -> Any:
        held.append(sys.exc_info()[1])
        assert len(samples) > 1
        return filled(samples)

    samples = [{"input_ids": torch.tensor([1, 2, 3]), "labels": 0}] * 4
    LaneLoss(made(tmp_path, Trainer), samples, pairs, 2, shifts=False)
    assert held == [None, None]


class Fixed(dict[str, int]):
    def clear(self) -> None:
        raise TypeError("it is fixed")


def test_samples_kept_on_a_trainer_are_not_looked_through() -> None:
    rows = [[1, 2] for _ in range(2000)]
    losses: list[float] = []
    ring: dict[str, Any] = {"by": {"train": losses}}
    ring["again"] = ring
    found = _containers([rows, ring, Fixed(a=1)])
    assert [id(value) for value in found] == [id(value) for value in (rows, ring, ring["by"], losses)]
    assert len(_containers([[[[[]]]]])) == 3


def test_what_a_loss_logs_and_keeps_during_the_trial_is_forgotten(tmp_path: Path) -> None:
    told: list[Any] = []

    class Listens(TrainerCallback):  # type: ignore[misc]
        def on_log(self, *args: Any, **kwargs: Any) -> None:
            told.append(args)

    class Logs(Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **more: Any) -> Any:
            self.calls += 1
            self.kept["losses"].append(0.5)
            self.log({"part": 0.5})
            return super().compute_loss(model, inputs, return_outputs, **more)

    trainer = made(tmp_path, Logs)
    trainer.add_callback(Listens())
    kept, ordered = defaultdict(list, losses=[1.0]), OrderedDict(a=1)
    vars(trainer).update(calls=0, kept=kept, ordered=ordered, fixed=Fixed(a=1))
    before = dict(vars(trainer))
    lane_loss(trainer, [0, 1, 1, 0])
    assert [*ordered] == ["a"] and trainer.fixed == {"a": 1}
    assert (told, trainer.state.log_history) == ([], [])
    assert vars(trainer) == before and trainer.kept is kept and dict(kept) == {"losses": [1.0]}


@pytest.mark.parametrize(("kind", "whole"), [(Aside, False), (Rare, True)])
def test_classes_may_have_the_names_of_the_arguments(tmp_path: Path, kind: Any, whole: bool) -> None:
    class Renamed(kind):  # type: ignore[misc]
        def forward(self, input_ids: Any, kinds: Any, attention_mask: Any, start_positions: Any) -> Any:
            assert int(start_positions.max()) < input_ids.shape[1]
            return super().forward(input_ids, kinds, attention_mask)

    def collate(samples: Any) -> Any:
        batch = filled(samples)
        ends = batch["attention_mask"].sum(1) - 1
        return {"kinds": batch.pop("labels"), "start_positions": ends, **batch}

    names = ["kinds", "start_positions"]
    arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[], label_names=names)
    trainer = Trainer(model=Renamed(), args=arguments)
    model: Any = trainer.model
    model.config = SimpleNamespace(num_labels=10)
    assert lane_loss(trainer, [0, 0, 0, 0], collate).whole is whole


def test_each_kind_of_label_has_its_own_number_of_classes(tmp_path: Path) -> None:
    class Two(Aside):
        def forward(self, input_ids: Any, labels: Any, attention_mask: Any, label: Any) -> Any:
            seen = self.table(input_ids[:, 0])
            return {"loss": self.loss(self.head(seen), self.last(seen), labels) + self.second(seen, label)}

        def second(self, seen: Any, label: Any) -> Any:
            return functional.cross_entropy(seen[:, :2], label)

    def collate(samples: Any) -> Any:
        batch = filled(samples)
        return {**batch, "label": batch["labels"] % 2}

    assert not lane_loss(plain(Two(), tmp_path), [0, 1, 1, 9], collate).whole


def test_rows_of_a_random_collation_that_cannot_be_taken_apart_need_the_whole_batch(tmp_path: Path) -> None:
    def two_views(samples: Any) -> Any:
        batch = filled([*samples, *samples])
        return {**batch, "input_ids": torch.where(torch.rand(batch["input_ids"].shape) < 0.5, 3, batch["input_ids"])}

    assert lane_loss(made(tmp_path, Trainer), [0, 1, 1, 0], two_views).whole


def test_a_random_collation_shows_what_is_not_masked(tmp_path: Path) -> None:
    def masked(samples: Any) -> Any:
        batch = filled(samples)
        random = torch.rand(batch["input_ids"].shape) < 0.5
        return {**batch, "input_ids": torch.where(random & (batch["input_ids"] > 0), 3, batch["input_ids"])}

    assert lane_loss(made(tmp_path, Unmasked), [0, 1, 1, 0], masked).whole
    assert not lane_loss(made(tmp_path, Trainer), [0, 1, 1, 0], masked).whole


def test_a_collation_may_change_its_samples(tmp_path: Path) -> None:
    def popping(samples: Any) -> Any:
        labels = torch.tensor([sample.pop("labels") for sample in samples])
        return {**filled([{**sample, "labels": 0} for sample in samples]), "labels": labels}

    assert not lane_loss(made(tmp_path, Trainer), [0, 1, 1, 0], popping).whole


def test_what_single_samples_do_not_suit_needs_the_whole_batch(tmp_path: Path) -> None:
    def pairs(samples: Any) -> Any:
        assert len(samples) > 1
        return filled(samples)

    lane = lane_loss(made(tmp_path, Trainer), [0, 1, 1, 0], pairs)
    assert lane.whole and "AssertionError" in lane.why


def test_batch_norms_that_stay_in_eval_mode_need_no_whole_batch(tmp_path: Path) -> None:
    class Frozen(torch.nn.BatchNorm1d):
        def train(self, mode: bool = True) -> Any:
            return super().train(False)

    trainer = made(tmp_path, Trainer)
    trainer.model.classifier = torch.nn.Sequential(Frozen(8), trainer.model.classifier)
    assert not lane_loss(trainer, [0, 1, 1, 0, 0, 1]).whole


def test_whole_passes_count_by_their_items(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=11, n_positions=16, n_embd=8, n_layer=1, n_head=1))
    model.add_module("norm", torch.nn.BatchNorm1d(8))  # so that passes are computed whole
    trainer = Trainer(model=model.eval(), args=TrainingArguments(str(tmp_path), use_cpu=True, report_to=[]))

    def told(samples: Any) -> Any:
        batch = filled(samples)
        return {**batch, "labels": torch.where(batch["attention_mask"] > 0, batch["input_ids"], -100)}

    samples = [{"input_ids": torch.randint(1, 11, (2 + 2 * k,)), "labels": 0} for k in range(4)]
    lane = LaneLoss(trainer, samples, told, 2, shifts=True)
    given: list[tuple[float, float]] = []
    step = SimpleNamespace(backward=lambda loss, weight: given.append((loss.item(), weight)))
    passes = [told(samples[:2]), told(samples[2:])]
    for batch in passes:
        lane.backward(step, batch, 2)  # type: ignore[arg-type]
    items = trainer._get_num_items_in_batch(passes, trainer.args.device)
    theirs = sum(float(trainer.compute_loss(model, dict(batch), num_items_in_batch=items).detach()) for batch in passes)
    assert lane.whole
    assert sum(loss for loss, _ in given) / sum(weight for _, weight in given) == pytest.approx(theirs, rel=1e-5)


def lane_loss(trainer: Any, labels: list[int], collate: Any = None) -> LaneLoss:
    lengths = torch.Generator().manual_seed(0)
    samples = [
        {"input_ids": torch.randint(1, 11, (3 + k,), generator=lengths), "labels": label}
        for k, label in enumerate(labels)
    ]
    return LaneLoss(trainer, samples, collate or filled, 1, shifts=False)


def filled(samples: Any) -> Any:
    ids = torch.nn.utils.rnn.pad_sequence([sample["input_ids"] for sample in samples], batch_first=True)
    labels = torch.tensor([sample["labels"] for sample in samples])
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": labels}


def plain(model: Any, folder: Path) -> Any:
    return Trainer(model=model, args=TrainingArguments(str(folder), use_cpu=True, report_to=[]))


def made(folder: Path, kind: Any) -> Any:
    torch.manual_seed(0)
    config = BertConfig(vocab_size=11, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
    model = BertForSequenceClassification(config)
    return kind(model=model, args=TrainingArguments(str(folder), use_cpu=True, report_to=[]))
