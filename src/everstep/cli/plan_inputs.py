"""What the commands of `everstep plan` share: numbers from options, and results as JSON or as tables."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib import resources
from typing import Any

import click

from everstep.base.errors import ConfigError, did_you_mean
from everstep.cost import quantities
from everstep.report.words import aligned

MOST_NODES, MOST_HOURS = 10**7, 10**6

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")


def hours_within(value: float, what: str) -> float:
    """A number of hours. Raises: ConfigError outside of 0 to 10^6, for what is no number, too."""
    if not 0 < value <= MOST_HOURS:
        raise ConfigError(f"{what}: expected more than 0 and at most {MOST_HOURS:.0e} hours, got {value:g}")
    return value


def mtbf_hours(text: str) -> float:
    """Hours between failures, from --mtbf."""
    return quantities.parse_seconds(text, "--mtbf") / 3600


def recovery_times(changed: Sequence[str]) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Seconds by name from the package, some of them changed by NAME=TIME; and what each is, with its source.

    Raises: ConfigError for a name that is unknown, or no time.
    """
    kinds = json.loads(resources.files("everstep.cost").joinpath("recovery_times.json").read_bytes())
    measured = kinds["measured"]
    where = {"measured": f"{measured['source']}, {measured['date']}; {measured['machine']}"}
    about = {
        name: {"name": name, "seconds": float(seconds), "what": what, "source": where.get(kind, kind)}
        for kind, group in kinds.items()
        for name, (seconds, what) in group["seconds"].items()
    }
    for one in changed:
        name, _, text = one.partition("=")
        if name not in about:
            near = did_you_mean(name, about, "{}")
            raise ConfigError(f"--time: expected NAME=TIME with one of {', '.join(about)}, got {name[:40]!r}{near}")
        about[name] |= {"seconds": quantities.parse_seconds(text, f"--time {name}"), "source": "given"}
    return {name: one["seconds"] for name, one in about.items()}, list(about.values())


def say(result: dict[str, Any], as_json: bool, lines: Sequence[str]) -> None:
    """Print a result: one JSON object with sorted keys, or lines for people."""
    if as_json:
        print(json.dumps(result, sort_keys=True, allow_nan=False))
        return
    for line in lines:
        print(line)


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows in columns, and an empty line after them."""
    return [*aligned([list(row) for row in rows]), ""]
