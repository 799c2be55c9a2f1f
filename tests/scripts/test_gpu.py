"""What a GPU is asked to do, on a simulated one: see simulated_gpu/gpu.cpp. How fast a real one is, no test knows."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch
from conftest import DEADLINE, ROOT, environment, run, write_table
from jobs import assert_same_end, faulty, finetune
from models import slow_in_bf16

FOLDER = Path(__file__).with_name("simulated_gpu")
TORCH = Path(torch.__file__).parent
GPU = ("--device", "cuda")


@pytest.fixture(scope="session")
def gpu(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a program that has a GPU."""
    if torch.backends.cuda.is_built() or sys.platform != "linux" or shutil.which("g++") is None:
        pytest.skip("simulating a GPU takes Linux, g++ and a torch without CUDA")
    folder = tmp_path_factory.getbasetemp()
    library = (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "simulated_gpu.so"
    with library.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one of the processes that test compiles it
        if not library.exists():
            command = ["g++", "-std=c++20", "-shared", "-fPIC", f"-I{TORCH / 'include'}", FOLDER / "gpu.cpp"]
            subprocess.run([*command, "-o", library], check=True, timeout=DEADLINE)
    return environment(SIMULATED_GPU=str(library), PYTHONPATH=f"{FOLDER}{os.pathsep}{ROOT}")


def on_gpu(gpu: dict[str, str], *args: object, check: bool = True, **more: str) -> subprocess.CompletedProcess[str]:
    """Run a script with a GPU; it must be a Python that starts anew, since torch looks for one only then."""
    return run(*args, check=check, env={**gpu, **more}, fresh=True)


def steps(table: Path, out: Path, *extra: object) -> list[str]:
    return finetune(table, out, "--batch-size", 16, "--max-steps", 12, "--eval-interval", 6, *extra)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that knows a little."""
    folder = tmp_path_factory.mktemp("trained")
    table = write_table(folder / "table.csv", two_codes=True)
    codes = ("--target-cols", "hisco_1", "hisco_2", "--language-col", "lang")
    run(*finetune(table, folder / "out", "--batch-size", 16, "--max-steps", 60, *codes))
    return folder / "out"


@pytest.mark.parametrize(
    "flags",
    [
        ["--num-workers", "2", "--gradient-accumulation-steps", "2"],
        pytest.param(["--gradient-checkpointing"], marks=pytest.mark.thorough),
        pytest.param(["--freeze-encoder"], marks=pytest.mark.thorough),
    ],
)
def test_training_is_what_it_is_on_a_cpu(tmp_path: Path, table: Path, gpu: dict[str, str], flags: list[str]):
    run(*steps(table, tmp_path / "cpu", *flags))
    on_gpu(gpu, *steps(table, tmp_path / "gpu", *GPU, *flags))
    logs = [pd.read_csv(tmp_path / device / "logs.csv") for device in ("cpu", "gpu")]
    for column in ("train_loss", "val_loss", "grad_norm"):
        pd.testing.assert_series_equal(*(log[column] for log in logs), rtol=1e-4)


@pytest.mark.parametrize(
    "precision", [pytest.param("bf16", marks=slow_in_bf16), pytest.param("fp16", marks=pytest.mark.thorough)]
)
def test_lower_precisions_train_alike(tmp_path: Path, table: Path, gpu: dict[str, str], precision: str):
    losses = []
    for name in ("fp32", precision):
        on_gpu(gpu, *steps(table, tmp_path / name, *GPU, "--max-steps", 20, "--precision", name))
        losses.append(pd.read_csv(tmp_path / name / "logs.csv")["val_loss"].dropna())
    assert losses[0].iloc[-1] < 0.95 * losses[0].iloc[0]
    pd.testing.assert_series_equal(*losses, rtol=2e-3)


@pytest.mark.thorough
def test_a_run_goes_on_where_it_ended(tmp_path: Path, table: Path, gpu: dict[str, str]):
    options = (*GPU, "--precision", "bf16", "--dropout", 0.1)
    on_gpu(gpu, *steps(table, tmp_path / "whole", *options))
    half = steps(table, tmp_path / "halves", *options, "--save-interval", 6)
    assert on_gpu(gpu, *faulty(half, "memory:0:9"), check=False).returncode == 2
    assert "Going on from step 6" in on_gpu(gpu, *half).stdout
    assert_same_end(tmp_path / "whole", tmp_path / "halves")


@pytest.mark.parametrize(
    "mode",
    [
        ["greedy", "--constrain"],
        ["topk"],
        *(pytest.param([mode], marks=pytest.mark.thorough) for mode in ("greedy", "flat", "full")),
    ],
)
def test_prediction_is_what_it_is_on_a_cpu(tmp_path: Path, trained: Path, gpu: dict[str, str], mode: list[str]):
    args = [
        "-m",
        "histocoder",
        "predict",
        "--model",
        trained,
        "--input",
        trained.parent / "table.csv",
        "--columns",
        "pred_",
        "--mode",
        *mode,
    ]
    args += ["--language-col", "lang", "--precision", "fp32", "--output"]
    run(*args, tmp_path / "cpu.csv")
    on_gpu(gpu, *args, tmp_path / "gpu.csv", *GPU)
    one, other = (pd.read_csv(tmp_path / name, dtype={"hisco_1": str}) for name in ("cpu.csv", "gpu.csv"))
    pd.testing.assert_frame_equal(one, other, atol=2e-6, rtol=0)


COUNTING = """
import json, sys
from pathlib import Path
import torch
from torch.utils._python_dispatch import TorchDispatchMode
sys.path.insert(0, "tests")
from conftest import write_table
from sitecustomize import gpu
import test_speed
from trainers import begin, dataset

class Casts(TorchDispatchMode):
    of_weights = 0
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        is_cast = func.overloadpacket is torch.ops.aten._to_copy
        self.of_weights += is_cast and args[0].untyped_storage().data_ptr() in weights
        return func(*args, **(kwargs or {}))

folder = Path(sys.argv[1])
data = dataset(folder, write_table(folder / "table.csv"), ("hisco_1",))
test_speed.CPU = torch.device("cuda", 0)
found = {}
for precision in ("fp32", "bf16", "fp16"):
    trainer = begin(folder, data, precision=precision, num_classes=8)
    weights = {p.untyped_storage().data_ptr() for p in trainer.model.parameters()}
    batch = next(iter(trainer.train_loader))
    trainer.train_step([batch])
    before = gpu.gpu_waits()
    with Casts() as casts:
        loss, _ = trainer.train_step([batch])
    waits = gpu.gpu_waits() - before
    loss.item()
    found[precision] = [waits, gpu.gpu_waits() - before - waits, casts.of_weights]
print(json.dumps(found))
"""


def test_a_step_neither_waits_for_the_gpu_nor_casts_weights(tmp_path: Path, gpu: dict[str, str]):
    found = json.loads(on_gpu(gpu, "-c", COUNTING, tmp_path).stdout.splitlines()[-1])
    assert found["fp32"] == found["bf16"] == [0, 1, 0]
    waits, reads, casts = found["fp16"]  # the loss scale is found without a wait; weights are cast at each use
    assert (waits, reads) == (0, 1) and casts > 0


def test_training_that_does_not_fit_says_what_to_try(tmp_path: Path, table: Path, gpu: dict[str, str]):
    result = on_gpu(gpu, *steps(table, tmp_path / "out", *GPU), check=False, SIMULATED_GPU_BYTES="9000000")
    assert result.returncode == 2 and "Traceback" not in result.stderr
    assert "Out of memory (cuda" in result.stderr and "1. --batch-size 8" in result.stderr


def test_a_batch_size_that_fits_is_found(tmp_path: Path, table: Path, gpu: dict[str, str]):
    args = [*steps(table, tmp_path / "out", *GPU), "--auto-batch-size"]
    args[args.index("--no-report")] = "--overwrite"  # so that there is one
    result = on_gpu(gpu, *args, SIMULATED_GPU_BYTES="24000000")
    (size,) = re.findall(r"Batches of (\d+) rows fit", result.stdout)
    assert 2 <= int(size) < 32 and "The report is" in result.stdout  # of 58 rows 32 would be the most


def test_prediction_that_does_not_fit_goes_on_with_less_at_once(tmp_path: Path, trained: Path, gpu: dict[str, str]):
    args = [
        "-m",
        "histocoder",
        "predict",
        "--model",
        trained,
        "--input",
        trained.parent / "table.csv",
        "--columns",
        "pred_",
        *GPU,
    ]
    args += ["--mode", "topk", "--precision", "fp32", "--overwrite", "--output", tmp_path / "codes.csv"]
    on_gpu(gpu, *args)
    easily = pd.read_csv(tmp_path / "codes.csv")
    result = on_gpu(gpu, *args, SIMULATED_GPU_BYTES="7000000")
    assert "Memory ran out with 64 descriptions at once; going on with 32." in result.stderr
    pd.testing.assert_frame_equal(pd.read_csv(tmp_path / "codes.csv"), easily, atol=2e-6, rtol=0)
    result = on_gpu(gpu, *args, check=False, SIMULATED_GPU_BYTES="1000000")  # less than the model takes
    assert result.returncode == 2 and "error: The GPU's memory is full. End" in result.stderr
    assert "--device cpu" in result.stderr and "Traceback" not in result.stderr


WITHOUT_DOUBLES = """
import runpy, sys
from torch import Tensor, float64
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from histocoder.cli.main import main

class Mac(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for found in tree_leaves(result):
            if isinstance(found, Tensor) and found.dtype == float64 and found.device.type != "cpu":
                raise TypeError(f"Cannot convert a MPS Tensor to float64 dtype ({func})")
        return result

sys.argv = sys.argv[1:]
model = sys.argv[sys.argv.index("--save-path") + 1]
with Mac():
    runpy.run_path(sys.argv[0], run_name="__main__")
    for mode in ("greedy", "flat", "topk", "full"):
        main(["predict", "--model", model, "--device", "cuda", "--mode", mode, "--threshold", "0.1", "a farmer"])
"""


def test_no_double_is_asked_of_a_gpu(tmp_path: Path, table: Path, gpu: dict[str, str]):
    args = steps(table, tmp_path / "out", *GPU, "--dropout", 0.1)  # as on Macs, whose GPUs have none
    args[args.index("--no-report")] = "--overwrite"  # so that there is one
    result = on_gpu(gpu, "-c", WITHOUT_DOUBLES, *args)
    assert "The report is" in result.stdout and result.stdout.count("farmer") == 4
