"""Ways to train that come to the same: batches that accumulate beside large ones."""

from pathlib import Path

import pytest
from conftest import run, write_table
from jobs import assert_same_weights, finetune, logged, two_ranks

STEPS = ("--target-cols", "hisco_1", "hisco_2", "--language-col", "lang", "--max-steps", 10, "--eval-interval", 5)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_table(tmp_path_factory.mktemp("data") / "table.csv", two_codes=True)


@pytest.fixture(scope="module")
def large(data: Path) -> Path:
    """A run of one process, without accumulation, with batches of 18."""
    run(*finetune(data, data.parent / "large", *STEPS, "--batch-size", 18))
    return data.parent / "large"


@pytest.mark.parametrize(
    ("processes", "accumulated", "size"), [(1, 2, 9), pytest.param(1, 5, 4, marks=pytest.mark.slow), (2, 3, 3)]
)
def test_batches_that_accumulate_are_one_large_batch(
    large: Path, data: Path, tmp_path: Path, processes: int, accumulated: int, size: int
):
    if processes * accumulated * size != 18:
        run(*finetune(data, large := tmp_path / "large", *STEPS, "--batch-size", processes * accumulated * size))
    args = finetune(data, tmp_path / "out", *STEPS, "--batch-size", size, "--gradient-accumulation-steps", accumulated)
    output = run(*args).stdout if processes == 1 else two_ranks(args)[0].stdout
    assert f"{size} × {accumulated} accumulated × {processes} process" in output
    assert f"= {size * accumulated * processes} rows a step" in output
    for column in ("train_loss", "val_loss", "grad_norm"):
        # the log has six digits
        assert logged(tmp_path / "out", column) == pytest.approx(logged(large, column), abs=3e-6, rel=1.5e-5)
    assert_same_weights(tmp_path / "out", large, tolerance=1e-4)
