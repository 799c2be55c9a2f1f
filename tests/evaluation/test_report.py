import html
import json
import re
from collections import Counter
from pathlib import Path

import pandas as pd
import pytest
from models import few_examples, tiny_coder

import histocoder
from histocoder.data.examples import Examples
from histocoder.evaluation.baselines import Baselines
from histocoder.evaluation.evaluator import Evaluation, evaluate
from histocoder.evaluation.report import write_report
from histocoder.evaluation.scores import named_groups
from histocoder.evaluation.summary import summary
from histocoder.inference.known import Known

LOG = """step,epoch,train_loss,val_loss,seq_acc,token_acc,flat_acc,greedy_seq_acc
10,1,0.5,,,,,
20,1,0.25,,,,,
20,,,0.3,50,60,20,45
"""


class Page:
    """Links, tags and text of a page in which all that is opened is closed."""

    def __init__(self, path: Path) -> None:
        self.source = path.read_text(encoding="utf-8")
        self.links = re.findall(r'(?:src|href)="([^"]*)"', self.source)
        self.tags = re.findall(r"<(\w+)", self.source)
        self.text = html.unescape(re.sub(r"<[^>]*>", "", self.source))
        closed = Counter(re.findall(r"</(\w+)", self.source))
        assert Counter(tag for tag in self.tags if tag not in ("img", "meta")) == closed


@pytest.fixture(scope="module")
def evaluation() -> Evaluation:
    trained = Baselines(few_examples(), Known(), max_size=0)
    trained.add(Examples.of(["farmer"] * 3, ["en"] * 3, pd.DataFrame({"hisco_1": ["61110"] * 3})))
    return evaluate(tiny_coder(), few_examples(), trained=trained)


@pytest.fixture(scope="module")
def folder(evaluation: Evaluation, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "made"
    folder.mkdir()
    (folder / "logs.csv").write_text(LOG)
    path = write_report(
        folder, evaluation, tiny_coder(), title="A <small> model & its", logs=folder / "logs.csv"
    )
    assert path == folder / "report.html"
    return folder


def test_the_page_stands_alone(folder: Path, evaluation: Evaluation):
    figures = (
        "training",
        "production",
        "calibration",
        "languages",
        "digits",
        "code_seen",
        "text_seen",
    )
    assert {path.name for path in folder.iterdir()} == {
        "logs.csv",
        "metrics.json",
        "report",
        "report.html",
    }
    assert {path.stem for path in (folder / "report").iterdir()} == {*figures}
    assert json.loads((folder / "metrics.json").read_text(encoding="utf-8")) == evaluation.metrics
    page = Page(folder / "report.html")
    images = [link for link in page.links if link.startswith("data:image/png;base64,")]
    anchors = [link for link in page.links if link not in images]
    assert len(images) == 7
    assert anchors and all(
        link.startswith("#") and f'id="{link[1:]}"' in page.source for link in anchors
    )
    assert page.tags.count("script") == 1 and not re.search(r"http|url\(|@import", page.source)


def test_the_text_of_the_page(folder: Path, evaluation: Evaluation):
    page = Page(folder / "report.html")
    assert not re.search("<script>alert|<small> model|<b>Farmer", page.source)  # all is escaped
    assert "<script>alert('baker')</script>" in page.text and "A <small> model & its" in page.text
    codes = page.text.partition("true codes (")[2].partition("Most frequent confusions")[0]
    assert (
        all(one["code"] in codes for one in evaluation.metrics["by_code"])
        and "General <b>Farmer</b>" in codes
    )
    assert (
        page.source.count("<table>") == page.source.count("<caption>")
        and "Most confident errors" in page.text
    )
    first_screen, _, rest = page.text.partition("What to leave to a person")
    assert "F1" not in first_screen and "Danish" in rest
    assert page.source.index('id="most-confident-errors"') < page.source.index('id="languages"')
    assert "Command" in page.text and f"histocoder {histocoder.__version__}, torch" in page.text


def test_groups_and_what_to_leave_to_a_person(tmp_path: Path):
    years = named_groups(["1801", "1802", "1801", None, "", "1801"])
    found = evaluate(tiny_coder(), few_examples(), groups={"a <year>": years})
    groups = [(one["group"], one["n"]) for one in found.metrics["by_group"]["a <year>"]]
    assert groups == [("", 1), ("(blank)", 1), ("1801", 3), ("1802", 1)]
    found.metrics["answer"]["production"]["accuracy"] = [None, *[1.0] * 50, *[0.5] * 50]
    found.metrics["answer"]["by_language"]["da"]["n"] = 1  # so that it has no bar
    page = Page(write_report(tmp_path, found, tiny_coder(), title="t"))
    assert (
        "calibration by a <year>" in page.text
        and "50\u00a0%\nleft to a person make 95" in page.text
    )
    assert not (tmp_path / "report" / "languages.png").exists() and "Danish" in page.text


def test_a_report_without_what_is_not_known(tmp_path: Path):
    examples = few_examples()
    examples.langs = ["en"] * len(examples)
    examples.codes["hisco_1"], examples.codes["hisco_2"] = "61110", None
    coder = tiny_coder()
    (tmp_path / "report").mkdir()
    (tmp_path / "report" / "training.png").write_bytes(b"an earlier report's")
    page = Page(
        write_report(
            tmp_path, evaluate(coder, examples), coder, title="t", logs=tmp_path / "no.csv"
        )
    )
    assert {p.stem for p in (tmp_path / "report").iterdir()} == {
        "production",
        "calibration",
        "digits",
    }
    assert not any(words in page.text for words in ("Languages", "Times seen", "Training"))


def test_the_summary_in_plain_words():
    scores = {"accuracy": 0.64, "conf": 0.9, "n": 1200}
    shares = [i / 100 for i in range(1, 101)]
    conf, accuracy = ([None, *(1 - lost * share for share in shares)] for lost in (1, 0.36))
    answer = {
        **{"overall": scores, "by_text_seen": {"0": {"n": 800, "accuracy": 0.5}, "1": scores}},
        **{
            "production": {"share": [0, *shares], "conf": conf, "accuracy": accuracy},
            "calibration": {"ece": 0.26},
        },
    }
    topk = {"overall": {"1": 0.7, "2": 0.8}}
    lines = summary(
        {"num_rows": 1200, "num_texts": 1200, "num_outside_key": 12, "answer": answer, "topk": topk}
    )
    expected = (
        (
            "description counted once, 64.0 %, or 71.2 % if the least certain 20 % are left to "
            "a person."
        ),
        "leave the least certain 87 %, those with a confidence below 0.87, to a person",
        "right for 70.0 % of all descriptions; one of the 2 most probable is right for 80.0 %",
        "The model is overconfident",
        "For 1.0 % the decoder wrote a code that is not in the key.",
        "800 of the descriptions do not occur in the training data; of these, 50.0 %",
    )
    for line, words in zip(lines, expected, strict=True):
        assert words in line.replace("\u00a0", " ")
    few = summary(
        {"num_rows": 20, "num_texts": 20, "num_outside_key": 0, "answer": answer, "topk": topk}
    )
    assert "20 distinct descriptions only: each may be wrong by 22 percentage points" in few[1]
    assert not any("leave the least certain 87" in line for line in few)
