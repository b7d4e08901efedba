"""The job's token, as a command is given it."""

from __future__ import annotations

import os
from pathlib import Path

from everstep.base.errors import ConfigError, ProtocolError
from everstep.runtime import wire

TOKEN_VARIABLE = "EVERSTEP_TOKEN"


def given_token() -> bytes | None:
    """The token in the environment, from which it is taken, so that no other process inherits it.

    Raises: ConfigError if it is none.
    """
    text = os.environ.pop(TOKEN_VARIABLE, "")
    try:
        return wire.token_of(text, f"${TOKEN_VARIABLE}") if text else None
    except ProtocolError as error:
        raise ConfigError(str(error)) from None


def token_in(path: Path) -> bytes:
    """Raises: ConfigError if the file holds no token, or cannot be read."""
    try:
        return wire.read_token(path)
    except OSError as error:
        raise ConfigError(f"cannot read the token in {path}: {error.strerror or error}") from None
    except (ProtocolError, UnicodeDecodeError) as error:
        raise ConfigError(f"--token-file (security.token_file): {error}") from None
