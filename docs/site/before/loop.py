import torch

import everstep  # noqa: F401

torch.manual_seed(1)
model, loss_fn = torch.nn.Linear(4, 1), torch.nn.functional.mse_loss
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
dataset = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
