"""Titles of codes are learned from, but never validated on; those of their groups are shown
alone.
"""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from conftest import ROOT, cases, run, shared, write
from jobs import finetune

from histocoder.checkpoints.model_files import read_model_config
from histocoder.classes.groups import Groups, system_of
from histocoder.config import PrepareConfig
from histocoder.data.dataset import OccupationDataset
from histocoder.data.examples import TITLES, TRAIN, VAL, Examples
from histocoder.data.prepare import prepare
from histocoder.data.samplers import BatchIndices
from histocoder.errors import UserError
from histocoder.formatters import build_formatter
from histocoder.formatters.classifications import GROUPS, HISCO_TITLES, LEXICON, titles_of
from histocoder.text.normalize import description_keys


def titled(lang: str) -> pd.DataFrame:
    titles = pd.read_csv(HISCO_TITLES, dtype=str)
    return titles[titles["lang"] == lang]


def prepared(tmp_path: Path, rows: pd.DataFrame, **settings) -> dict[str, Examples]:
    """Descriptions and codes of a table, by the split that preparing puts them into."""
    rows.to_csv(tmp_path / "table.csv", index=False)
    names = {
        "dataset": str(tmp_path / "table.csv"),
        "target_cols": ("hisco",),
        "input_col": "title",
    }
    prepare(PrepareConfig(**{**names, "language": "English", **settings}), tmp_path / "out")
    return {
        name: Examples.open(tmp_path / "out" / "examples.arrow", name)
        for name in (TRAIN, VAL, TITLES)
    }


def test_a_hisco_table_gets_titles_of_its_languages(tmp_path: Path):
    rows = titled("en").sample(300, random_state=0)
    found = prepared(tmp_path, rows[["title", "hisco"]])
    assert set(found[TITLES].langs) == {"en"} and len(found[TRAIN]) + len(found[VAL]) == 300
    given = {*description_keys(rows["title"].tolist())}
    assert not given & {*description_keys(found[TITLES].texts)} and len(found[TITLES]) > 300
    assert {*found[TITLES].code_table} <= {
        *pd.read_csv(tmp_path / "out" / "key.csv", dtype=str)["system_code"]
    }


OTHERS = [("1{:.4}", {}), ("x{:.2}", {}), ("{}", {"titles": "none"}), ("{}", {"language": "unk"})]


@pytest.mark.parametrize(("form", "settings"), OTHERS, ids=str)
def test_other_tables_get_no_titles(tmp_path: Path, form: str, settings: dict[str, str]):
    rows = titled("en").sample(200, random_state=1).query("hisco.str.len() == 5")
    found = prepared(tmp_path, rows.assign(hisco=rows["hisco"].map(form.format)), **settings)
    assert len(found[TITLES]) == 0 and not (tmp_path / "out" / "data_titles.csv").exists()


def test_a_key_bounds_the_codes_of_titles(tmp_path: Path):
    rows = titled("en").sample(200, random_state=2)
    codes = [f"{code},{i}" for i, code in enumerate(rows["hisco"].unique())]
    found = prepared(
        tmp_path, rows, key=str(write(tmp_path / "key.csv", "system_code,code", *codes))
    )
    assert len(found[TITLES]) and {*found[TITLES].code_table} <= {*rows["hisco"]}


def test_data_prepared_by_an_earlier_version_are_kept(tmp_path: Path):
    rows = titled("en").sample(200, random_state=5)
    assert len(prepared(tmp_path, rows, titles="none")[TITLES]) == 0
    path = tmp_path / "out" / "prepared.json"
    record = json.loads(path.read_text())
    del record["settings"]["titles"]  # which it did not have
    path.write_text(json.dumps(record))
    assert len(prepared(tmp_path, rows)[TITLES]) == 0
    record["settings"]["titles"] = "none"
    path.write_text(json.dumps(record))
    with pytest.raises(UserError, match="titles: 'none' there, 'auto' now"):
        prepared(tmp_path, rows)


def test_titles_of_other_classifications_are_read(tmp_path: Path):
    titles = ("plough boy,A1", "farmer,A1", "ladle maker,B2", "odd,none such code")
    titles = str(write(tmp_path / "titles.csv", "title,code", *titles))
    rows = pd.DataFrame(
        {"title": ["farmer", "baker", "cook", "spoon maker"], "hisco": ["A1", "C3", "C3", "B2"]}
    )
    assert prepared(tmp_path, rows, titles=titles, share_val=0.25)[TITLES].texts == [
        "plough boy",
        "ladle maker",
    ]
    (tmp_path / "other").mkdir()
    with pytest.raises(UserError, match="has no column of codes"):
        prepared(
            tmp_path / "other",
            rows,
            titles=str(write(tmp_path / "key.csv", "title,lang", "farmer,en")),
        )


def test_codes_of_titles_are_read_as_those_of_the_table(tmp_path: Path, logged: list[str]):
    rows = ("chemist,1110", "head cook,53100 ", "farmer,'61110", "smith,83110/83120", "turner,x")
    titles = write(tmp_path / "titles.csv", "title,code", *rows)
    table = pd.DataFrame(
        {"title": ["a", "b", "c", "d"], "hisco": ["01110", "53100", "61110", "83110"]}
    )
    settings = {"titles": str(titles), "share_val": 0.25}
    found = prepared(tmp_path, table, **settings)[TITLES]
    assert found.codes["hisco"].tolist() == ["53100", "61110"]
    assert any(
        text.startswith(f"{titles}: 3 titles have no code that fits") and "'1110' has fewer" in text
        for text in logged
    )
    (tmp_path / "padded").mkdir()
    padded = prepared(tmp_path / "padded", table, zero_pad_codes=True, **settings)[TITLES]
    assert padded.codes["hisco"].tolist() == ["01110", "53100", "61110"]


def test_titles_without_languages_are_in_that_of_the_table(tmp_path: Path):
    titles = write(tmp_path / "titles.csv", "title,code", "plough boy,A1", "ladle maker,B2")
    rows = pd.DataFrame({"title": list("abcd"), "hisco": ["A1", "B2"] * 2, "lang": "da"})
    settings = {"titles": str(titles), "language": "unk", "language_col": "lang"}
    assert prepared(tmp_path, rows, **settings)[TITLES].langs == ["da", "da"]
    (tmp_path / "other").mkdir()
    rows["lang"] = ["da", "se"] * 2
    with pytest.raises(UserError, match=r"no column lang, and the table has .* \(da, se\)\. Add"):
        prepared(tmp_path / "other", rows, **settings)


def test_titles_of_the_box_are_for_tables_of_hisco(tmp_path: Path):
    rows = pd.DataFrame({"title": list("abcdefgh"), "hisco": ["craft", "trade"] * 4})
    assert not len(prepared(tmp_path, rows, titles=str(LEXICON))[TITLES])
    (tmp_path / "hisco").mkdir()
    assert len(prepared(tmp_path / "hisco", titled("en"), titles=str(LEXICON))[TITLES])


def test_a_large_table_learns_the_titles_that_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("histocoder.data.titles._MAX_ROWS", 3)
    titles = write(tmp_path / "titles.csv", "title,code", "plough boy,A1")
    rows = pd.DataFrame({"title": list("abcd"), "hisco": ["A1", "B2"] * 2})
    assert prepared(tmp_path, rows, titles=str(titles))[TITLES].texts == ["plough boy"]


def test_titles_weigh_less_than_rows(tmp_path: Path):
    found = prepared(tmp_path, titled("en").sample(300, random_state=3))
    examples = Examples.open(tmp_path / "out" / "examples.arrow", TRAIN, TITLES)
    formatter = build_formatter("general", num_blocks=1)
    data = OccupationDataset(examples, formatter=formatter, classes=examples.code_table, max_len=64)
    batch = data[
        BatchIndices(
            np.arange(len(data)), epoch=0, num_rows=len(data), num_target_blocks=1, weight=1.0
        )
    ]
    assert batch.counts.tolist() == pytest.approx(
        [1.0] * len(found[TRAIN]) + [0.3] * len(found[TITLES])
    )
    assert data.num_titles == len(found[TITLES])


def test_a_run_learns_codes_of_titles_alone(tmp_path: Path):
    rows = titled("en").sample(60, random_state=4)[["title", "hisco"]]
    rows.to_csv(tmp_path / "table.csv", index=False, header=["occ1", "hisco_1"])
    flags = ("--language", "en", "--max-steps", 2, "--titles", "auto")
    said = run(*finetune(tmp_path / "table.csv", tmp_path / "out", *flags)).stdout
    titles = pd.read_csv(tmp_path / "out" / "data_titles.csv", dtype=str)
    assert f"{len(titles):,} titles of codes" in said
    assert {*titles["hisco_1"]} <= {*read_model_config(tmp_path / "out").codes}


OWN = {
    row.system_code: row.desc
    for row in pd.read_csv(ROOT / "data" / "key.csv", dtype=str).itertuples()
}


def published() -> list[str]:
    codes = pd.read_csv(shared("reference/hisco_codes.csv"), dtype=str)["hisco"].dropna()
    return [code if code.startswith("-") else code.zfill(5) for code in codes if code.strip()]


def test_groups_are_those_of_published_codes():
    titles = (
        pd.read_csv(GROUPS, dtype=str)
        .query("system == 'hisco'")
        .set_index("code")["title"]
        .to_dict()
    )
    codes = [code for code in published() if not code.startswith("-")]
    majors = {"0/1", "2", "3", "4", "5", "6", "7/8/9"}
    minors, units = (
        {group for group in titles if group.isdecimal() and len(group) == n} for n in (2, 3)
    )
    assert majors <= {*titles} and minors == {code[:2] for code in codes}
    assert (
        units <= {code[:3] for code in codes} <= units | {f"{minor}0" for minor in minors}
        and len(units) == 285
    )
    assert {code: title for code, title in titles.items() if code in OWN} == OWN
    assert {*titles} - majors - minors - units <= {*published(), *OWN} and len(titles) > 1_700
    values = [
        value.value
        for code in codes
        for value in Groups("hisco", ("major", "minor", "unit")).find(code)
    ]
    assert None not in values


@cases(
    ("system", "code", "expected"),
    ("hisco", "61110", ["6", "61", "611"]),
    ("hisco", "1110.0", ["0/1", "01", "011"]),
    ("hisco", "98135", ["7/8/9", "98", "981"]),
    ("hisco", "61000", ["6", "61", "610"]),
    ("hisco", "61310", ["6", "61", None]),  # HISCO has no unit group 613
    ("hisco", "-1", [None, None, None]),
    ("occ1950", "70", ["000-099"]),
    ("occ1950", "730", ["730-790"]),
    ("occ1950", "979", [None]),
)
def test_groups_of_codes(system: str, code: str, expected: list[str | None]):
    found = Groups(system, ("major", "minor", "unit")[: len(expected)]).find(code)
    assert [one.value for one in found[::2]] == expected
    assert [one.value is None for one in found[1::2]] == [group is None for group in expected]
    blanks = "no value in the table" if code == "-1" else "code not in the table"
    assert {one.way for one in found} == {"exact" if one.value else blanks for one in found}


def test_codes_without_titles_have_their_groups():
    titles = titles_of(codes := published())
    assert titles["-3"] == "not about work" and set(codes) <= set(titles)
    assert (
        all(titles[code] == OWN[code] for code in OWN)
        and titles["78390"] == "cigarette makers (unit group)"
    )
    assert titles["61000"] == "farmers (minor group)"
    for others in (["010", "690"], ["A01", "B22"], ["-1"], ["12345", "61110", "88812"], []):
        assert titles_of(others) == {}
    assert [system_of(name) for name in ("OCC1950_1", "hisco")] == ["occ1950", "hisco"]


def test_titles_of_groups_are_shown_not_learned(table: Path, tmp_path: Path):
    table.write_text(table.read_text().replace("79100", "78390"))
    run(*finetune(table, tmp_path / "out", "--max-steps", 2))
    config = read_model_config(tmp_path / "out")
    assert (
        config.descriptions["78390"] == "cigarette makers (unit group)"
        and config.descriptions["61110"] == "farmer"
    )
    rows = (tmp_path / "out" / "data_train.csv").read_text() + (
        tmp_path / "out" / "key.csv"
    ).read_text()
    assert "unit group" not in rows
    key = write(
        tmp_path / "key.csv",
        "system_code,code,desc",
        *(f"{c},{i},my {c}" for i, c in enumerate(config.codes)),
    )
    flags = ("--initial-checkpoint", tmp_path / "out", "--key", key)
    run(*finetune(table, tmp_path / "second", "--max-steps", 2, *flags))
    assert (
        read_model_config(tmp_path / "second").descriptions["78390"] == "my 78390"
    )  # the group's title is not kept
