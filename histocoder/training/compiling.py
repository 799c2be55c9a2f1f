"""Whether torch can compile a model: it writes C++ or Triton, which a compiler turns into machine
code.
"""

import shutil

import torch

from histocoder.errors import UserError
from histocoder.model import MixerModel, NgramEncoder


def check_compiler(model: MixerModel, device: torch.device) -> None:
    """Raise a UserError if a model can't be compiled for a device."""
    # here, since it takes a second to import
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch.utils._triton import has_triton

    if isinstance(model.encoder, NgramEncoder):
        raise UserError(
            "--compile is not for n-gram encoders, whose gradients are sparse; omit it."
        )
    if device.type not in ("cpu", "cuda"):
        raise UserError(
            f"--compile is for CPUs and NVIDIA GPUs; omit it with --device {device.type}."
        )
    if device.type == "cuda" and not (
        has_triton() and any(map(shutil.which, ("cc", "gcc", "clang")))
    ):
        raise UserError(
            "--compile needs Triton and a C compiler (gcc) for a GPU; install them, or omit it."
        )
    if device.type == "cpu":
        try:
            get_cpp_compiler()
        except RuntimeError as error:
            raise UserError(
                "--compile needs a C++ compiler, and there is none; install g++, name "
                "another one in CXX, or omit it."
            ) from error
