#include "buffer.hpp"

#include <cstdarg>
#include <cstring>
#include <vector>

namespace smb {
namespace {

struct Named {
  const char* name;
  DType dtype;
};

constexpr Named kTypes[] = {
    {"float32", {'f', 4}}, {"float64", {'f', 8}}, {"float16", {'f', 2}}, {"int8", {'i', 1}},
    {"int16", {'i', 2}},   {"int32", {'i', 4}},   {"int64", {'i', 8}},   {"uint8", {'u', 1}},
    {"uint16", {'u', 2}},  {"uint32", {'u', 4}},  {"uint64", {'u', 8}},  {"bool", {'b', 1}},
};

// A struct-module format of one element in this machine's order.
DType dtype_of_format(const char* format, Py_ssize_t size) {
  if (format == nullptr) return {'u', 1};
  if (*format == '@' || *format == '=' || *format == '<') ++format;
  if (format[0] == '\0' || format[1] != '\0') return {};
  const uint8_t bytes = static_cast<uint8_t>(size);
  if (std::strchr("efd", *format)) return {'f', bytes};
  if (std::strchr("bhilqn", *format)) return {'i', bytes};
  if (std::strchr("BHILQN", *format)) return {'u', bytes};
  if (*format == '?') return {'b', bytes};
  return {};
}

// torch's dtype objects are singletons: each is looked up by name once.
DType dtype_of_torch(PyObject* dtype) {
  struct Known {
    PyObject* object;
    DType dtype;
  };
  static std::vector<Known> known;
  for (const Known& entry : known) {
    if (entry.object == dtype) return entry.dtype;
  }
  PyObject* text = PyObject_Str(dtype);
  if (text == nullptr) return {};
  const char* name = PyUnicode_AsUTF8(text);
  DType found;
  if (name && std::strncmp(name, "torch.", 6) == 0) found = dtype_of_name(name + 6);
  Py_DECREF(text);
  if (found.size) {
    Py_INCREF(dtype);
    known.push_back({dtype, found});
  }
  return found;
}

// Attribute and method names of a tensor, made once: a lookup by C string builds a new one each time.
struct TensorNames {
  PyObject* dtype = PyUnicode_InternFromString("dtype");
  PyObject* is_cpu = PyUnicode_InternFromString("is_cpu");
  PyObject* is_contiguous = PyUnicode_InternFromString("is_contiguous");
  PyObject* data_ptr = PyUnicode_InternFromString("data_ptr");
  PyObject* numel = PyUnicode_InternFromString("numel");
};

const TensorNames& tensor_names() {
  static const TensorNames names;
  return names;
}

// Takes result's reference; false with the error set when there is none.
bool is_true(PyObject* result) {
  if (result == nullptr) return false;
  const int truth = PyObject_IsTrue(result);
  Py_DECREF(result);
  return truth == 1;
}

bool number(PyObject* object, PyObject* method, size_t* out) {
  PyObject* result = PyObject_CallMethodNoArgs(object, method);
  if (result == nullptr) return false;
  *out = PyLong_AsSize_t(result);
  Py_DECREF(result);
  return !PyErr_Occurred();
}

}  // namespace

DType dtype_of_name(const char* name) {
  for (const Named& entry : kTypes) {
    if (std::strcmp(entry.name, name) == 0) return entry.dtype;
  }
  return {};
}

const char* name_of(DType dtype) {
  for (const Named& entry : kTypes) {
    if (entry.dtype == dtype) return entry.name;
  }
  return "unknown";
}

Array::~Array() {
  if (view_.obj) PyBuffer_Release(&view_);
  Py_XDECREF(tensor_);
}

bool Array::take(PyObject* object, bool writable, const char* what) {
  if (!PyObject_CheckBuffer(object)) return take_tensor(object, what);
  const int flags = PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | (writable ? PyBUF_WRITABLE : 0);
  if (PyObject_GetBuffer(object, &view_, flags) != 0) {
    view_.obj = nullptr;
    PyErr_Clear();
    raise("TypeMismatch", "%s: must be a C-contiguous%s array, this %s is not", what, writable ? " writable" : "",
          Py_TYPE(object)->tp_name);
    return false;
  }
  dtype = dtype_of_format(view_.format, view_.itemsize);
  if (dtype.size == 0) {
    raise("TypeMismatch", "%s: element format '%s' is none that a segment holds", what, view_.format);
    return false;
  }
  data = view_.buf;
  count = static_cast<size_t>(view_.len) / dtype.size;
  return true;
}

bool Array::take_tensor(PyObject* object, const char* what) {
  const TensorNames& names = tensor_names();
  PyObject* type = PyObject_GetAttr(object, names.dtype);
  if (type == nullptr || !PyObject_HasAttr(object, names.data_ptr)) {
    PyErr_Clear();
    Py_XDECREF(type);
    raise("TypeMismatch", "%s: must be a numpy array or a CPU torch tensor, got %s", what, Py_TYPE(object)->tp_name);
    return false;
  }
  dtype = dtype_of_torch(type);
  const bool fits = dtype.size && is_true(PyObject_GetAttr(object, names.is_cpu)) &&
                    is_true(PyObject_CallMethodNoArgs(object, names.is_contiguous));
  PyErr_Clear();
  if (!fits) {
    raise("TypeMismatch", "%s: must be a contiguous CPU tensor of a type that segments hold, got %S", what, type);
  }
  Py_DECREF(type);
  size_t address = 0;
  if (!fits || !number(object, names.data_ptr, &address) || !number(object, names.numel, &count)) return false;
  data = reinterpret_cast<void*>(address);
  Py_INCREF(object);
  tensor_ = object;
  return true;
}

PyObject* error_class(const char* name) {
  PyObject* module = PyImport_ImportModule("smb.errors");
  if (module == nullptr) return nullptr;
  PyObject* found = PyObject_GetAttrString(module, name);
  Py_DECREF(module);
  return found;
}

void raise(const char* name, const char* format, ...) {
  PyObject* type = error_class(name);
  if (type == nullptr) return;
  va_list arguments;
  va_start(arguments, format);
  PyErr_FormatV(type, format, arguments);
  va_end(arguments);
  Py_DECREF(type);
}

}  // namespace smb
