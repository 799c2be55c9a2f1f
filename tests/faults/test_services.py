"""Services that hang, fail or are out of reach: one warning, bounded waiting, and complete logs of our own."""

from __future__ import annotations

import socket
import threading
import time
from pathlib import Path

import pytest
from conftest import DEADLINE, environment, free_port, run
from jobs import assert_complete, finetune

from histocoder.training.dashboards import InBackground
from histocoder.training.tracking import Tracker

FOREVER = threading.Event()


class Broken(Tracker):
    """Notes the steps it is told of; raises or hangs in one of its calls."""

    def __init__(self, call: str = "", how: str = "") -> None:
        self.broken, self.how = call, how
        self.steps: list[int] = []
        self.do("init")

    def log(self, step: int, values: dict[str, float]) -> None:
        self.do("log")
        self.steps.append(step)

    def keep_model(self, folder: Path) -> None:
        self.do("keep_model")

    def close(self) -> None:
        self.do("close")

    def do(self, call: str) -> None:
        if call == self.broken and self.how == "raises":
            raise OSError("the service\nis ill")
        if call == self.broken and self.how == "exits":
            raise SystemExit
        if call == self.broken:
            FOREVER.wait()


def test_all_numbers_reach_a_service_that_is_well(capsys):
    tracker = Broken()
    background = InBackground("S", lambda: tracker)
    for step in range(100):
        background.log(step, {})
    background.close()
    assert tracker.steps == list(range(100)) and not capsys.readouterr().err


@pytest.mark.parametrize("call", ["init", "log", "close"])
@pytest.mark.parametrize("how", ["hangs", "raises", "exits"])
def test_one_warning_and_hardly_any_waiting(call: str, how: str, capsys):
    background = InBackground("S", lambda: Broken(call, how), patience=0.3)
    for step in range(50):
        background.log(step, {})
    background.close()
    reasons = {
        "raises": "failed (the service is ill)",
        "exits": "failed (SystemExit)",
        "hangs": f"did not {'respond' if call == 'init' else 'receive everything'} within 0.3 s",
    }
    expected = f"Warning: S {reasons[how]}; the run continues without it. logs.csv has all metrics.\n"
    assert capsys.readouterr().err == expected


def test_a_service_that_is_late_is_closed_still():
    late, closed = threading.Event(), threading.Event()

    class Late(Broken):
        def close(self) -> None:
            closed.set()

    background = InBackground("S", lambda: late.wait() and Late(), patience=0.1)
    background.close()
    late.set()
    assert closed.wait(DEADLINE)


@pytest.mark.parametrize("how", ["", "hangs", "raises"])
def test_the_model_has_its_own_deadline(how: str, capsys):
    class Slow(Broken):
        def keep_model(self, folder: Path) -> None:
            time.sleep(0.5)
            super().keep_model(folder)
            self.steps.append(-1)

    tracker = Slow("keep_model" if how else "", how)
    background = InBackground("S", lambda: tracker, patience=0.2, patience_with_model=60 if how != "hangs" else 0.7)
    background.keep_model(Path())
    background.close()
    reasons = {"hangs": "did not receive everything within 0.7 s", "raises": "failed (the service is ill)"}
    expected = f"Warning: S {reasons[how]}; the run continues without it. logs.csv has all metrics.\n" if how else ""
    assert capsys.readouterr().err == expected and tracker.steps == ([] if how else [-1])


def test_what_waits_for_a_service_is_bounded(capsys):
    background = InBackground("S", lambda: Broken("log", "hangs"), patience=10 * DEADLINE, room=10)
    for step in range(50):
        background.log(step, {})
    background.close()  # without patience, which no test has
    assert capsys.readouterr().err.count("is too far behind") == 1


EXTRA = ("--batch-size", 8, "--max-steps", 4, "--log-wandb")


def test_a_service_that_fails(table: Path, tmp_path: Path):
    result = run("tests/faulty.py", "wandb:init:raises", "--", *finetune(table, tmp_path / "out", *EXTRA))
    assert_complete(result, tmp_path / "out", "W&B", "failed (the service is ill)")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("call", "why"), [("init", "did not respond"), ("log", "did not receive"), ("finish", "did not receive")]
)
def test_a_service_that_hangs(table: Path, tmp_path: Path, call: str, why: str):
    result = run("tests/faulty.py", f"wandb:{call}:hangs", "--", *finetune(table, tmp_path / "out", *EXTRA))
    assert_complete(result, tmp_path / "out", "W&B", why)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["refuses", "hangs"])
def test_wandb_with_an_unreachable_server(table: Path, tmp_path: Path, how: str):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1] if how == "hangs" else free_port()
        online = {"WANDB_MODE": "online", "WANDB_API_KEY": "0" * 40, "WANDB_BASE_URL": f"http://127.0.0.1:{port}"}
        result = run(*finetune(table, tmp_path / "out", *EXTRA), env=environment(**online), fresh=True)
    assert_complete(result, tmp_path / "out", "W&B", "")
