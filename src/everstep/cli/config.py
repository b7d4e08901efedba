"""`everstep config`: what there is to be configured, and the causes that programs can go by."""

from __future__ import annotations

import difflib
import json

import click

from everstep.base.cause import Cause
from everstep.base.config import describe
from everstep.base.errors import ConfigError
from everstep.report.words import aligned

CAUSES = "causes"
_FIELDS = ("key", "type", "default", "meaning")


@click.command()
@click.argument("key", metavar="[KEY]", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list of objects.")
def command(key: str | None, as_json: bool) -> int:
    """Show a config key, or all keys of a group, with type, default and meaning. Without KEY: all keys.

    KEY `causes` lists the causes of events, which `metrics`, alerts and programs use.
    """
    causes = [{"cause": str(cause), "meaning": cause.meaning} for cause in Cause]
    rows = causes if key == CAUSES else _keys(key)
    if as_json:
        print(json.dumps(rows))
    else:
        print("\n".join(aligned([list(row.values()) for row in rows])))
    return 0


def _keys(key: str | None) -> list[dict[str, str]]:
    """Raises: ConfigError for a key that is none."""
    known = {row[0]: dict(zip(_FIELDS, row, strict=True)) for row in describe()}
    if key is None:
        return list(known.values())
    found = [row for name, row in known.items() if name == key or name.startswith(f"{key}.")]
    if not found:
        close = difflib.get_close_matches(key, [*known, CAUSES], n=1, cutoff=0)
        raise ConfigError(f"unknown key {key!r}: did you mean {close[0]!r}? `everstep config` lists all")
    return found
