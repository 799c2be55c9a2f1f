"""Texts that a spreadsheet would run as formulas."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
from archives import code, read, read_table
from hypothesis import given
from hypothesis import strategies as st
from models import save_tiny_model

from histocoder.config import FinetuneConfig
from histocoder.data.formulas import as_meant, without_formulas
from histocoder.data.prepare import prepare
from histocoder.evaluation.review_file import review

RUN = ["=1+1", "+a", "-daughter", "@SUM(A1)", "\t=x", "\r=x", "'=1", "-1+2"]
SHOWN = ["-1", "-2", "-3", "61110", "+4.5e3", "-", "--", "a=b", "'tis", "", None]


@given(st.lists(st.text("=+-@\t\r'1a\n", max_size=5)))
def test_what_is_neutralised_is_read_as_it_was(texts: list[str]):
    written, num_changed = without_formulas(pa.table({"=a": pa.array([*texts, *RUN, *SHOWN], pa.string())}))
    cells = written.columns[0].to_pylist()
    assert cells[len(texts) :] == [*(f"'{text}" for text in RUN), *SHOWN] and written.column_names == ["'=a"]
    assert as_meant(written.columns[0].combine_chunks()).to_pylist() == [*texts, *RUN, *SHOWN]
    assert num_changed == sum(a != b for a, b in zip(cells, [*texts, *RUN, *SHOWN], strict=True))


def test_the_loop_closes_over_formulas(tmp_path: Path, logged: list[str]):
    model = save_tiny_model(tmp_path / "model")
    rows = "".join(f'"{text}",en,61110\n' for text in ("=farmer", "-baker", "'tis", "x"))
    (tmp_path / "in.csv").write_text("occ1,lang,'=n\n" + rows)
    code(model, tmp_path / "in.csv", tmp_path / "out.csv")
    code(model, tmp_path / "in.csv", tmp_path / "raw.csv", raw=True)
    assert read(tmp_path / "out.csv")["occ1"].tolist() == ["'=farmer", "'-baker", "'tis", "x"]
    assert read(tmp_path / "raw.csv")["occ1"].tolist() == ["=farmer", "-baker", "'tis", "x"]
    table = read_table(tmp_path / "out.csv", ["occ1", "=n"])
    assert table.columns["occ1"].to_pylist() == ["=farmer", "-baker", "'tis", "x"]
    review(tmp_path / "out.csv", tmp_path / "review.csv", budget=4)
    assert "2 cells begin like formulas and were written with a leading apostrophe" in logged[0]
    checked = read(tmp_path / "review.csv").assign(checked="x", hisco_1=["61110", "77610", "80110", "61110"])
    checked.to_csv(tmp_path / "review.csv", index=False)
    settings = {"dataset": str(tmp_path / "in.csv"), "target_cols": ("hisco_1",), "language_col": "lang"}
    (tmp_path / "in.csv").write_text(
        "occ1,lang,hisco_1\n=farmer,en,77610\n=,en,\n=a,en,\nb,en,77610\nc,en,61110\nd,en,61110\n"
    )
    config = FinetuneConfig(**settings, corrections=(str(tmp_path / "review.csv"),), initial_checkpoint="m")
    prepare(config, tmp_path / "out")
    assert "1 row has corrected codes, and 3 descriptions are added; all are training data." in logged
    train = tmp_path / "out" / "data_train.csv"
    assert read(train)["occ1"].tolist().count("'=farmer") == 1
    assert read_table(train, ["occ1"]).columns["occ1"].to_pylist().count("=farmer") == 1
    assert read(tmp_path / "out" / "rejected.csv")["occ1"].tolist() == ["=", "'=a"]
