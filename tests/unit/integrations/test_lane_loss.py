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


@pytest.mark.parametrize(("kind", "whole"), [(Trainer, False), (Weighs, True)])
def test_a_loss_that_is_no_mean_over_samples_needs_the_whole_batch(tmp_path: Path, kind: Any, whole: bool) -> None:
    torch.manual_seed(0)
    config = BertConfig(vocab_size=11, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
    model = BertForSequenceClassification(config)
    with torch.no_grad():
        model.classifier.weight.mul_(50)  # so that losses differ
    trainer = kind(model=model, args=TrainingArguments(str(tmp_path), use_cpu=True, report_to=[]))
    batch = {"input_ids": torch.randint(1, 11, (6, 5)), "labels": torch.tensor([0, 1, 1, 0, 0, 1])}
    assert LaneLoss(trainer, batch, 1, shifts=False).whole is whole
