"""Config files: YAML in which every key is said once."""

from __future__ import annotations

from collections.abc import Hashable
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


def load_yaml(text: str) -> Any:
    """What a YAML document holds.

    Raises: ConfigError, naming key and line, if a mapping has a key twice; yaml.YAMLError if it is no YAML.
    """
    return yaml.load(text, Loader=_OnceLoader)
