"""`transformer-text`: a causal language model over the user's text, or the Python standard library's sources."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset

from everstep.base.errors import ConfigError
from everstep.data.token_stream import (
    ByteTokenizer,
    Chosen,
    Tokenizer,
    Windows,
    byte_pairs,
    read_text,
    standard_library,
)
from everstep.exact.shard_plan import shard_model
from everstep.exact.shard_sums import ShardMesh
from everstep.zoo.recipe import (
    ReadyTask,
    classification_metrics,
    decay_groups,
    token_loss,
    total_steps,
    warmup_cosine,
)
from everstep.zoo.shard_plans import transformer_plan
from everstep.zoo.transformer import Transformer, TransformerConfig

_TEST_EVERY = 20


class TransformerText(ReadyTask):
    """Predict the next token. path: a text file, or a folder of them; "" for the standard library's sources.

    Options: `task.path`, `task.tokenizer` (bytes, bpe), `task.vocabulary` (of bpe), `task.context`, `task.layers`,
    `task.width`, `task.heads`, `task.dropout`, `task.lr`, `task.weight_decay`, `task.limit_bytes` (of the text).
    Every twentieth window of the text is for testing.
    """

    defaults: ClassVar[Mapping[str, Any]] = {"lanes": 8, "micro_batch": 4, "steps": 200, "clip_norm": 1.0}
    option_defaults: ClassVar[Mapping[str, Any]] = {
        "path": "",
        "tokenizer": "bytes",
        "vocabulary": 2048,
        "context": 128,
        "layers": 4,
        "width": 128,
        "heads": 4,
        "dropout": 0.1,
        "lr": 3e-3,
        "weight_decay": 0.1,
        "limit_bytes": 4_000_000,
    }

    def __init__(self, path: str = "") -> None:
        self.path = path
        self._text: tuple[Windows, Tokenizer] | None = None

    @property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer of this text. Raises: ConfigError."""
        return self._read()[1]

    def _read(self) -> tuple[Windows, Tokenizer]:
        """The whole text as windows, read and encoded once."""
        if self._text is None:
            path, limit = self.path or self.option("path"), self.option("limit_bytes")
            data = read_text(path, limit) if path else standard_library(limit)
            kind = self.option("tokenizer")
            if kind not in ("bytes", "bpe"):
                raise ConfigError(f"task.tokenizer: expected bytes or bpe, got {kind!r}")
            tokenizer: Tokenizer = ByteTokenizer()
            if kind == "bytes":
                tokens = tokenizer.encode(data)
            else:
                tokens, tokenizer = byte_pairs(data, self.option("vocabulary"))
            context = self.option("context")
            if context < 1:
                raise ConfigError(f"task.context: expected at least 1, got {context}")
            self._text = Windows(tokens, context), tokenizer
        return self._text

    def build_model(self) -> nn.Module:
        sizes = {name: self.option(name) for name in ("context", "layers", "width", "heads", "dropout")}
        return Transformer(TransformerConfig(self.tokenizer.vocabulary, **sizes))

    def units(self, model: nn.Module) -> list[nn.Module]:
        """Units: embedding, blocks, head."""
        return model.units()  # type: ignore[operator, no-any-return]

    def parallelize(self, model: nn.Module, mesh: ShardMesh) -> None:
        mesh.require_length(int(self.option("context")))
        shard_model(model, transformer_plan(model.config), mesh)  # type: ignore[arg-type]

    def build_dataset(self, split: str) -> Dataset[Any]:
        if split not in ("train", "test"):
            raise ConfigError(f'expected the split "train" or "test", got {split!r}')
        return Chosen(self._read()[0], _TEST_EVERY, kept=split == "test")

    def build_optimizer(self, params: Iterable[nn.Parameter]) -> Optimizer:
        groups = decay_groups(params, self.option("weight_decay"))
        return AdamW(groups, lr=self.option("lr"), betas=(0.9, 0.95))

    def build_scheduler(self, optimizer: Optimizer) -> LRScheduler:
        size = len(self._read()[0])
        steps = total_steps(self.config, size - -(-size // _TEST_EVERY), int(self.defaults["steps"]))
        return warmup_cosine(optimizer, steps, warmup=0.1)

    def loss(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Loss: (sum over tokens, number of tokens). batch: (N, context + 1) int64."""
        inputs, targets = batch[:, :-1], batch[:, 1:]
        logits = model(inputs)
        return token_loss(logits, targets), torch.tensor(float(targets.numel()))

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
        """Metrics: loss per token, in nats, and the share of tokens predicted right."""
        return classification_metrics(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
