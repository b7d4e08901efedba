"""`everstep config`: lists config keys, and the causes that programs can rely on."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from functools import partial

import click

from everstep.base.cause import Cause
from everstep.base.config import describe, instead_of
from everstep.base.errors import ConfigError
from everstep.base.foreign_keys import elsewhere_with, known_elsewhere
from everstep.cli.terminal import stdout_width
from everstep.report.words import aligned

CAUSES = "causes"
_PIPED = 100  # characters of a line in a pipe
_FIELDS = ("key", "type", "default", "meaning")


def complete_key(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Keys that begin so, for the shell; as `KEY=` where a value has to follow."""
    ends = "=" if isinstance(param, click.Option) else ""
    return [f"{row[0]}{ends}" for row in describe() if row[0].startswith(incomplete)]


@click.command()
@click.argument("key", metavar="[KEY]", required=False, shell_complete=complete_key)
@click.option(
    "--search",
    metavar="WORD",
    help="Show the keys with this word in their name, their meaning or their name in another tool.",
)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list of objects.")
def command(key: str | None, search: str | None, as_json: bool) -> int:
    """Show a config key, or all keys of a group, with type, default and meaning. Without KEY: all keys.

    If KEY is another tool's name for a key, the answer names the key here. --search WORD shows keys with their default
    and the first sentence of their meaning; --json adds the rest.

    `everstep config causes` lists the causes of events, which metrics, alerts and programs use.
    """
    causes = [{"cause": str(cause), "meaning": cause.meaning} for cause in Cause]
    if search is not None:
        if key is not None:
            raise ConfigError(f"expected a KEY or --search WORD, got both: leave out {key!r}")
        rows = _with_word(search)
        cells = [[row["key"], row["default"], row["meaning"].partition(". ")[0]] for row in rows]
    else:
        rows = causes if key == CAUSES else _keys(key)
        cells = [list(row.values()) for row in rows]
    if as_json:
        print(json.dumps(rows))
    else:
        print("\n".join(_table(cells, stdout_width() or _PIPED)))
    return 0


def _table(rows: Sequence[Sequence[str]], width: int) -> list[str]:
    """Lines of at most so many characters, as words allow it: a line for each row, or its last cell below the others if
    not all rows fit so."""
    lines = aligned(rows)
    if max(map(len, lines)) <= width:
        return lines
    wrap = partial(textwrap.wrap, width=width, break_long_words=False, break_on_hyphens=False)
    folded = []
    for *cells, meaning in rows:
        folded += wrap("  ".join(cells), subsequent_indent="    ")
        folded += wrap(meaning, initial_indent="    ", subsequent_indent="    ")
    return folded


def _keys(key: str | None) -> list[dict[str, str]]:
    """The key, or all keys of the group. Raises: ConfigError for an unknown one."""
    known = {row[0]: dict(zip(_FIELDS, row, strict=True)) for row in describe()}
    if key is None:
        return list(known.values())
    found = [row for name, row in known.items() if name == key or name.startswith(f"{key}.")]
    if not found:
        raise ConfigError(f"unknown key {key!r}: {instead_of(key, [CAUSES])}")
    return found


def _with_word(word: str) -> list[dict[str, str]]:
    """The keys with the word in their name, their meaning or a name that another tool has for them.

    Raises: ConfigError if there is none.
    """
    elsewhere = elsewhere_with(word)
    named = {key for foreign in elsewhere for key in foreign.keys}
    found = [r for r in _keys(None) if r["key"] in named or word.lower() in f"{r['key']} {r['meaning']}".lower()]
    if not found:
        answer = known_elsewhere(word) or (elsewhere[0].answer if elsewhere else "`everstep config` lists all keys")
        raise ConfigError(f"no key has {word!r} in its name, its meaning or its name in other tools: {answer}")
    return found
