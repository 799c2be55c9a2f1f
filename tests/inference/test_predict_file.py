"""Files coded by the real command: blocks, interruptions, several processes, mistakes."""

import itertools
import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from archives import code, config, read, write_archive
from conftest import cases, mistake, refused, run, slow, spied, write
from jobs import faulty, two_ranks

from histocoder.checkpoints.model_files import load_model
from histocoder.config import PredictConfig
from histocoder.errors import Interrupted, UserError
from histocoder.inference.coder import Coder
from histocoder.inference.descriptions import Descriptions
from histocoder.inference.predict_file import predict_file


@pytest.fixture
def coded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The descriptions that are coded from now on."""
    return spied(monkeypatch, Coder, "code", lambda _, given, *__, **___: given.texts)


@pytest.mark.parametrize("mode", ["greedy", "flat", "topk", "full"])
def test_a_file_is_coded_as_a_table_is(model: Path, tmp_path: Path, mode: str):
    frame = write_archive(tmp_path / "in.csv", 150)
    code(model, tmp_path / "in.csv", tmp_path / "out.csv", mode=mode)
    out = read(tmp_path / "out.csv")
    assert out[[*frame]].equals(frame)  # all columns, in their order and with their blanks
    table = Coder(load_model(model), "cpu").predict(
        frame["occ1"], frame["lang"], mode=mode, progress=False
    )
    first = ("hisco_1", "prob_1", "desc_1", "conf")
    for column in table.columns:
        name = f"alt_{column}" if mode == "topk" and column not in first else column
        if pd.api.types.is_numeric_dtype(table[column]):
            found = pd.to_numeric(out[name]).astype(float)
            pd.testing.assert_series_equal(
                found, table[column], check_names=False, atol=2e-6, rtol=0
            )
        else:
            assert out[name].tolist() == table[column].fillna("").tolist()
    assert not list(tmp_path.glob(".*"))


def test_parquet_is_copied_or_refused(model: Path, tmp_path: Path):
    langs = pa.array([float("nan"), float("nan")], from_pandas=False)
    columns = {
        "occ1": ["farmer", "baker"],
        "lang": langs,
        "id": pa.array([b"ab", b"cd"], pa.binary(2)),
    }
    others = {"notes": [["a"], []], "year": [1880, None], "hash": [b"\xff", b"\xfe"]}
    pq.write_table(pa.table(columns), tmp_path / "in.parquet")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # such as that of a language "nan"
        code(model, tmp_path / "in.parquet", tmp_path / "out.csv")
    assert read(tmp_path / "out.csv")["id"].tolist() == ["ab", "cd"]
    pq.write_table(pa.table(columns | others), tmp_path / "in.parquet")
    code(model, tmp_path / "in.parquet", tmp_path / "out.parquet")
    assert pq.read_table(tmp_path / "out.parquet").select([*others]).to_pydict() == others
    with pytest.raises(
        UserError, match=r"does not fit into \.\w+ .*list.* --output end in \.parquet"
    ):
        code(model, tmp_path / "in.parquet", tmp_path / "no.csv")
    with pytest.raises(UserError, match=r"column 'notes'.* holds .* one value in each cell"):
        code(model, tmp_path / "in.parquet", tmp_path / "no.parquet", input_col="notes")
    pq.write_table(pa.table(columns | {"hash": others["hash"]}), tmp_path / "in.parquet")
    with pytest.raises(UserError, match="column 'hash' holds bytes that are not UTF-8"):
        code(model, tmp_path / "in.parquet", tmp_path / "no.xlsx")
    numbers = {"n": [np.inf, 1.5], "half": pa.array([-np.inf, np.nan], pa.float16())}
    pq.write_table(pa.table(columns | numbers), tmp_path / "in.parquet")
    code(model, tmp_path / "in.parquet", tmp_path / "out.dta")
    found = pd.read_stata(tmp_path / "out.dta")
    assert found["n"].isna().tolist() == [True, False] and found["half"].isna().all()


@pytest.mark.parametrize("suffix", [".dta", ".sav"])
def test_labelled_values_are_kept_as_stored(model: Path, tmp_path: Path, suffix: str):
    path = tmp_path / f"in{suffix}"
    frame = pd.DataFrame({"occ1": ["farmer", "baker"], "lang": ["en", "en"], "sex": [2, 1]})
    labels = {"sex": {1: "male", 2: "female"}}
    if suffix == ".dta":
        frame.to_stata(path, write_index=False, value_labels=labels)
    else:
        pytest.importorskip("pyreadstat").write_sav(frame, path, variable_value_labels=labels)
    lines: list[str] = []
    coder = Coder(load_model(model), "cpu")
    predict_file(coder, config(path, tmp_path / "out.csv"), model_id="m", say=lines.append)
    assert read(tmp_path / "out.csv")["sex"].tolist() == ["2", "1"]
    assert any("value labels are not read, but the numbers" in line for line in lines)


@pytest.mark.parametrize(("name", "suffix"), [("x", ".parquet"), ("x", ".dta"), ("", ".parquet")])
def test_columns_of_one_name_need_csv_or_excel(model: Path, tmp_path: Path, name: str, suffix: str):
    (tmp_path / "in.csv").write_text(f"occ1,lang,{name},{name}\nfarmer,en,1,2\n")
    code(model, tmp_path / "in.csv", tmp_path / "out.csv")
    assert (tmp_path / "out.csv").read_text().startswith(f"occ1,lang,{name},{name},")
    with pytest.raises(
        UserError,
        match=rf"in\.csv has several columns '{name}'; rename them, or let .* end in \.csv",
    ):
        code(model, tmp_path / "in.csv", tmp_path / f"out{suffix}")
    assert not list(tmp_path.glob("no.*"))


def test_names_do_not_clash(model: Path, tmp_path: Path):
    write_archive(tmp_path / "0.csv", 100)
    code(model, tmp_path / "0.csv", tmp_path / "1.csv")
    with pytest.raises(UserError, match=r"already has a column 'hisco_1'.* --columns pred_\."):
        code(model, tmp_path / "1.csv", tmp_path / "2.csv")
    code(model, tmp_path / "1.csv", tmp_path / "2.csv", columns="pred_")
    own = list(read(tmp_path / "1.csv"))
    assert list(read(tmp_path / "2.csv")) == [*own, *(f"pred_{name}" for name in own[4:])]
    with pytest.raises(UserError, match="--excel is for CSV"):
        code(model, tmp_path / "0.csv", tmp_path / "out.parquet", excel=True)


def test_errors_are_told_before_coding(model: Path, tmp_path: Path, coded: list[str]):
    (tmp_path / "in.csv").write_text(
        "occ1;lang;note\n" + "farmer;en;\n" * 30 + 'smith;en;"lost\nbaker;en;\n'
    )
    with pytest.raises(UserError, match="line 32: a quotation mark is opened and not closed"):
        code(model, tmp_path / "in.csv", tmp_path / "out.csv")
    assert not coded


def test_each_distinct_description_is_coded_once(
    model: Path, tmp_path: Path, monkeypatch, coded: list[str]
):
    frame = pd.concat([write_archive(tmp_path / "in.csv", 60)] * 2)
    frame.to_csv(tmp_path / "in.csv", index=False)
    code(model, tmp_path / "in.csv", tmp_path / "whole.csv", block_rows=30)
    num_distinct = len(frame.loc[frame["occ1"] != "", ["occ1", "lang"]].drop_duplicates())
    assert len(coded) == num_distinct
    monkeypatch.setattr(
        "histocoder.inference.table_coder.REMEMBERED", 20
    )  # a full memory changes nothing else
    code(model, tmp_path / "in.csv", tmp_path / "out.csv", block_rows=30)
    frames = [
        pd.read_csv(tmp_path / name, dtype={"id": str, "hisco_1": str})
        for name in ("out.csv", "whole.csv")
    ]
    pd.testing.assert_frame_equal(*frames, atol=2e-6, rtol=0)
    assert num_distinct < len(coded) - num_distinct < len(frame)


def said_of(model: Path, folder: Path, *lines: str, **options: Any) -> list[str]:
    """Code a table in blocks of ten rows, and return what is said."""
    source, said = write(folder / "in.csv", *lines), list[str]()
    settings = PredictConfig(
        input=str(source), output=str(folder / "out.csv"), mode="flat", **options
    )
    predict_file(
        Coder(load_model(model), "cpu"), settings, model_id="m", block_rows=10, say=said.append
    )
    return said


def test_notices_are_of_the_whole_file(model: Path, tmp_path: Path):
    langs = ["xx"] * 20 + ["xx", "yy"] * 5
    rows = [
        f"{'very ' * (40 * (row % 3 == 0))}old smith {row},{lang}" for row, lang in enumerate(langs)
    ]
    xx, cut, yy = said_of(model, tmp_path, "occ1,lang", *rows, language_col="lang")
    assert [text.partition(" and ")[0][-4:] for text in (xx, yy)] == ["'xx'", "'yy'"]
    assert cut.startswith("Descriptions that are longer than 64 characters")
    marks = ["NA,en", "farmer,en", "#NAME?,en", "None,en"] * 20
    error, mark = said_of(model, tmp_path, "occ1,lang", *marks, language_col="lang")
    assert "'#NAME?'" in error and mark.startswith("The description 'NA' is coded as a word.")
    assert read(tmp_path / "out.csv")["hisco_1"].ne("").all()


def test_columns_that_are_probably_wrong_are_told(model: Path, tmp_path: Path):
    lines = ("occ1,lang,h", "farmer 1,da,61110", "baker,da,77610", ",da,", "cook,da,53130")
    (unused,) = said_of(model, tmp_path, *lines)
    assert "the column 'lang' is not chosen" in unused
    assert said_of(model, tmp_path, *lines, language="da") == []


def test_two_ranks_say_what_one_does(model: Path, tmp_path: Path):
    texts = [
        "very " * 40 + f"old smith {i}" if i % 10 == 0 else f"farmer {i % 30}" for i in range(300)
    ]
    source = write(tmp_path / "in.csv", "occ1,lang", *(f"{text},xx" for text in texts))
    flags = (
        "predict",
        "--model",
        model,
        "--input",
        source,
        "--language-col",
        "lang",
        "--mode",
        "flat",
    )
    ended = two_ranks(
        ["-m", "histocoder", *flags, "--output", tmp_path / "out.csv", "--batch-size", 4]
    )
    said = "".join(one.stdout + one.stderr for one in ended)
    assert said.count("does not know the language 'xx'") == said.count("are truncated") == 1
    assert read(tmp_path / "out.csv")["occ1"].tolist() == texts


def interrupt(model: Path, source: Path, output: Path, **changes: Any) -> None:
    """Code a file until Ctrl-C is pressed after two parts of four descriptions."""
    calls = itertools.count(1)

    def progress(*_: float) -> None:
        if next(calls) == 9:
            raise KeyboardInterrupt

    settings, how = (
        config(source, output, batch_size=1, **changes),
        {"model_id": "m", "block_rows": 40},
    )
    with pytest.raises(Interrupted, match="is kept: run the same command again"):
        predict_file(
            Coder(load_model(model), "cpu"), settings, say=lambda _: None, progress=progress, **how
        )


@pytest.mark.parametrize("mode", ["greedy", slow("full")])
def test_interrupted_coding_is_resumed(model: Path, tmp_path: Path, coded: list[str], mode: str):
    source, output, parts = tmp_path / "in.csv", tmp_path / "out.csv", tmp_path / ".out.csv.parts"
    write_archive(source, 100)
    code(model, source, tmp_path / "whole.csv", mode=mode, batch_size=1)
    num_distinct = len(coded)
    for change in ("none", "mode", "input"):  # parts of other settings or input are not used
        interrupt(model, source, output, mode="flat" if change == "mode" else mode)
        assert parts.is_dir() and not output.exists()
        if change == "input":
            source.write_bytes(source.read_bytes())
        coded.clear()
        code(model, source, output, mode=mode, batch_size=1)
        assert len(coded) == num_distinct - 8 * (change == "none")
        assert output.read_bytes() == (tmp_path / "whole.csv").read_bytes() and not list(
            tmp_path.glob(".*")
        )
        output.unlink()


def test_a_second_run_on_an_output_ends(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    write_archive(tmp_path / "in.csv", 100)
    output = tmp_path / "out.csv"
    code(model, tmp_path / "in.csv", tmp_path / "alone.csv", mode="flat")
    flags = (
        "--input",
        tmp_path / "in.csv",
        "--output",
        output,
        "--language-col",
        "lang",
        "--overwrite",
    )

    def meanwhile(_: Coder, given: Descriptions, *__: Any, **___: Any) -> list[str]:
        second = ("-m", "histocoder", "predict", "--model", model, *flags, "--mode", "greedy")
        return [refused(*second)] if given.texts else []

    seconds = spied(monkeypatch, Coder, "code", meanwhile)
    code(model, tmp_path / "in.csv", output, mode="flat")
    assert [said.count(f"{output} is in use by another run") for said in seconds] == [1] * 3
    assert output.read_bytes() == (tmp_path / "alone.csv").read_bytes()
    assert not list(tmp_path.glob(".*"))


def test_a_full_disk_loses_nothing(model: Path, tmp_path: Path):
    write_archive(tmp_path / "in.csv", 3000)
    output, whole = tmp_path / "out.csv", tmp_path / "whole.csv"

    def predict(path: Path) -> list[str]:
        files = (
            "--input",
            tmp_path / "in.csv",
            "--output",
            path,
            "--language-col",
            "lang",
            "--mode",
            "flat",
        )
        return [*map(str, ("-m", "histocoder", "predict", "--model", model, *files))]

    run(*predict(whole))
    room = f"room:{whole.stat().st_size // 2}"  # the parts fit, the output does not
    assert f"error: Could not write {output}: File too large. What is coded" in refused(
        *faulty(predict(output), room)
    )
    assert not output.exists() and any((tmp_path / ".out.csv.parts").glob("*.arrow"))
    assert not list(tmp_path.glob("**/*.tmp"))
    run(*predict(output))
    assert output.read_bytes() == whole.read_bytes()


TABLES = {
    **{
        "ragged": ["occ1,lang", "a,en", "b,en,c"],
        "header": ["occ1,lang"],
        "uncoded": ["occ1,hisco_1", "farmer,"],
    },
    **{"short": ["occ1,hisco_1", "farmer,1110"], "classes": ["hisco,status,hisclass", "61110,,8"]},
}


@cases(
    ("flags", "message"),
    ("--input none.csv", "File not found: none.csv"),
    ("--input-col occ", "no column 'occ'; it has: id, occ1"),
    ("--output in.csv", "--output is the input itself"),
    ("--language en", "not both"),
    ("--output out.csv.zip", "out.csv.zip: .zip files can't be written"),
    (f"--output {os.devnull} --overwrite", "is a folder or a device"),
    ("--input ragged.csv", "line 3: 3 fields"),
    ("--input header.csv", "no rows"),
    ("--known in.csv", "in.csv is the file of --known itself"),
    ("--known classes.csv", "has no column 'occ1'; it has: hisco, status, hisclass"),
    ("--known header.csv", "has no column 'hisco_1'; it has: occ1, lang"),
    ("--known uncoded.csv", "no row has a description and codes that fit"),
    (
        "--known short.csv",
        "fewer than 5 characters. If leading zeros were lost, add --zero-pad-codes",
    ),
    ("--known short.csv --mode full", "--known gives codes, and --mode full ranks them"),
    ("--known-exact", "Flags for --known need that flag"),
    ("--classes classes.csv --mode full", "--mode full writes none; choose another mode."),
    (
        "--levels major tiny",
        "--levels tiny: there is no such level; choose among major, minor, unit.",
    ),
    ("--status-col lang", "--status-col needs --classes; add it, or omit this one."),
    ("--levels major --none 0", "--none needs --classes"),
    ("--classes classes.csv --status-col st", "has no column 'st'"),
    ("--classes classes.csv --value-cols socpo", "has no column 'socpo'"),
    ("--classes in.csv", "has no column 'hisco'"),
)
def test_mistakes_are_one_sentence(
    model: Path, tmp_path: Path, monkeypatch, capsys, flags: str, message: str
):
    monkeypatch.chdir(tmp_path)
    write_archive(Path("in.csv"), 10)
    for name, lines in TABLES.items():
        write(Path(f"{name}.csv"), *lines)
    before = {path: path.read_bytes() for path in Path().iterdir()}
    given = ("--model", model, "--input", "in.csv", "--language-col", "lang", "--output", "out.csv")
    assert message in mistake(capsys, "predict", *given, *flags.split())
    assert {path: path.read_bytes() for path in Path().iterdir()} == before
