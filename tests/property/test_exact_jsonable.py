"""The JSON codec brings back types and bits, and refuses what it does not know by name."""

from __future__ import annotations

import json
import math
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.base.errors import CheckpointCorrupt, ConfigError
from everstep.exact.jsonable import TypedValues, canonical, decode, encode
from sampling import examples

KEYS = st.one_of(st.text(max_size=5), st.integers(), st.booleans(), st.none(), st.floats(allow_nan=False))
LEAVES = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), st.binary(max_size=8))
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(KEYS, inner, max_size=4),
        st.dictionaries(KEYS, inner, max_size=3).map(OrderedDict),
        st.dictionaries(KEYS, st.integers(), max_size=3).map(Counter),
        st.lists(inner, max_size=3).map(lambda items: deque(items, maxlen=5)),
        st.sets(st.integers(), max_size=4),
        st.frozensets(st.integers(), max_size=4),
        st.dictionaries(KEYS, inner, max_size=3).map(lambda items: defaultdict(list, items)),
    ),
    max_leaves=20,
)


def same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return (math.isnan(a) and math.isnan(b)) or struct.pack("d", a) == struct.pack("d", b)
    if isinstance(a, defaultdict) and a.default_factory is not b.default_factory:
        return False
    if isinstance(a, dict):
        return all(same(x, y) for x, y in zip(a.items(), b.items(), strict=True))
    if isinstance(a, deque):
        return a.maxlen == b.maxlen and same(list(a), list(b))
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


@given(VALUES)
@settings(max_examples=examples(100), deadline=None)
def test_round_trip(value: Any) -> None:
    tensors: dict[str, torch.Tensor] = {}
    node = encode(TypedValues(value=value), "x", tensors)
    text = json.dumps(node, allow_nan=False)
    assert same(decode(json.loads(text), tensors), {"value": value})
    canonical(json.loads(text))


def test_tensors_arrays_and_rare_types() -> None:
    value = {
        "t": torch.arange(3),
        "deep": [{"t": torch.tensor(1.5)}],
        "a": np.array([[1.0, -0.0]]),
        "s": np.float32(0.1),
        "i": np.int64(-3),
        "d": torch.bfloat16,
        "dev": torch.device("cpu"),
        "size": torch.Size([2, 3]),
    }
    tensors: dict[str, torch.Tensor] = {}
    back = decode(json.loads(json.dumps(encode(value, "x", tensors))), tensors)
    assert sorted(tensors) == ["x/a", "x/deep/0/t", "x/t"]
    assert torch.equal(back["t"], value["t"]) and back["deep"][0]["t"].item() == 1.5  # type: ignore[arg-type]
    assert back["a"].tobytes() == value["a"].tobytes() and back["s"] == value["s"]  # type: ignore[attr-defined]
    assert type(back["s"]) is np.float32 and type(back["i"]) is np.int64 and back["d"] is torch.bfloat16
    assert back["dev"] == value["dev"] and back["size"] == (2, 3)


def test_names_do_not_collide() -> None:
    tensors: dict[str, torch.Tensor] = {}
    value = {"a": {"b": torch.tensor(1)}, "a/b": torch.tensor(2), 1: torch.tensor(3), "1": torch.tensor(4)}
    back = decode(encode(value, "x", tensors), tensors)
    assert [back["a"]["b"].item(), back["a/b"].item(), back[1].item(), back["1"].item()] == [1, 2, 3, 4]


@pytest.mark.parametrize("bad", [object(), lambda: 0, 1j, torch.Generator(), np.array(["x"]), Exception()])
def test_unknown_types_are_refused_by_name(bad: Any) -> None:
    with pytest.raises(ConfigError, match="x/inner/0"):
        encode({"inner": [bad]}, "x", {})


def test_cycles_and_odd_keys_are_refused() -> None:
    cycle: list[Any] = []
    cycle.append(cycle)
    with pytest.raises(ConfigError, match="contain itself"):
        encode(cycle, "x", {})
    with pytest.raises(ConfigError, match="key"):
        encode({object(): 1}, "x", {})


@pytest.mark.parametrize(
    "bad", [{"nope": 1}, {"f": "zz"}, {"f": 1, "tuple": []}, {"tensor": "missing"}, {"dtype": "nn"}, 1.5]
)
def test_foreign_json_is_refused(bad: Any) -> None:
    with pytest.raises(CheckpointCorrupt):
        decode(bad, {})


class Doubling(dict):  # type: ignore[type-arg]
    """A dict with a will of its own."""


@pytest.mark.parametrize("bad", [Doubling(a=1), defaultdict(lambda: 1), type("Own", (set,), {})()])
def test_what_would_come_back_as_something_else_is_refused_by_name(bad: Any) -> None:
    with pytest.raises(ConfigError, match="state x/inner is a"):
        encode(TypedValues(inner=bad), "x", {})


def test_elsewhere_they_come_back_as_plain_ones() -> None:
    given = {"a": Doubling(b=1), "c": defaultdict(lambda: 1, d=2), "e": frozenset({1})}
    assert decode(encode(given, "x", {}), {}) == {"a": {"b": 1}, "c": {"d": 2}, "e": {1}}


def test_older_sets_and_dicts_are_read() -> None:
    assert decode({"set": [2, 1]}, {}) == {1, 2} and type(decode({"dict": [["a", 1]]}, {})) is dict


def test_canonical_ignores_order_of_insertion_only() -> None:
    a, b = (encode(d, "x", {}) for d in ({"p": 1, "q": {"r": 2, "s": 3}}, {"q": {"s": 3, "r": 2}, "p": 1}))
    assert a != b and canonical(a) == canonical(b)
    assert canonical(encode([1, 2], "x", {})) != canonical(encode([2, 1], "x", {}))
