"""Whether torch can compile for a device: it writes C++ or Triton, which something must turn into machine code."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys

import torch

from histocoder.errors import UserError


def check_compiler(device: torch.device) -> None:
    """Raise a UserError where `--compile` can't work."""
    if device.type == "cuda":
        if importlib.util.find_spec("triton") is None or not any(map(shutil.which, ("cc", "gcc", "clang"))):
            raise UserError("--compile needs Triton and a C compiler (gcc) on a GPU; install them, or leave it away.")
    elif device.type == "cpu":
        compiler = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
        if shutil.which(compiler) is None:
            raise UserError(
                f"--compile needs a C++ compiler, and there is no {compiler} here; install it, or name another in CXX."
            )
    else:
        raise UserError(f"--compile is for CPUs and NVIDIA GPUs; leave it away with --device {device.type}.")
