"""What a shell offers for words that are no commands, options or config keys."""

from __future__ import annotations

import os
from pathlib import Path

import click
from click.shell_completion import CompletionItem

from everstep.cli.task_loading import zoo_names


def complete_task(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Ready tasks, and scripts and folders of this one, that begin so. The shell lists files where no task or script
    does, and puts no blank after a folder then."""
    scripts = sorted(str(path) for path in Path().glob("*.py"))
    if not any(word.startswith(incomplete) for word in (*zoo_names(), *scripts)):
        return complete_place(ctx, param, incomplete)
    folders = sorted(f"{path}/" for path in Path().glob("*") if os.path.isdir(path))
    seen = [name for name in folders if incomplete or not name.startswith(".")]
    return [CompletionItem(word) for word in (*zoo_names(), *scripts, *seen) if word.startswith(incomplete)]


def complete_place(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Files, for a word that may also be a URL."""
    return [CompletionItem(incomplete, type="file")]
