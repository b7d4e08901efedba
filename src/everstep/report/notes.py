"""People's notes on a run: tags and a text, in `notes.json` of its directory."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from everstep.base.below import write_atomically
from everstep.base.errors import ConfigError
from everstep.base.given import read_json
from everstep.report.words import as_dict, one_line
from everstep.runtime.link.address import NOTES_FILE

MOST_TAGS, MOST_TAG, MOST_NOTE = 12, 40, 2000
_MOST_BYTES = 1 << 16


@dataclass(frozen=True)
class Notes:
    """tags: single lines, each once; note: text without control characters."""

    tags: tuple[str, ...] = ()
    note: str = ""


def read_notes(run_dir: Path) -> Notes:
    """Notes of a run; empty if there are none, or the file is malformed."""
    try:
        found = as_dict(read_json(run_dir / NOTES_FILE, _MOST_BYTES))
    except (OSError, ValueError):
        return Notes()
    tags = found.get("tags")
    said = [one_line(tag, MOST_TAG) for tag in tags[:MOST_TAGS]] if isinstance(tags, list) else []
    return Notes(tuple(dict.fromkeys(filter(None, said))), one_line(found.get("note"), MOST_NOTE))


def checked_notes(args: dict[str, Any]) -> Notes:
    """Notes from a request. Raises: ConfigError, one line, for too long ones, or values that are no text."""
    tags, note = args.get("tags"), args.get("note")
    if not isinstance(note, str) or len(note) > MOST_NOTE:
        raise ConfigError(f"note: expected a text of at most {MOST_NOTE} characters")
    if not isinstance(tags, list) or not all(isinstance(tag, str) and len(tag) <= MOST_TAG for tag in tags):
        raise ConfigError(f"tags: expected texts of at most {MOST_TAG} characters each")
    found = tuple(dict.fromkeys(filter(None, (one_line(tag, MOST_TAG) for tag in tags))))
    if len(found) > MOST_TAGS:
        raise ConfigError(f"tags: expected at most {MOST_TAGS}, got {len(found)}")
    return Notes(found, one_line(note, MOST_NOTE))


def write_notes(run_dir: Path, notes: Notes) -> None:
    """Write the notes. Raises: ConfigError if the directory cannot be written."""
    try:
        write_atomically(run_dir / NOTES_FILE, json.dumps(asdict(notes)))
        os.chmod(run_dir / NOTES_FILE, 0o600)
    except OSError as error:
        raise ConfigError(f"cannot write {run_dir / NOTES_FILE}: {error.strerror or error}") from None
