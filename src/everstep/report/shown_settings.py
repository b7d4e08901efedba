"""A job's settings for others' eyes: pages, reports and services that get the job's data. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from everstep.report.words import as_dict

HIDDEN = "(not shown)"
_SECRET = re.compile(r"notify\.command|env\..*(TOKEN|KEY|SECRET|PASS|CREDENTIAL|AUTH).*", re.IGNORECASE)


def is_secret(key: str) -> bool:
    """Whether the value of a dotted key may hold a secret: the arguments of a command, variables with such a name."""
    return _SECRET.fullmatch(key) is not None


def shown_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """The nested config of job.json, without values that may hold a secret."""
    found = dict(config)
    for group in ("notify", "env"):
        values = as_dict(config.get(group))
        if values:
            found[group] = {k: HIDDEN if v and is_secret(f"{group}.{k}") else v for k, v in values.items()}
    return found


def setting_text(value: Any) -> str:
    """A setting as `everstep config` and `--set` have it: none, true, false, or as it is."""
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)
