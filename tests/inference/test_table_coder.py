"""Blocks of a cluster's table, without Ray and Spark; tests/test_ray_and_spark.py starts these."""

from __future__ import annotations

import pickle
import sys
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType

import pandas as pd
import pyarrow as pa
import pytest
from archives import TEXTS, code, config, write_archive
from conftest import free_port
from models import save_tiny_model

from histocoder.checkpoints.model_files import load_model
from histocoder.cli.main import main
from histocoder.errors import UserError
from histocoder.inference.coder import Coder
from histocoder.inference.predict_file import predict_file_by
from histocoder.inference.table_coder import BlockCoder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def block_coder(model: Path, *header: str, **options) -> BlockCoder:
    coder = BlockCoder.of(model, header, device="cpu", precision="fp32", **options)
    return pickle.loads(pickle.dumps(coder))


def test_an_engine_writes_what_one_process_does(model: Path, tmp_path: Path):
    write_archive(tmp_path / "in.csv", 300).to_parquet(tmp_path / "in.parquet")
    code(model, tmp_path / "in.parquet", tmp_path / "one.csv")
    settings = config(tmp_path / "in.parquet", tmp_path / "out.csv")

    def engine(table, _config):
        coder = block_coder(model, *table.header, **{**asdict(settings), "output": ""})
        for block in table.chunks(chunk_rows=70):
            yield from coder(block)

    predict_file_by(engine, Coder(load_model(model), "cpu"), settings, say=lambda _: None)
    one, out = pd.read_csv(tmp_path / "one.csv", dtype={"hisco_1": str}), pd.read_csv(tmp_path / "out.csv", dtype=str)
    pd.testing.assert_frame_equal(out.astype(one.dtypes), one, rtol=0, atol=1e-3)


def test_a_large_block_of_chunks_is_coded(model: Path, monkeypatch: pytest.MonkeyPatch):
    coded: list[str] = []
    code_all = Coder.code_distinct
    monkeypatch.setattr(Coder, "code_distinct", lambda *args, **how: coded.extend(args[1]) or code_all(*args, **how))
    texts = [None, *TEXTS] * 3000
    column = pa.chunked_array([texts[:7], [], texts[7:15_001], texts[15_001:]], pa.large_string())
    langs = pa.chunked_array([pa.array(["en", "da", None] * 4000).dictionary_encode()] * 2)
    block = pa.table({"occ1": column, "lang": langs, "id": range(24_000)})
    coder = block_coder(model, *block.column_names, language_col="lang", mode="greedy", columns="new_")
    found = pa.concat_tables(part for start in range(0, 24_000, 5_000) for part in coder(block.slice(start, 5_000)))
    assert found.select(block.column_names).equals(block) and len(coded) == 3 * 6  # each text in three languages, once
    rows = found.to_pandas().groupby(["occ1", "lang"], dropna=False)
    assert (rows[["new_hisco_1", "new_conf"]].nunique(dropna=False) == 1).all(axis=None)
    is_blank = [not (text or "").strip() for text in texts]
    assert found["new_conf"].is_null().to_pylist() == is_blank
    (empty,) = coder(block.slice(0, 0))
    assert empty.schema == found.schema and len(empty) == 0


def test_what_does_not_fit_is_named(model: Path, tmp_path: Path):
    block = pa.table({"occ1": ["baker"], "lang": ["x"]})
    coder = block_coder(model, "occ1", "lang", language="Danish")
    (added,) = coder(block)
    assert added.column_names[:3] == ["occ1", "lang", "pred_lang"] and added["pred_lang"][0].as_py() == "da"
    with pytest.raises(UserError, match=r"has histocoder \d.*, and another machine 9\.9\."):
        next(replace(coder, version="9.9")(block))
    with pytest.raises(UserError, match="does not see"):
        next(replace(coder, model=str(tmp_path / "gone"))(block))
    with pytest.raises(UserError, match="The table has no column 'occ1'; it has: text"):
        block_coder(model, "text")
    with pytest.raises(UserError, match="The table already has a column 'hisco_1'"):
        block_coder(model, "occ1", "hisco_1")


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
