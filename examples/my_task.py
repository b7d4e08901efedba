"""The smallest task of one's own: a line through noisy points.

everstep run examples/my_task.py:Line --workers 3
"""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import everstep


class Line(everstep.Task):
    defaults = {"lanes": 8, "micro_batch": 4, "steps": 200}  # noqa: RUF012

    def build_model(self):
        return nn.Linear(1, 1)

    def build_dataset(self, split):
        generator = torch.Generator().manual_seed(0 if split == "train" else 1)
        x = torch.rand(1000, 1, generator=generator)
        return TensorDataset(x, 3 * x + 1 + 0.1 * torch.randn(1000, 1, generator=generator))

    def build_optimizer(self, params):
        return torch.optim.SGD(params, lr=0.1, momentum=0.9)

    def loss(self, model, batch):
        x, y = batch
        return nn.functional.mse_loss(model(x), y)
