import re

from conftest import ROOT


def test_what_is_promised_has_its_tests():
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")))
    there = {name for path in ROOT.glob("tests/*.py") for name in re.findall(r"def (test_\w+)", path.read_text())}
    assert len(named) > 40 and named <= there
