"""Train and use models that code occupational descriptions."""

from __future__ import annotations

import importlib
import importlib.util
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from histocoder.config import FinetuneConfig, MixerConfig
    from histocoder.inference.coder import Coder
    from histocoder.inference.occcanine import load_occcanine

# Before torch is imported: how often its threads look whether the others are done before they sleep. Beside another
# program, the 300,000 times that are OpenMP's default keep from the processor what they wait for.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")

__all__ = ["Coder", "FinetuneConfig", "MixerConfig", "load_occcanine", "train"]
__version__ = "0.1.0"

_MODULES = {
    "Coder": "histocoder.inference.coder",
    "FinetuneConfig": "histocoder.config",
    "MixerConfig": "histocoder.config",
    "load_occcanine": "histocoder.inference.occcanine",
    "train": "histocoder.training.train",
}


def __getattr__(name: str) -> Any:  # so that importing a part does not import torch and transformers
    if name == "Coder" and importlib.util.find_spec("torch") is None:  # then exported models run all the same
        return importlib.import_module("histocoder.inference.onnx_coder").OnnxCoder
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
