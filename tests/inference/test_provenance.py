"""Provenance of files that the real command codes: the same for the same, and a paragraph of its
numbers.
"""

import json
import os
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from archives import read, write_archive
from conftest import refused, write
from models import save_tiny_model

from histocoder import __version__
from histocoder.cli.main import main
from histocoder.inference.provenance import _sentences, provenance_file
from histocoder.tables.table import fingerprint

PREDICT = "predict --model model --input in.csv --language-col lang --output".split()
CLASSES = (
    "hisco,status,hisclass,HISCAM_NL 61110,,8,50 61110,21,7,60 61115,,8,51.5 "
    "80110,,7,53 77610,,7,58 41025,,4,70"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("run") / "best")


@pytest.fixture
def folder(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a table to code and one of classes."""
    monkeypatch.chdir(tmp_path)
    write_archive(Path("in.csv"), 90)
    write(Path("hsn.csv"), *CLASSES.split(), "95410,,7,")
    Path("model").symlink_to(model)
    return tmp_path


def predict(*flags: object, output: str = "coded.csv") -> dict[str, Any]:
    """Code the table, and return its provenance."""
    main([*PREDICT, output, *map(str, flags)])
    return json.loads(provenance_file(output).read_text(encoding="utf-8"))


def test_names_of_provenance_files():
    for name in ("coded.csv", "coded.csv.gz", "coded.xlsx"):
        assert provenance_file(Path("a") / name) == Path("a") / "coded.histocoder.json"


def test_a_file_coded_twice_has_the_same_provenance(folder: Path, model: Path):
    flags = (
        "--classes",
        "hsn.csv",
        "--levels",
        "minor",
        "--mode",
        "greedy",
        "--min-confidence",
        0.001,
    )
    told = predict(*flags)
    first, coded = provenance_file("coded.csv").read_bytes(), Path("coded.csv").read_bytes()
    os.utime("in.csv", (0, 0))
    predict(*flags, "--overwrite")
    assert (
        provenance_file("coded.csv").read_bytes() == first
        and Path("coded.csv").read_bytes() == coded
    )
    assert str(folder).encode() not in first and str(model.parent).encode() not in first
    command = told["command"].split()
    assert "no model folder model" in refused("-m", *command, "--overwrite")  # in another folder
    Path("coded.csv").unlink()
    main(command[1:])
    assert (
        Path("coded.csv").read_bytes() == coded
        and provenance_file("coded.csv").read_bytes() == first
    )


def test_the_provenance_of_another_output_is_kept(folder: Path):
    told = predict("--mode", "flat")
    main(["classes", "--input", "coded.csv", "--levels", "major", "--output", "coded.parquet"])
    assert json.loads(provenance_file("coded.csv").read_text(encoding="utf-8")) == told
    assert (
        json.loads(Path("coded.parquet.histocoder.json").read_text(encoding="utf-8"))["output"]
        == "coded.parquet"
    )


def test_provenance_counts_the_rows(folder: Path, model: Path):
    write(Path("known.csv"), "occ1,lang,hisco_1", "farmer 0,en,61110", "farmer 0,da,61110")
    metrics = {"mode": "combined", "num_rows": 1132, "answer": {"overall": {"accuracy": 0.89134}}}
    (model.parent / "metrics.json").write_text(json.dumps(metrics))
    told = predict(
        "--mode",
        "combined",
        "--known",
        "known.csv",
        "--min-confidence",
        0.5,
        "--classes",
        "hsn.csv",
    )
    rows = read(Path("coded.csv"))
    conf, is_coded, is_known = (
        pd.to_numeric(rows["conf"]),
        rows["hisco_1"] != "",
        rows["source"] == "known",
    )
    blank = int(conf.isna().sum())
    coded, known, unsure = int(is_coded.sum()), int(is_known.sum()), int((~is_coded).sum()) - blank
    assert told["counts"] == {
        "rows": 90,
        "coded": coded,
        "unsure": unsure,
        "without": 0,
        "blank": blank,
        "known": known,
    }
    assert min(unsure, blank, known) > 0
    assert told["expected_accuracy"]["coded"] == pytest.approx(
        conf[is_coded & ~is_known].mean(), abs=1e-4
    )
    assert told["expected_accuracy"]["answered"] == pytest.approx(conf[~is_known].mean(), abs=1e-4)
    for name, path in (("input", "in.csv"), ("known", "known.csv")):
        assert told[name] == {"file": path, "sha256": fingerprint(path)}
    assert (
        told["model"]["sha256"] == fingerprint(model / "model.safetensors")
        and told["model"]["folder"] == "model"
    )
    assert (
        told["classes"][0]["table"] == "hsn.csv" and told["versions"]["histocoder"] == __version__
    )
    numbers = (
        f"{is_coded.sum()} ({100 * is_coded.mean():.1f} %) are coded",
        "On 1,132 rows",
        "89.1 %",
        "below 0.5",
    )
    numbers += (
        f"in the codes that the model gave is {100 * told['expected_accuracy']['coded']:.1f} %",
    )
    assert all(number in told["methods"] for number in numbers), told["methods"]
    assert "@software{histocoder" in told["bibtex"] and __version__ in told["bibtex"]
    (model.parent / "metrics.json").unlink()


@pytest.mark.parametrize(
    ("is_elsewhere", "words"),
    [(True, "right, as in tables that were left out of"), (False, "right if the file is like")],
)
def test_the_methods_say_what_the_confidence_rests_on(is_elsewhere: bool, words: str):
    counts = {"rows": 2, "coded": 1, "unsure": 0, "without": 1, "blank": 0}
    facts = {"counts": counts, "min_confidence": 0.0, "expected_accuracy": {"coded": 0.8}}
    facts |= {"has_confidence_elsewhere": is_elsewhere, "mode": "combined", "system": "hisco"}
    facts["model"] = {"sha256": "0" * 64}
    sentences = " ".join(_sentences(facts))
    assert words in sentences and "finds no occupation in 1 row" in sentences


def test_the_model_is_not_unsure_of_known_rows(folder: Path):
    write(Path("in.csv"), "occ1,lang", "smed,da", "hustru,da", "bonde,da")
    marked = ("smed,da,x,83110", "smed,da,x,61110", "hustru,da,x,")
    write(Path("known.csv"), "occ1,lang,checked,hisco_1", *marked)
    told = predict("--known", "known.csv", "--min-confidence", 1)
    assert read(Path("coded.csv"))["hisco_1"].tolist() == ["83110", "", ""]
    assert told["counts"] == {
        "rows": 3,
        "coded": 1,
        "unsure": 1,
        "without": 0,
        "blank": 0,
        "known": 2,
    }
    assert "the model gives no code to 1 row, since its confidence is below 1." in told["methods"]


def test_provenance_where_no_codes_are_given(folder: Path):
    told = predict("--mode", "full")
    assert (
        told["counts"] == {"rows": 90, "coded": 77, "unsure": 0, "without": 0, "blank": 13}
        and told["expected_accuracy"] == {}
    )
    Path("in.csv").write_text("occ1,lang\n,en\n,en\n")
    told = predict("--classes", "hsn.csv", "--levels", "unit", "--overwrite")
    assert told["counts"] == {"rows": 2, "coded": 0, "unsure": 0, "without": 0, "blank": 2}
    assert told["methods"].endswith("Of 2 rows, 0 (0.0 %) are coded; 2 rows have no description.")
    assert [one["counts"]["unit_1"] for one in told["classes"][1:]] == [{"no code": 2}]


def test_descriptions_on_the_command_line_get_classes(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    main(
        [
            "predict",
            "--model",
            "model",
            "--mode",
            "flat",
            "--language",
            "en",
            "--classes",
            "hsn.csv",
            "farmer",
            "",
        ]
    )
    header, farmer, blank = (
        line.split() for line in capsys.readouterr().out.rstrip("\n").split("\n")
    )
    assert header[0] == "text" and {"hisclass_1", "hisclass_1_prob", "HISCAM_NL_1_sd"} <= {*header}
    assert len(farmer) == len(header) and blank == [] and "lang" not in header


def test_classes_of_predict_are_those_of_classes(folder: Path):
    read(Path("in.csv")).assign(status=["", "21", "22"] * 30).to_csv("in.csv", index=False)
    for mode, prefix in (("greedy", ""), ("topk", "my_")):
        flags = ("--columns", prefix, "--overwrite") if prefix else ("--overwrite",)
        told = predict("--mode", mode, "--classes", "hsn.csv", "--levels", "major", "unit", *flags)
        predict("--mode", mode, *flags, output="plain.csv")
        columns = told["classes"][0]["columns"]
        assert columns.pop("status") == "status"
        again = (
            "--input",
            "plain.csv",
            "--table",
            "hsn.csv",
            "--levels",
            "major",
            "unit",
            "--code-cols",
        )
        main(["classes", *again, *columns["codes"], *flags, "--output", "again.csv"])
        coded, same = read(Path("coded.csv")), read(Path("again.csv"))
        assert coded[[*same]].equals(same)
        by_classes = json.loads(provenance_file("again.csv").read_text(encoding="utf-8"))["classes"]
        assert [one["counts"] for one in by_classes] == [one["counts"] for one in told["classes"]]
        new = [name for name in coded if name not in same]
        of_first = "_1" if mode == "greedy" else ""
        ends = {
            "hisclass": ["prob"],
            "HISCAM_NL": ["mean", "sd", "share"],
            "major": ["prob"],
            "unit": ["prob"],
        }
        assert new == [f"{prefix}{name}{of_first}_{end}" for name in ends for end in ends[name]]
