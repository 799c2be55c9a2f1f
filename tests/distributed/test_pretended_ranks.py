"""Two ranks, each on a GPU: on pretended ones gloo carries what NCCL would; see
`pretended_ranks.py`.
"""

from pathlib import Path

import pandas as pd
import pytest
import torch
from conftest import run, slow
from jobs import finetune, two_ranks

STEPS = ("--max-steps", 3, "--eval-interval", 3, "--log-interval", 3, "--dropout", 0)


def losses(out: Path) -> list[float]:
    logs = pd.read_csv(out / "logs.csv")
    return [float(logs[name].dropna().iloc[-1]) for name in ("train_loss", "grad_norm", "val_loss")]


def on_two_gpus(*args: object) -> list[object]:
    return ["tests/pretended_ranks.py", "0,1", "--", *args]


def assert_trains_as_one_process_does(
    folder: Path, table: Path, flags: str, *, pretended: bool
) -> None:
    args = finetune(
        table, folder / "one", *STEPS, *flags.split(), "--batch-size", 8, "--device", "cpu"
    )
    run(*(arg if arg != "fp16" else "fp32" for arg in args if arg not in ("--fsdp", "full_shard")))
    args = finetune(
        table, folder / "two", *STEPS, *flags.split(), "--batch-size", 4, "--device", "cuda"
    )
    first, second = two_ranks(on_two_gpus(*args) if pretended else args)
    assert "2 processes, " in first.stdout and ", nccl, " in first.stdout and not second.stdout
    tolerance = 1e-2 if "fp16" in flags else 1e-4
    assert losses(folder / "two") == pytest.approx(losses(folder / "one"), rel=tolerance)


@pytest.mark.parametrize(
    "flags",
    [
        slow("--encoder ngram --ngram-dropout 0"),  # whose table's rows are exchanged beside DDP
        slow("--encoder tiny --gradient-accumulation-steps 2"),
        slow("--encoder ngram --ngram-dropout 0 --gradient-accumulation-steps 2 --precision fp16"),
    ],
)
def test_two_gpus_train_as_one_process_does(tmp_path: Path, table: Path, flags: str):
    assert_trains_as_one_process_does(tmp_path, table, flags, pretended=True)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("flags", ["", "--encoder ngram --ngram-dropout 0", "--fsdp full_shard"])
def test_nccl_carries_what_gloo_does(tmp_path: Path, table: Path, flags: str):
    assert_trains_as_one_process_does(tmp_path, table, flags, pretended=False)


@pytest.mark.slow
def test_rank_0_finishes_while_others_wait(tmp_path: Path, table: Path):
    args = finetune(table, tmp_path / "out", *STEPS, "--encoder", "ngram", "--batch-size", 4)
    args = [arg for arg in args if arg not in ("--no-report", "--no-experts", "--no-refit")]
    first, _ = two_ranks(on_two_gpus(*args))
    assert "Wrote the report to" in first.stdout and "is now trained on all" in first.stdout


MESH = """
import runpy, sys
import torch
from histocoder.errors import UserError
from histocoder.training import fsdp

def init_device_mesh(*where):
    raise UserError(f"the mesh is {where}, this GPU {torch.cuda.current_device()}")

fsdp.init_device_mesh = init_device_mesh
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.slow
def test_shards_are_on_a_mesh_of_gpus(tmp_path: Path, table: Path):
    args = finetune(table, tmp_path / "out", *STEPS, "--encoder", "tiny", "--fsdp", "full_shard")
    first, second = two_ranks(on_two_gpus("-c", MESH, *args), status=2)
    assert "the mesh is ('cuda', (2,)), this GPU 0" in first.stderr + second.stderr
