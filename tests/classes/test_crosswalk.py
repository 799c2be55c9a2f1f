"""Classes of codes: each row gets what the most specific row of a table says, and every blank is
counted.
"""

import itertools
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
from archives import read
from conftest import PROGRAMS, ROOT, cases, environment, mistake, program, shared, write

from histocoder.classes.crosswalk import Crosswalk
from histocoder.cli.main import main
from histocoder.config.prediction import ClassOptions
from histocoder.inference.provenance import provenance_file
from histocoder.tables.table import fingerprint

HEADER = "hisco,status,relation,product,hisclass,socpo"
ROWS = """61110,,,,8,3
61110,12,,,8,4
61110,33,,,10,1
61110,,11,,-1,3
61110,33,,2,12,1
61110,33,11,,-1,999
61110,33,11,2,9,2
61110,,,2,5,5
80110,21,,,6,3
80110,22,,,7,3
1110,-9,-9,-9,2,5
-1,-9,-9,-9,-1,-9
99999,,31,,4,2
99999,,31,,5,2""".splitlines()


@pytest.fixture
def crosswalk(tmp_path: Path) -> Path:
    return write(tmp_path / "crosswalk.csv", HEADER, *ROWS)


def classes(table: Path, data: Path, *flags: object) -> tuple[list[dict[str, str]], Any]:
    """Return the rows that the command writes, and what it says of them in JSON, which must add up
    to them.
    """
    output = data.with_name("out.csv")
    main([*map(str, ("classes", "--table", table, "--input", data, "--output", output, *flags))])
    whole = json.loads(provenance_file(output).read_text())
    told, rows = whole["classes"][0], read(output).to_dict("records")
    assert whole["output"] == output.name and whole["input"] == {
        "file": data.name,
        "sha256": fingerprint(data),
    }
    for column, counts in told["counts"].items():
        without = "ambiguous", "no value in the table", "code not in the table", "no code"
        assert sum(counts.values()) == len(rows)
        assert sum(counts.get(how, 0) for how in without) == sum(row[column] == "" for row in rows)
    return rows, told


def by_brute_force(code: str, given: tuple[str, ...], column: str) -> str:
    """Return the value of the best of all rows that match; status weighs most, and product
    least.
    """
    rows = [dict(zip(HEADER.split(","), row.split(","), strict=True)) for row in ROWS]
    of_code, none = (
        [row for row in rows if code in (row["hisco"].zfill(5), row["hisco"])],
        ("", "-9"),
    )
    best: dict[tuple[bool, ...], set[str]] = {}
    for row in of_code:
        own = [row[name] for name in ("status", "relation", "product")]
        if all(cell in none or cell == one for cell, one in zip(own, given, strict=True)):
            best.setdefault(tuple(cell not in none for cell in own), set()).add(row[column])
    values = best[max(best)] if best else {row[column] for row in of_code}
    return "" if len(values) != 1 or values & {"-1", "-9", "999"} else values.pop()


def test_matching_is_that_of_brute_force(crosswalk: Path, tmp_path: Path):
    codes = ("61110", "80110", "01110", "-1", "99999", "12345", "")
    qualifiers = itertools.product(("", "12", "21", "33"), ("", "11", "31"), ("", "2", "7"))
    cells = [(code, *some) for some in qualifiers for code in codes]
    order = np.random.default_rng(0).integers(0, len(cells), 500)
    lines = [",".join(("text", *cells[i])) for i in (*range(len(cells)), *order)]
    rows, told = classes(
        crosswalk, write(tmp_path / "data.csv", "occ1,hisco_1,status,relation,product", *lines)
    )
    for (row, line), column in itertools.product(
        zip(rows, lines, strict=True), ("hisclass", "socpo")
    ):
        _, code, *given = line.split(",")
        assert row[column] == by_brute_force(code, tuple(given), column), line
    ways = {"exact", "without product", "without relation, product", "all rows of the code agree"}
    assert ways <= {*told["counts"]["socpo"]}


def test_zeros_and_decimals_do_not_matter(crosswalk: Path, tmp_path: Path):
    assert Crosswalk(crosswalk, ClassOptions()).find("1110.0") == Crosswalk(
        crosswalk, ClassOptions()
    ).find("01110")
    numbers = pyarrow.table({"hisco": [1110.0, 61110.0, None], "status": [None, 33.0, None]})
    pyarrow.parquet.write_table(numbers, tmp_path / "numbers.parquet")
    rows, _ = classes(crosswalk, tmp_path / "numbers.parquet")
    assert [row["hisclass"] for row in rows] == ["2", "10", ""]


def test_several_codes_get_numbered_columns(crosswalk: Path, tmp_path: Path):
    data = write(
        tmp_path / "data.csv",
        "id,hisco_1,prob_1,hisco_2,prob_2,St",
        "a,61110,0.9,01110,0.8,33",
        "b,,,,,",
    )
    rows, told = classes(
        crosswalk, data, "--status-col", "St", "--value-cols", "HISCLASS", "--columns", "my_"
    )
    assert [*rows[0]] == "id hisco_1 prob_1 hisco_2 prob_2 St my_hisclass_1 my_hisclass_2".split()
    assert [*rows[0].values()] == "a 61110 0.9 01110 0.8 33 10 2".split()
    assert told["columns"]["status"] == "St" and told["columns"]["codes"] == ["hisco_1", "hisco_2"]
    assert told["counts"]["my_hisclass_2"] == {"without status": 1, "no code": 1}


def test_a_table_of_codes_alone(tmp_path: Path, logged: list[str]):
    data = write(tmp_path / "data.csv", "hisco,status", "61110,", "61110,21", "01110,", "77777,")
    rows, told = classes(
        write(tmp_path / "t.csv", "HISCO;Class", "61110;a", "1110;-1"), data, "--none", "x"
    )
    assert [row["Class"] for row in rows] == ["a", "a", "-1", ""] and len(told["sha256"]) == 64
    assert told["counts"]["Class"] == {"exact": 2, "without status": 1, "code not in the table": 1}
    assert (
        "Class: 50.0 % of 4 rows with a code by exact matches, 75.0 % with fallbacks (exact 2, "
        in logged[-2]
    )


@cases(
    ("header", "flags", "message"),
    ("hisco_1,hisclass", (), "already has a column 'hisclass'. Choose a prefix for new ones"),
    ("code,x", (), "data.csv has no column hisco_1. Name its columns of codes with --code-cols."),
    ("hisco_1,x", ("--value-cols", "hiscam"), "has no column 'hiscam'"),
    ("hisco_1,x", ("--relation-col", "rel"), "has no column 'rel'"),
    (
        "hisco_1,x",
        ("--value-cols", "hisclass", "--output", "data.csv", "--overwrite"),
        "is the input itself",
    ),
    (
        "hisco_1,x",
        ("--output", "crosswalk.csv", "--overwrite"),
        "is the input itself, crosswalk.csv",
    ),
    ("hisco_1,x", ("--table", "data.csv"), "has no column 'hisco'"),
    ("hisco_1,x", ("--output", "old.csv"), "already exists. Add --overwrite"),
    ("hisco_1,x", ("--output", "out.doc"), ".doc files can't be written"),
)
def test_mistakes_are_one_sentence(
    header: str, flags: tuple, message: str, crosswalk: Path, monkeypatch, capsys
):
    monkeypatch.chdir(crosswalk.parent)
    write(Path("data.csv"), header, "61110,1")
    write(Path("old.csv"), "mine")
    before = {path: path.read_bytes() for path in Path().iterdir()}
    given = ("--table", "crosswalk.csv", "--input", "data.csv", "--output", "out.csv")
    assert message in mistake(capsys, "classes", *given, *flags)
    assert {path: path.read_bytes() for path in Path().iterdir()} == before


def test_groups_of_occ1950_are_added_without_a_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    data = write(
        tmp_path / "data.csv", "id,occ1950_1,status", "a,070,21", "b,690,", "c,,", "d,999,"
    )
    given = ("classes", "--input", str(data), "--output", str(tmp_path / "out.csv"))
    main([*given, "--levels", "major"])
    assert read(tmp_path / "out.csv")["major"].tolist() == ["000-099", "600-690", "", "980-999"]
    told = json.loads(provenance_file(tmp_path / "out.csv").read_text())["classes"][0]
    assert told["counts"] == {"major": {"exact": 3, "no code": 1}} and told["columns"] == {
        "codes": ["occ1950_1"]
    }
    for flags, message in (
        ((), "Give a table of classes with --table, or groups with --levels."),
        (
            ("--levels", "major", "minor", "--overwrite"),
            "OCC1950 has major groups alone; give --levels major.",
        ),
        (("--levels", "major", "--value-cols", "x"), "--value-cols needs --table"),
    ):
        assert message in mistake(capsys, *given, *flags)


@cases(
    ("header", "row", "data", "message"),
    ("hisco,status,hisclass", "61110,,8", "hisco,status,status", "several columns 'status', on"),
    ("hisco,major,hisclass", "61110,M,8", "hisco", "Two new columns would be called 'major'"),
)
def test_names_that_clash_are_refused(
    tmp_path: Path, capsys, header: str, row: str, data: str, message: str
):
    table = write(tmp_path / "table.csv", header, row)
    rows = write(tmp_path / "in.csv", data, "61110" + "," * data.count(","))
    flags = ("--table", table, "--input", rows, "--output", tmp_path / "out.csv")
    assert message in mistake(capsys, "classes", *flags, "--levels", "major")
    assert not (tmp_path / "out.csv").exists()


def test_damaged_input_leaves_nothing(crosswalk: Path, tmp_path: Path):
    with pytest.raises(SystemExit):
        classes(
            crosswalk,
            write(tmp_path / "data.csv", "hisco_1,x", *["61110,1"] * 150_000, "61110,1,2"),
        )
    assert {path.name for path in tmp_path.iterdir()} == {"crosswalk.csv", "data.csv"}


def test_published_classes_cover_dutch_titles(tmp_path: Path):
    data = tmp_path / "data.csv"
    data.symlink_to(shared("data/dutch_titles.csv"))
    rows, told = classes(shared("reference/hsn_classes.csv"), data, "--value-cols", "hisclass")
    counts = told["counts"]["hisclass"]
    assert len(rows) == 107_749 and counts["exact"] / len(rows) > 0.9
    assert set(counts) <= {"exact", "ambiguous", "no value in the table"}


def test_the_tutorial_is_what_happens(tmp_path: Path):
    page = (ROOT / "docs" / "table-to-hisclass.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    commands = "\n".join(text for kind, text in blocks if not kind)
    script = f'set -e\nhistocoder() {{ python -m histocoder "$@"; }}\n{commands}'
    printed = program(
        "bash", "-c", script, cwd=tmp_path, env=environment(PYTHONPATH=str(ROOT), PATH=PROGRAMS)
    ).stdout
    shown = [text for kind, text in blocks if kind == "text"]
    assert len(shown) == 2 and all(text in printed for text in shown)
    cells = [
        [cell.strip() for cell in line.split("|")[1:-2]]
        for line in re.findall(r"^\|.*\|$", page, re.MULTILINE)
    ]
    header, _, *rows = cells[: cells.index(["illegible", "", "", ""]) + 1]
    assert rows == read(tmp_path / "classes.csv")[header].to_numpy().tolist()
