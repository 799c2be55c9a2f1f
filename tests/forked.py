"""The project's programs in processes of their own, that start with torch, transformers and pandas imported.

Imports take three seconds of each start; what a program does with a tiny model takes one. So a process that has done
nothing but import is forked for each program, which finds itself as if started anew: its own arguments, environment,
standard output and error. Only the seed of hashes is the same in all; tests in which that may matter start afresh.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path

_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(
    ["histocoder.assemble", "histocoder.predict_file", "transformers.models.canine.modeling_canine"]
)


def run_forked(args: list[str], *, cwd: Path, env: dict[str, str], timeout: float) -> subprocess.CompletedProcess[str]:
    """What `subprocess.run` gives for a Python with these arguments, which may begin with -m or -c."""
    with tempfile.TemporaryDirectory() as folder:
        stdout, stderr = Path(folder, "stdout"), Path(folder, "stderr")
        process = _SERVER.Process(target=_be, args=(args, cwd, env, stdout, stderr))
        process.start()
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(args, timeout, stdout.read_text(), stderr.read_text())
        return subprocess.CompletedProcess(args, process.exitcode, stdout.read_text(), stderr.read_text())


def _be(args: list[str], cwd: Path, env: dict[str, str], stdout: Path, stderr: Path) -> None:
    """Turn into the program."""
    for number, path in ((1, stdout), (2, stderr)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    if args[0] == "-m":
        sys.argv = args[1:]
        runpy.run_module(args[1], run_name="__main__", alter_sys=True)
    elif args[0] == "-c":
        sys.argv = ["-c", *args[2:]]
        exec(args[1], {"__name__": "__main__"})
    else:
        sys.argv = args
        runpy.run_path(args[0], run_name="__main__")
