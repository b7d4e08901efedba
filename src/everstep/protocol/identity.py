"""A worker's numerics and code as it reports them, and how two reports are compared and worded. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any

import msgspec

from everstep.base.plan import Divides
from everstep.protocol.converter import converter

_Short = Annotated[str, msgspec.Meta(max_length=100)]
_Name = Annotated[str, msgspec.Meta(max_length=200)]
_Digest = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{16}\Z")]
MOST_FILES, MOST_PACKAGES, MOST_VERSIONS = 4096, 1024, 16
_NAMED = 3
SAMPLE = "sample "


class Kernels(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The numerics of a process. fingerprint: a digest of the bits that fixed small kernels give; it decides. The
    other fields explain it: device and instruction set, intra-op threads, versions of libraries by name."""

    fingerprint: Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{32}\Z")]
    device: _Name
    threads: Annotated[int, msgspec.Meta(ge=1)]
    versions: Annotated[dict[_Short, _Short], msgspec.Meta(max_length=MOST_VERSIONS)] = {}

    def unlike(self, other: Kernels, whose: str = "the job") -> str:
        """How this host's kernels differ from others, in one line; "" if they give the same bits."""
        if self.fingerprint == other.fingerprint:
            return ""
        names = sorted({*self.versions, *other.versions})
        said = [("", self.device, other.device), ("threads ", str(self.threads), str(other.threads))]
        said += [(f"{name} ", self.versions.get(name, "none"), other.versions.get(name, "none")) for name in names]
        words = [f"{what}{here}, {whose} with {what}{there}" for what, here, there in said if here != there]
        same = f"{self.device}, as {whose} does, so it is the environment, a driver, or a device that computes wrongly"
        values = f"fingerprint {self.fingerprint[:8]} here, {other.fingerprint[:8]} there"
        return f"other bits ({values}): this host computes with {'; with '.join(words) or same}"


class Code(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The code that a process has imported. files: digests of the user's own source files, by name, and of samples of
    its dataset, whose names begin with SAMPLE; packages: versions of installed packages, by name."""

    files: Annotated[dict[_Name, _Digest], msgspec.Meta(max_length=MOST_FILES)] = {}
    packages: Annotated[dict[_Short, _Short], msgspec.Meta(max_length=MOST_PACKAGES)] = {}

    def unlike(self, other: Code, here: str, there: str) -> str:
        """How files and packages that both have imported differ, in words; "" if they are equal. here, there: whose
        each is."""
        both = ((self.files, other.files), (self.packages, other.packages))
        found = [
            f"{name} is {value} {here}, {theirs[name]} {there}"
            for mine, theirs in both
            for name, value in sorted(mine.items())
            if theirs.get(name, value) != value
        ]
        return "; ".join([*found[:_NAMED], *([f"and {len(found) - _NAMED} more"] if len(found) > _NAMED else [])])

    @property
    def samples(self) -> Code:
        """The samples alone."""
        return Code({name: digest for name, digest in self.files.items() if name.startswith(SAMPLE)})

    def beyond(self, other: Code) -> Code:
        """Imports of this process that the other lacks."""
        return Code(_without(self.files, other.files), _without(self.packages, other.packages))

    def joined(self, other: Code) -> Code:
        """Imports of both; the other's win, and the number is bounded."""
        files, packages = {**self.files, **other.files}, {**self.packages, **other.packages}
        return Code(dict(_first(files.items(), MOST_FILES)), dict(_first(packages.items(), MOST_PACKAGES)))


_kernels = converter(Kernels)
_code = converter(Code)
_divides = converter(dict[int, Divides], strict=False)


def read_kernels(found: object) -> Kernels | None:
    """The report as a file says it; None if it says none, or nonsense."""
    try:
        return _kernels(found)
    except msgspec.ValidationError:
        return None


def read_code(found: object) -> Code | None:
    """The report as a file says it; None if it says none, or nonsense."""
    try:
        return _code(found)
    except msgspec.ValidationError:
        return None


def read_divides(found: object) -> dict[int, Divides]:
    """By stage, as a file says it; nothing if it does not, or makes no sense."""
    try:
        return _divides(found)
    except msgspec.ValidationError:
        return {}


def told(said: Kernels | Code | None) -> Any:
    """The report as JSON."""
    return msgspec.to_builtins(said)


def _without(mine: Mapping[str, str], theirs: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in mine.items() if name not in theirs}


def _first(items: Iterable[tuple[str, str]], most: int) -> list[tuple[str, str]]:
    return sorted(items)[:most]
