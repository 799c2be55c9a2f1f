"""The project's programs in processes of their own, that start with torch, transformers and pandas
imported.

Imports take three seconds of each start; what a program does with a tiny model takes one. So a
process that has done nothing but import is forked for each program, which runs as in a new
interpreter: with its own arguments, environment, standard output and error. Only the seed of hashes
is shared; tests in which it may matter start a new interpreter.
"""

import multiprocessing
import os
import subprocess
import tempfile
from pathlib import Path

from faulty import run_program

DEADLINE = 240.0
"""Seconds that any process of a test may take: far more than on a busy machine, less than a silent
rank is given.
"""
Ended = subprocess.CompletedProcess[str]
_SERVER = multiprocessing.get_context("forkserver")
_OURS = ["histocoder.training.train", "histocoder.inference.predict_file"]
_SERVER.set_forkserver_preload([*_OURS, "torch.distributed.run", "transformers.modeling_utils"])


class Forked:
    """A Python with these arguments, which may begin with -m or -c, that writes its output into two
    files.
    """

    def __init__(self, args: list[str], *, cwd: Path, env: dict[str, str]) -> None:
        self.args = args
        self.folder = tempfile.TemporaryDirectory()
        self.out, self.err = (Path(self.folder.name, name) for name in ("stdout", "stderr"))
        for path in (self.out, self.err):
            path.touch()
        self.process = _SERVER.Process(target=_be, args=(args, cwd, env, self.out, self.err))
        self.process.start()

    @property
    def stdout(self) -> str:
        """Standard output so far; `stderr` is standard error."""
        return self.out.read_text()

    @property
    def stderr(self) -> str:
        return self.err.read_text()

    def is_running(self) -> bool:
        return self.process.is_alive()

    def send(self, signum: int) -> None:
        os.kill(self.process.pid, signum)

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def result(self) -> Ended:
        """How it ended, once it has; killed at the deadline."""
        self.process.join(DEADLINE)
        if self.process.exitcode is None:
            self.kill()
            raise subprocess.TimeoutExpired(self.args, DEADLINE, self.stdout, self.stderr)
        return Ended(self.args, self.process.exitcode, self.stdout, self.stderr)


def _be(args: list[str], cwd: Path, env: dict[str, str], stdout: Path, stderr: Path) -> None:
    multiprocessing.set_start_method(None, force=True)  # the default of a new interpreter
    for number, path in ((1, stdout), (2, stderr)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    run_program(args)
