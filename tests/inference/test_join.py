"""Columns that a table adds by code."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from archives import read, write_archive
from models import CODES, save_tiny_model, tiny_model

from histocoder.checkpoints.model_files import save_model
from histocoder.cli.main import main
from histocoder.errors import UserError
from histocoder.inference.join import Join


@pytest.mark.parametrize("columns", ["", "pred_"])
def test_columns_are_added_by_code(tmp_path: Path, columns: str, capsys: pytest.CaptureFixture[str]):
    model = save_tiny_model(tmp_path / "model")
    write_archive(tmp_path / "in.csv", 60)
    classes = {code: str(i) for i, code in enumerate(CODES) if code != "61110"}
    rows = "".join(f"{int(code)}.0,{value},class {value}\n" for code, value in classes.items())
    (tmp_path / "t.csv").write_text("HISCO,hisclass,title\n" + rows)
    files = ["--input", tmp_path / "in.csv", "--output", tmp_path / "out.csv", "--join", tmp_path / "t.csv"]
    flags = ["--model", model, "--language-col", "lang", "--mode", "topk", "--k", 8, "--columns", columns]
    main(["predict", *map(str, [*files, *flags])])
    out = read(tmp_path / "out.csv")
    num_lacking = 0
    for i in range(1, 9):
        prefix = f"{columns}alt_" if i > 1 else columns
        codes = out[f"{prefix}hisco_{i}"]
        assert out[f"{prefix}hisclass_{i}"].tolist() == [classes.get(code, "") for code in codes]
        assert out[f"{prefix}title_{i}"].tolist() == [f"class {classes[c]}" if c in classes else "" for c in codes]
        num_lacking += (codes == "61110").sum()
    assert num_lacking and f"has no row for 1 code (61110), in {num_lacking} cells" in capsys.readouterr().out


def test_names_stay_from_coding_to_corrections(tmp_path: Path):
    model = tiny_model(num_blocks=1)
    config = replace(model.config, target_cols=("HISCO",))
    save_model(tmp_path / "model", config, model.state_dict(), tokenizer=model.tokenizer)
    (tmp_path / "t.csv").write_text("hisco,class\n61110,1\n")
    (tmp_path / "in.csv").write_text("occ1\nfarmer\n")
    (tmp_path / "known.csv").write_text("occ1,HISCO\nfarmer,61110\n")
    files = ["--input", tmp_path / "in.csv", "--output", tmp_path / "out.csv", "--join", tmp_path / "t.csv"]
    flags = ["--mode", "topk", "--k", 2, "--columns", "p_", "--known", tmp_path / "known.csv"]
    main(["predict", "--model", *map(str, [tmp_path / "model", *files, *flags])])
    own = ["p_HISCO", "p_prob_1", "p_desc_1", "p_alt_HISCO_2", "p_alt_prob_2", "p_alt_desc_2", "p_conf", "p_source"]
    out = read(tmp_path / "out.csv")
    assert list(out) == ["occ1", *own, "p_class_1", "p_alt_class_2"]
    assert out.loc[0, ["p_HISCO", "p_class_1", "p_source"]].tolist() == ["61110", "1", "known"]
    review = ["--predictions", tmp_path / "out.csv", "--output", tmp_path / "review.csv"]
    main(["review", "--model", *map(str, [tmp_path / "model", *review])])
    assert list(read(tmp_path / "review.csv"))[:4] == ["occ1", "checked", "HISCO", "desc_1"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hisco\n61110\n", "no column other than that of the codes, 'hisco'"),
        ("hisco,c\n61110,1\n6-11.10,2\n", r"line 3: the code '61110' has another row with other values"),
        ("", "is empty"),
    ],
)
def test_tables_that_can_not_be_joined(tmp_path: Path, text: str, message: str):
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(UserError, match=message):
        Join(tmp_path / "t.csv", system="hisco", codes=CODES)


def test_a_mode_without_columns_of_codes_is_refused(capsys: pytest.CaptureFixture[str]):
    flags = ["--model", "m", "--input", "in.csv", "--output", "out.csv", "--join", "t.csv", "--mode", "full"]
    with pytest.raises(SystemExit, match="2"):
        main(["predict", *flags])
    assert "--join needs columns of codes, and --mode full has none" in capsys.readouterr().err
