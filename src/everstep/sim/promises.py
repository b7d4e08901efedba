"""How a broken promise is told. Apart because all checks need it."""

from __future__ import annotations


class PromiseBroken(AssertionError):
    """A promise did not hold; the message begins with its name."""


def require(condition: bool, promise: str, text: str) -> None:
    """Raise `PromiseBroken` unless the condition of a promise holds."""
    if not condition:
        raise PromiseBroken(f"{promise}: {text}")


def freed(who: object, what: str, kept: object) -> None:
    """P5: nothing is kept that will not be used again; `kept` must be empty."""
    if kept:
        raise PromiseBroken(f"P5: {who} keeps {what}: {kept}")
