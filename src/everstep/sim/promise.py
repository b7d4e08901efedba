"""How a simulation says that a promise did not hold."""

from __future__ import annotations


class PromiseBroken(AssertionError):
    """A promise did not hold; the message begins with its name."""


def require(condition: bool, promise: str, text: str) -> None:
    """What a promise needs."""
    if not condition:
        raise PromiseBroken(f"{promise}: {text}")


def freed(who: object, what: str, kept: object) -> None:
    """P5: nothing is kept that nobody will ask for again; there must be nothing left of it."""
    if kept:
        raise PromiseBroken(f"P5: {who} keeps {what}: {kept}")
