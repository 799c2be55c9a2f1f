"""`histocoder doctor`: report what this machine has for training, and what limits it."""

import platform
import shutil
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import torch

from histocoder import launcher
from histocoder.cli.flags import DoctorFlags
from histocoder.files import make_folder
from histocoder.log import log
from histocoder.model.devices import device_name, has_bf16, total_bytes
from histocoder.model.encoder import hub_answers
from histocoder.ops import kernels

_PACKAGES = ("transformers", "pandas", "pyarrow", "scikit-learn", "safetensors", "matplotlib")
_PARAMETERS = 140_000_000  # of a model with CANINE-s
_RUN_BYTES = _PARAMETERS * (
    3 * 12 + 2 * 4
)  # two checkpoints, one being written, the best model and the last
_TRAINING_BYTES = (
    _PARAMETERS * 16
)  # weights, gradients, and two numbers of the optimizer's for each
_SHARED_MEMORY = Path("/dev/shm")


def run_doctor(config: DoctorFlags) -> None:
    """Print what was found, each with a note where something works less well, or not at all."""
    for what, found, limit in examine(Path(config.folder).resolve()):
        log.info(
            f"{'note' if limit else 'ok':<9}{what:<15}{found}"
            + (f"\n{'':24}{limit}" if limit else "")
        )


def examine(folder: Path) -> Iterator[tuple[str, str, str]]:
    """Yield things to examine, what was found, and what that limits; `folder` is where runs are to
    be saved.
    """
    device = launcher.choose_device("auto", launcher.Launch())
    num_devices = torch.cuda.device_count() if device.type == "cuda" else 1
    own = (
        f"histocoder {version('histocoder')}, Python {platform.python_version()}, torch "
        f"{torch.__version__}"
    )
    yield "versions", ", ".join([own, *(f"{name} {version(name)}" for name in _PACKAGES)]), ""
    without = (
        "No GPU: a run without --encoder trains ngram, which takes minutes; pretrained "
        "encoders are slow here."
    )
    if shutil.which("nvidia-smi"):
        without = (
            f"There is a driver for NVIDIA GPUs, but {launcher.missing_gpu()}: install a "
            "torch that fits it."
        )
    yield (
        "devices",
        f"{num_devices} × {device_name(device)}",
        without if device.type == "cpu" else "",
    )
    bf16 = "bf16 is supported in hardware" if has_bf16(device) else "no bf16 in hardware"
    yield "precision", bf16, "" if has_bf16(device) else "Training in bf16 is faster."
    slow = (
        "Training is slower, and on large tables weaker. Install a C compiler (gcc), then "
        "reinstall histocoder."
    )
    has_kernels = kernels.library() is not None
    yield (
        "kernels",
        "compiled" if has_kernels else "not compiled, or out of date",
        "" if has_kernels else slow,
    )
    needed = (
        f"Training CANINE-s takes {_gb(_TRAINING_BYTES)} without any batch; --encoder "
        "ngram takes little."
    )
    yield "memory", _gb(total_bytes()), needed if total_bytes() < 2 * _TRAINING_BYTES else ""
    if _SHARED_MEMORY.is_dir():
        free = shutil.disk_usage(_SHARED_MEMORY).free
        full = (
            "Loader workers are killed when it is full. Keep --num-workers 0, or start docker "
            "with --shm-size=2g."
        )
        yield "shared memory", f"{_gb(free)} free in {_SHARED_MEMORY}", full if free < 1e9 else ""
    there = next(path for path in (folder, *folder.parents) if path.exists())
    make_folder(there)
    free = shutil.disk_usage(there).free
    needed = (
        f"A run with CANINE-s takes up to {_gb(_RUN_BYTES)}; one with --encoder ngram takes little."
    )
    yield "disk", f"{_gb(free)} free in {there}", needed if free < _RUN_BYTES else ""
    without = (
        "A run without --encoder trains ngram; name a pretrained encoder's folder with "
        "--encoder PATH."
    )
    answers = hub_answers()
    yield (
        "hub",
        "can be reached" if answers else "offline, or HF_HUB_OFFLINE is set",
        "" if answers else without,
    )


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:,.1f} GB"
