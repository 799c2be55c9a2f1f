"""How the C library hands out memory."""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # see mallopt(3)


def keep_freed_memory() -> None:
    """Have freed memory used again, instead of given back and asked for anew.

    A training step on a CPU frees and allocates the same gigabytes over and over, and the kernel clears each page
    that it hands out. Does nothing where the C library is not glibc.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return
    mallopt(_M_MMAP_MAX, 0)
    mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
