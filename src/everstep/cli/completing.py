"""What a shell offers for words that are no commands, options or config keys."""

from __future__ import annotations

from pathlib import Path

import click
from click.shell_completion import CompletionItem

from everstep.cli.task_loading import zoo_names


def complete_task(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Ready tasks and scripts of this folder that begin so; else files, which the shell itself lists."""
    scripts = sorted(str(path) for path in Path().glob("*.py"))
    found = [CompletionItem(word) for word in (*zoo_names(), *scripts) if word.startswith(incomplete)]
    return found or complete_place(ctx, param, incomplete)


def complete_place(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Files, for a word that may also be a URL."""
    return [CompletionItem(incomplete, type="file")]
