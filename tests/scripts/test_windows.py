"""What histocoder does on Windows, as far as a stand-in for it knows: see
like_windows/sitecustomize.py.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, environment, program, refused, run
from jobs import finetune

ENVIRONMENT = environment(PYTHONPATH=f"{ROOT / 'tests' / 'like_windows'}{os.pathsep}{ROOT}")

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="the stand-in is made of what Linux has"
)


@pytest.mark.slow
def test_training_and_coding_a_file(tmp_path: Path, table: Path):
    args = finetune(
        table, tmp_path / "out", "--batch-size", 16, "--num-workers", 1, "--max-steps", 2
    )
    args.remove("--no-report")
    assert "Wrote the report to" in run(*args, env=ENVIRONMENT, fresh=True).stdout
    files = ("--input", table, "--output", tmp_path / "coded.csv", "--columns", "pred_")
    run(
        "-m",
        "histocoder",
        "predict",
        "--model",
        tmp_path / "out",
        *files,
        env=ENVIRONMENT,
        fresh=True,
    )
    assert (tmp_path / "coded.csv").is_file()
    assert (
        "memory"
        in run("-m", "histocoder", "doctor", env=ENVIRONMENT, fresh=True, check=False).stdout
    )


HOLDING = """
import sys
from pathlib import Path
from histocoder.checkpoints.run_folder import holding
from histocoder.cli.script import run_script

def main():
    with holding(Path(sys.argv[1]), path=Path(sys.argv[1]).parent, instead="another folder"):
        print("held", flush=True)
        sys.stdin.read()

run_script(main)
"""


@pytest.mark.slow
def test_a_second_process_gets_no_lock(tmp_path: Path):
    command, pipe = [sys.executable, "-c", HOLDING, str(tmp_path / ".lock")], subprocess.PIPE
    with subprocess.Popen(
        command, stdin=pipe, stdout=pipe, text=True, cwd=ROOT, env=ENVIRONMENT
    ) as holder:
        try:
            assert holder.stdout.readline() == "held\n"
            assert "is in use by another run" in refused(*command[1:], env=ENVIRONMENT, fresh=True)
        finally:
            holder.kill()
    assert program(*command, env=ENVIRONMENT, input="").stdout == "held\n" and not list(
        tmp_path.glob(".*")
    )
