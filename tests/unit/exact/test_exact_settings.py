"""How a model is set: what a loop changes is carried or refused by name, what forward passes change is neither."""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from everstep.base.errors import CheckpointCorrupt, ConfigError, Uncarried
from everstep.exact import flags
from everstep.exact.group_values import hyperparameters, put_values
from everstep.exact.settings import Settings
from everstep.exact.state import ModelState
from everstep.protocol.driver.records import SETTING_BYTES, SETTINGS

OWN = SETTINGS[:-1]
"""The running statistics are the stage's."""


class Own(nn.Module):
    """With attributes as people have them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.scale, self.sizes, self.table = 1.0, [1, 2], {"a": 0.5}
        self.calls, self.cache, self.cached = 0, None, 0
        self.act: nn.Module | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.cache, self.cached = torch.ones(3), 3
        self.relu = nn.ReLU()  # again and again
        out: Tensor = self.relu(self.layer(x)) * self.scale
        return out


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Own(), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Tanh(), nn.Linear(4, 2))


class Life:
    """A model in its loop."""

    def __init__(self, make: Callable[[], nn.Module] = build) -> None:
        self.model: Any = make()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.settings = Settings(self.model, self.optimizer)
        self.settings.begin()

    def step(self, lanes: int = 1, inside: Callable[[], None] = lambda: None) -> bytes:
        self.settings.before_lanes()
        for _ in range(lanes):
            inside()
            self.model(torch.ones(2, 4, dtype=torch.float32)).sum().backward()
        digests = self.settings.digests()
        self.settings.after_update()
        return digests

    def facts(self) -> str:
        modules = [
            (n, m.training, getattr(m, "p", None), getattr(m, "momentum", None))
            for n, m in self.named()
            if n != "0.relu"
        ]
        own = [(m.scale, m.sizes, m.table) for _, m in self.named() if isinstance(m, Own)]
        grads = [p.requires_grad for p in self.model.parameters()]
        return repr((modules, own, grads, [g["momentum"] for g in self.optimizer.param_groups], flags.read()))

    def named(self) -> Iterator[tuple[str, Any]]:
        yield from self.model.named_modules()


@pytest.fixture(autouse=True)
def _flags_again() -> Iterator[None]:
    before = dict(zip(flags.NAMES, flags.read(), strict=True))
    yield
    flags.write(before)


def set_flags(_: Life) -> None:
    torch.set_flush_denormal(True)
    torch.set_float32_matmul_precision("medium")
    torch.set_default_dtype(torch.float64)
    torch.backends.cudnn.benchmark = True
    torch.use_deterministic_algorithms(True, warn_only=True)


PLAIN: dict[str, tuple[str, Callable[[Life], object]]] = {
    "mode of a layer": ("modes", lambda life: life.model[1].eval()),
    "mode of all": ("modes", lambda life: life.model.eval()),
    "requires_grad": ("requires_grad", lambda life: life.model[0].requires_grad_(False)),
    "flags": ("flags of torch", set_flags),
    "momentum": ("hyperparameters", lambda life: life.optimizer.param_groups[0].update(momentum=0.5, nesterov=True)),
    "dropout": ("attributes of modules", lambda life: setattr(life.model[2], "p", 0.25)),
    "a number": ("attributes of modules", lambda life: setattr(life.model[0], "scale", 2.0)),
    "another type": ("attributes of modules", lambda life: setattr(life.model[1], "momentum", None)),
    "a new name": ("attributes of modules", lambda life: setattr(life.model[2], "since", 5)),
    "a list": ("attributes of modules", lambda life: life.model[0].sizes.append(3)),
    "a dict": ("attributes of modules", lambda life: life.model[0].table.update(b=(1, None))),
}


@pytest.mark.parametrize("name", PLAIN)
def test_what_the_loop_sets_is_told_apart_and_taken_on(name: str) -> None:
    label, change = PLAIN[name]
    one = Life()
    alike = one.step()
    assert one.settings.now() == {} == one.settings.after() and len(alike) == len(OWN) * SETTING_BYTES
    at_first = one.facts()
    assert one.step() == alike
    change(one)
    assert set(one.settings.after()) <= {"hyperparameters"}
    given = json.loads(json.dumps(one.settings.now()))
    assert given and one.settings.now() != {}
    now = one.step()
    parts = [d[k * SETTING_BYTES : (k + 1) * SETTING_BYTES] for d in (alike, now) for k in range(len(OWN))]
    assert [a == b for a, b in zip(parts[:5], parts[5:], strict=True)] == [label != each for each in OWN]
    assert one.settings.after() == given
    changed = one.facts()
    one.settings.restore({"hyperparameters": {"0": {"momentum": {"f": (0.9).hex()}, "nesterov": False}}})
    assert one.facts() == at_first and "since" not in vars(one.model[2])
    other = Life()
    other.settings.restore(given)
    assert other.facts() == changed and other.step() == now and other.step(lanes=0) == now
    assert other.settings.now() == given


def test_hyperparameters_that_a_state_has_loaded_are_not_the_loop_s() -> None:
    """As a scheduler sets them: a job that goes on with other stages cannot take a loop's."""
    life = Life()
    life.step()
    life.optimizer.param_groups[0]["lr"] = 0.05
    life.settings.restore({})
    assert life.settings.now() == {}
    life.optimizer.param_groups[0]["lr"] = 0.02
    assert life.settings.now() == {"hyperparameters": {"0": {"lr": {"f": (0.02).hex()}}}}


RATES: dict[str, tuple[Callable[[], Any], Callable[[dict[str, Any]], object]]] = {
    "in place": (lambda: torch.tensor(0.1), lambda group: group["lr"].mul_(0.9)),
    "behind its version": (lambda: torch.tensor(0.1), lambda group: group["lr"].data.mul_(0.9)),
    "another tensor": (lambda: torch.tensor(0.1), lambda group: group.update(lr=group["lr"] * 0.9)),
    "instead of a number": (lambda: 0.1, lambda group: group.update(lr=torch.tensor(0.1))),
    "numpy's number": (lambda: 0.1, lambda group: group.update(lr=np.float64(0.1))),
    "array": (lambda: np.array(0.1), lambda group: group["lr"].fill(0.05)),
    "in a tuple": (lambda: (torch.tensor(0.9), 0.1), lambda group: group["lr"][0].mul_(0.9)),
    "list": (lambda: [0.1], lambda group: group["lr"].append(0.2)),
    "dict": (lambda: {"a": 0.1}, lambda group: group["lr"].update(b=0.2)),
}


@pytest.mark.parametrize("kind", RATES)
def test_a_hyperparameter_of_any_kind_is_put_back_as_it_was_at_each_moment(kind: str) -> None:
    make, change = RATES[kind]
    lives = Life(), Life()
    for life in lives:
        life.optimizer.param_groups[0]["lr"] = make()
        life.settings = Settings(life.model, life.optimizer)
        life.settings.begin()
    alike = {life.step() for life in lives}
    one, other = lives
    entered = one.settings.enter()
    group, there = one.optimizer.param_groups[0], other.optimizer.param_groups[0]
    first, held = copy.deepcopy(group["lr"]), there["lr"]
    change(group)
    digests = one.step()
    assert entered is not None and {digests} != alike and len(alike) == 1
    for said, wanted in ((one.settings.as_of(entered), first), (one.settings.after(), group["lr"])):
        other.settings.restore(json.loads(json.dumps(said)))
        assert type(there["lr"]) is type(wanted) and repr(there["lr"]) == repr(wanted)
    assert other.step() == digests
    assert kind not in ("in place", "another tensor") or there["lr"] is held, "schedulers hold on to it"


@pytest.mark.parametrize("kind", ["tensor", "array", "list"])
def test_groups_that_share_a_value_keep_it_only_where_they_are_told_the_same(kind: str) -> None:
    def make(value: float) -> Any:
        return {"tensor": torch.tensor(value), "array": np.array([value]), "list": [value]}[kind]

    shared = make(0.1)
    groups = [{"lr": shared}, {"lr": shared}]
    put_values(groups, [{"lr": make(0.3)}, {"lr": make(0.3)}])
    assert groups[0]["lr"] is groups[1]["lr"] is shared and shared == make(0.3)
    put_values(groups, [{"lr": make(0.3)}, {"lr": make(0.2)}])
    assert [groups[0]["lr"], groups[1]["lr"]] == [make(0.3), make(0.2)]


def test_what_is_large_in_a_group_is_no_hyperparameter() -> None:
    anchors = [torch.zeros(3), torch.zeros(65)]
    group = {"lr": 0.1, "anchor": anchors[1], "few": anchors[0], "kept": anchors, "names": ["a"] * 65}
    assert hyperparameters(group).keys() == {"lr", "few"}


@pytest.mark.parametrize(
    "told", [{"tensor": 3}, {"tensor": ["float3", [], "00"]}, {"tensor": "a"}, {"array": ["int8", [2], "00"]}]
)
def test_a_hyperparameter_that_nobody_has_written_is_refused(told: Any) -> None:
    with pytest.raises(CheckpointCorrupt):
        Life().settings.restore({"hyperparameters": {"0": {"lr": told}}})


def test_it_is_beside_the_state_and_in_its_manifest_only_if_something_has_changed() -> None:
    one, other = Life(), Life()
    states = [ModelState(life.model, life.optimizer, settings=life.settings) for life in (one, other)]
    before = states[0].manifest()
    assert "settings" not in before and "settings" not in ModelState(build()).manifest()
    one.model[1].eval()
    manifest = states[0].manifest()
    assert manifest["settings"] == {"modes": {"1": False}} and states[0].outline.settings == {}
    states[0].live_tensors()
    assert states[0].outline.settings == manifest["settings"]
    other.model[1].eval()
    other.model[2].p = 0.1
    digest = states[1].state_digest(3)
    assert digest == states[0].state_digest(3)
    states[1].load(manifest, states[0].read_block)
    assert not other.model[1].training and other.model[2].p == 0.5
    states[1].load(before, states[0].read_block)  # as one that an older version has written
    assert other.model[1].training


def test_what_forward_passes_set_is_neither_carried_nor_compared() -> None:
    """It depends on the lanes that a worker had; but a layer of torch's own does not set itself."""
    one, idle = Life(), Life()
    for _ in range(3):
        assert one.step(lanes=2) == idle.step(lanes=0)
    assert one.model[0].calls == 6 and one.settings.now() == {}
    one.step(inside=lambda: setattr(one.model[2], "p", 0.1))
    assert list(one.settings.now()["attributes"]) == ["2"]
    one.step(inside=lambda: setattr(one.model[0], "scale", 3.0))
    assert list(one.settings.now()["attributes"]) == ["2"]


def test_what_the_loop_does_before_it_begins_is_no_finding() -> None:
    def prepared() -> nn.Module:
        model = build()
        model[4] = parametrizations.weight_norm(nn.Linear(4, 2))
        model.append(nn.utils.spectral_norm(nn.Linear(2, 2)))
        model.append(parametrizations.spectral_norm(nn.Linear(2, 2)))
        model[1].eval().register_forward_hook(lambda *_: None)
        model[1].weight.register_hook(lambda grad: 2 * grad)
        return model

    one = Life(prepared)
    first = one.step()
    for _ in range(3):
        taken = one.model[3].register_forward_hook(lambda *_: None)  # within the step
        taken.remove()
        assert one.step() == first
    assert one.settings.now() == {}


def swap(life: Life) -> None:
    life.model[3] = nn.GELU()


def swap_trained(life: Life) -> None:
    life.model[4] = nn.Linear(4, 2)


def add(life: Life) -> None:
    life.model[0].act = nn.Dropout(0.1)


def hook_partly(life: Life) -> None:
    life.model[0].layer.register_full_backward_hook(functools.partial(noop, 1))


def noop(*_: Any) -> None:
    """Nothing."""


REFUSED: dict[str, tuple[Callable[[Life], object], str]] = {
    "swapped layer": (swap, r"module 3 \(Tanh\) was made a GELU in the loop"),
    "swapped layer with parameters": (swap_trained, "weight, bias of module 4 got another parameter in the loop"),
    "another layer": (add, r"module 0\.act \(Dropout\) was put into the model in the loop"),
    "layer less": (lambda life: life.model.pop(4), r"module 4 \(Linear\) was taken out"),
    "class": (lambda life: setattr(life.model[3], "__class__", nn.ReLU), r"\(Tanh\) was made a ReLU"),
    "parametrization": (
        lambda life: parametrizations.weight_norm(life.model[4]),
        r"module 4 \(Linear\) was made a ParametrizedLinear in the loop",
    ),
    "gradient hook": (
        lambda life: life.model[4].bias.register_hook(noop),
        r"a gradient hook \(noop\) was registered on 4\.bias",
    ),
    "forward hook": (lambda life: life.model[3].register_forward_hook(noop), r"a forward hook \(noop\) .* on 3 "),
    "backward hook": (hook_partly, r"a backward hook \(noop\) was registered on 0\.layer"),
    "step hook": (
        lambda life: life.optimizer.register_step_post_hook(noop),
        r"a step post-hook \(noop\) was registered on the optimizer",
    ),
    "group": (
        lambda life: life.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]}),
        r"groups held \[6\] parameters and hold \[6, 1\]",
    ),
    "a tensor": (lambda life: setattr(life.model[3], "mask", torch.ones(2)), "has set 3.mask to a Tensor"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_carried_is_refused_by_name_before_the_update(name: str) -> None:
    change, says = REFUSED[name]
    life = Life()
    life.step()
    change(life)
    with pytest.raises(Uncarried, match=says) as found:
        life.settings.before_lanes()
        life.settings.digests()
    assert "\n" not in str(found.value) and "before the loop" in str(found.value)


class Sized:
    """Of the user's own."""


LATE: dict[str, tuple[Any, Any]] = {
    "a function": (torch.relu, torch.tanh),
    "a lambda": (lambda x: x, lambda x: 2 * x),
    "a tensor": (torch.ones(1), torch.ones(1)),
    "a number of numpy": (np.float64(1.0), np.float64(0.5)),
    "a set": ({1}, {1, 2}),
    "a long list": ([1.0] * 100, [0.5] * 100),
    "an object": (Sized(), Sized()),
}


@pytest.mark.parametrize("name", LATE)
def test_a_value_that_another_one_of_its_kind_replaces_is_refused_if_not_each_step_sets_it(name: str) -> None:
    first, later = LATE[name]
    life = Life()
    life.model[0].kept = first
    life.settings.begin()
    for _ in range(2):
        life.step()
    life.model[0].kept = later
    with pytest.raises(Uncarried, match=r"has set 0\.kept to a .*before the batches of each step"):
        life.step()

    life = Life()
    life.model[0].kept = first
    life.settings.begin()
    for value in (later, first, later):
        life.model[0].kept = value
        life.step()


def test_a_value_of_the_loop_that_a_forward_pass_sets_later_is_refused() -> None:
    def clamp(life: Life) -> None:
        life.model[0].scale = max(life.model[0].scale, 0.5)

    life = Life()
    for _ in range(2):
        life.step(inside=lambda: clamp(life))
        life.model[0].scale *= 0.6
    resumed = Life()
    resumed.settings.restore(life.settings.now())
    for one in (life, resumed):
        one.step(inside=lambda one=one: clamp(one))  # type: ignore[misc]
        with pytest.raises(Uncarried, match=r"the loop has set 0\.scale, and now a forward pass has"):
            one.step()


def test_a_count_of_calls_goes_on_in_an_evaluation_of_the_loop() -> None:
    life = Life()
    for _ in range(4):
        life.model[0].calls += 1  # before the first lanes, too
        life.step()


def test_what_a_library_exchanges_is_none_of_the_loop_s() -> None:
    life = Life()
    life.model[0].kept = msgspec.json.Encoder()
    life.settings.begin()
    life.step()
    life.model[0].kept = msgspec.json.Encoder()
    life.step()


def test_autocast_that_is_left_on_is_refused_and_round_a_step_it_is_not() -> None:
    life = Life()
    life.settings.enter()
    with torch.autocast("cpu", dtype=torch.bfloat16):  # begun after the round, over before the next one
        life.step()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        life.settings.enter()
        with pytest.raises(Uncarried, match="autocast was left on"):
            life.step()
    life = Life()
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(Uncarried, match="autocast was left on"):
        life.step()


def test_a_hook_that_is_taken_away_is_refused_and_one_in_the_place_of_another_too() -> None:
    handles: list[Any] = []
    life = Life(lambda: hooked(handles))
    life.step()
    handles[0].remove()
    life.model[1].register_forward_hook(lambda *_: None)
    with pytest.raises(Uncarried, match=r"a forward hook \(.*lambda>\) was registered on 1 in the loop"):
        life.step()
    handles = []
    life = Life(lambda: hooked(handles))
    handles[0].remove()
    with pytest.raises(Uncarried, match=r"a forward hook \(noop\) of 1 was removed or replaced in the loop"):
        life.step()


@pytest.mark.parametrize("what", ["gradient hook", "forward hook", "step hook"])
def test_a_hook_that_is_registered_while_lanes_are_computed_is_refused_in_that_step(what: str) -> None:
    life = Life()
    life.step()
    with pytest.raises(Uncarried, match=REFUSED[what][1]):
        life.step(inside=lambda: REFUSED[what][0](life))


def hooked(handles: list[Any]) -> nn.Module:
    model: Any = build()
    handles.append(model[1].register_forward_hook(noop))
    return model  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "given",
    [
        {"modes": {"7": True}},
        {"requires_grad": {"x": True}},
        {"attributes": {"2": {"forward": 1}}},
        {"attributes": {"2": {"__class__": 1}}},
        {"attributes": {"2": {"_modules": {"dict": []}}}},
        {"attributes": {"0": {"layer": None}}},
        {"attributes": {"2": {"p": {"tensor": "x"}}}},
        {"attributes": {"2": {"p": {"eval": "x"}}}},
        {"attributes": {"9": {"p": 1}}},
        {"flags": {"default_dtype": {"dtype": "load"}}},
        {"flags": {"num_threads": "2"}},
        {"flags": {"x": 1}},
        {"hyperparameters": {"1": {"lr": 1}}},
        {"hyperparameters": {"0": {"params": []}}},
        {"hyperparameters": {"0": {"new": 1}}},
        {"hyperparameters": {"x": {}}},
        {"other": 1},
        {"modes": {"2": "x"}},
        {"modes": []},
    ],
)
def test_settings_that_are_none_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises((CheckpointCorrupt, ConfigError)):
        Life().settings.restore(given)


def test_without_a_loop_nothing_is_looked_at_and_foreign_settings_are_refused() -> None:
    model = build()
    settings = Settings(model, torch.optim.SGD(model.parameters()))
    settings.before_lanes()
    model[3] = nn.ReLU()  # type: ignore[operator]
    assert (settings.digests(), settings.now(), settings.after(), settings.enter()) == (b"", {}, {}, None)
    settings.restore({})
    with pytest.raises(ConfigError, match="changed settings of the state"):
        settings.restore({"modes": {"1": False}})


def test_numbers_that_are_flushed_to_zero_by_the_loop_are_so_in_a_life_that_follows() -> None:
    life, resumed = Life(), Life()
    life.step()
    torch.set_flush_denormal(True)
    said = life.settings.now()
    torch.set_flush_denormal(False)
    resumed.settings.restore(said)
    assert float(torch.tensor(1e-39) * 1.0) == 0.0
