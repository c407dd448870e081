"""The C++ extensions; everything else stands in setup.cfg."""

from glob import glob

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension
from setuptools import setup

# -ffp-contract=off keeps every instruction-set variant bit-identical to numpy.
# no-math-errno and no-trapping-math change no result; without them sqrt and selections aren't vectorised.
FLAGS = [
    "-O3",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fvisibility=hidden",
    "-Wall",
    "-Wextra",
    "-pthread",
]


def extension(name: str, *folders: str) -> Pybind11Extension:
    return Pybind11Extension(
        name,
        sorted(path for folder in folders for path in glob(f"native/{folder}/*.cpp")),
        include_dirs=["native"],
        depends=sorted(path for folder in (*folders, "common") for path in glob(f"native/{folder}/*.hpp")),
        cxx_std=17,
        extra_compile_args=FLAGS,
        extra_link_args=["-pthread"],
    )


ParallelCompile().install()  # as many compilers as cores
setup(ext_modules=[extension("smb._native", "smb", "net"), extension("prototxt._native", "layers")])
