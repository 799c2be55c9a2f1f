"""The notebooks of the documentation run from the first cell to the last."""

import os
import shutil
import sys
from pathlib import Path

import pytest
from conftest import ROOT, environment

NOTEBOOKS = sorted((ROOT / "docs").glob("*.ipynb"))


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_run(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    for name, value in environment(PYTHONPATH=str(ROOT), PATH=programs).items():
        monkeypatch.setenv(name, value)
    shutil.copytree(ROOT / "data", tmp_path / "data")
    (tmp_path / "docs").mkdir()
    notebook = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(tmp_path / "docs")}}
    nbclient.NotebookClient(notebook, timeout=900, resources=resources).execute()
    printed = "".join(one["text"] for cell in notebook.cells for one in cell.get("outputs", []) if "text" in one)
    assert "exactly right: " in printed and "Saved in " in printed
