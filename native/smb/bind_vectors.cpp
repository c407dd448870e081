// Vector operations on mapped segments: Mapping.combine and Mapping.reduce.
#include <cmath>
#include <memory>
#include <string>

#include "bind.hpp"
#include "mapping.hpp"
#include "vectors.hpp"

namespace py = pybind11;

namespace smb {
namespace {

void need(bool fine) {
  if (!fine) throw py::error_already_set();
}

// The other segment of an operation; nullptr for none.
NativeMapping* other_of(const NativeMapping& mapping, const char* how, py::object object) {
  if (object.is_none()) return nullptr;
  NativeMapping* other = nullptr;
  try {
    other = object.cast<NativeMapping*>();
  } catch (const py::cast_error&) {
    raise("RequestError", "%s: needs a segment of the same box", how);
  }
  need(other != nullptr && other->usable());
  if (other->dtype != mapping.dtype) {
    raise("TypeMismatch", "%s: one segment holds %s, the other %s", how, name_of(mapping.dtype), name_of(other->dtype));
    need(false);
  }
  return other;
}

bool same_memory(const NativeMapping& a, const NativeMapping& b) { return a.device == b.device && a.inode == b.inode; }

std::unique_ptr<Pass> combination(const NativeMapping& mapping, const std::string& how, float scalar,
                                  const NativeMapping* source, size_t offset, size_t count) {
  const Region& region = *mapping.region;
  if (how != "copy") need(mapping.float32(how.c_str()));
  if (how == "scale") return std::make_unique<ScalePass>(region, offset, count, scalar);
  if (how == "fill") return std::make_unique<FillPass>(region, offset, count, scalar);
  if (!source || (how != "copy" && how != "axpy")) {
    raise("RequestError", "no combination %s%s", how.c_str(), source ? "" : " without a source");
    need(false);
  }
  if (same_memory(mapping, *source)) {
    raise("RequestError", "%s: source and target are the same segment", how.c_str());
    need(false);
  }
  need(source->in_range(how.c_str(), 0, count));
  if (how == "copy") return std::make_unique<CopySegmentPass>(region, offset, count, *source->region);
  return std::make_unique<AccumulateSegmentPass>(region, offset, count, *source->region, scalar);
}

uint64_t combine(py::object self, const std::string& how, double scalar, py::object source, Py_ssize_t offset,
                 size_t count, bool counts, size_t threads) {
  NativeMapping& mapping = self.cast<NativeMapping&>();
  need(mapping.writable());
  const float factor = static_cast<float>(scalar);
  if (!std::isfinite(factor)) {
    raise("RequestError", "%s: %R is no finite float32", how.c_str(), py::float_(scalar).ptr());
    need(false);
  }
  const NativeMapping* from = other_of(mapping, how.c_str(), source);
  need(mapping.in_range(how.c_str(), offset, count));
  const std::shared_ptr<Region> region = mapping.region, kept = from ? from->region : nullptr;
  if (count == 0) return region->head().version.load();
  const std::unique_ptr<Pass> pass = combination(mapping, how, factor, from, static_cast<size_t>(offset), count);
  need(mapping.perform(self.ptr(), *pass, std::max<size_t>(threads, 1), how.c_str()));
  return counts ? region->count_update() : region->head().version.load();
}

bool positive(float value) { return std::isfinite(value) && value > 0; }

uint64_t adagrad(py::object self, py::object sums, py::object gradient, double rate, double scale, double epsilon,
                 Py_ssize_t offset, size_t count, bool counts, size_t threads) {
  NativeMapping& mapping = self.cast<NativeMapping&>();
  need(mapping.writable() && mapping.float32("adagrad"));
  const Adagrad how{static_cast<float>(rate), static_cast<float>(scale), static_cast<float>(epsilon)};
  if (!std::isfinite(how.rate) || !std::isfinite(how.scale) || !positive(how.epsilon)) {
    raise("RequestError", "adagrad: rate %R and scale %R must be finite float32, epsilon %R above 0 too",
          py::float_(rate).ptr(), py::float_(scale).ptr(), py::float_(epsilon).ptr());
    need(false);
  }
  NativeMapping* squares = other_of(mapping, "adagrad", sums);
  NativeMapping* from = other_of(mapping, "adagrad", gradient);
  if (!squares || !from) {
    raise("RequestError", "adagrad: needs a segment of sums and one of gradients");
    need(false);
  }
  need(squares->writable());
  if (same_memory(mapping, *squares) || same_memory(mapping, *from) || same_memory(*squares, *from)) {
    raise("RequestError", "adagrad: weights, sums and gradient must be three segments");
    need(false);
  }
  for (const NativeMapping* one : {&mapping, squares, from}) need(one->in_range("adagrad", offset, count));
  const std::shared_ptr<Region> x = mapping.region, s = squares->region, g = from->region;
  if (count == 0) return x->head().version.load();
  const size_t most = std::max<size_t>(threads, 1), begin = static_cast<size_t>(offset);
  GradientLook look(*x, begin, count, *g, how.scale);
  need(mapping.perform(self.ptr(), look, 1, "adagrad"));
  AdagradPass pass(*x, begin, count, *s, *g, how);
  need(mapping.perform(self.ptr(), pass, most, "adagrad"));
  return counts ? x->count_update() : x->head().version.load();
}

double reduce(py::object self, const std::string& how, py::object other, size_t threads) {
  NativeMapping& mapping = self.cast<NativeMapping&>();
  need(mapping.usable() && mapping.float32(how.c_str()));
  const NativeMapping* with = other_of(mapping, how.c_str(), other);
  if (how != (with ? "dot" : "sum")) {
    raise("RequestError", "no reduction %s %s another segment", how.c_str(), with ? "with" : "without");
    need(false);
  }
  if (with && with->count != mapping.count) {
    raise("RangeError", "%s: one segment has %zu elements, the other %zu", how.c_str(), mapping.count, with->count);
    need(false);
  }
  const std::shared_ptr<Region> x = mapping.region, y = with ? with->region : nullptr;
  const Region* second = with && same_memory(mapping, *with) ? x.get() : y.get();
  SumPass pass(*x, second, mapping.count);
  need(mapping.perform(self.ptr(), pass, std::max<size_t>(threads, 1), how.c_str()));
  return pass.sum();
}

}  // namespace

void bind_vectors(py::class_<NativeMapping>& type) {
  using py::arg;
  type.def("combine", combine, arg("how"), arg("scalar"), arg("source"), arg("offset"), arg("count"),
           arg("counts") = true, arg("threads") = 1);
  type.def("adagrad", adagrad, arg("sums"), arg("gradient"), arg("rate"), arg("scale"), arg("epsilon"), arg("offset"),
           arg("count"), arg("counts") = true, arg("threads") = 1);
  type.def("reduce", reduce, arg("how"), arg("other") = py::none(), arg("threads") = 1);
}

}  // namespace smb
