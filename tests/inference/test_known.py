"""Descriptions that were coded by hand are answered with those codes."""

import shutil
from contextlib import suppress
from pathlib import Path

import pandas as pd
import pytest
from archives import config, read, write_archive
from conftest import mistake, write

from histocoder.checkpoints.model_files import load_model
from histocoder.cli.main import main
from histocoder.data.examples import Examples
from histocoder.errors import Cancelled
from histocoder.inference.coder import Coder
from histocoder.inference.known import Known, KnownCodes
from histocoder.inference.predict_file import predict_file

SEVEN = KnownCodes(("7",), 1)
DICTIONARY = (
    "FARMER  0,en,95410,",
    "Farmer 0,da,61115,",
    "farmer 0,da,61110,",
    "farmer 0,da,01110,61110",
)


def rows(*given: tuple[str, ...]) -> Examples:
    codes = pd.DataFrame(
        [(*row[2:], None)[:2] for row in given], columns=["a_1", "a_2"], dtype=object
    )
    return Examples.of([row[0] for row in given], [row[1] for row in given], codes)


def predict(*args: object) -> None:
    main(["predict", *map(str, args)])


def test_the_most_frequent_set_of_codes_answers():
    smiths = (
        ("Smith", "en", "1", "2"),
        (" smith", "en", "3"),
        ("smith", "en", "2", "1"),
        ("smith", "da", "4"),
    )
    given = rows(
        *smiths,
        ("tie", "en", "5"),
        ("tie", "en", "6"),
        ("dra\u0308ng", "en", "7"),
        ("none", "en", "?"),
    )
    known = Known(languages=("da", "en", "unk"))
    known.add(given.coded())
    smith = KnownCodes(("1", "2"), 2 / 3)
    assert known.find(["SMITH", "tie", "DRÄNG", "none"], ["en"] * 4) == [
        smith,
        KnownCodes(("5",), 0.5),
        SEVEN,
        None,
    ]
    assert known.find(["smith"] * 2, ["da", "xx"]) == [KnownCodes(("4",), 1), None]
    exact = Known(exact=True, any_language=True)
    exact.add(given)
    assert exact.find(["Smith", "SMITH"], ["xx", "en"]) == [KnownCodes(("1", "2"), 1), None]


def test_unknown_is_the_only_language():
    known = Known(languages=("se", "unk"))
    known.add(rows(("bonde", "se", "7")))
    assert known.find(["bonde"] * 3, ["se", "unk", "da"]) == [SEVEN, SEVEN, None]
    known = Known(languages=("se", "unk"))
    known.add(rows(("bonde", "se", "7"), ("dräng", "unk", "1")))
    assert known.find(["bonde"] * 2, ["se", "unk"]) == [SEVEN, None]  # of several it is none


@pytest.mark.parametrize("mode", ["greedy", "flat"])
def test_known_rows_are_answered(model: Path, tmp_path: Path, mode: str):
    others = ('"baker, retired 1",en,77610,41025', "uncoded,en,,")
    write(tmp_path / "known.csv", "occ1,lang,hisco_1,hisco_2", *DICTIONARY, *others)
    write_archive(tmp_path / "in.csv", 60)
    flags = (
        "--model",
        model,
        "--input",
        tmp_path / "in.csv",
        "--language-col",
        "lang",
        "--mode",
        mode,
    )
    predict(*flags, "--output", tmp_path / "plain.csv")
    predict(*flags, "--output", tmp_path / "out.csv", "--known", tmp_path / "known.csv")
    out, plain = read(tmp_path / "out.csv"), read(tmp_path / "plain.csv")
    known, is_blank = out["source"] == "known", out["occ1"] == ""
    expected = {
        ("farmer 0", "da"): [
            "61115",
            "0.333333",
            "",
            "0.333333",
        ],  # of three that are equally frequent the first
        ("farmer 0", "en"): ["95410", "1", "", "1"],
        ("baker, retired 1", "en"): ["77610", "1", "41025", "1"],
    }
    names = ["hisco_1", "prob_1", "hisco_2", "conf"]
    assert {
        (row["occ1"], row["lang"]): row[names].tolist() for _, row in out[known].iterrows()
    } == expected
    assert out.loc[is_blank, [*names, "source"]].eq("").all(axis=None)
    assert set(out.loc[~known & ~is_blank, "source"]) == {"model"}
    same = [name for name in plain if name in out]
    assert out.loc[~known, same].equals(plain.loc[~known, same])


def test_known_rows_without_languages_apply_to_all(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "known.csv").write_text("Beruf,sprache,hisco_1\nfarmer,en,61110\n")
    (tmp_path / "in.csv").write_text("occ1,lang\nfarmer,da\nfarmer,en\n")
    flags = ("--model", model, "--input", tmp_path / "in.csv", "--known", tmp_path / "known.csv")
    predict(*flags, "--language-col", "lang", "--output", tmp_path / "out.csv")
    assert (
        "known.csv has no column 'lang'; its codes apply to all languages."
        in capsys.readouterr().out
    )
    assert set(read(tmp_path / "out.csv")["source"]) == {"known"}


def test_resumed_coding_keeps_known_codes(model: Path, tmp_path: Path):
    write_archive(tmp_path / "in.csv", 100)
    coder = Coder(load_model(model), "cpu")

    def code(output: Path, source_id: str, *, num_batches: int = 1000) -> list[str]:
        """Code a file, unless it is cancelled after some batches, and return what is said."""
        known, said, left = Known(languages=("da", "en", "unk")), [], iter(range(num_batches))

        def progress(*_: float) -> None:
            if next(left, None) is None:
                raise Cancelled

        known.add(rows(("farmer 0", "da", "61110"), ("shoe maker 5", "en", "80110", "77610")))
        how = {"known": known, "block_rows": 30, "say": said.append, "progress": progress}
        with suppress(Cancelled):
            predict_file(
                coder, config(tmp_path / "in.csv", output, batch_size=2), model_id=source_id, **how
            )
        return said

    code(tmp_path / "whole.csv", "a")
    assert (read(tmp_path / "whole.csv")["source"] == "known").sum() >= 2
    for other in ("a", "b"):
        code(tmp_path / "out.csv", "a", num_batches=20)
        assert ("Resuming an interrupted run." in code(tmp_path / "out.csv", other)) is (
            other == "a"
        )
        assert (tmp_path / "out.csv").read_bytes() == (tmp_path / "whole.csv").read_bytes()


def test_auto_is_the_runs_own_training_data(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    best = shutil.copytree(model, tmp_path / "run" / "best")

    def said_of(*args: str) -> list[str]:
        predict("--model", best, "--known", "auto", *args)
        return capsys.readouterr().out.splitlines()

    said = mistake(capsys, "predict", "--model", best, "--known", "auto", "farmer")
    assert "--known auto reads the run's training data, and there is no" in said
    write(tmp_path / "run" / "data_train.csv", "occ1,lang,hisco_1,hisco_2", "farmer,en,80110,")
    header, farmer, miner = map(str.split, said_of("--language", "en", "FARMER", "miner"))
    assert header[-1] == "source" and farmer[1:3] == ["80110", "1.00"]
    assert (farmer[-1], miner[-1]) == ("known", "model")
    assert said_of("--language", "da", "farmer")[-1].split()[-1] == "model"
    assert said_of("farmer")[-1].split()[-1] == "known"  # taken to be in the run's language
    write(tmp_path / "run" / "data_held_out.csv", "occ1,lang,hisco_1,hisco_2", "miner,en,95410,")
    assert said_of("--language", "en", "miner")[-1].split()[-1] == "known"
