// The Python face of datum.hpp: checks what it is given, then hands on pointers and counts.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <climits>
#include <cstring>

#include "datum.hpp"

namespace py = pybind11;

namespace {

// A view of an object's bytes for the length of a scope; PyObject_GetBuffer costs a tenth of py::buffer.
class Bytes {
 public:
  explicit Bytes(PyObject* object, int flags = PyBUF_SIMPLE) {
    if (PyObject_GetBuffer(object, &view_, flags)) throw py::error_already_set();
  }
  ~Bytes() { PyBuffer_Release(&view_); }
  Bytes(const Bytes&) = delete;
  Bytes& operator=(const Bytes&) = delete;
  const uint8_t* data() const { return static_cast<const uint8_t*>(view_.buf); }
  size_t size() const { return size_t(view_.len); }
  const Py_buffer& view() const { return view_; }

 private:
  Py_buffer view_;
};

float* floats_of(const py::buffer& buffer, size_t count, const char* name, size_t* bytes = nullptr) {
  const py::buffer_info info = buffer.request(true);
  if (info.itemsize != 4 || info.format != "f" || size_t(info.size) < count)
    throw py::value_error(std::string(name) + " must be " + std::to_string(count) + " writable float32 values");
  if (bytes) *bytes = 4 * size_t(info.size);
  return static_cast<float*>(info.ptr);
}

// ValueError(index, text): which record of the batch, what is wrong with it.
[[noreturn]] void refuse(size_t index, const std::string& text) {
  const py::tuple arguments = py::make_tuple(index, text);
  PyErr_SetObject(PyExc_ValueError, arguments.ptr());
  throw py::error_already_set();
}

data::Shape shape_of(const std::array<int, 3>& sides) { return {sides[0], sides[1], sides[2]}; }

data::Transform make_transform(float scale, bool mirror, int crop, bool random_crop,
                               std::vector<float> mean_values, const py::object& mean_image,
                               const std::array<int, 3>& mean_shape, uint32_t seed) {
  data::Transform transform;
  if (crop < 0) throw py::value_error("crop must not be negative");
  transform.scale = scale;
  transform.mirror = mirror;
  transform.crop = crop;
  transform.random_crop = random_crop;
  transform.mean_values = std::move(mean_values);
  transform.random.seed(seed);
  if (mean_image.is_none()) return transform;
  transform.mean_shape = shape_of(mean_shape);
  const Bytes mean(mean_image.ptr());
  if (!transform.mean_shape.fits() || mean.size() != 4 * transform.mean_shape.count())
    throw py::value_error("the mean image's values do not fill its shape " + transform.mean_shape.text());
  transform.mean_image.resize(transform.mean_shape.count());
  std::memcpy(transform.mean_image.data(), mean.data(), mean.size());
  return transform;
}

void place_record(data::Transform& transform, const data::Datum& datum, const data::Shape& top, float* out,
                  size_t index) {
  const std::string wrong = transform.refuse(datum.shape, top);
  if (!wrong.empty()) refuse(index, wrong);
  const bool bytes = datum.size != 0;
  const size_t count = datum.shape.count(), got = bytes ? datum.size : datum.floats.size();
  if (got != count)
    refuse(index, "holds " + std::to_string(got) + " values, but " + datum.shape.text() + " has " +
                      std::to_string(count));
  if (bytes) transform.place(datum.pixels, datum.shape, out);
  else transform.place(datum.floats.data(), datum.shape, out);
}

size_t transform_records(data::Transform& transform, const py::list& records, size_t first,
                         const py::buffer& out, const py::object& labels, const std::array<int, 3>& sides) {
  const data::Shape top = shape_of(sides);
  const size_t n = records.size();
  if (!top.fits()) throw py::value_error("impossible shape " + top.text());
  float* to = floats_of(out, n * top.count(), "out");
  float* label = labels.is_none() ? nullptr : floats_of(labels.cast<py::buffer>(), n, "labels");
  data::Datum datum;
  for (size_t i = first; i < n; ++i) {
    const Bytes record(PyList_GET_ITEM(records.ptr(), Py_ssize_t(i)));
    if (!data::parse_datum(record.data(), record.size(), datum)) refuse(i, "is no Datum");
    if (datum.encoded) return i;
    place_record(transform, datum, top, to + i * top.count(), i);
    if (label) label[i] = float(datum.label);
  }
  return n;
}

// A batch of so many bytes fits no core's cache, so that it is better written past it.
constexpr size_t kLargeBatch = size_t(4) << 20;

// The shape of (height, width) or (height, width, channels) bytes that stand close together.
data::Shape shape_of_pixels(const Py_buffer& pixels) {
  const bool bytes = pixels.itemsize == 1 && pixels.ndim >= 2 && pixels.ndim <= 3;
  for (int i = 0; bytes && i < pixels.ndim; ++i)
    if (pixels.shape[i] > INT_MAX) throw py::value_error("pixels have an impossible shape");
  if (!bytes) throw py::value_error("pixels must be bytes of shape (height, width[, channels])");
  return {pixels.ndim == 3 ? int(pixels.shape[2]) : 1, int(pixels.shape[0]), int(pixels.shape[1])};
}

void transform_image(const data::Transform& transform, const py::object& pixels, size_t index, const py::buffer& out,
                     const std::array<int, 3>& sides, const data::Drawn& drawn) {
  const Bytes bytes(pixels.ptr(), PyBUF_ND);
  const data::Shape shape = shape_of_pixels(bytes.view()), top = shape_of(sides);
  const std::string wrong = transform.refuse(shape, top);
  if (!wrong.empty()) refuse(index, wrong);
  size_t batch_bytes = 0;
  float* const batch = floats_of(out, (index + 1) * top.count(), "out", &batch_bytes);
  const py::gil_scoped_release others;  // decode and write theirs meanwhile
  transform.place_interleaved(bytes.data(), shape, drawn, batch + index * top.count(),
                              batch_bytes >= kLargeBatch);
}

py::tuple datum_head(const py::object& record) {
  const Bytes bytes(record.ptr());
  data::Datum datum;
  if (!data::parse_datum(bytes.data(), bytes.size(), datum)) throw py::value_error("is no Datum");
  const size_t offset = datum.pixels ? size_t(datum.pixels - bytes.data()) : 0;
  return py::make_tuple(py::make_tuple(datum.shape.channels, datum.shape.height, datum.shape.width), datum.label,
                        datum.encoded, offset, datum.size, datum.floats.size());
}

}  // namespace

void bind_datum(py::module_& m) {
  m.def("datum_head", &datum_head, py::arg("record"));
  py::class_<data::Transform>(m, "Transform")
      .def(py::init(&make_transform), py::kw_only(), py::arg("scale") = 1.0f, py::arg("mirror") = false,
           py::arg("crop") = 0, py::arg("random_crop") = false, py::arg("mean_values") = std::vector<float>(),
           py::arg("mean_image") = py::none(), py::arg("mean_shape") = std::array<int, 3>{0, 0, 0},
           py::arg("seed") = 0)
      .def("records", &transform_records, py::arg("records"), py::arg("first"), py::arg("out"),
           py::arg("labels"), py::arg("shape"))
      .def("draw", &data::Transform::draw)
      .def("image", &transform_image, py::arg("pixels"), py::arg("index"), py::arg("out"), py::arg("shape"),
           py::arg("drawn"));
}
