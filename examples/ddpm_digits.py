"""Denoising diffusion (DDPM) on scikit-learn's digits, with an exponential moving average of the weights.

everstep run examples/ddpm_digits.py --workers 3

The average is given to `join` as state, so a worker that is healed or resumed goes on with it. Noise and times are
drawn from torch's default generator, which Everstep seeds for every batch.
"""

import math

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import everstep
from everstep.data.digit_images import SIZE, Digits

TIMES = 100
betas = torch.linspace(1e-4, 0.1, TIMES)
kept = torch.cumprod(1 - betas, 0)  # how much of the image is left after each time


class Denoiser(nn.Module):
    """Predicts the noise in a picture, given the time."""

    def __init__(self, width=64):
        super().__init__()
        self.time = nn.Sequential(nn.Linear(32, width), nn.SiLU(), nn.Linear(width, width))
        self.first = nn.Conv2d(1, width, 3, padding=1)
        self.middle = nn.Sequential(nn.GroupNorm(8, width), nn.SiLU(), nn.Conv2d(width, width, 3, padding=1))
        self.last = nn.Sequential(nn.GroupNorm(8, width), nn.SiLU(), nn.Conv2d(width, 1, 3, padding=1))

    def forward(self, images, times):
        angles = times[:, None] * torch.exp(-math.log(1e4) * torch.arange(16) / 16)
        time = self.time(torch.cat([angles.sin(), angles.cos()], 1))[:, :, None, None]
        hidden = self.first(images) + time
        return self.last(hidden + self.middle(hidden))


torch.manual_seed(0)
model = Denoiser()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.99))

run = everstep.join(model, optimizer, Digits("train"), lanes=4, micro_batch=16, steps=200, state={"average": average})
for step in run:
    for images, _ in step:
        times = torch.randint(0, TIMES, (len(images),))
        noise = torch.randn_like(images)
        share = kept[times][:, None, None, None]
        noisy = share.sqrt() * images + (1 - share).sqrt() * noise
        step.backward(nn.functional.mse_loss(model(noisy, times), noise))
    average.update_parameters(model)
    if run.is_main and step.number % 20 == 0:
        print(f"step {step.number}: loss {step.loss:.4f}")


@torch.no_grad()
def sample(count):
    """Pictures (count, 1, 8, 8), drawn with the average."""
    images = torch.randn(count, 1, SIZE, SIZE)
    for time in reversed(range(TIMES)):
        noise = average(images, torch.full((count,), time))
        images = (images - betas[time] / (1 - kept[time]).sqrt() * noise) / (1 - betas[time]).sqrt()
        if time:
            images += betas[time].sqrt() * torch.randn_like(images)
    return images


if run.is_main:
    drawn = sample(4)
    print(f"four digits drawn: mean {drawn.mean():.3f}, deviation {drawn.std():.3f}")
