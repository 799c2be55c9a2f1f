"""What `histocoder predict --engine` refuses, without an engine; tests/test_ray_and_spark.py has
the engines themselves.
"""

import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import cases, mistake, write

from histocoder.cli import engines
from histocoder.errors import UserError


def predict(model: Path, source: object, output: object, *flags: object) -> tuple[object, ...]:
    names = ("--model", model, "--input", source, "--output", output)
    return ("predict", *names, "--engine", "ray", *flags)


def write_part(path: Path, *texts: str, **columns: str) -> Path:
    """A Parquet file of descriptions; further columns have one value."""
    table = pa.table({"occ1": list(texts)})
    for name, value in columns.items():
        table = table.append_column(name, pa.repeat(value, len(texts)))
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path)
    return path


@pytest.fixture
def census(tmp_path: Path) -> Path:
    """A folder of two Parquet files."""
    write_part(tmp_path / "census" / "part-0.parquet", "farmer", "baker")
    write_part(tmp_path / "census" / "part-1.parquet", "smith")
    return tmp_path / "census"


@cases(
    ("flags", "told"),
    (["--known", "auto"], "--known is not for --engine ray"),
    (["--excel"], "--excel is not for --engine ray"),
    (["--raw"], "--raw is not for --engine ray"),
    (["--device", "mps"], "--device mps is not for --engine"),
    (["--sheet", "1"], "--sheet is for Excel workbooks"),
    (["--file-encoding", "cp850"], "--file-encoding is for text files"),
    (["--input-col", "occ"], "has no column 'occ'; it has: occ1. Did you mean 'occ1'?"),
)
def test_flags_that_mean_nothing_are_refused(
    model: Path, census: Path, capsys, flags: list[str], told: str
):
    assert told in mistake(capsys, *predict(model, census, census.parent / "out", *flags))


def test_an_engine_codes_tables_alone(model: Path, census: Path, capsys):
    assert "codes tables; name one" in mistake(capsys, "predict", "baker", "--engine", "ray")
    assert "name them in place of -" in mistake(capsys, *predict(model, "-", census.parent / "out"))


def test_missing_engines_are_told(model: Path, census: Path, capsys, monkeypatch):
    for engine, module in (("ray", "ray"), ("spark", "pyspark")):
        monkeypatch.setitem(sys.modules, module, None)
        flags = predict(model, census, census.parent / "out", "--engine", engine)
        assert f"pip install 'histocoder[{engine}]'." in mistake(capsys, *flags)
    assert not (census.parent / "out").exists()


def test_files_that_are_no_table_are_refused(model: Path, census: Path, capsys):
    out = census.parent / "out"
    empty = census.parent / "empty"
    empty.mkdir()
    csv = write(census.parent / "in.csv", "occ1", "farmer")
    assert "has no Parquet files" in mistake(capsys, *predict(model, empty, out))
    assert "No file matches" in mistake(capsys, *predict(model, census / "*.pq", out))
    assert "in.csv is not a Parquet file; several" in mistake(
        capsys, *predict(model, census, out)[:-2], csv, "--engine", "ray"
    )
    part = write_part(census / "part-2.parquet", "miller", parish="Ely")
    assert f"{part} does not have the same columns" in mistake(capsys, *predict(model, census, out))
    part.write_bytes(b"PAR1")
    assert f"{part} is not a Parquet file" in mistake(capsys, *predict(model, census, out))


def test_outputs_are_replaced_only_if_asked(model: Path, census: Path, capsys):
    out = census.parent / "out"
    assert f"such as {out}." in mistake(capsys, *predict(model, census, f"{out}.csv"))
    assert "holds the input" in mistake(capsys, *predict(model, census, census, "--overwrite"))
    write_part(out / "old.parquet", "farmer")
    assert "already exists. Add --overwrite" in mistake(capsys, *predict(model, census, out))
    write(out / "notes.txt", "mine")
    flags = predict(model, census, out, "--overwrite")
    assert "contains notes.txt" in mistake(capsys, *flags)
    assert sorted(path.name for path in out.iterdir()) == ["notes.txt", "old.parquet"]


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Let an engine seem installed."""
    monkeypatch.setattr(engines, "_check_engine", lambda _: None)
    return monkeypatch


def test_rows_that_do_not_arrive_are_told(model: Path, census: Path, capsys, pretended):
    def lose_a_row(_parquet: object, folder: Path, *_: object) -> None:
        write_part(folder / "0.parquet", "farmer", "baker")

    pretended.setattr(engines, "_run_ray", lose_a_row)
    told = mistake(capsys, *predict(model, census, census.parent / "out"))
    assert "2 of 3 rows have arrived" in told
    assert [path.name for path in census.parent.iterdir()] == ["census"]


@pytest.mark.parametrize("kind", [RuntimeError, UserError])  # Spark's, Ray's
def test_mistakes_that_workers_find_are_sentences(
    model: Path, census: Path, capsys, pretended, kind: type[Exception]
):
    def fail(*_: object) -> None:
        raise kind("Task failed:\n  File …\nhistocoder.errors.UserError: It is bytes.\n")

    pretended.setattr(engines, "_run_ray", fail)
    out = write_part(census.parent / "out" / "old.parquet", "farmer").parent
    flags = predict(model, census, out, "--overwrite")
    assert mistake(capsys, *flags) == "error: It is bytes."
    assert sorted(path.name for path in census.parent.iterdir()) == ["census", "out"]
    assert [path.name for path in out.iterdir()] == ["old.parquet"]
