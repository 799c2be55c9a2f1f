"""The real scripts, in processes of their own: alone, under torchrun, interrupted, resumed."""

import csv
import importlib.util
import json
import shlex
import shutil
from pathlib import Path

import pandas as pd
import pytest
import torch
from conftest import environment, refused, run, write, write_table
from jobs import TINY, assert_same_weights, finetune, logged, two_ranks, weights

from histocoder import Coder, OnnxCoder
from histocoder.checkpoints.model_files import load_model, read_model_config
from histocoder.cli.main import main


def test_a_run_and_its_files(table: Path, tmp_path: Path):
    out = tmp_path / "out"
    extra = (
        "--batch-size",
        8,
        "--max-steps",
        9,
        "--save-interval",
        3,
        "--eval-interval",
        4,
        "--language",
        "en",
    )
    args = [
        arg for arg in finetune(table, out, *extra, "--save-each-epoch") if arg != "--no-report"
    ]
    result = run(*args, fresh=True)
    assert all(
        words in result.stdout
        for words in ("step 9/9", "validation at step 9", "got exactly the right codes")
    )
    assert not result.stderr
    assert {p.name for p in out.iterdir()} == {
        *(
            "data_train.csv",
            "data_val.csv",
            "key.csv",
            "rejected.csv",
            "prepared.json",
            "args.yaml",
        ),
        *("config.json", "model.safetensors", "README.md", "checkpoints", "best", "logs.csv"),
        *("examples.arrow", "report", "report.html", "metrics.json", "run.json", "manifest.json"),
    }
    # the last two of those of steps 3, 6 and 9, and of the end of the first epoch
    assert sorted(p.name for p in (out / "checkpoints").iterdir()) == [
        "step-0000007",
        "step-0000009",
    ]
    assert logged(out, "step") == [1, 2, 3, 4, 4, 5, 6, 7, 8, 8, 9, 9]
    assert len(logged(out, "val_loss")) == 3 and logged(out, "lr")[-1] == 0
    config = json.loads((out / "config.json").read_text())
    form = {"name": "general", "num_blocks": 1, "block_size": 5, "use_within_block_sep": False}
    assert {name: config["formatter"][name] for name in form} == form and len(
        config["formatter"]["symbols"]
    ) < 100
    assert config["languages"] == ["en", "unk"] and len(config["codes"]) == 8
    assert not any(name.startswith("module.") for name in weights(out))
    accuracy = 100 * json.loads((out / "metrics.json").read_text())["answer"]["overall"]["accuracy"]
    assert accuracy == pytest.approx(
        max(logged(out, "greedy_seq_acc")), abs=1e-3
    )  # as logs.csv rounds

    again = run(*args).stdout
    assert "Using the data prepared" in again and "Resuming from step 9" in again
    printed = run(
        "-m", "histocoder", "predict", "--model", out, "--language", "en", "farmer", "nan"
    ).stdout
    assert "farmer" in printed and "prob_1" in printed
    data = ("--data", out / "data_val.csv", "--output", tmp_path / "evaluation")
    said = run("-m", "histocoder", "evaluate", "--model", out / "best", *data).stdout
    assert "of the descriptions do not occur in" in said  # it found what the run was trained on
    assert (tmp_path / "evaluation" / "report.html").exists()


@pytest.mark.slow
def test_a_frozen_encoder_under_two_ranks(table: Path, tmp_path: Path):
    extra = (
        "--freeze-encoder --eval-interval 3 --augmentation-prob 0 --unk-lang-prob 0 --max-steps 6"
    ).split()
    one, two, start = (tmp_path / name for name in ("one", "two", "start"))
    run(*finetune(table, one, *extra, "--batch-size", 8))
    first, other = two_ranks(finetune(table, two, *extra, "--batch-size", 4))
    assert (first.stdout + other.stdout).count(
        "are computed once"
    ) == 2  # of training and validation data, by rank 0
    assert logged(two, "val_loss") == pytest.approx(logged(one, "val_loss"), abs=1e-5)
    run(
        *finetune(table, start, "--batch-size", 8, "--max-steps", 1, "--learning-rate", 1e-60)
    )  # which is 0 in fp32
    for name, tensor in weights(two).items():
        if name == "trained_on":  # hashes of the descriptions, not weights
            continue
        is_frozen = name.startswith("encoder.") or "pos_embedding" in name
        assert torch.equal(tensor, weights(start)[name]) == is_frozen, name


CLASSES = ["craft & trade", "Bauer/Knecht", "wood, metal", "=clerk's", "væver", "farmer"]


@pytest.fixture(scope="module")
def of_words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a table `t.csv` of classes in words, and the model `out`, trained on it and
    resumed.
    """
    folder = tmp_path_factory.mktemp("words")
    rows = [
        [f"title {i} no {j}", name, CLASSES[i - 1]]
        for i, name in enumerate(CLASSES)
        for j in range(12)
    ]
    pd.DataFrame(rows, columns=["occ1", "class_1", "class_2"]).to_csv(folder / "t.csv", index=False)
    columns = (
        "--target-cols",
        "class_1",
        "class_2",
        "--language",
        "en",
        "--no-refit",
        "--batch-size",
        8,
    )
    for steps in (2, 3):
        args = (
            "--dataset",
            folder / "t.csv",
            "--save-path",
            folder / "out",
            *TINY,
            *columns,
            "--max-steps",
            steps,
        )
        printed = run("finetune.py", *args).stdout
    assert "Resuming from step 2" in printed
    return folder


def test_classes_in_words_are_predicted(of_words: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(of_words)
    assert pd.read_csv("out/key.csv")["system_code"].str.removeprefix("'").tolist() == sorted(
        CLASSES
    )  # ' of formulas
    coder = Coder.from_pretrained("out")
    assert coder.codes == tuple(sorted(CLASSES)) and [*coder.predict("cook", mode="full")] == [
        *coder.codes
    ]
    for mode in ("greedy", "flat", "topk", "combined"):
        assert {*coder.predict("cook", mode=mode).filter(like="class_").iloc[0]} <= {*CLASSES, None}
    for suffix, read in (("xlsx", pd.read_excel), ("parquet", pd.read_parquet)):
        flags = [
            "--input",
            "t.csv",
            "--output",
            f"coded.{suffix}",
            "--columns",
            "m_",
            "--known",
            "auto",
            "--raw",
        ]
        main(["predict", "--model", "out", *flags])
        coded = read(f"coded.{suffix}")
        is_known = coded["m_source"] == "known"
        assert (coded["m_class_1"] == coded["class_1"])[is_known].all() and is_known.sum() == 58
        assert set(coded["m_class_1"]) <= set(CLASSES)
    main(["evaluate", "--model", "out", "--data", "t.csv", "--output", "evaluation"])
    metrics = json.loads(Path("evaluation/metrics.json").read_text())
    assert {one["code"] for one in metrics["by_code"]} >= {*CLASSES} and not metrics["answer"][
        "by_digits"
    ]
    if importlib.util.find_spec("onnxruntime"):
        main(["export", "--model", "out", "--onnx", "exported"])
        found = [
            one.predict(["title 1", "title 4"], mode="flat")
            for one in (coder, OnnxCoder("exported"))
        ]
        assert found[0].filter(like="class_").equals(found[1].filter(like="class_"))


def test_what_review_says_trains_on(of_words: Path, tmp_path: Path):
    model, coded, corrected = (
        ("--model", of_words / "out"),
        tmp_path / "coded.csv",
        tmp_path / "review.csv",
    )
    run(
        "-m",
        "histocoder",
        "predict",
        *model,
        *("--input", of_words / "t.csv", "--output", coded, "--columns", "m_"),
    )
    flags = ("--predictions", coded, "--output", corrected, "--budget", 9)
    *_, command = run(
        "-m", "histocoder", "review", *model, *flags, env=environment(PATH="")
    ).stdout.splitlines()
    review = pd.read_csv(corrected, dtype=object)
    assert {*review["class_1"]} <= {*CLASSES, "'=clerk's"}  # which no spreadsheet runs
    review.loc[0, ["checked", "class_1", "class_2"]] = ["x", "Æ & new/one", ""]
    review.to_csv(corrected, index=False)
    said = run(*shlex.split(command)[1:]).stdout
    assert (
        "1 checked row is used; 8 unchecked rows are ignored" in said
        and "New codes: Æ & new/one (1)." in said
    )
    old, new = (read_model_config(of_words / name) for name in ("out", "out-2"))
    assert new.codes == (*old.codes, "Æ & new/one")
    assert new.formatter == {**old.formatter, "labels": [*new.codes]}


def test_a_new_run_deletes_no_model(table: Path, tmp_path: Path):
    out = tmp_path / "out"
    args, earlier = (
        finetune(table, out, "--batch-size", 8, "--max-steps", 2),
        "holds the model of an earlier run",
    )
    run(*args)
    shutil.copytree(out, tmp_path / "other")
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    for other in ("never", tmp_path / "other"):
        assert earlier in refused(*args, "--resume", other)
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before
    shutil.rmtree(out / "checkpoints")
    assert earlier in refused(*args)
    run(*args, "--overwrite")
    (out / "model.safetensors").unlink()
    shutil.rmtree(out / "checkpoints")
    assert earlier in refused(*args, "--resume", "never")
    run(*args)  # as if killed before the first checkpoint


def test_a_finished_run_resumes_with_more_epochs(table: Path, tmp_path: Path):
    out, saving = (
        tmp_path / "out",
        ("--batch-size", 8, "--save-interval", 1, "--keep-checkpoints", 9),
    )
    run(*finetune(table, out, *saving, "--num-epochs", 1, "--min-steps", 9))
    earlier = [write(out / name, "earlier") for name in ("report.html", "metrics.json", "last.bin")]
    run(*finetune(table, out, *saving, "--num-epochs", 2))
    assert logged(out, "step")[-1] == 14 and not any(path.exists() for path in earlier)
    with pytest.raises(
        AssertionError
    ):  # step 10 is at the new schedule's learning rate, not at the last one's, 0
        assert_same_weights(
            out / "checkpoints" / "step-0000009", out / "checkpoints" / "step-0000010"
        )


def test_workers_change_nothing(table: Path, tmp_path: Path):
    extra = ("--batch-size", 8, "--max-steps", 18)
    run(*finetune(table, tmp_path / "none", *extra))
    run(
        *finetune(
            table,
            tmp_path / "two",
            *extra,
            "--num-workers",
            2,
            "--persistent-workers",
            "--prefetch-factor",
            3,
        )
    )
    assert_same_weights(tmp_path / "none", tmp_path / "two")


def test_initial_checkpoint(table: Path, tmp_path: Path):
    first = tmp_path / "first"
    run(*finetune(table, first, "--batch-size", 8, "--max-steps", 2))
    # one step at a rate that float32 rounds to 0: nothing is learnt
    still = "--batch-size 8 --max-steps 1 --recipe reference --flat-loss softmax"
    rates = ("--learning-rate", 1e-60, "--encoder-learning-rate", 1e-60)
    still = (*still.split(), *rates, "--initial-checkpoint", first)
    run(*finetune(table, tmp_path / "whole", *still))
    assert_same_weights(first, tmp_path / "whole")

    long = refused(*finetune(table, tmp_path / "long", *still, "--max-len", 512))
    assert "The model reads 128 positions at most; set --max-len" in long

    other = write_table(tmp_path / "other.csv", two_codes=True)
    other.write_text(other.read_text().replace("58340", "11111"))
    run(*finetune(other, tmp_path / "more", *still))
    with (tmp_path / "more" / "key.csv").open() as file:
        codes = {code for code, _ in csv.reader(file)}
    assert {"58340", "11111"} <= codes, codes
    run(*finetune(other, tmp_path / "encoder", *still, "--only-encoder"))
    for name, tensor in weights(first).items():
        if name.startswith("encoder."):
            assert torch.equal(weights(tmp_path / "encoder")[name], tensor)


def test_last_bin_in_the_references_form(table: Path, tmp_path: Path):
    first, again = tmp_path / "first", tmp_path / "again"
    run(*finetune(table, first, "--batch-size", 8, "--max-steps", 2, "--save-format", "occcanine"))
    saved = torch.load(first / "last.bin", weights_only=True)
    assert set(saved) == {"model", "optimizer", "scheduler", "step", "key"} and saved["step"] == 2
    assert saved["key"]["61110"] == 1 and len(saved["model"]["decoder.head.weight"]) == 2087
    names = [name for name, _ in load_model(first).named_parameters()]
    theirs = torch.nn.ParameterList(saved["model"][name] for name in names)
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=1.0)  # as OccCANINE makes it
    optimizer.load_state_dict(saved["optimizer"])
    for parameter in theirs.parameters():
        parameter.grad = torch.zeros_like(parameter)
        assert optimizer.state[parameter]["exp_avg"].shape == parameter.shape
    optimizer.step()
    assert not optimizer.param_groups[0]["fused"]
    rates = (
        "--learning-rate",
        1e-60,
        "--encoder-learning-rate",
        1e-60,
    )  # which float32 rounds to 0
    still = (
        "--batch-size",
        8,
        "--max-steps",
        1,
        *rates,
        "--initial-checkpoint",
        first / "last.bin",
    )
    run(*finetune(table, again, *still))
    assert_same_weights(first, again)
    other = refused(*finetune(table, tmp_path / "other", *still, "--encoder", "small"))
    assert "do not fit this model (" in other and len(other) < 600

    run(*finetune(table, tmp_path / "prior", "--batch-size", 8, "--max-steps", 1))
    again = (
        "--batch-size",
        8,
        "--save-format",
        "occcanine",
        "--initial-checkpoint",
        tmp_path / "prior",
    )
    said = refused(*finetune(table, tmp_path / "out", *again))
    assert "its decoder uses the flat head's probabilities as a prior" in said
    assert not (tmp_path / "out" / "args.yaml").exists()


def test_two_ranks_mix_indices_as_one_does_codes(tmp_path: Path):
    table, codes = write_table(tmp_path / "t.csv", two_codes=True), tmp_path / "codes"
    key = ["-1", "58340", "61110", "71105", "75400", "77610", "79100", "80110", "95410"]
    path = write(
        tmp_path / "key.csv", "system_code,code", *(f"{code},{i}" for i, code in enumerate(key))
    )
    mixer = [
        "train_mixer.py",
        *TINY,
        "--train-data",
        table,
        "--val-data",
        table,
        "--key",
        path,
        "--max-steps",
        6,
    ]
    run(*mixer, "--save-dir", codes, "--batch-size", 8)
    start = ("--batch-size", 8, "--initial-checkpoint", codes, "--key", codes / "key.csv")
    assert "in another form (hisco, 5 of 5 tokens)" in refused(
        *finetune(table, tmp_path / "out", *start)
    )
    text = table.read_text().replace("hisco_", "code")
    for i, code in enumerate(key):
        text = text.replace(code, str(i))
    table.write_text(text)
    two_ranks([*mixer, "--save-dir", tmp_path / "indices", "--batch-size", 4])
    assert logged(tmp_path / "indices", "val_loss") == pytest.approx(
        logged(codes, "val_loss"), abs=3e-5
    )
    assert_same_weights(codes, tmp_path / "indices", tolerance=1e-4)
    assert len(weights(codes)["linear_decoder.bias"]) == len(key)


def test_trains_in_a_folder_with_other_files(table: Path, tmp_path: Path):
    args = finetune(table, tmp_path, "--batch-size", 8, "--max-steps", 1)
    said = run(*args, "--prepare-only").stdout
    assert "Train on it:" in said and not said.rstrip().endswith("--prepare-only")
    assert (tmp_path / "prepared.json").exists() and not (tmp_path / "config.json").exists()
    (tmp_path / "notes.md").write_text("mine")
    run(*args)
    assert "Resuming" not in run(*args, "--overwrite").stdout
    assert (tmp_path / "notes.md").read_text() == "mine" and table.exists()
