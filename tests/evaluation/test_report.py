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
from histocoder.evaluation.evaluator import Evaluation, evaluate, named_groups
from histocoder.evaluation.metrics import (
    AnswerMetrics,
    Calibration,
    EvaluationMetrics,
    MeanScores,
    ProductionCurve,
    TopK,
    as_json,
)
from histocoder.evaluation.report import write_report
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
    baselines = Baselines(few_examples(), Known(), max_size=0)
    baselines.add(Examples.of(["farmer"] * 3, ["en"] * 3, pd.DataFrame({"hisco_1": ["61110"] * 3})))
    return evaluate(tiny_coder(), few_examples(), baselines=baselines)


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
    metrics = json.loads((folder / "metrics.json").read_text(encoding="utf-8"))
    assert metrics == as_json(evaluation.metrics)
    page = Page(folder / "report.html")
    images = [link for link in page.links if link.startswith("data:image/png;base64,")]
    anchors = [link for link in page.links if link not in images]
    assert len(images) == 7
    assert anchors
    assert all(link.startswith("#") and f'id="{link[1:]}"' in page.source for link in anchors)
    assert page.tags.count("script") == 1
    assert not re.search(r"http|url\(|@import", page.source)


def test_the_text_of_the_page(folder: Path, evaluation: Evaluation):
    page = Page(folder / "report.html")
    assert not re.search("<script>alert|<small> model|<b>Farmer", page.source)  # all is escaped
    assert "<script>alert('baker')</script>" in page.text
    assert "A <small> model & its" in page.text
    codes = page.text.partition("true codes (")[2].partition("Most frequent confusions")[0]
    assert [scores.code for scores in evaluation.metrics.by_code if scores.code not in codes] == []
    assert "General <b>Farmer</b>" in codes
    assert page.source.count("<table>") == page.source.count("<caption>")
    assert "Most confident errors" in page.text
    first_screen, _, rest = page.text.partition("What to leave to a person")
    assert "F1" not in first_screen
    assert "Danish" in rest
    assert page.source.index('id="most-confident-errors"') < page.source.index('id="languages"')
    assert "Command" in page.text
    assert f"histocoder {histocoder.__version__}, torch" in page.text


def test_groups_of_a_column_are_reported(tmp_path: Path):
    years = named_groups(["1801", "1802", "1801", None, "", "1801"])
    evaluation = evaluate(tiny_coder(), few_examples(), groups={"a <year>": years})
    groups = [(group.group, group.n) for group in evaluation.metrics.by_group["a <year>"]]
    assert groups == [("", 1), ("(blank)", 1), ("1801", 3), ("1802", 1)]
    page = Page(write_report(tmp_path, evaluation, tiny_coder(), title="t"))
    assert "calibration by a <year>" in page.text


def test_the_page_says_what_to_leave_to_a_person(tmp_path: Path):
    evaluation = evaluate(tiny_coder(), few_examples())
    evaluation.metrics.answer.production.accuracy = [None, *[1.0] * 50, *[0.5] * 50]
    page = Page(write_report(tmp_path, evaluation, tiny_coder(), title="t"))
    assert "50\u00a0%\nleft to a person make 95" in page.text


def test_a_language_of_one_row_has_no_bar(tmp_path: Path):
    evaluation = evaluate(tiny_coder(), few_examples())
    evaluation.metrics.answer.by_language["da"].n = 1
    page = Page(write_report(tmp_path, evaluation, tiny_coder(), title="t"))
    assert not (tmp_path / "report" / "languages.png").exists()
    assert "Danish" in page.text


@pytest.mark.parametrize("log", [None, "step,val_loss,seq_acc\n0,0.2,85\n"])
def test_a_report_without_what_is_not_known(tmp_path: Path, log: str | None):
    examples = few_examples()
    examples.langs = ["en"] * len(examples)
    examples.codes["hisco_1"], examples.codes["hisco_2"] = "61110", None
    coder = tiny_coder()
    (tmp_path / "report").mkdir()
    (tmp_path / "report" / "training.png").write_bytes(b"an earlier report's")
    logs = tmp_path / "logs.csv"  # missing, or of a run without a step
    if log is not None:
        logs.write_text(log)
    page = Page(write_report(tmp_path, evaluate(coder, examples), coder, title="t", logs=logs))
    assert {p.stem for p in (tmp_path / "report").iterdir()} == {
        "production",
        "calibration",
        "digits",
    }
    assert not any(words in page.text for words in ("Languages", "Times seen", "Training"))


def metrics(*, num_texts: int, num_outside_key: int = 0) -> EvaluationMetrics:
    """Figures of a model whose accuracy falls by 0.36 points with each point that is coded."""
    scores = MeanScores(1200, accuracy=0.64, precision=0.7, recall=0.7, f1=0.7, conf=0.9)
    unseen = MeanScores(800, accuracy=0.5, precision=0.6, recall=0.6, f1=0.6)
    shares = [i / 100 for i in range(1, 101)]
    answer = AnswerMetrics(
        overall=scores,
        by_language={},
        by_num_codes={},
        by_digits={},
        calibration=Calibration(ece=0.26, bins=[]),
        production=ProductionCurve(
            share=[0, *shares],
            accuracy=[None, *(1 - 0.36 * share for share in shares)],
            conf=[None, *(1 - share for share in shares)],
        ),
        by_text_seen={"0": unseen, "1": scores},
    )
    return EvaluationMetrics(
        num_rows=1200,
        num_texts=num_texts,
        num_true_outside_key=0,
        num_outside_key=num_outside_key,
        mode="greedy",
        answer=answer,
        topk=TopK({"1": 0.7, "2": 0.8}, by_language={}),
        confusions=[],
        attributes={},
        by_code=[],
        by_group={},
    )


def test_the_summary_in_plain_words():
    lines = summary(metrics(num_texts=1200, num_outside_key=12))
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


def test_few_descriptions_say_nothing_to_leave():
    _, few, *others = summary(metrics(num_texts=20))
    assert "20 distinct descriptions only: each may be wrong by 22 percentage points" in few
    assert "leave the least certain 87" not in " ".join(others)
