"""Ray and Spark on this machine: rows as one process codes them, lost workers, broken files."""

import shutil
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import NOTES, TITLES, run, write_table
from jobs import assert_same_weights, finetune, training
from watched import has_torch, runs, watch

pytestmark = [pytest.mark.slow, pytest.mark.engines]
with_ray = pytest.mark.skipif(find_spec("ray") is None, reason="needs Ray; make test-engines installs it")
with_spark = pytest.mark.skipif(
    find_spec("pyspark") is None or shutil.which("java") is None, reason="needs PySpark and Java; see make test-engines"
)

RAY = """
import sys
import pyarrow as pa
import pyarrow.parquet as pq
import ray
from histocoder.ray import code

source, model, output, share = sys.argv[1:]
ray.init(num_cpus=2, logging_level="warning")
table = pq.read_table(source).combine_chunks()
table = table.append_column("note", pa.repeat("x" * 300, len(table)))  # one block of some 300 MB
census = ray.data.from_arrow(table).random_sample(float(share))
code(census, model, language_col="lang", precision="fp32").drop_columns(["note"]).write_parquet(output)
"""
SPARK = """
import os, sys
from pyspark.sql import SparkSession
from histocoder.spark import code

source, model, output, condition = sys.argv[1:]
os.environ["PYSPARK_PYTHON"] = sys.executable  # not the first python3 of PATH
settings = {"spark.ui.enabled": "false", "spark.driver.memory": "2g"}
spark = SparkSession.builder.master("local[2,4]").config(map=settings).getOrCreate()  # 4: a task's attempts
census = spark.read.parquet(source).filter(condition)
code(census, model, language_col="lang", precision="fp32").write.parquet(output)
"""
TRAIN = """
import os, sys
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

def fit(flags):
    from histocoder import FinetuneConfig, train
    from histocoder.cli.arguments import parse

    train(parse(FinetuneConfig, flags))

trainer = TorchTrainer(
    fit, train_loop_config=sys.argv[2:], scaling_config=ScalingConfig(num_workers=2),
    run_config=RunConfig(storage_path=sys.argv[1])
)
trainer.fit()
"""
TORCH_DISTRIBUTOR = """
import sys
from pyspark.ml.torch.distributor import TorchDistributor
from pyspark.sql import SparkSession

spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
TorchDistributor(num_processes=2, local_mode=True, use_gpu=False).run(*sys.argv[1:])
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that was trained for some seconds."""
    folder = tmp_path_factory.mktemp("model")
    run(*finetune(write_table(folder / "table.csv"), folder / "out", "--max-steps", 60))
    return folder / "out"


def write_archive(folder: Path, rows: int, distinct: int, *, files: int = 8) -> Path:
    """A folder of Parquet files; a few descriptions are frequent and most of them rare."""
    rng = np.random.default_rng(0)
    titles = list(TITLES)
    texts = [f"{titles[i % 8]}{NOTES[i // 8 % 8]} and {titles[i // 64 % 8]} no {i // 512}" for i in range(distinct)]
    texts[0] = ""
    weights = 1 / np.arange(1, distinct + 1) ** 0.8
    places = np.concatenate([np.arange(distinct), rng.choice(distinct, rows - distinct, p=weights / weights.sum())])
    places = rng.permutation(places)
    frame = pd.DataFrame({"id": np.arange(rows), "occ1": np.array(texts, dtype=object)[places]})
    frame["lang"] = rng.choice(["en", "da", ""], distinct)[places]
    folder.mkdir()
    for i, part in enumerate(np.array_split(np.arange(rows), files)):
        table = pa.Table.from_pandas(frame.iloc[part], preserve_index=False)
        pq.write_table(table, folder / f"part-{i}.parquet", row_group_size=50_000)
    return folder


@pytest.fixture(scope="module")
def village(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty thousand rows with 20,000 distinct descriptions, which take a while to code."""
    return write_archive(tmp_path_factory.mktemp("village") / "census", 40_000, 20_000, files=4)


@pytest.fixture(scope="module")
def coded_village(village: Path, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("coded")
    pq.write_table(pq.read_table(village), folder / "census.parquet")  # the command reads files
    flags = ("--model", model, "--input", folder / "census.parquet", "--output", folder / "one.csv")
    run("-m", "histocoder", "predict", *flags, "--language-col", "lang", "--precision", "fp32", "--device", "cpu")
    return folder / "one.csv"


def read(path: Path) -> pd.DataFrame:
    """A coded table in the order of the archive."""
    if path.suffix == ".csv":
        table = pd.read_csv(path, dtype={"hisco_1": str, "hisco_2": str}, keep_default_na=False, na_values=[""])
    else:
        table = pq.read_table(path).to_pandas()
    return table.set_index("id").sort_index().replace({"occ1": "", "lang": ""}, None)


def assert_codes_agree(coded: Path, one: Path, *, share: float = 1.0) -> None:
    """Compare a share of the rows with what one process has coded."""
    found, expected = read(coded), read(one)
    assert found.index.is_unique and abs(len(found) / len(expected) - share) <= 0.1 * (share < 1)
    expected = expected.loc[found.index]
    pd.testing.assert_frame_equal(found, expected, check_dtype=False, rtol=0, atol=1e-3)


@with_ray
def test_ray_codes_a_sample(village: Path, model: Path, coded_village: Path, tmp_path: Path):
    run("-c", RAY, village, model, tmp_path / "out", 0.5)
    assert_codes_agree(tmp_path / "out", coded_village, share=0.5)


@with_spark
def test_spark_codes_a_sample(village: Path, model: Path, coded_village: Path, tmp_path: Path):
    run("-c", SPARK, village, model, tmp_path / "out", "rand() < 0.5")
    assert_codes_agree(tmp_path / "out", coded_village, share=0.5)


@with_ray
def test_ray_loses_nothing_with_a_worker(village: Path, model: Path, coded_village: Path, tmp_path: Path):
    command = ["-c", RAY, village, model, tmp_path / "out", 1.0]
    ended = watch(command, victim=lambda pid: runs(pid, "ray::MapWorker(", "MapBatches(BlockCoder)).submit"))
    assert ended.was_killed and ended.status == 0, ended.output
    assert_codes_agree(tmp_path / "out", coded_village)


@with_spark
def test_spark_loses_nothing_with_a_worker(village: Path, model: Path, coded_village: Path, tmp_path: Path):
    command = ["-c", SPARK, village, model, tmp_path / "out", "true"]
    ended = watch(command, victim=lambda pid: runs(pid, "pyspark.daemon") and has_torch(pid))
    assert ended.was_killed and ended.status == 0, ended.output
    assert_codes_agree(tmp_path / "out", coded_village)


@with_spark
def test_spark_names_a_broken_file(village: Path, model: Path, tmp_path: Path):
    folder = Path(shutil.copytree(village, tmp_path / "broken"))
    (folder / "part-2.parquet").write_bytes((folder / "part-2.parquet").read_bytes()[:5000])
    ended = watch(["-c", SPARK, folder, model, tmp_path / "out", "true"])
    assert ended.status == 1 and "part-2.parquet" in ended.output
    assert not (tmp_path / "out" / "_SUCCESS").exists()


@with_ray
def test_ray_train_trains_as_torchrun_does(together: Path, tmp_path: Path):
    ended = watch(["-c", TRAIN, tmp_path / "ray", *training(tmp_path / "out")[1:]])
    assert ended.status == 0, ended.output
    assert_same_weights(tmp_path / "out", together)


@with_spark
def test_torch_distributor_trains_as_torchrun_does(together: Path, tmp_path: Path):
    ended = watch(["-c", TORCH_DISTRIBUTOR, *training(tmp_path / "out")])
    assert ended.status == 0, ended.output
    assert_same_weights(tmp_path / "out", together)
