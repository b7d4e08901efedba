"""Numbers as people write them: 7.5B parameters, 80GiB, 100000h, 200Gb. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from everstep.base.errors import ConfigError

_NUMBER = re.compile(r"(\d+(?:\.\d+)?|\.\d+)(?:e(\d{1,2}))?\s*([a-zA-Z]*)", re.ASCII)
_COUNTS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
_BYTES = {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_SECONDS = {"ms": 1e-3, "s": 1, "min": 60, "h": 3600, "d": 86400, "y": 365.25 * 86400}
_RATES = {"mb": 1e6 / 8, "gb": 1e9 / 8, "tb": 1e12 / 8}
MOST_PARAMETERS, MOST_BYTES, MOST_SECONDS, MOST_RATE = 10**16, 2**60, 10**12, 10**14


def parse_count(text: str, what: str) -> int:
    """A number of things: 125M, 7.5B, 1.5T, 25000000. what: its name in the error.

    Raises: ConfigError for another form, less than 1, or more than 10^16.
    """
    return round(_parse(text, what, _COUNTS, (1, MOST_PARAMETERS), "a number such as 125M, 7.5B, 1.5T or 25000000"))


def parse_bytes(text: str, what: str) -> int:
    """A size in bytes: 80GiB, 80GB, 512MiB; the unit must be given. Raises: ConfigError as `parse_count`."""
    return round(_parse(text, what, _BYTES, (1, MOST_BYTES), "a size with its unit, such as 80GiB, 80GB or 512MiB"))


def parse_seconds(text: str, what: str) -> float:
    """A time in seconds: 100000h, 30d, 5min, 30s, 250ms; the unit must be given. Raises: ConfigError as
    `parse_count`."""
    return _parse(text, what, _SECONDS, (1e-3, MOST_SECONDS), "a time with its unit, such as 100000h, 30d, 5min or 30s")


def parse_rate(text: str, what: str) -> float:
    """A network's speed in bytes per second, from bits: 200Gb, 200Gb/s, 800Mb. Raises: ConfigError as `parse_count`."""
    words = "bits per second with their unit, such as 200Gb or 800Mb"
    bare = text.strip().removesuffix("/s")
    if bare.endswith("B"):  # bytes would be eight times that
        raise ConfigError(f"{what}: expected {words}, got {text[:40]!r}")
    return _parse(bare, what, _RATES, (1, MOST_RATE), words)


def _parse(text: str, what: str, units: Mapping[str, float], bounds: tuple[float, float], expected: str) -> float:
    found = _NUMBER.fullmatch(text.strip())
    factor = units.get(found[3].lower()) if found else None
    if found is None or factor is None:
        raise ConfigError(f"{what}: expected {expected}, got {text[:40]!r}")
    value = float(found[1]) * 10.0 ** int(found[2] or 0) * factor
    least, most = bounds
    if not least <= value <= most:
        unit = " seconds" if units is _SECONDS else " bytes per second" if units is _RATES else ""
        raise ConfigError(f"{what}: expected from {least:g} to {most:.0e}{unit}, got {text[:40]!r}")
    return value


def time_words(seconds: float) -> str:
    """A time in the unit that suits it: 14 min, 3.1 h, 48 d."""
    for unit, factor in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        if seconds >= 2 * factor:
            return f"{_three(seconds / factor)} {unit}"
    return f"{_three(seconds * 1e3)} ms" if seconds < 1 else f"{_three(seconds)} s"


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
