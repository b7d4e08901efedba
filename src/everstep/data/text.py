"""Text as a stream of tokens: files in sorted order, byte-level or byte-pair encoding, and windows over the stream."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.utils.data import Dataset

from everstep.base.errors import ConfigError

_SKIPPED = frozenset({"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"})


class Tokenizer(Protocol):
    """Text to token numbers and back; `vocabulary` is how many different ones there are."""

    vocabulary: int

    def encode(self, data: bytes) -> torch.Tensor:
        """(tokens,) int64."""
        ...

    def decode(self, tokens: Iterable[int]) -> str: ...


class ByteTokenizer:
    """Each byte is a token."""

    vocabulary = 256

    def encode(self, data: bytes) -> torch.Tensor:
        """(len(data),) int64."""
        if not data:
            return torch.zeros(0, dtype=torch.int64)
        return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(torch.int64)

    def decode(self, tokens: Iterable[int]) -> str:
        """The text; bytes that are no UTF-8 become replacement characters."""
        return bytes(tokens).decode("utf-8", errors="replace")


class BytePairs:
    """Byte-level BPE. model: what `to_json` gave; `trained` makes one.

    Raises: ConfigError if the extra `text` (tokenizers) is not installed.
    """

    def __init__(self, model: str) -> None:
        self._bpe = _tokenizers().Tokenizer.from_str(model)
        self.vocabulary = int(self._bpe.get_vocab_size())

    @staticmethod
    def trained(data: bytes, vocabulary: int = 2048) -> BytePairs:
        """Train on `data`. The same data give the same tokens.

        Raises: ConfigError if `vocabulary` is below 256, or tokenizers is not installed.
        """
        if vocabulary < 256:
            raise ConfigError(f"expected a BPE vocabulary of at least 256 (the bytes), got {vocabulary}")
        tokenizers = _tokenizers()
        bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
        bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        bpe.decoder = tokenizers.decoders.ByteLevel()
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=vocabulary,
            initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        bpe.train_from_iterator(_lines(data), trainer)
        return BytePairs(bpe.to_str())

    def to_json(self) -> str:
        """The tokenizer, as the package tokenizers writes it."""
        return str(self._bpe.to_str())

    def encode(self, data: bytes) -> torch.Tensor:
        """(tokens,) int64. Bytes that are no UTF-8 become replacement characters."""
        encoded = self._bpe.encode_batch_fast(list(_lines(data)))
        return torch.tensor([number for line in encoded for number in line.ids], dtype=torch.int64)

    def decode(self, tokens: Iterable[int]) -> str:
        """The text."""
        return str(self._bpe.decode(list(tokens)))


def _tokenizers() -> Any:
    try:
        import tokenizers
        import tokenizers.decoders
        import tokenizers.models
        import tokenizers.pre_tokenizers
        import tokenizers.trainers
    except ImportError:
        raise ConfigError("BPE needs the package tokenizers: pip install 'everstep[text]', or use bytes") from None
    return tokenizers


def _lines(data: bytes) -> Iterator[str]:
    yield from data.decode("utf-8", errors="replace").splitlines(keepends=True)


def standard_library(limit_bytes: int = 4_000_000) -> bytes:
    """The first `limit_bytes` of the Python standard library's sources, without tests and installed packages."""
    root = Path(sysconfig.get_path("stdlib"))
    return _joined(root, (".py",), limit_bytes)


def read_text(path: str, limit_bytes: int = 0) -> bytes:
    """A file's bytes, or those of all files below a folder, sorted by name; at most `limit_bytes`, if not 0.

    Raises: ConfigError if there is nothing to read.
    """
    where = Path(path)
    try:
        if where.is_dir():
            data = _joined(where, (), limit_bytes)
        else:
            data = where.read_bytes()
    except OSError as error:
        raise ConfigError(f"expected a text file or a folder of them, got {path}: {error.strerror}") from None
    data = data[:limit_bytes] if limit_bytes else data
    if not data:
        raise ConfigError(f"expected text to learn from, got nothing in {path}: name a file or folder with text in it")
    return data


def _joined(root: Path, endings: tuple[str, ...], limit_bytes: int) -> bytes:
    parts: list[bytes] = []
    size = 0
    for path in _files(root, endings):
        parts.append(path.read_bytes())
        size += len(parts[-1])
        if limit_bytes and size >= limit_bytes:
            break
    data = b"".join(parts)
    return data[:limit_bytes] if limit_bytes else data


def _files(folder: Path, endings: tuple[str, ...]) -> Iterator[Path]:
    """All files below, sorted by name at each level; hidden ones are left out, and tests where endings are given."""
    for path in sorted(folder.iterdir(), key=lambda p: p.name):
        if path.name.startswith(".") or (endings and path.name in _SKIPPED):
            continue
        if path.is_dir():
            yield from _files(path, endings)
        elif path.is_file() and (not endings or path.suffix in endings):
            yield path


class Windows(Dataset[torch.Tensor]):
    """Windows over a token stream: item i is tokens[i * length : i * length + length + 1], (length + 1,) int64.

    The last token of one is the first of the next: as inputs [:-1] and targets [1:] they do not overlap.

    Raises: ConfigError if the stream is too short for one window.
    """

    def __init__(self, tokens: torch.Tensor, length: int) -> None:
        if len(tokens) < length + 1:
            raise ConfigError(
                f"expected at least {length + 1} tokens for one window of {length}, got {len(tokens)}: use more text "
                "or a shorter context"
            )
        self.tokens = tokens
        self.length = length

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} is not in 0..{len(self) - 1}")
        start = index * self.length
        return self.tokens[start : start + self.length + 1]


class Chosen(Dataset[torch.Tensor]):
    """Some of a dataset's items: every `every`-th (from 0) if `kept`, all the others if not."""

    def __init__(self, windows: Windows, every: int, kept: bool) -> None:
        self._windows = windows
        self._indices = [i for i in range(len(windows)) if (i % every == 0) == kept]

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self._windows[self._indices[index]]
