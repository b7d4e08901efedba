"""A Hugging Face model as a task: a small GPT-2 from its config, over the Python standard library's sources.

pip install transformers
everstep run examples/hf_gpt2.py:GPT2 --workers 2
"""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import everstep
from everstep.data.text import Bytes, Chosen, Windows, standard_library

CONTEXT = 64


class GPT2(everstep.Task):
    defaults = {"lanes": 8, "micro_batch": 2, "steps": 60, "clip_norm": 1.0}  # noqa: RUF012

    def build_model(self):
        # Eager attention, because it is deterministic everywhere; nothing is downloaded.
        config = GPT2Config(
            vocab_size=256,
            n_positions=CONTEXT,
            n_embd=64,
            n_layer=2,
            n_head=4,
            bos_token_id=0,
            eos_token_id=0,
            use_cache=False,
            attn_implementation="eager",
        )
        return GPT2LMHeadModel(config)

    def build_dataset(self, split):
        windows = Windows(Bytes().encode(standard_library(500_000)), CONTEXT)
        return Chosen(windows, every=20, kept=split == "test")

    def build_optimizer(self, params):
        return torch.optim.AdamW(params, lr=3e-3)

    def loss(self, model, batch):
        inputs, targets = batch[:, :-1], batch[:, 1:]
        logits = model(input_ids=inputs).logits
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
