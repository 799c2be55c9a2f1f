"""Links in the documentation lead to files, and their anchors to headings; nothing is asked of the network."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import ROOT

PAGES = sorted({*ROOT.glob("*.md"), *ROOT.glob(".github/**/*.md"), *ROOT.glob("data/*.md"), *ROOT.glob("docs/*.[mi]*")})


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def text_of(path: Path) -> str:
    """Markdown of a page or a notebook, with the files that it includes, without what it shows as code."""
    if path.suffix not in (".md", ".ipynb"):
        return ""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        cells = json.loads(text)["cells"]
        text = "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    text = re.sub(r'^--8<-- "([^:"]+)"$', lambda found: text_of(ROOT / found[1]), text, flags=re.MULTILINE)
    return re.sub(r"^( *)```.*?^\1```", "", text, flags=re.MULTILINE | re.DOTALL)


def anchors_of(path: Path) -> Iterator[str]:
    """What a link can name behind # in a page."""
    for heading in re.findall(r"^#+ +(.+?) *$", text_of(path), flags=re.MULTILINE):
        plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower()
        yield re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")


def links_of(path: Path) -> list[str]:
    """Targets of a page's links and pictures, but for those on the web."""
    text = re.sub(r"`[^`\n]*`", "", text_of(path))
    targets = re.findall(r"\]\(([^)\s]+)[^)]*\)", text) + re.findall(r"^\[[^]]+\]: +(\S+)", text, flags=re.MULTILINE)
    return [target for target in targets if not re.match(r"https?://|mailto:", target)]


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_links_lead_somewhere(path: Path):
    for link in links_of(path):
        name, _, anchor = link.partition("#")
        target = (path.parent / name).resolve() if name else path
        assert target.is_relative_to(ROOT) and target.exists(), f"{link}: no such file"
        is_page = target.suffix in (".md", ".ipynb")
        assert not (anchor and is_page) or anchor in anchors_of(target), f"{link}: no such heading"


def test_wrong_anchors_are_not_found():
    assert sum(len(links_of(path)) for path in PAGES) > 100
    assert "effective-batch" not in anchors_of(ROOT / "docs" / "multi-gpu.md")
    assert "the-effective-batch" in anchors_of(ROOT / "docs" / "multi-gpu.md")
