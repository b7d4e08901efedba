"""A plain training script; the lines that make it survive dead workers are marked.

everstep run examples/plain_loop.py --workers 3          # or: python examples/plain_loop.py, one worker
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import everstep  # 1

images, labels = load_digits(return_X_y=True)
images, labels = torch.from_numpy(images).float() / 16, torch.from_numpy(labels)
train, test = TensorDataset(images[:1500], labels[:1500]), TensorDataset(images[1500:], labels[1500:])

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 120)

run = everstep.join(model, optimizer, train, lanes=8, micro_batch=8, scheduler=scheduler, steps=120)  # 2
for step in run:  # 3
    for x, y in step:
        step.backward(nn.functional.cross_entropy(model(x), y))  # 4: instead of loss.backward(), step() and zero_grad()
    if run.is_main and step.number % 20 == 0:
        print(f"step {step.number}: loss {step.loss:.4f}")


def accuracy(batch):
    x, y = batch
    return {"accuracy": torch.tensor([float((model(x).argmax(1) == y).sum()), float(len(y))])}


result = run.evaluate(accuracy, test)
if run.is_main:
    print(f"test accuracy {result['accuracy']:.3f}")
