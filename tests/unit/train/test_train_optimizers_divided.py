"""Every optimizer of torch, and others, by how their state can be divided; those that divide it end with the bits of
one worker."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from torch import optim

import optimizers_divided as cases
from everstep.train.optimizer_kind import OptimizerKind, expected_kind
from odd_optimizers import ODD
from sampling import mostly_longer

ELSEWHERE = {"LBFGS", "SparseAdam", "Optimizer"}  # refused before, for what they need
DIVIDING = cases.ELEMENTS | cases.MATRICES
SEVERAL_AT_ONCE = ("SGD foreach", "Adam foreach", "Adafactor foreach")


def usual(name: str) -> bool:
    """On a processor torch loops by itself, unless it is asked for something else."""
    return name in SEVERAL_AT_ONCE or name == "SGD loop" or not name.endswith((" foreach", " loop"))


@cache
def kinds_of(name: str) -> list[OptimizerKind]:
    """Its kind before the first update, at it, and after it."""
    return cases.found(cases.ALL[name])


def divides(name: str) -> str:
    return "elements" if name in cases.ELEMENTS else "matrices" if name in cases.MATRICES else "nothing"


def test_all_optimizers_of_torch_are_looked_at() -> None:
    there = {name for name in dir(optim) if isinstance(getattr(optim, name), type)}
    assert there - ELSEWHERE <= {name.split()[0] for name in cases.ALL}


@pytest.mark.parametrize("name", mostly_longer(cases.ALL, usual))
def test_which_can_be_divided_is_known_before_and_seen_in_the_first_updates(name: str) -> None:
    kinds = kinds_of(name)
    assert [kind.divides for kind in kinds] == [divides(name)] * 3, kinds
    assert all(kind.allows(kinds[0]) for kind in kinds)


@pytest.mark.parametrize("name", mostly_longer(DIVIDING, lambda name: usual(name) and name != "SGD loop"))
@pytest.mark.parametrize(("members", "copies"), [pytest.param(3, 1, marks=pytest.mark.longer), (4, 2)])
def test_members_that_divide_the_state_have_the_bits_of_one(name: str, members: int, copies: int) -> None:
    assert cases.ends_alike(cases.ALL[name], kinds_of(name)[0], members, copies)


@pytest.mark.longer
@pytest.mark.parametrize("width", ["avx2", "default"])
def test_so_it_is_with_other_instructions_and_with_two_threads(width: str) -> None:
    waiting = {
        "OMP_WAIT_POLICY": "PASSIVE",
        "GOMP_SPINCOUNT": "0",
    }  # else threads of a busy machine wait for each other
    there = {"ATEN_CPU_CAPABILITY": width, "PYTHONPATH": str(Path(cases.__file__).parent)}
    environment = {**os.environ, **waiting, **there}
    done = subprocess.run(
        [sys.executable, cases.__file__], env=environment, capture_output=True, text=True, check=False, timeout=500
    )
    assert done.returncode == 0, done.stderr
    used, said = json.loads(done.stdout)
    assert used.lower() in (width, "default"), "a narrower machine has no AVX2"
    assert said.keys() == cases.ALL.keys()
    for name, (kinds, alike) in said.items():
        assert (kinds, alike) == ([divides(name)], True), name


@pytest.mark.parametrize("name", mostly_longer(ODD, lambda name: name in ("Periodic", "Lazy", "Norms", "Favours")))
def test_what_an_optimizer_does_now_and_then_or_for_some_parameters_is_found_before_it_happens(name: str) -> None:
    make, divides = ODD[name]
    kind = expected_kind(make(list(cases.Model().parameters())), 3)
    assert kind.divides == divides, kind
    if divides != "nothing":
        assert cases.ends_alike(make, kind, 3, 1, steps=8)
