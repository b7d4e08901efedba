"""A Llama-like model (RMSNorm, rotary positions, grouped queries, SwiGLU) over byte pairs of your text.

pip install tokenizers
everstep run examples/llama_bpe.py:Llama --workers 4 --stages 2 --set task.path=book.txt

Without `task.path` it learns the sources of Python's standard library. Its layers are units, so it can be cut.
"""

import torch
from torch import nn
from torch.nn import functional

import everstep
from everstep.data.token_stream import Windows, byte_pairs, read_text, standard_library

VOCABULARY, CONTEXT = 512, 64


def rotate(x, base=1e4):
    """Rotary positions. x: (N, heads, T, d)."""
    d, positions = x.shape[-1], torch.arange(x.shape[-2], device=x.device)
    angles = positions[:, None] * base ** (-torch.arange(0, d, 2, device=x.device) / d)
    even, odd = x[..., ::2], x[..., 1::2]
    turned = (even * angles.cos() - odd * angles.sin(), even * angles.sin() + odd * angles.cos())
    return torch.stack(turned, -1).flatten(-2)


class Attention(nn.Module):
    def __init__(self, width, heads, groups):
        super().__init__()
        self.heads, self.groups, self.d = heads, groups, width // heads
        self.wq = nn.Linear(width, width, bias=False)
        self.wk = nn.Linear(width, groups * self.d, bias=False)
        self.wv = nn.Linear(width, groups * self.d, bias=False)
        self.wo = nn.Linear(width, width, bias=False)

    def forward(self, x):
        def split(y, heads):
            return y.unflatten(-1, (heads, self.d)).transpose(1, 2)

        q, k = rotate(split(self.wq(x), self.heads)), rotate(split(self.wk(x), self.groups))
        k, v = (t.repeat_interleave(self.heads // self.groups, 1) for t in (k, split(self.wv(x), self.groups)))
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(out.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, width, heads, groups):
        super().__init__()
        self.attention = Attention(width, heads, groups)
        self.attention_norm, self.ffn_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        hidden = width * 8 // 3
        self.w1, self.w3 = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.w2 = nn.Linear(hidden, width, bias=False)

    def forward(self, x):
        x = x + self.attention(self.attention_norm(x))
        y = self.ffn_norm(x)
        return x + self.w2(functional.silu(self.w1(y)) * self.w3(y))


class Llama(everstep.Task):
    defaults = {"lanes": 4, "micro_batch": 4, "steps": 100, "clip_norm": 1.0}  # noqa: RUF012

    def build_model(self):
        width, head = 96, nn.Sequential(nn.RMSNorm(96), nn.Linear(96, VOCABULARY, bias=False))
        return nn.Sequential(nn.Embedding(VOCABULARY, width), *(Layer(width, 6, 2) for _ in range(3)), head)

    def units(self, model):
        return list(model)

    def build_dataset(self, split):
        path = (self.config.task or {}).get("path")
        text = read_text(path, 1_000_000) if path else standard_library(200_000)
        tokens, _ = byte_pairs(text, VOCABULARY)
        border = len(tokens) * 9 // 10
        return Windows(tokens[:border] if split == "train" else tokens[border:], CONTEXT)

    def build_optimizer(self, params):
        return torch.optim.AdamW(params, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)

    def build_scheduler(self, optimizer):
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=self.config.steps or 1000)

    def loss(self, model, batch):
        logits = model(batch[:, :-1])
        return functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
