"""Kinds of values that a config key may hold, conversion of text to them, and the error messages. Pure.

Apart from the keys themselves (`config_keys.py`), which are a table of these. Standard library only.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from everstep.base.errors import ConfigError

_TRUE = {"true", "yes", "on", "1"}
_FALSE = {"false", "no", "off", "0"}
_NONE = {"none", "null", ""}
_MISSING = object()
_BEYOND = 1 << 63
"""Exclusive upper bound of whole numbers: neither files nor messages hold larger ones."""


@dataclass(frozen=True)
class Kind:
    """The values that one key accepts.

    base: 'int', 'float', 'bool', 'str', 'list' (of choices; a tuple) or 'any'. low: least value, above: exclusive lower
    bound, high: greatest value. secret: a wrong value may be a secret, so no message shows it. `choices` or `pattern`
    (with `example`) limit text. auto, none: 'auto' or nothing is accepted, too. numerics: the result's bits depend on
    it.
    """

    base: str
    meaning: str
    low: float | None = None
    above: float | None = None
    high: int | None = None
    choices: tuple[str, ...] = ()
    pattern: str = ""
    example: str = ""
    auto: bool = False
    none: bool = False
    numerics: bool = False
    secret: bool = False

    @staticmethod
    def of(annotation: Any, meaning: str, **limits: Any) -> Kind:
        accepted = get_args(annotation) if isinstance(annotation, UnionType) or get_origin(annotation) is Union else ()
        base = accepted[0] if accepted else annotation
        name = "list" if get_origin(base) is tuple else "any" if base is Any else base.__name__
        further = {"auto": Literal["auto"] in accepted, "none": NoneType in accepted}
        return Kind(name, meaning, **{**further, **limits})

    @property
    def type_name(self) -> str:
        """Name of the type for the list of keys, such as 'number or auto'."""
        name = {"int": "whole number", "float": "number", "bool": "true or false", "str": "text", "any": "anything"}
        base = " | ".join(self.choices) if self.choices else name[self.base]
        base = f"list of {base}" if self.base == "list" else base
        return base + (" or auto" if self.auto else "") + (" or none" if self.none else "")

    @property
    def expected(self) -> str:
        """Description of accepted values for error messages."""
        text = self.type_name
        if self.above is not None:
            text += f", greater than {self.above:g}"
        if self.low is not None:
            text += f", at least {self.low:g}"
        if self.high is not None:
            text += f", at most {self.high}"
        return text + (f", like {self.example}" if self.pattern else "")


def key(default: Any, meaning: str, **limits: Any) -> Any:
    """A dataclass field that is a config key, of the type that it is annotated with. `limits`: fields of `Kind`."""
    return dataclasses.field(default=default, metadata={"meaning": meaning, **limits})


def convert(source: str, name: str, kind: Kind, value: Any, default: Any) -> Any:
    """Value in the type of its key; numbers, booleans and none may come as text.

    Raises: ConfigError, one line: expected, came, what to do.
    """
    if isinstance(value, str) and kind.auto and value.strip().lower() == "auto":
        return "auto"
    if kind.none and (value is None or (isinstance(value, str) and value.strip().lower() in _NONE)):
        return None
    if isinstance(value, bool) and {"on", "off"} <= set(kind.choices):
        value = "on" if value else "off"  # YAML reads on and off as booleans
    number = kind.base == "str" and kind.pattern and type(value) is int  # YAML reads 1000 as one
    converted = _CONVERTERS[kind.base](str(value) if number else value)
    if converted is _MISSING or not _fits(kind, converted):
        came = "something else" if kind.secret else shown(value)
        source = source.partition("=")[0] if kind.secret else source
        example = f"{name}={_example(kind, default)}"
        raise ConfigError(f"{name}: expected {kind.expected}, got {came} (from {source}): give e.g. {example}")
    return converted


SECRET_VARIABLES = (
    *("EVERSTEP_TOKEN", "EVERSTEP_DASHBOARD_TOKEN", "EVERSTEP_METRICS_TOKEN"),
    *("EVERSTEP_ETCD_USER", "EVERSTEP_ETCD_PASSWORD"),
)
"""Everstep's own secret variables; only the command that gets them may see them, and no file."""
WITH_PASSWORD = re.compile(r"://[^/\s:@]*:[^/\s@]+@")
"""What an address with a password in it holds."""


def variable(source: str, name: str, value: Any) -> str:
    """Value of an environment variable, `env.NAME`. Raises: ConfigError for an invalid name or value."""
    text = str(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else None
    if not re.fullmatch(r"env\.[A-Za-z_][A-Za-z0-9_]*", name):
        raise ConfigError(f"{name}: expected the name of an environment variable after 'env.' (from {source})")
    if name.removeprefix("env.") in SECRET_VARIABLES:
        raise ConfigError(
            f"{name}: expected an environment variable that is not secret, got one that is: workers and files of the "
            "job would get it; set it in the environment of the command instead"
        )
    if text is None or "\0" in text:
        raise ConfigError(f"{name}: expected text or a number, got {shown(value)} (from {source}): give e.g. {name}=1")
    return text


def shown(value: Any) -> str:
    """A value for an error message: one line, not too long."""
    try:
        text = str(value).lower() if isinstance(value, bool) else repr(value)
    except (ValueError, RecursionError):  # for example a number of thousands of digits
        text = f"a {type(value).__name__} that is too large to show"
    return text if len(text) <= 60 else text[:57] + "..."


def free(value: Any) -> Any:
    """A value of unknown type: text that is JSON becomes its value, other text stays text."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value, parse_constant=_refuse)
    except (ValueError, RecursionError):
        pass
    number = _to_float(value)
    return value if number is _MISSING else number


def _refuse(constant: str) -> Any:
    """NaN and infinities stay text: JSON has no such numbers, and NaN differs from itself."""
    raise ValueError(constant)


def _example(kind: Kind, default: Any) -> str:
    if isinstance(default, bool):
        return "true" if default else "false"
    if default not in (None, "", ()):
        return str(default)
    if kind.choices or kind.example:
        return kind.example or kind.choices[0]
    return {"int": "100", "float": "1.0", "bool": "true"}.get(kind.base, "name")


def _fits(kind: Kind, value: Any) -> bool:
    if (kind.low is not None and value < kind.low) or (kind.above is not None and value <= kind.above):
        return False
    if kind.high is not None and value > kind.high:
        return False
    if kind.base == "list":
        return all(item in kind.choices for item in value)
    if kind.choices and value not in kind.choices:
        return False
    return not kind.pattern or re.fullmatch(kind.pattern, value) is not None


def _to_float(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return _MISSING
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return _MISSING
    return number if math.isfinite(number) else _MISSING


def _to_int(value: Any) -> Any:
    number: Any = value if isinstance(value, int) and not isinstance(value, bool) else _MISSING
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            number = int(value)
    if number is _MISSING:
        real = _to_float(value)
        number = int(real) if real is not _MISSING and real == int(real) else _MISSING
    return number if number is _MISSING or abs(number) < _BEYOND else _MISSING


def _to_bool(value: Any) -> Any:
    if isinstance(value, bool):
        return value
    text = value.strip().lower() if isinstance(value, str) else ""
    return True if text in _TRUE else False if text in _FALSE else _MISSING


def _to_str(value: Any) -> Any:
    return value if isinstance(value, str) else _MISSING


def _to_list(value: Any) -> Any:
    """Names, each once; as text: `[a, b]`, `a,b` or nothing."""
    if isinstance(value, str):
        value = [part.strip(" \"'") for part in value.strip().strip("[]()").split(",")]
    if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
        return _MISSING
    return tuple(dict.fromkeys(item for item in value if item))


_CONVERTERS: dict[str, Callable[[Any], Any]] = {
    "int": _to_int,
    "float": _to_float,
    "bool": _to_bool,
    "str": _to_str,
    "list": _to_list,
    "any": free,
}
