"""A job's settings for others' eyes: pages, reports and services that get the job's data. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from everstep.base.config_fields import WITH_PASSWORD

HIDDEN = "(not shown)"
_VARIABLE = re.compile(
    r"(^|_)(TOKENS?|KEYS?|SECRETS?|PASS|PWD|CREDENTIALS?|AUTH)(_|$)|(PASSWORD|PASSWD|APIKEYS?)(_|$)", re.IGNORECASE
)


def is_secret(key: str, value: Any) -> bool:
    """Whether the value of a dotted key may be a secret: the arguments of a command, a variable with a word in its name
    that says so, a URL with a password."""
    group, _, name = key.partition(".")
    named = key == "notify.command" or (group == "env" and _VARIABLE.search(name) is not None)
    return bool(value) and (named or WITH_PASSWORD.search(str(value)) is not None)


def shown_settings(config: Mapping[str, Any], group: str = "") -> dict[str, Any]:
    """The nested config of job.json, without values that may be secrets. group: what its keys begin with."""
    return {
        name: shown_settings(value, f"{group}{name}.")
        if isinstance(value, Mapping)
        else HIDDEN
        if is_secret(f"{group}{name}", value)
        else value
        for name, value in config.items()
    }


def setting_text(value: Any) -> str:
    """A setting as `everstep config` and `--set` have it: none, true, false, or as it is."""
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)
