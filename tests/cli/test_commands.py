"""The histocoder command, as a program."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import DEADLINE, ROOT, environment, run, shared, write_table
from jobs import faulty, finetune
from models import CODES, save_tiny_model, tiny_model

from histocoder.checkpoints.model_files import change_config, save_model
from histocoder.checkpoints.occcanine import initial_weights
from histocoder.cli.arguments import build_parser as flags_of
from histocoder.cli.main import main
from histocoder.config import FinetuneConfig
from histocoder.formatters import build_formatter
from histocoder.model import MixerModel

TABLE = "occ1,lang,hisco_1\nfarmer,en,61110\n"


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


def refused(capsys: pytest.CaptureFixture[str], *args: object) -> str:
    """Return the one line that the command ends with on a mistake of the user's."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main([str(arg) for arg in args])
    said = capsys.readouterr().err.strip()
    assert ended.value.code == 2 and "\n" not in said and "Traceback" not in said, said
    return said


def test_predict_prints_a_table(model: Path):
    out = run("-m", "histocoder", "predict", "--model", model, "--language", "fi", "--mode", "topk", "--k", 2, "a", "b")
    assert out.stderr.startswith("The model does not know the language 'fi'")
    header, *rows = out.stdout.splitlines()
    assert header.split()[:3] == ["text", "hisco_1", "prob_1"] and "hisco_2" in header.split()
    assert [row.split()[0] for row in rows] == ["a", "b"] and rows[0].split()[1] in CODES


@pytest.mark.slow
@pytest.mark.parametrize("program", ["predict", "finetune.py"])
def test_a_closed_pipe_ends_predict_cleanly(program: str, model: Path, table: Path, tmp_path: Path):
    reading, writing = os.pipe()
    os.close(reading)
    predict = ["-m", "histocoder", "predict", "--model", str(model), "a"]
    command = predict if program == "predict" else finetune(table, tmp_path / "out", "--batch-size", 8)
    with open(writing, "w") as pipe:
        ended = subprocess.run(
            [sys.executable, *command], cwd=ROOT, env=environment(), stdout=pipe, stderr=subprocess.PIPE, text=True,
            timeout=DEADLINE, check=False,
        )  # fmt: skip
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
    with Path("/dev/full").open("w", encoding="utf-8") as full:
        monkeypatch.setattr(sys, "stdout", full)
        said = refused(capfd, "predict", "--model", model, "farmer")
    assert said.startswith("error: The output can't be written (No space left on device).")


def test_closed_streams_do_not_end_training(table: Path, tmp_path: Path):
    args = finetune(table, tmp_path / "out", "--batch-size", 8, "--max-steps", 2)
    code = "import os, runpy, sys; sys.stdout = sys.stderr = None; os.close(1); os.close(2); sys.argv = {0}; "
    code += "runpy.run_path(sys.argv[0], run_name='__main__')"
    run("-c", f"import sys; sys.path.insert(0, ''); {code.format(args)}")
    assert (tmp_path / "out" / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("predict", "--model", "nowhere", "x\udce6"), "Set PYTHONUTF8=1"),
        (("predict", "--model", "nowhere", "x"), "no model folder nowhere"),
        (("predict", "--model", "nowhere"), "Give descriptions"),
        (("predict", "--model", "nowhere", "--input", "a.csv"), "--output out.csv"),
        (("predict", "x"), "required: --model"),
        (("finetune", "--target-cols", "a"), "--dataset my.csv --target-cols"),
        (("train-mixer", "--train-data", "a.csv"), "--train-data a.csv --val-data v.csv"),
        (("forecast",), "invalid choice: 'forecast'"),
        ((), "required: COMMAND"),
        (("convert", "--from-occcanine", "nowhere", "--output", "o", "--formatter", "hisco"), "There is no nowhere"),
        (("convert", "--output", "o"), "exactly one of --from-occcanine and --to-occcanine"),
        (("evaluate", "--model", "nowhere", "--data", "a.csv", "--output", "report"), "File not found: a.csv"),
        (("review", "--model", "nowhere", "--predictions", "p.csv"), "no model folder nowhere"),
    ],
)
def test_mistakes_end_in_a_sentence(args: tuple[str, ...], message: str, monkeypatch, capsys, tmp_path: Path):
    monkeypatch.chdir(tmp_path)
    assert message in refused(capsys, *args)


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


def test_convert_there_and_back(tmp_path: Path):
    published = shared("reference/occcanine/last.bin")
    expected = json.loads(shared("reference/occcanine/expected.json").read_text())
    (tmp_path / "encoder.json").write_text(json.dumps(expected["canine_config"]))
    there = ("--from-occcanine", published, "--formatter", "hisco", "--encoder-config", tmp_path / "encoder.json")
    run("-m", "histocoder", "convert", *there, "--output", tmp_path / "model")
    run("-m", "histocoder", "convert", "--to-occcanine", tmp_path / "model", "--output", tmp_path / "last.bin")
    (before, codes), (after, codes_after) = initial_weights(published), initial_weights(tmp_path / "last.bin")
    assert codes == codes_after and all(torch.equal(before[name], after[name]) for name in before)


def test_convert_to_a_full_disk(model: Path, tmp_path: Path):
    convert = ["-m", "histocoder", "convert", "--to-occcanine", str(model), "--output", str(tmp_path / "last.bin")]
    ended = run(*faulty(convert, "room:10000"), check=False)
    assert ended.returncode == 2 and "Could not write" in ended.stderr and ended.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A table of one row."""
    (tmp_path / "t.csv").write_text(TABLE)
    return tmp_path / "t.csv"


def evaluate(model: Path | str, data: Path, *args: object) -> dict[str, Any]:
    """Evaluate as the command does, with the report beside the data; return its metrics."""
    main([str(arg) for arg in evaluation(model, data, *args)])
    return json.loads((data.parent / "evaluation" / "metrics.json").read_text())


def evaluation(model: Path | str, data: Path, *args: object) -> tuple[object, ...]:
    given = ("--model", model, "--data", data, "--output", data.parent / "evaluation", *args)
    return "evaluate", "--overwrite", *given


def test_a_report_is_not_replaced_unasked(model: Path, data: Path, capsys: pytest.CaptureFixture[str]):
    evaluate(model, data)
    flags = ("evaluate", "--model", model, "--data", data, "--output")
    assert "Add --overwrite" in refused(capsys, *flags, data.parent / "evaluation")
    assert "name a folder for the report" in refused(capsys, *flags, data)


def test_evaluate_with_one_language_says_the_rest(model: Path, data: Path, capsys: pytest.CaptureFixture[str]):
    data.write_text("occ1,lang,hisco_1\nvæver,da,61110\nfarmer,da,6111x\n", encoding="cp1252")
    evaluate(model, data, "--language", "en", "--drop-bad-labels")
    said = capsys.readouterr().out
    assert "1 row is left out, without a description or" in said and "cp1252" in said and "unk" not in said


@pytest.mark.slow
def test_evaluate_reads_both_files_by_one_name(model: Path, data: Path, capsys: pytest.CaptureFixture[str]):
    data.write_text("job,lang,hisco_1\nfarmer,en,61110\n")
    train = data.with_name("train.csv")
    for text in (
        "job,occ1,hisco_1\n" + "farmer,x,61110\n" * 2,
        "occ1,lang,hisco_1,hisco_2\n" + "farmer,en,61110,\n" * 2,
    ):
        train.write_text(text)
        found = evaluate(model, data, "--input-col", "job", "--train-data", train)
        assert list(found["answer"]["by_text_seen"]) == ["2-5"]
    train.write_text("ort,hisco_1\nfarmer,61110\n")
    assert "no column" in refused(capsys, *evaluation(model, data, "--input-col", "job", "--train-data", train))


@pytest.mark.slow
def test_evaluate_takes_training_data_of_its_run(model: Path, data: Path):
    folder = data.parent / "run"
    for part, is_own in (("best", True), ("checkpoints/step-0000010", True), ("copy", False)):
        shutil.copytree(model, folder / part)
        (folder / "data_train.csv").write_text(TABLE)
        assert ("by_text_seen" in evaluate(folder / part, data)["answer"]) == is_own


def test_evaluate_takes_labels_as_training_does(general: Path, data: Path, capsys: pytest.CaptureFixture[str]):
    data.write_text("occ1,lang,hisco_1\nfarmer,en,61110\nclerk,en,1110\nminer,en,71105\ncook,en,\ncook,en,\n")
    said = refused(capsys, *evaluation(general, data))
    assert "line 3, hisco_1: '1110' has fewer than 5 characters. If leading zeros were lost, add --zero" in said
    found = evaluate(general, data, "--zero-pad-codes", "--precision", "fp32")
    said = capsys.readouterr().out.replace("\u00a0", " ")
    assert "2 rows are left out" in said and "Of 3 descriptions" in said
    assert "33.3 % of the descriptions have a true code that is not in the model's key" in said
    assert found["num_rows"] == 3 and found["num_true_outside_key"] == 1 and "baselines" not in found
    data.write_text("occ1,lang,hisco_1,Hisco_2\nfarmer,en,61110,71105\n")
    assert "no column 'hisko_2'" in refused(capsys, *evaluation(general, data, "--target-cols", "hisco_1", "hisko_2"))
    evaluate(general, data, "--target-cols", "hisco_1", "hisco_2")  # however they are capitalised


def test_evaluate_compares_with_simple_methods(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    data = write_table(tmp_path / "t.csv")
    assert "Add --train-data FILE." in refused(capsys, *evaluation(model, data, "--baselines"))
    for flags, has_linear in (((), False), (("--baselines",), True)):
        evaluate(model, data, "--train-data", data, "--language", "en", *flags)
        said = capsys.readouterr().out
        assert ("with a linear model 100.0" in said) is has_linear and "Try more epochs" in said
        assert "--known would take the codes of 64 of the 64 descriptions" in said
        page = (tmp_path / "evaluation" / "report.html").read_text(encoding="utf-8")
        assert "Comparison with simple methods" in page and ("Linear model on" in page) is has_linear


def test_simple_methods_learn_all_that_the_model_has(model: Path, data: Path, capsys: pytest.CaptureFixture[str]):
    best = shutil.copytree(model, data.parent / "run" / "best")
    change_config(best, replace(tiny_model().config, fitted_to_validation=True))
    for name, text in (("train", "farmer"), ("val", "smith"), ("held_out", "tailor")):
        (best.parent / f"data_{name}.csv").write_text(TABLE.replace("farmer", text))
    data.write_text(f"{TABLE}smith,en,61110\ntailor,en,61110\nminer,en,61110\n")
    found = evaluate(best, data)
    assert found["baselines"]["exact_match"]["rows"] == 0.75 and found["answer"]["by_text_seen"]["0"]["n"] == 1
    assert "2 of these 4 descriptions are in the run's validation data or held-out" in capsys.readouterr().out


def test_changed_models_are_read_unverified(model: Path, data: Path, capsys: pytest.CaptureFixture[str]):
    own = shutil.copytree(model, data.parent / "model")
    (own / "config.json").write_text((own / "config.json").read_text() + "\n")
    assert "model/config.json is missing or damaged" in refused(capsys, "predict", "--model", own, "farmer")
    main(["predict", "--model", str(own), "--no-verify", "farmer"])


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
    [
        ("finetune --epochs 3", "no flag --epochs. Did you mean '--num-epochs'? See histocoder finetune --help"),
        ("finetune --zzz=1", "no flag --zzz. See"),
        ("predict --modell x a", "--modell. Did you mean '--model'? See histocoder predict --help"),
    ],
)
def test_misspelt_flags_get_a_suggestion(args: str, message: str, capsys: pytest.CaptureFixture[str]):
    assert message in refused(capsys, *args.split())
