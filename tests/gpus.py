"""Whether tests see this machine's GPUs; imports nothing, since PyTorch looks for them when it is
imported.
"""

from collections.abc import Mapping, Sequence


def hiding_gpus(argv: Sequence[str], env: Mapping[str, str]) -> dict[str, str]:
    """The variables that hide GPUs from this process and those that it starts; none where `-m gpu`
    asks for them.

    Other tests compare bits with those of a CPU, and start more processes than there are GPUs.
    """
    is_worker = "PYTEST_XDIST_WORKER" in env  # to which its parent has given its environment
    is_for_gpus = "-m gpu" in " ".join(argv)
    return {} if is_worker or is_for_gpus else {"CUDA_VISIBLE_DEVICES": ""}
