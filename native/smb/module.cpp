// The Python face of this folder: vector kernels, and segments mapped into this process.
#include "bind.hpp"

PYBIND11_MODULE(_native, m) {
  m.doc() = "Vector kernels, and segments as mapped into this process (see smb/segment.py).";
  smb::bind_kernels(m);
  smb::bind_mapping(m);
}
