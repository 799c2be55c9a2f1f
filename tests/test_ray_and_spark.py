"""Ray and Spark on this machine: rows as one process codes them, lost workers, broken files."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import NOTES, ROOT, TITLES, environment, free_port, refused, run, write_table
from jobs import assert_same_weights, children_of, finetune, training

pytestmark = [pytest.mark.slow, pytest.mark.engines]
with_ray = pytest.mark.skipif(
    find_spec("ray") is None, reason="needs Ray; make test-engines installs it"
)
has_spark = find_spec("pyspark") is not None and shutil.which("java") is not None
with_spark = pytest.mark.skipif(
    not has_spark, reason="needs PySpark and Java; see make test-engines"
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
each_engine = pytest.mark.parametrize(
    "engine", [pytest.param("ray", marks=with_ray), pytest.param("spark", marks=with_spark)]
)
TRAIN = """
import os, sys
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

def fit(flags):
    from histocoder import FinetuneConfig, train
    from histocoder.cli.arguments import parse

    train(parse(FinetuneConfig, flags))

how = {"scaling_config": ScalingConfig(num_workers=2), "run_config": RunConfig(storage_path=sys.argv[1])}
TorchTrainer(fit, train_loop_config=sys.argv[2:], **how).fit()
"""
TORCH_DISTRIBUTOR = """
import sys
from pyspark.ml.torch.distributor import TorchDistributor
from pyspark.sql import SparkSession

spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
TorchDistributor(num_processes=2, local_mode=True, use_gpu=False).run(*sys.argv[1:])
"""


def family(pid: int) -> list[int]:
    """A process and all that it has started, and these."""
    return [pid, *(other for child in children_of(pid) for other in family(child))]


def watch(*args: object, victim: Callable[[int], bool] = lambda _: False) -> tuple[int, str, bool]:
    """Run a Python with these arguments to its end, and kill the first process of its own for which
    `victim` holds.

    Returns its status, its output and errors, and whether a process was found to kill.
    """
    env = environment(
        PYTHONPATH=str(ROOT), PYSPARK_PYTHON=sys.executable, RAY_USAGE_STATS_ENABLED="0"
    )
    deadline, was_killed = time.monotonic() + 900, False
    with tempfile.TemporaryFile("w+") as output:
        how = {"stdout": output, "stderr": subprocess.STDOUT, "cwd": ROOT, "env": env}
        program = subprocess.Popen([sys.executable, *map(str, args)], **how)
        try:
            while program.poll() is None and time.monotonic() < deadline:
                for pid in filter(victim, [] if was_killed else family(program.pid)):
                    os.kill(pid, signal.SIGKILL)
                    was_killed = True
                    break
                time.sleep(0.2)
        finally:
            for pid in family(program.pid) if program.poll() is None else ():
                os.kill(pid, signal.SIGKILL)
        output.seek(0)
        return program.wait(), output.read(), was_killed


def shows(pid: int, name: str, *words: str) -> bool:
    """Return whether a file of a process in /proc, such as its command, contains all these
    words.
    """
    try:
        text = Path(f"/proc/{pid}/{name}").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return False
    return all(word in text for word in words)


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
    texts = [
        f"{titles[i % 8]}{NOTES[i // 8 % 8]} and {titles[i // 64 % 8]} no {i // 512}"
        for i in range(distinct)
    ]
    texts[0] = ""
    weights = 1 / np.arange(1, distinct + 1) ** 0.8
    places = np.concatenate(
        [np.arange(distinct), rng.choice(distinct, rows - distinct, p=weights / weights.sum())]
    )
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


def predict(source: Path, model: Path, output: Path, *flags: object) -> list[object]:
    """The words after `python` of the command that codes a table exactly."""
    names = ("--model", model, "--input", source, "--output", output, "--language-col", "lang")
    return ["-m", "histocoder", "predict", *names, "--precision", "fp32", "--device", "cpu", *flags]


@pytest.fixture(scope="module")
def coded_village(village: Path, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("coded")
    pq.write_table(pq.read_table(village), folder / "census.parquet")  # the command reads files
    run(*predict(folder / "census.parquet", model, folder / "one.csv"))
    return folder / "one.csv"


def read(path: Path) -> pd.DataFrame:
    """A coded table in the order of the archive."""
    if path.suffix == ".csv":
        table = pd.read_csv(
            path, dtype={"hisco_1": str, "hisco_2": str}, keep_default_na=False, na_values=[""]
        )
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
def test_ray_loses_nothing_with_a_worker(
    village: Path, model: Path, coded_village: Path, tmp_path: Path
):
    victim = ("cmdline", "ray::MapWorker(", "MapBatches(BlockCoder)).submit")
    command = ("-c", RAY, village, model, tmp_path / "out", 1.0)
    status, output, was_killed = watch(*command, victim=lambda pid: shows(pid, *victim))
    assert was_killed and status == 0, output
    assert_codes_agree(tmp_path / "out", coded_village)


@with_spark
def test_spark_loses_nothing_with_a_worker(
    village: Path, model: Path, coded_village: Path, tmp_path: Path
):
    def works(pid: int) -> bool:
        return shows(pid, "cmdline", "pyspark.daemon") and shows(pid, "maps", "libtorch_cpu")

    status, output, was_killed = watch(
        "-c", SPARK, village, model, tmp_path / "out", "true", victim=works
    )
    assert was_killed and status == 0, output
    assert_codes_agree(tmp_path / "out", coded_village)


@with_spark
def test_spark_names_a_broken_file(village: Path, model: Path, tmp_path: Path):
    part = shutil.copytree(village, tmp_path / "broken") / "part-2.parquet"
    part.write_bytes(part.read_bytes()[:5000])
    status, output, _ = watch("-c", SPARK, part.parent, model, tmp_path / "out", "true")
    assert status == 1 and "part-2.parquet" in output
    assert not (tmp_path / "out" / "_SUCCESS").exists()


@each_engine
def test_the_command_codes_a_file_on_an_engine(
    engine: str, village: Path, model: Path, tmp_path: Path
):
    table = tmp_path / "in.csv"
    rows = pq.read_table(village).to_pandas().head(25_000)
    rows.assign(note="a;b").to_csv(table, sep=";", index=False)
    run(*predict(table, model, tmp_path / "one.parquet", "--columns", "new_"))
    command = predict(table, model, tmp_path / "out", "--columns", "new_", "--engine", engine)
    status, output, _ = watch(*command)
    assert status == 0 and "Coded 25,000 rows of" in output, output
    assert pq.read_table(tmp_path / "out").schema.names[:4] == ["id", "occ1", "lang", "note"]
    assert_codes_agree(tmp_path / "out", tmp_path / "one.parquet")
    assert not list(tmp_path.glob(".out*"))


@each_engine
def test_the_command_codes_a_partitioned_folder(
    engine: str, village: Path, model: Path, coded_village: Path, tmp_path: Path
):
    table = pq.read_table(village, filters=[("lang", "in", ["en", "da"])])
    pq.write_to_dataset(table, tmp_path / "census", partition_cols=["lang"])
    (tmp_path / "census" / "notes.txt").write_text("no table")
    (tmp_path / "out").mkdir()
    pq.write_table(table, tmp_path / "out" / "old.parquet")
    command = predict(tmp_path / "census", model, tmp_path / "out", "--overwrite")
    status, output, _ = watch(*command, "--engine", engine)
    assert status == 0, output
    assert not (tmp_path / "out" / "old.parquet").exists()
    assert_codes_agree(tmp_path / "out", coded_village, share=2 / 3)


@each_engine
def test_a_mistake_that_a_worker_finds_is_a_sentence(engine: str, model: Path, tmp_path: Path):
    table = pa.table(
        {"occ1": pa.array([b"farmer", b"sm\xefth"], pa.binary()), "lang": ["en", "en"]}
    )
    pq.write_table(table, tmp_path / "in.parquet")
    command = predict(tmp_path / "in.parquet", model, tmp_path / "out", "--engine", engine)
    status, output, _ = watch(*command)
    said = [line for line in output.splitlines() if line.startswith("error: ")]
    assert status == 2 and len(said) == 1, output
    assert said[0].startswith("error: The column 'occ1' holds bytes that are not UTF-8 text."), (
        output
    )
    assert [path.name for path in tmp_path.iterdir()] == ["in.parquet"]


@with_ray
def test_a_cluster_that_does_not_answer_is_told(village: Path, model: Path, tmp_path: Path):
    command = predict(village, model, tmp_path / "out", "--engine", "ray")
    told = refused(*command, env=environment(RAY_ADDRESS=f"127.0.0.1:{free_port()}"))
    assert "Ray can't be started or reached" in told
    assert list(tmp_path.iterdir()) == []


@with_ray
def test_ray_train_trains_as_torchrun_does(together: Path, tmp_path: Path):
    status, output, _ = watch("-c", TRAIN, tmp_path / "ray", *training(tmp_path / "out")[1:])
    assert status == 0, output
    assert_same_weights(tmp_path / "out", together)


@with_spark
def test_torch_distributor_trains_as_torchrun_does(together: Path, tmp_path: Path):
    status, output, _ = watch("-c", TORCH_DISTRIBUTOR, *training(tmp_path / "out"))
    assert status == 0, output
    assert_same_weights(tmp_path / "out", together)
