"""The same bits every time, at the price of some speed."""

from __future__ import annotations

import os

import torch


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
