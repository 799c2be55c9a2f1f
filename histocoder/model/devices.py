"""Devices: names, precision, memory, and deterministic algorithms."""

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from histocoder.config import PRECISIONS
from histocoder.distributed import all_reduce
from histocoder.errors import UserError

OUT_OF_MEMORY = (
    "In training, halve --batch-size and double --gradient-accumulation-steps, which gives the "
    "same steps; otherwise set a smaller --batch-size, stop other programs that use this memory, "
    "or compute with --device cpu."
)
"""Advice where memory runs out."""
_BYTES_OF_ROW = 4_000_000  # of 128 characters in fp32, in the widest layer of CANINE-s, twice
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def device_name(device: torch.device) -> str:
    """Return the product name of a device; of a CPU also the number of torch's threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type == "mps":
        return "GPU of this Mac"
    threads = torch.get_num_threads()
    name = " ".join(_cpu_info("model name") or [platform.processor() or platform.machine()])
    unit = "thread" if threads == 1 else "threads"
    return f"{name} ({threads} {unit})"


def _cpu_info(field: str) -> list[str]:
    """Return the words of a field of the first processor in Linux's /proc/cpuinfo; none on other
    systems.
    """
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    for line in lines:
        if line.startswith(field):
            return line.partition(":")[2].split()
    return []


def moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor of the CPU's on a device, from pinned memory, so that the host does not wait
    for a GPU.
    """
    pinned = tensor.pin_memory() if device.type == "cuda" else tensor
    return pinned.to(device, non_blocking=True)


def peak_gpu_memory(device: torch.device) -> dict[str, float]:
    """Return the peak of the memory of tensors in GB, on the GPU that uses most; nothing without
    GPUs.
    """
    if device.type != "cuda":
        return {}
    peak = torch.tensor(torch.cuda.max_memory_allocated(device) / 1e9, dtype=torch.float64)
    return {"gpu_memory_gb": float(all_reduce(peak, "max"))}


def rows_at_once(device: torch.device) -> int:
    """Return how many descriptions to code at once: 256, and on a GPU with room for them up to
    4,096.
    """
    if device.type != "cuda":
        return 256
    free_bytes = torch.cuda.mem_get_info(device)[0]
    return min(max(free_bytes // _BYTES_OF_ROW, 256), 4096)


def total_bytes() -> float:
    """Return the machine's memory; infinity if it is unknown."""
    try:
        return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (ValueError, OSError, AttributeError):  # the last on Windows
        return float("inf")


def compute_deterministically() -> None:
    """Make torch use deterministic algorithms, or raise if there is none; to be called before CUDA
    starts.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False


@contextmanager
def fast_products(device: torch.device, *, deterministic: bool) -> Iterator[None]:
    """Compute products of fp32 matrices in TF32 on a GPU, unless `deterministic`, several times as
    fast.

    Factors then have 10 bits behind the point instead of 23, and sums are in fp32: enough to train
    with. Prediction computes in fp32, so that its probabilities are those of a CPU. The setting is
    the process's, and is restored.
    """
    before = torch.get_float32_matmul_precision()
    if device.type == "cuda" and not deterministic:
        torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def computing_dtype(precision: str, device: torch.device, *, use_amp: bool = False) -> torch.dtype:
    """Return the dtype of a precision on a device; raise a UserError if it is unknown, or the
    device lacks it.

    A CPU has no fp16, and a GPU older than Ampere no bf16: PyTorch would emulate it, slowly.

    "auto" is bf16 if the hardware multiplies in it, else fp32; with `use_amp` fp16 on a GPU without
    bf16.
    """
    if precision not in PRECISIONS:
        raise UserError(f"Unknown precision {precision!r}; choose one of {', '.join(PRECISIONS)}.")
    if precision == "fp16" and device.type != "cuda":
        raise UserError("fp16 needs a CUDA GPU; on this device choose --precision auto.")
    if precision == "bf16" and device.type == "cuda" and not has_bf16(device):
        raise UserError(
            f"{device_name(device)} has no bf16: GPUs have it from compute capability 8.0 on "
            "(Ampere). Choose --precision auto or fp16."
        )
    if precision != "auto":
        return _DTYPES[precision]
    if has_bf16(device):
        return torch.bfloat16
    if use_amp and device.type == "cuda":
        return torch.float16
    return torch.float32


def precision_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype in the settings."""
    return next(name for name, known in _DTYPES.items() if known == dtype)


def has_bf16(device: torch.device) -> bool:
    """Return whether a device multiplies matrices in bf16: GPUs since Ampere, CPUs with AMX or
    AVX512-BF16.
    """
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    return not {"amx_bf16", "avx512_bf16"}.isdisjoint(_cpu_info("flags"))


def is_out_of_memory(error: RuntimeError | MemoryError) -> bool:
    """Return whether an error says that there is no more memory on the device or the machine."""
    signs = ("out of memory", "allocate memory", "not enough memory", "ALLOC_FAILED", "bad_alloc")
    return isinstance(error, MemoryError) or any(sign in str(error) for sign in signs)
