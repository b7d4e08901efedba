"""LoRA by `peft` on a small GPT-2, in a loop of your own: the base is frozen, the adapters are trained.

pip install 'everstep[lora]'
everstep run examples/lora_gpt2.py --workers 3

The model comes from a config, so nothing is downloaded; for one of yours write
`AutoModelForCausalLM.from_pretrained(DIR)`. Without a loop, `everstep run hf:DIR --set task.lora.rank=8` does the same
(docs/models.md). The adapter is written as `peft` reads it, into the folder `adapter`.
"""

import torch
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel

import everstep
from everstep.data.token_stream import ByteTokenizer, Windows, standard_library

CONTEXT = 32

torch.manual_seed(0)
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
lora = LoraConfig(r=8, lora_alpha=16, lora_dropout=0.1, target_modules=["c_attn"], task_type="CAUSAL_LM")
model = get_peft_model(GPT2LMHeadModel(config), lora)
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-3)
text = Windows(ByteTokenizer().encode(standard_library(200_000)), CONTEXT)

run = everstep.join(model, optimizer, text, lanes=4, micro_batch=4, steps=60, clip_norm=1.0)
for step in run:
    for tokens in step:
        logits = model(input_ids=tokens[:, :-1]).logits
        step.backward(torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()))
    if run.is_main and step.number % 10 == 0:
        print(f"step {step.number}: loss {step.loss:.4f}")

if run.is_main:
    model.save_pretrained("adapter")
