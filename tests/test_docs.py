"""The documentation agrees with the program, its links lead to files and headings, and its
notebooks run.
"""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import PROGRAMS, ROOT, environment

from docs.flags import PAGE, with_tables
from histocoder import __version__

PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
LINKING = sorted(
    {
        path
        for at in ("*.md", ".github/**/*.md", "benchmarks/**/*.md", "data/*.md", "docs/*.[mi]*")
        for path in ROOT.glob(at)
    }
    - {ROOT / "docs" / "benchmarks.md"}
)
"""Without the page that includes BENCHMARKS.md, whose links to notes docs/notes.py adds to the site."""
OF_LAUNCHERS = (
    "standalone nproc_per_node nnodes node_rank master_addr master_port max-restarts "
    "multi_gpu num_processes master"
)
OF_SLURM = "nodes ntasks-per-node gpus-per-node kill-on-bad-exit"
OF_OTHERS = "tables decisions wheel logdir no-deps directory rm user gpus build-arg"
OTHERS = (
    f"{OF_LAUNCHERS} {OF_SLURM} {OF_OTHERS} help help-all no- fsdp-".split()
)  # and names with … behind


def test_what_is_promised_has_its_tests():
    named = re.findall(
        r"`(tests/[^`]+)`", (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
    )
    assert len(named) > 10 and all((ROOT / path).exists() for path in named)


def test_stations_of_a_row_exist():
    page = (ROOT / "docs" / "how-it-is-built.md").read_text(encoding="utf-8")
    stations = re.findall(r"^\| `([\w/.]+): ([\w.]+)`", page, re.MULTILINE)
    assert len(stations) > 25
    for path, name in stations:
        source = (ROOT / "histocoder" / path).read_text(encoding="utf-8")
        for part in name.split("."):
            assert re.search(rf"(def|class) {part}\b", source), f"{path}: {name}"


def test_flag_tables_are_those_of_programs():
    page = PAGE.read_text(encoding="utf-8")
    assert with_tables(page) == page, "run make docs"
    assert (
        page.count("| `--") > 80
        and with_tables(page.replace("| `--seed N` |", "| `--sed N` |")) == page
    )


def test_flags_named_in_pages_exist():
    rows = re.findall(r"^\| `--.*", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    flags = {*re.findall(r"`--([\w-]+)", "".join(rows)), *OTHERS}
    named = {
        *re.findall(
            r"(?<![\w-])--([a-z][\w-]*)",
            "".join(page.read_text(encoding="utf-8") for page in PAGES),
        )
    }
    assert len(named) > 100 and named <= flags, named - flags


def test_version_is_the_same_everywhere():
    citation = re.search(
        r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(encoding="utf-8"), re.MULTILINE
    )
    changes = re.search(
        r"^## \[?([0-9.]+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert citation is not None and changes is not None and citation[1] == changes[1] == __version__


def test_first_pages_and_help_need_no_glossary():
    words = "by the recipe|flat head|experts?|block size|refit|checkpoints?"
    jargon = re.compile(rf"(?<![\w-])({words})(?!\w)|\.venv/bin/(?!activate)", re.I)
    pages = [
        ROOT / "docs" / f"{name}.md"
        for name in ("index", "quick-start", "tutorial", "desk", "configuration")
    ]
    texts = [
        ROOT / "README.md",
        *pages,
        *(ROOT / "histocoder" / "desk" / "web" / "static").glob("*.*"),
    ]
    assert len(texts) > 10
    found = {path.name: jargon.search(path.read_text(encoding="utf-8")) for path in texts}
    assert {name: one[0] for name, one in found.items() if one} == {}


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def text_of(path: Path) -> str:
    """Markdown of a page or a notebook, with the files that it includes, without what it shows as
    code.
    """
    if path.suffix not in (".md", ".ipynb"):
        return ""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        cells = json.loads(text)["cells"]
        text = "\n\n".join(
            "".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown"
        )
    text = re.sub(
        r'^--8<-- "([^:"]+)"$', lambda found: text_of(ROOT / found[1]), text, flags=re.MULTILINE
    )
    return re.sub(r"^( *)```.*?^\1```", "", text, flags=re.MULTILINE | re.DOTALL)


def anchors_of(path: Path) -> Iterator[str]:
    """What a link can name behind # in a page."""
    for heading in re.findall(r"^#+ +(.+?) *$", text_of(path), flags=re.MULTILINE):
        yield re.sub(
            r"[^\w\- ]", "", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower()
        ).replace(" ", "-")


def links_of(path: Path) -> list[str]:
    """Targets of a page's links and pictures, but for those on the web."""
    text = re.sub(r"`[^`\n]*`", "", text_of(path))
    targets = re.findall(r"\]\(([^)\s]+)[^)]*\)", text) + re.findall(
        r"^\[[^]]+\]: +(\S+)", text, flags=re.MULTILINE
    )
    return [target for target in targets if not re.match(r"https?://|mailto:", target)]


@pytest.mark.parametrize("path", LINKING, ids=name_of)
def test_links_lead_somewhere(path: Path):
    for link in links_of(path):
        name, _, anchor = link.partition("#")
        target = (path.parent / name).resolve() if name else path
        assert target.is_relative_to(ROOT) and target.exists(), f"{link}: no such file"
        is_page = target.suffix in (".md", ".ipynb")
        assert not (anchor and is_page) or anchor in anchors_of(target), f"{link}: no such heading"


def test_wrong_anchors_are_not_found():
    assert sum(len(links_of(path)) for path in LINKING) > 100
    assert "effective-batch" not in anchors_of(ROOT / "docs" / "multi-gpu.md")
    assert "the-effective-batch" in anchors_of(ROOT / "docs" / "multi-gpu.md")


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted((ROOT / "docs").glob("*.ipynb")), ids=name_of)
def test_notebooks_run(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    for name, value in environment(PYTHONPATH=str(ROOT), PATH=PROGRAMS).items():
        monkeypatch.setenv(name, value)
    shutil.copytree(ROOT / "data", tmp_path / "data")
    (tmp_path / "docs").mkdir()
    notebook = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(
        notebook, timeout=900, resources={"metadata": {"path": str(tmp_path / "docs")}}
    ).execute()
    printed = "".join(
        one["text"] for cell in notebook.cells for one in cell.get("outputs", []) if "text" in one
    )
    assert "exactly right: " in printed and "Saved in " in printed
