import re

from conftest import ROOT

from docs.flags import PAGE, with_tables
from histocoder import __version__

PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
OF_LAUNCHERS = "standalone nproc_per_node nnodes node_rank master_addr master_port max-restarts multi_gpu num_processes"
OF_SLURM = "nodes ntasks-per-node gpus-per-node kill-on-bad-exit"
OF_OTHER_PROGRAMS = "wheel logdir no-deps directory"
OF_DOCKER = "rm user gpus build-arg"
OTHERS = {
    f"--{name}" for name in f"{OF_LAUNCHERS} {OF_SLURM} {OF_OTHER_PROGRAMS} {OF_DOCKER} help help-all no- fsdp-".split()
}  # and names with … behind


def test_what_is_promised_has_its_tests():
    named = re.findall(r"`(tests/[^`]+)`", (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8"))
    assert len(named) > 10 and all((ROOT / path).exists() for path in named)


def test_flag_tables_are_those_of_programs():
    page = PAGE.read_text(encoding="utf-8")
    assert with_tables(page) == page, "run make docs"
    assert page.count("| `--") > 80 and with_tables(page.replace("| `--seed N` |", "| `--sed N` |")) == page


def test_flags_named_in_pages_exist():
    flags = set(
        re.findall(r"`(--[\w-]+)", "".join(re.findall(r"^\| `--.*", PAGE.read_text(encoding="utf-8"), re.MULTILINE)))
    )
    named = {
        flag for page in PAGES for flag in re.findall(r"(?<![\w-])--[a-z][\w-]*", page.read_text(encoding="utf-8"))
    }
    assert len(named) > 100 and named - flags <= OTHERS, named - flags - OTHERS


def test_version_is_the_same_everywhere():
    citation = re.search(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(encoding="utf-8"), re.MULTILINE)
    changes = re.search(r"^## \[?([0-9.]+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert citation is not None and changes is not None and citation[1] == changes[1] == __version__


def test_first_pages_and_help_need_no_glossary():
    jargon = re.compile(
        r"(?<![\w-])(by the recipe|flat head|experts?|block size|refit|checkpoints?)(?!\w)|\.venv/bin/(?!activate)",
        re.I,
    )
    pages = (
        "README.md",
        *(f"docs/{name}.md" for name in ("index", "quick-start", "tutorial", "desk", "configuration")),
    )
    desk = sorted((ROOT / "histocoder" / "desk" / "static").glob("*.*"))
    texts = {path: path.read_text(encoding="utf-8") for path in (*(ROOT / page for page in pages), *desk)}
    assert len(texts) > 10
    assert {path.name: found[0] for path, text in texts.items() if (found := jargon.search(text))} == {}
