"""Groups of HISCO and OCC1950, and the titles of codes that a model gets from them."""

import csv
from pathlib import Path

import pandas as pd
import pytest
from conftest import ROOT, run, shared
from jobs import finetune

from histocoder.checkpoints.model_files import read_model_config
from histocoder.data.crosswalk import Groups
from histocoder.data.groups import GROUPS, system_of, titles_of

OWN = {row.system_code: row.desc for row in pd.read_csv(ROOT / "data" / "key.csv", dtype=str).itertuples()}


def groups(system: str = "hisco") -> dict[str, str]:
    with GROUPS.open(encoding="utf-8", newline="") as file:
        return {row["code"]: row["title"] for row in csv.DictReader(file) if row["system"] == system}


def published() -> list[str]:
    codes = pd.read_csv(shared("reference/hisco_codes.csv"), dtype=str)["hisco"].dropna().tolist()
    return [code if code.startswith("-") else code.zfill(5) for code in codes if code.strip()]


def test_groups_are_those_of_published_codes():
    titles, codes = groups(), [code for code in published() if not code.startswith("-")]
    majors = {"0/1", "2", "3", "4", "5", "6", "7/8/9"}
    minors, units = ({group for group in titles if group.isdecimal() and len(group) == n} for n in (2, 3))
    assert majors <= {*titles} and minors == {code[:2] for code in codes}
    unspecified = {f"{minor}0" for minor in minors}
    assert units <= {code[:3] for code in codes} <= units | unspecified and len(units) == 285
    assert {code: title for code, title in titles.items() if code in OWN} == OWN
    assert {*titles} - majors - minors - units <= {*codes, *OWN} and len(titles) > 1_700
    values = [value.value for code in codes for value in Groups("hisco", ("major", "minor", "unit")).find(code)]
    assert None not in values


@pytest.mark.parametrize(
    ("system", "code", "expected"),
    [
        ("hisco", "61110", ["6", "61", "611"]),
        ("hisco", "1110.0", ["0/1", "01", "011"]),
        ("hisco", "98135", ["7/8/9", "98", "981"]),
        ("hisco", "61000", ["6", "61", "610"]),
        ("hisco", "61310", ["6", "61", None]),  # HISCO has no unit group 613
        ("hisco", "-1", [None, None, None]),
        ("occ1950", "70", ["000-099"]),
        ("occ1950", "730", ["730-790"]),
        ("occ1950", "979", [None]),
    ],
)
def test_groups_of_codes(system: str, code: str, expected: list[str | None]):
    levels = ("major", "minor", "unit")[: len(expected)]
    found = Groups(system, levels).find(code)
    assert [one.value for one in found[::2]] == expected
    assert [one.value is None for one in found[1::2]] == [group is None for group in expected]
    blanks = "no value in the table" if code == "-1" else "code not in the table"
    assert {one.how for one in found} == {"exact" if one.value else blanks for one in found}


def test_codes_without_titles_have_their_groups():
    codes = published()
    titles = titles_of(codes)
    assert [code for code in codes if code not in titles] == ["-3"]
    assert all(titles[code] == OWN[code] for code in OWN) and titles["78390"] == "cigarette makers (unit group)"
    assert titles["61000"] == "farmers (minor group)"
    for others in (["010", "690"], ["A01", "B22"], ["-1"], ["12345", "61110", "88812"], []):
        assert titles_of(others) == {}
    assert [system_of(name) for name in ("OCC1950_1", "hisco")] == ["occ1950", "hisco"]


def test_titles_of_groups_are_shown_not_learned(table: Path, tmp_path: Path):
    table.write_text(table.read_text().replace("79100", "78390"))
    run(*finetune(table, tmp_path / "out", "--max-steps", 2))
    config = read_model_config(tmp_path / "out")
    assert config.descriptions["78390"] == "cigarette makers (unit group)" and config.descriptions["61110"] == "farmer"
    rows = (tmp_path / "out" / "data_train.csv").read_text() + (tmp_path / "out" / "key.csv").read_text()
    assert "unit group" not in rows
    key = tmp_path / "key.csv"
    key.write_text("system_code,code,desc\n" + "".join(f"{c},{i},my {c}\n" for i, c in enumerate(config.codes)))
    flags = ("--initial-checkpoint", tmp_path / "out", "--key", key)
    run(*finetune(table, tmp_path / "second", "--max-steps", 2, *flags))
    assert read_model_config(tmp_path / "second").descriptions["78390"] == "my 78390"  # the group's title is not kept
