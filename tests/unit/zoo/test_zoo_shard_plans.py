"""Models that are cut into virtual shards: the same bits at every degree, and the unsharded model's gradients."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn.utils import parametrizations, spectral_norm, weight_norm

from everstep.base.config import load_config
from everstep.base.errors import ConfigError, TaskError
from everstep.exact import shard_sums
from everstep.exact.seeding import seed_all
from everstep.exact.shard_plan import ShardPlan, gather_gradients, shard_model
from everstep.exact.shard_region import Column, RegionRule
from everstep.exact.shard_sums import ShardMesh
from everstep.train.shard_check import look_at_shards
from everstep.train.task import Task
from everstep.zoo.huggingface import HuggingFace
from everstep.zoo.recipe import token_loss
from everstep.zoo.shard_plans import hub_plan, transformer_plan
from everstep.zoo.text import TransformerText
from everstep.zoo.transformer import Attention, Transformer, TransformerConfig, TransformerHead
from hub_models import made
from sharded_ranks import on_ranks

WORDS, TOKENS, ROWS = 97, 16, 3


class Made:
    """A model before it is cut, its plan, and what makes logits of it."""

    def __init__(self, model: nn.Module, plan: Any, forward: Callable[[Tensor], Any]) -> None:
        self.model, self.plan, self.forward = model, plan, forward


def _zoo(dropout: float) -> Made:
    torch.manual_seed(3)
    model = Transformer(TransformerConfig(WORDS, TOKENS, 2, 32, 4, dropout))
    return Made(model, transformer_plan(model.config), model)


def _hub(config: Any) -> Made:
    from everstep.zoo.decoder_units import chained_class

    config.use_cache = False
    torch.manual_seed(3)
    kind = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    model = chained_class(kind)(config).train()
    model.make_chain(None)

    return Made(model, hub_plan(config), lambda tokens: model(tokens).logits)


def _rotary(kind: str, dropout: float, **more: Any) -> Made:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8}
    sizes |= {"num_key_value_heads": 4, "vocab_size": WORDS, "max_position_embeddings": TOKENS}
    return _hub(getattr(transformers, f"{kind}Config")(**sizes, attention_dropout=dropout, **more))


def _llama(dropout: float, **more: Any) -> Made:
    return _rotary("Llama", dropout, attention_bias=True, **more)


def _mistral(dropout: float) -> Made:
    return _rotary("Mistral", dropout, sliding_window=4)


def _qwen2(dropout: float) -> Made:
    """Biases of query, key and value are zeros at first; a window in the second of two layers."""
    return _rotary("Qwen2", dropout, use_sliding_window=True, sliding_window=4, max_window_layers=1)


def _gemma(dropout: float) -> Made:
    """Tied to an embedding that is scaled, with heads of a size of their own."""
    return _rotary("Gemma", dropout, head_dim=8)


def _gpt2(dropout: float) -> Made:
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": TOKENS, "vocab_size": WORDS}
    drops = {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
    return _hub(transformers.GPT2Config(**sizes, **drops))


def _tied(dropout: float) -> Made:
    return _llama(dropout, tie_word_embeddings=True)


KINDS = {"transformer": _zoo, "llama": _llama, "llama, tied": _tied, "gpt2": _gpt2}
KINDS |= {"mistral, sliding": _mistral, "qwen2, partly sliding": _qwen2, "gemma": _gemma}


def _batch(step: int) -> Tensor:
    return torch.randint(WORDS, (ROWS, TOKENS + 1), generator=torch.Generator().manual_seed(step))


def _loss(logits: Any, batch: Tensor) -> Tensor:
    return token_loss(logits, batch[:, 1:]) / batch[:, 1:].numel()


def _trained(made: Made, mesh: ShardMesh | None, updates: int) -> dict[str, Tensor]:
    """Parameters, the last gradients and the losses."""
    if mesh is not None:
        shard_model(made.model, made.plan, mesh)
    optimizer = torch.optim.AdamW(made.model.parameters(), lr=1e-2)
    losses = []
    for step in range(updates):
        torch.manual_seed(step)
        optimizer.zero_grad()
        loss = _loss(made.forward(_batch(step)[:, :-1]), _batch(step))
        loss.backward()  # type: ignore[no-untyped-call]
        if mesh is not None:
            gather_gradients(made.model, mesh)
        optimizer.step()
        losses.append(loss.detach())
    found = {"losses": torch.stack(losses)}
    for name, parameter in made.model.named_parameters():
        assert parameter.grad is not None, name
        found |= {name: parameter.detach(), f"gradient of {name}": parameter.grad}
    return found


def _at_degree(kind: str, shards: int, degree: int, dropout: float, *, sequence: bool) -> dict[str, Tensor]:
    """What a run on so many ranks gives: at all of them the same."""
    ranks = on_ranks(shards, degree, lambda mesh: _trained(KINDS[kind](dropout), mesh, 3), sequence=sequence)
    for found in ranks[1:]:
        assert _differing(ranks[0], found) == []
    return dict(ranks[0])


def _differing(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_every_degree_gives_the_same_bits(kind: str, sequence: bool) -> None:
    one = _at_degree(kind, 4, 1, 0.1, sequence=sequence)
    for degree in (2, 4):
        assert _differing(one, _at_degree(kind, 4, degree, 0.1, sequence=sequence)) == []


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_the_unsharded_model(kind: str, sequence: bool) -> None:
    wanted = _trained(KINDS[kind](0.0), None, 1)
    found = _trained(KINDS[kind](0.0), ShardMesh(4, sequence=sequence), 1)
    _compare_gradients(found, wanted)


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_settings_that_change_once_the_model_is_cut_count(kind: str, sequence: bool) -> None:
    """A dropout rate, as a scheduler may change it, and a module that no longer draws."""

    def change(model: nn.Module) -> None:
        for module in model.modules():
            for key in ("p", "dropout", "attention_dropout"):
                if type(vars(module).get(key)) is float:
                    setattr(module, key, 0.4)
        next(m for m in reversed(list(model.modules())) if isinstance(m, nn.Dropout | nn.Linear)).eval()

    def trained(mesh: ShardMesh, *, before: bool, changes: bool = True) -> dict[str, Tensor]:
        made = KINDS[kind](0.1)
        if before:
            change(made.model)
        shard_model(made.model, made.plan, mesh)
        if changes and not before:
            change(made.model)
        return _trained(made, None, 2)

    def here(**options: bool) -> dict[str, Tensor]:
        return trained(ShardMesh(4, sequence=sequence), **options)

    wanted, found = here(before=True), here(before=False)
    assert _differing(wanted, found) == [] and _differing(found, here(before=False, changes=False)) != []


def _compare_gradients(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    assert torch.allclose(found["losses"], wanted["losses"], atol=1e-5)
    for name, gradient in wanted.items():
        if name.startswith("gradient of"):
            assert (found[name] - gradient).abs().max() <= 1e-6 * max(1.0, float(gradient.abs().max())), name


@pytest.mark.parametrize("shards", [1, 3])
def test_other_numbers_of_shards_add_up_alike(shards: int) -> None:
    """Three shards: a tree that is not even, and a vocabulary that is."""

    def made() -> Made:
        torch.manual_seed(3)
        model = Transformer(TransformerConfig(WORDS, TOKENS, 1, 24, 3, 0.0))
        return Made(model, transformer_plan(model.config), model)

    _compare_gradients(_trained(made(), ShardMesh(shards), 1), _trained(made(), None, 1))


def test_without_gradients_logits_are_whole() -> None:
    plain, made = _zoo(0.0), _zoo(0.0)
    shard_model(made.model, made.plan, ShardMesh(4))
    with torch.no_grad():
        tokens = _batch(0)[:, :-1]
        assert torch.allclose(plain.model(tokens), made.model(tokens), atol=1e-5)


def test_shards_draw_apart() -> None:
    drawn = ShardMesh(4).each(lambda k: torch.rand(3), draws=True)
    assert len({tuple(one.tolist()) for one in drawn}) == 4


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_streams_of_shards_are_made_only_where_something_is_drawn(
    monkeypatch: pytest.MonkeyPatch, dropout: float
) -> None:
    made, after = list[int](), []
    monkeypatch.setattr(shard_sums, "seed_all", lambda seed: made.append(seed) or seed_all(seed))
    for rated in (True, False):
        one, before = _zoo(dropout), len(made)
        rules = [rule if rated else replace(rule, rates=None) for rule in one.plan.regions]
        shard_model(one.model, replace(one.plan, regions=rules), ShardMesh(4))
        torch.manual_seed(0)
        logits = one.forward(_batch(0)[:, :-1]).whole()
        after.append((logits, torch.get_rng_state()))
        assert len(made) - before == (16 if not rated else 8 if dropout else 0)  # by region, layer and shard
    assert all(map(torch.equal, *after))


def test_a_zero_of_an_embedding_has_one_sign_at_every_degree() -> None:
    def looked(mesh: ShardMesh) -> Tensor:
        made = _zoo(0.0)
        shard_model(made.model, made.plan, mesh)
        embedding = made.model.get_submodule("embedding.tokens")
        nn.init.constant_(cast(Tensor, embedding.weight), -0.0)
        return cast(Tensor, embedding(_batch(0)))

    for degree in (1, 2, 4):
        assert not any(bool(found.signbit().any()) for found in on_ranks(4, degree, looked))


def _refusal(plan: Any, shards: int, model: nn.Module | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        shard_model(model or _zoo(0.0).model, plan, ShardMesh(shards))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_heads_that_the_shards_do_not_divide_are_named() -> None:
    said = _refusal(_zoo(0.0).plan, 8)
    assert "blocks.0.attention.qkv.weight is [96, 32], of 4 heads" in said and "8 shards" in said


def test_grouped_heads_that_the_shards_do_not_divide_are_named() -> None:
    made = _llama(0.0)
    assert "k_proj.weight is [16, 32], of 4 heads" in _refusal(made.plan, 8, made.model)


def test_a_size_that_the_shards_do_not_divide_is_named() -> None:
    plan = ShardPlan([RegionRule("blocks.*", {"up": Column()}, ["down"], method="perceptron")], _zoo(0.0).plan.sequence)
    assert "blocks.0.up.weight is [128, 32]: expected a size that 3 shards divide, got 128" in _refusal(plan, 3)


def test_too_few_words_are_refused() -> None:
    plan = ShardPlan([], _zoo(0.0).plan.sequence, "embedding.tokens")
    assert "embedding.tokens.weight is [97, 32]" in _refusal(plan, 98)


def test_a_plan_that_names_no_module_is_refused() -> None:
    whole = _zoo(0.0).plan
    assert "names blocks.*.mlp" in _refusal(replace(whole, regions=[RegionRule("blocks.*.mlp", {}, [])]), 4)
    assert "names tokens" in _refusal(replace(whole, embedding="tokens"), 4)
    rule = RegionRule("blocks.*.attention", {"query": Column()}, ["out"])
    assert "names the module blocks.0.attention.query" in _refusal(replace(whole, regions=[rule]), 4)
    attention, perceptron = whole.regions
    for regions, missing in (
        ([replace(attention, after=["drop"]), perceptron], "attention.drop"),
        ([replace(attention, divided=["headz"]), perceptron], "attention.headz"),
        ([replace(attention, rates=["rate"]), perceptron], "attention.rate"),
        ([attention, replace(perceptron, method="mlp")], "mlp()"),
    ):
        said = _refusal(replace(whole, regions=regions), 4)
        assert f" blocks.0.{missing}, which is not there" in said and "set cell.tp=1" in said
    assert "names head.logit()" in _refusal(replace(whole, head_method="logit"), 4)


def test_a_module_that_is_wrapped_twice_is_refused() -> None:
    made = _zoo(0.0)
    again = [*made.plan.regions, made.plan.regions[0]]
    assert "wraps blocks.0.attention twice" in _refusal(replace(made.plan, regions=again), 4)
    column = {"qkv": Column(3, 4), "out": Column()}
    rule = RegionRule("blocks.*.attention", column, ["out"])
    assert "wraps blocks.0.attention.out twice" in _refusal(replace(made.plan, regions=[rule]), 4)
    shard_model(made.model, made.plan, ShardMesh(4))
    assert "wrapped already" in _refusal(made.plan, 4, made.model)


def test_what_a_plan_leaves_out_is_refused() -> None:
    rule = RegionRule("blocks.*.attention", {}, ["out"])
    assert "does not say how blocks.0.attention.qkv.weight" in _refusal(replace(_zoo(0.0).plan, regions=[rule]), 4)
    rule = RegionRule("blocks.*", {"norm1": Column()}, ["down"], method="perceptron")
    sequence = replace(_zoo(0.0).plan.sequence, between=[])
    assert "is a LayerNorm" in _refusal(ShardPlan([rule], sequence), 4)


def _patched(module: nn.Module) -> None:
    was = module.forward
    vars(module)["forward"] = lambda *args, **named: was(*args, **named)


def _subclassed(module: nn.Module) -> None:
    module.__class__ = type("Other", (type(module),), {})


def _ours(*args: Any) -> None:
    """A hook."""


ODD: dict[str, Callable[[nn.Module], Any]] = {
    "a forward hook": lambda module: module.register_forward_hook(_ours),
    "a forward pre-hook": lambda module: module.register_forward_pre_hook(_ours),
    "a backward hook": lambda module: module.register_full_backward_hook(_ours),
    "a backward pre-hook": lambda module: module.register_full_backward_pre_hook(_ours),
    "a hook on its gradient": lambda module: cast(Tensor, module.weight).register_hook(_ours),
}
"""What shards would pass over, by what it is called."""
CUT = ["blocks.0.attention.qkv", "blocks.0.down", "embedding.tokens", "head"]


@pytest.mark.parametrize("where", CUT)
@pytest.mark.parametrize("what", ODD)
def test_hooks_of_what_is_cut_are_refused_before_and_after_it(what: str, where: str) -> None:
    made, later = _zoo(0.0), _zoo(0.0)
    ODD[what](made.model.get_submodule(where))
    said = _refusal(made.plan, 4, made.model)
    assert what in said and (where in said or where == "head"), said  # whose weight is the embedding's
    shard_model(later.model, later.plan, ShardMesh(4))
    ODD[what](later.model.get_submodule(where))
    with pytest.raises(ConfigError, match=f"has {what}"):
        later.forward(_batch(0)[:, :-1])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_patched, "a method forward in the place"),
        (weight_norm, "weight_g, weight_v"),
        (spectral_norm, "weight_orig, weight_u"),
        (parametrizations.weight_norm, "is a ParametrizedLinear"),
        (_subclassed, "is a Other"),
        (lambda module: module.register_parameter("more", nn.Parameter(torch.ones(1))), "has more"),
    ],
)
def test_layers_that_do_more_than_their_weight_says_are_refused(change: Callable[[nn.Module], Any], said: str) -> None:
    made = _zoo(0.0)
    change(made.model.get_submodule("blocks.1.up"))
    found = _refusal(made.plan, 4, made.model)
    assert "blocks.1.up" in found and said in found, found


def test_what_a_loop_changes_in_what_is_cut_is_refused() -> None:
    for where in ("blocks.0.attention.out", "blocks.1.down", "embedding.tokens"):
        for change in (_patched, _subclassed) if where != "embedding.tokens" else (_subclassed,):
            made = _zoo(0.0)
            shard_model(made.model, made.plan, ShardMesh(4))
            change(made.model.get_submodule(where))
            with pytest.raises(ConfigError, match=f"{where} was changed after the model was cut"):
                made.forward(_batch(0)[:, :-1])
    made = _zoo(0.0)
    shard_model(made.model, made.plan, ShardMesh(4))
    cast(Any, made.model).blocks[1].down = nn.Linear(128, 32)
    with pytest.raises(ConfigError, match=r"down of blocks\.1 was replaced"):
        made.forward(_batch(0)[:, :-1])


class Contextual(Attention):
    """Computes with what others have set, and leaves something behind."""

    context: Any = None
    given: Any

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = super().forward(x)
        self.last = found.detach()
        return found if self.context is None else found * self.context["scale"]


class Setting(TransformerText):
    """Its loss sets an attribute of a module that is cut."""

    def build_model(self) -> nn.Module:
        model = Transformer(TransformerConfig(128, TOKENS, 2, 32, 4, 0.0))
        for block in cast(Any, model).blocks:
            block.attention.__class__ = Contextual
            block.attention.given = {}
        return model

    def build_dataset(self, split: str) -> Any:
        return [_batch(k)[0] for k in range(32)]

    def loss(self, model: nn.Module, batch: Any) -> Any:
        self.sets(cast(Any, model).blocks[1].attention)
        return _loss(model(batch[:, :-1]), batch)

    def sets(self, attention: Any) -> None:
        """Nothing."""


def _in_dict(attention: Any) -> None:
    attention.given["mask"] = torch.full((), 3.0)


@pytest.mark.parametrize(
    ("sets", "said"),
    [
        (
            lambda one: setattr(one, "context", {"scale": torch.full((), 3.0)}),
            r"context of Contextual in blocks\.1\.attention was",
        ),
        (lambda one: setattr(one, "bias", torch.ones(2)), "bias of Contextual"),
        (_in_dict, r"given\['mask'\] of Contextual"),
        (lambda one: setattr(one, "number", 3), ""),
        (lambda one: None, ""),
    ],
)
def test_what_is_set_in_a_module_that_is_cut_and_is_no_setting_is_refused(
    monkeypatch: pytest.MonkeyPatch, sets: Callable[[Any], None], said: str
) -> None:
    """Before a job starts, too, where the model computes as a whole before it is cut. What a module's own forward pass
    sets is its own affair."""
    monkeypatch.setattr(Setting, "sets", lambda task, attention: sets(attention))
    task = Setting()
    task.config = load_config([("task", dict(task.defaults)), ("test", {"cell.shards": 4, "cell.tp": 1})])
    made, mesh = task.build_model(), ShardMesh(4)
    shard_model(made, transformer_plan(cast(Any, made).config), mesh)
    losses = []
    for expected in (pytest.raises(ConfigError, match=said) if said else nullcontext(),) * 2:
        with expected:
            losses.append(task.loss(made, torch.stack([_batch(k)[0] for k in range(2)])))
    assert len(losses) == (0 if said else 2)
    with pytest.raises(ConfigError, match=said) if said else nullcontext():
        look_at_shards(task)


def test_a_block_may_set_what_the_method_that_is_cut_does_not_use() -> None:
    made = _zoo(0.0)

    def keeping(self: Any, x: Tensor) -> Tensor:
        out: Tensor = kind.forward(self, x)
        self.seen = out.detach()
        return out

    block = cast(Any, made.model).blocks[0]
    kind = type(block)
    block.__class__ = type("Keeping", (kind,), {"forward": keeping})
    shard_model(made.model, made.plan, ShardMesh(4))
    for _ in range(2):
        made.forward(_batch(0)[:, :-1])
    block.up_scale = block.activation = torch.ones(1)
    made.forward(_batch(0)[:, :-1])


def test_hooks_of_all_modules_and_of_what_sees_parts_of_a_sequence_are_refused() -> None:
    made = _zoo(0.0)
    made.model.get_submodule("blocks.0").register_forward_hook(_ours)
    shard_model(made.model, made.plan, ShardMesh(4))
    handle = nn.modules.module.register_module_forward_hook(_ours)
    try:
        with pytest.raises(ConfigError, match="torch has a forward hook of all modules"):
            made.forward(_batch(0)[:, :-1])
    finally:
        handle.remove()
    for where in ("blocks.0", "blocks.1.norm2", "head.norm"):
        made = _zoo(0.0)
        made.model.get_submodule(where).register_forward_hook(_ours)
        with pytest.raises(ConfigError, match=f"{where} has a forward hook"):
            shard_model(made.model, made.plan, ShardMesh(4, sequence=True))


def _mixing(self: Any, x: Tensor) -> Tensor:
    mixed: Tensor = torch.tanh(Attention.forward(self, x))  # shards would be added up after it
    return mixed


def test_what_shards_do_not_make_up_is_found_by_comparison() -> None:
    """A class whose forward pass the plan does not fit, in a region, in the head, and between regions."""
    mixing = type("Mixing", (Attention,), {"forward": _mixing})
    scaled = type("Scaled", (TransformerHead,), {"logits": lambda self, x: 2 * TransformerHead.logits(self, x)})
    over = type("Over", (nn.LayerNorm,), {"forward": lambda self, x: nn.LayerNorm.forward(self, x - x.mean(1, True))})
    for where, kind in (("", None), ("blocks.1.attention", mixing), ("head", scaled), ("blocks.0.norm2", over)):
        made = _zoo(0.0)
        if kind is not None:
            made.model.get_submodule(where).__class__ = kind
        mesh = ShardMesh(4, sequence=True)
        shard_model(made.model.eval(), made.plan, mesh)
        with torch.no_grad(), mesh.comparing():
            if kind is None:
                made.forward(_batch(0)[:, :-1])
                continue
            with pytest.raises(ConfigError, match=f"{where}.* is another one by shards"):
                made.forward(_batch(0)[:, :-1])


@pytest.mark.parametrize("kind", KINDS)
def test_plans_stand_the_comparison(kind: str) -> None:
    made, mesh = KINDS[kind](0.1), ShardMesh(4, sequence=True)
    shard_model(made.model.eval(), made.plan, mesh)
    with torch.no_grad(), mesh.comparing():
        assert _loss(made.forward(_batch(0)[:, :-1]), _batch(0)) > 0


@pytest.mark.parametrize("name", ["head.weight", "blocks.0.attention.qkv.weight", "blocks.1.down.bias"])
def test_gradients_that_are_derived_again_are_refused(name: str) -> None:
    made = _zoo(0.0)
    shard_model(made.model, made.plan, ShardMesh(4))
    loss = _loss(made.forward(_batch(0)[:, :-1]), _batch(0))
    with pytest.raises(ConfigError, match="first derivatives alone"):
        torch.autograd.grad(loss, made.model.get_parameter(name), create_graph=True)


@pytest.mark.parametrize("sequence", [False, True])
def test_gradients_that_a_loss_asks_for_are_whole_at_each_rank(sequence: bool) -> None:
    torch.set_num_threads(1)

    def asked(mesh: ShardMesh) -> list[Tensor]:
        made = _zoo(0.0)
        shard_model(made.model, made.plan, mesh)
        loss = _loss(made.forward(_batch(0)[:, :-1]), _batch(0))
        found = torch.autograd.grad(loss, list(made.model.parameters()), retain_graph=True)
        with mesh.deriving():
            loss.backward()  # type: ignore[no-untyped-call]
        own = made.model.get_parameter("embedding.tokens.weight").grad
        assert own is not None and bool((own == 0).all(1).any()) == (mesh.degree > 1)  # of other ranks' words
        return list(found)

    wanted = asked(ShardMesh(4, sequence=sequence))
    for degree in (2, 4):
        for found in on_ranks(4, degree, asked, sequence=sequence):
            assert all(map(torch.equal, found, wanted))


def test_other_architectures_and_tasks_without_a_plan_are_refused() -> None:
    with pytest.raises(ConfigError, match="got qwen3"):
        hub_plan(transformers.Qwen3Config())
    with pytest.raises(ConfigError, match="Task has no plan of what is cut"):
        Task().parallelize(nn.Linear(1, 1), ShardMesh(1))


def test_lora_and_a_context_that_the_shards_do_not_divide_are_refused(tmp_path: Path) -> None:
    made(tmp_path, "llama, tied")

    def refusal(task: HuggingFace | TransformerText, **options: Any) -> str:
        given = {f"task.{name.replace('__', '.')}": value for name, value in options.items()}
        task.config = load_config([("defaults", task.defaults), ("test", given)])
        with pytest.raises(ConfigError) as caught:
            task.parallelize(nn.Linear(1, 1), ShardMesh(4, sequence=True))
        return str(caught.value)

    said = refusal(HuggingFace(str(tmp_path)), lora__rank=2)
    assert said.startswith("task.lora: expected a model without adapters for cell.shards=4")
    hub, text = (refusal(task, context=6) for task in (HuggingFace(str(tmp_path)), TransformerText()))
    assert "multiple of cell.shards=4, got 6 tokens" in hub and hub == text


def test_tokens_that_are_no_words_and_odd_sequences_are_refused() -> None:
    made = _zoo(0.0)
    shard_model(made.model, made.plan, ShardMesh(4, sequence=True))
    with pytest.raises(TaskError, match="expected tokens from 0 to 96, got 0 to 97"):
        made.model(torch.tensor([[0, 97]]))
    with pytest.raises(ConfigError, match=r"cell\.sp: expected sequences whose length is a multiple of cell.shards=4"):
        made.model(torch.zeros(1, 6, dtype=torch.int64))
    with pytest.raises(TaskError, match="expected targets"):
        made.model(torch.zeros(1, 8, dtype=torch.int64)).loss(torch.full((1, 8), -100))
