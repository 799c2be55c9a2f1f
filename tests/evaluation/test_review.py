"""What `histocoder review` gives a person to check."""

from pathlib import Path

import pandas as pd
import pytest
from archives import read
from conftest import PROGRAMS, cases, write

from histocoder.checkpoints.starter import STARTER
from histocoder.errors import UserError
from histocoder.evaluation.checked_file import earlier_rounds, next_step, words_to_correct
from histocoder.evaluation.review_file import Columns, review
from histocoder.tables.output import check_output


def reviewed(
    folder: Path, coded: pd.DataFrame | str, columns: Columns | None = None, budget: int = 5
) -> pd.DataFrame:
    """What is to be checked of a coded file, as it is written."""
    (folder / "out.csv").write_text(
        coded if isinstance(coded, str) else coded.to_csv(index=False), encoding="utf-8"
    )
    review(
        folder / "out.csv",
        folder / "review.csv",
        budget=budget,
        columns=columns or Columns(),
        overwrite=True,
    )
    return read(folder / "review.csv")


def test_review_takes_the_least_certain_and_most_frequent(tmp_path: Path, logged: list[str]):
    often = [("sure", "11111", 0.99)] * 30 + [("often", "22222", 0.9)] * 20
    rows = [*often, ("rare", "33333", 0.1), (None, None, None)]
    frame = pd.DataFrame(
        [(*row, row[-1]) for row in rows], columns=["occ1", "hisco_1", "prob_1", "conf"]
    )
    chosen = reviewed(tmp_path, frame, budget=2)
    assert list(chosen) == ["occ1", "checked", "hisco_1", "conf", "times"]
    assert "21 of 51 rows" in logged[0]
    # 2.0 and 0.9 rows are likely wrong; 0.3 of the sure one's
    assert chosen.to_numpy().tolist() == [
        ["often", "", "22222", "0.9", "20"],
        ["rare", "", "33333", "0.1", "1"],
    ]


def test_review_shows_spellings_of_one_answer_once(tmp_path: Path):
    answers = [
        ("væver", "da", "75400"),
        *[("Vaever", "Danish", "75400")] * 2,
        ("vaever", "da", "1"),
    ]
    frame = pd.DataFrame([*answers, ("VÆVER", "no", "75400")], columns=["occ1", "lang", "hisco_1"])
    chosen = reviewed(tmp_path, frame.assign(prob_1=0.5, conf=0.5))
    expected = [["Vaever", "Danish", "3"], ["vaever", "da", "1"], ["VÆVER", "no", "1"]]
    assert chosen[["occ1", "lang", "times"]].to_numpy().tolist() == expected


def test_review_tells_codes_from_alternatives(tmp_path: Path):
    coding = {
        "hisco_1": "61110",
        "prob_1": 0.7,
        "desc_1": "Farmer",
        "alt_hisco_2": "77610",
        "alt_prob_2": 0.2,
    }
    row = {
        "occupation": "farmer",
        **{f"pred_{name}": value for name, value in coding.items()},
        "pred_conf": 0.7,
    }
    named = Columns("occupation", target_cols=("code_a", "code_b"), run_input_col="occ1")
    chosen = reviewed(tmp_path, pd.DataFrame([row]), named)
    assert [
        *chosen
    ] == "occ1 checked code_a desc_1 code_b alt_hisco_2 alt_prob_2 conf times".split()
    assert chosen.iloc[0].tolist()[:6] == ["farmer", "", "61110", "Farmer", "", "77610"]


@cases(
    ("header", "run_col", "expected"),
    (
        "occ1,lang,pred_lang,hisco_1,prob_1,conf",
        None,
        ["lang", "xx"],
    ),  # predict --language, the file having lang
    ("occ1,lang,other,pred_hisco_1,pred_prob_1,pred_conf", "language", ["language", "da"]),
    ("occ1,da,other,hisco_1,prob_1,conf", "language", ["checked", ""]),
)
def test_review_names_languages_as_the_run_does(
    tmp_path: Path, header: str, run_col: str | None, expected: list[str]
):
    columns = Columns(target_cols=("hisco_1",), run_language_col=run_col)
    chosen = reviewed(tmp_path, f"{header}\nsmed,da,xx,83110,0.9,0.9\n", columns)
    assert [chosen.columns[1], chosen.iloc[0, 1]] == expected


@cases(
    ("content", "columns", "message"),
    (
        "occ1,hisco_1,prob_1,conf\na,61110,0.5,0.5\nb,61110,0.5,2\n",
        {},
        "line 3, conf: '2' is not a number from 0",
    ),
    (
        "occ1,conf,prob_1,hisco_1\na,0.5,0.5,61110\n",
        {},
        "column before 'prob_1' must be that of its codes",
    ),
    (
        "occ1,hisco_1,conf\na,61110,0.5\n",
        {},
        "has no column prob_1; give the output of histocoder predict",
    ),
    ("occ1,hisco_1,prob_1,conf\na,61110,0.5,0.5\n", {"input_col": "occ"}, "no column 'occ'"),
    (
        "times,hisco_1,prob_1,conf\na,61110,0.5,0.5\n",
        {"input_col": "times"},
        "Rename the column of descriptions",
    ),
)
def test_coded_files_that_people_have_spoilt(
    tmp_path: Path, content: str, columns: dict[str, str], message: str
):
    with pytest.raises(UserError, match=message):
        reviewed(tmp_path, content, Columns(**columns))
    assert not (tmp_path / "review.csv").exists()


def test_a_filled_in_review_is_not_replaced(tmp_path: Path):
    (tmp_path / "review.csv").write_text("mine")
    with pytest.raises(UserError, match="already exists"):
        review(tmp_path / "out.csv", tmp_path / "review.csv", budget=2)


CODED = "occ1,hisco_1,prob_1,conf\n" + "".join(
    f"{text},61110,0.5,0.5\n" for text in ("smed", "bonde", "dreng", "pige")
)


def test_marked_rows_are_never_replaced(tmp_path: Path):
    output = tmp_path / "review.csv"
    reviewed(tmp_path, CODED)
    reviewed(tmp_path, CODED)  # nothing is marked
    marked = output.read_text().replace("smed,,", "smed,x,")
    output.write_text(marked)
    (tmp_path / "review-2.csv").write_text("")
    for overwrite in (True, False):
        with pytest.raises(
            UserError, match=r"holds 1 row that a person has marked .*--output .*review-3.csv"
        ):
            review(tmp_path / "out.csv", output, budget=2, overwrite=overwrite)
    output.write_text(marked + "spoilt,x\n")
    with pytest.raises(UserError, match="a person has marked"):
        check_output(output, overwrite=True)  # as of every command
    assert output.read_text() == marked + "spoilt,x\n"


def test_rounds_leave_out_what_is_decided(tmp_path: Path, logged: list[str]):
    (tmp_path / "coded.csv").write_text(CODED)
    (tmp_path / "first.csv").write_text("occ1,checked,hisco_1\nSmed.,x,83110\nbonde,,61110\n")
    (tmp_path / "review.csv").write_text("occ1,checked,hisco_1\ndreng,x,99930\n")
    run = tmp_path / "run"
    run.mkdir()
    (run / "args.yaml").write_text(f"dataset: my.csv\ncorrections: [{tmp_path / 'first.csv'}]\n")
    output = tmp_path / "review-2.csv"
    rounds = earlier_rounds(output, run)
    assert [path.name for path in rounds] == ["first.csv", "review.csv"]
    chosen = review(tmp_path / "coded.csv", output, budget=9, decided_in=rounds)
    assert chosen["occ1"].tolist() == ["bonde", "pige"]
    assert "2 descriptions are decided in" in logged[0]
    assert "and left out" in logged[0]


def test_a_command_names_each_file_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "args.yaml").write_text(
        f"dataset: my.csv\ncorrections: [{tmp_path / 'review.csv'}]\n"
    )
    command = next_step("run/best", Path("review.csv"), tmp_path / "run", written_cols=())
    assert command.count("review.csv") == 1
    assert (
        next_step("run/best", Path("review-2.csv"), tmp_path / "run", written_cols=()).count(
            "review"
        )
        == 2
    )


def test_a_model_that_writes_two_codes_is_trained_on_two(tmp_path: Path):
    (tmp_path / "args.yaml").write_text("dataset: my.csv\ntarget_cols: [hisco_1]\n")
    for written_cols, ending in ((("hisco_1", "hisco_2"), " hisco_1 hisco_2"), (("hisco_1",), "")):
        words = words_to_correct("best", ["review.csv"], tmp_path, written_cols=written_cols)
        assert " ".join(words).partition(" --target-cols")[2] == ending


def test_what_the_box_proposed_trains_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", PROGRAMS)
    (tmp_path / "own-model").mkdir()
    command = next_step("box", Path("review.csv"), STARTER, written_cols=()).splitlines()[-1]
    assert command == "histocoder finetune --corrections review.csv --save-path own-model-2"


def test_marks_that_mean_no_leave_nothing_out(tmp_path: Path):
    (tmp_path / "coded.csv").write_text(CODED)
    marks = "smed,no,83110\nbonde,later,61110\ndreng,0,\npige,X,99930\n"
    (tmp_path / "review.csv").write_text(f"occ1,checked,hisco_1\n{marks}")
    output = tmp_path / "review-2.csv"
    rounds = earlier_rounds(output, tmp_path)
    chosen = review(tmp_path / "coded.csv", output, budget=9, decided_in=rounds)
    assert chosen["occ1"].tolist() == ["smed", "bonde", "dreng"]


@cases(
    ("rows", "message"),
    (
        ("smed,83110,0.9,0.9",),
        "All descriptions of .* are checked in .*: there is nothing to write",
    ),
    ((",,,",), "No row of .* has codes: code the file again"),
)
def test_nothing_to_check_is_said(tmp_path: Path, rows: tuple[str, ...], message: str):
    coded = write(tmp_path / "coded.csv", "occ1,hisco_1,prob_1,conf", *rows)
    decided = write(tmp_path / "review.csv", "occ1,checked,hisco_1", "smed,x,83110")
    output = tmp_path / "review-2.csv"
    with pytest.raises(UserError, match=message):
        review(coded, output, budget=9, decided_in=[decided])
    assert not output.exists()


def test_a_round_without_a_checked_row_is_none(tmp_path: Path):
    (tmp_path / "review.csv").write_text("occ1,checked,hisco_1\nsmed,?,83110\n")
    assert earlier_rounds(tmp_path / "review-2.csv", tmp_path) == []


@pytest.fixture
def rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a first round of review, which is the current one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", PROGRAMS)
    (tmp_path / "review.csv").write_text("occ1,checked,hisco_1\nsmed,x,83110\n")
    (tmp_path / "run").mkdir()
    return tmp_path


@cases(
    ("model", "settings", "expected"),
    ("box", "", "finetune --corrections review.csv review-2.csv --save-path"),
    ("run", "dataset: my.csv", "--corrections review.csv review-2.csv --save-path"),
    ("run", "dataset: review.csv", "--corrections review-2.csv --save-path"),
    ("run", "{}", "--corrections review.csv review-2.csv --dataset"),
)
def test_a_second_round_trains_on_the_first(rounds: Path, model: str, settings: str, expected: str):
    run = STARTER if model == "box" else rounds / "run"
    if model == "run":
        (run / "args.yaml").write_text(settings)
    assert expected in next_step(model, Path("review-2.csv"), run, written_cols=())
