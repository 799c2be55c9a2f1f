"""Devices: what they are called, whether torch can compile for them, and how they compute the same bits each time."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import sys
from pathlib import Path

import torch

from histocoder.errors import UserError


def device_name(device: torch.device) -> str:
    """Return the name that its maker gave it; of a CPU with the number of threads that torch uses."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type == "mps":
        return "GPU of this Mac"
    threads = torch.get_num_threads()
    return f"{_cpu_name()} ({threads} thread{'s' * (threads > 1)})"


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # no Linux
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return " ".join(next(names, platform.machine()).split())


def check_compiler(device: torch.device) -> None:
    """Raise a UserError if `--compile` can't work."""
    if device.type == "cuda":
        if importlib.util.find_spec("triton") is None or not any(map(shutil.which, ("cc", "gcc", "clang"))):
            raise UserError("--compile needs Triton and a C compiler (gcc) on a GPU; install them, or omit it.")
    elif device.type == "cpu":
        compiler = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
        if shutil.which(compiler) is None:
            raise UserError(
                f"--compile needs a C++ compiler, and there is no {compiler} here; install it, or name another in CXX."
            )
    else:
        raise UserError(f"--compile is for CPUs and NVIDIA GPUs; omit it with --device {device.type}.")


def compute_deterministically() -> None:
    """Have torch choose algorithms whose results do not vary, or raise where there is none; before CUDA starts.

    Notes
    -----
    See "Reproducibility" in PyTorch's documentation.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
