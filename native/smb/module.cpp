// The Python face of this folder's kernels: pointers and counts, nothing else.
#include <pybind11/pybind11.h>

PYBIND11_MODULE(_native, m) { m.doc() = "native kernels"; }
