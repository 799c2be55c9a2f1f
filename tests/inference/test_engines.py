"""What workers of Ray and Spark do, without these; tests/test_ray_and_spark.py starts them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import ModuleType

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from archives import code, config, write_archive
from conftest import free_port
from models import save_tiny_model

from histocoder.checkpoints.model_files import load_model
from histocoder.cli.main import main
from histocoder.config import PredictConfig
from histocoder.data.table import TableFile
from histocoder.errors import UserError
from histocoder.inference import engines
from histocoder.inference.coder import Coder
from histocoder.inference.engines import Actor, Distinct, Job, by_key, in_a_row
from histocoder.inference.pairs import LANG, TEXT
from histocoder.inference.predict_file import predict_file_by


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def job_of(model: Path, *header: str, **options) -> Job:
    return Job.of(
        model, header, device="cpu", precision="fp32", **{"input_col": "occ1", "language_col": None, **options}
    )


def test_blocks_give_the_chunks_of_one_process(model: Path):
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"occ1": rng.zipf(1.3, 3000).astype(str), "lang": rng.choice(["en", "da", None], 3000)})
    table, job = pa.Table.from_pandas(frame), job_of(model, "occ1", "lang", language_col="lang")
    distinct = Distinct(chunk_rows=100)
    bounds = np.sort(rng.integers(0, 3000, 40))
    found = [
        job.distinct(table.slice(start, end - start)) for start, end in zip([0, *bounds], [*bounds, 3000], strict=True)
    ]
    for i in range(0, len(found), 3):  # several at once, as Ray may merge them
        distinct.add(pa.concat_tables(found[i : i + 3]))
    pairs = frame.fillna({"lang": "unk"}).drop_duplicates()
    chunks = [list(zip(rows["occ1"], rows["lang"], strict=True)) for _, rows in pairs.groupby(pairs.index // 100)]
    assert [list(zip(c[TEXT].to_pylist(), c[LANG].to_pylist(), strict=True)) for c in distinct.chunks()] == chunks


def test_descriptions_of_few_blocks_are_held(model: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(engines, "_PAIRS_AT_ONCE", 10)
    job, distinct = job_of(model, "occ1"), Distinct(chunk_rows=100)
    for start in range(0, 1000, 50):
        distinct.add(job.distinct(pa.table({"occ1": [str((start + i) % 70) for i in range(50)]})))
        assert sum(map(len, distinct._found)) <= 2 * 70 + 10
    assert sum(map(len, distinct.chunks())) == 70


def test_codes_are_those_of_coder(model: Path):
    table = pa.table({"occ1": ["farmer", None, "baker", "farmer"], "lang": ["x"] * 4})
    job = job_of(model, *table.column_names, language="Danish", mode="greedy", columns="new_")
    (chunk,) = chunks_of(job, table)
    added = job.add(table, by_key(job.code(chunk)))
    assert added.column_names == ["occ1", "lang", "pred_lang", *job.new] and added["pred_lang"][0].as_py() == "da"
    rows = added.to_pylist()
    assert rows[0] == rows[3] and rows[0]["new_conf"] > 0 and rows[1]["new_conf"] is None


def test_an_engine_writes_what_one_process_does(model: Path, tmp_path: Path):
    write_archive(tmp_path / "in.csv", 300).to_parquet(tmp_path / "in.parquet")
    code(model, tmp_path / "in.parquet", tmp_path / "one.csv", chunk_rows=10_000)
    settings = config(tmp_path / "in.parquet", tmp_path / "out.csv")

    def engine(table: TableFile) -> Iterator[pa.Table]:
        job = job_of(model, *table.header, **{**asdict(settings), "output": ""})
        whole = pa.concat_tables(table.chunks(chunk_rows=70))
        coded = [Actor(job)(in_a_row(chunk)) for chunk in chunks_of(job, whole)]
        yield from (job.add(block, by_key(pa.concat_tables(coded))) for block in table.chunks(chunk_rows=90))

    coder = Coder(load_model(model), "cpu")
    predict_file_by(engine, coder, settings, say=lambda _: None)
    assert (tmp_path / "out.csv").read_bytes() == (tmp_path / "one.csv").read_bytes()


def chunks_of(job: Job, table: pa.Table) -> list[pa.Table]:
    distinct = Distinct(job.chunk_rows)
    distinct.add(job.distinct(table))
    return list(distinct.chunks())


def test_columns_that_do_not_fit_are_named(model: Path):
    with pytest.raises(UserError, match="The table has no column 'occ1'; it has: text"):
        job_of(model, "text")
    with pytest.raises(UserError, match="The table already has a column 'hisco_1'"):
        job_of(model, "occ1", "hisco_1")


def test_workers_that_differ_are_named(model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    job = job_of(model, "occ1")
    assert job.probe()() == ""
    monkeypatch.setattr(engines, "__version__", "9.9")
    fault = job.probe()
    with pytest.raises(UserError, match=r"Ray: .* has histocoder \d.*, not 9\.9 as here\."):
        engines.refuse_workers("Ray", ["", fault()])
    monkeypatch.setitem(sys.modules, "histocoder", None)
    assert "has no histocoder. Install histocoder 9.9" in fault()
    monkeypatch.undo()
    assert "does not see" in Job(str(tmp_path / "gone"), PredictConfig(), "cpu", "fp32", {}, 1).probe()()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--address", "here:1"], "--address is for --engine ray"),
        (["--engine", "ray", "--known", "auto"], "--known is for one process"),
        (["--engine", "ray"], "Ray is not installed"),
        (["--engine", "ray", "--address", "127.0.0.1:{port}"], "no Ray can be reached there"),
        (["--engine", "ray", "--input", "{csv}"], "--engine ray reads Parquet"),
    ],
)
def test_an_engine_that_cannot_be_had(
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flags: list[str],
    said: str,
):
    monkeypatch.setitem(sys.modules, "ray", ModuleType("ray") if "--address" in flags else None)
    monkeypatch.setitem(sys.modules, "ray.data", ModuleType("ray.data"))
    frame = write_archive(tmp_path / "in.csv", 20)
    frame.to_parquet(tmp_path / "in.parquet")
    given = [flag.format(port=free_port(), csv=tmp_path / "in.csv") for flag in flags]
    files = ["--input", str(tmp_path / "in.parquet"), "--output", str(tmp_path / "out.csv")]
    with pytest.raises(SystemExit, match="2"):
        main(["predict", "--model", str(model), *files, *given])
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1 and not (tmp_path / "out.csv").exists()
