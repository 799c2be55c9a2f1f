"""The wheel: built of what the Dockerfile copies, installed into an empty environment, used in an
empty folder.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import venv
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
from conftest import DEADLINE, ROOT, environment, free_port, program, run, write, write_table
from jobs import assert_same_weights, finetune, wait_until

DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
SOURCES = [
    name
    for names in re.findall(r"^COPY ([^-/]+) \S+$", DOCKERFILE, re.MULTILINE)
    for name in names.split()
]
PACKAGED = {".py", ".typed", ".jinja", ".html", ".css", ".js", ".csv", ".bib", ".svg", ".sql"}
IGNORED = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()


def installed(folder: Path, wheel: Path) -> Path:
    """An environment of the wheel alone, with the libraries of this one; the folder of its
    programs.
    """
    venv.create(folder)
    (packages,) = folder.glob("**/site-packages")
    # without histocoder, which this environment has as a link to the clone
    write(
        packages / "libraries.pth", *(path for path in sys.path if path.endswith("site-packages"))
    )
    pip = (
        sys.executable,
        "-m",
        "pip",
        "--python",
        folder,
        "install",
        "--quiet",
        "--no-index",
        "--no-deps",
        wheel,
    )
    program(*pip, env=environment(PYTHONPATH=""))
    return folder / "bin"


def test_dockerfile_copies_what_dockerignore_lets_pass():
    assert {*SOURCES, "constraints.txt"} == {name[1:] for name in IGNORED if name.startswith("!")}
    assert all((ROOT / name).exists() for name in SOURCES) and "COPY tests" not in DOCKERFILE


@pytest.mark.slow
def test_an_installed_wheel_does_what_the_clone_does(tmp_path: Path):
    (tmp_path / "clone").mkdir()
    for name in SOURCES:
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "*.so")
            shutil.copytree(ROOT / name, tmp_path / "clone" / name, ignore=ignored)
        else:
            shutil.copy(ROOT / name, tmp_path / "clone" / name)
    build = (
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--no-build-isolation",
        "--wheel-dir",
        ".",
        "./clone",
    )
    program(sys.executable, "-m", "pip", *build, cwd=tmp_path, env=environment(PYTHONPATH=""))
    (wheel,) = tmp_path.glob("*.whl")
    shutil.rmtree(tmp_path / "clone")
    programs, empty = installed(tmp_path / "venv", wheel), tmp_path / "empty"
    env = environment(PYTHONPATH="", PATH=f"{programs}{os.pathsep}{os.environ['PATH']}")
    empty.mkdir()

    def do(*command: object) -> str:
        """What a program of the environment prints, in an empty folder."""
        return program(*command, cwd=empty, env=env).stdout

    package = Path(
        do("python", "-c", "import histocoder; print(histocoder.__file__)").strip()
    ).parent
    assert package.is_relative_to(tmp_path / "venv")
    in_wheel = {path.relative_to(package).as_posix() for path in package.rglob("*")}
    sources = [path for path in (ROOT / "histocoder").rglob("*") if path.suffix in PACKAGED]
    assert in_wheel >= {path.relative_to(ROOT / "histocoder").as_posix() for path in sources}
    if shutil.which("cc") or shutil.which("gcc"):
        assert any(
            name.startswith("ops/_kernels") and name.endswith((".so", ".pyd")) for name in in_wheel
        )

    table = write_table(tmp_path / "table.csv")
    flags = finetune(table, tmp_path / "clone-run", "--batch-size", 8, "--max-steps", 3)[1:]
    run("finetune.py", *flags)
    flags[flags.index("--save-path") + 1] = "out"
    do("histocoder", "finetune", *flags)
    assert_same_weights(tmp_path / "clone-run", empty / "out")
    assert "farmer" in do("histocoder", "predict", "--model", "out", "farmer")
    flags[flags.index("--save-path") + 1] = "two"
    launcher = ("-m", "torch.distributed.run", "--nproc_per_node=2", f"--master_port={free_port()}")
    said = do("python", *launcher, "-m", "histocoder.cli.finetune", "--distributed", *flags)
    assert "step 3/3" in said and (empty / "two" / "model.safetensors").exists()
    assert {path.name for path in empty.iterdir()} == {"out", "two"}
    serves(env | {"MODEL": str(empty / "out"), "TOKEN": "0123456789abcdef"})


def serves(env: dict[str, str]) -> None:
    """Check that the Dockerfile's commands start a server, and see that it is well, and not without
    a token.
    """
    port = free_port()
    commands = (
        re.search(rf"^{name}.*?(\[.*\])$", DOCKERFILE, re.MULTILINE)[1]
        for name in ("CMD", "HEALTHCHECK")
    )
    start, check = (json.loads(command.replace("8000", str(port))) for command in commands)
    refused = program(*start, env=env | {"TOKEN": ""}, check=False)
    assert refused.returncode == 2 and "--token" in refused.stderr
    server = subprocess.Popen(start, env=env)
    try:
        wait_until(lambda: program(*check, env=env, check=False).returncode == 0)
        with urlopen(f"http://127.0.0.1:{port}/?token={env['TOKEN']}") as page:
            assert "<title>histocoder" in page.read().decode()
        with pytest.raises(HTTPError, match="401"):
            urlopen(f"http://127.0.0.1:{port}/")
        server.send_signal(signal.SIGTERM)  # as docker stop does
        assert server.wait(DEADLINE) in (0, 128 + signal.SIGTERM, -signal.SIGTERM)
    finally:
        server.kill()
        server.wait()
