"""`everstep init` writes a script to start from; `everstep completion` prints what makes shells complete commands."""

from __future__ import annotations

import os
from pathlib import Path

import click
from click.shell_completion import BashComplete, FishComplete, ZshComplete

from everstep.base.below import write_atomically
from everstep.base.errors import ConfigError
from everstep.base.given import read_given

_FROM = ("plain", "lightning", "hf")
_SHELLS = {"bash": BashComplete, "fish": FishComplete, "zsh": ZshComplete}


@click.command()
@click.argument("folder", default=".")
@click.option(
    "--from",
    "origin",
    type=click.Choice(_FROM),
    default="plain",
    show_default=True,
    help="What you come from: a loop of your own, Lightning, or the Trainer of transformers.",
)
def init(folder: str, origin: str) -> int:
    """Write FOLDER/train.py, a script to start from that runs as it is. No file is overwritten.

    Then replace its model, data and loss with yours, and run `everstep check` on it.
    """
    path = Path(folder) / "train.py"
    text = read_given(Path(__file__).with_name("starters") / f"{origin}.txt")
    if os.path.lexists(path):
        raise ConfigError(f"expected no file {path}: it is there, and stays as it is")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, text)
    print(f"wrote {path}\ntry it out:  everstep check {path}\ntrain:       everstep run {path} --workers 4")
    return 0


@click.command()
@click.argument("shell", type=click.Choice(tuple(_SHELLS)), required=False)
def completion(shell: str | None) -> int:
    """Print a script that completes commands, options and config keys in SHELL (default: $SHELL).

    bash: `everstep completion bash > ~/.local/share/bash-completion/completions/everstep`; zsh: into a file `_everstep`
    in a folder of $fpath; fish: `> ~/.config/fish/completions/everstep.fish`.
    """
    name = shell or Path(os.environ.get("SHELL", "")).name
    if name not in _SHELLS:
        raise ConfigError(f"expected one of {', '.join(_SHELLS)}, got {name or 'no $SHELL'}: name the shell")
    text = _SHELLS[name](click.Group("everstep"), {}, "everstep", "_EVERSTEP_COMPLETE").source()
    # bash would put a blank between KEY= and its value
    print(text.replace("    return 0\n", '    [[ "${COMPREPLY[*]}" == *= ]] && compopt -o nospace\n    return 0\n'))
    return 0
