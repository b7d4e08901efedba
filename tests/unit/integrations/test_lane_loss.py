"""Losses of a `transformers.Trainer` that lanes can add up, and those that need a whole forward pass."""

from __future__ import annotations

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
    TrainingArguments,
)

from everstep.integrations.lane_loss import LaneLoss


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
def test_all_gradients_and_classes_are_tried(tmp_path: Path, kind: Any, whole: bool, bf16: bool) -> None:
    arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[], bf16=bf16)
    trainer = Trainer(model=kind(), args=arguments)
    assert lane_loss(trainer, [0, 1, 1, 8 + (kind is Rare)]).whole is whole


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


def made(folder: Path, kind: Any) -> Any:
    torch.manual_seed(0)
    config = BertConfig(vocab_size=11, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
    model = BertForSequenceClassification(config)
    return kind(model=model, args=TrainingArguments(str(folder), use_cpu=True, report_to=[]))
