"""The job's token, as commands get it."""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path

from everstep.base.errors import ConfigError, ProtocolError
from everstep.runtime.link import wire

TOKEN_VARIABLE = "EVERSTEP_TOKEN"


_LEAST_VARIETY = 10


def strong(token: bytes, where: str) -> bytes:
    """A token that is hard to guess: 10 or more of 16 bytes differ, and so do the steps between them. A random token
    fails with a chance of one in 10^9. Raises: ConfigError that names its origin."""
    steps = {(after - before) % 256 for before, after in pairwise(token)}
    if min(len(set(token)), len(steps)) < _LEAST_VARIETY:
        raise ConfigError(
            f"expected a random token in {where}, got one that can be guessed (it repeats itself): make one with "
            "'openssl rand -hex 32', the same for all hosts"
        )
    return token


def given_token() -> bytes | None:
    """Token in the environment; it is removed there, so that no other process inherits it.

    Raises: ConfigError if the text is no token.
    """
    text = os.environ.pop(TOKEN_VARIABLE, "")
    try:
        return strong(wire.token_of(text, f"${TOKEN_VARIABLE}"), f"${TOKEN_VARIABLE}") if text else None
    except ProtocolError as error:
        raise ConfigError(str(error)) from None


def token_in(path: Path) -> bytes:
    """Token in a file. Raises: ConfigError if the file holds no token, or cannot be read."""
    try:
        return strong(wire.read_token(path, links=True), str(path))
    except OSError as error:
        raise ConfigError(f"cannot read the token in {path}: {error.strerror or error}") from None
    except (ProtocolError, UnicodeDecodeError) as error:
        raise ConfigError(f"--token-file (security.token_file): {error}") from None
