"""Train and use models that code occupational descriptions."""

import importlib
import os
from typing import TYPE_CHECKING, Any

from histocoder._version import __version__

if TYPE_CHECKING:
    from histocoder.config import FinetuneConfig, MixerConfig
    from histocoder.inference.coder import Coder, load_occcanine
    from histocoder.inference.onnx_coder import OnnxCoder

# Set before torch is imported: how often OpenMP's threads check for the others before they sleep.
# The default, 300,000 times, takes the processor from the threads they wait for if another program
# is running.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")

__all__ = [
    "Coder",
    "FinetuneConfig",
    "MixerConfig",
    "OccupationClassifier",
    "OnnxCoder",
    "__version__",
    "load_occcanine",
    "train",
]

_MODULES = {
    "Coder": "histocoder.inference.coder",
    "FinetuneConfig": "histocoder.config",
    "MixerConfig": "histocoder.config",
    "OccupationClassifier": "histocoder.training.estimator",
    "OnnxCoder": "histocoder.inference.onnx_coder",
    "load_occcanine": "histocoder.inference.coder",
    "train": "histocoder.training.train",
}


def __getattr__(name: str) -> Any:  # importing histocoder does not import torch and transformers
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
