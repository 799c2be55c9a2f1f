"""The first pages, followed as a new user would: each command is typed as it is printed, in order,
in one folder.
"""

import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest
from conftest import PROGRAMS, ROOT, TITLES, environment, program, write_table

PAGES = (
    "README.md",
    "docs/quick-start.md",
    "docs/tutorial.md",
    "docs/data.md",
    "docs/prediction.md",
    "docs/evaluation.md",
)
OTHERS_FILES = (
    *("hsn.csv", "hsn_classes.csv", "titles.csv", "compared.csv"),
    *("hf://", "PATH", "OccCANINE", "last.bin", "nl/best", "--save-path nl"),
)
"""Parts of commands that need files which a reader has to fetch."""


def commands(page: str) -> Iterator[str]:
    """Yield the commands of histocoder and Python that a page prints, each on one line."""
    text = (ROOT / page).read_text(encoding="utf-8")
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    for language, block in blocks:
        if language not in ("", "sh", "bash"):
            continue
        joined = block.replace("\\\n", " ")
        for command in re.findall(
            r'^(?:histocoder [^\n]*|python -c "[^"]*")', joined, re.MULTILINE
        ):
            is_runnable = (
                not any(name in command for name in OTHERS_FILES) and "serve" not in command
            )
            if is_runnable:
                yield command


@pytest.mark.slow
def test_pages_run_as_printed_in_one_folder(tmp_path: Path):
    write_table(tmp_path / "table.csv", two_codes=True, copies=3)
    table = pd.read_csv(tmp_path / "table.csv", dtype=str)
    table.to_csv(tmp_path / "my.csv", index=False)
    table.head(80).assign(year="1801", parish="Aa").to_csv(tmp_path / "checked.csv", index=False)
    pd.DataFrame({"occ1": [*TITLES] * 3, "lang": "en"}).to_csv(tmp_path / "census.csv", index=False)

    # the sample data, cut so that the tutorial's training takes seconds
    shutil.copytree(ROOT / "data", tmp_path / "data")
    for name, num_rows in (("train.csv", 900), ("val.csv", 150)):
        path = tmp_path / "data" / name
        pd.read_csv(path, dtype=str).head(num_rows).to_csv(path, index=False)

    typed = []
    for page in PAGES:
        for command in commands(page):
            typed.append(command)
            words = shlex.split(command)
            ended = program(
                *words,
                cwd=tmp_path,
                env=environment(PYTHONPATH=str(ROOT), PATH=PROGRAMS),
                check=False,
            )
            assert ended.returncode == 0, f"{page}: {command}\n{ended.stderr[-2000:]}"
            if " review " in command and "--apply" not in command:
                mark_first_rows(tmp_path / output_of(words, "review.csv"))
    assert len(typed) > 20 and sum("finetune" in command for command in typed) >= 7
    assert (tmp_path / "archive_checked.csv").is_file() and (
        tmp_path / "archive-2" / "report.html"
    ).is_file()


def output_of(words: list[str], default: str) -> str:
    return words[words.index("--output") + 1] if "--output" in words else default


def mark_first_rows(path: Path) -> None:
    """Mark two rows of a file to correct, as a person would."""
    rows = pd.read_csv(path, dtype=str)
    rows["checked"] = ["x" if row < 2 else None for row in range(len(rows))]
    rows.to_csv(path, index=False)
