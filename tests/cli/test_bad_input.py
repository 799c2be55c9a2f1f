"""A user's mistakes: exit code 2, a sentence or two, no traceback, nothing half-written."""

import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import openpyxl
import pytest
from conftest import environment, run, write_table
from jobs import TINY, torchrun, training

import finetune
import train_mixer
from histocoder.cli.script import run_script

BASE = (
    "--dataset table.csv --target-cols hisco_1 --encoder tiny --save-path out "
    "--batch-size 8 --max-steps 1"
)
MIXER = "--train-data table.csv --val-data table.csv --save-dir out --encoder tiny"
Refused = Callable[[ModuleType, str], str]

CASES = [
    ("--dataset tabel.csv", r"File not found: tabel.csv. Did you mean table.csv"),
    ("--share-val 0", r"--share-val is 0"),
    ("--language en --language-col lang", r"not both"),
    ("--save-path /proc/out", r"Can't write to /proc/out: .*Choose another folder"),
    ("--encoder google/canine-x", r"Could not load the encoder.*--encoder PATH.*--encoder ngram"),
    ("--distributed", r"needs a launcher: torchrun --nproc_per_node=2"),
    (
        "--encoder ngrams --prepare-only",
        r"There is no encoder 'ngrams'. Did you mean --encoder ngram\?",
    ),
    ("--encoder ngram --fsdp full_shard", r"n-gram encoder"),
    (
        "--encoder ngram --freeze-encoder",
        r"--encoder ngram is trained from scratch; frozen, it stays random",
    ),
    ("--device cuda", r"no GPU here|built without CUDA"),
    ("--initial-checkpoint table.csv", r"no weights that can be read"),
    ("--key table.csv", r"needs the columns system_code and code"),
    ("--zero-pad-codes --use-within-block-sep", r"can't be used with"),
    # of train_mixer.py, which alone has this flag
    (
        "--formatter hisco --block-size 7",
        r"--block-size is for --formatter general; codes of hisco have a form",
    ),
    (
        "--formatter hisco --use-within-block-sep",
        r"--use-within-block-sep is for --formatter general",
    ),
    ("--formatter general", r"needs the columns of codes"),
    ("--formatter occ1950 --target-col-naming hisco", r"takes 2 columns of codes at most"),
    (
        "--formatter hisco --blank-means-no-occupation",
        r"--formatter hisco has no mark .* of their own",
    ),
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with some tables."""
    monkeypatch.chdir(tmp_path)
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    write_table(tmp_path / "table.csv")
    return tmp_path


@pytest.fixture
def refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Refused:
    """What a script says of flags that it refuses, in one line."""

    def refused(script: ModuleType, flags: str) -> str:
        monkeypatch.setattr(sys, "argv", ["script.py", *flags.split()])
        with pytest.raises(SystemExit) as ended:
            run_script(script.main)
        message, works, _ = capsys.readouterr().err.strip().partition("\nThis command works:\n")
        assert not works or script is finetune
        assert ended.value.code == 2, message
        assert message.startswith("error: ") and "\n" not in message and "Traceback" not in message
        return message

    return refused


@pytest.mark.parametrize(("flags", "message"), CASES)
def test_mistakes_end_in_a_sentence(folder: Path, refused: Refused, flags: str, message: str):
    before = {path.name for path in folder.iterdir()}
    script, *common = (train_mixer, MIXER) if flags.startswith("--formatter") else (finetune, BASE)
    said = refused(script, " ".join([*common, flags]))
    assert re.search(message, said), said
    left = {str(path.relative_to(folder)) for path in folder.rglob("*")} - before
    assert not any(
        ".tmp" in name or "model.safetensors" in name or "checkpoints" in name for name in left
    )
    if "out/data_train.csv" in left:  # what was prepared is whole, and used by the next run
        assert "out/prepared.json" in left


def test_the_command_in_a_message_works(folder: Path, monkeypatch, capsys, logged: list[str]):
    book = openpyxl.Workbook()
    book.active.append(["Copied in 2019", "by J. S."])
    sheet = book.create_sheet("Census of 1881 ")
    rows = [["Lancashire"], [], [" Occupation", "HISCO code ", "Note"]]
    rows += [[f"clerk no {i}", 61110 if i % 2 else 2000] for i in range(30)]
    for row in [
        *rows,
        ["smith", None, "torn"],
        ["smith", "see note"],
        ["", 61110, "illegible"],
        [],
    ]:
        sheet.append(row)
    book.save("my table.xlsx")
    flags = [
        "--dataset",
        "my table.xlsx",
        "--target-cols",
        "hisco",
        "--save-path",
        "my out",
        "--prepare-only",
    ]
    monkeypatch.setattr(sys, "argv", ["finetune.py", *flags])
    with pytest.raises(SystemExit):
        run_script(finetune.main)
    first, *problems, works, command = capsys.readouterr().err.strip().splitlines()
    assert first == "error: my table.xlsx has 5 problems:" and works == "This command works:"
    expected = (
        "several sheets|no column 'occ1'|no column 'hisco'|fewer than 5|row 35, HISCO "
        "code: 'see note'"
    )
    assert all(part in problem for part, problem in zip(expected.split("|"), problems, strict=True))
    assert not list(folder.glob("my out/*"))
    monkeypatch.setattr(sys, "argv", shlex.split(command)[1:])
    run_script(finetune.main)
    assert (
        "my out/rejected.csv lists 3 rows that are left out." in logged
        and "--prepare-only" not in logged[-1]
    )


def files_of(folder: Path) -> dict[Path, tuple[bytes, int]]:
    """What is in each file, and when it was written."""
    return {
        path: (path.read_bytes(), path.stat().st_mtime_ns)
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_a_mistake_leaves_an_earlier_run_unchanged(refused: Refused, tmp_path: Path):
    run(*training(tmp_path / "out", batch_size=8, steps=2))
    before = files_of(tmp_path)
    assert "multiple of 4" in refused(finetune, f"{BASE} --overwrite --max-len 30")
    assert files_of(tmp_path) == before


@pytest.mark.parametrize(
    "name", ["README.md", "key.csv", "report/mine.txt", "best/mine.txt", "logs.csv"]
)
@pytest.mark.parametrize("flags", ["", "--overwrite", "--resume never", "--prepare-only"], ids=str)
def test_a_folder_of_foreign_files_is_untouched(
    folder: Path, refused: Refused, name: str, flags: str
):
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text("mine")
    before = files_of(folder)
    said = refused(finetune, f"{BASE} --save-path . {flags}")
    assert (
        f"contains {name.partition('/')[0]}, which a run would replace" in said
        and "Choose a new folder" in said
    )
    if flags != "--prepare-only":
        refused(train_mixer, f"{MIXER} --save-dir . {flags}")
    assert files_of(folder) == before


def test_what_occcanine_takes_is_taken(folder: Path):
    paths = (
        "--train-data",
        folder / "table.csv",
        "--val-data",
        folder / "table.csv",
        "--save-dir",
        folder / "out",
    )
    said = run(
        "train_mixer.py", *paths, *TINY, "--batch-size", 512, "--world-size", 4, "--num-epochs", 2
    ).stdout
    assert "a step of 512 rows is larger than the 64 examples" in said
    assert "world_size" not in (folder / "out" / "args.yaml").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("flag", ["--fn-word-freq", "--bach-size"])  # the latter before they meet
def test_what_every_rank_finds_is_said_once(tmp_path: Path, flag: str):
    with torchrun(training(tmp_path / "out", flag, 8)) as job:
        ended = job.result()
    said = ended.stdout + ended.stderr
    assert ended.returncode != 0 and said.count("error: ") == 1 and "exitcode  : 2" in said
    assert 'File "' not in said.split("torch/distributed")[0]  # no traceback of ours
