"""Models that are cut into virtual shards: the same bits at every degree, and the unsharded model's gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from everstep.exact.shard_plan import shard_model, whole_tensors
from everstep.exact.shard_sums import ShardMesh
from everstep.zoo.recipe import token_loss
from everstep.zoo.shard_plans import hub_plan, transformer_plan
from everstep.zoo.transformer import Transformer, TransformerConfig
from tests.sharded_ranks import on_ranks

WORDS, TOKENS, ROWS = 97, 16, 3


class Made:
    """A model before it is cut, its plan, and what makes logits of it."""

    def __init__(self, model: nn.Module, plan: Any, chain: Callable[[], Callable[[Tensor], Any]]) -> None:
        self.model, self.plan, self.chain = model, plan, chain


def _zoo(dropout: float) -> Made:
    torch.manual_seed(3)
    model = Transformer(TransformerConfig(WORDS, TOKENS, 2, 32, 4, dropout))
    return Made(model, transformer_plan(model.config), lambda: model)


def _hub(config: Any) -> Made:
    from everstep.zoo.decoder_units import chained_class

    config.use_cache = False
    torch.manual_seed(3)
    kind = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    model = chained_class(kind)(config).train()
    model.make_chain(None)

    def chain() -> Callable[[Tensor], Any]:
        model.make_chain(None)
        return lambda tokens: model(tokens).logits

    return Made(model, hub_plan(config), chain)


def _llama(dropout: float, **more: Any) -> Made:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8}
    sizes |= {"num_key_value_heads": 4, "vocab_size": WORDS, "max_position_embeddings": TOKENS}
    return _hub(transformers.LlamaConfig(**sizes, attention_dropout=dropout, attention_bias=True, **more))


def _gpt2(dropout: float) -> Made:
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": TOKENS, "vocab_size": WORDS}
    drops = {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
    return _hub(transformers.GPT2Config(**sizes, **drops))


def _tied(dropout: float) -> Made:
    return _llama(dropout, tie_word_embeddings=True)


KINDS = {"transformer": _zoo, "llama": _llama, "llama, tied": _tied, "gpt2": _gpt2}


def _batch(step: int) -> Tensor:
    return torch.randint(WORDS, (ROWS, TOKENS + 1), generator=torch.Generator().manual_seed(step))


def _loss(logits: Any, batch: Tensor) -> Tensor:
    return token_loss(logits, batch[:, 1:]) / batch[:, 1:].numel()


def _trained(made: Made, mesh: ShardMesh | None, updates: int) -> tuple[dict[str, Tensor], Any, list[float]]:
    """(parameters and the last gradients by name, what they were cut from, losses)."""
    table = None if mesh is None else shard_model(made.model, made.plan, mesh)
    forward = made.chain()
    optimizer = torch.optim.AdamW(made.model.parameters(), lr=1e-2)
    losses = []
    for step in range(updates):
        torch.manual_seed(step)
        optimizer.zero_grad()
        loss = _loss(forward(_batch(step)[:, :-1]), _batch(step))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(float(loss))
    named = dict(made.model.named_parameters())
    found = {name: p.detach() for name, p in named.items()}
    return found, ({k: v for k, v in (table or {}).items()}, {n: p.grad for n, p in named.items()}), losses


def _at_degree(kind: str, shards: int, degree: int, dropout: float, *, sequence: bool) -> dict[str, Tensor]:
    """Parameters, gradients and losses, whole, of a run on so many ranks."""
    updates = 3
    ranks = on_ranks(shards, degree, lambda mesh: _trained(KINDS[kind](dropout), mesh, updates), sequence=sequence)
    tables = [about[0] for _, about, _ in ranks]
    assert all(losses == ranks[0][2] for _, _, losses in ranks)
    for name, origin in tables[0].items():
        if origin.shard is None:
            for found, (table, grads), _ in ranks:
                assert torch.equal(found[name], ranks[0][0][name]), name
                assert torch.equal(grads[name], ranks[0][1][1][name]), name
    whole = whole_tensors([found for found, _, _ in ranks], tables, shards)
    grads = whole_tensors([about[1] for _, about, _ in ranks], tables, shards)
    return {**whole, **{f"gradient of {n}": g for n, g in grads.items()}, "losses": torch.tensor(ranks[0][2])}


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_every_degree_gives_the_same_bits(kind: str, sequence: bool) -> None:
    one = _at_degree(kind, 4, 1, 0.1, sequence=sequence)
    for degree in (2, 4):
        other = _at_degree(kind, 4, degree, 0.1, sequence=sequence)
        assert one.keys() == other.keys()
        assert [name for name in one if not torch.equal(one[name], other[name])] == []


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_the_unsharded_model(kind: str, sequence: bool) -> None:
    plain, (_, wanted), losses = _trained(KINDS[kind](0.0), None, 1)
    ((found, (table, grads), own),) = on_ranks(
        4, 1, lambda mesh: _trained(KINDS[kind](0.0), mesh, 1), sequence=sequence
    )
    whole = whole_tensors([grads], [table], 4)
    assert whole.keys() == wanted.keys()
    assert abs(own[0] - losses[0]) < 1e-5
    for name, gradient in wanted.items():
        assert (whole[name] - gradient).abs().max() <= 1e-6 * max(1.0, float(gradient.abs().max())), name
