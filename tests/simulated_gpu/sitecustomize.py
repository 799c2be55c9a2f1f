"""Gives every Python that finds this file a simulated GPU: `gpu.cpp`, compiled, at SIMULATED_GPU."""

import ctypes
import importlib.util
import os
from pathlib import Path

_LIBRARIES = Path(importlib.util.find_spec("torch").origin).parent / "lib"
for _name in ("libc10.so", "libtorch_cpu.so"):
    ctypes.CDLL(str(_LIBRARIES / _name), ctypes.RTLD_GLOBAL)
gpu = ctypes.CDLL(os.environ["SIMULATED_GPU"], ctypes.RTLD_GLOBAL)  # torch looks for GPUs once, when it is imported
for _name in ("gpu_waits", "gpu_allocated", "gpu_peak", "gpu_room"):
    getattr(gpu, _name).restype = ctypes.c_int64

import torch  # noqa: E402


def _cloned(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    like = torch.empty(storage.nbytes(), dtype=torch.uint8, device=storage.device)
    return like.untyped_storage().copy_(storage)


torch.UntypedStorage.clone = _cloned
_ANSWERS = {
    "_lazy_init": None,
    "is_available": True,
    "is_initialized": True,
    "device_count": 1,
    "current_device": 0,
    "_exchange_device": 0,
    "_maybe_exchange_device": 0,
    "set_device": None,
    "synchronize": None,
    "empty_cache": None,
    "get_device_name": "a simulated GPU",
    "get_device_capability": (9, 0),
    "is_bf16_supported": True,
    "is_current_stream_capturing": False,
    "memory_reserved": 0,
}
for _name, _answer in _ANSWERS.items():
    setattr(torch.cuda, _name, lambda *args, _answer=_answer, **options: _answer)
torch.cuda.mem_get_info = lambda device=None: (gpu.gpu_room() - gpu.gpu_allocated(), gpu.gpu_room())
torch.cuda.max_memory_allocated = lambda device=None: gpu.gpu_peak()
torch.cuda.reset_peak_memory_stats = lambda device=None: gpu.gpu_reset_peak()
torch.cuda.get_rng_state = lambda device=None: torch.get_rng_state()  # noise comes of the CPU's generator
torch.cuda.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
torch.cuda.manual_seed_all = torch.cuda.manual_seed = lambda seed: None
