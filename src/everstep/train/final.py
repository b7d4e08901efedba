"""What a finished job leaves: the model under its own names, and digests of everything."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from everstep.exact.state import ModelState


def write_final(run_dir: Path, model: nn.Module, state: ModelState, step: int) -> dict[str, object]:
    """Write final/model.safetensors and, last, final/digest.json. Atomic, and the same bytes whoever does it."""
    final = run_dir / "final"
    final.mkdir(parents=True, exist_ok=True)
    weights = final / "model.safetensors"
    partial = final / f".model-{os.getpid()}.partial"
    save_file(model_tensors(model), partial)
    _sync(partial)
    os.replace(partial, weights)
    digest: dict[str, object] = {"step": step, "model": state.model_digest(), "state": state.state_digest(step)}
    partial = final / f".digest-{os.getpid()}.partial"
    partial.write_text(json.dumps(digest, indent=2) + "\n")
    _sync(partial)
    os.replace(partial, final / "digest.json")
    return digest


def model_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """state_dict as contiguous CPU tensors that share no storage, in a fixed order of names.

    A tied parameter appears under each of its names, as in the model's own state_dict.
    """
    return {name: t.detach().cpu().clone().contiguous() for name, t in sorted(model.state_dict().items())}


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
