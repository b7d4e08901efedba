"""`make docs`: the site of all documents, with a generated reference; warnings are errors, marked blocks are executed.

    python docs/site/make_site.py [--out build/docs] [--no-run]

Pages are copied with their neighbours (README, ARCHITECTURE, bench) into OUT/source, as relative links lead there. A
code block after the line `<!-- run -->` is executed: all such blocks of a page, in order, in one empty folder, by bash
or Python. A block that fails stops the build.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import click

from everstep.base.cause import Cause
from everstep.base.config import describe
from everstep.cli.main import cli

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
BESIDE = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "bench/README.md")
RUN = re.compile(r"^(<!-- run -->\n)?```(bash|python)\n(.*?)^```$", re.M | re.S)
BEFORE = {
    "README.md": "loop",
    "docs/scripts.md": "loop",
    "docs/data.md": "data",
    "docs/migration.md": "lightning",
    "docs/models.md": "loop",
    "docs/stages.md": "loop",
}
"""What a page's blocks of Python need that bear no mark, by its name in the folder `before`: they are run, too."""
LINK = re.compile(r"\[([^\]]*)\]\(([^)#:\s]+)\)")
LIMIT_S = 600
INTEGRATIONS = ("huggingface.Trainer", "lightning.Trainer", "accelerate.Accelerator")


def pages() -> list[Path]:
    """All documents, relative to the repository."""
    found = [path.relative_to(ROOT) for path in (ROOT / "docs").rglob("*.md")]
    return sorted([*found, *map(Path, BESIDE)])


def assemble(source: Path) -> None:
    """The source of the site: documents, pictures, what they link to, and the reference."""
    shutil.rmtree(source, ignore_errors=True)
    linked = [*ROOT.glob("docs/*.svg"), *ROOT.glob("configs/*.yaml"), *ROOT.glob("examples/*.py")]
    for path in [*(ROOT / page for page in pages()), *linked, *ROOT.glob("notebooks/*.ipynb"), ROOT / "LICENSE"]:
        target = source / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
        if path.suffix == ".md":  # the site has no page for a folder
            target.write_text(_linked(path))
    shutil.copyfile(HERE / "index.myst", source / "index.md")
    reference = source / "reference"
    reference.mkdir()
    for name, text in generated().items():
        (reference / f"{name}.md").write_text(text)


def _linked(path: Path) -> str:
    """A page without its links to folders."""

    def kept(link: re.Match[str]) -> str:
        return link[1] if (path.parent / link[2]).is_dir() else link[0]

    return LINK.sub(kept, path.read_text())


def generated() -> dict[str, str]:
    """Pages of the reference: config keys, commands, causes, the API."""
    return {"config": _config(), "commands": "\n".join(_commands()), "causes": _causes(), "api": _api()}


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("{", "&#123;")


def _config() -> str:
    rows = [
        f"| `{key}` | {_cell(kind)} | `{default or ' '}` | {_cell(text)} |" for key, kind, default, text in describe()
    ]
    head = "# Config keys\n\nFor `--set KEY=VALUE` and for files (`--config`). `everstep config KEY` shows one.\n\n"
    return head + "| key | type | default | meaning |\n| --- | --- | --- | --- |\n" + "\n".join(rows) + "\n"


def _causes() -> str:
    rows = [f"| `{one.value}` | {'yes' if one.is_fault else 'no'} | {_cell(one.meaning)} |" for one in Cause]
    head = "# Causes\n\nThe `cause` of an event. What to do: [TROUBLESHOOTING](../docs/TROUBLESHOOTING.md).\n\n"
    return head + "| cause | a fault | meaning |\n| --- | --- | --- |\n" + "\n".join(rows) + "\n"


def _commands() -> Iterator[str]:
    yield "# Commands\n\nThe help of each command, as it is printed.\n"
    yield from _help(cli, ("everstep",))


def _help(command: click.Command, words: tuple[str, ...]) -> Iterator[str]:
    context = click.Context(command, info_name=" ".join(words), terminal_width=100, max_content_width=100)
    if len(words) > 1:
        yield f"## {' '.join(words)}\n"
        yield f"```text\n{command.get_help(context)}\n```\n"
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            if below is not None and not below.hidden:
                yield from _help(below, (*words, name))


def _api() -> str:
    parts = ["```{eval-rst}", ".. autofunction:: everstep.join", ".. autofunction:: everstep.state"]
    parts += [
        ".. autoclass:: everstep.train.run.Run()",
        "   :members: evaluate, is_main, log, stop, barrier, total_steps",
    ]
    parts += [".. autoclass:: everstep.train.run.Step()", "   :members: backward, log, loss, metrics, epochs_over"]
    parts += [".. autoclass:: everstep.Task", "   :members:", "   :member-order: bysource"]
    kinds = ("TokenFile", "TarShards", "PictureFolder")
    parts += [f".. autoclass:: everstep.{kind}" for kind in kinds]
    parts += [f".. autoclass:: everstep.integrations.{name}" for name in INTEGRATIONS]
    parts += ["```", ""]
    return "# API\n\nWhat a script or a task uses of Everstep.\n\n" + "\n".join(parts)


def blocks_of(page: Path) -> Iterator[list[str]]:
    """Commands that run the blocks of a page."""
    before = (HERE / "before" / f"{BEFORE[str(page)]}.py").read_text() if str(page) in BEFORE else ""
    for mark, kind, text in RUN.findall((ROOT / page).read_text()):
        if mark:
            yield ["bash", "-euo", "pipefail", "-c", text] if kind == "bash" else [sys.executable, "-c", text]
        elif kind == "python" and before:
            yield [sys.executable, "-c", before + text]


def execute(page: Path) -> int:
    """Run the blocks of a page that are to be run. Returns how many. Raises: SystemExit with the block that failed."""
    commands = list(blocks_of(page))
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    with tempfile.TemporaryDirectory(prefix="everstep-docs-") as folder:
        for command in commands:
            done = subprocess.run(
                command,
                cwd=folder,
                env={**os.environ, "PATH": path, "EVERSTEP_DOCS": str(ROOT)},
                capture_output=True,
                text=True,
                timeout=LIMIT_S,
            )
            if done.returncode:
                said = f"{command[-1]}\n{done.stdout}{done.stderr}"
                raise SystemExit(f"{page}: a block ended with {done.returncode}:\n{said}")
    return len(commands)


def main() -> None:
    parser = argparse.ArgumentParser(description="Build the site of all documents.")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "docs")
    parser.add_argument("--no-run", action="store_true", help="execute no block")
    options = parser.parse_args()
    for page in () if options.no_run else pages():
        count = execute(page)
        if count:
            print(f"{page}: {count} blocks executed", flush=True)
    source = options.out / "source"
    assemble(source)
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", "-c", str(HERE)]
    code = subprocess.run(
        [*command, "-d", str(options.out / "doctrees"), str(source), str(options.out / "html")]
    ).returncode
    if code:
        raise SystemExit(code)
    print(options.out / "html" / "index.html")


if __name__ == "__main__":
    main()
