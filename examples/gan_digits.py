"""A GAN on scikit-learn's digits: two optimizers in one loop, each with its own loss and schedule.

everstep run examples/gan_digits.py --workers 3

`step.backward(loss, optimizer=...)` gives gradients to the parameters of that optimizer alone; both are stepped when
the batches of the step are over, in the order of the dict. So the discriminator needs no zero_grad() and no frozen
parameters while the generator learns.
"""

import torch
from torch import nn

import everstep
from everstep.data.digit_images import SIZE, Digits

NOISE = 16


class Gan(nn.Module):
    """Both networks in one module, since a job has one model."""

    def __init__(self, width=64):
        super().__init__()
        self.generator = nn.Sequential(
            nn.Linear(NOISE, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, SIZE * SIZE), nn.Sigmoid()
        )
        self.critic = nn.Sequential(
            nn.Linear(SIZE * SIZE, width), nn.LeakyReLU(0.2), nn.Dropout(0.1), nn.Linear(width, 1)
        )


torch.manual_seed(0)
gan = Gan()
optimizers = {
    "critic": torch.optim.Adam(gan.critic.parameters(), lr=2e-3, betas=(0.5, 0.999)),
    "generator": torch.optim.Adam(gan.generator.parameters(), lr=1e-3, betas=(0.5, 0.999)),
}
schedulers = {name: torch.optim.lr_scheduler.StepLR(one, 100, gamma=0.5) for name, one in optimizers.items()}


def loss(scores, wanted):
    return nn.functional.binary_cross_entropy_with_logits(scores, torch.full_like(scores, wanted))


run = everstep.join(gan, optimizers, Digits("train"), lanes=4, micro_batch=16, steps=200, scheduler=schedulers)
for step in run:
    for images, _ in step:
        drawn = gan.generator(torch.randn(len(images), NOISE))
        real, false = gan.critic(images.flatten(1)), gan.critic(drawn.detach())
        step.backward(loss(real, 0.9) + loss(false, 0.0), optimizer="critic")
        step.backward(loss(gan.critic(drawn), 1.0), optimizer="generator")
        step.log(fooled=((false > 0).sum(), len(false)))
    if run.is_main and step.number % 20 == 0:
        print(f"step {step.number}: loss {step.loss:.4f}, taken for real {step.metrics['fooled']:.0%}")
