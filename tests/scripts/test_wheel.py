"""The wheel: built and installed without a network, and used without the clone."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import DEADLINE, ROOT, environment, free_port, run, write_table
from jobs import assert_same_weights, finetune

SOURCES = ("histocoder", "setup.py", "setup.cfg", "pyproject.toml", "README.md", "LICENSE")


def python(*args: object, folder: Path, **env: str) -> str:
    """Run Python with modules of the installation in a folder, in another folder than the clone."""
    ended = subprocess.run(
        [sys.executable, *map(str, args)],
        cwd=folder.parent,
        env=environment(PYTHONPATH=str(folder), **env),
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.mark.slow
def test_an_installed_wheel_does_what_the_clone_does(tmp_path: Path):
    pytest.importorskip("build")
    (tmp_path / "clone").mkdir()
    for name in SOURCES:
        ignore = shutil.ignore_patterns("__pycache__", "*.so")
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tmp_path / "clone" / name, **({"ignore": ignore} if copy is shutil.copytree else {}))
    folder = tmp_path / "installed"
    build = ("build", "--wheel", "--no-isolation", "--skip-dependency-check", "--outdir", tmp_path, tmp_path / "clone")
    python("-m", *build, folder=folder)
    (wheel,) = tmp_path.glob("*.whl")
    python("-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target", folder, wheel, folder=folder)
    shutil.rmtree(tmp_path / "clone")
    assert str(folder) in python("-c", "import histocoder; print(histocoder.__file__)", folder=folder)
    in_wheel = {path.relative_to(folder / "histocoder").as_posix() for path in folder.glob("histocoder/**/*")}
    package = ROOT / "histocoder"
    assert in_wheel >= {
        path.relative_to(package).as_posix()
        for path in package.rglob("*")
        if path.suffix in (".py", ".jinja", ".html", ".css", ".js")
    }
    if shutil.which("cc") or shutil.which("gcc"):
        assert any(name.startswith("ops/_kernels") and name.endswith((".so", ".pyd")) for name in in_wheel)

    table = write_table(tmp_path / "table.csv")
    flags = finetune(table, tmp_path / "clone-run", "--batch-size", 8, "--max-steps", 3)[1:]
    run("finetune.py", *flags)
    flags[flags.index("--save-path") + 1] = str(tmp_path / "out")
    python(folder / "bin" / "histocoder", "finetune", *flags, folder=folder)
    assert_same_weights(tmp_path / "clone-run", tmp_path / "out")
    assert "farmer" in python("-m", "histocoder", "predict", "--model", tmp_path / "out", "farmer", folder=folder)
    flags[flags.index("--save-path") + 1] = str(tmp_path / "two")
    launcher = ("-m", "torch.distributed.run", "--nproc_per_node=2", f"--master_port={free_port()}")
    said = python(*launcher, "-m", "histocoder.cli.finetune", "--distributed", *flags, folder=folder)
    assert "step 3/3" in said and (tmp_path / "two" / "model.safetensors").exists()
