"""Checks of a coordinator's answers to commands, as far as the commands rely on them.

Answers are checked on arrival: the directory that names the coordinator may have been prepared, together with a process
that answers there. Pure.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Required, TypedDict

import msgspec

from everstep.base.errors import ConfigError
from everstep.protocol.converter import converter

_Whole = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
_Number = Annotated[float, msgspec.Meta(ge=0, le=1e300)]
_SHOWN = 100


class _Worker(TypedDict, total=False):
    worker_id: Required[_Whole]
    incarnation: Required[_Whole]
    pid: Required[_Whole | None]
    host: Required[str]
    stages: Required[list[_Whole]]
    lanes: Required[list[_Whole]]
    role: Required[str]
    step: Required[_Whole]
    samples_per_s: Required[_Number]


class _Profile(TypedDict):
    name: str
    failed: dict[str, str]


class _Status(TypedDict, total=False):
    state: Required[str]
    generation: Required[_Whole]
    step: Required[_Whole]
    workers: Required[list[_Worker]]
    target: _Whole
    cause: str | None
    reason: str
    profile: _Profile


class _Host(TypedDict):
    name: str
    id: str
    address: str
    state: str
    slots: _Whole | None
    workers: list[_Whole]
    rtt_ms: _Number
    domains: dict[str, str]


class _Hosts(TypedDict):
    hosts: list[_Host]


class _Logs(TypedDict, total=False):
    logs: dict[str, tuple[_Whole, _Whole]]
    data: bytes


class _Life(TypedDict):
    worker_id: _Whole
    incarnation: _Whole


class _Recording(TypedDict):
    first_step: _Whole
    steps: _Whole
    workers: list[_Life]


class _Left(TypedDict, total=False):
    left: list[_Whole]


_SHAPES: dict[str, type[Any]] = {
    "status": _Status,
    "hosts": _Hosts,
    "logs": _Logs,
    "profile": _Recording,
    "drain": _Left,
}
"""Shapes of answers that are more than a text to show, by command."""
_READ = {name: converter(shape, builtin_types=(bytes,)) for name, shape in _SHAPES.items()}
_any: Callable[[object], Any] = converter(dict[str, Any])


def check_answer(name: str, answer: dict[str, Any]) -> None:
    """name: of the command. Raises: ConfigError, one line, if no coordinator answers like this."""
    try:
        _READ.get(name, _any)(answer)
    except msgspec.ValidationError as error:
        said = str(error)[:_SHOWN]
        raise ConfigError(f"expected a coordinator's answer to {name!r}, got something else: {said}") from None
