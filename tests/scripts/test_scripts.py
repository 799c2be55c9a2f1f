"""The real scripts, in processes of their own: alone, under torchrun, interrupted, resumed."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest
import torch
import yaml
from conftest import DEADLINE, ROOT, environment, free_port, run, shared, write_table
from jobs import TINY, assert_same_weights, change_state, finetune, logged, two_ranks, weights

from histocoder import Coder
from histocoder.checkpoints.model_files import load_model, read_model_config
from histocoder.cli.main import main


def test_a_run_and_its_files(table: Path, tmp_path: Path):
    out = tmp_path / "out"
    extra = ("--batch-size", 8, "--max-steps", 9, "--save-interval", 3, "--eval-interval", 4, "--language", "en")
    result = run(*finetune(table, out, *extra), fresh=True)
    assert "step 9/9" in result.stdout and "validation at step 9" in result.stdout
    assert not result.stderr
    assert {p.name for p in out.iterdir()} == {
        *("data_train.csv", "data_val.csv", "key.csv", "rejected.csv", "prepared.json", "args.yaml"),
        *(
            "config.json",
            "model.safetensors",
            "manifest.json",
            "README.md",
            "checkpoints",
            "best",
            "logs.csv",
            "examples.arrow",
        ),
    }
    assert sorted(p.name for p in (out / "checkpoints").iterdir()) == ["step-0000006", "step-0000009"]
    assert logged(out, "step") == [1, 2, 3, 4, 4, 5, 6, 7, 8, 8, 9, 9]
    assert len(logged(out, "val_loss")) == 3 and logged(out, "lr")[-1] == 0
    config = json.loads((out / "config.json").read_text())
    form = {"name": "general", "num_blocks": 1, "block_size": 5, "use_within_block_sep": False}
    assert {name: config["formatter"][name] for name in form} == form and len(config["formatter"]["symbols"]) < 100
    assert config["languages"] == ["en", "unk"] and len(config["codes"]) == 8
    assert not any(name.startswith("module.") for name in weights(out))

    again = run(*finetune(table, out, *extra))
    assert "Using the data prepared" in again.stdout and "Resuming from step 9" in again.stdout

    table_of_codes = run("-m", "histocoder", "predict", "--model", out, "--language", "en", "farmer", "nan").stdout
    assert "farmer" in table_of_codes and "prob_1" in table_of_codes


def test_the_report_of_a_run(table: Path, tmp_path: Path):
    args = [
        arg for arg in finetune(table, tmp_path / "out", "--batch-size", 8, "--max-steps", 2) if arg != "--no-report"
    ]
    result = run(*args)
    html = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert "got exactly the right codes" in result.stdout and "report.html" in result.stdout
    assert "<h1" in html and "Training" in html and "http://" not in html
    metrics = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert metrics["num_rows"] == 6
    accuracy = 100 * metrics["answer"]["overall"]["accuracy"]
    assert accuracy == pytest.approx(logged(tmp_path / "out", "greedy_seq_acc")[-1], abs=1e-3)  # as logs.csv rounds
    again = run(
        *("-m", "histocoder", "evaluate", "--model", tmp_path / "out" / "best", "--save-thresholds"),
        *("--data", tmp_path / "out" / "data_val.csv", "--output", tmp_path / "evaluation"),
    )
    assert "None of the descriptions occurs in" in again.stdout  # it found what the run was trained on
    assert json.loads((tmp_path / "out" / "best" / "config.json").read_text())["thresholds"].keys() == {"*"}
    assert (tmp_path / "evaluation" / "report.html").exists()


@pytest.mark.slow
def test_args_yaml_repeats_a_run(table: Path, tmp_path: Path):
    run(*finetune(table, tmp_path / "a", "--batch-size", 8, "--max-steps", 4, "--augmentation-prob", 0.5))
    args = yaml.safe_load((tmp_path / "a" / "args.yaml").read_text())
    assert args["augmentation_prob"] == 0.5 and args["seed"] == 42
    run("finetune.py", "--config", tmp_path / "a" / "args.yaml", "--save-path", tmp_path / "b", fresh=True)
    assert_same_weights(tmp_path / "a", tmp_path / "b")


@pytest.mark.slow
def test_a_frozen_encoder_under_two_ranks(table: Path, tmp_path: Path):
    extra = ("--freeze-encoder", "--eval-interval", 3, "--augmentation-prob", 0, "--unk-lang-prob", 0)
    run(*finetune(table, tmp_path / "one", *extra, "--batch-size", 8, "--max-steps", 6))
    first, other = two_ranks(finetune(table, tmp_path / "two", *extra, "--batch-size", 4, "--max-steps", 6))
    assert (first.stdout + other.stdout).count("are computed once") == 2  # of training and validation data, by rank 0
    assert logged(tmp_path / "two", "val_loss") == pytest.approx(logged(tmp_path / "one", "val_loss"), abs=1e-5)
    start = tmp_path / "start"
    run(*finetune(table, start, "--batch-size", 8, "--max-steps", 1, "--warmup-pct", 1))  # a first step at rate 0
    for name, tensor in weights(tmp_path / "two").items():
        assert torch.equal(tensor, weights(start)[name]) == (name.startswith("encoder.") or "pos_embedding" in name), (
            name
        )


def interrupted(args: tuple[object, ...], *, at_step: int, signum: int, launcher: tuple[str, ...] = ()) -> int:
    """Start a run, send a signal once it has done some steps, and return how it ended."""
    command = [sys.executable, *launcher, *map(str, args)]
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    started = time.monotonic()
    try:
        for line in process.stdout:
            assert time.monotonic() - started < DEADLINE
            if line.startswith(f"step {at_step}/"):
                os.killpg(process.pid, signum) if signum == signal.SIGINT else process.send_signal(signum)
                break
        process.stdout.read()
        return process.wait(timeout=DEADLINE)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_resumes_identically(tmp_path: Path, signum: int):
    table = write_table(tmp_path / "t.csv", copies=2)
    extra = ("--batch-size", 8, "--max-steps", 40, "--eval-interval", 10, "--save-interval", 7, "--dropout", 0.1)
    run(*finetune(table, tmp_path / "whole", *extra))
    args = finetune(table, tmp_path / "parts", *extra)
    assert interrupted(args, at_step=17, signum=signum) == 128 + signum  # in the second epoch
    saved = max(int(p.name[5:]) for p in (tmp_path / "parts" / "checkpoints").iterdir())
    assert 17 <= saved < 40
    rest = run(*args)
    assert f"Resuming from step {saved}" in rest.stdout and f"step {saved + 1}/40" in rest.stdout
    assert_same_weights(tmp_path / "whole", tmp_path / "parts")
    for column in ("step", "train_loss", "val_loss", "lr", "grad_norm"):
        assert logged(tmp_path / "whole", column) == logged(tmp_path / "parts", column), column


@pytest.mark.slow
def test_an_interrupted_run_of_two_ranks_goes_on(tmp_path: Path):
    table = write_table(tmp_path / "t.csv", copies=2)
    extra = ("--batch-size", 4, "--max-steps", 25, "--dropout", 0.1)
    two_ranks(finetune(table, tmp_path / "whole", *extra))
    args = finetune(table, tmp_path / "parts", *extra)
    launcher = ("-m", "torch.distributed.run", "--nproc_per_node=2", f"--master_port={free_port()}")
    assert interrupted(args, at_step=17, signum=signal.SIGINT, launcher=launcher) != 0
    assert "Resuming from step" in two_ranks(args)[0].stdout
    assert_same_weights(tmp_path / "whole", tmp_path / "parts")


def test_codes_of_several_lengths(tmp_path: Path):
    table = tmp_path / "psti.csv"
    rows = [f'"{title} no {i}","{code}"' for i in range(12) for title, code in (("miller", "1,10,2"), ("cook", "80,4"))]
    table.write_text("occ1,hisco_1\n" + "\n".join(rows) + "\n")
    extra = ("--use-within-block-sep", "--block-size", 8, "--allow-codes-shorter-than-block-size", "--batch-size", 4)
    run(*finetune(table, tmp_path / "out", *extra, "--max-steps", 2))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["codes"] == ["1,10,2", "80,4"]


CLASSES = ["craft & trade", "Bauer/Knecht", "wood, metal", "=clerk's", "væver", "farmer"]


def words_run(folder: Path, out: str) -> list[object]:
    columns = ("--target-cols", "class_1", "class_2", "--no-refit", "--batch-size", 8)
    return ["finetune.py", "--dataset", folder / "t.csv", *columns, *TINY, "--save-path", folder / out]


@pytest.fixture(scope="module")
def of_words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a table `t.csv` of classes in words, and the model `out`, trained on it and resumed."""
    folder = tmp_path_factory.mktemp("words")
    rows = [[f"title {i} no {j}", name, CLASSES[i - 1]] for i, name in enumerate(CLASSES) for j in range(12)]
    pd.DataFrame(rows, columns=["occ1", "class_1", "class_2"]).to_csv(folder / "t.csv", index=False)
    for steps in (2, 3):
        told = run(*words_run(folder, "out"), "--max-steps", steps).stdout
    assert "Resuming from step 2" in told
    return folder


def test_classes_in_words_are_predicted(of_words: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(of_words)
    written = pd.read_csv("out/key.csv")["system_code"].str.removeprefix("'")  # of formulas
    assert written.tolist() == sorted(CLASSES)
    coder = Coder.from_pretrained("out")
    assert coder.codes == tuple(sorted(CLASSES)) and coder.predict("cook", mode="full").columns.tolist() == [
        *coder.codes
    ]
    for mode in ("greedy", "flat", "topk", "combined"):
        assert {*coder.predict("cook", mode=mode).filter(like="class_").iloc[0]} <= {*CLASSES, None}
    for suffix, read in (("xlsx", pd.read_excel), ("dta", pd.read_stata), ("parquet", pd.read_parquet)):
        flags = ["--input", "t.csv", "--output", f"coded.{suffix}", "--columns", "m_", "--known", "auto", "--raw"]
        main(["predict", "--model", "out", *flags])
        coded = read(f"coded.{suffix}")
        is_known = coded["m_source"] == "known"
        assert (coded["m_class_1"] == coded["class_1"])[is_known].all() and is_known.sum() == 65
        assert set(coded["m_class_1"]) <= set(CLASSES)
    main(["evaluate", "--model", "out", "--data", "t.csv", "--output", "evaluation"])
    metrics = json.loads(Path("evaluation/metrics.json").read_text())
    assert {one["code"] for one in metrics["by_code"]} >= {*CLASSES} and not metrics["answer"]["by_digits"]
    if importlib.util.find_spec("onnxruntime"):
        main(["export", "--model", "out", "--onnx", "exported"])
        found = [one.predict(["title 1", "title 4"], mode="flat") for one in (coder, Coder.from_onnx("exported"))]
        assert found[0].filter(like="class_").equals(found[1].filter(like="class_"))


def test_classes_in_words_are_corrected(of_words: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(of_words)
    main(["predict", "--model", "out", "--input", "t.csv", "--output", "coded.csv", "--columns", "m_"])
    main(["review", "--model", "out", "--predictions", "coded.csv", "--output", "review.csv", "--budget", "9"])
    review = pd.read_csv("review.csv")
    assert {*review["class_1"]} <= {*CLASSES, "'=clerk's"}  # which no spreadsheet runs
    review.assign(checked="x", class_1="Æ & new/one", class_2="").to_csv("review.csv", index=False)
    start = ("--initial-checkpoint", of_words / "out", "--corrections", of_words / "review.csv", "--max-steps", 1)
    run(*words_run(of_words, "again"), *start)
    old, new = (read_model_config(of_words / name) for name in ("out", "again"))
    assert new.codes == (*old.codes, "Æ & new/one")
    assert new.formatter == {**old.formatter, "labels": [*new.codes]}


def test_the_mixer_takes_classes_in_words(tmp_path: Path):
    rows = [[f"{name} no {j}", "en", name] for name in CLASSES[:3] for j in range(6)]
    pd.DataFrame(rows, columns=["occ1", "lang", "class"]).to_csv(tmp_path / "t.csv", index=False)
    files = ("--train-data", tmp_path / "t.csv", "--val-data", tmp_path / "t.csv", "--save-dir", tmp_path / "out")
    form = ("--formatter", "general", "--target-cols", "class", "--batch-size", 8, "--max-steps", 1)
    run("train_mixer.py", *files, *TINY, *form)
    coder = Coder.from_pretrained(tmp_path / "out")
    assert coder.codes == tuple(sorted(CLASSES[:3])) and coder.formatter.block_size == 1
    for mode in ("greedy", "flat", "topk", "combined"):
        assert {*coder.predict("cook", mode=mode).filter(like="class_").iloc[0]} <= {*CLASSES[:3], None}


def test_weights_of_another_form_of_codes_are_refused(tmp_path: Path):
    train, val = mixer_files(tmp_path)
    mixer = ("--train-data", train, "--val-data", val, "--save-dir", tmp_path / "mixer", "--batch-size", 8)
    run("train_mixer.py", *mixer, *TINY, "--max-steps", 1)
    start = ("--initial-checkpoint", tmp_path / "mixer", "--key", tmp_path / "mixer" / "key.csv")
    refused = run(*finetune(train, tmp_path / "out", "--batch-size", 8, *start), check=False)
    assert refused.returncode == 2 and "in another form (hisco, 5 of 5 tokens)" in refused.stderr


def test_going_on_from_an_older_checkpoint_drops_the_newer(table: Path, tmp_path: Path):
    out, extra = tmp_path / "out", ("--batch-size", 8, "--save-interval", 2, "--keep-checkpoints", 9)
    run(*finetune(table, out, *extra, "--max-steps", 6))
    older = out / "checkpoints" / "step-0000002"
    run(*finetune(table, out, *extra, "--max-steps", 5, "--resume", older))
    assert sorted(p.name[-1] for p in (out / "checkpoints").iterdir()) == ["2", "4", "5"]
    assert "resume" not in yaml.safe_load((out / "args.yaml").read_text())


@pytest.mark.slow
def test_a_new_run_forgets_an_earlier_best(table: Path, tmp_path: Path):
    extra = ("--batch-size", 8, "--save-interval", 2, "--eval-interval", 2, "--max-steps", 4)
    first = tmp_path / "first"
    run(*finetune(table, first, *extra))
    change_state(first / "checkpoints" / "step-0000002", lambda state: state.update(best_accuracy=100.0))
    best = first / "best" / "model.safetensors"
    before = best.stat().st_mtime_ns
    run(*finetune(table, tmp_path / "second", *extra, "--resume", first / "checkpoints" / "step-0000002"))
    assert (tmp_path / "second" / "best" / "model.safetensors").read_bytes() == best.read_bytes()
    run(*finetune(table, first, *extra, "--resume", first / "checkpoints" / "step-0000002"))
    assert best.stat().st_mtime_ns == before
    run(*finetune(table, tmp_path / "third", *extra, "--resume", first))  # which has no step left
    assert (tmp_path / "third" / "best" / "model.safetensors").exists()


def test_saving_each_epoch(table: Path, tmp_path: Path):
    extra = ("--batch-size", 8, "--num-epochs", 2, "--save-each-epoch", "--save-interval", 100, "--keep-checkpoints", 5)
    run(*finetune(table, tmp_path / "out", *extra))
    steps = math.ceil(json.loads((tmp_path / "out" / "prepared.json").read_text())["rows"]["train"] / 8)
    saved = sorted(p.name for p in (tmp_path / "out" / "checkpoints").iterdir())
    assert saved == [f"step-{steps:07}", f"step-{2 * steps:07}"]


def test_resuming_with_other_settings_is_refused(table: Path, tmp_path: Path):
    run(*finetune(table, tmp_path / "out", "--batch-size", 8, "--max-steps", 2))
    other = run(*finetune(table, tmp_path / "out", "--batch-size", 4, "--max-steps", 4), check=False)
    assert other.returncode == 2 and "8     4" in other.stderr and "add --overwrite" in other.stderr
    assert "With 1 process, set --batch-size 8." in other.stderr
    again = run(*finetune(table, tmp_path / "out", "--batch-size", 4, "--max-steps", 4, "--overwrite"))
    assert "Resuming" not in again.stdout and logged(tmp_path / "out", "step")[0] == 1


def test_a_new_run_deletes_no_model(table: Path, tmp_path: Path):
    out, steps = tmp_path / "out", ("--batch-size", 8, "--max-steps", 2)
    run(*finetune(table, out, *steps))
    shutil.copytree(out, tmp_path / "other")
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}

    def refused(*flags: object) -> bool:
        ended = run(*finetune(table, out, *steps, *flags), check=False)
        return ended.returncode == 2 and "holds the model of an earlier run" in ended.stderr

    assert refused("--resume", "never") and refused("--resume", tmp_path / "other")
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before
    shutil.rmtree(out / "checkpoints")
    assert refused() and not refused("--overwrite")
    (out / "model.safetensors").unlink()
    shutil.rmtree(out / "checkpoints")
    assert refused("--resume", "never") and not refused()  # as if killed before the first checkpoint


def test_a_finished_run_resumes_with_more_epochs(table: Path, tmp_path: Path):
    saving, steps = ("--batch-size", 8, "--save-interval", 1, "--keep-checkpoints", 9), tmp_path / "out" / "checkpoints"
    run(*finetune(table, tmp_path / "out", *saving, "--num-epochs", 1, "--min-steps", 9))
    run(*finetune(table, tmp_path / "out", *saving, "--num-epochs", 2))
    assert logged(tmp_path / "out", "step")[-1] == 16
    with pytest.raises(AssertionError):  # step 10 is at the new schedule's learning rate, not at the last one's, 0
        assert_same_weights(steps / "step-0000009", steps / "step-0000010")


def test_a_new_model_is_not_beside_an_earlier_report(table: Path, tmp_path: Path):
    out, results = tmp_path / "out", ("report.html", "metrics.json", "last.bin")
    run(*finetune(table, out, "--batch-size", 8, "--max-steps", 2))
    for name in results:
        (out / name).touch()
    run(*finetune(table, out, "--batch-size", 8, "--max-steps", 4))
    assert not any((out / name).exists() for name in results)


def test_a_damaged_checkpoint_is_named(table: Path, tmp_path: Path):
    run(*finetune(table, tmp_path / "out", "--batch-size", 8, "--max-steps", 2))
    path = tmp_path / "out" / "checkpoints" / "step-0000002" / "optimizer.pt"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    result = run(*finetune(table, tmp_path / "out", "--batch-size", 8, "--max-steps", 4), check=False)
    assert result.returncode == 2 and "optimizer.pt is missing or damaged" in result.stderr


def test_workers_change_nothing(table: Path, tmp_path: Path):
    extra = ("--batch-size", 8, "--max-steps", 18)
    run(*finetune(table, tmp_path / "none", *extra))
    run(*finetune(table, tmp_path / "two", *extra, "--num-workers", 2, "--persistent-workers", "--prefetch-factor", 3))
    assert_same_weights(tmp_path / "none", tmp_path / "two")


def mixer_files(folder: Path) -> tuple[Path, Path]:
    return write_table(folder / "train.csv", two_codes=True), write_table(folder / "val.csv", two_codes=True)


def test_train_mixer_under_two_ranks(tmp_path: Path):
    train, val = mixer_files(tmp_path)
    common = ("train_mixer.py", "--train-data", train, train, "--val-data", val, *TINY, "--max-steps", 6)
    run(*common, "--save-dir", tmp_path / "one", "--batch-size", 8)
    two_ranks([*common, "--save-dir", tmp_path / "two", "--batch-size", 4])
    assert logged(tmp_path / "two", "val_loss") == pytest.approx(logged(tmp_path / "one", "val_loss"), abs=3e-5)
    config = json.loads((tmp_path / "two" / "config.json").read_text())
    assert config["formatter"]["name"] == "hisco" and config["formatter"]["num_blocks"] == 5


def test_train_mixer_reads_indices_with_a_key(tmp_path: Path):
    train, val = mixer_files(tmp_path)
    key = ["-1", "58340", "61110", "71105", "75400", "77610", "79100", "80110", "95410"]
    (tmp_path / "key.csv").write_text("system_code,code\n" + "".join(f"{code},{i}\n" for i, code in enumerate(key)))
    for path in (train, val):
        text = path.read_text().replace("hisco_", "code")
        for i, code in enumerate(key):
            text = text.replace(code, str(i))
        path.with_suffix(".index.csv").write_text(text)
    common = ("train_mixer.py", *TINY, "--batch-size", 8, "--max-steps", 3, "--key", tmp_path / "key.csv")
    run(*common, "--train-data", train, "--val-data", val, "--save-dir", tmp_path / "codes")
    indexed = (path.with_suffix(".index.csv") for path in (train, val))
    run(*common, "--train-data", next(indexed), "--val-data", next(indexed), "--save-dir", tmp_path / "indices")
    assert_same_weights(tmp_path / "codes", tmp_path / "indices")
    assert len(weights(tmp_path / "codes")["linear_decoder.bias"]) == len(key)


def test_a_key_in_the_runs_folder_is_kept(tmp_path: Path):
    train, val = mixer_files(tmp_path)
    out = tmp_path / "out"
    files = ("--train-data", train, "--val-data", val, "--save-dir", out)
    run("train_mixer.py", *files, *TINY, "--batch-size", 8, "--max-steps", 1)
    lines = (out / "key.csv").read_text().splitlines()
    key = "\n".join([f"{lines[0]},remarks", *(f"{line},mine" for line in lines[1:])]) + "\n"
    (out / "key.csv").write_text(key)
    args = ("--batch-size", 8, "--max-steps", 2, "--key", out / "key.csv")
    assert "Resuming from step 1" in run("train_mixer.py", *files, *TINY, *args).stdout
    assert (out / "key.csv").read_text() == key


def test_initial_checkpoint(table: Path, tmp_path: Path):
    run(*finetune(table, tmp_path / "first", "--batch-size", 8, "--max-steps", 2))
    # one step at rate 0: nothing is learnt
    still = ("--batch-size", 8, "--max-steps", 1, "--warmup-pct", 1, "--recipe", "reference", "--flat-loss", "softmax")
    whole = finetune(table, tmp_path / "whole", *still, "--initial-checkpoint", tmp_path / "first")
    assert "no effect" not in run(*whole).stdout
    assert_same_weights(tmp_path / "first", tmp_path / "whole")
    resumed = run(*whole, "--only-encoder").stdout
    assert "Notice: --initial-checkpoint and --only-encoder have no effect on a resumed run" in resumed

    long = finetune(table, tmp_path / "long", *still, "--initial-checkpoint", tmp_path / "first", "--max-len", 512)
    assert "The model reads 128 positions at most; set --max-len" in run(*long, check=False).stderr

    other = write_table(tmp_path / "other.csv", two_codes=True)
    other.write_text(other.read_text().replace("58340", "11111"))
    args = finetune(other, tmp_path / "encoder", *still, "--initial-checkpoint", tmp_path / "first")
    refused = run(*args, check=False)
    assert refused.returncode == 2 and "11111" in refused.stderr and "--only-encoder" in refused.stderr
    run(*args, "--only-encoder")
    for name, tensor in weights(tmp_path / "first").items():
        if name.startswith("encoder."):
            assert torch.equal(weights(tmp_path / "encoder")[name], tensor)


def test_what_review_says_trains_on(table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    first = tmp_path / "first"
    run(*finetune(table, first, "--batch-size", 8, "--max-steps", 2, "--language", "en"))
    (tmp_path / "census.csv").write_text("title\nostler\nfarmer\nbaker\n")
    files = ("--input", tmp_path / "census.csv", "--output", tmp_path / "coded.csv", "--input-col", "title")
    main(["predict", "--model", str(first), *map(str, files)])
    capsys.readouterr()
    flags = ("--predictions", tmp_path / "coded.csv", "--output", tmp_path / "review.csv", "--input-col", "title")
    main(["review", "--model", str(first), *map(str, flags)])
    *_, command = capsys.readouterr().out.splitlines()
    review = pd.read_csv(tmp_path / "review.csv", dtype=str).set_index("occ1")
    review.loc["ostler", ["checked", "hisco_1"]] = ["x", "62430"]
    review.to_csv(tmp_path / "review.csv")
    said = run(*shlex.split(command)[1:]).stdout
    assert "1 checked rows are used; 2 unchecked rows are ignored" in said and "New codes: 62430 (1)." in said
    before, after = (read_model_config(tmp_path / name) for name in ("first", "first-2"))
    assert after.codes == (*before.codes, "62430") and after.vocab_size == before.vocab_size


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
    still = ("--batch-size", 8, "--max-steps", 1, "--warmup-pct", 1, "--initial-checkpoint", first / "last.bin")
    run(*finetune(table, again, *still))
    assert_same_weights(first, again)
    other = run(*finetune(table, tmp_path / "other", *still, "--encoder", "small"), check=False)
    assert other.returncode == 2 and "do not fit this model (" in other.stderr and len(other.stderr) < 600


def test_last_bin_refuses_a_decoder_with_prior(table: Path, tmp_path: Path):
    first, again, steps = tmp_path / "first", tmp_path / "again", ("--batch-size", 8, "--max-steps", 2)
    run(*finetune(table, first, *steps))
    for out, extra in ((first, ()), (again, ("--initial-checkpoint", first))):
        refused = run(*finetune(table, out, *steps, *extra, "--save-format", "occcanine"), check=False)
        assert refused.returncode == 2 and "its decoder uses the flat head's probabilities as a prior" in refused.stderr
        assert not (out / "last.bin").exists()
    assert not (again / "args.yaml").exists()


@pytest.mark.slow
def test_the_encoder_of_a_published_file(table: Path, tmp_path: Path):
    expected = json.loads(shared("reference/occcanine/expected.json").read_text())
    from transformers import CanineConfig, CanineModel

    CanineModel(CanineConfig(**expected["canine_config"])).save_pretrained(tmp_path / "sizes")
    start = ("--initial-checkpoint", shared("reference/occcanine/last.bin"), "--only-encoder")
    run(
        *("finetune.py", "--dataset", table, "--target-cols", "hisco_1", "--save-path", tmp_path / "out"),
        *("--batch-size", 8, "--max-steps", 1, "--warmup-pct", 1, "--encoder", tmp_path / "sizes", *start),
    )
    published = torch.load(shared("reference/occcanine/last.bin"), weights_only=True)["model"]
    for name, tensor in weights(tmp_path / "out").items():
        if name.startswith("encoder."):
            assert torch.equal(published[name], tensor)


@pytest.mark.slow
def test_wandb_offline_keeps_its_run(table: Path, tmp_path: Path):
    extra = ("--batch-size", 8, "--max-steps", 2, "--log-wandb", "--run-name", "a name")
    run(*finetune(table, tmp_path / "out", *extra), fresh=True)
    run_id = (tmp_path / "out" / "wandb_run_id").read_text().strip()
    run(*finetune(table, tmp_path / "out", *extra, "--max-steps", 4), fresh=True)
    assert (tmp_path / "out" / "wandb_run_id").read_text().strip() == run_id
    assert len(list((tmp_path / "out" / "wandb").glob(f"offline-run-*-{run_id}"))) >= 1

    without = [str(arg) for arg in finetune(table, tmp_path / "plain", "--batch-size", 8, "--max-steps", 1)]
    predict = [str(arg) for arg in ("histocoder", "predict", "--model", tmp_path / "plain", "farmer")]
    code = f"""
import runpy, sys
sys.argv = {without!r}
runpy.run_path("finetune.py", run_name="__main__")
sys.argv = {predict!r}
runpy.run_module("histocoder", run_name="__main__")
print({{"wandb", "tensorboard", "transformers"}} & set(sys.modules))"""
    result = run("-c", code, fresh=True)
    assert "farmer" in result.stdout and result.stdout.splitlines()[-1] == "set()"


def test_prepare_only_prepares_and_stops(table: Path, tmp_path: Path):
    run(*finetune(table, tmp_path / "out", "--prepare-only"))
    assert (tmp_path / "out" / "prepared.json").exists() and not (tmp_path / "out" / "config.json").exists()
    run(*finetune(table, tmp_path / "out", "--batch-size", 8, "--max-steps", 1))
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_trains_in_a_folder_with_other_files(table: Path, tmp_path: Path):
    args = finetune(table, tmp_path, "--batch-size", 8, "--max-steps", 1)
    run(*args, "--prepare-only")
    (tmp_path / "README.md").write_text("mine")
    refused = run(*args, check=False)
    assert refused.returncode == 2 and "contains README.md" in refused.stderr
    (tmp_path / "README.md").rename(tmp_path / "notes.md")
    run(*args)
    run(*args, "--overwrite")
    assert (tmp_path / "notes.md").read_text() == "mine" and table.exists()


def test_examples_are_read_once(table: Path, tmp_path: Path):
    one = tmp_path / "one"
    files = ("--train-data", one / "data_train.csv", "--val-data", one / "data_val.csv", "--key", one / "key.csv")
    run(*finetune(table, one, "--prepare-only"))
    extra = (*("--formatter", "hisco", "--encoder", "tiny", "--max-steps", 2, "--batch-size", 4), "--no-report")
    mixer = ("train_mixer.py", *files, *extra, "--cache-dir", tmp_path / "cache", "--save-dir")
    said = "".join(one.stdout for one in two_ranks((*mixer, tmp_path / "two")))
    assert said.count("Read data_train.csv, data_val.csv into") == 1
    again = two_ranks((*mixer, tmp_path / "three"))
    assert not any("Read data" in one.stdout for one in again) and not (tmp_path / "three" / "examples.arrow").exists()
    assert_same_weights(tmp_path / "two", tmp_path / "three")


@pytest.mark.slow
def test_a_token_budget_under_two_ranks(table: Path, tmp_path: Path):
    extra = ("--num-epochs", 2, "--eval-interval", 10)
    run(*finetune(table, tmp_path / "one", *extra, "--tokens-per-batch", 400))
    two_ranks(finetune(table, tmp_path / "two", *extra, "--tokens-per-batch", 200))
    assert logged(tmp_path / "two", "val_loss") == pytest.approx(logged(tmp_path / "one", "val_loss"), abs=1e-5)
    assert logged(tmp_path / "one", "epoch")[-1] == 2 and logged(tmp_path / "one", "lr")[-1] == 0
    other = run(*finetune(table, tmp_path / "one", *extra, "--tokens-per-batch", 300), check=False)
    assert other.returncode == 2 and "positions a step" in other.stderr
