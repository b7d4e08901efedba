"""Commands and config keys that the documents name exist; what the image is made of is there."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from everstep.base.config import Config, dotted, to_dict
from everstep.cli.main import cli

ROOT = Path(__file__).parents[2]
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
DOCUMENTS = [path for path in DOCUMENTS if path.name != "CHANGELOG.md"]  # which also tells what was
CODE = re.compile(r"```.*?```|(?:^(?: {4}|\t).*\n?)+|`[^`]+`", re.M | re.S)
COMMAND = re.compile(r"(?:^|(?<=[\s`(]))everstep +([a-z|]+)((?:[^\S\n]+[^\n`]*?)?)(?=\s\|\s|;|&&|\s#|`|\n|$)", re.M)
OPTION = re.compile(r'(?<!\S)\[?(--[a-z][a-z-]*)(?:[= ]"?([\w.]+)=)?')


def commands(path: Path) -> Iterator[tuple[str, str, str]]:
    """Name, rest and whole of each command that a document shows."""
    for code in CODE.findall(path.read_text()):
        text = code if code.startswith(("`", " ", "\t")) else ""
        lines = re.sub(r"\s*\n\s*", " ", text) if text.startswith("`") and not text.startswith("```") else text
        for found in COMMAND.finditer(lines.replace("\\\n", " ")):
            rest = re.split(r"\s--(?:\s|$)", found[2])[0]
            for name in found[1].split("|"):
                yield name, rest, found[0]


def options(name: str, rest: str) -> set[str] | None:
    """Of a command, and of the commands below it that are meant; None if there is none of that name."""
    command = cli.get_command(click.Context(cli), name)
    if command is None:
        return None
    found = [command]
    if isinstance(command, click.Group):
        words = rest.split()
        below = [word for word in re.split(r"\|", words[0]) if word] if words else []
        if any(word not in command.commands for word in below if word.isalpha() and word.islower()):
            return None
        found += [command.commands[word] for word in below if word in command.commands]
    if name == "launch":
        run = cli.get_command(click.Context(cli), "run")
        assert run is not None
        found.append(run)
    return {option for one in found for p in one.params for option in (*p.opts, *p.secondary_opts)} | {"--help"}


def test_the_page_of_commands_has_all() -> None:
    shown = re.findall(r"`([^`]+)`", (ROOT / "docs" / "commands.md").read_text())
    told = {word for text in shown for word in re.split(r"[\s|]+", text.removeprefix("everstep "))[:1]}
    assert [name for name in cli.list_commands(click.Context(cli)) if name not in told] == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_commands_of_the_documents_exist(path: Path) -> None:
    keys = set(dotted(to_dict(Config())))
    wrong = []
    for name, rest, whole in commands(path):
        known = options(name, rest)
        if known is None:
            wrong.append(f"no such command: {whole}")
            continue
        for option, key in OPTION.findall(rest):
            if option not in known:
                wrong.append(f"no such option {option}: {whole}")
            if option == "--set" and key not in keys and not key.startswith("task."):
                wrong.append(f"no such key {key}: {whole}")
    assert not wrong, "\n".join(wrong)


def test_the_documents_show_commands() -> None:
    found = [name for path in DOCUMENTS for name, _, _ in commands(path)]
    assert len(found) > 60 and {"run", "agent", "launch", "scale", "drain", "takeover"} <= set(found)


def test_the_first_page_is_short_and_all_links_lead_somewhere() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 100
    links = [
        (path, link) for path in DOCUMENTS for link in re.findall(r"\]\((?!https?://)([^)#\s]+)", path.read_text())
    ]
    lost = [f"{path.name}: {link}" for path, link in links if not (path.parent / link).exists()]
    assert len(links) > 20 and not lost, "\n".join(lost)


def test_what_the_image_is_made_of() -> None:
    text = (ROOT / "deploy" / "Dockerfile").read_text()
    for line in re.findall(r"^COPY (?!--from)(.*)$", text, re.M):
        *sources, _ = line.split()
        assert all((ROOT / source).exists() for source in sources), line
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (names,) = re.findall(r'"/src\[([\w,]+)\]"', text)
    assert {"etcd", "object"} <= set(names.split(",")) <= set(project["optional-dependencies"]), "launch k8s may ask so"
    pinned = re.findall(r"torch==[\d.]+", (ROOT / "Makefile").read_text())
    assert re.findall(r"torch==[\d.]+", text) == pinned != []


KNOWN_PROBLEMS = {
    "cryptography": "46.0.5",
    "h11": "0.16",
    "httpx": "0.28",
    "mlflow-skinny": "3.5",
    "pillow": "12.1.1",
    "ray": "2.52",
    "starlette": "0.49.1",
}
"""The first release without problems that are known of earlier ones."""


def test_no_release_with_known_problems_is_admitted() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *(one for extra in project["optional-dependencies"].values() for one in extra)]
    for name, first in KNOWN_PROBLEMS.items():
        floors = [re.search(r">=([0-9.]+)", one) for one in wanted if re.match(rf"{re.escape(name)}[^\w-]", one)]
        assert floors, name
        for floor in floors:
            assert floor is not None and parts(floor[1]) >= parts(first), (name, first)


def parts(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))
