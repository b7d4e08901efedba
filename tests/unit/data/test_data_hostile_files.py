"""Token files, text folders and model configs that others prepared: one line says what is wrong, at once."""

from __future__ import annotations

import io
import json
import struct
from pathlib import Path

import numpy as np
import pytest

from everstep.base.errors import ConfigError
from everstep.data.token_stream import read_text
from everstep.data.tokenised import read_tokens
from everstep.zoo.huggingface import HuggingFace


def npy(header: str) -> bytes:
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header) + 1) + header.encode() + b"\n" + bytes(64)


def shaped(shape: str) -> bytes:
    return npy(f"{{'descr': '<u2', 'fortran_order': False, 'shape': {shape}, }}")


def archive() -> bytes:
    packed = io.BytesIO()
    np.savez(packed, a=np.zeros(3, np.uint16))
    return packed.getvalue()


FILES = {
    "overflowing": shaped(f"({1 << 63},)"),
    "no number": shaped("(True,)"),
    "nested": npy("(" * 5000),
    "nested for the parser": npy("-" * 9000 + "1"),
    "archive": archive(),
    "larger than the file": shaped(f"({1 << 40},)"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_token_file_with_a_header_that_is_none(tmp_path: Path, name: str) -> None:
    (tmp_path / "tokens.npy").write_bytes(FILES[name])
    with pytest.raises(ConfigError, match=r"tokens\.npy is no readable token file: .+") as told:
        read_tokens(str(tmp_path / "tokens.npy"), 0, lambda: None)
    assert "\n" not in str(told.value)


def test_of_a_text_no_more_is_read_than_is_wanted(tmp_path: Path) -> None:
    with open(tmp_path / "large.txt", "wb") as file:
        file.write(b"hello world\n" * 100)
        file.truncate(1 << 43)
    assert read_text(str(tmp_path / "large.txt"), 24) == b"hello world\n" * 2
    assert read_text(str(tmp_path), 24) == b"hello world\n" * 2


def test_folders_that_lead_to_each_other_are_read_once(tmp_path: Path) -> None:
    for name, other in (("a", "b"), ("b", "a")):
        (tmp_path / "data" / name).mkdir(parents=True)
        (tmp_path / "data" / name / "link").symlink_to(f"../{other}")
        (tmp_path / "data" / name / "text").write_text(name)
    assert read_text(str(tmp_path / "data")) == b"baab"


@pytest.mark.parametrize("layers", [100_000_000, -1])
def test_a_model_of_too_many_layers_is_not_built(tmp_path: Path, layers: int) -> None:
    config = {"model_type": "gpt2", "n_layer": layers, "n_head": 2, "n_embd": 8, "vocab_size": 300, "n_positions": 32}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=rf"expected 0 to 10000 layers in config\.json, got {layers}"):
        HuggingFace(str(tmp_path))
