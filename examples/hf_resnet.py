"""A Hugging Face ResNet as a task, from its config, over scikit-learn's digits; it can be cut between its blocks.

pip install transformers
everstep run examples/hf_resnet.py:ResNet --workers 4 --stages 2
"""

import torch
from torch import nn
from transformers import ResNetConfig, ResNetForImageClassification
from transformers.modeling_outputs import ImageClassifierOutputWithNoAttention

import everstep
from everstep.data.digit_images import CLASSES, Digits


class Head(nn.Module):
    """Pooling and classifier in one unit; it shares the model's modules."""

    def __init__(self, model):
        super().__init__()
        self.pooler, self.classifier = model.resnet.pooler, model.classifier

    def forward(self, hidden):
        return ImageClassifierOutputWithNoAttention(logits=self.classifier(self.pooler(hidden)))


class ResNet(everstep.Task):
    defaults = {"lanes": 8, "micro_batch": 8, "steps": 40}  # noqa: RUF012

    def build_model(self):
        config = ResNetConfig(
            num_channels=1,
            embedding_size=16,
            hidden_sizes=[16, 32],
            depths=[2, 2],
            layer_type="basic",
            num_labels=CLASSES,
        )
        return ResNetForImageClassification(config)

    def units(self, model):
        layers = [layer for stage in model.resnet.encoder.stages for layer in stage.layers]
        return [model.resnet.embedder, *layers, Head(model)]

    def build_dataset(self, split):
        return Digits(split)

    def build_optimizer(self, params):
        return torch.optim.SGD(params, lr=0.05, momentum=0.9)

    def loss(self, model, batch):
        return torch.nn.functional.cross_entropy(model(pixel_values=batch[0]).logits, batch[1])
