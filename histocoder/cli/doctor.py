"""`histocoder doctor`: report what this machine has for training, and what limits it."""

import platform
import shutil
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import torch

from histocoder import launcher
from histocoder.cli.flags import DoctorFlags
from histocoder.files import make_folder
from histocoder.log import log
from histocoder.model.devices import device_name, has_bf16, total_bytes
from histocoder.model.encoder import hub_answers
from histocoder.ops import kernels

_PACKAGES = ("transformers", "pandas", "pyarrow", "scikit-learn", "safetensors", "matplotlib")
_NUM_PARAMETERS = 140_000_000  # of a model with CANINE-s
# two checkpoints, one being written, the best model and the last
_RUN_BYTES = _NUM_PARAMETERS * (3 * 12 + 2 * 4)
# weights, gradients, and two numbers of the optimizer's for each
_TRAINING_BYTES = _NUM_PARAMETERS * 16
_MIN_SHARED_BYTES = 1e9
_SHARED_MEMORY = Path("/dev/shm")


class Finding(NamedTuple):
    """One thing that a machine has, and what limits it."""

    name: str
    state: str
    limit: str  # what works less well, or not at all
    is_limited: bool  # whether the limit applies


def run_doctor(config: DoctorFlags) -> None:
    """Print what was found, each with a note where something works less well, or not at all."""
    for finding in examine(Path(config.folder).resolve()):
        verdict = "note" if finding.is_limited else "ok"
        line = f"{verdict:<9}{finding.name:<15}{finding.state}"
        if finding.is_limited:
            line += f"\n{'':24}{finding.limit}"
        log.info(line)


def examine(folder: Path) -> Iterator[Finding]:
    """Examine this machine; `folder` is where runs are to be saved."""
    versions = [
        f"histocoder {version('histocoder')}",
        f"Python {platform.python_version()}",
        f"torch {torch.__version__}",
    ]
    versions += [f"{name} {version(name)}" for name in _PACKAGES]
    yield Finding("versions", ", ".join(versions), "", is_limited=False)
    yield from _examine_computing()
    yield from _examine_space(folder)

    # what a run starts from may have to be downloaded
    has_hub = hub_answers()
    yield Finding(
        "hub",
        "can be reached" if has_hub else "offline, or HF_HUB_OFFLINE is set",
        "A run without --encoder trains ngram; name a pretrained encoder's folder with "
        "--encoder PATH.",
        is_limited=not has_hub,
    )


def _examine_computing() -> Iterator[Finding]:
    """Examine the device, its numbers, and the compiled kernels."""
    device = launcher.choose_device("auto", launcher.Launch())
    num_devices = 1
    if device.type == "cuda":
        num_devices = torch.cuda.device_count()
    no_gpu = (
        "No GPU: a run without --encoder trains ngram, which takes minutes; pretrained "
        "encoders are slow here."
    )
    if shutil.which("nvidia-smi"):
        no_gpu = (
            f"There is a driver for NVIDIA GPUs, but {launcher.missing_gpu()}: install a "
            "torch that fits it."
        )
    devices = f"{num_devices} × {device_name(device)}"
    yield Finding("devices", devices, no_gpu, is_limited=device.type == "cpu")

    is_bf16 = has_bf16(device)
    yield Finding(
        "precision",
        "bf16 is supported in hardware" if is_bf16 else "no bf16 in hardware",
        "Training in bf16 is faster.",
        is_limited=not is_bf16,
    )
    has_kernels = kernels.library() is not None
    yield Finding(
        "kernels",
        "compiled" if has_kernels else "not compiled, or out of date",
        "Training is slower, and on large tables weaker. Install a C compiler (gcc), then "
        "reinstall histocoder.",
        is_limited=not has_kernels,
    )


def _examine_space(folder: Path) -> Iterator[Finding]:
    """Examine memory and disk, against what the largest usual model takes."""
    num_bytes = total_bytes()
    yield Finding(
        "memory",
        _gb(num_bytes),
        f"Training CANINE-s takes {_gb(_TRAINING_BYTES)} without any batch; --encoder ngram takes "
        "little.",
        is_limited=num_bytes < 2 * _TRAINING_BYTES,
    )
    if _SHARED_MEMORY.is_dir():
        num_free = shutil.disk_usage(_SHARED_MEMORY).free
        yield Finding(
            "shared memory",
            f"{_gb(num_free)} free in {_SHARED_MEMORY}",
            "Loader workers are killed when it is full. Keep --num-workers 0, or start docker "
            "with --shm-size=2g.",
            is_limited=num_free < _MIN_SHARED_BYTES,
        )

    # the folder may not exist yet; its disk is that of the nearest one that does
    parent = next(path for path in (folder, *folder.parents) if path.exists())
    make_folder(parent)
    num_free = shutil.disk_usage(parent).free
    yield Finding(
        "disk",
        f"{_gb(num_free)} free in {parent}",
        f"A run with CANINE-s takes up to {_gb(_RUN_BYTES)}; one with --encoder ngram takes "
        "little.",
        is_limited=num_free < _RUN_BYTES,
    )


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:,.1f} GB"
