"""What setup.cfg can't say: that there is C to compile."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "histocoder._kernels",
            ["histocoder/_kernels.c"],
            extra_compile_args=["-O3", "-fno-math-errno", "-fno-trapping-math", "-fopenmp"],
            extra_link_args=["-lm"],  # not OpenMP: what torch has loaded is used
            optional=True,  # without a compiler training works, slower
        )
    ]
)
