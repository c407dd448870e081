// Vector kernels over numpy arrays and CPU torch tensors.
#include <algorithm>
#include <atomic>
#include <vector>

#include "bind.hpp"
#include "buffer.hpp"
#include "kernels.hpp"
#include "pool.hpp"

namespace py = pybind11;

namespace smb {
namespace {

constexpr size_t kBlock = kDotBlock;  // elements a thread takes at a time: 256 KiB of float32

void take(Array& array, py::handle object, bool writable, const char* what, DType wanted = kFloat32) {
  if (!array.take(object.ptr(), writable, what)) throw py::error_already_set();
  if (array.dtype == wanted) return;
  raise("TypeMismatch", "%s: must hold %s, got %s", what, name_of(wanted), name_of(array.dtype));
  throw py::error_already_set();
}

void same_length(const Array& a, const char* what_a, const Array& b, const char* what_b) {
  if (a.count == b.count) return;
  PyErr_Format(PyExc_ValueError, "%s has %zu elements, %s has %zu", what_a, a.count, what_b, b.count);
  throw py::error_already_set();
}

float moving_rate(double alpha) {
  if (alpha > 0 && alpha <= 1) return static_cast<float>(alpha);
  PyErr_Format(PyExc_ValueError, "alpha is %R: must be above 0 and at most 1", py::float_(alpha).ptr());
  throw py::error_already_set();
}

// work(begin, count) over all of [0, n), in blocks, by up to so many threads, without the GIL when long.
template <class Work>
void in_blocks(size_t n, size_t threads, const Work& work) {
  if (n * sizeof(float) <= kKeepGilBytes) {
    work(size_t{0}, n);
    return;
  }
  const GilRelease released(true);
  const size_t blocks = (n + kBlock - 1) / kBlock;
  if (threads <= 1 || blocks == 1) {
    work(size_t{0}, n);
    return;
  }
  std::atomic<size_t> next{0};
  run_parts(std::min(threads, blocks), [&](size_t) {
    for (size_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < blocks;) {
      work(i * kBlock, std::min(kBlock, n - i * kBlock));
    }
  });
}

void accumulate(py::object dst, py::object src, double scale, size_t threads) {
  Array to, from;
  take(to, dst, true, "dst");
  take(from, src, false, "src");
  same_length(to, "dst", from, "src");
  const float factor = static_cast<float>(scale);
  in_blocks(to.count, threads, [&](size_t at, size_t n) {
    accumulate_f32(to.floats() + at, from.floats() + at, factor, n);
  });
}

// One thread's share of a checked exchange: blocks in ascending order, each looked at before it is moved.
// Returns the index of a NaN or Inf, or n.
size_t exchange_checked(float* x, float* g, float alpha, size_t n, std::atomic<size_t>& next) {
  const auto claim = [&] { return std::min(next.fetch_add(kBlock, std::memory_order_relaxed), n); };
  bool fine = false;
  for (size_t at = claim(), ahead; at < n; at = ahead) {
    const size_t length = std::min(kBlock, n - at);
    const size_t bad = fine ? length : first_nonfinite_f32(x + at, 1.0f, length);
    if (bad < length) {
      next.store(n);
      return at + bad;
    }
    ahead = claim();
    const size_t seen = std::min(kBlock, n - ahead);  // the next block is never longer than this one
    fine = exchange_looking_f32(x + at, g + at, alpha, seen, x + ahead, nullptr);
    exchange_f32(x + at + seen, g + at + seen, alpha, length - seen);
  }
  return n;
}

// Returns the index of a NaN or Inf of local, whose block was not moved; or -1.
py::ssize_t exchange(py::object local, py::object center, double alpha, size_t threads, bool check) {
  Array x, g;
  take(x, local, true, "local");
  take(g, center, true, "center");
  same_length(x, "local", g, "center");
  const float rate = moving_rate(alpha);
  if (!check) {
    in_blocks(x.count, threads,
              [&](size_t at, size_t n) { exchange_f32(x.floats() + at, g.floats() + at, rate, n); });
    return -1;
  }
  std::atomic<size_t> next{0}, bad{x.count};
  const GilRelease released(x.bytes() > kKeepGilBytes);
  run_parts(std::min(threads, (x.count + kBlock - 1) / kBlock), [&](size_t) {
    const size_t index = exchange_checked(x.floats(), g.floats(), rate, x.count, next);
    if (index < x.count) bad.store(index);
  });
  return bad.load() == x.count ? -1 : static_cast<py::ssize_t>(bad.load());
}

py::object new_floats(size_t count) {
  return py::module_::import("numpy").attr("empty")(count, "float32");
}

py::object elastic_pull(py::object local, py::object center, double alpha, py::object out, size_t threads) {
  Array x, c, d;
  take(x, local, true, "local");
  take(c, center, false, "center");
  same_length(x, "local", c, "center");
  const float rate = moving_rate(alpha);
  py::object delta = out.is_none() ? new_floats(x.count) : out;
  take(d, delta, true, "out");
  same_length(x, "local", d, "out");
  in_blocks(x.count, threads, [&](size_t at, size_t n) {
    pull_f32(x.floats() + at, c.floats() + at, d.floats() + at, rate, n);
  });
  return delta;
}

double dot(py::object a, py::object b, size_t threads) {
  Array x, y;
  take(x, a, false, "x");
  take(y, b, false, "y");
  same_length(x, "x", y, "y");
  // Block sums in order, however many threads made them: always the same bits.
  std::vector<double> sums((x.count + kDotBlock - 1) / kDotBlock);
  in_blocks(x.count, threads, [&](size_t at, size_t n) {
    for (size_t i = at; i < at + n; i += kDotBlock) {
      sums[i / kDotBlock] = dot_f32(x.floats() + i, y.floats() + i, std::min(kDotBlock, at + n - i));
    }
  });
  double sum = 0;
  for (const double part : sums) sum += part;
  return sum;
}

void scale(py::object vector, double factor, size_t threads) {
  Array x;
  take(x, vector, true, "x");
  in_blocks(x.count, threads,
            [&](size_t at, size_t n) { scale_f32(x.floats() + at, static_cast<float>(factor), n); });
}

void fill(py::object vector, double value, size_t threads) {
  Array x;
  take(x, vector, true, "x");
  in_blocks(x.count, threads,
            [&](size_t at, size_t n) { fill_f32(x.floats() + at, static_cast<float>(value), n); });
}

void copy(py::object dst, py::object src, size_t threads) {
  Array to, from;
  take(to, dst, true, "dst");
  take(from, src, false, "src");
  same_length(to, "dst", from, "src");
  const auto move = to.bytes() >= kStreamBytes ? stream_bytes : copy_bytes;
  in_blocks(to.count, threads,
            [&](size_t at, size_t n) { move(to.floats() + at, from.floats() + at, n * sizeof(float)); });
}

void adagrad(py::object sums, py::object gradient, double rate, double factor, double epsilon) {
  Array s, g;
  take(s, sums, true, "sums");
  take(g, gradient, true, "gradient");
  same_length(s, "sums", g, "gradient");
  const Adagrad how{static_cast<float>(rate), static_cast<float>(factor), static_cast<float>(epsilon)};
  const GilRelease released(s.bytes() > kKeepGilBytes);
  adagrad_f32(s.floats(), g.floats(), how, s.count);
}

py::ssize_t first_nonfinite(py::object vector) {
  Array x;
  take(x, vector, false, "x");
  size_t index = 0;
  {
    const GilRelease released(x.bytes() > kKeepGilBytes);
    index = first_nonfinite_f32(x.floats(), 1.0f, x.count);
  }
  return index == x.count ? -1 : static_cast<py::ssize_t>(index);
}

// bfloat16 has no numpy type: its bits travel as uint16. float16's may come as either.
void take_half(Array& array, py::handle object, bool writable, const char* what, DType also) {
  if (!array.take(object.ptr(), writable, what)) throw py::error_already_set();
  if (array.dtype == DType{'u', 2} || (also.size && array.dtype == also)) return;
  raise("TypeMismatch", "%s: must hold uint16%s, got %s", what, also.size ? " or float16" : "", name_of(array.dtype));
  throw py::error_already_set();
}

template <void (*convert)(uint16_t*, const float*, size_t)>
void narrow(py::object dst, py::object src, size_t threads, DType also) {
  Array to, from;
  take_half(to, dst, true, "dst", also);
  take(from, src, false, "src");
  same_length(to, "dst", from, "src");
  in_blocks(from.count, threads, [&](size_t at, size_t n) {
    convert(static_cast<uint16_t*>(to.data) + at, from.floats() + at, n);
  });
}

template <void (*convert)(float*, const uint16_t*, size_t)>
void widen(py::object dst, py::object src, size_t threads, DType also) {
  Array to, from;
  take(to, dst, true, "dst");
  take_half(from, src, false, "src", also);
  same_length(to, "dst", from, "src");
  in_blocks(to.count, threads, [&](size_t at, size_t n) {
    convert(to.floats() + at, static_cast<const uint16_t*>(from.data) + at, n);
  });
}

constexpr DType kNone{};
constexpr DType kHalf{'f', 2};

void bind_conversions(py::module_& m) {
  using py::arg;
  m.def(
      "to_bfloat16", [](py::object d, py::object s, size_t t) { narrow<to_bfloat16>(d, s, t, kNone); }, arg("dst"),
      arg("src"), arg("threads") = 1);
  m.def(
      "from_bfloat16", [](py::object d, py::object s, size_t t) { widen<from_bfloat16>(d, s, t, kNone); }, arg("dst"),
      arg("src"), arg("threads") = 1);
  m.def(
      "to_float16", [](py::object d, py::object s, size_t t) { narrow<to_float16>(d, s, t, kHalf); }, arg("dst"),
      arg("src"), arg("threads") = 1);
  m.def(
      "from_float16", [](py::object d, py::object s, size_t t) { widen<from_float16>(d, s, t, kHalf); }, arg("dst"),
      arg("src"), arg("threads") = 1);
}

}  // namespace

void bind_kernels(py::module_& m) {
  using py::arg;
  m.def("accumulate", accumulate, arg("dst"), arg("src"), arg("scale") = 1.0, arg("threads") = 1);
  m.def("axpy", [](double a, py::object x, py::object y, size_t threads) { accumulate(y, x, a, threads); }, arg("a"),
        arg("x"), arg("y"), arg("threads") = 1);
  m.def("exchange", exchange, arg("local"), arg("center"), arg("alpha"), arg("threads") = 1,
        arg("check") = true);
  m.def("elastic_pull", elastic_pull, arg("local"), arg("center"), arg("alpha"), arg("out") = py::none(),
        arg("threads") = 1);
  m.def("dot", dot, arg("x"), arg("y"), arg("threads") = 1);
  m.def("scale", scale, arg("x"), arg("a"), arg("threads") = 1);
  m.def("fill", fill, arg("x"), arg("value"), arg("threads") = 1);
  m.def("copy", copy, arg("dst"), arg("src"), arg("threads") = 1);
  m.def("adagrad", adagrad, arg("sums"), arg("gradient"), arg("rate"), arg("scale") = 1.0, arg("epsilon") = 1e-8);
  m.def("first_nonfinite", first_nonfinite, arg("x"));
  bind_conversions(m);
}

}  // namespace smb
