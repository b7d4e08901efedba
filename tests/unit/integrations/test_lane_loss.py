"""Losses of a `transformers.Trainer` that lanes can add up, and those that need a whole forward pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

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
