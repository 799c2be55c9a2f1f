"""The histocoder command, as a program."""

from __future__ import annotations

import io
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from conftest import DEADLINE, ROOT, environment, run, shared, write_table
from jobs import finetune
from models import CODES, save_tiny_model, tiny_model

from histocoder.checkpoints.model_files import change_config, save_model
from histocoder.checkpoints.occcanine import initial_weights
from histocoder.cli.arguments import build_parser as flags_of
from histocoder.cli.main import build_parser, main
from histocoder.config import FinetuneConfig
from histocoder.errors import UserError
from histocoder.evaluation import review as reviewing
from histocoder.evaluation.review import Columns, review
from histocoder.formatters import build_formatter
from histocoder.model import MixerModel


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def general(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with the general formatter, as `finetune.py` trains it."""
    folder = shutil.copytree(model, tmp_path_factory.mktemp("general") / "model")
    trained = tiny_model()
    formatter = build_formatter("general", num_blocks=2)
    config = replace(trained.config, formatter=formatter.to_config(), vocab_size=formatter.vocab_size)
    general = MixerModel(config, trained.encoder).eval()
    save_model(folder, config, general.state_dict(), tokenizer=general.tokenizer)
    return folder


def test_predict_prints_a_table(model: Path):
    out = run(
        "-m",
        "histocoder",
        "predict",
        "--model",
        model,
        "--language",
        "fi",
        "--mode",
        "topk",
        "--k",
        2,
        "a",
        "b",
    )
    assert out.stderr.startswith("The model does not know the language 'fi'")
    header, *rows = out.stdout.splitlines()
    assert header.split() == ["text", "hisco_1", "prob_1", "desc_1", "hisco_2", "prob_2", "desc_2", "conf"] or (
        "hisco_2" in header.split()
    )
    assert [row.split()[0] for row in rows] == ["a", "b"] and rows[0].split()[1] in CODES


def test_chunks_of_other_thresholds_are_another_models(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    copy, seen = shutil.copytree(model, tmp_path / "model"), []
    monkeypatch.setattr("histocoder.cli.predict.predict_file", lambda *_, model_id, **__: seen.append(model_id))
    for threshold in (0.5, 0.5, 0.25):
        change_config(copy, replace(tiny_model().config, thresholds={"*": threshold}))
        main(["predict", "--model", str(copy), "--input", "in.csv", "--output", "out.csv"])
    assert seen[0] == seen[1] != seen[2]


@pytest.mark.slow
@pytest.mark.parametrize("program", ["predict", "finetune.py"])
def test_a_closed_pipe_ends_predict_cleanly(program: str, model: Path, table: Path, tmp_path: Path):
    reading, writing = os.pipe()
    os.close(reading)
    predict = ["-m", "histocoder", "predict", "--model", str(model), "a"]
    command = predict if program == "predict" else finetune(table, tmp_path / "out", "--batch-size", 8)
    options: dict[str, Any] = {"cwd": ROOT, "env": environment(), "timeout": DEADLINE}
    streams: dict[str, Any] = {"stdout": writing, "stderr": subprocess.PIPE, "text": True}
    ended = subprocess.run([sys.executable, *command], check=False, **streams, **options)
    os.close(writing)
    assert ended.returncode == 128 + signal.SIGPIPE
    assert ended.stderr == "Stopped, because the program that read the output has ended.\n"


def test_output_that_can_not_take_all_characters(model: Path, monkeypatch: pytest.MonkeyPatch):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    main(["predict", "--model", str(model), "skrædersvend"])
    assert rb"skr\xe6dersvend" in written.getvalue()


def test_output_that_is_closed_or_full(model: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
    monkeypatch.setattr(sys, "stdout", None)
    main(["predict", "--model", str(model), "farmer"])
    with Path("/dev/full").open("w", encoding="utf-8") as full, pytest.raises(SystemExit) as ended:
        monkeypatch.setattr(sys, "stdout", full)
        main(["predict", "--model", str(model), "farmer"])
    assert ended.value.code == 2
    said = capfd.readouterr().err
    assert (
        said == "error: The output can't be written (No space left on device). Make room, and run the command again.\n"
    )


def test_closed_streams_do_not_end_training(table: Path, tmp_path: Path):
    args = finetune(table, tmp_path / "out", "--batch-size", 8, "--max-steps", 2)
    code = "import os, runpy, sys; sys.stdout = sys.stderr = None; os.close(1); os.close(2); sys.argv = {0}; "
    code += "runpy.run_path(sys.argv[0], run_name='__main__')"
    run("-c", f"import sys; sys.path.insert(0, ''); {code.format(args)}")
    assert (tmp_path / "out" / "model.safetensors").exists()


WRITES_ERRORS = """
import logging, os, sys, warnings
from tqdm import tqdm
from histocoder.cli.script import run_script
from histocoder.errors import Notice

def main():
    print("a message", file=sys.stderr, flush=True)
    warnings.warn(Notice("a notice"))
    warnings.warn("a warning")
    logging.warning("a record")
    list(tqdm([1], disable=False))
    print("all done")

os.dup2(os.open("/dev/full", os.O_WRONLY), 2)
run_script(main)
"""


def test_errors_that_nobody_can_read_end_nothing():
    assert run("-c", WRITES_ERRORS).stdout == "all done\n"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("predict", "--model", "nowhere", "x\udce6"), "Set PYTHONUTF8=1"),
        (("predict", "--model", "nowhere", "x"), "no model folder nowhere"),
        (("predict", "--model", "nowhere"), "Give descriptions"),
        (("predict", "--model", "nowhere", "--input", "a.csv"), "--output out.csv"),
        (("predict", "x"), "required: --model"),
        (("forecast",), "invalid choice: 'forecast'"),
        ((), "required: COMMAND"),
        (("convert", "--from-occcanine", "nowhere", "--output", "o", "--formatter", "hisco"), "There is no nowhere"),
        (("convert", "--output", "o"), "exactly one of --from-occcanine and --to-occcanine"),
        (("evaluate", "--model", "nowhere", "--data", "a.csv", "--output", "report"), "File not found: a.csv"),
        (("review", "--model", "nowhere", "--predictions", "p.csv"), "no model folder nowhere"),
    ],
)
def test_mistakes_end_in_a_sentence(args: tuple[str, ...], message: str, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    Path("report").mkdir()
    Path("report/report.html").touch()
    with pytest.raises(SystemExit) as ended:
        main(args)
    said = capsys.readouterr().err.strip()
    assert ended.value.code == 2 and message in said and "\n" not in said, said


_IMPORTS = """
import sys
from histocoder.cli.main import main
try:
    main(sys.argv[1:])
finally:
    print("torch" in sys.modules)
"""


@pytest.mark.parametrize("words", ["--help", "predict --help", "finetune --help-all", "predict --modell x"])
def test_help_and_misspelt_flags_import_no_torch(words: str):
    result = run("-c", _IMPORTS, *words.split(), fresh=True, check=False)
    assert result.stdout.splitlines()[-1] == "False" and "Traceback" not in result.stderr


def test_opening_a_model_does_not_import_torchs_compiler(model: Path):
    opening = "import sys; from histocoder import Coder; Coder.from_pretrained(sys.argv[1])"
    result = run("-c", f"{opening}; print('torch._dynamo' in sys.modules)", model, fresh=True)
    assert result.stdout == "False\n"


def test_convert_there_and_back(tmp_path: Path):
    published = shared("reference/occcanine/last.bin")
    expected = json.loads(shared("reference/occcanine/expected.json").read_text())
    (tmp_path / "encoder.json").write_text(json.dumps(expected["canine_config"]))
    there = ("--from-occcanine", published, "--formatter", "hisco", "--encoder-config", tmp_path / "encoder.json")
    run("-m", "histocoder", "convert", *there, "--output", tmp_path / "model")
    run("-m", "histocoder", "convert", "--to-occcanine", tmp_path / "model", "--output", tmp_path / "last.bin")
    (before, codes), (after, codes_after) = initial_weights(published), initial_weights(tmp_path / "last.bin")
    assert codes == codes_after and all(torch.equal(before[name], after[name]) for name in before)


def test_convert_to_a_full_disk(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    try:
        with pytest.raises(SystemExit) as ended:
            main(["convert", "--to-occcanine", str(model), "--output", str(tmp_path / "last.bin")])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    said = capsys.readouterr().err
    assert ended.value.code == 2 and "Could not write" in said and said.count("\n") == 1, said
    assert not list(tmp_path.iterdir())


def evaluate(model: Path | str, data: Path, *args: object) -> None:
    """As the command does; its report goes beside the data."""
    given = ("--model", model, "--data", data, "--output", data.parent / "evaluation", *args)
    main(["evaluate", "--overwrite", *map(str, given)])


def test_a_report_is_not_replaced_unasked(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "t.csv").write_text("occ1,lang,hisco_1\nfarmer,en,61110\n")
    flags = ["evaluate", "--model", str(model), "--data", str(tmp_path / "t.csv"), "--output"]
    main([*flags, str(tmp_path / "report")])
    for output, message in (("report", "Add --overwrite"), ("t.csv", "name a folder for the report")):
        with pytest.raises(SystemExit) as ended:
            main([*flags, str(tmp_path / output)])
        assert ended.value.code == 2 and message in capsys.readouterr().err
    main([*flags, str(tmp_path / "report"), "--overwrite"])


def test_evaluate_with_one_language_says_the_rest(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "t.csv").write_text("occ1,lang,hisco_1\nvæver,da,61110\nfarmer,da,6111x\n", encoding="cp1252")
    evaluate(model, tmp_path / "t.csv", "--language", "en", "--drop-bad-labels")
    said = capsys.readouterr().out
    assert "1 row with a label that does not fit is left out" in said and "cp1252" in said and "unk" not in said


@pytest.mark.slow
def test_evaluate_reads_both_files_by_one_name(model: Path, tmp_path: Path):
    data, own, prepared, none = (tmp_path / f"{name}.csv" for name in ("data", "own", "prepared", "none"))
    data.write_text("job,lang,hisco_1\nfarmer,en,61110\n")
    own.write_text("job,occ1,hisco_1\nfarmer,x,61110\nfarmer,x,61110\n")
    prepared.write_text("occ1,lang,hisco_1,hisco_2\nfarmer,en,61110,\nfarmer,en,61110,\n")
    none.write_text("ort,hisco_1\nfarmer,61110\n")
    for train_data in (own, prepared):
        evaluate(model, data, "--input-col", "job", "--train-data", train_data)
        metrics = json.loads((tmp_path / "evaluation" / "metrics.json").read_text())
        assert list(metrics["answer"]["by_text_seen"]) == ["2-5"]
    with pytest.raises(SystemExit):
        evaluate(model, data, "--input-col", "job", "--train-data", none)


@pytest.mark.slow
def test_evaluate_takes_training_data_of_its_own_run_only(model: Path, tmp_path: Path):
    data = tmp_path / "t.csv"
    data.write_text("occ1,lang,hisco_1\nfarmer,en,61110\n")
    for part in ("best", "checkpoints/step-0000010", "copy"):
        shutil.copytree(model, tmp_path / "run" / part)
    (tmp_path / "run" / "data_train.csv").write_text("occ1,hisco_1\nfarmer,61110\n")
    seen = {}
    for part in ("best", "checkpoints/step-0000010", "copy"):
        evaluate(tmp_path / "run" / part, data)
        seen[part] = "by_text_seen" in json.loads((tmp_path / "evaluation" / "metrics.json").read_text())["answer"]
    assert seen == {"best": True, "checkpoints/step-0000010": True, "copy": False}


def test_evaluate_refuses_missing_code_columns(general: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    data = tmp_path / "t.csv"
    data.write_text("occ1,lang,hisco_1,Hisco_2\nfarmer,en,61110,71105\n")
    with pytest.raises(SystemExit) as ended:
        evaluate(general, data, "--target-cols", "hisco_1", "hisko_2")
    assert ended.value.code == 2 and "no column 'hisko_2'" in capsys.readouterr().err
    evaluate(general, data, "--target-cols", "hisco_1", "hisco_2")  # however they are capitalised


def test_evaluate_takes_labels_as_training_does(general: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    data = tmp_path / "t.csv"
    data.write_text("occ1,lang,hisco_1\nfarmer,en,61110\nclerk,en,1110\nminer,en,71105\ncook,en,\ncook,en,\n")
    with pytest.raises(SystemExit) as ended:
        evaluate(general, data)
    said = capsys.readouterr().err
    assert (
        ended.value.code == 2 and "line 3, hisco_1: '1110'. If leading zeros were lost, add --zero-pad-codes" in said
    ), said
    evaluate(general, data, "--zero-pad-codes", "--precision", "fp32")
    said = capsys.readouterr().out.replace("\u00a0", " ")
    assert "2 rows without any code are left out" in said and "Of 3 descriptions" in said
    assert "33.3 % of the descriptions have a true code that is not in the model's key" in said
    metrics = json.loads((tmp_path / "evaluation" / "metrics.json").read_text())
    assert metrics["num_rows"] == 3 and metrics["num_true_outside_key"] == 1 and "baselines" not in metrics


def test_evaluate_compares_with_simple_methods(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    data = write_table(tmp_path / "t.csv")
    with pytest.raises(SystemExit) as ended:
        evaluate(model, data, "--baselines")
    said = capsys.readouterr().err
    assert ended.value.code == 2 and "no " in said and "data_train.csv. Add --train-data FILE." in said
    for flags, has_linear in (((), False), (("--baselines",), True)):
        evaluate(model, data, "--train-data", data, "--language", "en", *flags)
        said = capsys.readouterr().out
        assert ("with a linear model 100.0" in said) is has_linear and "Try more epochs" in said
        assert "--known would take the codes of 64 of the 64 descriptions" in said
        page = (tmp_path / "evaluation" / "report.html").read_text(encoding="utf-8")
        assert "Comparison with simple methods" in page and ("Linear model on" in page) is has_linear


def test_simple_methods_learn_all_that_the_model_has(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    best, data = shutil.copytree(model, tmp_path / "run" / "best"), tmp_path / "t.csv"
    change_config(best, replace(tiny_model().config, fitted_to_validation=True))
    for name, text in (("train", "farmer"), ("val", "smith"), ("held_out", "tailor")):
        (best.parent / f"data_{name}.csv").write_text(f"occ1,lang,hisco_1\n{text},en,61110\n")
    data.write_text("occ1,lang,hisco_1\nfarmer,en,61110\nsmith,en,61110\ntailor,en,61110\nminer,en,61110\n")
    evaluate(best, data)
    metrics = json.loads((tmp_path / "evaluation" / "metrics.json").read_text())
    assert metrics["baselines"]["exact_match"]["rows"] == 0.75 and metrics["answer"]["by_text_seen"]["0"]["n"] == 1
    assert "2 of these 4 descriptions are in the run's validation data or held-out" in capsys.readouterr().out


def test_thresholds_are_kept_in_no_checkpoint_and_nothing_of_the_hubs(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    data = tmp_path / "t.csv"
    data.write_text("occ1,lang,hisco_1\nfarmer,en,61110\n")
    checkpoint = shutil.copytree(model, tmp_path / "step-0000010")
    (checkpoint / "state.json").write_text("{}")
    before = (checkpoint / "config.json").read_bytes()
    monkeypatch.setattr("histocoder.cli.evaluate.local_folder", lambda name: pytest.fail(f"{name} was opened"))
    for name, message in ((checkpoint, "never changed"), ("org/name", "there is no folder org/name")):
        with pytest.raises(SystemExit) as ended:
            evaluate(name, data, "--save-thresholds")
        said = capsys.readouterr().err
        assert ended.value.code == 2 and message in said and said.count("\n") == 1
    assert (checkpoint / "config.json").read_bytes() == before


def test_a_model_with_new_thresholds_is_whole(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    own, data = shutil.copytree(model, tmp_path / "model"), tmp_path / "t.csv"
    data.write_text("occ1,lang,hisco_1\nfarmer,en,61110\n")
    evaluate(own, data, "--save-thresholds")
    assert (own / "config.json").read_bytes() != (model / "config.json").read_bytes()
    main(["predict", "--model", str(own), "farmer"])
    assert json.loads((own / "manifest.json").read_text()).keys() == {"config.json", "model.safetensors"}
    (own / "config.json").write_text((own / "config.json").read_text() + "\n")
    with pytest.raises(SystemExit):
        main(["predict", "--model", str(own), "farmer"])
    assert "model/config.json is missing or damaged" in capsys.readouterr().err
    main(["predict", "--model", str(own), "--no-verify", "farmer"])


def test_review_takes_the_least_certain_and_most_frequent(tmp_path: Path, logged: list[str]):
    rows = (
        [("sure", "11111", 0.99)] * 30 + [("often", "22222", 0.9)] * 20 + [("rare", "33333", 0.1), (None, None, None)]
    )
    frame = pd.DataFrame(rows, columns=["occ1", "hisco_1", "conf"])
    frame.insert(2, "prob_1", frame["conf"])
    frame.to_csv(tmp_path / "out.csv", index=False)
    chosen = review(tmp_path / "out.csv", tmp_path / "review.csv", budget=2)
    assert chosen["occ1"].tolist() == ["often", "rare"]  # 2.0 and 0.9 rows likely wrong; 0.3 of the sure one's
    assert chosen["times"].tolist() == [20, 1] and "21 of 51 rows" in logged[0]
    written = pd.read_csv(tmp_path / "review.csv", dtype=str)
    assert list(written.columns) == ["occ1", "checked", "hisco_1", "conf", "times"] and written["hisco_1"].tolist() == [
        "22222",
        "33333",
    ]
    with pytest.raises(UserError, match="already exists"):
        review(tmp_path / "out.csv", tmp_path / "review.csv", budget=2)
    with pytest.raises(UserError, match="no column 'occ'"):
        review(tmp_path / "out.csv", tmp_path / "other.csv", budget=2, columns=Columns("occ"))
    with pytest.raises(UserError, match=r"other\.csv\.zip: \.zip files can't be written"):
        review(tmp_path / "out.csv", tmp_path / "other.csv.zip", budget=2)


def test_review_shows_spellings_of_one_answer_once(tmp_path: Path):
    rows = [
        ("væver", "da", "75400"),
        *[("Vaever", "Danish", "75400")] * 2,
        ("vaever", "da", "1"),
        ("VÆVER", "no", "75400"),
    ]
    frame = pd.DataFrame(rows, columns=["occ1", "lang", "hisco_1"]).assign(prob_1=0.5, conf=0.5)
    frame.to_csv(tmp_path / "out.csv", index=False)
    chosen = review(tmp_path / "out.csv", tmp_path / "review.csv", budget=5)
    assert chosen[["occ1", "lang", "times"]].to_numpy().tolist() == [
        *(["Vaever", "Danish", 3], ["vaever", "da", 1], ["VÆVER", "no", 1])
    ]


def test_review_takes_the_last_of_several_codings(tmp_path: Path):
    header = [f"{'pred_' * times}{name}" for times in range(3) for name in ("hisco_1", "prob_1", "conf")]
    row = ["11111", 0.9, 0.9, "22222", 0.8, 0.8, "33333", 0.7, 0.7]
    pd.DataFrame([["farmer", *row]], columns=["occ1", *header]).to_csv(tmp_path / "out.csv", index=False)
    chosen = review(tmp_path / "out.csv", tmp_path / "review.csv", budget=1)
    assert chosen.to_numpy().tolist() == [["farmer", "", "33333", 0.7, 1]]
    assert list(chosen) == ["occ1", "checked", "hisco_1", "conf", "times"]


def test_review_tells_codes_from_alternatives(tmp_path: Path):
    coding = {"hisco_1": "61110", "prob_1": 0.7, "desc_1": "Farmer", "alt_hisco_2": "77610", "alt_prob_2": 0.2}
    row = {"occupation": "farmer", **{f"pred_{name}": value for name, value in coding.items()}, "pred_conf": 0.7}
    pd.DataFrame([row]).to_csv(tmp_path / "out.csv", index=False)
    named = Columns("occupation", target_cols=("code_a", "code_b"), run_input_col="occ1")
    chosen = review(tmp_path / "out.csv", tmp_path / "review.csv", budget=1, columns=named)
    alternatives = ["alt_hisco_2", "alt_prob_2"]
    assert list(chosen) == ["occ1", "checked", "code_a", "desc_1", "code_b", *alternatives, "conf", "times"]
    assert chosen.iloc[0].tolist()[:6] == ["farmer", "", "61110", "Farmer", "", "77610"]


@pytest.mark.parametrize(
    ("header", "run_language_col", "expected"),
    [
        ("occ1,lang,pred_lang,hisco_1,prob_1,conf", None, ["lang", "xx"]),  # predict --language, the file having lang
        ("occ1,pred_lang,lang,hisco_1,prob_1,conf", "language", ["language", "xx"]),
        ("occ1,lang,other,pred_hisco_1,pred_prob_1,pred_conf", "language", ["language", "da"]),
        ("occ1,language,other,hisco_1,prob_1,conf", "language", ["language", "da"]),  # predict --language-col language
        ("occ1,da,other,hisco_1,prob_1,conf", "language", ["checked", ""]),
    ],
)
def test_review_names_languages_as_the_run_does(
    tmp_path: Path, header: str, run_language_col: str | None, expected: list[str]
):
    (tmp_path / "out.csv").write_text(f"{header}\nsmed,da,xx,83110,0.9,0.9\n")
    columns = Columns(target_cols=("hisco_1",), run_language_col=run_language_col)
    chosen = review(tmp_path / "out.csv", tmp_path / "review.csv", budget=1, columns=columns)
    assert [chosen.columns[1], chosen.iloc[0, 1]] == expected


@pytest.mark.parametrize("name", ["times", "checked", "hisco_1"])
def test_review_refuses_its_own_columns_as_descriptions(tmp_path: Path, name: str):
    (tmp_path / "out.csv").write_text(f"{name},pred_hisco_1,pred_prob_1,pred_conf\nsmed,83110,0.9,0.9\n")
    columns = Columns(name, target_cols=("hisco_1",))
    with pytest.raises(UserError, match="Rename the column of descriptions"):
        review(tmp_path / "out.csv", tmp_path / "review.csv", budget=1, columns=columns)


def test_review_takes_codes_of_one_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    columns = ["occ1", "tongue", "hisco_1", "prob_1", "hisco_2", "prob_2", "conf"]
    rows = [
        ("smed", "da", "83110", 0.5, None, None, 0.5),
        ("smed", "en", "61110", 0.4, "77610", 0.4, 0.2),
        (None, "da", None, None, None, None, None),
        ("smed", "da", "83110", 0.5, None, None, 0.5),
        ("smed", None, "83110", 0.3, None, None, 0.3),
    ]
    pd.DataFrame(rows, columns=columns).to_parquet(tmp_path / "coded.parquet")
    monkeypatch.setattr(reviewing, "_CHUNK_ROWS", 1)
    by_text, by_both = (
        review(tmp_path / "coded.parquet", tmp_path / f"{i}.csv", budget=5, columns=columns)
        for i, columns in enumerate((Columns(), Columns(language_col="tongue")))
    )
    assert by_text[["hisco_1", "hisco_2", "conf", "times"]].fillna("").to_numpy().tolist() == [["83110", "", 0.5, 4]]
    expected = [["da", "", 2], ["en", "77610", 1], ["", "", 1]]
    assert by_both[["tongue", "hisco_2", "times"]].fillna("").to_numpy().tolist() == expected


def test_help_shows_a_dozen_flags(capsys: pytest.CaptureFixture[str]):
    shown = {}
    for flag in ("--help", "--help-all"):
        with pytest.raises(SystemExit) as ended:
            flags_of(FinetuneConfig).parse([flag])
        assert ended.value.code == 0
        shown[flag] = capsys.readouterr().out
    assert shown["--help"].count("\n  --") == 14 and shown["--help-all"].count("\n  --") > 60
    assert "… (required)\n" in shown["--help"] and "\naugmentation of" in shown["--help-all"]


@pytest.mark.parametrize(
    ("args", "message"),
    [(("--epochs", "3"), "no flag --epochs. Did you mean '--num-epochs'?"), (("--zzz=1",), "no flag --zzz. See")],
)
def test_misspelt_flags_get_a_suggestion(args: tuple[str, ...], message: str):
    with pytest.raises(UserError, match=re.escape(message)):
        flags_of(FinetuneConfig).parse(args)


def test_commands_name_the_flag_that_is_meant():
    with pytest.raises(UserError, match=r"--modell\. Did you mean '--model'\? See histocoder predict --help"):
        build_parser().parse(["predict", "--modell", "x", "a -- b"])
