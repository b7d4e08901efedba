"""Reads a directory of `torch.distributed.checkpoint` from an untrusted source, by its public reader.

Apart because that reader trusts its input: the index is a pickle, and so is every value that is not a tensor. Here
both can only name tensors, numbers and containers, and the index names no file outside of the directory.
"""

from __future__ import annotations

import io
import pickle
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load

from everstep.base.errors import ConfigError
from everstep.base.given import open_given

_ALLOWED = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("collections", "OrderedDict"),
    *(("pathlib", name) for name in ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")),
    *(
        ("torch.distributed.checkpoint.metadata", name)
        for name in (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    ),
}


class _IndexUnpickler(pickle.Unpickler):
    """Knows what an index is made of, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or (module, name) in _ALLOWED:
            return super().find_class(module, name)
        raise ConfigError(f"it names {f'{module}.{name}'[:100]!a}, which no index of tensors needs")


class _Reader(filesystem.FileSystemReader):
    """Its index is read as data, and leads to files of the directory alone."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._folder = path

    def read_metadata(self, *args: Any, **kwargs: Any) -> metadata.Metadata:
        where = self._folder / ".metadata"
        try:
            with open_given(where) as file:
                found = _IndexUnpickler(file).load()
        except ConfigError as error:
            raise ConfigError(f"{where} is refused: {error}") from None
        if not isinstance(found, metadata.Metadata):
            raise ConfigError(f"{where} is no index of torch.distributed.checkpoint")
        for place in dict(found.storage_data or {}).values():
            name = place.relative_path
            try:
                if not isinstance(name, str) or Path(name).name != name:
                    raise OSError
                with open_given(self._folder / name):
                    pass  # neither a link nor a pipe
            except (OSError, ValueError):
                raise ConfigError(f"{where} names {str(name)[:100]!a}, which is no file of its directory") from None
        if found.storage_meta is None:
            found.storage_meta = metadata.StorageMeta()
        found.storage_meta.load_id = self.load_id
        return found


class _Planner(DefaultLoadPlanner):
    """Entries other than tensors are read as data, too."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        try:
            self.original_state_dict[name] = torch.load(value, weights_only=True)
        except pickle.UnpicklingError:
            raise TypeError(f"{name[:100]!a} is neither a tensor, a number nor a container of these") from None


def read_dcp(path: Path) -> dict[str, Any]:
    """Contents of a directory, nested as they were saved. The index gives the nesting, which is built with empty
    tensors first.

    Raises: ConfigError if the directory is damaged, holds anything but tensors, numbers and containers of these, or
    leads elsewhere.
    """
    reader = _Reader(path)
    index = reader.read_metadata()
    _check_sizes(path, index)
    paths = index.planner_data or {}
    flat: dict[str, Any] = {}
    for name, stored in index.state_dict_metadata.items():
        flat[name] = None
        if isinstance(stored, metadata.TensorStorageMetadata):
            flat[name] = torch.empty(stored.size, dtype=stored.properties.dtype)
    try:
        load(flat, storage_reader=reader, planner=_Planner(), no_dist=True)
    except CheckpointException as error:  # no Exception, and many lines long
        raise next(iter(error.failures.values()))[0] from None
    nested: dict[str, Any] = {}
    for name, value in flat.items():
        _put(nested, tuple(paths.get(name, (name,))), value)
    found: dict[str, Any] = _lists(nested)
    return found


def _check_sizes(path: Path, index: metadata.Metadata) -> None:
    """Raises: ConfigError if an index names more bytes than its files hold, for which memory would be taken, or a
    tensor whose parts do not make up the whole of it."""
    where, stored = path / ".metadata", list(index.storage_data.values())
    tensors = {n: of for n, of in index.state_dict_metadata.items() if isinstance(of, metadata.TensorStorageMetadata)}
    numbers = [n for of in tensors.values() for n in of.size] + [n for of in stored for n in (of.offset, of.length)]
    if any(type(n) is not int or n < 0 for n in numbers):
        raise ConfigError(f"{where} names a size or place that is no whole number from 0: it is damaged")
    wanted = sum(prod(of.size) * of.properties.dtype.itemsize for of in tensors.values())
    sizes = {name: (path / name).stat().st_size for name in {of.relative_path for of in stored}}
    there, beyond = sum(sizes.values()), any(of.offset + of.length > sizes[of.relative_path] for of in stored)
    if beyond or max(wanted, sum(of.length for of in stored)) > there:
        raise ConfigError(f"{where} names more bytes than its files have ({there}): it is damaged")
    for name, of in tensors.items():
        taken = torch.zeros(of.size, dtype=torch.bool)
        for chunk in of.chunks:
            place = tuple(slice(at, at + size) for at, size in zip(chunk.offsets, chunk.sizes, strict=True))
            inside = all(n >= 0 for n in (*chunk.offsets, *chunk.sizes)) and taken[place].shape == chunk.sizes
            if not inside or taken[place].any():
                raise ConfigError(f"{where}: parts of {name[:100]!a} overlap or lie outside of it: it is damaged")
            taken[place] = True
        if not taken.all():
            raise ConfigError(f"{where}: a part of {name[:100]!a} is lacking: save the checkpoint again")


def _put(tree: dict[str, Any], path: tuple[Any, ...], value: Any) -> None:
    for part in path[:-1]:
        tree = tree.setdefault(part, {})
    tree[path[-1]] = value


def _lists(node: Any) -> Any:
    """Dicts whose keys are 0, 1, ... were lists."""
    if not isinstance(node, dict):
        return node
    if node and all(type(key) is int for key in node) and sorted(node) == list(range(len(node))):
        return [_lists(node[k]) for k in range(len(node))]
    return {key: _lists(value) for key, value in node.items()}
