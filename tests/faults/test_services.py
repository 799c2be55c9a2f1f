"""Services that fail or are out of reach: one warning, and complete logs of our own."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from conftest import environment, free_port, run
from jobs import assert_complete, faulty, finetune

EXTRA = ("--batch-size", 8, "--max-steps", 4, "--log-wandb")


@pytest.mark.parametrize("call", ["init", "log", "finish"])
def test_a_service_that_fails(table: Path, tmp_path: Path, call: str):
    result = run(*faulty(finetune(table, tmp_path / "out", *EXTRA), f"wandb:{call}:raises"))
    assert_complete(result, tmp_path / "out", "W&B", "failed (the service is ill)")


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
