"""What `histocoder doctor` finds, and that what it marks as a problem is one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from conftest import environment, run

from histocoder.cli import doctor
from histocoder.cli.doctor import NOTE, OK, PROBLEM

WHAT = ("versions", "packages", "devices", "precision", "compiler", "kernels", "memory", "shared memory", "disk")
WHAT += ("hub", "NCCL")


def marks(output: str) -> dict[str, str]:
    """The mark of each thing that was looked at."""
    lines = [line for line in output.splitlines() if line.startswith((OK, NOTE, PROBLEM)) and line[9:10].strip()]
    return {line[9:24].strip(): line[:9].strip() for line in lines}


@pytest.mark.slow
def test_a_machine_that_can_train(tmp_path: Path):
    result = run("-m", "histocoder", "doctor", "--folder", tmp_path / "not" / "yet", fresh=True)
    found = marks(result.stdout)
    assert set(WHAT) | {"all-reduce"} <= set(found) and PROBLEM not in found.values()
    assert f"torch {torch.__version__}" in result.stdout and f"free in {tmp_path}" in result.stdout
    assert "HF_HUB_OFFLINE is set" in result.stdout and found["hub"] == NOTE
    assert "gloo: 4 MB summed in" in result.stdout
    assert result.stdout.splitlines()[-1].startswith("This machine can train models")
    assert not list(tmp_path.iterdir()) and not result.stderr


@pytest.mark.slow
def test_processes_that_can_not_meet_are_a_problem():
    wrong = environment(GLOO_SOCKET_IFNAME="nosuch")
    result = run("-m", "histocoder", "doctor", env=wrong, check=False)
    assert result.returncode == 1 and marks(result.stdout)["all-reduce"] == PROBLEM
    assert "nosuch" in result.stdout and "try GLOO_SOCKET_IFNAME=lo" in result.stdout
    assert result.stdout.splitlines()[-1] == "1 problem found: what is marked 'problem' won't work."
    assert "Traceback" not in result.stdout + result.stderr


def test_processes_that_hang_are_killed_at_the_deadline():
    found = doctor.all_reduce(0.2)
    assert (found.mark, found.found) == (PROBLEM, "2 processes, gloo: no answer within 0.2 s")


def test_a_package_that_is_missing_is_a_problem(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(doctor, "PACKAGES", ("torch", "no-such-package"))
    ok, missing = doctor.packages()
    assert ok.mark == OK and ok.found == f"torch {torch.__version__}"
    assert (missing.mark, missing.meaning) == (PROBLEM, "pip install no-such-package")


def test_a_read_only_folder_is_a_problem(tmp_path: Path):
    (tmp_path / "file").touch()
    assert doctor.disk(tmp_path / "file" / "out").mark == PROBLEM
