"""`histocoder doctor`: see what this machine has for training, and what is missing."""

import importlib.metadata
import importlib.util
import json
import math
import os
import platform
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from histocoder import distributed
from histocoder.cli.flags import DoctorFlags
from histocoder.errors import UserError
from histocoder.files import make_folder
from histocoder.log import log
from histocoder.model.devices import check_compiler, device_name, has_bf16, total_bytes
from histocoder.model.encoder import hub_answers
from histocoder.ops import kernels

OK, NOTE, PROBLEM = "ok", "note", "problem"
"""Marks of findings: with a note something works less well, or not at all, that training can do without."""
_ALL_REDUCE_SECONDS = 120.0
"""Seconds in which the processes must start, connect and add up."""
PACKAGES = (
    *("transformers", "pandas", "pyarrow", "matplotlib", "safetensors", "scikit-learn", "text-unidecode", "tqdm"),
    *("PyYAML", "Jinja2"),
)
_PARAMETERS = 140_000_000  # of a model with CANINE-s
_RUN_BYTES = _PARAMETERS * (3 * 12 + 2 * 4)
"""Disk space of its run: two checkpoints, one being written, the best model and the last."""
_TRAINING_BYTES = _PARAMETERS * 16
"""Memory of its training: weights, gradients, and two numbers of the optimizer's for each."""
_SHARED_MEMORY_BYTES = 1e9
_NUMBERS = 1 << 20
_POLL_SECONDS = 0.05


class Finding(NamedTuple):
    """One thing that was examined."""

    mark: str
    what: str
    found: str
    meaning: str = ""
    """Consequence, and what to do."""


def run(config: DoctorFlags) -> None:
    """Examine the machine; exit code 1 where something is missing."""
    if not print_findings(examine(Path(config.folder)), log.info):
        raise SystemExit(1)


def examine(folder: Path) -> Iterator[Finding]:
    """Examine everything, the slowest last; `folder` is where runs are to be saved."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    yield versions()
    yield from packages()
    yield devices()
    yield precision(device)
    yield compiler(device)
    yield compiled_kernels()
    yield memory()
    yield shared_memory()
    yield disk(folder)
    yield hub()
    yield nccl()
    yield all_reduce(_ALL_REDUCE_SECONDS)


def print_findings(findings: Iterable[Finding], say: Callable[[str], None]) -> bool:
    """Print each finding as soon as it is known; return whether training has all that it needs."""
    marks = []
    for finding in findings:
        say(f"{finding.mark:<9}{finding.what:<15}{finding.found}")
        if finding.meaning:
            say(f"{'':24}{finding.meaning}")
        marks.append(finding.mark)
    if problems := marks.count(PROBLEM):
        say(f"{problems} problem{'s' * (problems > 1)} found: what is marked 'problem' won't work.")
    else:
        say(f"This machine can train models{'; the notes say what limits it' if NOTE in marks else ''}.")
    return not problems


def versions() -> Finding:
    """Report the versions of histocoder, Python and torch."""
    own = f"histocoder {_version_of('histocoder') or '(not installed)'}, Python {platform.python_version()}"
    cuda = f"CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
    return Finding(OK, "versions", f"{own}, torch {torch.__version__} ({cuda})")


def packages() -> Iterator[Finding]:
    """Report required packages, and optional ones that are missing."""
    versions = {name: _version_of(name) for name in PACKAGES}
    yield Finding(OK, "packages", ", ".join(f"{name} {version}" for name, version in versions.items() if version))
    if missing := [name for name, version in versions.items() if version is None]:
        yield Finding(PROBLEM, "packages", f"missing: {', '.join(missing)}", f"pip install {' '.join(missing)}")
    for name, flag in (("wandb", "--log-wandb"), ("tensorboard", "--log-tensorboard")):
        if importlib.util.find_spec(name) is None:
            yield Finding(NOTE, name, "not installed", f"{flag} needs it: pip install {name}")


def _version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def devices() -> Finding:
    """Report GPUs, or why there are none."""
    count = torch.cuda.device_count()
    if count:
        gpus = [torch.cuda.get_device_properties(i) for i in range(count)]
        names = ", ".join(f"{gpu.name} ({gpu.total_memory / 1e9:.0f} GB)" for gpu in gpus)
        start = "" if count == 1 else f"Start one process for each: torchrun --nproc_per_node={count} finetune.py …"
        return Finding(OK, "devices", names, start)
    name = device_name(torch.device("cpu"))
    if torch.backends.mps.is_available():
        return Finding(OK, "devices", f"{name}, and the GPU of this Mac")
    if shutil.which("nvidia-smi") is None:
        why = "No GPU: pretrained encoders are slow to train here; --encoder ngram takes minutes."
    elif torch.version.cuda is None:
        why = "There is a driver for NVIDIA GPUs, but this torch is built without CUDA. Install one with CUDA."
    else:
        visible = f"CUDA_VISIBLE_DEVICES (now {os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')!r})"
        why = f"There is a driver for NVIDIA GPUs, but torch finds none: check nvidia-smi, {visible}."
    return Finding(NOTE, "devices", name, why)


def precision(device: torch.device) -> Finding:
    """Report whether the device computes in bf16."""
    if has_bf16(device):
        return Finding(OK, "precision", "bf16 is supported in hardware; --precision auto uses it")
    amp = "--use-amp uses fp16 instead, which is faster." if device.type == "cuda" else "Training in bf16 is faster."
    return Finding(NOTE, "precision", "no bf16 in hardware; --precision auto uses fp32", amp)


def compiler(device: torch.device) -> Finding:
    """Report whether torch.compile works."""
    try:
        check_compiler(device)
    except UserError as error:
        return Finding(NOTE, "compiler", "none that --compile can use", str(error))
    return Finding(OK, "compiler", "--compile is supported")


def compiled_kernels() -> Finding:
    """Report whether the C kernels were compiled."""
    if kernels.library() is None:
        what = "Training on a CPU is slower without. Install a C compiler with OpenMP (gcc), then reinstall histocoder."
        return Finding(NOTE, "kernels", "not compiled when histocoder was installed, or out of date", what)
    return Finding(OK, "kernels", "compiled; training and prediction on a CPU use them")


def memory() -> Finding:
    """Report the memory of this machine."""
    size = total_bytes()
    if math.isinf(size):
        return Finding(NOTE, "memory", "unknown here")
    meaning = (
        f"Training CANINE-s takes {_gb(_TRAINING_BYTES)} without any batch. Lower --batch-size, or use --encoder ngram."
    )
    return _space("memory", _gb(size), meaning, is_enough=size >= 2 * _TRAINING_BYTES)


def shared_memory() -> Finding:
    """Report the room for batches of loader workers."""
    if not Path("/dev/shm").is_dir():
        return Finding(OK, "shared memory", "no /dev/shm: loader workers use files")
    size = shutil.disk_usage("/dev/shm").free
    meaning = (
        "Loader workers pass batches through it, and are killed when it is full. Keep --num-workers 0, or give a "
        "container more (docker run --shm-size=2g)."
    )
    return _space("shared memory", f"{_gb(size)} free in /dev/shm", meaning, is_enough=size >= _SHARED_MEMORY_BYTES)


def disk(folder: Path) -> Finding:
    """Report the free space for runs in `folder`."""
    there = next(path for path in (folder.resolve(), *folder.resolve().parents) if path.exists())
    try:
        make_folder(there)
    except UserError as error:
        return Finding(PROBLEM, "disk", f"{folder} can't be written to", str(error))
    size = shutil.disk_usage(there).free
    meaning = f"A run with CANINE-s takes up to {_gb(_RUN_BYTES)}; one with --encoder ngram takes little."
    return _space("disk", f"{_gb(size)} free in {there}", meaning, is_enough=size >= _RUN_BYTES)


def _space(what: str, found: str, meaning: str, *, is_enough: bool) -> Finding:
    return Finding(OK, what, found) if is_enough else Finding(NOTE, what, found, meaning)


def hub() -> Finding:
    """Report whether the Hugging Face hub answers."""
    if hub_answers():
        return Finding(OK, "hub", "the Hugging Face hub can be reached")
    offline = "is not used, since HF_HUB_OFFLINE is set" if os.environ.get("HF_HUB_OFFLINE") else "can't be reached"
    what = "Use a pretrained encoder from a folder (--encoder PATH), or --encoder ngram."
    return Finding(NOTE, "hub", f"the Hugging Face hub {offline}", what)


def nccl() -> Finding:
    """Report the version of NCCL."""
    if not torch.cuda.is_available():
        return Finding(OK, "NCCL", "not needed without GPUs; processes communicate over gloo")
    if not torch.distributed.is_nccl_available():
        what = "Several GPUs can't train together. Install a torch that has it."
        return Finding(NOTE, "NCCL", "this torch is built without it", what)
    return Finding(OK, "NCCL", ".".join(map(str, torch.cuda.nccl.version())))


def all_reduce(patience: float) -> Finding:
    """Add up numbers over several processes, as training adds up gradients."""
    if (gpus := torch.cuda.device_count()) > 1:
        device, processes, how = "cuda", gpus, "one per GPU, NCCL"
        remedy = "Set NCCL_DEBUG=INFO for details, and try NCCL_P2P_DISABLE=1 or --device cpu."
    else:
        device, processes, how = "cpu", 2, "gloo"
        remedy = "Often the network interface is wrong; try GLOO_SOCKET_IFNAME=lo."
    failure, seconds = _run_processes(processes, device, patience)
    what = f"{processes} processes, {how}"
    if failure is not None:
        remedy = f"Several processes can't train together on this machine; a single one can. {remedy}"
        return Finding(PROBLEM, "all-reduce", f"{what}: {failure}", remedy)
    return Finding(OK, "all-reduce", f"{what}: {4 * _NUMBERS / 1e6:.0f} MB summed in {seconds:.3f} s")


def _run_processes(count: int, device: str, patience: float) -> tuple[str | None, float]:
    """Return what is wrong, if anything, and how long the all-reduce took."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(listener.getsockname()[1])}
    size = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    parent = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC_")}
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "histocoder.cli.doctor", device],
            env={**parent, **address, **size, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]
    deadline = time.monotonic() + patience
    while None in (states := [process.poll() for process in started]) and not any(states):
        if time.monotonic() > deadline:
            break
        time.sleep(_POLL_SECONDS)
    for process in started:
        process.kill()
    said = [process.communicate() for process in started]
    for state, (_, stderr) in zip(states, said, strict=True):
        if state:
            return (stderr.strip().splitlines() or [f"a process ended with {state}"])[-1], 0.0
    if None in states:
        return f"no answer within {patience:g} s", 0.0
    return None, json.loads(said[0][0])


def add_up(device_kind: str) -> None:
    """Run as one of the processes: print how long the second all-reduce took, or exit with 1 if the sum is wrong."""
    device = distributed.start(device=device_kind)
    mine = torch.full((_NUMBERS,), float(distributed.rank() + 1), device=device)
    seconds = 0.0
    for _ in range(2):  # the first one connects
        started = time.monotonic()
        total = float(distributed.all_reduce(mine)[-1])
        seconds = time.monotonic() - started
    distributed.stop()
    expected = sum(range(1, distributed.world_size() + 1))
    if total != expected:
        sys.exit(f"the sum is {total:g} and should be {expected}")
    print(json.dumps(seconds))


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:,.1f} GB"


if __name__ == "__main__":
    add_up(sys.argv[1])
