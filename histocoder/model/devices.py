"""Devices: their names, what they can compile, the precision they compute in, and how they give the same bits."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import sys
from pathlib import Path

import torch

from histocoder.config import PRECISIONS
from histocoder.errors import UserError

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def device_name(device: torch.device) -> str:
    """Return the name that its maker gave it; of a CPU with the number of threads that torch uses."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type == "mps":
        return "GPU of this Mac"
    threads = torch.get_num_threads()
    name = " ".join(_cpu_info("model name") or [platform.processor() or platform.machine()])
    return f"{name} ({threads} thread{'s' * (threads > 1)})"


def _cpu_info(field: str) -> list[str]:
    """Return the words that Linux has of a field of the first processor; none elsewhere."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    return next((line.partition(":")[2].split() for line in lines if line.startswith(field)), [])


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


def computing_dtype(precision: str, device: torch.device, *, use_amp: bool = False) -> torch.dtype:
    """Return the dtype that a precision stands for on a device.

    Parameters
    ----------
    precision : {"auto", "fp32", "bf16", "fp16"}
        auto is bf16 where the hardware multiplies in it, else fp32.
    device : torch.device
    use_amp : bool
        Whether auto is fp16, instead of fp32, on a GPU without bf16.

    Raises
    ------
    UserError
        Where there is no such precision, or fp16 is asked for on a CPU.
    """
    if precision not in PRECISIONS:
        raise UserError(f"Unknown precision {precision!r}; choose one of {', '.join(PRECISIONS)}.")
    if precision == "fp16" and device.type != "cuda":
        raise UserError("fp16 needs a CUDA GPU; on this device choose --precision auto.")
    if precision == "auto":
        precision = "bf16" if has_bf16(device) else "fp16" if use_amp and device.type == "cuda" else "fp32"
    return _DTYPES[precision]


def choose_tf32(dtype: torch.dtype, device: torch.device) -> None:
    """Have a GPU compute what is left in fp32 in TF32, as the heads' products are, unless all is to be in fp32."""
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = dtype != torch.float32


def precision_name(dtype: torch.dtype) -> str:
    """Return what users call a dtype."""
    return next(name for name, known in _DTYPES.items() if known == dtype)


def has_bf16(device: torch.device) -> bool:
    """Return whether a device multiplies matrices in bf16: GPUs since Ampere, CPUs with AMX or AVX512-BF16."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    return not {"amx_bf16", "avx512_bf16"}.isdisjoint(_cpu_info("flags"))
