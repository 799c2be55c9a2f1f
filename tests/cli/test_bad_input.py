"""A user's mistakes: exit code 2, a sentence or two, no traceback, nothing half-written."""

from __future__ import annotations

import os
import re
import shlex
import stat
import sys
from pathlib import Path

import openpyxl
import pytest
from conftest import environment, run, write_table
from jobs import TINY, Torchrun, training, two_ranks

import finetune
import train_mixer
from histocoder.cli.arguments import parse
from histocoder.cli.script import run_script
from histocoder.config import FinetuneConfig

BASE = {
    "--dataset": "table.csv",
    "--target-cols": "hisco_1",
    "--encoder": "tiny",
    "--save-path": "out",
    "--batch-size": "8",
    "--max-steps": "1",
}

CASES = [
    ({"--dataset": "tabel.csv"}, r"File not found: tabel.csv. Did you mean table.csv"),
    ({"--dataset": None}, r"--dataset my.csv --target-cols"),
    ({"--target-cols": "hisco"}, r"no column 'hisco'; it has: occ1, hisco_1. Did you mean 'hisco_1'"),
    ({"--input-col": "occ"}, r"no column 'occ'"),
    ({"--dataset": "empty.csv"}, r"is empty"),
    ({"--dataset": "header.csv"}, r"has a header but no rows"),
    ({"--dataset": "ragged.csv"}, r"line 3: 3 fields"),
    ({"--dataset": "nul.csv"}, r"NUL byte in line 2"),
    ({"--dataset": "utf16.csv"}, r"UTF-16"),
    ({"--dataset": "unlabelled.csv"}, r"no code at all"),
    ({"--dataset": "one_class.csv"}, r"only one code \(61110\)"),
    ({"--dataset": "one_text.csv"}, r"one distinct description"),
    ({"--dataset": "short.csv"}, r"1 code has fewer than 5"),
    ({"--share-val": "0"}, r"--share-val is 0"),
    ({"--share-val": "1"}, r"--share-val is 1"),
    ({"--share-val": "x"}, r"invalid float value: 'x'"),
    ({"--language": "en", "--language-col": "lang"}, r"not both"),
    ({"--tokens-per-batch": "100"}, r"--tokens-per-batch is 100; set it to --max-len \(128\) or more"),
    ({"--batch-size": "0"}, r"--batch-size is 0"),
    ({"--batch-size": "100000000"}, r"--batch-size is 100000000; it must lie between 1 and 65536"),
    ({"--learning-rate": "-1"}, r"--learning-rate"),
    ({"--seed": "99999999999999999999"}, r"--seed is 99999999999999999999; it must lie between 0 and"),
    ({"--num-workers": "5000"}, r"--num-workers is 5000, far more than the \d+ processors"),
    ({"--max-len": "30"}, r"multiple of 4"),
    ({"--save-path": "table.csv"}, r"is a file"),
    ({"--save-path": "table.csv/out"}, r"table.csv"),
    ({"--save-path": "/proc/out"}, r"Can't write to /proc/out: .*Choose another folder"),
    ({"--encoder": "google/canine-x"}, r"Could not load the encoder.*--encoder PATH.*--encoder ngram"),
    ({"--encoder": "."}, r"no config.json"),
    ({"--distributed": ""}, r"needs a launcher: torchrun --nproc_per_node=2"),
    ({"--device": "cuda"}, r"no GPU here"),
    ({"--resume": "nowhere"}, r"there is no checkpoint"),
    ({"--initial-checkpoint": "nowhere"}, r"There is no nowhere"),
    ({"--initial-checkpoint": "table.csv"}, r"no weights that can be read"),
    ({"--only-encoder": ""}, r"--initial-checkpoint"),
    ({"--config": "nowhere.yaml"}, r"--config nowhere.yaml can't be read"),
    ({"--fn-word-freq": "table.csv"}, r"no column 'word'"),
    ({"--key": "table.csv"}, r"needs the columns system_code and code"),
    ({"--bach-size": "8"}, r"no flag --bach-size. Did you mean '--batch-size'"),
    ({"--block-size": "200"}, r"set --block-size to the longest"),
    ({"--target-cols": "alt_code"}, r"can't be called alt_code"),
    ({"--zero-pad-codes": "", "--use-within-block-sep": ""}, r"can't be used with"),
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    write_table(tmp_path / "table.csv")
    contents = {
        "empty": b"",
        "header": b"occ1,hisco_1\n",
        "ragged": b"occ1,hisco_1\na,61110\nb,61110,x\n",
        "nul": b"occ1,hisco_1\na\0,61110\n",
        "utf16": "occ1,hisco_1\na,61110\n".encode("utf-16"),
        "unlabelled": b"occ1,hisco_1\na,\nb, \n",
        "one_class": b"occ1,hisco_1\na,61110\nb,61110\n",
        "one_text": b"occ1,hisco_1\na,61110\na,41025\n",
        "short": b"occ1,hisco_1\na,61110\nb,2000\n",
    }
    for name, content in contents.items():
        (tmp_path / f"{name}.csv").write_bytes(content)
    return tmp_path


def ends_in_a_sentence(script, flags: dict[str, str | None], monkeypatch, capsys) -> str:
    argv = [part for name, value in flags.items() if value is not None for part in (name, value) if part]
    monkeypatch.setattr(sys, "argv", ["script.py", *argv])
    with pytest.raises(SystemExit) as ended:
        run_script(script.main)
    message, works, _ = capsys.readouterr().err.strip().partition("\nThis command works:\n")
    assert not works or script is finetune
    assert ended.value.code == 2, message
    assert message.startswith("error: ") and "\n" not in message and "Traceback" not in message
    return message


@pytest.mark.parametrize(("changes", "message"), CASES, ids=lambda value: str(value)[:40])
def test_finetune(folder: Path, changes: dict[str, str], message: str, monkeypatch, capsys):
    before = {path.name for path in folder.iterdir()}
    said = ends_in_a_sentence(finetune, {**BASE, **changes}, monkeypatch, capsys)
    assert re.search(message, said), said
    left = {str(path.relative_to(folder)) for path in folder.rglob("*")} - before
    assert not any(".tmp" in name or "model.safetensors" in name or "checkpoints" in name for name in left)
    if "out/data_train.csv" in left:  # what was prepared is whole, and used by the next run
        assert "out/prepared.json" in left


def test_the_command_in_a_message_works(folder: Path, monkeypatch, capsys, logged: list[str]):
    book = openpyxl.Workbook()
    book.active.append(["Copied in 2019", "by J. S."])
    sheet = book.create_sheet("Census of 1881 ")
    rows = [["Lancashire"], [], [" Occupation", "HISCO code ", "Note"]]
    rows += [[f"clerk no {i}", 61110 if i % 2 else 2000] for i in range(30)]
    for row in [*rows, ["smith", None, "torn"], ["smith", "see note"], ["", 61110, "illegible"], []]:
        sheet.append(row)
    book.save("my table.xlsx")
    flags = ["--dataset", "my table.xlsx", "--target-cols", "hisco", "--save-path", "my out", "--prepare-only"]
    monkeypatch.setattr(sys, "argv", ["finetune.py", *flags])
    with pytest.raises(SystemExit):
        run_script(finetune.main)
    first, *problems, works, command = capsys.readouterr().err.strip().splitlines()
    assert first == "error: my table.xlsx has 5 problems:" and works == "This command works:"
    told = (
        "several sheets",
        "no column 'occ1'",
        "no column 'hisco'",
        "fewer than 5",
        "line 35, HISCO code: 'see note'",
    )
    assert all(part in problem for part, problem in zip(told, problems, strict=True))
    assert not list(folder.glob("my out/*"))
    monkeypatch.setattr(sys, "argv", shlex.split(command)[1:])
    run_script(finetune.main)
    dropped = "3 rows were dropped (1 without a code, 1 with codes that do not fit, 1 without a description)"
    assert f"{dropped}; see my out/rejected.csv." in logged and "--prepare-only" not in logged[-1]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that is complete, beside its table."""
    out = tmp_path_factory.mktemp("finished") / "out"
    run(*training(out, batch_size=8, steps=2))
    return out


def files_of(folder: Path) -> dict[Path, tuple[bytes, int]]:
    """What is in each file, and when it was written."""
    return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        ({"--prefetch-factor": "0"}, r"--prefetch-factor is 0"),
        ({"--worker-timeout": "0"}, r"--worker-timeout is 0"),
        ({"--compile": ""}, r"there is no no-such-compiler here"),
        ({"--augmentation-prob": "2"}, r"--augmentation-prob is 2"),
        ({"--num-transformations": "-1"}, r"--num-transformations is -1"),
        ({"--dropout": "2"}, r"--dropout is 2"),
        ({"--decoder-dim-feedforward": "0"}, r"--decoder-dim-feedforward is 0"),
        ({"--max-len": "30"}, r"multiple of 4"),
        ({"--only-encoder": ""}, r"--initial-checkpoint"),
        ({"--ddp-comm-hook": "bf16"}, r"--ddp-comm-hook bf16 needs GPUs"),
        ({"--share-val": "1"}, r"--share-val is 1"),
        ({"--keep-checkpoints": "0"}, r"--keep-checkpoints is 0"),
    ],
    ids=str,
)
def test_a_mistake_leaves_an_earlier_run_unchanged(
    folder: Path, finished: Path, mistake: dict[str, str], message: str, monkeypatch, capsys
):
    monkeypatch.setenv("CXX", "no-such-compiler")
    before = files_of(finished)
    paths = {"--dataset": str(finished.parent / "table.csv"), "--save-path": str(finished)}
    said = ends_in_a_sentence(finetune, {**BASE, **paths, "--overwrite": "", **mistake}, monkeypatch, capsys)
    assert re.search(message, said), said
    assert files_of(finished) == before


@pytest.mark.parametrize("name", ["README.md", "key.csv", "report/mine.txt", "best/mine.txt", "logs.csv"])
@pytest.mark.parametrize("flags", [{}, {"--overwrite": ""}, {"--resume": "never"}, {"--prepare-only": ""}], ids=str)
def test_a_folder_of_foreign_files_is_untouched(folder: Path, name: str, flags: dict[str, str], monkeypatch, capsys):
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text("mine")
    before = files_of(folder)
    said = ends_in_a_sentence(finetune, {**BASE, "--save-path": ".", **flags}, monkeypatch, capsys)
    assert f"contains {name.partition('/')[0]}, which a run would replace" in said and "Choose a new folder" in said
    if "--prepare-only" not in flags:
        ends_in_a_sentence(train_mixer, {**MIXER, "--save-dir": ".", **flags}, monkeypatch, capsys)
    assert files_of(folder) == before


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("bach_size: 8", "no flag 'bach_size'. Did you mean 'batch_size'"),
        ("batch_size: many", "batch_size can't be 'many'"),
        ("batch_size: [1, 2]", "batch_size can't be"),
        ("weight_decay: null", "weight_decay has no value"),
        ("device: gpu", "device is 'gpu'; it must be one of auto, cpu"),
        ("zero_pad_codes: yes please", "zero_pad_codes can't be"),
        ("- a list", "must hold lines of the form"),
        ("a: [", "can't be read"),
    ],
)
def test_mistakes_in_a_config_file(folder: Path, text: str, message: str, monkeypatch, capsys):
    (folder / "run.yaml").write_text(text)
    assert message in ends_in_a_sentence(finetune, {**BASE, "--config": "run.yaml"}, monkeypatch, capsys)


def test_a_single_column_in_a_config_file(folder: Path):
    (folder / "run.yaml").write_text("target_cols: hisco_1\nbatch-size: 4\nlearning_rate: 1e-3\n")
    config = parse(FinetuneConfig, ["--config", "run.yaml", "--dataset", "t.csv", "--batch-size", "2"])
    assert (config.target_cols, config.batch_size, config.learning_rate) == (("hisco_1",), 2, 1e-3)


MIXER = {"--train-data": "table.csv", "--val-data": "table.csv", "--save-dir": "out", "--encoder": "tiny"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"--val-data": None}, r"--train-data a.csv --val-data v.csv"),
        ({"--formatter": "general"}, r"needs the columns of codes"),
        ({"--formatter": "isco"}, r"invalid choice: 'isco'"),
        ({"--formatter": "occ1950"}, r"no column 'occ1950_1'"),
        ({"--formatter": "occ1950", "--target-col-naming": "hisco"}, r"takes 2 columns of codes at most"),
        ({"--train-data": "short.csv"}, r"1 code has fewer than 5 characters, such as line 3, hisco_1: '2000'"),
        ({"--key": "short.csv"}, r"needs the columns"),
        ({"--blank-means-no-occupation": ""}, r"--formatter hisco has no mark .* of their own"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_train_mixer(folder: Path, changes: dict[str, str], message: str, monkeypatch, capsys):
    said = ends_in_a_sentence(train_mixer, {**MIXER, **changes}, monkeypatch, capsys)
    assert re.search(message, said), said


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_is_not_writable(folder: Path, monkeypatch, capsys):
    (folder / "out").mkdir()
    (folder / "out").chmod(stat.S_IRUSR | stat.S_IXUSR)
    assert "Can't write" in ends_in_a_sentence(finetune, BASE, monkeypatch, capsys)


def test_as_a_program(tmp_path: Path):
    files = ("--dataset", tmp_path / "none.csv", "--save-path", tmp_path / "out")
    result = run("finetune.py", *files, "--target-cols", "a", check=False, fresh=True)
    assert result.returncode == 2 and result.stderr.count("\n") == 1 and "error: File not found: " in result.stderr
    assert not any(tmp_path.iterdir())


def command(tmp_path: Path, *flags: str) -> list[str]:
    table = write_table(tmp_path / "table.csv")
    args = ("finetune.py", "--dataset", table, "--save-path", tmp_path / "out", "--encoder", "tiny", *flags)
    return [str(arg) for arg in args]


def test_what_rank_0_finds_ends_all(tmp_path: Path):
    first, other = two_ranks(command(tmp_path, "--target-cols", "hisco"), check=False)
    assert first.returncode == other.returncode == 2
    assert first.stderr.count("error: ") == 1 and "Traceback" not in first.stderr and not other.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "flag", [("--fn-word-freq", "none.csv"), ("--bach-size", "8")]
)  # the latter before they have met
def test_what_every_rank_finds_is_said_once(tmp_path: Path, flag: tuple[str, str]):
    with Torchrun(command(tmp_path, "--target-cols", "hisco_1", *flag)) as job:
        assert job.end() != 0
    assert job.output.count("error: ") == 1 and "exitcode  : 2" in job.output
    assert 'File "' not in job.output.split("torch/distributed")[0]  # no traceback of ours


def test_what_occcanine_takes_is_taken(folder: Path):
    paths = ("--train-data", folder / "table.csv", "--val-data", folder / "table.csv", "--save-dir", folder / "out")
    sizes = ("--batch-size", 512, "--world-size", 4, "--num-epochs", 2)
    said = run("train_mixer.py", *paths, *TINY, *sizes).stdout
    assert "a batch of 512 is larger than the 64 training rows" in said and "--world-size has no effect" in said
    assert "world_size" not in (folder / "out" / "args.yaml").read_text()
