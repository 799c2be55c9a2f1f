"""Memory: how the C library hands it out, and how much of a GPU's is taken."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import torch

from histocoder import distributed

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # see mallopt(3)
_MADV_HUGEPAGE = 14  # see madvise(2)
_PAGE = 2**21


def keep_freed_memory() -> None:
    """Have freed memory used again, instead of given back and asked for anew; and have it in large pages.

    A training step on a CPU frees and allocates the same gigabytes over and over, and the kernel clears each page
    that it hands out. Does nothing where the C library is not glibc.
    """
    try:
        libc = ctypes.CDLL(None)
        mallopt, malloc, free, madvise = libc.mallopt, libc.malloc, libc.free, libc.madvise
    except (OSError, AttributeError, TypeError):
        return
    malloc.restype, malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    free.argtypes = [ctypes.c_void_p]
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    mallopt(_M_MMAP_MAX, 0)
    mallopt(_M_TRIM_THRESHOLD, -1)
    if not _may_reserve():
        return
    room = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2  # of addresses: nothing is written there
    if start := malloc(room):
        madvise(-(-start // _PAGE) * _PAGE, room - _PAGE, _MADV_HUGEPAGE)
        free(start)


def _may_reserve() -> bool:
    """Whether addresses without memory behind them cost nothing."""
    import resource  # which is where glibc is

    if resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY:
        return False
    try:
        return Path("/proc/sys/vm/overcommit_memory").read_text().strip() != "2"
    except OSError:
        return False


def peak_gpu_memory(device: torch.device) -> dict[str, float]:
    """The most that tensors have taken so far, in GB, on the GPU of the rank that took most; nothing without GPUs."""
    if device.type != "cuda":
        return {}
    mine = torch.tensor([torch.cuda.max_memory_allocated(device) / 1e9], dtype=torch.float64)
    return {"gpu_memory_gb": max(map(float, distributed.gather(mine)))}
