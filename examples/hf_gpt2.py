"""A Hugging Face model as a task: a small GPT-2 from its config, over the Python standard library's sources.

pip install transformers
everstep run examples/hf_gpt2.py:GPT2 --workers 2
everstep run examples/hf_gpt2.py:GPT2 --workers 4 --stages 2

The units are written by hand: a dozen lines that say what goes from layer to layer. torch's tracer would fix in the
graph what the model decides while it runs (masks, caches), and its pieces have other parameter names. When a job has
stages, the units are compared with the model's own forward pass before it begins, to the bit.
"""

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import CausalLMOutputWithCrossAttentions

import everstep
from everstep.data.token_stream import ByteTokenizer, Chosen, Windows, standard_library

CONTEXT = 64


class Embed(nn.Module):
    """Tokens -> (hidden states, causal mask). Wrappers share the model's modules; they own no parameters."""

    def __init__(self, gpt2):
        super().__init__()
        self.wte, self.wpe, self.drop, self.config = gpt2.wte, gpt2.wpe, gpt2.drop, gpt2.config

    def forward(self, input_ids):
        embeds = self.wte(input_ids)
        positions = torch.arange(embeds.shape[1], device=embeds.device).unsqueeze(0)
        mask = create_causal_mask(
            config=self.config, inputs_embeds=embeds, attention_mask=None, past_key_values=None, position_ids=positions
        )
        return self.drop(embeds + self.wpe(positions)), mask


class Layer(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, carried):
        hidden, mask = carried
        return self.block(hidden, None, mask, use_cache=False), mask


class Head(nn.Module):
    """lm_head's weight is the embedding's own Parameter: two units have it, and everstep adds up its two gradients."""

    def __init__(self, model):
        super().__init__()
        self.ln_f, self.lm_head = model.transformer.ln_f, model.lm_head

    def forward(self, carried):
        return CausalLMOutputWithCrossAttentions(logits=self.lm_head(self.ln_f(carried[0])))


class ChainedGPT2(GPT2LMHeadModel):
    """Its forward pass goes through the units, so that each is seeded (dropout) alike whether the job is cut or not.

    The wrappers are in a tuple, where nn.Module does not look: names stay those of `transformers`.
    """

    def __init__(self, config):
        super().__init__(config)
        self.chain = (Embed(self.transformer), *(Layer(block) for block in self.transformer.h), Head(self))

    def forward(self, input_ids):
        x = input_ids
        for unit in self.chain:
            x = unit(x)
        return x


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
        return ChainedGPT2(config)

    def units(self, model):
        return list(model.chain)

    def build_dataset(self, split):
        windows = Windows(ByteTokenizer().encode(standard_library(500_000)), CONTEXT)
        return Chosen(windows, every=20, kept=split == "test")

    def build_optimizer(self, params):
        return torch.optim.AdamW(params, lr=3e-3)

    def loss(self, model, batch):
        inputs, targets = batch[:, :-1], batch[:, 1:]
        logits = model(input_ids=inputs).logits
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
