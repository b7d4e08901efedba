"""Byte-pair tokens kept on disk, so that only a job's first worker pays for the training of the tokenizer.

A cached file is used only for the very same text and settings, and only if its tokens have the hash written with them;
so the cache changes the time and nothing else.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import os
import tempfile
from pathlib import Path

import torch

from everstep.data.text import BytePairs

_FORMAT = "1"


def cache_folder() -> Path:
    """Where the files lie: `everstep` in the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "everstep"


def byte_pairs(data: bytes, vocabulary: int, folder: Path | None = None) -> tuple[torch.Tensor, BytePairs]:
    """(tokens of `data` (n,) int64, the tokenizer), from the cache if they are there, otherwise made and put there.

    A cache that cannot be read or written is done without. Raises: ConfigError, as `BytePairs`.
    """
    folder = cache_folder() if folder is None else folder
    file = folder / f"bpe-{_key(data, vocabulary)}.safetensors"
    found = _read(file)
    if found is not None:
        return found
    tokenizer = BytePairs.trained(data, vocabulary)
    tokens = tokenizer.encode(data)
    with contextlib.suppress(OSError):
        _write(file, tokens, tokenizer)
    return tokens, tokenizer


def _key(data: bytes, vocabulary: int) -> str:
    try:
        version = importlib.metadata.version("tokenizers")
    except importlib.metadata.PackageNotFoundError:
        version = ""
    digest = hashlib.blake2b(f"{_FORMAT} {version} {vocabulary} ".encode(), digest_size=12)
    digest.update(data)
    return digest.hexdigest()


def _hash(tokens: torch.Tensor, model: str) -> str:
    digest = hashlib.blake2b(model.encode(), digest_size=16)
    digest.update(tokens.numpy().tobytes())
    return digest.hexdigest()


def _read(file: Path) -> tuple[torch.Tensor, BytePairs] | None:
    from safetensors import safe_open

    try:
        with safe_open(file, framework="pt") as stored:
            model = stored.metadata()["tokenizer"]
            tokens = stored.get_tensor("tokens")
            if stored.metadata()["hash"] != _hash(tokens, model):
                return None
        return tokens.to(torch.int64), BytePairs(model)
    except Exception:  # absent, torn, of another format, or tokenizers is missing: make it anew, and say so there
        return None


def _write(file: Path, tokens: torch.Tensor, tokenizer: BytePairs) -> None:
    """By rename, because several workers may do it at once."""
    from safetensors.torch import save_file

    file.parent.mkdir(parents=True, exist_ok=True)
    short = tokens.to(torch.int32)
    model = tokenizer.to_json()
    handle, temporary = tempfile.mkstemp(dir=file.parent)
    os.close(handle)
    try:
        save_file({"tokens": short}, temporary, {"tokenizer": model, "hash": _hash(short, model)})
        os.replace(temporary, file)
    except BaseException:
        os.unlink(temporary)
        raise
