"""Config files: YAML in which every key occurs once."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any

import yaml

from everstep.base.config import parse_set
from everstep.base.errors import ConfigError
from everstep.base.given import read_given

_MOST_BYTES = 256 << 10
_MOST_VALUES = 10_000
_MOST_MERGED = 200


class _OnceLoader(yaml.SafeLoader):
    """Loader with YAML's own rule that PyYAML does not apply: keys of a mapping are unique."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: dict[Any, int] = {}
        for key_node, _value in node.value:
            if isinstance(key_node, yaml.ScalarNode) and key_node.tag != "tag:yaml.org,2002:merge":
                key, line = key_node.value, key_node.start_mark.line + 1
                if key in seen:
                    raise ConfigError(
                        f"line {line}: {key!r} is given twice, first on line {seen[key]}: remove one of them"
                    )
                seen[key] = line
        return super().construct_mapping(node, deep)

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        merges = [value for key, value in node.value if key.tag == "tag:yaml.org,2002:merge"]
        few = sum(len(value.value) for value in merges) <= _MOST_MERGED
        if few:
            super().flatten_mapping(node)
        if not few or (merges and len(node.value) > _MOST_MERGED):
            raise ConfigError(f"line {node.start_mark.line + 1}: it merges more than {_MOST_MERGED} keys: use fewer")


def _refuse_unbounded(data: Any) -> None:
    """Raises: ConfigError if aliases expand to absurdly many values, or refer to themselves."""
    count, left = 0, [data]
    while left:
        node = left.pop()
        count += 1
        if count > _MOST_VALUES:
            raise ConfigError(f"it holds more than {_MOST_VALUES} values: write fewer, with fewer aliases")
        left += node.values() if isinstance(node, dict) else node if isinstance(node, list | set | tuple) else ()


def read_config_file(path: Path) -> dict[str, Any]:
    """Values of a YAML file of config keys.

    Raises: ConfigError if it cannot be read or holds something else.
    """
    try:
        data = yaml.load(read_given(path, _MOST_BYTES, pipes=True).decode(), Loader=_OnceLoader)
        _refuse_unbounded(data)
    except ConfigError as error:
        raise ConfigError(f"the config file {path}, {error}") from None
    except OSError as error:
        raise ConfigError(f"cannot read the config file {path}: {error.strerror or error}") from None
    except RecursionError:
        raise ConfigError(f"the config file {path} is nested too deeply: keys are at most a few levels deep") from None
    except (yaml.YAMLError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ConfigError(f"the config file {path} is not YAML: {' '.join(str(error).split())[:300]}") from None
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"the config file {path} must hold keys and values, got {type(data).__name__}")
    odd = next((key for key in data if not isinstance(key, str)), "")
    if odd != "":
        raise ConfigError(f"the config file {path}: expected keys that are text, got {odd!s:.40}: put it in quotes")
    return data


def said_layers(config_file: Path | None, settings: Sequence[str]) -> list[tuple[str, dict[str, Any]]]:
    """Layers of `--config` and `--set`, for `load_config`. Raises: ConfigError."""
    found = [(str(config_file), read_config_file(config_file))] if config_file is not None else []
    return [*found, *((f"--set {text}", dict([parse_set(text)])) for text in settings)]
