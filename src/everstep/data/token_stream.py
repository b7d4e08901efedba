"""Text as a stream of tokens: files in sorted order, byte-level or byte-pair encoding, and windows over the stream."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import os
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch.utils.data import Dataset, Subset

from everstep.base.errors import ConfigError
from everstep.base.given import open_given

_CACHE_FORMAT = "1"
_LOOKED_AT_BYTES = 1 << 20
_LEAST_JUDGED_BYTES = 1 << 10
_MOST_OTHER, _MOST_NULS = 0.1, 0.01
"""Share of characters of a text that may be in another encoding than UTF-8, and NUL. UTF-16 has one for each space."""
_PACKED = {b"\x1f\x8b": "gzip", b"BZh91AY": "bzip2", b"\xfd7zXZ\0": "xz", b"\x28\xb5\x2f\xfd": "zstd", b"PK\3\4": "zip"}
_REMEDIES = {
    **dict.fromkeys(
        (".npy", ".bin"), "only the task hf:DIR reads tokens, from a file that is named itself: task.data={}"
    ),
    **dict.fromkeys(
        (".parquet", ".arrow"),
        "only the task hf:DIR reads what the package datasets has tokenised and saved: task.data=DIR of save_to_disk",
    ),
}
"""By the ending of what holds data, and no text."""
_SKIPPED = frozenset({"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"})


class ByteTokenizer:
    """Tokenizer that makes each byte a token."""

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
    """Byte-level BPE. model: text from `to_json`; `trained` makes one.

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
        """The tokenizer as JSON, as the package tokenizers writes it."""
        return str(self._bpe.to_str())

    def encode(self, data: bytes) -> torch.Tensor:
        """(tokens,) int64. Bytes that are no UTF-8 become replacement characters."""
        encoded = self._bpe.encode_batch_fast(_lines(data))
        return torch.tensor([number for line in encoded for number in line.ids], dtype=torch.int64)

    def decode(self, tokens: Iterable[int]) -> str:
        return str(self._bpe.decode(list(tokens)))


Tokenizer = ByteTokenizer | BytePairs
"""Text to token numbers and back; `vocabulary` is the number of different tokens."""


def _tokenizers() -> Any:
    try:
        import tokenizers
    except ImportError:
        raise ConfigError("BPE needs the package tokenizers: pip install 'everstep[text]', or use bytes") from None
    return tokenizers


def _lines(data: bytes) -> list[str]:
    return data.decode("utf-8", errors="replace").splitlines(keepends=True)


def standard_library(limit_bytes: int = 4_000_000) -> bytes:
    """The first `limit_bytes` of the Python standard library's sources, without tests and installed packages."""
    return _joined(Path(sysconfig.get_path("stdlib")), (".py",), limit_bytes)


def read_text(path: str, limit_bytes: int = 0) -> bytes:
    """Bytes of a file, or of all files below a folder, sorted by name; at most `limit_bytes`, if not 0.

    Raises: ConfigError if there is nothing to read, or a file that is no text.
    """
    where = Path(path)
    try:
        data = _joined(where, (), limit_bytes) if where.is_dir() else _text_file(where, limit_bytes)
    except OSError as error:
        raise ConfigError(f"expected a text file or a folder of them, got {path}: {error.strerror}") from None
    data = data[:limit_bytes] if limit_bytes else data
    if not data:
        raise ConfigError(f"expected text to learn from, got nothing in {path}: name a file or folder with text in it")
    return data


def _joined(root: Path, endings: tuple[str, ...], limit_bytes: int) -> bytes:
    data = bytearray()
    for path in _files(root, endings):
        if not endings and path.suffix in _REMEDIES:
            raise ConfigError(
                f"expected a folder of text files, got {path.parent} with {path.name}, which is no text: "
                + _REMEDIES[path.suffix].format(path)
            )
        data += path.read_bytes() if endings else _text_file(path, limit_bytes)
        if limit_bytes and len(data) >= limit_bytes:
            return bytes(data[:limit_bytes])
    return bytes(data)


def _text_file(path: Path, limit_bytes: int) -> bytes:
    """Content of a file, in memory: if mapped, it would change with the file. Raises: OSError; ConfigError if it
    begins otherwise than text does."""
    with open_given(path, links=True) as file:
        data = file.read(limit_bytes or -1)
    head = data[:_LOOKED_AT_BYTES]
    for magic, name in _PACKED.items():
        if head.startswith(magic):
            raise ConfigError(f"expected a text file, got {path}, which is compressed ({name}): unpack it first")
    text = head.decode("utf-8", errors="replace")
    strange = text.count("\ufffd") > _MOST_OTHER * len(text) or text.count("\0") > _MOST_NULS * len(text)
    if strange and len(head) >= _LEAST_JUDGED_BYTES:
        remedy = _REMEDIES.get(path.suffix, "name a text file, or a folder with nothing else in it").format(path)
        raise ConfigError(f"expected text in UTF-8, got {path}, which is binary or in another encoding: {remedy}")
    return data


def _files(folder: Path, endings: tuple[str, ...]) -> Iterator[Path]:
    """All files below, sorted by name at each level, without hidden ones and `__pycache__`; without tests, too, if
    endings are given."""
    for path in sorted(folder.iterdir(), key=lambda p: p.name):
        if path.name.startswith((".", "__pycache__")) or (endings and path.name in _SKIPPED):
            continue
        if path.is_dir():
            above = (folder, *folder.parents)
            if path.is_symlink() and any(one.resolve().is_relative_to(path.resolve()) for one in above):
                continue  # a link back to a folder that holds it: its files would count again and again
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


class Chosen(Subset[torch.Tensor]):
    """Some items of a dataset: every `every`-th (from 0) if `kept`, all the others if not."""

    def __init__(self, windows: Windows, every: int, kept: bool) -> None:
        super().__init__(windows, [i for i in range(len(windows)) if (i % every == 0) == kept])


# ---- byte-pair tokens on disk, so that only a job's first worker pays for the training of the tokenizer


def cache_folder() -> Path:
    """Folder of the cached files: `everstep` in the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "everstep"


def byte_pairs(data: bytes, vocabulary: int, folder: Path | None = None) -> tuple[torch.Tensor, BytePairs]:
    """(tokens of `data` (n,) int64, the tokenizer), from the cache if they are there, otherwise made and put there.

    A cached file is used only for the very same text and settings, and only if its tokens have the hash written with
    them, so it saves time and changes nothing else. A file that cannot be read or written is ignored.

    Raises: ConfigError, as `BytePairs`.
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
    digest = hashlib.blake2b(f"{_CACHE_FORMAT} {version} {vocabulary} ".encode(), digest_size=12)
    digest.update(data)
    return digest.hexdigest()


def _hash(tokens: torch.Tensor, model: str) -> str:
    digest = hashlib.blake2b(model.encode(), digest_size=16)
    digest.update(tokens.numpy().tobytes())
    return digest.hexdigest()


def _read(file: Path) -> tuple[torch.Tensor, BytePairs] | None:
    try:
        with safe_open(file, framework="pt") as stored:
            model = stored.metadata()["tokenizer"]
            tokens = stored.get_tensor("tokens")
            if stored.metadata()["hash"] != _hash(tokens, model):
                return None
        return tokens.to(torch.int64), BytePairs(model)
    except Exception:  # absent, torn, of another format, or tokenizers is missing: make it again; that reports it
        return None


def _write(file: Path, tokens: torch.Tensor, tokenizer: BytePairs) -> None:
    """Write by rename, because several workers may do it at once."""
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
