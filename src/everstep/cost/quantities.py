"""Numbers as people write them: 7.5B parameters, 80GiB. Pure."""

from __future__ import annotations

import math
import re

from everstep.base.errors import ConfigError

_NUMBER = re.compile(r"(\d+(?:\.\d+)?|\.\d+)(?:e(\d{1,2}))?\s*([a-zA-Z]*)", re.ASCII)
_COUNTS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
_BYTES = {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
MOST_PARAMETERS, MOST_BYTES = 10**16, 2**60


def parse_count(text: str, what: str) -> int:
    """A number of things: 125M, 7.5B, 1.5T, 25000000. what: its name in the error.

    Raises: ConfigError for another form, less than 1, or more than 10^16.
    """
    return _parse(text, what, _COUNTS, MOST_PARAMETERS, "a number such as 125M, 7.5B, 1.5T or 25000000")


def parse_bytes(text: str, what: str) -> int:
    """A size in bytes: 80GiB, 80GB, 512MiB; the unit must be given. Raises: ConfigError as `parse_count`."""
    return _parse(text, what, _BYTES, MOST_BYTES, "a size with its unit, such as 80GiB, 80GB or 512MiB")


def _parse(text: str, what: str, units: dict[str, int], most: int, expected: str) -> int:
    found = _NUMBER.fullmatch(text.strip())
    factor = units.get(found[3].lower()) if found else None
    if found is None or factor is None:
        raise ConfigError(f"{what}: expected {expected}, got {text[:40]!r}")
    value = float(found[1]) * 10.0 ** int(found[2] or 0) * factor
    if not 1 <= value <= most:
        raise ConfigError(f"{what}: expected from 1 to {most:.0e}, got {text[:40]!r}")
    return round(value)


def count_words(value: float) -> str:
    """A number of parameters in three digits: 7.5B."""
    for unit, factor in reversed(_COUNTS.items()):
        if value >= factor:
            return f"{_three(value / factor)}{unit.upper()}"
    return "0"


def _three(value: float) -> str:
    digits = max(0, 2 - math.floor(math.log10(value))) if value > 0 else 0
    text = f"{value:.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
