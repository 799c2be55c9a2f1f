"""What tests share: small tables, and the scripts run in processes of their own, each with a
deadline.
"""

import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from gpus import hiding_gpus

# before torch and transformers are imported, here and in what is forked
os.environ.update(hiding_gpus(sys.argv, os.environ))
os.environ.update(
    OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1"
)  # tests share processors, and tiny models need but one

import pytest
from forked import DEADLINE, Ended, Forked
from hypothesis import settings
from models import save_tiny_model
from pretended_gpu import Log, pretended_gpu

from histocoder.cli.main import main
from histocoder.log import log

settings.register_profile("tests", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("tests")

collect_ignore = ["like_windows"]  # programs', not pytest's

ROOT = Path(__file__).parents[1]
SHARED = ROOT.parent / "shared"
PROGRAMS = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
"""PATH on which this Python comes first."""

TITLES = {
    **{"farmer": "61110", "shoemaker": "80110", "baker": "77610", "tailor": "79100"},
    **{"weaver": "75400", "miner": "71105", "soldier": "58340", "carpenter": "95410"},
}
NOTES = [
    "",
    " (deceased)",
    " (retired)",
    "'s apprentice",
    " and dealer",
    ", journeyman",
    " of the parish",
    " master",
]


def shared(path: str) -> Path:
    """Return the path of a reference file outside the project; skip the test if it is missing."""
    found = SHARED / path
    if not found.exists():
        pytest.skip(f"no {path} beside the project")
    return found


def slow(*values: object) -> Any:
    """Return parameters of a test with which it takes long: `make test-all` runs it, `make test`
    does not.
    """
    return pytest.param(*values, marks=pytest.mark.slow)


def cases(names: str | tuple[str, ...], *rows: Any, ids: Any = None) -> pytest.MarkDecorator:
    """Run a test once for each row, which has a value for each name; for tables too long for a
    line.
    """
    return pytest.mark.parametrize(names, rows, ids=ids)


@pytest.fixture
def logged() -> Iterator[list[str]]:
    """Lines that the logger receives."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log.addHandler(handler)
    yield lines
    log.removeHandler(handler)


def write_table(path: Path, *, two_codes: bool = False, copies: int = 1) -> Path:
    """A table of 64 descriptions (times `copies`) with their codes; every fifth has a second code
    if asked for.
    """
    lines, codes = (
        ["occ1,lang,hisco_1,hisco_2" if two_codes else "occ1,hisco_1"],
        list(TITLES.values()),
    )
    for i, note in enumerate(NOTES * copies):
        for j, (title, code) in enumerate(TITLES.items()):
            second = codes[(j + 1) % len(codes)] if (i + j) % 5 == 0 else ""
            text = f'"{title}{note}{"" if i < len(NOTES) else f" no {i}"}"'
            lines.append(f"{text},en,{code},{second}" if two_codes else f"{text},{code}")
    return write(path, *lines)


def write(path: Path, *lines: str) -> Path:
    """Write a file of these lines, and return its path."""
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.fixture(autouse=True)
def deadline() -> Iterator[None]:
    """A test that waits for what never comes fails."""

    def end(*_: object) -> None:
        raise TimeoutError(f"the test has taken more than {5 * DEADLINE:.0f} s")

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, 5 * DEADLINE)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def gpu() -> Iterator[Log]:
    """A pretended GPU; gives its log of waits and launches."""
    with pretended_gpu() as log:
        yield log


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """A CSV of 64 descriptions, one code each."""
    return write_table(tmp_path / "table.csv")


def environment(**extra: str) -> dict[str, str]:
    """This process's environment, without network, with one thread, so that bits compare."""
    others = ("SLURM_", "WANDB_", "TORCHELASTIC")
    env = {name: value for name, value in os.environ.items() if not name.startswith(others)}
    return {**env, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline", **extra}


def run(
    *args: object, check: bool = True, env: dict[str, str] | None = None, fresh: bool = False
) -> Ended:
    """Run a script of the project in its own process: a forked one, or a new Python interpreter if
    `fresh`.
    """
    if fresh:
        return program(sys.executable, *args, check=check, env=env)
    result = Forked([*map(str, args)], cwd=ROOT, env=env or environment()).result()
    return succeeded(result) if check else result


def program(
    *command: object, check: bool = True, env: dict[str, str] | None = None, **how: Any
) -> Ended:
    """Run any program, by default in the project's folder; `how` is as for `subprocess.run`."""
    how = {"cwd": ROOT, "env": env or environment(), "timeout": DEADLINE, **how}
    result = subprocess.run(
        [*map(str, command)], capture_output=True, text=True, check=False, **how
    )
    return succeeded(result) if check else result


def succeeded(result: Ended) -> Ended:
    """Return how a program ended, with status 0."""
    assert result.returncode == 0, (
        f"{result.args} ended with {result.returncode}:\n{result.stdout}\n{result.stderr}"
    )
    return result


def refused(*args: object, env: dict[str, str] | None = None, fresh: bool = False) -> str:
    """Return what a script says that a user's mistake ends: status 2, and no traceback."""
    result = run(*args, check=False, env=env, fresh=fresh)
    assert result.returncode == 2 and "Traceback" not in result.stderr, (
        f"{result.returncode}: {result.stderr}"
    )
    return result.stderr


def mistake(capsys: pytest.CaptureFixture[str], *args: object) -> str:
    """Return the line that the command ends with, in this process, on a mistake of the user's."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main([*map(str, args)])
    said = capsys.readouterr().err.strip()
    assert ended.value.code == 2 and "\n" not in said and "Traceback" not in said, said
    return said


def spied(
    monkeypatch: pytest.MonkeyPatch, owner: object, name: str, of: Callable[..., list[Any]]
) -> list[Any]:
    """Return a list that `of(*args, **kwargs)` of each call of a function is appended to from now
    on, one by one.
    """
    function, kept = getattr(owner, name), list[Any]()
    monkeypatch.setattr(
        owner, name, lambda *args, **how: kept.extend(of(*args, **how)) or function(*args, **how)
    )
    return kept


def free_port() -> int:
    """A port on loopback that nothing listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny model with random weights, which no test changes."""
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one process that nothing happens to."""
    from jobs import training

    out = tmp_path_factory.mktemp("alone") / "out"
    run(*training(out, batch_size=8))
    return out


@pytest.fixture(scope="session")
def together(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same of two ranks."""
    from jobs import training, two_ranks

    out = tmp_path_factory.mktemp("together") / "out"
    two_ranks(training(out))
    return out
