"""In what precision a model computes; its weights and the optimizer's state are in fp32 whatever it is."""

from __future__ import annotations

import torch

from histocoder.config import PRECISIONS
from histocoder.errors import UserError

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


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
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            flags = next((line.split() for line in file if line.startswith("flags")), [])
    except OSError:  # no Linux
        return False
    return "amx_bf16" in flags or "avx512_bf16" in flags
