"""The real scripts under each launcher: two ranks do what one process does."""

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import DEADLINE, ROOT, cases, environment, free_port, program, run, write_table
from forked import Forked
from jobs import TINY, assert_same_end, assert_same_weights, finetune, logged, training, wait_until

LAUNCH = ROOT / "scripts" / "launch_training.sh"
SBATCH = ROOT / "scripts" / "slurm.sbatch"
FEW_CORES = pytest.mark.skipif(
    (os.cpu_count() or 1) != 2, reason="auto starts a process on each core; here not two"
)


@pytest.fixture(scope="session")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    run(*job(folder), "--save-path", folder / "out", "--batch-size", 8)
    return folder / "out"


def job(folder: Path) -> tuple[str, ...]:
    table = write_table(
        folder / "t.csv", two_codes=True, copies=2
    )  # 128 rows; some batches have one code a row only
    common = (
        "--target-cols",
        "hisco_1",
        "hisco_2",
        "--language-col",
        "lang",
        "--max-steps",
        20,
        "--eval-interval",
        10,
    )
    # an odd number of rows to validate on
    return tuple(
        map(
            str,
            ("finetune.py", *common, "--share-val", 0.13, *TINY, "--no-refit", "--dataset", table),
        )
    )


def assert_same_course(one: Path, two: Path) -> None:
    for column in ("train_loss", "val_loss", "val_loss_linear", "val_loss_seq2seq"):
        assert logged(two, column) == pytest.approx(logged(one, column), abs=2e-5)  # of six digits
    for column in ("token_acc", "seq_acc", "flat_acc", "greedy_seq_acc"):
        assert logged(two, column) == pytest.approx(logged(one, column), abs=1e-3)
    assert json.loads((one / "prepared.json").read_text())["rows"]["val"] % 2 == 1
    assert_same_weights(one, two, tolerance=1e-4)


@pytest.mark.slow
@cases(
    "launcher",
    "torch.distributed.run --nproc_per_node=2 --master_port={port}",
    "torch.distributed.launch --nproc_per_node=2 --master_port={port}",
    pytest.param("torch.distributed.run --standalone --nproc_per_node=auto", marks=FEW_CORES),
    "accelerate.commands.launch --multi_gpu --num_processes=2 --num_machines=1 "
    "--mixed_precision=no "
    "--dynamo_backend=no --main_process_port={port}",
)
def test_two_ranks_do_what_one_process_does(one_process: Path, tmp_path: Path, launcher: str):
    if launcher.startswith("accelerate"):
        pytest.importorskip("accelerate")
    two = (*job(tmp_path), "--distributed", "--save-path", tmp_path / "out", "--batch-size", 4)
    run("-m", *launcher.format(port=free_port()).split(), *two, fresh=True)
    assert_same_course(one_process, tmp_path / "out")


@pytest.mark.slow
def test_launch_training_starts_torchrun(one_process: Path, tmp_path: Path):
    two = (*job(tmp_path), "--save-path", tmp_path / "out", "--batch-size", 4, "--device", "cpu")
    printed = program("bash", LAUNCH, 2, *two, env=environment(PYTHON=sys.executable)).stdout
    for words in (
        "finetune.py",
        "processes  2 on the CPU (--device cpu)",
        "--standalone --nproc_per_node=2",
    ):
        assert words in printed
    assert_same_course(one_process, tmp_path / "out")


@pytest.fixture
def programs(tmp_path: Path) -> dict[str, str]:
    """Stand-ins for programs that are not here, and the environment in which they are found."""
    folder = tmp_path / "bin"
    folder.mkdir()
    write_program(
        folder / "nvidia-smi", 'for i in 0 1 2; do echo "GPU $i: NVIDIA H100 (UUID: GPU-$i)"; done'
    )
    said = 'echo "${OMP_NUM_THREADS:-all} threads, rank ${RANK:-none}"; echo "started by $PPID: $*"'
    write_program(folder / "python", said)
    return {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "PYTHON": str(folder / "python"),
        "VIRTUAL_ENV": "",
    }


def write_program(path: Path, text: str, *, interpreter: str = "/usr/bin/env bash") -> None:
    path.write_text(f"#!{interpreter}\n{text}\n")
    path.chmod(0o755)


@cases(
    ("args", "visible", "devices", "launcher"),
    ("--dataset t.csv", None, "3 on GPUs 0,1,2", "--nproc_per_node=3"),
    ("finetune.py --dataset t.csv", "4,7", "2 on GPUs 4,7", "--nproc_per_node=2"),
    ("--dataset t.csv", "MIG-4,MIG-7", "1 on GPUs MIG-4", "finetune.py --dataset t.csv"),
    ("train_mixer.py --seed 7", "1", "1 on GPUs 1", "train_mixer.py --seed 7"),
    ("", "", "1 on the CPU (there is no NVIDIA GPU)", "finetune.py"),
    ("5 --device=cpu", None, "5 on the CPU (--device cpu)", "--nproc_per_node=5"),
)
def test_launch_training_counts_gpus(
    programs: dict,
    monkeypatch: pytest.MonkeyPatch,
    args: str,
    visible: str | None,
    devices: str,
    launcher: str,
):
    monkeypatch.delenv(
        "CUDA_VISIBLE_DEVICES", raising=False
    )  # by which the other tests take no GPU
    env = programs if visible is None else {**programs, "CUDA_VISIBLE_DEVICES": visible}
    printed = program(
        "bash", LAUNCH, *args.split(), env=environment(**env, OMP_NUM_THREADS="")
    ).stdout
    assert f"processes  {devices}\n" in printed
    launched, command = printed.splitlines()[-2:]  # what the stand-in for Python was given
    assert command.startswith(
        f"started by {os.getpid()}: "
    )  # in the shell's place, so that signals reach it
    assert launcher in command and ("scripts/launch.py" in command) == ("nproc" in launcher)
    assert ("--distributed" in command) == ("nproc" in launcher)
    if "nproc" not in launcher:
        assert launched == "all threads, rank 0"


def test_srun_alone_is_a_launcher(table: Path, tmp_path: Path):
    step = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "localhost", "SLURM_JOB_ID": "1"}
    env = environment(**step, MASTER_PORT=str(free_port()))
    args = finetune(table, tmp_path / "out", "--batch-size", 4, "--max-steps", 3)
    tasks = [
        Forked(args, cwd=ROOT, env=env | dict.fromkeys(("SLURM_PROCID", "SLURM_LOCALID"), i))
        for i in "01"
    ]
    assert [task.result().returncode for task in tasks] == [0, 0]
    run(*finetune(table, tmp_path / "one", "--batch-size", 8, "--max-steps", 3))
    assert logged(tmp_path / "out", "val_loss") == pytest.approx(
        logged(tmp_path / "one", "val_loss"), abs=2e-5
    )


SRUN = """
import os, signal, subprocess, sys
number, folder = int(os.environ["SLURM_NTASKS"]), os.environ["STAND_INS"]
command = sys.argv[2:] if sys.argv[1] == "--kill-on-bad-exit=1" else sys.exit(f"srun: {sys.argv}")
step = {"SLURM_STEP_NUM_TASKS": str(number), "SLURM_STEP_NODELIST": "localhost", "SLURM_STEP_ID": "0"}
places = [{"SLURM_PROCID": str(i), "SLURM_LOCALID": str(i)} for i in range(number)]
tasks = [subprocess.Popen(command, env=os.environ | step | place) for place in places]
with open(f"{folder}/tasks", "w") as file:
    file.write(" ".join(str(task.pid) for task in tasks))
ended = [task.wait() for task in tasks]
sys.exit(max(128 - status if status < 0 else status for status in ended))
"""
SCONTROL = """
echo "$*" >> "$STAND_INS/requests"
if [[ $1 == show ]]; then cat "$STAND_INS/job"; fi
"""


class Cluster:
    """Stand-ins for srun, which starts two tasks for real with the variables that SLURM sets, and
    for scontrol.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        write_program(folder / "srun", SRUN, interpreter=sys.executable)
        write_program(folder / "scontrol", SCONTROL)
        (folder / "job").write_text("   PreemptEligibleTime=2026-01-01T00:00:00 PreemptTime=None\n")

    def run(self, args: list[str], *, signum: int = 0, at_step: int = 0) -> int:
        """Run the script as SLURM does on the first node of a job; signal its tasks at a step;
        return its status.
        """
        env = {
            "PATH": f"{self.folder}:{os.environ['PATH']}",
            "STAND_INS": str(self.folder),
            "PYTHON": sys.executable,
        }
        env |= {
            "SLURM_JOB_ID": "7",
            "SLURM_NTASKS": "2",
            "SLURM_CPUS_PER_TASK": "1",
            "MASTER_PORT": str(free_port()),
        }
        how = {"cwd": ROOT, "env": environment(**env), "start_new_session": True}
        with (self.folder / "log").open("a") as log:
            job = subprocess.Popen(["bash", str(SBATCH), *args], stdout=log, stderr=log, **how)
        try:
            if signum:
                wait_until(lambda: f"step {at_step}/" in self.log)
                for pid in (self.folder / "tasks").read_text().split():
                    os.kill(int(pid), signum)
            return job.wait(DEADLINE)
        finally:
            if job.poll() is None:
                os.killpg(job.pid, signal.SIGKILL)

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()


@pytest.mark.slow
def test_a_signalled_slurm_job_is_requeued(together: Path, tmp_path: Path):
    cluster, args = Cluster(tmp_path / "slurm"), training(tmp_path / "out")
    assert cluster.run(args, signum=signal.SIGUSR1, at_step=9) == 128 + signal.SIGUSR1, cluster.log
    assert cluster.run(args) == 0, cluster.log  # as SLURM would
    assert "Resuming from step" in cluster.log and "step 24/24" in cluster.log
    assert (cluster.folder / "requests").read_text() == "requeue 7\n"  # what scontrol was asked for
    assert_same_end(together, tmp_path / "out")


def test_the_slurm_script_asks_for_a_signal():
    asked = [
        shlex.split(line)[1]
        for line in SBATCH.read_text().splitlines()
        if line.startswith("#SBATCH")
    ]
    assert {"--requeue", "--signal=USR1@300", "--open-mode=append"} <= set(asked)
