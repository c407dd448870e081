// Arrays from Python as pointer, count and element type: buffers (numpy) and torch's CPU tensors.
#pragma once

#include <Python.h>

#include <cstddef>
#include <cstdint>

namespace smb {

// Element types as kind and size: 'f' float, 'i' signed, 'u' unsigned, 'b' bool.
struct DType {
  char kind = 0;
  uint8_t size = 0;
  bool operator==(const DType& other) const { return kind == other.kind && size == other.size; }
  bool operator!=(const DType& other) const { return !(*this == other); }
};

constexpr DType kFloat32{'f', 4};

// "float32" and so on; size 0 when there is no such type here. The name back.
DType dtype_of_name(const char* name);
const char* name_of(DType dtype);

// Holds what it points to until destroyed. Needs the GIL.
class Array {
 public:
  Array() = default;
  ~Array();
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;

  // False with TypeMismatch set: no buffer, not C-contiguous, read-only though writable is asked,
  // not on the CPU, or of an element type that segments don't have. what names it in the message.
  bool take(PyObject* object, bool writable, const char* what);

  void* data = nullptr;
  size_t count = 0;
  DType dtype;
  float* floats() const { return static_cast<float*>(data); }
  size_t bytes() const { return count * dtype.size; }

 private:
  bool take_tensor(PyObject* object, const char* what);
  Py_buffer view_{};
  PyObject* tensor_ = nullptr;
};

// A new reference to class name of smb.errors, or nullptr with ImportError set.
PyObject* error_class(const char* name);
// Sets class name of smb.errors with a printf-like message (PyErr_Format's).
void raise(const char* name, const char* format, ...);

}  // namespace smb
