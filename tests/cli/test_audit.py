"""`histocoder audit` and `histocoder agreement`, on tables with codes that are wrong on purpose."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from archives import read
from conftest import ROOT, mistake, run, write

from histocoder.cli.main import main
from histocoder.data.labelled_files import LabelledFiles
from histocoder.evaluation.review_file import Columns, in_order_of_worth, open_coded
from histocoder.formatters import build_formatter

COLUMNS = ("--target-cols", "hisco_1", "hisco_2", "--language-col", "lang")


@pytest.fixture(scope="module")
def rows() -> pd.DataFrame:
    """Rows of the sample data, of two coders; some of the second's codes of frequent descriptions
    are wrong.
    """
    rows = read(ROOT / "data" / "train.csv")
    rows = rows[rows["lang"].isin(["en", "da"])].head(1200).reset_index(drop=True)
    rows["coder"] = np.where(rows.index % 2, "second", "first")
    plain = rows.index[
        (rows["coder"] == "second")
        & rows["hisco_1"].isin(["61110", "80110"])
        & (rows["hisco_2"] == "")
    ]
    rows["planted"] = rows.index.isin(plain[:12])
    rows["hisco_1"] = rows["hisco_1"].mask(rows["planted"], "33110")
    return rows


@pytest.fixture(scope="module")
def audited(rows: pd.DataFrame, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("audit")
    rows.drop(columns="planted").to_csv(folder / "coded.csv", index=False)
    flags = (*COLUMNS, "--group-col", "coder", "--budget", 40, "--output", folder / "audit.csv")
    return folder, run(
        "-m", "histocoder", "audit", "--dataset", folder / "coded.csv", *flags
    ).stdout


def audited_rows(folder: Path, rows: pd.DataFrame, *flags: object) -> pd.DataFrame:
    """Return the labels to check of some rows with codes, the most suspect first."""
    rows.to_csv(folder / "coded.csv", index=False)
    files = ("--dataset", folder / "coded.csv", "--output", folder / "audit.csv")
    main(["audit", *map(str, (*files, *COLUMNS, *flags))])
    return read(folder / "audit.csv")


def test_audit_finds_planted_codes(audited: tuple[Path, str], rows: pd.DataFrame):
    folder, said = audited
    found = read(folder / "audit.csv")
    lines = {int(line) for cell in found["lines"] for line in cell.split()}
    assert (
        len({*rows.index[rows["planted"]] + 2} & lines) >= 10
        and "Wrote the 40 most suspect labels" in said
    )
    suspect = found[
        (found["hisco_1"] == "33110") & (found["alt_code_3"].isin(["61110", "80110"]))
    ].iloc[0]
    assert float(suspect["conf"]) < 0.5 < float(suspect["alt_prob_3"])
    by_coder = read(folder / "audit_by_coder.csv").set_index("coder")["suspect"].astype(float)
    assert by_coder["second"] > by_coder["first"] + 5
    assert read(folder / "audit_by_code.csv")["code"][0] == "33110"


def test_the_desk_and_training_read_an_audit(audited: tuple[Path, str], tmp_path: Path):
    path, columns = (
        audited[0] / "audit.csv",
        Columns(language_col="lang", target_cols=("hisco_1", "hisco_2")),
    )
    cards = in_order_of_worth(open_coded(path, columns), columns)
    assert len(cards) == 40 and list(cards)[:5] == ["occ1", "lang", "checked", "hisco_1", "hisco_2"]
    read(path).assign(checked="x").to_csv(tmp_path / "audit.csv", index=False)
    formatter = build_formatter("general", num_blocks=2)
    assert (
        len(LabelledFiles((tmp_path / "audit.csv",), ("hisco_1", "hisco_2"), formatter).read())
        == 40
    )


def test_audit_puts_codes_outside_the_key_first(
    rows: pd.DataFrame, tmp_path: Path, logged: list[str]
):
    rows = rows.head(300).copy()
    rows.loc[7, "hisco_1"] = "12345"
    first = audited_rows(tmp_path, rows, "--key", ROOT / "data" / "key.csv").iloc[0]
    assert (first["hisco_1"], first["note"], first["conf"]) == ("12345", "not in the key", "0")
    assert any("1 are not in the key" in line for line in logged)


@pytest.mark.parametrize(
    ("group", "name"), [("rows", "rows_group"), ("Code", "Code_group"), ("a/b", "a_b")]
)
def test_audit_counts_by_any_column(
    rows: pd.DataFrame, tmp_path: Path, group: str, name: str, capsys
):
    rows = rows.head(300).drop(columns="coder")
    rows = rows.assign(**{group: np.arange(300) % 20})
    audited_rows(tmp_path, rows, "--group-col", group)
    found = read(tmp_path / f"audit_by_{name}.csv")
    assert list(found)[1:] == ["rows", "suspect", "share"] and set(found.iloc[:, 0]) == {
        *map(str, range(20))
    }
    by_code = tmp_path / "audit_by_code.csv"
    assert read(by_code)["rows"].astype(int).sum() >= 300
    (tmp_path / "audit.csv").unlink()
    with pytest.raises(SystemExit):
        audited_rows(tmp_path, rows, "--group-col", group)
    assert (
        f"{by_code} already exists" in capsys.readouterr().err
        and not (tmp_path / "audit.csv").exists()
    )


def test_audit_restores_the_zeros_of_the_key_too(
    rows: pd.DataFrame, tmp_path: Path, logged: list[str]
):
    key = read(ROOT / "data" / "key.csv")
    key.assign(system_code=key["system_code"].str.lstrip("0")).to_csv(
        tmp_path / "key.csv", index=False
    )
    audited_rows(tmp_path, rows.head(300), "--zero-pad-codes", "--key", tmp_path / "key.csv")
    assert any("0 are not in the key" in line for line in logged)


def test_audit_refuses_what_it_can_not_compare(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    coded = write(tmp_path / "coded.csv", "occ1,hisco_1", "farmer,61110", "baker,61110")
    flags = ("--dataset", coded, "--target-cols", "hisco_1", "--output", tmp_path / "audit.csv")
    assert "nothing to compare labels with" in mistake(capsys, "audit", *flags)
    (tmp_path / "audit.csv").write_text("filled in")
    assert "Add --overwrite" in mistake(capsys, "audit", *flags)


def to_settle(
    folder: Path, first: pd.DataFrame, second: pd.DataFrame, *flags: object
) -> pd.DataFrame:
    """Return the rows on which two coders disagree."""
    for name, rows in (("a.csv", first), ("b.csv", second)):
        rows.to_csv(folder / name, index=False)
    files = (folder / "a.csv", folder / "b.csv", "--output", folder / "settle.csv")
    main(["agreement", *map(str, (*files, *COLUMNS, *flags))])
    return read(folder / "settle.csv")


@pytest.mark.parametrize("by", [(), ("--id-col", "id")])
def test_agreement_of_two_files(
    rows: pd.DataFrame, tmp_path: Path, by: tuple[str, ...], logged: list[str]
):
    first = rows.head(100).assign(id=range(100))
    second = (
        first.sample(frac=1, random_state=0).sort_values("occ1", kind="stable")
        if by
        else first.copy()
    )
    second.loc[[3, 50], "hisco_1"] = ["83990", "99999"]
    found, said = to_settle(tmp_path, first, second.iloc[:98], *by), "\n".join(logged)
    assert (
        set(found["other_hisco_1"]) <= {"83990", "99999"}
        and (found["hisco_1"] != found["other_hisco_1"]).all()
    )
    assert "98 rows have codes in both files; 2 and 0 rows" in said and "kappa" in said
    assert list(found)[:5] == ["occ1", "lang", "checked", "hisco_1", "prob_1"]


@pytest.mark.parametrize("by", [(), ("--id-col", "id")])
def test_a_row_without_a_code_keeps_its_place_in_agreement(
    tmp_path: Path, by: tuple[str, ...], logged: list[str]
):
    first = pd.DataFrame({"occ1": ["farmer", "farmer", "baker"], "id": [1, 1, 2], "lang": "en"})
    first["hisco_1"] = ["61110", "62105", "77610"]
    first["hisco_2"] = ""
    second = first.assign(hisco_1=["", "62105", "77610"])
    assert len(to_settle(tmp_path, first, second, *by)) == 0
    assert any("2 rows have codes in both files; 1 and 0 rows" in line for line in logged)


def test_agreement_matches_rows_by_their_ids_alone(
    rows: pd.DataFrame, tmp_path: Path, logged: list[str]
):
    first = rows.head(100).assign(id=[str(i) if i % 4 else "" for i in range(100)])
    second = first.assign(
        id=first["id"].where(first["id"] == "", first["id"] + ".0"), lang="unk", occ1="the same"
    )
    assert (
        len(to_settle(tmp_path, first, second.sample(frac=1, random_state=0), "--id-col", "id"))
        == 0
    )
    assert f"{tmp_path / 'a.csv'}: 25 rows without an id are left out." in logged
    assert any("75 rows have codes in both files; 0 and 0 rows" in line for line in logged)


def test_agreement_needs_two_files_with_the_same_rows(rows: pd.DataFrame, tmp_path: Path, capsys):
    one, other = tmp_path / "a.csv", tmp_path / "b.csv"
    rows.head(20).to_csv(one, index=False)
    rows.tail(5).assign(occ1="someone else").to_csv(other, index=False)
    for files, message in (((one, other), "have no row in common"), ((one,), "Name two files")):
        assert message in mistake(
            capsys, "agreement", *files, *COLUMNS, "--output", tmp_path / "settle.csv"
        )
