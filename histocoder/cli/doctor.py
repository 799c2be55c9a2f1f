"""`histocoder doctor`: report what this machine has for training, and what limits it."""

import importlib.util
import os
import platform
import shutil
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import torch

from histocoder.cli.flags import DoctorFlags
from histocoder.files import make_folder
from histocoder.log import log
from histocoder.model.devices import device_name, has_bf16, total_bytes
from histocoder.model.encoder import hub_answers
from histocoder.ops import kernels

PACKAGES = ("transformers", "pandas", "pyarrow", "scikit-learn", "safetensors", "matplotlib")
_PARAMETERS = 140_000_000  # of a model with CANINE-s
_RUN_BYTES = _PARAMETERS * (3 * 12 + 2 * 4)  # two checkpoints, one being written, the best model and the last
_TRAINING_BYTES = _PARAMETERS * 16  # weights, gradients, and two numbers of the optimizer's for each
_SHARED_MEMORY_BYTES = 1e9


def run(config: DoctorFlags) -> None:
    """Print what was found, each with a note where something works less well, or not at all."""
    for what, found, note in examine(Path(config.folder)):
        log.info(f"{'note' if note else 'ok':<9}{what:<15}{found}")
        if note:
            log.info(f"{'':24}{note}")
    log.info("This machine can train models; the notes, if any, say what limits it.")


def examine(folder: Path) -> Iterator[tuple[str, str, str]]:
    """Yield things to examine, what was found, and what that limits; `folder` is where runs are to be saved."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    cuda = f"CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
    own = f"histocoder {version('histocoder')}, Python {platform.python_version()}, torch {torch.__version__} ({cuda})"
    yield "versions", own, ""
    yield "packages", ", ".join(f"{name} {version(name)}" for name in PACKAGES), ""
    for name, flag in (("wandb", "--log-wandb"), ("tensorboard", "--log-tensorboard")):
        if importlib.util.find_spec(name) is None:
            yield name, "not installed", f"{flag} needs it: pip install {name}"
    yield "devices", *devices()
    if has_bf16(device):
        yield "precision", "bf16 is supported in hardware; --precision auto uses it", ""
    else:
        yield "precision", "no bf16 in hardware; --precision auto uses fp32", "Training in bf16 is faster."
    slow = "Training on a CPU is slower without. Install a C compiler with OpenMP (gcc), then reinstall histocoder."
    has_kernels = kernels.library() is not None
    yield "kernels", "compiled" if has_kernels else "not compiled, or out of date", "" if has_kernels else slow
    needed = f"Training CANINE-s takes {_gb(_TRAINING_BYTES)} without any batch; --encoder ngram takes little."
    yield "memory", _gb(total_bytes()), needed if total_bytes() < 2 * _TRAINING_BYTES else ""
    if os.path.isdir("/dev/shm"):
        free = shutil.disk_usage("/dev/shm").free
        full = "Loader workers are killed when it is full. Keep --num-workers 0, or start docker with --shm-size=2g."
        yield "shared memory", f"{_gb(free)} free in /dev/shm", full if free < _SHARED_MEMORY_BYTES else ""
    there = next(path for path in (folder.resolve(), *folder.resolve().parents) if path.exists())
    make_folder(there)
    free = shutil.disk_usage(there).free
    needed = f"A run with CANINE-s takes up to {_gb(_RUN_BYTES)}; one with --encoder ngram takes little."
    yield "disk", f"{_gb(free)} free in {there}", needed if free < _RUN_BYTES else ""
    offline = "HF_HUB_OFFLINE is set" if os.environ.get("HF_HUB_OFFLINE") else "can't be reached"
    note = "" if hub_answers() else "Use a pretrained encoder from a folder (--encoder PATH), or --encoder ngram."
    yield "hub", f"the Hugging Face hub: {offline if note else 'can be reached'}", note


def devices() -> tuple[str, str]:
    """Return the GPUs, or the processor and why there are none."""
    gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    if gpus:
        return ", ".join(f"{gpu.name} ({gpu.total_memory / 1e9:.0f} GB)" for gpu in gpus), ""
    name = device_name(torch.device("cpu"))
    if torch.backends.mps.is_available():
        return f"{name}, and the GPU of this Mac", ""
    if shutil.which("nvidia-smi") is None:
        return name, "No GPU: pretrained encoders are slow to train here; --encoder ngram takes minutes."
    return name, "There is a driver for NVIDIA GPUs, but torch finds none: install a torch with CUDA, check nvidia-smi."


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:,.1f} GB"
