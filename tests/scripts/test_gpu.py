"""What only a GPU can show: `make gpu`."""

from __future__ import annotations

import re
from pathlib import Path

import pandas as pd
import pytest
import torch
from conftest import run, write_table
from jobs import assert_same_end, faulty, finetune
from models import save_tiny_model
from torch.utils._python_dispatch import TorchDispatchMode
from trainers import begin, dataset

DEVICE = "cuda"

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, and a torch that is built for it"),
]


def trained(table: Path, out: Path, *flags: object, device: str = DEVICE) -> pd.DataFrame:
    """A run's log."""
    steps = ("--batch-size", 16, "--max-steps", 20, "--eval-interval", 10, "--device", device)
    run(*finetune(table, out, *steps, *flags))
    return pd.read_csv(out / "logs.csv")


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory: pytest.TempPathFactory) -> pd.Series:
    """Validation losses of a run in fp32."""
    folder = tmp_path_factory.mktemp("cpu")
    return trained(write_table(folder / "table.csv"), folder / "out", device="cpu")["val_loss"].dropna()


@pytest.mark.parametrize(
    ("flags", "tolerance"),
    [
        (("--precision", "fp32"), 1e-4),
        (("--precision", "bf16"), 1e-2),
        (("--precision", "fp16"), 1e-2),
        (("--precision", "bf16", "--compile"), 1e-2),
        (("--precision", "fp32", "--gradient-checkpointing"), 1e-4),
        (("--precision", "fp32", "--fsdp", "full_shard"), 1e-4),
        (("--precision", "fp32", "--fsdp", "full_shard", "--fsdp-cpu-offload"), 1e-4),
    ],
)
def test_training_is_what_it_is_on_a_cpu(
    tmp_path: Path, table: Path, on_cpu: pd.Series, flags: tuple[str, ...], tolerance: float
):
    found = trained(table, tmp_path / "out", *flags)
    pd.testing.assert_series_equal(found["val_loss"].dropna(), on_cpu, rtol=tolerance)
    assert not found["skipped_steps"].sum() or "fp16" in flags  # until its loss scale is found


def test_one_process_of_nccl(tmp_path: Path, table: Path):
    steps = ("--batch-size", 16, "--max-steps", 1, "--device", DEVICE)
    out = run(*finetune(table, tmp_path / "out", *steps, "--fsdp", "full_shard")).stdout
    assert ("nccl" if DEVICE == "cuda" else "gloo") in out


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_resumed_run_is_the_same_to_the_bit(tmp_path: Path, table: Path, precision: str):
    flags = ("--deterministic", "--dropout", 0.1, "--precision", precision, "--device", DEVICE, "--save-interval", 6)
    steps = (*flags, "--batch-size", 16, "--max-steps", 12, "--eval-interval", 6)
    run(*finetune(table, tmp_path / "whole", *steps))
    halves = finetune(table, tmp_path / "halves", *steps)
    assert run(*faulty(halves, "memory:0:9"), check=False).returncode == 2
    assert "Resuming from step 6" in run(*halves).stdout
    assert_same_end(tmp_path / "whole", tmp_path / "halves")


class Casts(TorchDispatchMode):
    """Counts how often weights are cast."""

    def __init__(self, weights: list[torch.Tensor]) -> None:
        super().__init__()
        self.places, self.count = {weight.untyped_storage().data_ptr() for weight in weights}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        is_cast = func.overloadpacket is torch.ops.aten._to_copy
        self.count += is_cast and args[0].untyped_storage().data_ptr() in self.places
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_step_neither_waits_for_the_gpu_nor_casts_weights(tmp_path: Path, table: Path, precision: str):
    data = dataset(tmp_path, table, ("hisco_1",))
    trainer = begin(tmp_path, data, precision=precision, num_classes=8, device=torch.device(DEVICE, 0))
    batch = next(iter(trainer.train_loader))
    trainer.learner.train_step([batch])
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")  # whatever waits for the GPU is refused
        with Casts(list(trainer.model.parameters())) as casts:
            loss, _ = trainer.learner.train_step([batch])
        with pytest.raises(RuntimeError, match="synchroniz"):
            loss.item()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert (casts.count > 0) == (precision == "fp16")  # whose weights are cast at each use


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
model, device = (sys.argv[sys.argv.index(flag) + 1] for flag in ("--save-path", "--device"))
with Mac():
    runpy.run_path(sys.argv[0], run_name="__main__")
    for mode in ("greedy", "flat", "topk", "full"):
        main(["predict", "--model", model, "--device", device, "--mode", mode, "--threshold", "0.1", "a farmer"])
"""


def test_no_double_is_asked_of_a_gpu(tmp_path: Path, table: Path):
    steps = ("--batch-size", 16, "--max-steps", 12, "--dropout", 0.1, "--device", DEVICE)
    args = finetune(table, tmp_path / "out", *steps)  # as on Macs, whose GPUs have none
    args[args.index("--no-report")] = "--overwrite"  # so that there is one
    result = run("-c", WITHOUT_DOUBLES, *args)
    assert "Wrote the report to" in result.stdout and result.stdout.count("farmer") == 4


LITTLE_ROOM = """
import runpy, sys, torch
torch.cuda.set_per_process_memory_fraction(3e7 / torch.cuda.mem_get_info()[1])
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_training_that_does_not_fit_says_what_to_try(tmp_path: Path, table: Path):
    args = finetune(
        table, tmp_path / "out", "--encoder", "small", "--batch-size", 16, "--max-steps", 2, "--device", DEVICE
    )
    result = run("-c", LITTLE_ROOM, *args, check=False)
    assert result.returncode == 2 and "Traceback" not in result.stderr
    assert f"Out of memory ({DEVICE}" in result.stderr and "--gradient-checkpointing" in result.stderr


def test_a_batch_size_that_fits_is_found(tmp_path: Path, table: Path):
    args = finetune(table, tmp_path / "out", "--max-steps", 2, "--device", DEVICE, "--auto-batch-size")
    (size,) = re.findall(r"Batches of (\d+) rows fit", run(*args).stdout)
    assert 2 <= int(size) <= 58  # rows to train on


def test_checkpointing_lowers_the_peak_of_memory(tmp_path: Path, table: Path):
    sizes = ("--encoder", "small", "--batch-size", 48)
    peaks = [
        trained(table, tmp_path / f"{len(flags)}", *sizes, *flags)["gpu_memory_gb"].max()
        for flags in ((), ("--gradient-checkpointing",))
    ]
    assert 0 < peaks[1] < peaks[0]


@pytest.mark.parametrize("mode", ["greedy", "flat", "topk", "full"])
def test_prediction_is_what_it_is_on_a_cpu(tmp_path: Path, table: Path, mode: str):
    model = save_tiny_model(tmp_path / "model")
    args = ("-m", "histocoder", "predict", "--model", model, "--input", table, "--mode", mode, "--precision", "fp32")
    for device in ("cpu", DEVICE):
        run(*args, "--device", device, "--output", tmp_path / f"on {device}.csv", "--overwrite")
    one, other = (pd.read_csv(tmp_path / f"on {device}.csv", dtype={"hisco_1": str}) for device in ("cpu", DEVICE))
    pd.testing.assert_frame_equal(one, other, atol=1e-4, rtol=0)
