"""The commands that the scripts exist for, typed as they stand on the pages: no further flag, no
network, no GPU.
"""

import csv
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from conftest import DEADLINE, ROOT, cases, environment, free_port, program

PLAIN = "python finetune.py --dataset path/to/data.csv --target-cols col1 col2 --save-path ./output"
MIXER = (
    "python train_mixer.py --train-data path/to/train.csv --val-data path/to/val.csv "
    "--save-dir ./output"
)
OLDER = (
    "python -m torch.distributed.launch --nproc_per_node=4 finetune.py --distributed "
    "--dataset path/to/data.csv "
    "--target-cols col1 col2 --save-path ./output --batch-size 128"
)
TORCHRUN = (
    "torchrun --nproc_per_node=4 finetune.py --distributed --dataset path/to/data.csv "
    "--target-cols col1 col2 "
    "--save-path ./output --batch-size 128"
)
TORCHRUN_MIXER = (
    "torchrun --nproc_per_node=4 train_mixer.py --distributed --train-data "
    "path/to/train1.csv path/to/train2.csv "
    "--val-data path/to/val.csv --save-dir ./output --batch-size 512 --formatter hisco"
)
NODE = (
    "torchrun --nproc_per_node=4 --nnodes=2 --node_rank={} --master_addr=HOST "
    "--master_port=29500 finetune.py "
    "--distributed --dataset path/to/data.csv --target-cols col1 col2 --save-path ./output"
)
TWO_NODES = "\n".join(map(NODE.format, (0, 1)))
SENTENCE = "has no column 'col3'"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with tables cut from the sample data, at the paths of the commands."""
    data = tmp_path / "path" / "to"
    data.mkdir(parents=True)
    for name, source, first in (
        ("train", "train", 0),
        ("train1", "train", 0),
        ("train2", "train", 40),
        ("val", "val", 0),
    ):
        cut(ROOT / "data" / f"{source}.csv", data / f"{name}.csv", first=first)
    cut(
        ROOT / "data" / "train.csv",
        data / "data.csv",
        first=0,
        names={"hisco_1": "col1", "hisco_2": "col2"},
    )
    return tmp_path


def cut(source: Path, path: Path, *, first: int, names: dict[str, str] = {}) -> None:  # noqa: B006
    with source.open(encoding="utf-8", newline="") as file:
        header, *rows = csv.reader(file)
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows(
            [[names.get(name, name) for name in header], *rows[first : first + 80]]
        )


def typed(command: str, folder: Path, *, port: int) -> list[str]:
    """The words of a command, with two processes or nodes on loopback, and paths of this
    machine.
    """
    places = {
        "python": sys.executable,
        "torchrun": str(Path(sys.executable).with_name("torchrun")),
        "finetune.py": str(ROOT / "finetune.py"),
        "train_mixer.py": str(ROOT / "train_mixer.py"),
        "--nproc_per_node=4": f"--nproc_per_node={1 if '--nnodes' in command else 2}",
        "--master_addr=HOST": "--master_addr=127.0.0.1",
        "--master_port=29500": f"--master_port={port}",
    }
    words = [places.get(word, word) for word in shlex.split(command)]
    if "--nnodes" not in command and "nproc" in command:
        words.insert(
            words.index("--nproc_per_node=2"), f"--master_port={port}"
        )  # for runs beside this one
    return words


@pytest.mark.slow
@cases("commands", PLAIN, MIXER, OLDER, TORCHRUN, TORCHRUN_MIXER, TWO_NODES)
def test_commands_run_as_printed(folder: Path, commands: str):
    port, how = free_port(), {"cwd": folder, "env": environment(PYTHONPATH=str(ROOT)), "text": True}
    how |= {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    started = [
        subprocess.Popen(typed(line, folder, port=port), **how) for line in commands.splitlines()
    ]
    try:
        printed = [process.communicate(timeout=4 * DEADLINE)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0] * len(started), printed
    assert (
        "\nencoder     ngram: no GPU here; --encoder google/canine-s for the pretrained one\n"
        in printed[0]
    )
    assert (
        "Saved in output" in printed[0]
        and (folder / "output" / "best" / "model.safetensors").is_file()
    )
    assert (
        yaml.safe_load((folder / "output" / "args.yaml").read_text(encoding="utf-8"))["encoder"]
        == "ngram"
    )
    num_processes = 1 if commands in (PLAIN, MIXER) else 2
    assert f"machine     {num_processes} process" in printed[0]


@pytest.mark.slow
@pytest.mark.parametrize("command", [OLDER, TORCHRUN])
def test_launchers_print_a_mistake_last_and_once(folder: Path, command: str):
    words = typed(command.replace("col2", "col3"), folder, port=free_port())
    ended = program(*words, check=False, cwd=folder, env=environment(PYTHONPATH=str(ROOT)))
    assert (
        ended.returncode == 1 and ended.stdout.count(SENTENCE) == 0
    )  # whatever its processes return
    assert ended.stderr.count(SENTENCE) == 1
    *_, message, advice, flags, rule = ended.stderr.strip().splitlines()
    assert (
        SENTENCE in message
        and advice.strip() == "With these flags it works:"
        and not rule.strip("=")
    )
    assert "--target-cols col1 col2" in flags and "--local-rank" not in flags
    assert not (folder / "output").exists()


def test_launch_training_ends_as_its_processes(folder: Path):
    launch = ROOT / "scripts" / "launch_training.sh"
    flags = (
        "--device",
        "cpu",
        "--dataset",
        "path/to/data.csv",
        "--target-cols",
        "col1",
        "--save-path",
        "output",
    )
    env = environment(PYTHON=sys.executable, PYTHONPATH=str(ROOT))
    ended = program(
        "bash", launch, 2, "finetune.py", *flags, "--max-len", 30, check=False, cwd=folder, env=env
    )
    assert ended.returncode == 2
    assert ended.stderr == "error: --max-len must be a multiple of 4, 16 or more.\n"
