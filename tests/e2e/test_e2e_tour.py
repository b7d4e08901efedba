"""The notebook that walks through everything, executed as a reader would."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed")
nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed")
pytest.importorskip("ipykernel", reason="ipykernel is not installed")

TOUR = Path(__file__).parents[2] / "notebooks" / "tour.ipynb"
CELL_S = 120


def texts(cells: list[Any]) -> str:
    """Everything that the cells printed."""
    return "".join(o["text"] for c in cells if c.cell_type == "code" for o in c.outputs if o.output_type == "stream")


def test_the_tour(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = nbformat.read(TOUR, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.outputs == [] and cell.execution_count is None for cell in code), "outputs are not kept"
    for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "TMPDIR"):
        folder = tmp_path / name.lower()
        folder.mkdir()
        monkeypatch.setenv(name, str(folder))
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=CELL_S, kernel_name="python3", resources=resources).execute()
    printed = texts(notebook.cells)
    for words in ("killed by SIGKILL", "strikes worker 0.0", "from 3 to 4 workers", "exit code 130", "exit code 0"):
        assert words in printed
    assert "equal" in texts(code[-2:-1]) and "clean" in texts(code[-2:-1])
    assert sum("image/png" in o.get("data", {}) for o in code[-1].outputs) == 3
