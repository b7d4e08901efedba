"""nanoGPT's train.py, line by line, on workers that may die. What has changed is marked.

everstep run examples/nanogpt_loop.py --workers 3        # or: python examples/nanogpt_loop.py, one worker

It learns the sources of Python's standard library, by bytes. Give it a text file of yours as its argument.
"""

import math
import os
import sys

import torch
from torch import nn
from torch.nn import functional

import everstep  # 1
from everstep.data.token_stream import read_text, standard_library

out_dir = os.environ.get("OUT_DIR", "out")
eval_interval, eval_iters = 5, 2
batch_size, gradient_accumulation_steps, block_size = 8, 2, 32
n_layer, n_head, n_embd = 2, 2, 32
learning_rate, max_iters, weight_decay, beta1, beta2, grad_clip = 3e-3, 20, 1e-1, 0.9, 0.95, 1.0
warmup_iters, lr_decay_iters, min_lr = 5, 20, 3e-4
seed = 1337

text = read_text(sys.argv[1], 1 << 20) if len(sys.argv) > 1 else standard_library(1 << 20)
data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
split = int(0.9 * len(data))


class Batches(torch.utils.data.Dataset):  # 2: get_batch, by the number of the sample instead of a global generator
    """Random windows; the n-th one follows from the seed and n alone."""

    def __init__(self, tokens, count, seed):
        self.tokens, self.count, self.seed = tokens, count, seed

    def __len__(self):
        return self.count

    def __getitem__(self, n):
        generator = torch.Generator().manual_seed(self.seed + n)
        i = int(torch.randint(len(self.tokens) - block_size, (1,), generator=generator))
        return self.tokens[i : i + block_size], self.tokens[i + 1 : i + 1 + block_size]


train = Batches(data[:split], max_iters * batch_size * gradient_accumulation_steps, seed)
held_out = {
    "train": Batches(data[:split], eval_iters * batch_size, seed + (1 << 30)),
    "val": Batches(data[split:], eval_iters * batch_size, seed + (1 << 30)),
}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)
        self.c_attn, self.c_proj = nn.Linear(n_embd, 3 * n_embd), nn.Linear(n_embd, n_embd)
        self.mlp = nn.Sequential(nn.Linear(n_embd, 4 * n_embd), nn.GELU(), nn.Linear(4 * n_embd, n_embd))

    def forward(self, x):
        heads = (y.unflatten(2, (n_head, -1)).transpose(1, 2) for y in self.c_attn(self.ln_1(x)).chunk(3, 2))
        y = functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).flatten(2))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(256, n_embd), nn.Embedding(block_size, n_embd)
        self.h = nn.Sequential(*(Block() for _ in range(n_layer)))
        self.ln_f, self.lm_head = nn.LayerNorm(n_embd), nn.Linear(n_embd, 256, bias=False)

    def forward(self, idx, targets):
        logits = self.lm_head(self.ln_f(self.h(self.wte(idx) + self.wpe.weight)))
        return logits, functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    ratio = min(1.0, (it - warmup_iters) / (lr_decay_iters - warmup_iters))
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)


def configure_optimizers(model):
    groups = [{"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": weight_decay}]
    groups += [{"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=learning_rate, betas=(beta1, beta2))


torch.manual_seed(seed)
model = GPT()
optimizer = configure_optimizers(model)

# ---- the training loop

kept = everstep.state(best_val_loss=1e9)  # 3: what the loop keeps from step to step
run = everstep.join(  # 4: batches, accumulation and clipping
    model,
    optimizer,
    train,
    lanes=4,
    micro_batch=batch_size // 4,
    accumulate=gradient_accumulation_steps,
    clip_norm=grad_clip,
    shuffle=False,
    steps=max_iters,
    state=kept,
)


def batch_loss(batch):
    _, loss = model(*batch)
    return {"loss": (float(loss) * len(batch[0]), len(batch[0]))}


def estimate_loss():  # 5: shared by the workers
    return {name: run.evaluate(batch_loss, held_out[name], batch_size=batch_size)["loss"] for name in held_out}


def save_checkpoint(iter_num):
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "best_val_loss": kept.best_val_loss}
    torch.save({**state, "iter_num": iter_num}, os.path.join(out_dir, "ckpt.pt"))


for step in run:  # 6
    iter_num = step.number - 1
    lr = get_lr(iter_num)
    for param_group in optimizer.param_groups:
        param_group["lr"] = lr
    for X, Y in step:  # 7: both micro-steps; no step, clip_grad_norm_ or zero_grad
        logits, loss = model(X, Y)
        step.backward(loss)
    iter_num += 1
    if iter_num % eval_interval == 0:
        losses = estimate_loss()
        run.log(train_loss=losses["train"], val_loss=losses["val"])
        if losses["val"] < kept.best_val_loss:
            kept.best_val_loss = losses["val"]
            if run.is_main:
                print(f"step {iter_num}: train loss {losses['train']:.4f}, val loss {losses['val']:.4f}, saved")
                os.makedirs(out_dir, exist_ok=True)
                save_checkpoint(iter_num)
