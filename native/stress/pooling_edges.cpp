// Max pooling of every small geometry, in buffers of exactly their size, by every instruction set that the machine
// has and on several threads, against the loops of the definition. Built under the sanitizers (tests/native).
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <vector>

#include "layers/max_pool.hpp"

namespace {

using layers::Machine;
using layers::Windows;

struct Shape {
  size_t batch, channels;
  bool last;
  size_t at(size_t n, size_t c, size_t h, size_t w, size_t height, size_t width) const {
    return last ? ((n * height + h) * width + w) * channels + c : ((n * channels + c) * height + h) * width + w;
  }
};

size_t count(size_t size, size_t kernel, size_t stride, size_t pad) {
  if (size + 2 * pad < kernel) return 0;
  size_t windows = (size + 2 * pad - kernel + stride - 1) / stride + 1;
  while ((windows - 1) * stride >= size + pad) --windows;
  return windows;
}

std::unique_ptr<float[]> numbers(size_t n, std::mt19937& dice) {
  std::unique_ptr<float[]> values(new float[n]);
  for (size_t i = 0; i < n; ++i) {
    values[i] = static_cast<float>(static_cast<int>(dice() % 9)) - 4.0f;  // many ties
    if (dice() % 32 == 0) values[i] = std::numeric_limits<float>::quiet_NaN();
    if (dice() % 16 == 0) values[i] = -std::numeric_limits<float>::infinity();
  }
  return values;
}

// y and dx by the definition.
void define(const float* x, const float* dy, float* y, float* dx, const Shape& s, const Windows& w) {
  std::fill(dx, dx + s.batch * s.channels * w.height * w.width, 0.0f);
  for (size_t n = 0; n < s.batch; ++n)
    for (size_t c = 0; c < s.channels; ++c)
      for (size_t r = 0; r < w.rows; ++r)
        for (size_t q = 0; q < w.columns; ++q) {
          size_t best = 0;
          bool first = true;
          for (size_t i = 0; i < w.kernel_h; ++i)
            for (size_t j = 0; j < w.kernel_w; ++j) {
              const size_t h = r * w.stride_h + i - w.pad_h, v = q * w.stride_w + j - w.pad_w;  // wraps when outside
              if (h >= w.height || v >= w.width) continue;
              const size_t at = s.at(n, c, h, v, w.height, w.width);
              if (first || x[at] > x[best] || std::isnan(x[at])) best = at;
              first = false;
            }
          const size_t top = s.at(n, c, r, q, w.rows, w.columns);
          y[top] = x[best];
          dx[best] += dy[top];
        }
}

bool same(const float* a, const float* b, size_t n) {
  for (size_t i = 0; i < n; ++i) {
    if (!(a[i] == b[i] || (std::isnan(a[i]) && std::isnan(b[i])))) return false;
  }
  return true;
}

bool holds(const Shape& s, const Windows& w, std::mt19937& dice) {
  const size_t in = s.batch * s.channels * w.height * w.width, out = s.batch * s.channels * w.rows * w.columns;
  const auto x = numbers(in, dice);
  const std::unique_ptr<float[]> dy(new float[out]), y(new float[out]), dx(new float[in]), bare(new float[out]);
  for (size_t i = 0; i < out; ++i) dy[i] = static_cast<float>(dice() % 16);
  const std::unique_ptr<uint8_t[]> won(new uint8_t[out]);
  std::vector<float> want(out), gradient(in);
  define(x.get(), dy.get(), want.data(), gradient.data(), s, w);
  layers::max_pool_forward(x.get(), y.get(), won.get(), s.batch, s.channels, s.last, w, 3);
  layers::max_pool_forward(x.get(), bare.get(), nullptr, s.batch, s.channels, s.last, w, 3);
  layers::max_pool_backward(dy.get(), won.get(), dx.get(), s.batch, s.channels, s.last, w, 3);
  return same(y.get(), want.data(), out) && same(bare.get(), want.data(), out) && same(dx.get(), gradient.data(), in);
}

}  // namespace

int main() {
  std::mt19937 dice(7);
  size_t cases = 0, wrong = 0;
  const auto check = [&](const Shape& shape, size_t height, size_t width, size_t k, size_t s, size_t p) {
    const size_t rows = count(height, k, s, p), columns = count(width, k, s, p);
    if (rows == 0 || columns == 0) return;
    for (const Machine machine : {Machine::avx512, Machine::avx2, Machine::plain}) {
      if (!layers::has(machine)) continue;
      ++cases;
      wrong += !holds(shape, {height, width, rows, columns, k, k, s, s, p, p, machine}, dice);
    }
  };
  for (const bool last : {false, true}) {
    for (const size_t channels : {1, 3, 5, 16, 20, 259}) {
      for (size_t k = 1; k < 5; ++k)
        for (size_t s = 1; s < 5; ++s)
          for (size_t p = 0; p < k; ++p) check({2, channels, last}, 7, channels > 20 ? 4 : 9, k, s, p);
    }
    check({3, 20, last}, 64, 32, 2, 2, 0);  // enough for several threads
    check({9, 20, last}, 64, 32, 3, 2, 1);
    check({1, 2, last}, 5, 700, 3, 2, 0);    // rows of several blocks
    check({1, 2, last}, 16, 16, 16, 16, 0);  // the largest window
  }
  std::printf("%zu cases, %zu wrong\n", cases, wrong);
  return wrong == 0 ? 0 : 1;
}
