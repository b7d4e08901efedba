"""The numerics fingerprint, and what is told of imported code."""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from everstep.protocol.identity import Code
from everstep.script.imported import LateImports, code_here
from everstep.train.kernels import kernels_of

CPU = torch.device("cpu")
FRESH = """
import json, torch
from everstep.train.kernels import kernels_of
torch.set_num_threads(1)
found = [kernels_of(precision, torch.device("cpu"), 1) for precision in ("fp32", "bf16", "fp16")]
print(json.dumps([[k.fingerprint, k.device] for k in found]))
"""


def fresh(**environment: str) -> list[list[str]]:
    """In a process of its own."""
    found = subprocess.run(
        [sys.executable, "-c", FRESH], env={**os.environ, **environment}, capture_output=True, text=True, check=True
    )
    said: list[list[str]] = json.loads(found.stdout)
    return said


def traces() -> list[Any]:
    """All that the kernels could leave behind."""
    return [
        torch.get_rng_state().tolist(),
        random.getstate(),
        np.random.get_state()[1].tolist(),  # type: ignore[index, union-attr]
        torch.get_num_threads(),
        torch.get_default_dtype(),
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_grad_enabled(),
    ]


def test_it_leaves_no_trace() -> None:
    before = traces()
    kernels_of.cache_clear()
    first = kernels_of("fp32", CPU, 1)
    assert traces() == before
    torch.manual_seed(7)
    torch.set_default_dtype(torch.float64)
    try:
        kernels_of.cache_clear()
        assert kernels_of("fp32", CPU, 1) == first, "nor does it depend on any"
    finally:
        torch.set_default_dtype(torch.float32)
        kernels_of.cache_clear()


def test_narrower_vectors_give_another_one_and_say_so() -> None:
    widest = torch.backends.cpu.get_cpu_capability()
    narrower = {"AVX512": ("avx2", "AVX2"), "AVX2": ("default", "SSE41")}.get(widest)
    if narrower is None:
        pytest.skip(f"this machine's widest instruction set is {widest}")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    kernels_of.cache_clear()
    here = [kernels_of(precision, CPU, 1) for precision in ("fp32", "bf16", "fp16")]
    torch.set_num_threads(before)
    there = fresh(ATEN_CPU_CAPABILITY=narrower[0], ONEDNN_MAX_CPU_ISA=narrower[1])
    assert len({kernels.fingerprint for kernels in here}) == 3
    for ours, (theirs, words) in zip(here, there, strict=True):
        assert ours.fingerprint != theirs and ours.device.endswith(f"by {widest}")
        assert words.endswith(f"by {narrower[0].upper()}, ONEDNN_MAX_CPU_ISA={narrower[1]}")


def test_imported_code_is_told_by_its_content_and_packages_by_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    texts = {"told_early.py": "X = 1\n", "told_late/__init__.py": "", "told_late/inner.py": "Y = 2\n"}
    (tmp_path / "told_late").mkdir()
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    digests = {name: hashlib.sha256(text.encode()).hexdigest()[:16] for name, text in texts.items()}
    imports = LateImports()
    __import__("told_early")
    said = imports.all()
    assert said.files["told_early.py"] == digests.pop("told_early.py") and said.packages["torch"] == torch.__version__
    assert not [name for name in said.files if name.startswith(("everstep/", "json", "torch"))]
    assert imports.more() is None
    __import__("told_late.inner")
    assert imports.more() == Code(digests) and imports.more() is None
    assert code_here().files.keys() >= texts.keys()
    for name in ("told_early", "told_late", "told_late.inner"):
        monkeypatch.delitem(sys.modules, name)
