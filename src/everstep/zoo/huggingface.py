"""`hf:DIR`: a causal language model of `transformers` from a local directory, trained on the user's tokens.

Nothing is downloaded, no code of a directory is run, and nothing is unpickled.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar, cast

import torch
from torch import nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset

from everstep.base.errors import ConfigError
from everstep.data.tokenised import Tokens, TokenWindows, read_tokens
from everstep.exact.seeding import build_seed
from everstep.exact.shard_plan import shard_model
from everstep.exact.shard_sums import ShardMesh
from everstep.train.stage import build_by_module
from everstep.zoo.adapters import adapter_content, add_adapter, has_adapter
from everstep.zoo.hub_directory import HubDirectory
from everstep.zoo.recipe import (
    ReadyTask,
    classification_metrics,
    decay_groups,
    token_loss,
    total_steps,
    warmup_cosine,
)
from everstep.zoo.shard_plans import hub_plan

_TEST_EVERY = 20
_MOST_LAYERS = 10_000
_COUNTED_FROM_PADDING = (
    "camembert",
    "data2vec-text",
    "roberta",
    "roberta-prelayernorm",
    "xlm-roberta",
    "xlm-roberta-xl",
    "xmod",
)
"""Architectures whose first position has the number after that of the padding's token."""
_LOGITS_AT_ONCE = 1 << 27
"""Of an evaluation: 512 MiB."""
_RATES = {"fresh": 5e-4, "read": 5e-5, "adapter": 2e-4}


class HuggingFace(ReadyTask):
    """Predict the next token, with any causal language model of `transformers`. path: its directory, or a config.json.

    Options: `task.data` (text file, folder of them, token file or directory of the package datasets), `task.context`
    (0: the model's own maximum), `task.limit_bytes` (of the text, 0: all), `task.lr` (0: 5e-5, for fresh weights 5e-4,
    for an adapter 2e-4), `task.weight_decay`, `task.warmup` (share of the steps), `task.lora.rank` (0: all weights
    are trained), `task.lora.alpha`, `task.lora.modules` (names with commas between them; "": those that peft knows for
    the architecture). Every twentieth window is for testing, unless the data have a test part of their own.
    """

    option_defaults: ClassVar[Mapping[str, Any]] = {
        "data": "",
        "context": 0,
        "limit_bytes": 0,
        "lr": 0.0,
        "weight_decay": 0.0,
        "warmup": 0.1,
        "lora.rank": 0,
        "lora.alpha": 16.0,
        "lora.modules": "",
    }

    def __init__(self, path: str = "") -> None:
        """path: as typed after `hf:`. Raises: ConfigError if it is no model's, or transformers is missing."""
        self.directory = HubDirectory(path)
        from everstep.zoo.hub_library import hub_library

        self._library = hub_library()
        self.model_config = self._read_config()
        self._kind = self._class_of(self.model_config)
        from everstep.zoo.decoder_units import refuse_other_model, why_whole

        self.whole = why_whole(self._kind, self.model_config)
        """Why the model is not cut into units; "" if it is."""
        if self.whole and (weights := self.directory.weights()) is not None:
            refuse_other_model(self._kind, self.model_config, weights)
        self.defaults = {  # type: ignore[misc]
            "lanes": 8,
            "micro_batch": 1,
            "epochs": 1,
            "clip_norm": 1.0,
            "meta_init": not self.whole,
        }
        self._tokens: dict[str, Tokens] | None = None

    # ---- the model

    def _read_config(self) -> Any:
        directory, mapping = self.directory, self._library.CONFIG_MAPPING
        kind = directory.model_type
        directory.refuse_code(known=kind in mapping)
        if kind not in mapping:
            raise ConfigError(
                f"hf:{directory.name}: transformers {self._library.__version__} has no architecture {kind[:60]!r}: "
                "expected one that it knows; install a newer one, or write a Task"
            )
        if wrong := [n for n in _layers(directory.config) if not 0 <= n <= _MOST_LAYERS]:
            said = f"expected 0 to {_MOST_LAYERS} layers in config.json, got {wrong[0]}"
            raise ConfigError(f"hf:{directory.name}: {said}")
        try:
            config = mapping[kind].from_dict(directory.config)
        except Exception as error:
            said = " ".join(str(error).split())[:200]
            raise ConfigError(f"hf:{directory.name}: config.json is not valid for {kind}: {said}") from None
        config.use_cache, config.dtype = False, torch.float32
        return config

    def _class_of(self, config: Any) -> type[nn.Module]:
        mapping = self._library.MODEL_FOR_CAUSAL_LM_MAPPING
        if type(config) not in mapping:
            raise ConfigError(
                f"hf:{self.directory.name}: {config.model_type} is no causal language model: expected one with a head "
                "that predicts the next token, such as gpt2 or llama"
            )
        found = mapping[type(config)]
        return cast("type[nn.Module]", found[0] if isinstance(found, tuple) else found)

    def build_model(self) -> nn.Module:
        """The model with its weights; on the meta device without them.

        Raises: ConfigError for weights that do not fit.
        """
        meta = torch.get_default_device().type == "meta"
        if self.whole:
            if self.config is not None and self.config.meta_init:
                raise ConfigError(f"meta_init: expected false, because the model is built in one piece: {self.whole}")
            model = self._made(self._kind) if meta else self._read_whole()
            if not meta:
                self._refuse_looking_ahead(model)
            self._adapt(model)
            return model.train()
        if meta:
            return self._chained()
        seed = 0 if self.config is None else self.config.seed
        return build_by_module(self._chained, self.units, seed, torch.device("cpu"))[0]

    def _chained(self) -> nn.Module:
        from everstep.zoo.decoder_units import chained_class

        model: Any = self._made(chained_class(self._kind))
        self._adapt(model)
        model.make_chain(self.directory.weights())
        return model  # type: ignore[no-any-return]

    def _made(self, kind: type[nn.Module]) -> nn.Module:
        """The model, by the config. Raises: ConfigError for values that transformers cannot make a model of."""
        try:
            return kind(self.model_config)
        except Exception as error:
            said = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            raise ConfigError(f"hf:{self.directory.name}: config.json makes no {self._kind.__name__}: {said}") from None

    @property
    def _adapted(self) -> bool:
        return self.config is not None and has_adapter(self.config.task)

    def _adapt(self, model: nn.Module) -> None:
        if self._adapted:
            add_adapter(model, adapter_content(self.directory.name, self.config.task))

    def _read_whole(self) -> nn.Module:
        """A model that is not cut: transformers reads its weights, and says what does not fit."""
        weights = self.directory.weights()
        if weights is None:
            torch.manual_seed(build_seed(0 if self.config is None else self.config.seed))
            return self._made(self._kind)
        with torch.device("meta"):
            self._made(self._kind)
        try:
            model, said = self._kind.from_pretrained(  # type: ignore[attr-defined]
                str(self.directory.folder),
                config=self.model_config,
                dtype=torch.float32,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are named below
                use_safetensors=True,
                local_files_only=True,
                trust_remote_code=False,
            )
        except Exception as error:
            text = " ".join(str(error).split())[:200]
            raise ConfigError(
                f"hf:{self.directory.name}: weights are incomplete or do not fit config.json: {text}"
            ) from None
        wrong = {"missing_keys": "are incomplete: lacking", "unexpected_keys": "do not fit config.json:"}
        for kind, words in {**wrong, "mismatched_keys": "do not fit config.json:"}.items():
            if said.get(kind):
                first = sorted(said[kind])[0]
                name = first[0] if isinstance(first, tuple) else first
                raise ConfigError(f"hf:{self.directory.name}: weights {words} {str(name)[:100]!a}")
        return model  # type: ignore[no-any-return]

    def _refuse_looking_ahead(self, model: nn.Module) -> None:
        """Raises: ConfigError if a token's logits depend on later tokens, as those of an encoder do."""
        tokens = torch.arange(8).unsqueeze(0) % self._vocabulary()
        other = torch.cat((tokens[:, :-1], (tokens[:, -1:] + 1) % self._vocabulary()), 1)
        model.eval()
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            first, second = (model(input_ids=t, use_cache=False).logits for t in (tokens, other))
        changed = (first - second).abs().amax((0, 2))  # of no token but the last, or by the rounding of other kernels
        if changed[:-1].max() > 1e-5 * changed[-1]:
            raise ConfigError(
                f"hf:{self.directory.name}: {self.model_config.model_type} sees the tokens that it is to predict: "
                'expected a decoder ("is_decoder": true in config.json makes one of some encoders)'
            )

    def units(self, model: nn.Module) -> list[nn.Module]:
        """Units: embedding, blocks, norm with head; the whole model for an architecture that is not cut."""
        return [model] if self.whole else list(model.chain)  # type: ignore[arg-type]

    def parallelize(self, model: nn.Module, mesh: ShardMesh) -> None:
        plan = hub_plan(self.model_config)
        if self.whole:
            raise ConfigError(f"cell.tp: expected a model that is cut into units: {self.whole}")
        if self._adapted:
            raise ConfigError(
                f"task.lora: expected a model without adapters for cell.shards={mesh.shards}, whose plan does not say "
                "how LoRA's matrices are cut: set cell.tp=1 and cell.shards=1, or leave task.lora out"
            )
        mesh.require_length(self._context())
        shard_model(model, plan, mesh)

    def notes(self) -> list[str]:
        lines = []
        if self.directory.weights() is None:
            lines.append(f"{self.directory.name} is a config alone: the job begins with fresh weights, by its seed")
        if not self.directory.has_tokenizer and self._data()["train"].is_text:
            lines.append(f"{self.directory.name} has no tokenizer: the model is trained on bytes")
        if self.whole:
            lines.append(f"the model is one unit, which cannot be split into stages: {self.whole}")
        return lines

    # ---- the data

    def _data(self) -> dict[str, Tokens]:
        """Tokens by split, read once."""
        if self._tokens is None:
            data = self.option("data")
            if not data:
                raise ConfigError(
                    "hf: there is nothing to learn from: give --set task.data=PATH, a text file, a folder of them, a "
                    "token file (.npy, .bin) or a directory of the package datasets"
                )
            self._tokens = read_tokens(data, self.option("limit_bytes"), self._encoder)
            self._check_vocabulary()
        return self._tokens

    def _encoder(self) -> Any:
        """What makes tokens of text: the directory's tokenizer; None for bytes."""
        size = self._vocabulary()
        if not self.directory.has_tokenizer:
            self.directory.refuse_unread_tokenizer()
            if size < 256:
                raise ConfigError(
                    f"hf:{self.directory.name} has no tokenizer and a vocabulary of {size}, which is too small for "
                    "bytes (256): add the tokenizer's files, or give task.data as a file of tokens"
                )
            return None
        files = self.directory.tokenizer_files()
        try:
            tokenizer = self._library.AutoTokenizer.from_pretrained(
                str(self.directory.folder), local_files_only=True, trust_remote_code=False
            )
        except Exception as error:
            said = " ".join(str(error).split())[:200]
            raise ConfigError(f"hf:{self.directory.name}: its tokenizer cannot be read: {said}") from None
        if len(tokenizer) <= len(tokenizer.all_special_ids):
            raise ConfigError(
                f"hf:{self.directory.name}: the vocabulary of its tokenizer is empty: fetch its files again"
            )
        return tokenizer, files

    def _vocabulary(self) -> int:
        return int(self.model_config.get_text_config().vocab_size)

    def _check_vocabulary(self) -> None:
        for tokens in (self._tokens or {}).values():
            least, most = tokens.bounds()
            if least < 0 or most >= self._vocabulary():
                raise ConfigError(
                    f"task.data: token {most if least >= 0 else least} is out of the vocabulary of "
                    f"hf:{self.directory.name}, which has {self._vocabulary()}: the tokenizer is another model's"
                )

    def _context(self) -> int:
        own = getattr(self.model_config.get_text_config(), "max_position_embeddings", None)
        if own is not None and self.model_config.model_type in _COUNTED_FROM_PADDING:
            own -= self.model_config.pad_token_id + 1
        asked = int(self.option("context"))
        if asked < 0 or (own is not None and asked > own):
            raise ConfigError(f"task.context: expected 0 to {own}, the model's own maximum, got {asked}")
        if not asked and not own:
            raise ConfigError(f"task.context: {self.model_config.model_type} has no maximum of its own: give one")
        return asked or int(own or 0)

    def build_dataset(self, split: str) -> Dataset[Any]:
        if split not in ("train", "test"):
            raise ConfigError(f'expected the split "train" or "test", got {split!r}')
        data, context = self._data(), self._context()
        if "test" in data:
            return TokenWindows(data[split], context)
        return TokenWindows(data["train"], context, _TEST_EVERY, kept=split == "test")

    # ---- training

    def build_optimizer(self, params: Iterable[nn.Parameter]) -> Optimizer:
        if self._adapted:
            usual = _RATES["adapter"]
        else:
            usual = _RATES["fresh" if self.directory.weights() is None else "read"]
        groups = [g for g in decay_groups(params, self.option("weight_decay")) if g["params"]]
        return AdamW(groups, lr=self.option("lr") or usual)

    def build_scheduler(self, optimizer: Optimizer) -> LRScheduler:
        steps = total_steps(self.config, len(self.build_dataset("train")), 1000)  # type: ignore[arg-type]
        return warmup_cosine(optimizer, steps, warmup=self.option("warmup"))

    def loss(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Loss: (sum over tokens, number of tokens). batch: (N, context + 1) int64."""
        logits = model(input_ids=batch[:, :-1]).logits
        targets = batch[:, 1:]
        return token_loss(logits, targets), torch.tensor(float(targets.numel()))

    def evaluation_batch(self) -> int:
        """64, or fewer if their logits would be too many, but at least as many as in training."""
        return max(int(self.config.micro_batch), min(64, _LOGITS_AT_ONCE // (self._context() * self._vocabulary())))

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
        """Metrics: loss per token, in nats, and the share of tokens predicted right."""
        logits = model(input_ids=batch[:, :-1]).logits
        return classification_metrics(logits.flatten(0, 1), batch[:, 1:].flatten())


def _layers(config: Mapping[str, Any]) -> Iterator[int]:
    """Numbers of layers that a config.json states, also for parts of the model. Some are built while it is read."""
    for name, value in config.items():
        if isinstance(value, dict):
            yield from _layers(value)
        elif name in ("num_hidden_layers", "num_layers", "n_layer", "n_layers") and isinstance(value, int):
            yield value
