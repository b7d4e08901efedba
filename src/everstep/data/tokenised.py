"""Tokens that stay on disk as far as they can: text through a tokenizer, token files mapped into memory, directories
of the package `datasets`; and windows over them."""

from __future__ import annotations

import codecs
import contextlib
import hashlib
import importlib.metadata
import itertools
import mmap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from everstep.base.below import write_atomically
from everstep.base.errors import ConfigError
from everstep.base.given import open_given
from everstep.data.token_stream import cache_folder, read_text

_PIECE = 1 << 16
"""Characters that are tokenised in one go; a piece ends with a line."""
_PIECES_AT_ONCE = 64
_SCANNED = 1 << 24
_DATASET_FILES = ("state.json", "dataset_dict.json")


class Tokens:
    """A stream of tokens: whole numbers, of any width, in one dimension. is_text: made of text here."""

    def __init__(self, numbers: np.ndarray[Any, Any], *, is_text: bool = False) -> None:
        self.numbers = numbers
        self.is_text = is_text

    def __len__(self) -> int:
        return len(self.numbers)

    def bounds(self) -> tuple[int, int]:
        """Smallest and largest token; all of them are read once, in pieces."""
        parts = [self.numbers[k : k + _SCANNED] for k in range(0, len(self.numbers), _SCANNED)]
        return min(int(p.min()) for p in parts), max(int(p.max()) for p in parts)


class TokenWindows(Dataset[torch.Tensor]):
    """Windows over tokens: item i is tokens[i * length : i * length + length + 1], (length + 1,) int64, of every
    `every`-th window if `kept`, of all the others if not; every=0: of all. The last token of one is the first of the
    next.

    Raises: ConfigError if there are too few tokens for one window.
    """

    def __init__(self, tokens: Tokens, length: int, every: int = 0, kept: bool = False) -> None:
        if len(tokens) < length + 1:
            raise ConfigError(
                f"expected at least {length + 1} tokens for one window of {length}, got {len(tokens)}: use more data, "
                "or a smaller task.context"
            )
        self.tokens = tokens
        self.length = length
        self._every = every
        self._kept = kept

    def __len__(self) -> int:
        whole = (len(self.tokens) - 1) // self.length
        kept = -(-whole // self._every) if self._every else 0
        return kept if self._kept else whole - kept

    def __getitem__(self, index: int) -> torch.Tensor:
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} is not in 0..{len(self) - 1}")
        if self._kept:
            index = index * self._every
        elif self._every:
            index += index // (self._every - 1) + 1
        start = index * self.length
        return torch.from_numpy(self.tokens.numbers[start : start + self.length + 1].astype(np.int64))


def read_tokens(path: str, limit_bytes: int, encoder: Callable[[], Any]) -> dict[str, Tokens]:
    """Tokens by split: "train", and "test" if the data have one.

    encoder: called for text; returns (tokenizer, its files by name), or None for bytes.

    Raises: ConfigError if there is nothing, or nothing that can be read.
    """
    where = Path(path)
    if where.is_dir() and any((where / name).is_file() for name in _DATASET_FILES):
        return _of_datasets(where)
    if where.suffix in (".npy", ".bin"):
        return {"train": _token_file(where)}
    data = read_text(path, limit_bytes)
    found = encoder()
    if found is None:
        return {"train": Tokens(np.frombuffer(data, np.uint8), is_text=True)}
    return {"train": Tokens(_encoded(data, *found), is_text=True)}


def _token_file(path: Path) -> Tokens:
    """A one-dimensional .npy of whole numbers, or a .bin of uint16, as nanoGPT writes it; mapped, not read."""
    try:
        if path.suffix == ".bin":
            numbers = _mapped(path, np.uint16)
        else:
            with open_given(path, links=True) as given:
                numbers = np.lib.format.open_memmap(f"/proc/self/fd/{given.fileno()}", mode="r")
    except Exception as error:  # numpy evaluates the header, which may raise anything
        said = (error.strerror if isinstance(error, OSError) else None) or " ".join(str(error).split())[:150]
        raise ConfigError(f"task.data: {path} is no readable token file: {said or 'bad header'}") from None
    if numbers.ndim != 1 or numbers.dtype.kind not in "iu" or not len(numbers):
        raise ConfigError(
            f"task.data: expected whole numbers in one dimension in {path}, got {numbers.dtype} of shape "
            f"{list(numbers.shape)}"
        )
    return Tokens(numbers)


def _mapped(path: Path, kind: type[np.integer[Any]]) -> np.ndarray[Any, Any]:
    """Numbers of a file, mapped. Raises: OSError; ValueError if it is empty, or its size is odd."""
    with open_given(path, links=True) as given:
        return np.frombuffer(mmap.mmap(given.fileno(), 0, access=mmap.ACCESS_READ), kind)


def _of_datasets(path: Path) -> dict[str, Tokens]:
    try:
        import datasets
    except ImportError:
        raise ConfigError(
            f"task.data: {path} is of the package datasets, which is missing: pip install datasets"
        ) from None
    try:
        loaded = datasets.load_from_disk(str(path))
    except Exception as error:
        said = " ".join(str(error).split())[:200]
        raise ConfigError(f"task.data: {path} cannot be read by the package datasets: {said}") from None
    parts = dict(loaded) if isinstance(loaded, Mapping) else {"train": loaded}
    if "train" not in parts:
        raise ConfigError(f"task.data: expected a split named train in {path}, got {', '.join(parts) or 'none'}")
    found = {"train": Tokens(_column(parts["train"], path))}
    test = parts.get("test", parts.get("validation"))
    return found if test is None else {**found, "test": Tokens(_column(test, path))}


def _column(part: Any, path: Path) -> np.ndarray[Any, Any]:
    """All rows of input_ids, one after the other."""
    if "input_ids" not in part.column_names:
        raise ConfigError(
            f"task.data: expected a column input_ids in {path}, got {', '.join(part.column_names)}: tokenise it first"
        )
    parts = [_flat(rows) for rows in part.with_format("arrow")[:]["input_ids"].chunks] or [np.zeros(0)]
    numbers = parts[0] if len(parts) == 1 else np.concatenate(parts)
    if numbers.dtype.kind not in "iu" or not len(numbers):
        raise ConfigError(
            f"task.data: expected whole numbers in input_ids of {path}, got {len(numbers)} {numbers.dtype}"
        )
    return numbers


def _flat(rows: Any) -> np.ndarray[Any, Any]:
    """Numbers of one of the chunks that arrow has. A chunk holds 2^31 at most, so they are not made one before."""
    while hasattr(rows, "flatten") and hasattr(rows.type, "value_type"):
        rows = rows.flatten()
    return np.asarray(rows)


# ---- text through a tokenizer, which is done once and kept


def _encoded(data: bytes, tokenizer: Any, files: Mapping[str, bytes]) -> np.ndarray[Any, Any]:
    """Tokens of a text, int32, from the cache if the very same text was encoded by the same files before."""
    digest = hashlib.blake2b(digest_size=16)
    for name in ("transformers", "tokenizers"):
        digest.update(f"{name} {importlib.metadata.version(name)} ".encode())
    for name, content in sorted(files.items()):
        digest.update(f"{name} {len(content)} ".encode() + content)
    digest.update(data)
    file = cache_folder() / f"tokens-{digest.hexdigest()}.int32"
    with contextlib.suppress(OSError, ValueError):
        kept = _mapped(file, np.int32)
        if kept[-1] == _sum(kept[:-1]):
            return kept[:-1]
    pieces, made = _pieces(data), [np.zeros(0, np.int32)]
    while some := list(
        itertools.islice(pieces, _PIECES_AT_ONCE)
    ):  # as Python's numbers all would take ten times as much
        encoded = tokenizer(some, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
        made.append(np.fromiter(itertools.chain.from_iterable(encoded), np.int32))
    numbers = np.concatenate(made)
    if not len(numbers):
        raise ConfigError("task.data: the tokenizer makes no tokens of this text")
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(
            file, np.append(numbers, _sum(numbers)).tobytes(), None
        )  # by rename, because several workers may do it at once
    return numbers


def _pieces(data: bytes) -> Iterator[str]:
    decoder, text, start = codecs.getincrementaldecoder("utf-8")(errors="replace"), "", 0
    for first in range(0, len(data), _SCANNED):
        text = text[start:] + decoder.decode(data[first : first + _SCANNED], first + _SCANNED >= len(data))
        start = 0
        while end := text.find("\n", start + _PIECE) + 1:
            yield text[start:end]
            start = end
    if start < len(text):
        yield text[start:]


def _sum(numbers: np.ndarray[Any, Any]) -> np.int32:
    """A checksum of tokens, so that a damaged file is made again."""
    digest = hashlib.blake2b(np.ascontiguousarray(numbers).data, digest_size=4).digest()
    return np.int32(int.from_bytes(digest, "little", signed=True))
