"""What a GPU does as a CPU does: `make test` runs these tests on a CPU, `make gpu` runs them on a
GPU.

`make test-all` runs them on a pretended GPU, too; `make test` has shorter runs on one:
tests/training/test_gpu_runs.py.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd
import pretended_gpu
import pytest
import torch
from conftest import cases, run, slow, write_table
from gpus import hiding_gpus
from jobs import assert_same_end, faulty, finetune
from models import save_tiny_model
from trainers import begin, dataset

NO_GPU = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a GPU, and a torch that is built for it"
)
GPU = (pytest.mark.gpu, NO_GPU)
PRETENDED = "pretended"


def on_devices(
    *cases: Any, gpu_only: tuple[Any, ...] = (), real_only: tuple[Any, ...] = ()
) -> list[Any]:
    on_gpu = [pytest.param("cuda", case, marks=GPU) for case in (*cases, *gpu_only)]
    on_pretended_gpu = [
        slow(PRETENDED, case) for case in (*cases, *gpu_only) if case not in real_only
    ]
    return [*(slow("cpu", case) for case in cases), *on_gpu, *on_pretended_gpu]


def on(device: str, args: list[str]) -> list[str]:
    """The arguments of a program on a device."""
    if device != PRETENDED:
        return [*args, "--device", device]
    return [pretended_gpu.__file__, "--", *args, "--device", "cuda"]


on_gpu = pytest.mark.parametrize("device", [pytest.param("cuda", marks=GPU)])
on_gpus = pytest.mark.parametrize("device", [pytest.param("cuda", marks=GPU), slow(PRETENDED)])


def trained(table: Path, out: Path, device: str, *flags: object) -> tuple[pd.DataFrame, str]:
    """A run's log, and what it printed."""
    steps = ("--batch-size", 16, "--max-steps", 10, "--eval-interval", 5)
    printed = run(*on(device, finetune(table, out, *steps, *flags))).stdout
    return pd.read_csv(out / "logs.csv"), printed


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], pd.Series]:
    """Validation losses of a run in fp32, by encoder."""
    folder = tmp_path_factory.mktemp("cpu")
    table = write_table(folder / "table.csv")
    return cache(
        lambda name: trained(table, folder / name, "cpu", "--encoder", name)[0]["val_loss"].dropna()
    )


BOTH, GPU_ONLY = (
    ("--precision bf16", "--fsdp full_shard"),
    ("", "--precision fp16", "--encoder ngram"),
)


@pytest.mark.parametrize(
    ("device", "flags"), on_devices(*BOTH, gpu_only=GPU_ONLY, real_only=BOTH[1:])
)
def test_training_is_what_it_is_on_a_cpu(
    tmp_path: Path, table: Path, on_cpu: Callable, device: str, flags: str
):
    found, printed = trained(table, tmp_path / "out", device, *flags.split())
    expected = on_cpu("ngram" if "ngram" in flags else "tiny")
    pd.testing.assert_series_equal(
        found["val_loss"].dropna(), expected, rtol=1e-2 if "--precision" in flags else 1e-4
    )
    assert not found["skipped_steps"].sum() or "fp16" in flags  # until its loss scale is found
    assert ({"cpu": "gloo"}.get(device, "nccl") in printed) == ("--fsdp" in flags)


@pytest.mark.parametrize(("device", "precision"), on_devices("fp32", gpu_only=("bf16", "fp16")))
def test_resume_is_bit_identical_on_the_gpu(
    tmp_path: Path, table: Path, device: str, precision: str
):
    flags = ("--deterministic", "--dropout", 0.1, "--precision", precision, "--save-interval", 6)
    steps = (*flags, "--batch-size", 16, "--max-steps", 12, "--eval-interval", 6)
    run(*on(device, finetune(table, tmp_path / "whole", *steps)))
    halves = on(device, finetune(table, tmp_path / "halves", *steps))
    assert run(*faulty(halves, "memory:0:9"), check=False).returncode == 2
    assert "Resuming from step 6" in run(*halves).stdout
    assert_same_end(tmp_path / "whole", tmp_path / "halves")


WITHOUT_DOUBLES = """
import runpy, sys
from torch import Tensor, float64
from torch.overrides import TorchFunctionMode
from histocoder.cli.main import main

class Mac(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for found in result if isinstance(result, (list, tuple)) else [result]:
            if isinstance(found, Tensor) and found.dtype == float64 and found.device.type != "cpu":
                raise TypeError(f"Cannot convert a MPS Tensor to float64 dtype ({func})")
        return result

sys.argv = sys.argv[1:]
model, device = (sys.argv[sys.argv.index(flag) + 1] for flag in ("--save-path", "--device"))
with Mac():
    runpy.run_path(sys.argv[0], run_name="__main__")
    for mode in ("combined", "greedy", "flat", "topk", "full"):
        main(["predict", "--model", model, "--device", device, "--mode", mode, "a farmer"])
"""


@on_gpu
def test_no_double_is_asked_of_a_gpu(tmp_path: Path, table: Path, device: str):
    steps = ("--batch-size", 16, "--max-steps", 12, "--dropout", 0.1, "--device", device)
    args = finetune(table, tmp_path / "out", *steps)  # as on Macs, whose GPUs have none
    args = [arg for arg in args if arg not in ("--no-report", "--no-experts")]
    result = run("-c", WITHOUT_DOUBLES, *args)
    assert "Wrote the report to" in result.stdout and result.stdout.count("farmer") == 5


@on_gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_step_never_waits_for_the_gpu(tmp_path: Path, table: Path, device: str, precision: str):
    trainer = begin(
        tmp_path, dataset(tmp_path, table), precision=precision, device=torch.device(device, 0)
    )
    batch = next(iter(trainer.train_loader))
    trainer.learner.train_step([batch])
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        trainer.learner.train_step([batch])
        with pytest.raises(RuntimeError, match="synchroniz"):
            torch.ones((), device=device).item()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@on_gpus
@pytest.mark.parametrize("mode", ["greedy", "flat", "topk", "full"])
def test_prediction_is_what_it_is_on_a_cpu(tmp_path: Path, table: Path, device: str, mode: str):
    model = save_tiny_model(tmp_path / "model")
    flags = ("--input", table, "--mode", mode, "--precision", "fp32", "--columns", "pred_")
    for name in ("cpu", device):
        output = ("--output", tmp_path / f"on {name}.csv", "--overwrite")
        run(*on(name, ["-m", "histocoder", "predict", "--model", model, *flags, *output]))
    one, other = (pd.read_csv(tmp_path / f"on {name}.csv") for name in ("cpu", device))
    pd.testing.assert_frame_equal(one, other, atol=1e-4, rtol=0)


@cases(
    ("argv", "env", "is_hidden"),
    ("pytest -n 4 -m not slow", {}, True),
    ("pytest", {}, True),
    ("pytest -m gpu -rs tests/scripts/test_gpu.py", {}, False),
    ("-c", {"PYTEST_XDIST_WORKER": "gw0"}, False),
)
def test_other_tests_leave_gpus_alone(argv: str, env: dict[str, str], is_hidden: bool):
    assert hiding_gpus(argv.split(), env) == ({"CUDA_VISIBLE_DEVICES": ""} if is_hidden else {})


def test_a_process_of_a_test_sees_no_gpu(request: pytest.FixtureRequest):
    if request.config.option.markexpr == "gpu":
        pytest.skip("which is for GPUs")
    seen = run("-c", "import os; print('seen:', repr(os.environ['CUDA_VISIBLE_DEVICES']))").stdout
    assert seen == "seen: ''\n"
