"""What clusters and people do to the processes of a run: killed, stopped, signalled, started twice.

Two ranks are forked, without a launcher, but where it is torchrun's part in a fault that counts.
"""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jobs
import pytest
from conftest import (
    DEADLINE,
    ROOT,
    environment,
    free_port,
    refused,
    run,
    slow,
    succeeded,
    write,
    write_table,
)
from forked import Forked
from jobs import (
    STEPS,
    TINY,
    assert_same_end,
    faulty,
    finetune,
    ranks,
    torchrun,
    training,
    two_ranks,
    wait_for_step,
)
from safetensors.torch import load_file

from histocoder.checkpoints.training_state import list_checkpoints

OF_FIRST = [slow(signum, 0) for signum in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)]


@pytest.mark.parametrize(("signum", "rank"), [(signal.SIGKILL, 1), (signal.SIGUSR1, 1), *OF_FIRST])
def test_a_rank_that_ends_stops_all(together: Path, tmp_path: Path, signum: int, rank: int):
    args = training(tmp_path / "out")
    with ranks(args, args) as started:
        wait_for_step(started[0], 9 + 4 * rank)
        started[rank].send(signum)
        ended = [process.result() for process in started]
    step = int(list_checkpoints(tmp_path / "out")[-1].name[5:])
    if signum == signal.SIGKILL:
        other = ended[1 - rank]
        assert (
            other.returncode == 1
            and "another process has ended" in other.stderr
            and "Traceback" not in other.stderr
        )
    else:
        assert [one.returncode for one in ended] == [128 + signum] * 2
        assert (
            step >= 9
            and f"{signal.Signals(signum).name}: saved at step {step} of {STEPS}" in ended[0].stderr
        )
    assert f"Resuming from step {step}" in two_ranks(args)[0].stdout
    assert_same_end(together, tmp_path / "out")


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_is_told_of_in_a_line(tmp_path: Path, rank: int):
    args = [sys.executable, *training(tmp_path / "out", steps=10**6)]
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    started = []
    for i in "01":
        how = {"cwd": ROOT, "env": environment(**place, RANK=i, LOCAL_RANK=i), "text": True}
        with (tmp_path / f"out{i}").open("w") as out:
            started.append(subprocess.Popen(args, stdout=out, stderr=subprocess.PIPE, **how))
    try:
        jobs.wait_until(lambda: "step 3/" in (tmp_path / "out0").read_text())
        started[rank].kill()
        (line,) = started[1 - rank].communicate(timeout=DEADLINE)[1].splitlines()
    finally:
        for process in started:
            process.kill()
    assert "error: another process has ended or can't be reached" in line


@pytest.mark.slow
def test_torchrun_restarts_a_killed_rank(together: Path, tmp_path: Path):
    with torchrun([*training(tmp_path / "out"), "--resume", "never"], "--max-restarts=3") as job:
        wait_for_step(job, 12)
        os.kill(jobs.workers(job)[1], signal.SIGKILL)
        assert "Resuming from step" in succeeded(job.result()).stdout
    assert_same_end(together, tmp_path / "out")


def test_runs_resume_with_another_number_of_ranks(tmp_path: Path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run(*training(whole, "--dropout", 0, batch_size=8))
    one, two = (training(parts, "--dropout", 0, batch_size=size) for size in (8, 4))
    with ranks(one) as (only,):
        interrupt(only, after_step=5)
    with ranks(two, two) as (first, _):
        interrupt(first, after_step=12)
    assert "Resuming from step" in run(*one).stdout
    assert [row["step"] for row in jobs.logs(parts)] == [row["step"] for row in jobs.logs(whole)]
    for name in ("train_loss", "val_loss", "grad_norm"):  # of each step: the same batches
        losses, expected = (
            [float(row[name]) for row in jobs.logs(out) if row[name]] for out in (parts, whole)
        )
        assert losses == pytest.approx(expected, abs=2e-5), name  # of six digits
    found, expected = (load_file(out / "model.safetensors") for out in (parts, whole))
    for name, tensor in expected.items():
        difference = (found[name] - tensor).abs()
        if name.endswith(
            "in_proj_bias"
        ):  # of keys: no output depends on it, and rounding is all its gradient
            difference[len(tensor) // 3 : len(tensor) // 3 * 2] = 0
        assert name.endswith("key.bias") or difference.max() <= 1e-5, name


def test_one_process_and_two_have_the_same_run(tmp_path: Path):
    table = write_table(tmp_path / "table.csv", copies=8)
    growing = (
        "--encoder",
        "ngram",
        "--max-epoch-steps",
        2,
        "--ngram-dropout",
        0,
        "--precision",
        "fp32",
    )
    few = ("--no-report", "--no-experts", "--no-refit", "--titles", "none", "--log-interval", 1)
    one, two = tmp_path / "one", tmp_path / "two"

    def args(out: Path, *steps: object) -> list[str]:
        flags = (
            "--dataset",
            table,
            "--target-cols",
            "hisco_1",
            "--save-path",
            out,
            *growing,
            *few,
            *steps,
        )
        return ["finetune.py", *map(str, flags)]

    assert "256 × 1 process = 256 rows a step" in run(*args(one, "--max-steps", 3)).stdout
    with ranks(*[args(two, "--max-steps", 3)] * 2) as started:
        assert "128 × 2 processes = 256 rows a step" in succeeded(started[0].result()).stdout
    for name in ("train_loss", "lr"):
        values, expected = (
            [float(row[name]) for row in jobs.logs(out) if row[name]] for out in (two, one)
        )
        assert values == pytest.approx(expected, abs=2e-5), name
    jobs.assert_same_weights(one, two, tolerance=1e-4)
    assert "Resuming from step 3" in run(*args(two, "--max-steps", 4)).stdout

    with ranks(*[args(one, "--max-steps", 4, "--batch-size", 16)] * 2) as started:
        said = started[0].result().stderr
    assert "Use the earlier settings (here, --batch-size 128), choose another folder" in said
    assert re.search(r"rows a step +256 +128", said)


def interrupt(process: Forked, *, after_step: int, signum: int = signal.SIGTERM) -> None:
    """Signal a run, and wait for it to save and end."""
    wait_for_step(process, after_step)
    process.send(signum)
    assert process.result().returncode == 128 + signum


def test_changed_settings_are_refused_unless_harmless(alone: Path, tmp_path: Path):
    out = shutil.copytree(alone.parent, tmp_path, dirs_exist_ok=True) / "out"
    assert "seed: 42 there, 7 now" in refused(
        *training(out, "--seed", 7, batch_size=8)
    )  # the data were split by it
    other = refused(*training(out, "--max-len", 64, "--augmentation-prob", 0, batch_size=4))
    table = [" ".join(line.split()) for line in other.splitlines()]
    assert {"--max-len 128 64", "--augmentation-prob 0.3 0.0", "rows a step 8 4"} <= {*table}
    taken = run(
        *training(out, "--save-interval", 2, "--max-grad-norm", 2, batch_size=8, steps=STEPS + 2)
    )
    assert f"Resuming from step {STEPS}" in taken.stdout


def test_changed_columns_and_labels_are_refused(tmp_path: Path):
    table, out = write_table(tmp_path / "t.csv", two_codes=True), tmp_path / "out"
    header, *rows = table.read_text().splitlines()
    write(table, f"{header},occ2", *(f"{row},clerk" for row in rows))
    args = [
        "train_mixer.py",
        "--train-data",
        table,
        "--val-data",
        table,
        "--save-dir",
        out,
        *TINY,
        "--batch-size",
        8,
    ]
    run(*args, "--max-steps", 2)
    for flag, column in (("--input-col", "occ2"), ("--target-cols", "hisco_1")):
        assert re.search(
            r"columns +occ1, lang, hisco_1, .*hisco_5 +\w",
            refused(*args, "--max-steps", 3, flag, column),
        )
    original = table.read_text()
    table.write_text(original.replace("61110", "x").replace("80110", "61110").replace("x", "80110"))
    assert re.search(
        r"data to train on +64 rows \(\w+\) +64 rows", refused(*args, "--max-steps", 3)
    )
    table.write_text(original)
    (checkpoint,) = list_checkpoints(out)
    jobs.change_state(
        checkpoint, lambda state: state["settings"].pop("columns")
    )  # as before these were kept
    assert "Resuming from step 2" in run(*args, "--max-steps", 3).stdout
    assert "has taken 3 steps, and these settings ask for 2" in refused(*args, "--max-steps", 2)


@pytest.mark.parametrize("rank", [0, slow(1)])
def test_a_signal_before_training_stops_all(tmp_path: Path, rank: int):
    late = faulty(training(tmp_path / "out"), "sleep:histocoder.training.data.prepare:1:10")
    with ranks(late, late) as started:
        jobs.wait_until((tmp_path / "out" / ".lock").exists)
        time.sleep(1)  # by then the tables are prepared, which takes ten
        started[rank].send(signal.SIGUSR1)
        ended = [process.result() for process in started]
    assert [one.returncode for one in ended] == [128 + signal.SIGUSR1] * 2
    assert "".join(one.stderr for one in ended).count("SIGUSR1: stopped.") == 1
    run(*training(tmp_path / "out", steps=2))


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_torchrun_stops_all(together: Path, tmp_path: Path, signum: int):
    args = training(tmp_path / "out")
    with torchrun(args, "--max-restarts=3") as job:
        wait_for_step(job, 9)
        pids = jobs.workers(job)
        job.send(signum)
        assert job.result().returncode != 0 and len(pids) == 2
        assert not any(map(jobs.is_alive, pids))
    two_ranks(args)
    assert_same_end(together, tmp_path / "out")


def test_a_hung_rank_ends_the_run(tmp_path: Path):
    args = training(tmp_path / "out", "--rank-timeout", 5, steps=10**6)
    with ranks(args, args) as (first, second):
        wait_for_step(first, 3)
        second.send(signal.SIGSTOP)
        ended = first.result()
    assert ended.returncode == 1 and "another process has ended or can't be reached" in ended.stderr
    assert "Timed out waiting 5000ms" in ended.stderr and "Traceback" not in ended.stderr


def test_ranks_wait_for_rank_0_and_its_failures(tmp_path: Path):
    ended = two_ranks(training(tmp_path / "out", "--input-col", "occupation"), status=2)
    assert "".join(one.stderr for one in ended).count("no column 'occupation'") == 1
    crashed = faulty(training(tmp_path / "out"), "EIO:histocoder.training.data.prepare:1")
    ended = two_ranks(crashed, training(tmp_path / "out"), status=None)
    assert all(one.returncode for one in ended)
    assert "".join(one.stderr for one in ended).count("Input/output error") == 1
    short = training(tmp_path / "out", "--rank-timeout", 5, steps=2)
    two_ranks(
        faulty(short, "sleep:histocoder.training.data.prepare:1:8")
    )  # waiting for it has no deadline


def test_out_of_memory_says_what_to_try(table: Path, tmp_path: Path):
    saving = ("--max-steps", 6, "--eval-interval", 3, "--save-interval", 3, "--dropout", 0.1)
    said = refused(
        *faulty(finetune(table, tmp_path / "out", *saving, "--batch-size", 8), "memory:0:5")
    )
    assert (
        "error: Out of memory (" in said
        and "1000000000000000 bytes" in said
        and said.count("\n") == 1
    )
    assert "halve --batch-size and double --gradient-accumulation-steps" in said
    assert not jobs.leftovers(tmp_path / "out")
    again = run(
        *finetune(
            table, tmp_path / "out", *saving, "--batch-size", 4, "--gradient-accumulation-steps", 2
        )
    )
    assert "Resuming from step 3" in again.stdout


def test_a_second_run_in_a_folder_ends(tmp_path: Path):
    args = training(tmp_path / "out", batch_size=8, steps=10**6)
    with ranks(args) as (first,):
        wait_for_step(first, 2)
        assert "out is in use by another run" in refused(*args)
        assert first.is_running()
        first.send(signal.SIGKILL)
        first.result()
    assert (tmp_path / "out" / ".lock").exists()  # and yet it holds nobody up
    run(*training(tmp_path / "out", batch_size=8, steps=30))


@pytest.mark.parametrize(
    "names", ["RANK WORLD_SIZE LOCAL_RANK", "SLURM_PROCID SLURM_STEP_NUM_TASKS SLURM_LOCALID"]
)
def test_a_taken_port_is_named(tmp_path: Path, names: str):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        place = dict(zip(names.split(), "020", strict=True))
        env = environment(**place, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        said = refused(*training(tmp_path / "out"), env=env)
    assert (
        f"127.0.0.1:{port} " in said
        and "choose another (--master_port; for srun, export MASTER_PORT)" in said
    )
    assert not (tmp_path / "out").exists()
