"""What `histocoder doctor` reports."""

from __future__ import annotations

from pathlib import Path

import torch
from conftest import refused, run

WHAT = ("versions", "packages", "devices", "precision", "kernels", "memory", "disk", "hub")


def test_the_machine_is_described(tmp_path: Path):
    said = run("-m", "histocoder", "doctor", "--folder", tmp_path / "not" / "yet").stdout
    marks = {line[9:24].strip(): line[:9].strip() for line in said.splitlines() if line.startswith(("ok ", "note "))}
    assert set(WHAT) <= set(marks) and marks["hub"] == "note" and marks["versions"] == "ok"
    assert f"torch {torch.__version__}" in said and f"free in {tmp_path}" in said and "HF_HUB_OFFLINE is set" in said
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_a_file_is_refused(tmp_path: Path):
    (tmp_path / "file").touch()
    assert "is a file" in refused("-m", "histocoder", "doctor", "--folder", tmp_path / "file" / "out")
