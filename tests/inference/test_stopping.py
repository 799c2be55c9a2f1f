"""Coding a file without a terminal: lines instead of a bar, signals, and what is mistaken for
descriptions.
"""

import signal
from pathlib import Path

import pytest
from conftest import mistake, run, write_table
from jobs import faulty
from models import save_tiny_model

from histocoder.inference import predict_file
from histocoder.inference.predict_file import ProgressLines


def test_a_line_a_minute_without_a_terminal(monkeypatch: pytest.MonkeyPatch):
    now = [0.0]
    monkeypatch.setattr(predict_file.time, "monotonic", lambda: now[0])
    lines: list[str] = []
    minutes = ProgressLines(1000, lines.append)
    for second in range(10, 190, 10):
        now[0] = float(second)
        minutes.add(5)
    assert lines == [
        "Coded 30 of 1,000 rows; 0:32:20 left.",
        "Coded 60 of 1,000 rows; 0:31:20 left.",
        "Coded 90 of 1,000 rows; 0:30:20 left.",
    ]


def test_sigterm_ends_with_a_message_and_resumes(tmp_path: Path):
    model, table = (
        save_tiny_model(tmp_path / "model"),
        write_table(tmp_path / "table.csv", copies=40),
    )
    flags = (
        "--model",
        model,
        "--mode",
        "flat",
        "--input",
        table,
        "--columns",
        "pred_",
        "--output",
        tmp_path / "o.csv",
    )
    args = ["-m", "histocoder", "predict", *map(str, flags)]
    ended = run(*faulty(args, "stop:os.replace:2"), check=False)
    assert (
        ended.returncode == 128 + signal.SIGTERM and "What is coded so far is kept" in ended.stderr
    )
    assert not (tmp_path / "o.csv").exists()
    assert "Resuming an interrupted run." in run(*args).stdout


def test_a_file_is_not_coded_as_a_description(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    model, table = save_tiny_model(tmp_path / "model"), write_table(tmp_path / "census.csv")
    for name in (table.name, "model"):
        said = mistake(capsys, "predict", "--model", model, name)
        assert f"--input {name} --output coded.csv" in said
