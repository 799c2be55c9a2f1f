"""Descriptions as models read them, and what is one description."""

import json
import shutil
import subprocess
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pytest
from conftest import ROOT

from histocoder.config import NORMALIZATIONS
from histocoder.text.characters import is_blank, without_blanks
from histocoder.text.normalize import description_keys, normalize, normalize_column

PLAIN = "schuhmacher"
SAME = (
    "\u017fchuhmacher",
    "\uff33CHUHMACHER",
    "schuh\u00admacher",
    "schuh\u200bmacher\ufeff",
    "\u200eSchuhmacher",
    "schu\u02b0macher",
)
OTHER_FORMS = {
    "\ufb01sherman": "fisherman",
    "1\u00bd acre": "1\u00bd acre",
    "2\u00b2": "2\u00b2",
    "M\u00aa": "ma",
    "\u0133s": "ijs",
}
INVISIBLE = (
    "",
    " ",
    "\u200b",
    "\u00ad",
    "\ufeff",
    "\u200e \u00a0",
    "\x00",
    "\u2060\ufe0f",
    "\u3164",
)
CASES = ROOT.parent / "shared" / "cases"


def test_marks_and_forms_make_no_difference():
    assert normalize(SAME, "lower2") == [PLAIN] * len(SAME)
    assert normalize([*OTHER_FORMS], "lower2") == [*OTHER_FORMS.values()]
    assert {*normalize(SAME, "lower_ascii2")} == {PLAIN} and {*normalize(SAME[2:5], "nfc2")} == {
        PLAIN,
        PLAIN.title(),
    }
    assert set(description_keys(SAME)) == {PLAIN}


def test_earlier_forms_are_read_as_before():
    for how in ("nfc", "lower"):
        assert normalize(["schuh\u00admacher", "\u017fchuh"], how) == [
            "schuh\u00admacher",
            "\u017fchuh",
        ]
    assert normalize(["schuh\u00admacher  A"], "lower_ascii") == ["schuhmacher  a"]


@pytest.mark.parametrize("how", NORMALIZATIONS)
def test_a_column_is_read_as_its_cells_are(how: str):
    texts = [*SAME, *OTHER_FORMS, *INVISIBLE, "a  b", "a\tb", "B&amp;B", "\x01x", None]
    expected = normalize([text for text in texts if text is not None], how)
    assert normalize_column(pa.array(texts), how).to_pylist() == [*expected, None]


def test_invisible_marks_alone_are_blank():
    visible = ["-", "\u00e6", "\u00bd", "\U0001f600", "\u6f22"]
    assert [is_blank(text) for text in (*INVISIBLE, *visible)] == [True] * len(INVISIBLE) + [
        False
    ] * len(visible)
    assert (
        without_blanks(pa.array([*INVISIBLE, None, *visible])).to_pylist()
        == [None] * (len(INVISIBLE) + 1) + visible
    )


def test_word_order_and_words_are_kept_apart():
    assert description_keys(
        ["Boot-maker.", "boot maker", "(boot) maker", "maker, boot", "bootmaker", "--"]
    ).tolist() == [
        *["boot maker"] * 3,
        *["maker boot", "bootmaker", "--"],
    ]


@pytest.mark.skipif(not CASES.is_dir(), reason="needs ../shared/cases")
def test_one_key_is_one_text_to_the_model():
    texts = pd.read_csv(CASES / "long_s.csv", keep_default_na=False)["occ1"].tolist()
    assert normalize(texts, "lower2") == normalize(
        [text.replace("\u017f", "s") for text in texts], "lower2"
    )
    texts = pd.read_csv(CASES / "invisible.csv", keep_default_na=False)["occ1"].tolist()
    read = [
        "shop keeper",
        "shop keeper",
        "shopkeeper",
        "farmer",
        "farmer",
        "stra\u00dfenkehrer",
        "stra\u00dfenkehrer",
    ]
    assert normalize(texts[:7], "lower2") == read
    assert all(map(is_blank, texts[7:10]))


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_the_browser_reads_as_python_does(tmp_path: Path):
    texts = [
        *SAME,
        *OTHER_FORMS,
        *INVISIBLE,
        "a\x85b \x1f c",
        "\u0140",
        "\u00b4",
        "\u0149",
        "\u33a4",
        "\u00b5",
        "\u0130",
        "\uff76\uff9e",
    ]
    page = (ROOT / "docs" / "browser" / "coder.js").read_text(encoding="utf-8")
    code = page[page.index("const SPACE") :].replace("export class", "class")
    names = [how for how in NORMALIZATIONS if "ascii" not in how]
    ask = (
        f"console.log(JSON.stringify({json.dumps(names)}.map((how) => "
        f"{json.dumps(texts)}.map(NORMALIZATIONS[how]))))"
    )
    (tmp_path / "page.mjs").write_text(code + ask, encoding="utf-8")
    ran = subprocess.run(
        ["node", tmp_path / "page.mjs"], capture_output=True, text=True, check=True
    )
    for how, answer in zip(names, json.loads(ran.stdout), strict=True):
        assert answer == normalize(texts, how)
