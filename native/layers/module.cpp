// The Python face of this folder's kernels: addresses and counts, nothing else. What they mean, and every check,
// is in prototxt/layers/lrn.py, pooling.py and softmax.py.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <optional>

#include "lrn.hpp"
#include "max_pool.hpp"
#include "softmax_loss.hpp"

namespace py = pybind11;

namespace {

const float* in(uintptr_t address) { return reinterpret_cast<const float*>(address); }
float* out(uintptr_t address) { return reinterpret_cast<float*>(address); }

}  // namespace

void bind_datum(py::module_& m);    // bind_datum.cpp
void bind_leveldb(py::module_& m);  // bind_leveldb.cpp
void bind_words(py::module_& m);    // bind_words.cpp

PYBIND11_MODULE(_native, m) {
  m.doc() = "native layer kernels over contiguous float32 memory; long calls release the GIL";
  bind_datum(m);
  bind_leveldb(m);
  bind_words(m);
  using Release = py::call_guard<py::gil_scoped_release>;

  py::class_<layers::Lrn>(m, "Lrn").def(
      py::init([](size_t half, float alpha, float beta, float k) { return layers::Lrn{half, alpha, beta, k}; }),
      py::arg("half"), py::arg("alpha"), py::arg("beta"), py::arg("k"));

  m.def(
      "lrn_across_forward",
      [](uintptr_t x, uintptr_t y, size_t batch, size_t channels, size_t area, const layers::Lrn& lrn, int threads) {
        layers::lrn_across_forward(in(x), out(y), batch, channels, area, lrn, threads);
      },
      Release());
  m.def(
      "lrn_across_backward",
      [](uintptr_t x, uintptr_t dy, uintptr_t dx, size_t batch, size_t channels, size_t area, const layers::Lrn& lrn,
         int threads) {
        layers::lrn_across_backward(in(x), in(dy), out(dx), batch, channels, area, lrn, threads);
      },
      Release());
  m.def(
      "lrn_within_forward",
      [](uintptr_t x, uintptr_t y, size_t planes, size_t height, size_t width, const layers::Lrn& lrn, int threads) {
        layers::lrn_within_forward(in(x), out(y), planes, height, width, lrn, threads);
      },
      Release());
  m.def(
      "lrn_within_backward",
      [](uintptr_t x, uintptr_t dy, uintptr_t dx, size_t planes, size_t height, size_t width, const layers::Lrn& lrn,
         int threads) {
        layers::lrn_within_backward(in(x), in(dy), out(dx), planes, height, width, lrn, threads);
      },
      Release());

  py::enum_<layers::Machine>(m, "Machine")
      .value("avx512", layers::Machine::avx512)
      .value("avx2", layers::Machine::avx2)
      .value("plain", layers::Machine::plain)
      .def_property_readonly("here", &layers::has);
  using Pair = std::pair<size_t, size_t>;
  py::class_<layers::Windows>(m, "Windows")
      .def(py::init([](Pair size, Pair windows, Pair kernel, Pair stride, Pair pad,
                       std::optional<layers::Machine> machine) {
             const layers::Machine chosen = machine.value_or(layers::best_machine());
             if (!layers::has(chosen)) throw py::value_error("this machine has no such instruction set");
             return layers::Windows{size.first,    size.second,  windows.first, windows.second, kernel.first,
                                    kernel.second, stride.first, stride.second, pad.first,      pad.second, chosen};
           }),
           py::arg("size"), py::arg("windows"), py::arg("kernel"), py::arg("stride"), py::arg("pad"),
           py::arg("machine") = py::none());

  m.def(
      "max_pool_forward",
      [](uintptr_t x, uintptr_t y, uintptr_t won, size_t batch, size_t channels, bool last,
         const layers::Windows& windows, int threads) {
        layers::max_pool_forward(in(x), out(y), reinterpret_cast<uint8_t*>(won), batch, channels, last, windows,
                                 threads);
      },
      Release());
  m.def(
      "max_pool_backward",
      [](uintptr_t dy, uintptr_t won, uintptr_t dx, size_t batch, size_t channels, bool last,
         const layers::Windows& windows, int threads) {
        layers::max_pool_backward(in(dy), reinterpret_cast<const uint8_t*>(won), out(dx), batch, channels, last,
                                  windows, threads);
      },
      Release());

  // A few microseconds: giving the GIL away would cost more.
  m.def("softmax_loss", [](uintptr_t scores, uintptr_t labels, uintptr_t gradient, size_t rows, size_t classes,
                           bool ignoring, float ignored, float largest) {
    const auto r = layers::softmax_loss(in(scores), in(labels), out(gradient), rows, classes, ignoring, ignored, largest);
    return py::make_tuple(r.sum, r.kept, r.bad);
  });
}
