"""The site has every page, key, command and cause; each trouble has a row; configs to start from are valid."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

import everstep
from everstep.base import exit_codes
from everstep.base.cause import Cause
from everstep.base.config import describe, load_config
from everstep.cli import run
from everstep.cli.config_file import read_config_file
from everstep.cli.main import COMMANDS, cli
from everstep.runtime.host.fork_server_client import EarlyForkServer

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "docs" / "site"))
import make_site  # noqa: E402

GUIDE = (ROOT / "docs" / "TROUBLESHOOTING.md").read_text()
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))


def rows(title: str) -> list[str]:
    """First cells of the table below a heading."""
    section = GUIDE.partition(f"## {title}\n")[2].partition("\n## ")[0]
    return [line.split("|")[1].strip().strip("`") for line in section.splitlines() if line.startswith("| ")][2:]


def test_every_cause_has_its_row() -> None:
    assert rows("By cause") == [cause.value for cause in Cause]


def test_every_exit_code_has_its_row() -> None:
    named = [value for name, value in vars(exit_codes).items() if name.isupper()]
    assert sorted(map(int, rows("By exit code"))) == sorted([0, 2, 130, 143, *named])


def test_every_page_is_in_the_contents() -> None:
    listed = set(
        re.findall(r"^(?:docs|reference|bench)/[\w/-]+$|^[A-Z]+$", (make_site.HERE / "index.myst").read_text(), re.M)
    )
    assert listed == {str(page.with_suffix("")) for page in make_site.pages()} | {
        f"reference/{n}" for n in make_site.generated()
    }


def test_the_reference_has_every_key_and_command() -> None:
    made = make_site.generated()
    assert [key for key, *_ in describe() if f"| `{key}` |" not in made["config"]] == []
    assert [name for name in COMMANDS if f"## everstep {name}\n" not in made["commands"]] == []
    assert [
        name for name in everstep.__all__ if name != "__version__" and f":: everstep.{name}\n" not in made["api"]
    ] == []
    assert "`crash_loop`" in made["causes"]


def test_blocks_are_executed_in_one_folder_and_one_that_fails_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "good.md").write_text(
        "<!-- run -->\n```bash\necho 1 > a\n```\nnot this:\n```bash\nexit 3\n```\n"
        "<!-- run -->\n```python\nassert open('a').read() == '1\\n'\n```\n"
    )
    (tmp_path / "bad.md").write_text("<!-- run -->\n```bash\nfalse\ntrue\n```\n")
    monkeypatch.setattr(make_site, "ROOT", tmp_path)
    assert make_site.execute(Path("good.md")) == 2
    with pytest.raises(SystemExit, match=re.escape("bad.md: a block ended with 1")):
        make_site.execute(Path("bad.md"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_configs_to_start_from_are_valid_and_say_how(path: Path) -> None:
    several = {"network.address": "10.0.0.1"} if path.stem in ("kubernetes", "ray", "slurm") else {}
    load_config([(str(path), read_config_file(path)), ("--listen", several)])
    assert f"--config configs/{path.name}" in path.read_text()


def test_there_is_a_config_for_each_way() -> None:
    local = {"data_parallel", "fsdp", "pipeline", "tensor_parallel", "three_d", "zero"}
    assert {path.stem for path in CONFIGS} == local | {"kubernetes", "ray", "slurm"}


class Lasting(EarlyForkServer):
    """Outlives the commands that ask it: each new one would import torch."""

    def close(self, timeout_s: float = 0.0) -> None:
        pass


@pytest.fixture(scope="module")
def fork_server() -> Iterator[EarlyForkServer]:
    server = Lasting(1, ("torch",))
    yield server
    EarlyForkServer.close(server)


@pytest.mark.parametrize("name", ["data_parallel", "fsdp", "pipeline", "tensor_parallel", "three_d", "zero"])
def test_a_job_can_be_placed_by_its_config(
    name: str, fork_server: EarlyForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "take_early", lambda threads, preload: fork_server)
    command = ["run", "transformer-text", "--config", str(ROOT / "configs" / f"{name}.yaml"), "--dry-run"]
    done = CliRunner().invoke(cli, command)
    assert done.exit_code == 0 and "global batch" in done.output, done.output


@pytest.mark.parametrize("engine", ["slurm", "k8s", "ray"])
def test_engines_take_their_config(engine: str, tmp_path: Path) -> None:
    path = ROOT / "configs" / f"{engine.replace('k8s', 'kubernetes')}.yaml"
    command = [
        sys.executable,
        "-P",
        "-m",
        "everstep",
        "launch",
        engine,
        "transformer-text",
        "--hosts",
        "4",
        "--slots",
        "8",
    ]
    command += ["--image", "mine:1", "--claim", "runs"] if engine == "k8s" else ["--run-dir", str(tmp_path / "run")]
    done = subprocess.run(
        [*command, "--config", str(path), "--print"], capture_output=True, text=True, env={**os.environ}
    )
    assert done.returncode == 0 and str(path) in done.stdout, done.stderr
