import json
import re
import unicodedata
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from conftest import cases, write, write_table
from hypothesis import given
from hypothesis import strategies as st
from models import tiny_coder

from histocoder.config import NORMALIZATIONS, FinetuneConfig, PrepareConfig
from histocoder.data.corrections import read_corrections
from histocoder.data.examples import Examples
from histocoder.data.hashes import key_hashes
from histocoder.data.key import read_key
from histocoder.data.labelled_files import LabelledFiles
from histocoder.data.labels import LabelRules
from histocoder.data.prepare import PREPARED_RULES, formatter_of, prepare, with_language_column
from histocoder.errors import UserError
from histocoder.evaluation.baselines import Baselines
from histocoder.formatters import Formatter, build_formatter
from histocoder.inference.known import Known
from histocoder.text.normalize import description_keys, normalize


def config(table: Path, **changes) -> PrepareConfig:
    settings = {
        "dataset": str(table),
        "target_cols": ("hisco_1",),
        "language": "en",
        "titles": "none",
    }
    return PrepareConfig(**settings | changes)


def prepared(table: Path, folder: Path, **changes) -> dict[str, pd.DataFrame]:
    prepare(config(table, **changes), folder)
    names = ("data_train", "data_val", "key", "rejected")
    return {
        name: pd.read_csv(folder / f"{name}.csv", dtype=str, keep_default_na=False)
        for name in names
    }


def read(path: Path, columns: list[str], formatter: Formatter, **options) -> Examples:
    return LabelledFiles((path,), tuple(columns), formatter, **options).read()


def test_split_is_by_distinct_description_and_seeded(tmp_path: Path):
    table = write(
        tmp_path / "t.csv", "occ1,hisco_1", *(f"title {i % 50},{10000 + i % 3}" for i in range(500))
    )
    files = prepared(table, tmp_path / "a", share_val=0.2)
    train, val = set(files["data_train"]["occ1"]), set(files["data_val"]["occ1"])
    assert not train & val and len(val) == 10
    again = prepared(table, tmp_path / "b", share_val=0.2)
    other = prepared(table, tmp_path / "c", share_val=0.2, seed=1)
    assert files["data_val"].equals(again["data_val"]) and not files["data_val"].equals(
        other["data_val"]
    )
    by_row = prepared(table, tmp_path / "d", share_val=0.2, split_by="row")
    assert len(by_row["data_val"]) == 100 and set(by_row["data_val"]["occ1"]) & set(
        by_row["data_train"]["occ1"]
    )


def test_a_fifth_of_corrections_is_held_out(tmp_path: Path):
    table = write(
        tmp_path / "t.csv",
        "occ1,hisco_1",
        *(f"title {i % 100},{10000 + i % 3}" for i in range(500)),
    )

    def held_out(first: int, last: int) -> set[str]:
        corrected, held, path = (
            {f"title {i}" for i in range(first, last)},
            set(),
            tmp_path / str(last),
        )
        rows = [f"{text.title()},x,10002" for text in corrected]
        checked = write(tmp_path / "review.csv", "occ1,checked,hisco_1", *rows)
        files = prepared(table, path, corrections=(str(checked),), share_val=0.3)
        train, val = (files[name]["occ1"].str.lower() for name in ("data_train", "data_val"))
        if (path / "data_held_out.csv").exists():
            found = pd.read_csv(path / "data_held_out.csv", dtype=str)
            assert set(found["hisco_1"]) == {"10002"} and set(found["lang"]) == {"en"}
            held = set(found["occ1"].str.lower())
        assert not held & {*train, *val} and not corrected & {*val}
        assert corrected - held <= {*train}  # the others are trained on, in the data or not
        assert set(files["data_train"][train.isin(corrected)]["hisco_1"]) == {"10002"}
        return held

    few, some, more, many = held_out(0, 19), held_out(0, 60), held_out(0, 90), held_out(50, 2000)
    assert not few and 6 <= len(some) <= 20 and some <= more and len(many) == 200
    assert more - some <= {
        f"title {i}" for i in range(60, 90)
    }  # what was trained on is not held out later
    prepare(config(table), tmp_path / "60", overwrite=True)
    assert not (tmp_path / "60" / "data_held_out.csv").exists()


def test_corrections_may_have_more_codes_than_the_table(tmp_path: Path):
    table = write(tmp_path / "t.csv", "occ1,hisco_1", *(f"title {i},6111{i % 3}" for i in range(9)))
    rows = ("smith and farmer,x,83110,61110", "title 3,,,")
    checked = write(tmp_path / "review.csv", "occ1,checked,hisco_1,hisco_2", *rows)
    corrections = (str(checked),)
    with pytest.raises(UserError, match="has codes in 'hisco_2', too") as error:
        prepared(table, tmp_path / "one", corrections=corrections)
    assert error.value.settings == {"target_cols": ("hisco_1", "hisco_2")}
    files = prepared(table, tmp_path / "two", corrections=corrections, **error.value.settings)
    codes = files["data_train"].set_index("occ1")[["hisco_1", "hisco_2"]]
    assert codes.loc["smith and farmer"].tolist() == ["83110", "61110"]

    # a column that neither has is still a mistake
    with pytest.raises(UserError, match="hisco_3"):
        names = ("hisco_1", "hisco_2", "hisco_3")
        prepared(table, tmp_path / "three", corrections=corrections, target_cols=names)


def test_corrected_descriptions_are_not_the_new_ones_to_validate_on(tmp_path: Path):
    texts = [f"title {i}" for i in range(600)]
    rows = [f"{text},6111{i % 3}" for i, text in enumerate(texts)]
    table = write(tmp_path / "t.csv", "occ1,hisco_1", *rows)
    checked = [f"{text},x,61110" for text in texts[480:598]]
    checked = write(tmp_path / "review.csv", "occ1,checked,hisco_1", *checked)
    trained_on = key_hashes(pa.array(description_keys(texts[:480])))  # and 120 are new
    folder = tmp_path / "out"
    prepare(config(table, corrections=(str(checked),)), folder, trained_on=trained_on)
    assert len(pd.read_csv(folder / "data_val.csv")) > 20


def test_rows_of_one_description_on_both_sides_are_told(tmp_path: Path, logged: list[str]):
    rows = [f"title {i % 10},6111{i % 2}" for i in range(100)]
    table = write(tmp_path / "t.csv", "occ1,hisco_1", *rows)
    prepare(config(table, split_by="row"), tmp_path / "out")
    said = [text for text in logged if "--split-by row" in text]
    assert len(said) == 1
    assert re.match(r"Notice: (\d+) of \1 validation rows have a description of the", said[0])


def test_corrections_match_languages_by_value(tmp_path: Path, logged: list[str]):
    rows = [
        *(f"smed {i},sv,83110" for i in range(20)),
        "bonde,sv,61110",
        "bonde,Swedish,61110",
        "bonde,da,61115",
    ]
    table = write(tmp_path / "t.csv", "occ1,language,hisco_1", *rows)

    def trained_on(column: str, *corrected: str) -> dict[tuple[str, ...], int]:
        """The rows that are not smiths', once corrected, and how often each occurs."""
        checked = write(tmp_path / "review.csv", f"occ1,{column},checked,hisco_1", *corrected)
        settings = {
            "language": "unk",
            "language_col": "language",
            "corrections": (str(checked),),
            "share_val": 0.3,
        }
        frame = prepared(table, tmp_path / corrected[0], **settings)["data_train"]
        return (
            frame[~frame["occ1"].str.startswith("smed")]
            .value_counts(["occ1", "lang", "hisco_1"])
            .to_dict()
        )

    found = trained_on("language", "Bonde,sv,x,62105", "råd,Danish,x,20110")
    assert found == {
        ("bonde", "se", "62105"): 2,
        ("bonde", "da", "61115"): 1,
        ("råd", "da", "20110"): 1,
    }
    found = trained_on(
        "language", "bonde,,x,62105", "råd,da,x,11111", "Råd,da,x,20110"
    )  # for every language
    assert found == {
        ("bonde", "se", "62105"): 2,
        ("bonde", "da", "62105"): 1,
        ("Råd", "da", "20110"): 1,
    }
    found = trained_on(
        "language", "bonde,unk,x,62105", "bonde,da,x,61120"
    )  # of its own language first
    assert found == {("bonde", "se", "62105"): 2, ("bonde", "da", "61120"): 1}
    assert any(text.startswith("1 correction is replaced by a later one") for text in logged)
    assert {code for _, _, code in trained_on("lang", "bonde,sv,x,62105")} == {"62105"}
    assert any("no column 'language'; its codes apply to all languages" in text for text in logged)


def test_checked_rows_alone_count_in_every_file(tmp_path: Path, logged: list[str]):
    marks = {"6111{}.0": ("x", "X ", "Ja", "oui", "TRUE", "1", "✓")}
    marks["guess {}"] = ("", "nein", "-", "?", "n", "Nej", "no", "não", "FALSE", "0", "NA")
    rows = [
        f"a {c},{m},{c}".format(i, i) for c, of_code in marks.items() for i, m in enumerate(of_code)
    ]
    checked = write(tmp_path / "review.csv", "occ1,checked,hisco_1", *rows)
    files = LabelledFiles((checked,), ("hisco_1",), build_formatter("general", num_blocks=1))
    assert (
        len(
            read_corrections(config(checked, language_col=None, corrections=(str(checked),)), files)
        )
        == 7
    )
    assert len(files.read(say=logged.append)) == 7
    prepared(checked, tmp_path / "out")
    assert logged.count(f"{checked}: 7 checked rows are used; 11 unchecked rows are ignored.") == 3
    checked.write_text("occ1,Checked,hisco_1\nbonde,no,61110\nsmed,later,83110\n")
    with pytest.raises(UserError, match=r"review\.csv.* no row is checked"):
        prepared(checked, tmp_path / "none")


def test_a_correction_of_another_spelling_is_used(tmp_path: Path):
    texts = [*(f"smed {i}" for i in range(20)), "væver", "Værer"]
    table = write(
        tmp_path / "t.csv", "occ1,hisco_1", *(f"{text},831{i:02}" for i, text in enumerate(texts))
    )
    corrected = ("VAEVER,x,75400", "vaerer,x,33140", "værer,x,81120")
    checked = write(tmp_path / "review.csv", "occ1,checked,hisco_1", *corrected)
    frame = prepared(table, tmp_path / "out", corrections=(str(checked),), share_val=0.3)[
        "data_train"
    ]
    found = dict(zip(frame["occ1"], frame["hisco_1"], strict=True))
    assert [found[text] for text in texts[20:]] == [
        "75400",
        "81120",
    ]  # of several for one description the last


@cases(
    ("rows", "codes", "notice"),
    (
        ["x,11111,  ,33333"],
        {"x": ["11111"]},
        "1 code is ignored, because an earlier cell of the row is empty",
    ),
    (["y,22222,,", "z,?,,"], {"y": ["22222"]}, "1 row is left out, without a description or"),
    (["x,11111,?,33333"], {"x": ["11111"]}, "1 code is ignored, because an earlier cell"),
    (
        ["y,22222,22222,11111"],
        {"y": ["22222", "11111"]},
        "1 code is ignored, because an earlier cell",
    ),
    (
        ["x,11111,22222,11111"],
        {"x": ["11111", "22222"]},
        "1 code is ignored, because an earlier cell",
    ),
    ids=range(5),
)
def test_codes_of_a_row(
    tmp_path: Path, logged: list[str], rows: list[str], codes: dict, notice: str
):
    table = write(tmp_path / "t.csv", "occ1,a,b,c", *rows, "v,33333,,", "w,44444,,")
    files = prepared(table, tmp_path / "out", target_cols=("a", "b", "c"), share_val=0.3)
    kept = pd.concat([files["data_train"], files["data_val"]]).set_index("occ1")[["a", "b", "c"]]
    found = {
        text: [code for code in row if code]
        for text, row in zip(kept.index, kept.to_numpy(), strict=True)
    }
    assert found | codes == found and "?" not in set(files["key"]["system_code"])
    assert any(notice in line for line in logged), logged


def test_rows_without_any_code_are_dropped(tmp_path: Path):
    table = write(tmp_path / "t.csv", "occ1,a,b\nx,11111,\ny,22222,\nz,?,\nw, ,\n,?,\nv,33333,")
    rejected = prepared(table, tmp_path / "out", target_cols=("a", "b"), share_val=0.3)["rejected"]
    assert rejected.set_index("line")["reason"].to_dict() == {
        "4": "no code",
        "5": "no code",
        "6": "no description",
    }
    options = {"target_cols": ("a", "b"), "share_val": 0.3, "blank_means_no_occupation": True}
    files = prepared(table, tmp_path / "all", **options)
    assert {*files["rejected"]["line"]} == {"6"} and "?" not in set(files["key"]["system_code"])


@pytest.mark.parametrize("name", ["hisco", "general"])
@pytest.mark.parametrize("first", ["", " ", "NA"])
def test_a_code_behind_a_missing_one_is_bad(tmp_path: Path, name: str, first: str):
    table, formatter = tmp_path / "t.csv", build_formatter(name, num_blocks=2)
    table.write_text(f"occ1,lang,a,b\nx,en,11111,\ny,en,{first},22222\nz,en,,\nv,en,33333,\n")
    why = "a: no code, but one in a later column"
    for rules in (LabelRules(), LabelRules(blank_means_no_occupation=True)):
        with pytest.raises(UserError, match=f"1 row has a label .*line 3, {why}"):
            read(table, ["a", "b"], formatter, rules=rules)
    options = {"target_cols": ("a", "b"), "share_val": 0.5, "drop_bad_labels": True}
    rejected = prepared(table, tmp_path / "out", **options)["rejected"]
    assert rejected.set_index("line")["reason"].to_dict() == {"3": why, "4": "no code"}
    table.write_text("occ1,lang,a,b\ny,en,?,22222\n")  # as OccCANINE's prepared files have it
    assert (
        read(
            table, ["a", "b"], build_formatter("general", num_blocks=2), rules=PREPARED_RULES
        ).codes["a"][0]
        == "?"
    )


WORDS = [
    "farmer",
    "craft & trade",
    "Bauer/Knecht",
    "wood, metal",
    "væver",
    "'t Hof",
    "1. clerks of any kind",
]


@cases(
    ("cells", "flags", "size", "codes"),
    (["055", "390", "970"], {}, 3, ["055", "390", "970"]),
    (["1", "9", "12", "-1"], {}, 2, ["1", "9", "12", "-1"]),  # HISCLASS's
    (["A1", "B12.5", "C3", "12"], {}, 5, ["A1", "B12.5", "C3", "12"]),
    (["55", "390", "970", "-1"], {"zero_pad_codes": True}, 3, ["055", "390", "970", "-1"]),
    (["55", "390", "-1"], {"allow_codes_shorter_than_block_size": True}, 3, ["55", "390", "-1"]),
    (["6-11.10", "41025.0", "77610"], {}, 5, ["61110", "41025", "77610"]),
    (["1,10,2", "80"], {"use_within_block_sep": True}, 3, ["1,10,2", "80"]),
    (["1,10,2", "80,4"], {}, None, ["1,10,2", "80,4"]),
    (WORDS, {}, None, WORDS),
    (["IVa", "V"], {}, None, ["IVa", "V"]),
    (["55", "390"], {"block_size": 5, "zero_pad_codes": True}, 5, ["00055", "00390"]),
    ids=str,
)
def test_a_block_fits_the_codes(
    tmp_path: Path, cells: list[str], flags: dict, size: int | None, codes: list[str]
):
    rows = [[f"title {i}", cell] for i, cell in enumerate(cells * 20)]
    pd.DataFrame(rows, columns=["occ1", "hisco_1"]).to_csv(tmp_path / "t.csv", index=False)
    record = prepare(config(tmp_path / "t.csv", **flags), tmp_path / "out")
    assert record["settings"]["block_size"] == size
    key = read_key(tmp_path / "out" / "key.csv")
    formatter = formatter_of(record, key)
    examples = read(
        tmp_path / "out" / "data_train.csv", ["hisco_1"], formatter, key=key, rules=PREPARED_RULES
    )
    assert set(key.codes) == set(examples.codes["hisco_1"]) == set(codes)
    blocks = formatter.blocks([*codes, "?"]).reshape(1 + len(codes), -1)
    assert [formatter.system.from_block(block) for block in blocks.tolist()] == [*codes, None]
    prepare(
        config(tmp_path / "t.csv", **{**flags, "block_size": None}), tmp_path / "out"
    )  # as it was prepared


@pytest.mark.parametrize("cell", ["61110/75400", "6E+04", "6111OO", "not known"])
def test_few_odd_cells_make_no_labels(tmp_path: Path, cell: str):
    rows = [f"title {i},61110" for i in range(20)]
    table = write(tmp_path / "t.csv", "occ1,hisco_1", *rows, f"odd,{cell}", "other,41025")
    with pytest.raises(UserError, match=r"1 row has a label that does not fit: line 22"):
        prepare(config(table), tmp_path / "out")
    key = write(tmp_path / "key.csv", "system_code,code", "41025,0", "61110,1", f"{cell},2")
    prepare(config(table, key=str(key)), tmp_path / "out")  # which says that it is a code


def test_bad_labels_stop_or_are_listed(tmp_path: Path):
    rows = [f"title {i},61110" for i in range(20)]
    table = write(
        tmp_path / "t.csv", "occ1,hisco_1\na,61110\nb,611101\nc,væver\nd,41025\n,41025", *rows
    )
    message = r"2 rows .*line 3, hisco_1: '611101' is longer than 5 .*line 4.*--drop-bad-labels"
    with pytest.raises(UserError, match=message):
        prepared(table, tmp_path / "out")
    rejected = prepared(table, tmp_path / "out", drop_bad_labels=True)["rejected"]
    assert rejected["line"].tolist() == ["3", "4", "6"]
    assert rejected["reason"].str.contains("longer|æ|no description").all()
    assert rejected["hisco_1"].tolist() == ["611101", "væver", "41025"]


def test_entities_are_decoded_everywhere(tmp_path: Path, logged: list[str]):
    texts = ["boot &amp; shoe maker", "b&amp;uuml;rger", "B&#252;rger", "R&D; clerk", "smith"]
    table = write(
        tmp_path / "t.csv", "occ1,hisco_1", *(f"{text},6111{i}" for i, text in enumerate(texts))
    )
    checked = write(tmp_path / "review.csv", "occ1,checked,hisco_1", "boot & shoe maker,x,80110")
    files = prepared(table, tmp_path / "out", corrections=(str(checked),))
    assert (
        f"{table}: 3 descriptions have HTML entities, such as &amp;, which are decoded." in logged
    )
    found = dict(
        pd.concat([files["data_train"], files["data_val"]])[["occ1", "hisco_1"]].to_numpy()
    )
    assert found.keys() == {"boot & shoe maker", "bürger", "Bürger", "R&D; clerk", "smith"}
    assert found["boot & shoe maker"] == "80110"
    coded = tiny_coder().predict([*texts[:2], "boot & shoe maker", "bürger"], mode="full")
    assert coded[:2].to_numpy().tolist() == coded[2:].to_numpy().tolist()


def test_an_entity_of_a_blank_is_no_description(tmp_path: Path):
    rows = ("&nbsp;,61110", "&amp;nbsp;&#8203;,61110", "smith,83110", "cook,53110")
    files = prepared(write(tmp_path / "t.csv", "occ1,hisco_1", *rows), tmp_path / "out")
    assert set(files["data_train"]["occ1"]) | set(files["data_val"]["occ1"]) == {"smith", "cook"}
    assert files["rejected"]["reason"].tolist() == ["no description"] * 2
    assert tiny_coder().predict(["&nbsp;", ""])["conf"].isna().all()


def test_descriptions_with_different_codes_are_listed(tmp_path: Path, logged: list[str]):
    rows = [
        "clerk,en,39310,",
        "Clerk,en,39340,",
        "clerk,en,39310,",
        "clerk,da,39340,",
        "smith,en,83110,61110",
    ]
    rows += [
        "smith,en,61110,83110",
        *["væver,da,75400,"] * 12,
        "Vaever,da,75400,61110",
        "cook,en,,",
        "cook,en,53130,",
    ]
    table = write(tmp_path / "t.csv", "occ1,lang,a,b", *rows)
    files = {"target_cols": ("a", "b"), "language": "unk", "language_col": "lang"}
    prepare(config(table, **files), tmp_path / "out")
    assert any(
        f"2 descriptions have different codes in different rows; {tmp_path}" in text
        for text in logged
    )
    assert pd.read_csv(
        tmp_path / "out" / "conflicts.csv", dtype=str, keep_default_na=False
    ).to_numpy().tolist() == [
        ["væver", "da", "75400", "", "12", "8; 9; 10; 11; 12; 13; 14; 15; 16; 17; …"],
        ["Vaever", "da", "75400", "61110", "1", "20"],
        ["clerk", "en", "39310", "", "2", "2; 4"],
        ["Clerk", "en", "39340", "", "1", "3"],
    ]
    table.write_text(
        "occ1,lang,a,b\nclerk,en,39310,\nclerk,da,39340,\nClerks,da,39310,\nclérk,da,39340,\n"
    )
    prepare(config(table, **files), tmp_path / "out", overwrite=True)
    assert not (tmp_path / "out" / "conflicts.csv").exists()


def test_preparing_again_refuses_other_data(table: Path, tmp_path: Path, logged: list[str]):
    prepare(config(table, share_val=0.1), tmp_path / "out")
    before = (tmp_path / "out" / "data_train.csv").stat().st_mtime_ns
    (tmp_path / "out" / ".prepared.1.tmp").mkdir()  # of a run that was killed
    prepare(config(table), tmp_path / "out")
    assert (
        "Using the data prepared" in logged[-1]
        and not (tmp_path / "out" / ".prepared.1.tmp").exists()
    )
    assert (tmp_path / "out" / "data_train.csv").stat().st_mtime_ns == before
    with pytest.raises(UserError, match=r"share_val: 0.1 there, 0.2 now.*--overwrite"):
        prepare(config(table, share_val=0.2), tmp_path / "out")
    write_table(table, copies=2)
    with pytest.raises(UserError, match=r"\(dataset has changed\).*--overwrite"):
        prepare(config(table), tmp_path / "out")
    record = json.loads((tmp_path / "out" / "prepared.json").read_text())
    for damage in ({**record, "format_version": 1}, {**record, "format_version": 99}, []):
        (tmp_path / "out" / "prepared.json").write_text(json.dumps(damage))
        with pytest.raises(
            UserError, match=r"damaged, or of another version of histocoder.*--overwrite"
        ):
            prepare(config(table), tmp_path / "out")
    prepare(config(table), tmp_path / "out", overwrite=True)
    record = json.loads((tmp_path / "out" / "prepared.json").read_text())
    assert sum(record["rows"].values()) == 128


@pytest.mark.parametrize("name", ["data_train.csv", "key.csv"])
@pytest.mark.parametrize("role", ["dataset", "key"])
def test_no_file_that_is_read_is_replaced(table: Path, tmp_path: Path, role: str, name: str):
    out = tmp_path / "out"
    out.mkdir()
    if role == "key":
        prepared(table, tmp_path / "other")
    source = (table if role == "dataset" else tmp_path / "other" / "key.csv").rename(out / name)
    before = source.read_bytes()
    (tmp_path / "alias").symlink_to(out)
    paths = {"dataset": str(table), role: str(tmp_path / "alias" / name)}
    with pytest.raises(UserError, match=rf"--{role} .*{name}: preparing would replace this file"):
        prepare(config(table, **paths), out, overwrite=True)
    assert source.read_bytes() == before and list(out.iterdir()) == [source]


def test_codes_outside_the_key_are_refused_or_dropped(tmp_path: Path):
    key = read_key(
        write(tmp_path / "key.csv", "hisco,index,title", "61110,0,Farmer", "41025,1,Merchant")
    )
    table = write(tmp_path / "t.csv", "occ1,lang,hisco_1", "a,en,61110", "b,en,99999")
    how = {"formatter": build_formatter("hisco", num_blocks=5), "key": key}
    with pytest.raises(UserError, match=r"line 3, hisco_1: '99999' is not in the key"):
        read(table, ["hisco_1"], **how)
    files, heard = (
        LabelledFiles((table,), ("hisco_1",), **how, rules=LabelRules(drop_bad=True)),
        list[str](),
    )
    assert len(files.read(say=heard.append)) == 1 and "1 row is left out" in heard[-1]


def test_a_class_without_a_code_makes_no_labels(tmp_path: Path):
    table = write(
        tmp_path / "t.csv", "occ1,hisco_1", *(f"farmer {i},61110" for i in range(20)), "smith,83110"
    )
    key = write(tmp_path / "key.csv", "system_code,code", "61110,0", "83110,1", "-1,2", ",3")
    record = prepare(config(table, target_cols=("hisco_1",), key=str(key)), tmp_path / "out")
    assert record["settings"]["block_size"] == 5


def test_a_key_as_occcanine_has_it(tmp_path: Path):
    rows = (
        "empty, ,NA",
        "Non work related title,-3,0",
        '"Chemist, General",1110,1',
        "Farmer,61110,2",
    )
    key = read_key(write(tmp_path / "key.csv", "en_hisco_text,hisco,code", *rows))
    assert key.codes == ("-3", "01110", "61110") and key.descriptions["01110"] == "Chemist, General"


# Spellings of one text that look alike: read alike by new models, and kept together where data are
# split

NFC, NFD = (unicodedata.normalize(form, "Dräng") for form in ("NFC", "NFD"))


@given(
    st.text(
        st.characters(
            max_codepoint=0x52F, exclude_categories=["Cc", "Cs"], exclude_characters="\u037e\u0387"
        )
    )
)
def test_keys_are_equal_where_models_read_alike(text: str):
    variants = [text, unicodedata.normalize("NFD", text), f"  {text}\t"]
    variants += [read for how in NORMALIZATIONS for read in normalize([text], how)]
    assert set(description_keys(variants)) == set(description_keys([text]))


def test_keys_of_letters_that_ascii_lacks():
    texts = [
        "Væver",
        "vaever",
        "STRASSENKEHRER",
        "Straßenkehrer",
        "wine\u2014 merchant",
        "😀",
        "👑",
        "γεωργός",
    ]
    keys = ["vaever"] * 2 + ["strassenkehrer"] * 2 + ["wine merchant", "😀", "👑", "georgos"]
    assert description_keys(texts).tolist() == keys


@cases(
    ("text", "key"),
    ("教师", "教师"),  # a teacher
    ("教士、", "教士"),  # a clergyman, who is a "jiao shi" as well
    ("かじや 5", "かじや 5"),
    ("कृषक", "कृषक"),  # with signs of vowels
    ("ʼt Hof", "t hof"),
)
def test_keys_of_scripts_that_ascii_has_no_letters_for(text: str, key: str):
    assert description_keys([text]).tolist() == [key]


@pytest.mark.parametrize("split_by", ["text", "row"])
def test_twins_in_punctuation_are_one_description(tmp_path: Path, split_by: str, logged: list[str]):
    texts = [
        f"{name} {kind}{end}"
        for name in ("baker", "cook")
        for kind in range(20)
        for end in ("", ".", ",")
    ]
    table = write(
        tmp_path / "t.csv",
        "occ1,hisco_1",
        *(f'"{text}",{62105 + i % 2}' for i, text in enumerate(texts)),
    )
    files = prepared(table, tmp_path / "out", split_by=split_by)
    train, val = (set(description_keys(files[name]["occ1"])) for name in ("data_train", "data_val"))
    assert any("120 rows have 40 descriptions in several spellings" in line for line in logged)
    assert bool(train & val) == (split_by == "row") and len(train | val) == 40


def test_a_table_without_twins_keeps_its_split(tmp_path: Path):
    texts = [f"maker of {i}, retired ({i % 7})" for i in range(60)]
    table = write(
        tmp_path / "t.csv",
        "occ1,hisco_1",
        *(f'"{text}",{62105 + i % 2}' for i, text in enumerate(texts)),
    )
    files = prepared(table, tmp_path / "out")
    units = pd.util.hash_array(
        np.array(texts, dtype=object), hash_key=f"{42:016x}", categorize=False
    )
    lowest = {texts[i] for i in np.argsort(units)[:12]}  # as versions without this rule split it
    assert set(files["data_val"]["occ1"]) == lowest


def finetuning(table: Path, out: Path, **changes: object) -> FinetuneConfig:
    return FinetuneConfig(str(table), ("hisco_1",), save_path=str(out), **changes)


@pytest.mark.parametrize("name", ["lang", "Language"])
def test_a_column_of_languages_is_taken(tmp_path: Path, name: str, logged: list[str]):
    rows = ["smed,da,61110", "bonde,Danish,61110", "smith,,61110", "smid,nl,80110"]
    table = write(tmp_path / "t.csv", f"occ1,{name},hisco_1", *rows * 3)
    found = with_language_column(finetuning(table, tmp_path / "out"))
    assert (
        found.language_col.casefold() == name.casefold()
        and "--language-col none ignores it" in logged[-1]
    )
    for changes in ({"language_col": "none"}, {"language": "da"}):
        config = replace(finetuning(table, tmp_path / "out"), **changes)
        assert with_language_column(config) == config
    prepare(finetuning(table, tmp_path / "out", language_col="none"), tmp_path / "out")
    assert set(pd.read_csv(tmp_path / "out" / "data_train.csv")["lang"]) == {"unk"}
    # which was prepared without languages before
    assert with_language_column(finetuning(table, tmp_path / "out")).language_col is None


def test_the_encoding_that_is_named_finds_the_column_of_languages(tmp_path: Path):
    table = tmp_path / "t.csv"
    rows = ("кузнец,ru,83110", "повар,ru,53110")
    table.write_text("\n".join(["профессия,lang,hisco_1", *rows * 3]), encoding="cp1251")
    config = finetuning(table, tmp_path / "out", input_col="профессия", file_encoding="cp1251")
    assert with_language_column(config).language_col == "lang"


def test_a_column_of_other_words_is_no_language(tmp_path: Path):
    for cells in (["north", "south", "east", "da"], ["", "", "", ""]):
        rows = [f"smed {cell},{cell},61110" for cell in cells]
        table = write(tmp_path / "t.csv", "occ1,lang,hisco_1", *rows)
        assert with_language_column(finetuning(table, tmp_path / "out")).language_col is None
    missing = finetuning(tmp_path / "missing.csv", tmp_path / "out")
    assert with_language_column(missing) == missing  # `prepare` says what is wrong


def test_data_of_an_earlier_version_are_used_as_they_are(tmp_path: Path, table: Path):
    record, path = prepare(config(table), tmp_path / "out"), tmp_path / "out" / "prepared.json"
    path.write_text(json.dumps({**record, "format_version": 3}))
    before = (tmp_path / "out" / "examples.arrow").stat().st_mtime_ns
    assert prepare(config(table), tmp_path / "out")["format_version"] == 3
    assert (tmp_path / "out" / "examples.arrow").stat().st_mtime_ns == before


def test_variants_stand_on_one_side_of_the_split(tmp_path: Path):
    variants = [
        variant for i in range(40) for variant in (f"{NFC} {i}", f"{NFD} {i}", f" DRANG  {i}")
    ]
    table = write(
        tmp_path / "t.csv",
        "occ1,hisco_1",
        *(f"{text},{62105 + len(text) % 2}" for text in variants),
    )
    prepare(PrepareConfig(str(table), ("hisco_1",)), tmp_path / "out")
    train, val = (
        pd.read_csv(tmp_path / "out" / f"data_{part}.csv")["occ1"].tolist()
        for part in ("train", "val")
    )
    assert len(val) == 24 and not set(description_keys(train)) & set(description_keys(val))
    assert sorted(train + val) == sorted(variants)  # the texts themselves are written as they came


def test_seen_in_training_in_another_spelling():
    def examples(*texts: str) -> Examples:
        return Examples.of(
            list(texts), ["se"] * len(texts), pd.DataFrame({"hisco_1": ["62105"] * len(texts)})
        )

    baselines = Baselines(examples("  dräng", "piga"), Known(), max_size=0)
    baselines.add(examples(NFC, NFD.upper()))
    assert baselines.texts_seen == {"drang": 2}
