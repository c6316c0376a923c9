"""The tutorial notebook runs from its first cell to its last."""

import os
from pathlib import Path

import pytest

nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_tutorial_runs_and_is_kept_without_outputs(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    notebook = nbformat.read(ROOT / "searches" / "tutorial.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells)  # outputs are made, not kept
    nbclient.NotebookClient(notebook, timeout=500, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    shown = [output["data"] for output in outputs if "data" in output]
    assert sum("text/html" in data for data in shown) >= 3  # search, plan (or its table), result
    figures = [data for data in shown if "image/svg+xml" in data]
    assert len(figures) == 2 and all("image/png" in data for data in figures)  # each once, without %matplotlib
    assert not any("%matplotlib" in cell.source for cell in notebook.cells)
    assert any("of 360 held-out digits" in output.get("text", "") for output in outputs)
