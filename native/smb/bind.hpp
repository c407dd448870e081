// The pieces of the Python face. Checks live here; the passes and kernels below trust their arguments.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>

namespace smb {

// Work of fewer bytes keeps the GIL: giving it up and taking it back costs more than the work.
constexpr size_t kKeepGilBytes = 16 * 1024;

class GilRelease {
 public:
  explicit GilRelease(bool release) : state_(release ? PyEval_SaveThread() : nullptr) {}
  ~GilRelease() {
    if (state_) PyEval_RestoreThread(state_);
  }
  GilRelease(const GilRelease&) = delete;
  GilRelease& operator=(const GilRelease&) = delete;

 private:
  PyThreadState* state_;
};

void bind_kernels(pybind11::module_& m);
void bind_mapping(pybind11::module_& m);
void bind_net(pybind11::module_& m);  // native/net
void bind_vectors(pybind11::class_<class NativeMapping>& type);

}  // namespace smb
