"""The notebooks, executed as a reader would."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed")
nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed")
pytest.importorskip("ipykernel", reason="ipykernel is not installed")

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
CELL_S = 300


def texts(cells: list[Any]) -> str:
    """Everything that the cells printed."""
    return "".join(o["text"] for c in cells if c.cell_type == "code" for o in c.outputs if o.output_type == "stream")


def executed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A notebook, all of whose cells have been run in their order."""
    notebook = nbformat.read(NOTEBOOKS / name, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.outputs == [] and cell.execution_count is None for cell in code), "outputs are not kept"
    for variable in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "TMPDIR"):
        folder = tmp_path / variable.lower()
        folder.mkdir()
        monkeypatch.setenv(variable, str(folder))
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=CELL_S, kernel_name="python3", resources=resources).execute()
    return notebook


@pytest.mark.longer
def test_the_tour(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = executed("tour.ipynb", tmp_path, monkeypatch)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    printed = texts(notebook.cells)
    for words in ("killed by SIGKILL", "strikes worker 0.0", "from 3 to 4 workers", "exit code 130", "exit code 0"):
        assert words in printed
    assert "equal" in texts(code[-2:-1]) and "clean" in texts(code[-2:-1])
    assert sum("image/png" in o.get("data", {}) for o in code[-1].outputs) == 3


@pytest.mark.longer
@pytest.mark.timeout(900)
def test_the_transformer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cells = executed("transformer.ipynb", tmp_path, monkeypatch).cells
    printed = texts(cells)
    assert [f"{workers} workers: lanes of each" in printed for workers in (4, 3, 6)] == [True] * 3
    assert printed.count("exit code 0") == 2 and "losses equal: True" in printed
    assert printed.count("bitwise equal") == 2 and "clean" in texts(cells[-1:])
    assert "fault_injected 0" not in printed and "passes for an update" in printed
    assert any("image/svg+xml" in o.get("data", {}) for c in cells if c.cell_type == "code" for o in c.outputs)
