"""The histocoder command, as a program."""

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
from conftest import DEADLINE, ROOT, cases, environment, mistake, run, shared, write, write_table
from jobs import finetune
from models import CODES, tiny_model

from histocoder.checkpoints.model_files import save_config, save_model
from histocoder.checkpoints.occcanine import initial_weights
from histocoder.cli.main import main
from histocoder.data.hashes import text_hashes
from histocoder.formatters import build_formatter
from histocoder.model import MixerModel

TABLE = "occ1,lang,hisco_1\nfarmer,en,61110"


@pytest.fixture(scope="module")
def general(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with the general formatter, as `finetune.py` trains it."""
    folder = shutil.copytree(model, tmp_path_factory.mktemp("general") / "model")
    trained = tiny_model()
    formatter = build_formatter("general", num_blocks=2)
    config = replace(
        trained.config, formatter=formatter.to_config(), vocab_size=formatter.vocab_size
    )
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
    assert header.split()[:3] == ["text", "hisco_1", "prob_1"] and "alt_hisco_2" in header.split()
    assert [row.split()[0] for row in rows] == ["a", "b"] and rows[0].split()[1] in CODES


@pytest.mark.slow
def test_a_closed_pipe_ends_training_cleanly(table: Path, tmp_path: Path):
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, *finetune(table, tmp_path / "out", "--batch-size", 8)]
    how = {
        "stderr": subprocess.PIPE,
        "cwd": ROOT,
        "env": environment(),
        "text": True,
        "timeout": DEADLINE,
    }
    with open(writing, "w") as pipe:
        ended = subprocess.run(command, check=False, stdout=pipe, **how)
    assert ended.returncode == 128 + signal.SIGPIPE
    assert ended.stderr == "Stopped, because the program that read the output has ended.\n"


def test_imports_are_no_garbage():
    counted = "main(['doctor']); print(gc.get_freeze_count(), gc.isenabled())"
    number, is_enabled = run(
        "-c", f"import gc; from histocoder.cli.main import main; {counted}"
    ).stdout.split()[-2:]
    assert int(number) > 100_000 and is_enabled == "True"


def test_output_that_is_closed_or_full(
    model: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(sys, "stdout", None)
    main(["predict", "--model", str(model), "farmer"])
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written := io.BytesIO(), encoding="ascii"))
    main(["predict", "--model", str(model), "skrædersvend"])
    assert rb"skr\xe6dersvend" in written.getvalue()
    with Path("/dev/full").open("w", encoding="utf-8") as full:
        monkeypatch.setattr(sys, "stdout", full)
        said = mistake(capfd, "predict", "--model", model, "farmer")
    assert said.startswith("error: The output can't be written (No space left on device).")


@cases(
    ("args", "message"),
    (("predict", "--model", "nowhere", "x"), "no model folder nowhere"),
    (("predict", "--model", "nowhere"), "Give descriptions"),
    (("finetune", "--target-cols", "a"), "--dataset my.csv --target-cols"),
    (("forecast",), "invalid choice: 'forecast'"),
    (
        ("finetune", "--epochs", "3"),
        "flag --epochs. Did you mean '--num-epochs'? See histocoder finetune --help",
    ),
    (
        ("predict", "--model", "x", "--moda=flat"),
        "--moda. Did you mean '--mode'? See histocoder predict --help",
    ),
    (
        ("convert", "--from-occcanine", "nowhere", "--output", "o", "--formatter", "hisco"),
        "There is no nowhere",
    ),
    (("convert", "--output", "o"), "either --from-occcanine or --to-occcanine"),
)
def test_mistakes_end_in_a_sentence(
    args: tuple[str, ...], message: str, monkeypatch, capsys, tmp_path: Path
):
    monkeypatch.chdir(tmp_path)
    assert message in mistake(capsys, *args)


@cases(
    "words",
    "audit --target-cols hisco_1 --dataset t.csv",
    "audit --target-cols hisco_1 --dataset other.csv --key t.csv",
    "agreement other.csv t.csv --target-cols hisco_1",
    "review --model MODEL --predictions t.csv",
    "compare MODEL MODEL --data t.csv",
    "predict --model MODEL --input other.csv --classes t.csv",
    "predict --model MODEL --input other.csv --known t.csv",
)
@pytest.mark.parametrize("more", [(), ("--overwrite",)], ids=str)
def test_no_command_replaces_its_input(
    words: str, more: tuple[str, ...], model: Path, data: Path, monkeypatch, capsys
):
    monkeypatch.chdir(data.parent)
    write(Path("other.csv"), TABLE)
    given = [str(model) if word == "MODEL" else word for word in words.split()]
    said = mistake(capsys, *given, "--output", "t.csv", *more)
    assert said == "error: --output is the input itself, t.csv; choose another."
    assert data.read_text() == f"{TABLE}\n"


@pytest.mark.parametrize(
    "words", ["--help", "predict --help", "finetune --help-all", "predict --modell x"]
)
def test_help_and_misspelt_flags_import_no_torch(words: str):
    script = "import atexit, sys; atexit.register(lambda: print('torch' in sys.modules))"
    script += "; from histocoder.cli.main import main; main(sys.argv[1:])"
    result = run("-c", script, *words.split(), fresh=True, check=False)
    assert result.stdout.splitlines()[-1] == "False" and "Traceback" not in result.stderr


def test_convert_there_and_back(tmp_path: Path):
    published = shared("reference/occcanine/last.bin")
    expected = json.loads(shared("reference/occcanine/expected.json").read_text())
    (tmp_path / "encoder.json").write_text(json.dumps(expected["canine_config"]))
    there = (
        "--from-occcanine",
        published,
        "--formatter",
        "hisco",
        "--encoder-config",
        tmp_path / "encoder.json",
    )
    run("-m", "histocoder", "convert", *there, "--output", tmp_path / "model")
    run(
        "-m",
        "histocoder",
        "convert",
        "--to-occcanine",
        tmp_path / "model",
        "--output",
        tmp_path / "last.bin",
    )
    (before, codes), (after, codes_after) = (
        initial_weights(published),
        initial_weights(tmp_path / "last.bin"),
    )
    assert codes == codes_after and before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write(tmp_path / "t.csv", TABLE)


def evaluate(model: Path | str, data: Path, *args: object) -> dict[str, Any]:
    """Evaluate as the command does, with the report beside the data; return its metrics."""
    main([*map(str, evaluation(model, data, *args))])
    return json.loads((data.parent / "evaluation" / "metrics.json").read_text())


def evaluation(model: Path | str, data: Path, *args: object) -> tuple[object, ...]:
    return (
        "evaluate",
        "--overwrite",
        "--model",
        model,
        "--data",
        data,
        "--output",
        data.parent / "evaluation",
        *args,
    )


def test_evaluate_takes_labels_as_training_does(
    general: Path, data: Path, capsys: pytest.CaptureFixture[str]
):
    data.write_text(
        "occ1,lang,hisco_1\nfarmer,en,61110\nclerk,en,1110\nminer,en,71105\ncook,en,\ncook,en,\n"
    )
    said = mistake(capsys, *evaluation(general, data))
    assert (
        "line 3, hisco_1: '1110' has fewer than 5 characters. If leading zeros were lost, "
        "add --zero"
    ) in said
    found = evaluate(general, data, "--zero-pad-codes", "--precision", "fp32")
    said = capsys.readouterr().out.replace("\u00a0", " ")
    assert "2 rows are left out" in said and "Of 3 descriptions" in said
    assert "33.3 % of the descriptions have a true code that is not in the model's key" in said
    assert (
        found["num_rows"] == 3 and found["num_true_outside_key"] == 1 and "baselines" not in found
    )
    data.write_text("occ1,lang,hisco_1,Hisco_2\nfarmer,en,61110,71105\n")
    assert "no column 'hisko_2'" in mistake(
        capsys, *evaluation(general, data, "--target-cols", "hisco_1", "hisko_2")
    )
    evaluate(general, data, "--target-cols", "hisco_1", "hisco_2")  # however they are capitalised
    assert "name a folder for the report" in mistake(
        capsys, *evaluation(general, data, "--output", data)
    )
    assert "holds a run or a model, whose own" in mistake(
        capsys, *evaluation(general, data, "--output", general)
    )
    assert "Add --overwrite" in mistake(
        capsys, *[arg for arg in evaluation(general, data) if arg != "--overwrite"]
    )


def test_evaluate_tells_groups_apart(model: Path, data: Path, capsys: pytest.CaptureFixture[str]):
    rows = [f"farmer{i},en,61110,{1800 + i},{'' if i else 'x'}" for i in range(50)]
    write(data, "occ1,lang,hisco_1,year,parish", *rows)
    found = evaluate(model, data, "--group-col", "Year", "parish")
    assert [one["n"] for one in found["by_group"]["Year"]] == [10] * 5
    assert {one["group"]: one["n"] for one in found["by_group"]["parish"]} == {
        "x": 1,
        "(blank)": 49,
    }
    said = capsys.readouterr().out
    assert "1800-1809 10" in said and "Exactly right by parish" in said
    assert "no column 'coder'" in mistake(capsys, *evaluation(model, data, "--group-col", "coder"))


def test_compare_lists_what_changed(
    model: Path, general: Path, data: Path, capsys: pytest.CaptureFixture[str]
):
    write(data, TABLE, "miner,en,71105", "cook,en,53100")
    given = ("--data", data, "--output", data.parent / "changed.csv")
    main([str(arg) for arg in ("compare", model, general, *given)])
    said = capsys.readouterr().out
    assert (
        "Exactly right, of rows" in said
        and "Difference in percentage points, with 95 % intervals" in said
    )
    header, *rows = (data.parent / "changed.csv").read_text().splitlines()
    assert header.startswith(
        '"text","lang","true","codes_first","conf_first","right_first","codes_second"'
    )
    assert f"Wrote the {len(rows)} rows that they code differently" in said
    assert "Add --overwrite" in mistake(capsys, "compare", model, general, *given)
    assert "Name two models" in mistake(capsys, "compare", model, *given)


def test_evaluate_compares_with_simple_methods(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    data = write_table(tmp_path / "t.csv")
    assert "Add --train-data FILE." in mistake(capsys, *evaluation(model, data, "--baselines"))
    for flags, has_linear in (((), False), (("--baselines",), True)):
        evaluate(model, data, "--train-data", data, "--language", "en", *flags)
        said = capsys.readouterr().out
        assert ("with a linear model 100.0" in said) is has_linear and "Try more epochs" in said
        assert "--known would take the codes of 64 of the 64 descriptions" in said
        page = (tmp_path / "evaluation" / "report.html").read_text(encoding="utf-8")
        assert (
            "Comparison with simple methods" in page and ("Linear model on" in page) is has_linear
        )


def test_evaluate_says_what_the_model_was_trained_on(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    trained = tiny_model()
    trained.has_learned(torch.from_numpy(text_hashes(["farmer", "miner"])))
    best = tmp_path / "trained"
    save_model(best, trained.config, trained.state_dict(), tokenizer=trained.tokenizer)
    other = write(tmp_path / "other.csv", "occ1,hisco_1", "cook,53100")
    for flags in ((), ("--train-data", other)):
        evaluate(best, data, *flags)
        assert f"Notice: {best} was trained on 1 of these" in capsys.readouterr().out


def test_simple_methods_learn_all_that_the_model_has(
    model: Path, data: Path, capsys: pytest.CaptureFixture[str]
):
    best = shutil.copytree(model, data.parent / "run" / "best")
    save_config(best, replace(tiny_model().config, fitted_to_validation=True))
    for name, text in (("train", "farmer"), ("val", "smith"), ("held_out", "tailor")):
        write(best.parent / f"data_{name}.csv", TABLE.replace("farmer", text))
    write(data, TABLE, "smith,en,61110", "tailor,en,61110", "miner,en,61110")
    found = evaluate(best, data)
    assert (
        found["baselines"]["exact_match"]["rows"] == 0.75
        and found["answer"]["by_text_seen"]["0"]["n"] == 1
    )
    said = (
        "2 of these 4 descriptions are in the run's validation data or held-out "
        f"corrections, on which {best} was"
    )
    assert said in capsys.readouterr().out
    main(
        [
            "compare",
            str(model),
            str(best),
            "--data",
            str(data),
            "--output",
            str(data.parent / "changed.csv"),
        ]
    )
    assert capsys.readouterr().out.count("of these 4 descriptions") == 1


def test_help_shows_a_dozen_flags(capsys: pytest.CaptureFixture[str]):
    for flag, least, most in (("--help", 15, 15), ("--help-all", 60, 200)):
        with pytest.raises(SystemExit) as ended:
            main(["finetune", flag])
        assert ended.value.code == 0 and least <= capsys.readouterr().out.count("\n  --") <= most


def test_the_doctor_describes_the_machine(tmp_path: Path):
    said = run("-m", "histocoder", "doctor", "--folder", tmp_path / "not" / "yet").stdout
    marks = {
        line[9:24].strip(): line[:9].strip()
        for line in said.splitlines()
        if line.startswith(("ok ", "note "))
    }
    assert {"versions", "devices", "precision", "kernels", "memory", "disk", "hub"} <= set(marks)
    assert (
        marks["hub"] == "note"
        and f"torch {torch.__version__}" in said
        and f"free in {tmp_path}" in said
    )
    assert not list(tmp_path.iterdir())


def test_the_command_alone_prints_its_help(capsys: pytest.CaptureFixture[str]):
    main([])
    printed = capsys.readouterr().out
    assert "usage: histocoder" in printed and "predict" in printed
