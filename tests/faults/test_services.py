"""Services that hang, fail or are out of reach: one warning, bounded waiting, and complete logs of our own."""

from __future__ import annotations

import socket
import threading
import time
from pathlib import Path

import pytest
from conftest import DEADLINE, environment, free_port, run
from jobs import assert_complete, faulty, finetune

from histocoder.training.dashboards import InBackground
from histocoder.training.tracking import Tracker

FOREVER = threading.Event()


class Broken(Tracker):
    """Raises or hangs in one of its calls."""

    def __init__(self, call: str = "", how: str = "") -> None:
        self.broken, self.how, self.has_model = call, how, False
        self.do("init")

    def log(self, step: int, values: dict[str, float]) -> None:
        self.do("log")

    def keep_model(self, folder: Path) -> None:
        time.sleep(0.5)  # more than the patience without a model
        self.do("keep_model")
        self.has_model = True

    def close(self) -> None:
        self.do("close")

    def do(self, call: str) -> None:
        if call == self.broken and self.how == "raises":
            raise OSError("the service\nis ill")
        if call == self.broken and self.how == "exits":
            raise SystemExit
        if call == self.broken:
            FOREVER.wait()


def warning(why: str) -> str:
    return f"Warning: S {why}; the run continues without it. logs.csv has all metrics.\n"


@pytest.mark.parametrize("call", ["init", "log", "close"])
@pytest.mark.parametrize("how", ["hangs", "raises", "exits"])
def test_one_warning_and_hardly_any_waiting(call: str, how: str, capsys: pytest.CaptureFixture[str]):
    background = InBackground("S", lambda: Broken(call, how), patience=0.3)
    for step in range(50):
        background.log(step, {})
    background.close()
    reasons = {
        "raises": "failed (the service is ill)",
        "exits": "failed (SystemExit)",
        "hangs": f"did not {'respond' if call == 'init' else 'receive everything'} within 0.3 s",
    }
    assert capsys.readouterr().err == warning(reasons[how])


@pytest.mark.parametrize(
    ("how", "patience", "expected"),
    [
        ("", 60, ""),
        ("hangs", 0.7, warning("did not receive everything within 0.7 s")),
        ("raises", 60, warning("failed (the service is ill)")),
    ],
)
def test_the_model_has_its_own_deadline(how: str, patience: float, expected: str, capsys: pytest.CaptureFixture[str]):
    tracker = Broken("keep_model" if how else "", how)
    background = InBackground("S", lambda: tracker, patience=0.2, patience_with_model=patience)
    background.keep_model(Path())
    background.close()
    assert capsys.readouterr().err == expected and tracker.has_model == (not how)


def test_what_waits_for_a_service_is_bounded(capsys):
    background = InBackground("S", lambda: Broken("log", "hangs"), patience=10 * DEADLINE, room=10)
    for step in range(50):
        background.log(step, {})
    background.close()  # without patience, which no test has
    assert capsys.readouterr().err.count("is too far behind") == 1


EXTRA = ("--batch-size", 8, "--max-steps", 4, "--log-wandb")


def test_a_service_that_fails(table: Path, tmp_path: Path):
    result = run(*faulty(finetune(table, tmp_path / "out", *EXTRA), "wandb:init:raises"))
    assert_complete(result, tmp_path / "out", "W&B", "failed (the service is ill)")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("call", "why"), [("init", "did not respond"), ("log", "did not receive"), ("finish", "did not receive")]
)
def test_a_service_that_hangs(table: Path, tmp_path: Path, call: str, why: str):
    result = run(*faulty(finetune(table, tmp_path / "out", *EXTRA), f"wandb:{call}:hangs"))
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
