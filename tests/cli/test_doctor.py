"""What `histocoder doctor` finds, and that what it marks as a problem is one."""

from __future__ import annotations

from collections import namedtuple
from pathlib import Path

import pytest
import torch
from conftest import environment, run

from histocoder.cli import doctor
from histocoder.cli.doctor import NOTE, OK, PROBLEM, Finding, print_findings
from histocoder.ops import kernels

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


def test_a_wrong_sum_is_noticed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(doctor.distributed, "all_reduce", lambda values: values + 1)
    with pytest.raises(SystemExit, match="the sum is 2 and should be 1"):
        doctor.add_up("cpu")


def test_kernels_that_were_not_compiled_are_noted(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(kernels, "library", lambda: None)
    found = doctor.compiled_kernels()
    assert found.mark == NOTE and "C compiler" in found.meaning


def test_a_package_that_is_missing_is_a_problem(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(doctor, "PACKAGES", ("torch", "no-such-package"))
    ok, missing = doctor.packages()
    assert ok.mark == OK and ok.found == f"torch {torch.__version__}"
    assert (missing.mark, missing.meaning) == (PROBLEM, "pip install no-such-package")


def test_what_is_scarce_is_noted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    usage = namedtuple("usage", "total used free")(10**9, 0, 64_000_000)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: usage)
    monkeypatch.setattr(doctor.os, "sysconf", lambda name: 30_000)
    found = [doctor.shared_memory(), doctor.disk(tmp_path), doctor.memory()]
    assert [one.mark for one in found] == [NOTE] * 3
    assert "--num-workers 0" in found[0].meaning and "6.2 GB" in found[1].meaning and "2.2 GB" in found[2].meaning


def test_a_read_only_folder_is_a_problem(tmp_path: Path):
    (tmp_path / "file").touch()
    assert doctor.disk(tmp_path / "file" / "out").mark == PROBLEM


def test_gpus_that_torch_cannot_find_are_noted(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(doctor.shutil, "which", lambda name: f"/usr/bin/{name}")
    assert "this torch is built without CUDA" in doctor.devices().meaning
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    assert "CUDA_VISIBLE_DEVICES (now '7')" in doctor.devices().meaning


def test_the_end_says_whether_training_can_work():
    said: list[str] = []
    assert print_findings(iter([Finding(OK, "a", "b"), Finding(NOTE, "c", "d", "e")]), said.append)
    assert said == [
        "ok       a              b",
        "note     c              d",
        "                        e",
        "This machine can train models; the notes say what limits it.",
    ]
    assert not print_findings(iter([Finding(PROBLEM, "a", "b")] * 2), said.append)
    assert said[-1] == "2 problems found: what is marked 'problem' won't work."
