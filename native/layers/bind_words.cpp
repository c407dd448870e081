// The Python face of words.hpp.
#include <pybind11/pybind11.h>

#include "words.hpp"

namespace py = pybind11;

namespace {

size_t checked(const data::Words& words, size_t index) {
  if (index >= words.count()) throw py::index_error("there is no such word");
  return index;
}

}  // namespace

void bind_words(py::module_& m) {
  using data::Words;
  py::class_<Words>(m, "Words")
      .def(py::init<int, size_t>(), py::arg("fd"), py::arg("count"))
      .def_property_readonly_static("LINE", [](const py::object&) { return Words::kLine; })
      .def("load", [](const Words& words, size_t index) { return words.load(checked(words, index)); })
      .def("store", [](Words& words, size_t index, int64_t value) { words.store(checked(words, index), value); });
}
