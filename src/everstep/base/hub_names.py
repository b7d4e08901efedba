"""Names of the files that Hugging Face's hub gives a model: what lies beside its weights."""

CONFIG = "config.json"
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "tekken.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja"),
)
HUB_FILES = (CONFIG, ADAPTER_CONFIG, *TOKENIZER_FILES)
"""Files of `final/` that are there from the job's start."""
MOST_HUB_BYTES = 256 << 20
"""Limit of one of them."""
