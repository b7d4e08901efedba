"""Decoders of `transformers` as a chain of units: embedding, blocks, norm and head.

The wrappers share the model's own modules and sit in a tuple, where nn.Module does not look, so all names stay those of
`transformers`. Before a model is trained as a chain, a small twin of it computes the same logits both ways: a version
of `transformers` that changes an architecture's forward pass is found, and the model stays in one piece.
"""

from __future__ import annotations

import copy
import inspect
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import masking_utils
from transformers.modeling_outputs import CausalLMOutputWithPast

from everstep.base.errors import ConfigError
from everstep.zoo.hub_directory import WeightFiles

_BY_LAYER = ("qwen2", "qwen3", "gemma2")
"""Architectures whose config says the kind of attention for each layer."""
KNOWN = ("gpt2", "llama", "mistral", "gemma", *_BY_LAYER)
"""Architectures that are cut into units, by model_type."""
_FULL, _SLIDING = "full_attention", "sliding_attention"
_Carried = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]
"""(hidden (N, T, width), cosines and sines of the positions, full mask, mask of a sliding window)."""


def _mask(make: Any, config: Any, hidden: Tensor, positions: Tensor) -> Tensor | None:
    cache = "cache" if "cache" in inspect.signature(make).parameters else "past_key_values"
    given = {"config": config, "inputs_embeds": hidden, "attention_mask": None, "position_ids": positions}
    return cast("Tensor | None", make(**given, **{cache: None}))


def _kinds(config: Any) -> list[str]:
    """Kind of attention of each layer."""
    if config.model_type in _BY_LAYER:
        return list(config.layer_types[: config.num_hidden_layers])
    slides = config.model_type == "mistral" and config.sliding_window is not None
    return [_SLIDING if slides else _FULL] * config.num_hidden_layers


class DecoderEmbedding(nn.Module):
    """Tokens -> what the blocks take: hidden states, rotary positions, masks."""

    def __init__(self, inner: nn.Module, config: Any) -> None:
        super().__init__()
        self.embed_tokens, self.rotary_emb, self.config = inner.embed_tokens, inner.rotary_emb, config
        self.kinds = frozenset(_kinds(config))

    def forward(self, input_ids: Tensor) -> _Carried:
        hidden = cast(nn.Module, self.embed_tokens)(input_ids)
        positions = torch.arange(hidden.shape[1], device=hidden.device).unsqueeze(0)
        cos, sin = cast(nn.Module, self.rotary_emb)(hidden, positions)
        full, window = masking_utils.create_causal_mask, masking_utils.create_sliding_window_causal_mask
        masks = [
            _mask(make, self.config, hidden, positions) if kind in self.kinds else None
            for kind, make in ((_FULL, full), (_SLIDING, window))
        ]
        return hidden, cos, sin, masks[0], masks[1]


class DecoderLayer(nn.Module):
    """One block with rotary positions."""

    def __init__(self, layer: nn.Module, kind: str) -> None:
        super().__init__()
        self.layer = layer
        self.slides = kind == _SLIDING

    def forward(self, carried: _Carried) -> _Carried:
        hidden, cos, sin, full, window = carried
        mask = window if self.slides else full
        made = self.layer(hidden, attention_mask=mask, position_embeddings=(cos, sin), use_cache=False)
        return made, cos, sin, full, window


class LearnedEmbedding(nn.Module):
    """Tokens and learned positions (GPT-2) -> what the blocks take."""

    def __init__(self, inner: nn.Module, config: Any) -> None:
        super().__init__()
        self.wte, self.wpe, self.drop, self.config = inner.wte, inner.wpe, inner.drop, config

    def forward(self, input_ids: Tensor) -> _Carried:
        embedded = cast(nn.Module, self.wte)(input_ids)
        positions = torch.arange(embedded.shape[1], device=embedded.device).unsqueeze(0)
        hidden = cast(nn.Module, self.drop)(embedded + cast(nn.Module, self.wpe)(positions))
        return hidden, None, None, _mask(masking_utils.create_causal_mask, self.config, embedded, positions), None


class LearnedLayer(nn.Module):
    """One block of GPT-2."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, carried: _Carried) -> _Carried:
        return self.layer(carried[0], None, carried[3], use_cache=False), *carried[1:]


class DecoderHead(nn.Module):
    """Last norm and logits. A tied weight is the embedding's own Parameter: both units have it."""

    def __init__(self, norm: nn.Module, lm_head: nn.Module, cap: float | None) -> None:
        super().__init__()
        self.norm, self.lm_head, self.cap = norm, lm_head, cap

    def forward(self, carried: _Carried) -> CausalLMOutputWithPast:
        logits = self.lm_head(self.norm(carried[0]))
        if self.cap is not None:
            logits = torch.tanh(logits / self.cap) * self.cap
        return CausalLMOutputWithPast(logits=logits)


def _chain(model: Any) -> tuple[nn.Module, ...]:
    config = model.config
    cap = getattr(config, "final_logit_softcapping", None)
    if config.model_type == "gpt2":
        inner = model.transformer
        blocks = [LearnedLayer(block) for block in inner.h]
        return LearnedEmbedding(inner, config), *blocks, DecoderHead(inner.ln_f, model.lm_head, cap)
    inner = model.model
    layers = [DecoderLayer(layer, kind) for layer, kind in zip(inner.layers, _kinds(config), strict=True)]
    return DecoderEmbedding(inner, config), *layers, DecoderHead(inner.norm, model.lm_head, cap)


class ChainedDecoder:
    """Mixed into a model of `transformers`: its forward pass goes through the units, each of which is seeded alike
    (dropout) whether the job is cut or not, and its modules are filled one by one."""

    chain: tuple[nn.Module, ...] = ()
    weights: WeightFiles | None = None
    files: dict[str, str]

    def make_chain(self, weights: WeightFiles | None) -> None:
        """Make the units, after all modules are in place. weights: None for fresh ones.

        Raises: ConfigError if the weights do not fit.
        """
        self.chain = _chain(self)
        self.weights = weights
        self.files = {} if weights is None else names_in_files(self, weights)

    def forward(self, input_ids: Tensor) -> CausalLMOutputWithPast:
        """input_ids: (N, T) int64 -> logits (N, T, vocabulary)."""
        x: Any = input_ids
        for unit in self.chain:
            x = unit(x)
        return cast(CausalLMOutputWithPast, x)

    def fill_module(self, path: str, module: nn.Module) -> None:
        """Give a module, which has memory by now, its first values: fresh ones under the present seed, or those of the
        weights' files. path: its name in the model."""
        fresh = [f"{path}.{name}" for name in module._parameters if f"{path}.{name}" not in self.files]
        if fresh or module._buffers:
            if hasattr(module, "reset_parameters"):
                cast(Any, module).reset_parameters()
            if ".lora_B." in path:
                nn.init.zeros_(cast(Tensor, module.weight))
            elif path.endswith((".lora_embedding_A", ".lora_embedding_B")):  # one of both is not 0, so that they learn
                for value in module.parameters():
                    value.zero_() if path.endswith("A") else value.normal_()
            elif ".lora_A." not in path:
                self._init_weights(module)  # type: ignore[attr-defined]
            if path.endswith(".c_proj"):  # GPT-2 scales these from the module around them
                self._init_weights(self.get_submodule(path.rpartition(".")[0]))  # type: ignore[attr-defined]
        for name, parameter in module._parameters.items():
            if parameter is not None and f"{path}.{name}" in self.files:
                parameter.copy_(cast(WeightFiles, self.weights).tensor(self.files[f"{path}.{name}"]))


def names_in_files(model: Any, weights: WeightFiles) -> dict[str, str]:
    """Name of each parameter -> its name in the files, which may lack the inner model's prefix.

    Raises: ConfigError naming the first tensor that is missing, too much, or of another shape.
    """
    prefix = f"{model.base_model_prefix}."
    tied = dict(getattr(model, "all_tied_weights_keys", None) or {})
    found: dict[str, str] = {}
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            continue
        own = name.replace(".base_layer.", ".")
        choices = [own, own.removeprefix(prefix), *(other for other, first in tied.items() if first == own)]
        stored = next((choice for choice in choices if choice in weights.shapes), None)
        if stored is None:
            raise _incomplete(weights, own)
        if weights.shapes[stored] != tuple(parameter.shape):
            raise ConfigError(
                f"{_whose(weights)} do not fit config.json: {own} is {list(weights.shapes[stored])} in the files, "
                f"{list(parameter.shape)} by the config; {_REMEDY}"
            )
        weights.refuse_other(stored)
        found[name] = stored
    known = set(found.values()) | {form for name in tied for form in (name, name.removeprefix(prefix))}
    harmless = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")
    more = [name for name in weights.shapes if name not in known and not name.endswith(harmless)]
    if more:
        raise ConfigError(f"{_whose(weights)} do not fit config.json: the model has no {more[0][:100]!a}; {_REMEDY}")
    return found


def refuse_other_model(kind: type[nn.Module], config: Any, weights: WeightFiles) -> None:
    """Raises: ConfigError, before anything is read, if these are incomplete, another model's, or no floats. A file may
    have old names of a model's tensors, which transformers knows: where some are strange, those that lack say nothing.
    """
    try:
        with torch.device("meta"):
            model = cast(Any, kind)(config)
    except Exception:  # the worker, which needs no such model, will hear of it
        return
    prefix, names = f"{model.base_model_prefix}.", dict[int, list[str]]()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    there, known = ({name.removeprefix(prefix) for name in found} for found in (weights.shapes, model.state_dict()))
    lacking = [tied[0] for tied in names.values() if there.isdisjoint(name.removeprefix(prefix) for name in tied)]
    if lacking and (there <= known or there.isdisjoint(known)):
        raise _incomplete(weights, lacking[0])
    parameters = {name.removeprefix(prefix) for tied in names.values() for name in tied}
    for name in weights.shapes:
        if name.removeprefix(prefix) in parameters:
            weights.refuse_other(name)


_REMEDY = "take the config.json that they were saved with"


def _incomplete(weights: WeightFiles, name: str) -> ConfigError:
    return ConfigError(
        f"{_whose(weights)} are incomplete: {name} is in none of the files; fetch them again, or name its config.json "
        "alone for fresh weights"
    )


def _whose(weights: WeightFiles) -> str:
    return f"weights in {weights.files[0].parent}"


def chained_class(kind: type[nn.Module]) -> type[Any]:
    """The class of a model of `transformers`, with the forward pass through its units."""
    return type(f"Chained{kind.__name__}", (ChainedDecoder, kind), {})


def why_whole(kind: type[nn.Module], config: Any) -> str:
    """Why a model of this class and config cannot be trained as a chain of units; "" if it can."""
    if config.model_type not in KNOWN:
        return f"units are known for {', '.join(KNOWN)}, not for {config.model_type}"
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(0)
            twin = cast(Any, kind)(_small(config)).eval()
            chained = chained_class(kind)(_small(config)).eval()
            chained.load_state_dict(twin.state_dict())
            chained.make_chain(None)
            tokens = torch.arange(24).view(2, 12) % 7
            same = torch.equal(twin(tokens, use_cache=False).logits, chained(tokens).logits)
    except Exception as error:
        said = " ".join(str(error).split())[:150]
        return f"a small model of this config cannot be made ({type(error).__name__}: {said})"
    return "" if same else "this version of transformers computes it otherwise than its units do"


def _small(config: Any) -> Any:
    """A config with the same forward pass, and few parameters."""
    small = copy.deepcopy(config)
    sizes: dict[str, Any]
    if config.model_type == "gpt2":
        sizes = {"n_embd": 16, "n_head": 2, "n_layer": 2, "n_inner": None, "n_positions": 32}
    else:
        sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
        sizes |= {"intermediate_size": 32, "num_hidden_layers": 2}
    sizes |= {"vocab_size": 32, "pad_token_id": None, "bos_token_id": 0, "eos_token_id": 0}
    if getattr(config, "sliding_window", None) is not None:
        sizes["sliding_window"] = 4
    kinds = list(dict.fromkeys(getattr(config, "layer_types", None) or ()))
    if kinds:
        sizes["layer_types"] = [kinds[0], kinds[-1]]
    for name, value in sizes.items():
        setattr(small, name, value)
    return small
