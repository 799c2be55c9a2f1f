"""What setup.cfg can't say: that there is C to compile, on x86-64 once for each kind of
processor.
"""

import platform

from setuptools import Extension, setup

AVX2 = ["-mavx2", "-mfma", "-mbmi", "-mbmi2", "-mf16c"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"]
KINDS = {"_kernels": []}  # of ops/kernels.py's list
if platform.machine() in ("x86_64", "AMD64"):
    KINDS |= {"_kernels_avx2": AVX2, "_kernels_avx512": AVX512}

setup(
    ext_modules=[
        Extension(
            f"histocoder.ops.{name}",
            ["histocoder/ops/_kernels.c"],
            extra_compile_args=["-O3", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", *flags],
            extra_link_args=["-lm"],  # not OpenMP: what torch has loaded is used
            optional=True,  # without a compiler training works, slower
        )
        for name, flags in KINDS.items()
    ]
)
