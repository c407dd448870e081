// The Python face of this folder and of native/net: vector kernels, segments mapped into this process, and
// the data operations over sockets.
#include "bind.hpp"

PYBIND11_MODULE(_native, m) {
  m.doc() = "Vector kernels, segments as mapped into this process (smb/segment.py), data operations over sockets.";
  smb::bind_kernels(m);
  smb::bind_mapping(m);
  smb::bind_net(m);
}
