"""Config files: YAML in which every key is said once."""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from everstep.base.errors import ConfigError


class _OnceLoader(yaml.SafeLoader):
    """YAML's own rule, which PyYAML does not apply: the keys of a mapping are unique."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: dict[Any, int] = {}
        for key_node, _value in node.value:
            if isinstance(key_node, yaml.ScalarNode) and key_node.tag != "tag:yaml.org,2002:merge":
                key, line = key_node.value, key_node.start_mark.line + 1
                if key in seen:
                    raise ConfigError(
                        f"line {line}: {key!r} is given twice, first on line {seen[key]}; each key once, please"
                    )
                seen[key] = line
        return super().construct_mapping(node, deep)


def read_config_file(path: Path) -> dict[str, Any]:
    """A YAML file of config keys.

    Raises: ConfigError if it cannot be read or holds something else.
    """
    try:
        data = yaml.load(path.read_text(), Loader=_OnceLoader)
    except ConfigError as error:
        raise ConfigError(f"the config file {path}, {error}") from None
    except OSError as error:
        raise ConfigError(f"cannot read the config file {path}: {error.strerror or error}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"the config file {path} is not YAML: {' '.join(str(error).split())}") from None
    if data is None:
        return {}
    if not isinstance(data, dict) or not all(isinstance(key, str) for key in data):
        raise ConfigError(f"the config file {path} must hold keys and values, got {type(data).__name__}")
    return data
