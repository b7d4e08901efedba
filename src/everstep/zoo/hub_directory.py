"""A model's directory in the format of Hugging Face's hub: config, weights and tokenizer, read as data.

Links to regular files are followed, because the hub's own cache consists of them. Nothing is unpickled, no code that
the directory brings is run, and nothing is downloaded. Without torch, because the job's own process reads it, too.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from everstep.base.below import write_atomically
from everstep.base.errors import ConfigError
from everstep.base.given import open_given, read_given, read_json
from everstep.base.hub_names import ADAPTER_CONFIG, CONFIG, MOST_HUB_BYTES, TOKENIZER_FILES
from everstep.zoo.adapters import adapter_content, has_adapter

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_FOREIGN = re.compile(
    r"(pytorch_model.*\.bin(\.index\.json)?|tf_model\.h5|flax_model.*\.msgpack|.*\.gguf|model\.ckpt.*)"
)
_WITH_TOKENS = (
    *("tokenizer.json", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "tekken.json"),
    *("vocab.json", "vocab.txt"),
)
_FLOATS = ("F64", "F32", "F16", "BF16")
_MOST_CONFIG_BYTES = 4 << 20
_MOST_INDEX_BYTES = 256 << 20


class HubDirectory:
    """What a user named: a directory, or a config.json alone. Raises: ConfigError if it cannot be a model's."""

    def __init__(self, named: str) -> None:
        if not named:
            raise ConfigError("task 'hf': expected hf:DIR, a directory with config.json, or hf:DIR/config.json alone")
        path = Path(named)
        self.name = named
        self.alone = path.is_file()
        """Whether only a config was named, so that weights beside it do not count."""
        self.folder = path.parent if self.alone else path
        if not path.exists():
            raise ConfigError(
                f"hf:{named}: there is no such directory; models are not downloaded: fetch it first, for example with "
                "'hf download NAME --local-dir DIR'"
            )
        if (self.folder / ADAPTER_CONFIG).exists() and not self.alone:
            raise ConfigError(
                f"hf:{named} holds an adapter ({ADAPTER_CONFIG}): expected the directory of a whole model"
            )
        self.config = self._json(path if self.alone else path / CONFIG)
        if "quantization_config" in self.config:
            raise ConfigError(f"hf:{named}: its weights are quantised, which cannot be trained: expected float weights")

    @property
    def model_type(self) -> str:
        """Architecture's name. Raises: ConfigError if the config has none."""
        found = self.config.get("model_type")
        if not isinstance(found, str) or not found:
            raise ConfigError(f"hf:{self.name}: expected a model_type in {CONFIG}, got {str(found)[:100]!r}")
        return found

    @property
    def has_tokenizer(self) -> bool:
        """Whether there are files of a tokenizer. Raises: ConfigError if they bring code of their own."""
        if not any((self.folder / name).is_file() for name in _WITH_TOKENS):
            return False
        settings = self.folder / "tokenizer_config.json"
        if settings.exists():
            self._refuse_code(self._json(settings), settings.name, "expected a tokenizer that transformers has")
        return True

    def refuse_unread_tokenizer(self) -> None:
        """Raises: ConfigError if there is a tokenizer, but not in a file whose vocabulary can be read."""
        names = (self.folder / "tokenizer_config.json", *self.folder.glob("*.tiktoken"), *self.folder.glob("*.spm"))
        if found := next((path.name for path in names if path.is_file()), None):
            raise ConfigError(
                f"hf:{self.name}: {found[:100]!a} is there, but no vocabulary that can be read: expected one of "
                f"{', '.join(_WITH_TOKENS)}, or task.data as a file of tokens"
            )

    def refuse_code(self, *, known: bool) -> None:
        """known: transformers has this architecture. Raises: ConfigError if the config asks for code of its own."""
        if known:
            remedy = f"transformers has {self.model_type}, too: remove auto_map from {CONFIG}, and that one is trained"
        else:
            remedy = "expected an architecture that transformers has; write a Task for this one"
        self._refuse_code(self.config, CONFIG, remedy)
        if kernel := next(_foreign_kernels(self.config), ""):
            raise ConfigError(
                f"hf:{self.name}: {CONFIG} asks for code from {kernel[:100]!a} (attn_implementation), which is never "
                "run: remove that key"
            )

    def tokenizer_files(self) -> dict[str, bytes]:
        """Content of the tokenizer's files by name; empty if there are none. Raises: ConfigError."""
        if not self.has_tokenizer:
            return {}
        return {name: self._bytes(name) for name in TOKENIZER_FILES if (self.folder / name).exists()}

    def weights(self) -> WeightFiles | None:
        """The weights; None if there is a config alone.

        Raises: ConfigError for weights in formats that are read by running them, or files that cannot be read.
        """
        if self.alone:
            return None
        if os.path.lexists(self.folder / _INDEX):
            return WeightFiles(self.name, self._shards())
        if os.path.lexists(self.folder / _SINGLE):
            return WeightFiles(self.name, [self.folder / _SINGLE])
        strange = sorted(p.name for p in self.folder.iterdir() if _FOREIGN.fullmatch(p.name))
        if strange:
            raise ConfigError(
                f"hf:{self.name}: {strange[0][:100]!a} is not read, because only safetensors are plain data: load it "
                f"where you trust it, and save_pretrained(DIR) writes {_SINGLE}; or hf:DIR/{CONFIG} for fresh weights"
            )
        return None

    def _shards(self) -> list[Path]:
        index = self._json(self.folder / _INDEX, _MOST_INDEX_BYTES)
        where = index.get("weight_map")
        if not isinstance(where, dict) or not where:
            raise ConfigError(f"hf:{self.name}: expected a weight_map in {_INDEX}")
        names = sorted({str(shard) for shard in where.values()})
        for name in names:
            if Path(name).name != name or not (self.folder / name).exists():
                raise ConfigError(
                    f"hf:{self.name}: weights are incomplete: {_INDEX} names {name[:100]!a}, not there; fetch it"
                )
        return [self.folder / name for name in names]

    def _json(self, path: Path, most_bytes: int = _MOST_CONFIG_BYTES) -> dict[str, Any]:
        try:
            found = read_json(path, most_bytes, links=True)
        except FileNotFoundError:
            raise ConfigError(f"hf:{self.name}: there is no {path.name}: expected a model's directory") from None
        except (OSError, ValueError) as error:
            said = (error.strerror if isinstance(error, OSError) else None) or error
            raise ConfigError(f"hf:{self.name}: {path.name} cannot be read: {said}") from None
        if not isinstance(found, dict):
            raise ConfigError(f"hf:{self.name}: expected an object in {path.name}, got {type(found).__name__}")
        return found

    def _bytes(self, name: str) -> bytes:
        try:
            return read_given(self.folder / name, MOST_HUB_BYTES, links=True)
        except OSError as error:
            raise ConfigError(f"hf:{self.name}: {name} cannot be read: {error.strerror or error}") from None

    def _refuse_code(self, settings: Mapping[str, Any], name: str, remedy: str) -> None:
        if settings.get("auto_map"):
            raise ConfigError(
                f"hf:{self.name}: {name} asks for code of its own (auto_map), which is never run: {remedy}"
            )


def _foreign_kernels(config: Mapping[str, Any]) -> Iterator[str]:
    """Repositories of code that the config names for its attention or experts, at any depth."""
    left: list[tuple[Any, bool]] = [(config, False)]
    while left:
        value, is_named = left.pop()
        if isinstance(value, Mapping):
            left += [(inner, is_named or key.endswith("_implementation")) for key, inner in value.items()]
        elif isinstance(value, list):
            left += [(inner, is_named) for inner in value]
        elif is_named and isinstance(value, str):
            fetched = value.removeprefix("paged|").startswith("flash_attention") and find_spec("flash_attn") is None
            if "/" in value or fetched:
                yield value


class WeightFiles:
    """Tensors in safetensors files, by name.

    Raises: ConfigError for a file that is torn, or a name that comes twice.
    """

    def __init__(self, named: str, files: list[Path]) -> None:
        self._named = named
        self.files = files
        self.shapes: dict[str, tuple[int, ...]] = {}
        """Shapes by name."""
        self._where: dict[str, Path] = {}
        self._kinds: dict[str, str] = {}
        for file in files:
            for name, (shape, kind) in self._opened(file, _facts).items():
                if name in self._where:
                    raise ConfigError(f"hf:{named}: {name[:100]!a} is in {self._where[name].name} and in {file.name}")
                self._where[name], self.shapes[name], self._kinds[name] = file, shape, kind

    def refuse_other(self, name: str) -> None:
        """Raises: ConfigError if a tensor's numbers are no floats that can be trained."""
        if self._kinds[name] not in _FLOATS:
            raise ConfigError(f"hf:{self._named}: {name[:100]!a} is {self._kinds[name]}: expected {', '.join(_FLOATS)}")

    def tensor(self, name: str) -> Any:
        """One tensor, float32. Raises: ConfigError if the file cannot be read."""
        return self._opened(self._where[name], lambda file: file.get_tensor(name), framework="pt").float()

    def _opened(self, path: Path, read: Any, framework: str = "np") -> Any:
        try:
            with open_given(path, links=True) as given:
                with safe_open(f"/proc/self/fd/{given.fileno()}", framework=framework) as file:
                    return read(file)
        except (OSError, SafetensorError) as error:
            said = (error.strerror if isinstance(error, OSError) else None) or str(error).splitlines()[0][:200]
            raise ConfigError(f"hf:{self._named}: {path.name} cannot be read: {said}; fetch it again") from None


def _facts(file: Any) -> dict[str, tuple[tuple[int, ...], str]]:
    found = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
    return {name: (tuple(part.get_shape()), str(part.get_dtype())) for name, part in found.items()}


def keep_hub_files(named: str, task: Mapping[str, Any], run_dir: Path) -> None:
    """Write what `final/` needs beside the weights, at the job's start: config.json, or that of the adapter, and the
    tokenizer. task: the job's own options of the task.

    Raises: ConfigError if the job began with another config.json; OSError.
    """
    directory = HubDirectory(named)
    if has_adapter(task):
        name, content = ADAPTER_CONFIG, adapter_content(named, task)
    else:
        drop = ("torch_dtype", "_name_or_path")
        content = {key: value for key, value in directory.config.items() if key not in drop} | {"dtype": "float32"}
        name = CONFIG
    path = run_dir / "final" / name
    if path.exists() and read_json(path, _MOST_CONFIG_BYTES, 1) != content:
        raise ConfigError(f"hf:{named}: its {CONFIG} or task.lora has changed since the job began: --fresh starts over")
    write_atomically(path, json.dumps(content, indent=2, sort_keys=True) + "\n", 1, make=True)
    for name, data in directory.tokenizer_files().items():
        write_atomically(run_dir / "final" / name, data, 1)
