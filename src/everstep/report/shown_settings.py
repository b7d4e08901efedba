"""A job's settings for others' eyes: pages, reports and services that get the job's data. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from everstep.report.words import as_dict

HIDDEN = "(not shown)"


def shown_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """The nested config of job.json, without values that may hold a secret: the arguments of a command."""
    rule = as_dict(config.get("notify"))
    if not rule.get("command"):
        return dict(config)
    return {**config, "notify": {**rule, "command": HIDDEN}}


def setting_text(value: Any) -> str:
    """A setting as `everstep config` and `--set` have it: none, true, false, or as it is."""
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)
