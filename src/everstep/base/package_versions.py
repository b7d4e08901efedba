"""The versions of other packages that Everstep works with: those of its own metadata, which pip checks only when it
installs Everstep."""

from __future__ import annotations

import functools
import importlib.metadata
import re

from everstep.base.errors import ConfigError

_REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+)((?:[<>]=?\d[\d.]*,?)+)(?:;.*)?")
_BOUND = re.compile(r"([<>]=?)([\d.]+)")


def refuse_versions(*names: str) -> None:
    """Check the installed versions of packages, without importing one; one missing, or in part, is left out.

    Raises: ConfigError naming the first outside the range.
    """
    for name in names:
        wanted = _ranges().get(name)
        try:
            found = importlib.metadata.version(name)  # None or KeyError, by Python's version, after half a removal
        except (importlib.metadata.PackageNotFoundError, KeyError):
            continue
        if wanted and found and not in_range(found, wanted):
            raise ConfigError(
                f"{name}: expected a version {wanted}, got {found}: pip install '{name}{wanted}', or another version "
                "of everstep"
            )


def in_range(version: str, wanted: str) -> bool:
    """Whether the numbers that a version begins with meet all bounds, such as `>=2.13,<2.16`."""
    have = _numbers(version)
    order = {">=": have.__ge__, ">": have.__gt__, "<=": have.__le__, "<": have.__lt__}
    return all(order[sign](_numbers(bound)) for sign, bound in _BOUND.findall(wanted))


def _numbers(version: str) -> tuple[int, ...]:
    found = re.match(r"\d+(\.\d+)*", version)
    numbers = [int(part) for part in found[0].split(".")] if found else []
    while numbers and not numbers[-1]:
        numbers.pop()  # 2.13.0 is 2.13
    return tuple(numbers)


@functools.cache
def _ranges() -> dict[str, str]:
    """Range of each package, in the order from the lowest bound; empty where Everstep is not installed."""
    try:
        lines = importlib.metadata.requires("everstep") or []
    except importlib.metadata.PackageNotFoundError:
        return {}
    found = (_REQUIREMENT.fullmatch(line.replace(" ", "")) for line in lines)
    return {one[1]: ",".join(sorted(one[2].strip(",").split(","), reverse=True)) for one in found if one}
