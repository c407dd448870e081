#include "kernels.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "common/clones.hpp"
#include "common/racy.hpp"

namespace smb {
namespace {

constexpr int32_t kInfinity = 0x7f800000;  // as bits; NaN's are above it

inline int32_t magnitude(float value) {
  int32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits & 0x7fffffff;
}

// The kernels of training run through memory on 4 KiB pages that is not in the caches. The hardware fetches ahead
// within a page: so four pages go side by side, and what lies further on is asked for, across the pages' ends too.
constexpr size_t kPage = 1024;  // elements
constexpr size_t kGroup = 4 * kPage;
constexpr size_t kStep = 64;   // four cache lines
constexpr size_t kNear = 256;  // elements ahead, where pages go side by side
constexpr size_t kFar = 512;   // where they do not

[[gnu::always_inline]] inline void fetch(const float* p) {
  for (size_t i = 0; i < kStep; i += 16) __builtin_prefetch(p + i);
}

// work(begin, count) over [0, n) in steps, each with a fetch of what the arrays hold further on.
template <class Work, class... Arrays>
[[gnu::always_inline]] inline void fetching(size_t n, const Work& work, const Arrays*... arrays) {
  size_t at = 0;
  for (; at + 2 * kGroup <= n; at += kGroup) {
    for (size_t i = 0; i < kPage; i += kStep) {
      const size_t ahead = i + kNear < kPage ? kNear : kNear + kGroup - kPage;
      for (size_t page = at + i; page < at + kGroup; page += kPage) {
        (fetch(arrays + page + ahead), ...);
        work(page, kStep);
      }
    }
  }
  for (; at + kFar + kStep <= n; at += kStep) {
    (fetch(arrays + at + kFar), ...);
    work(at, kStep);
  }
  work(at, n - at);
}

[[gnu::always_inline]] inline void accumulate_some(float* __restrict dst, const float* __restrict src, float scale,
                                                   size_t n) {
  for (size_t i = 0; i < n; ++i) racy::store(dst + i, dst[i] + scale * src[i]);
}

[[gnu::always_inline]] inline void exchange_some(float* __restrict x, float* __restrict g, float alpha, size_t n) {
  for (size_t i = 0; i < n; ++i) {
    const float center = g[i];
    const float d = alpha * (x[i] - center);
    racy::store(x + i, x[i] - d);
    racy::store(g + i, center + d);
  }
}

[[gnu::always_inline]] inline int32_t largest_of(const float* x, float scale, size_t n, int32_t largest) {
  for (size_t i = 0; i < n; ++i) largest = std::max(largest, magnitude(scale * x[i]));
  return largest;
}

}  // namespace

SMB_CLONES void accumulate_f32(float* __restrict dst, const float* __restrict src, float scale, size_t n) {
  const auto work = [=](size_t i, size_t m) __attribute__((always_inline)) {
    accumulate_some(dst + i, src + i, scale, m);
  };
  fetching(n, work, dst, src);
}

SMB_CLONES void exchange_f32(float* __restrict x, float* __restrict g, float alpha, size_t n) {
  const auto work = [=](size_t i, size_t m) __attribute__((always_inline)) {
    exchange_some(x + i, g + i, alpha, m);
  };
  fetching(n, work, x, g);
}

SMB_CLONES bool accumulate_looking_f32(float* __restrict dst, const float* __restrict src, float scale, size_t n,
                                       const float* __restrict ahead, const float* __restrict further) {
  int32_t largest = 0;
  const auto work = [=, &largest](size_t i, size_t m) __attribute__((always_inline)) {
    accumulate_some(dst + i, src + i, scale, m);
    largest = largest_of(ahead + i, scale, m, largest);
  };
  const auto both = [=, &largest](size_t i, size_t m) __attribute__((always_inline)) {
    work(i, m);
    largest = largest_of(further + i, scale, m, largest);
  };
  if (further) {
    fetching(n, both, dst, src, ahead, further);
  } else {
    fetching(n, work, dst, src, ahead);
  }
  return largest < kInfinity;
}

SMB_CLONES bool exchange_looking_f32(float* __restrict x, float* __restrict g, float alpha, size_t n,
                                     const float* __restrict ahead, const float* __restrict further) {
  int32_t largest = 0;
  const auto work = [=, &largest](size_t i, size_t m) __attribute__((always_inline)) {
    exchange_some(x + i, g + i, alpha, m);
    largest = largest_of(ahead + i, 1.0f, m, largest);
  };
  const auto both = [=, &largest](size_t i, size_t m) __attribute__((always_inline)) {
    work(i, m);
    largest = largest_of(further + i, 1.0f, m, largest);
  };
  if (further) {
    fetching(n, both, x, g, ahead, further);
  } else {
    fetching(n, work, x, g, ahead);
  }
  return largest < kInfinity;
}

SMB_CLONES void pull_f32(float* __restrict x, const float* __restrict c, float* __restrict d, float alpha,
                         size_t n) {
  const auto work = [=](size_t begin, size_t m) __attribute__((always_inline)) {
    for (size_t i = begin; i < begin + m; ++i) {
      const float move = alpha * (x[i] - c[i]);
      d[i] = move;
      x[i] -= move;
    }
  };
  fetching(n, work, x, c, d);
}

SMB_CLONES void scale_f32(float* __restrict x, float a, size_t n) {
  for (size_t i = 0; i < n; ++i) racy::store(x + i, x[i] * a);
}

SMB_CLONES void fill_f32(float* __restrict x, float a, size_t n) {
  for (size_t i = 0; i < n; ++i) racy::store(x + i, a);
}

namespace {

// One block in 16 lanes; the order of the additions is fixed by the source, not by the vector width.
SMB_CLONES double dot_block(const float* __restrict x, const float* __restrict y, size_t n) {
  double lane[16] = {};
  size_t i = 0;
  for (; i + 16 <= n; i += 16) {
    for (size_t j = 0; j < 16; ++j) lane[j] += static_cast<double>(x[i + j]) * static_cast<double>(y[i + j]);
  }
  for (size_t j = 0; i + j < n; ++j) lane[j] += static_cast<double>(x[i + j]) * static_cast<double>(y[i + j]);
  double sum = 0;
  for (double part : lane) sum += part;
  return sum;
}

SMB_CLONES double sum_block(const float* __restrict x, size_t n) {
  double lane[16] = {};
  size_t i = 0;
  for (; i + 16 <= n; i += 16) {
    for (size_t j = 0; j < 16; ++j) lane[j] += static_cast<double>(x[i + j]);
  }
  for (size_t j = 0; i + j < n; ++j) lane[j] += static_cast<double>(x[i + j]);
  double sum = 0;
  for (double part : lane) sum += part;
  return sum;
}

// The largest magnitude of scale * x as bits.
SMB_CLONES int32_t largest_magnitude(const float* __restrict x, float scale, size_t n) {
  int32_t largest = 0;
  for (size_t i = 0; i < n; ++i) largest = std::max(largest, magnitude(scale * racy::load(x + i)));
  return largest;
}

bool has_nonfinite(const float* x, float scale, size_t n) {
  return largest_magnitude(x, scale, n) >= kInfinity;
}

}  // namespace

double dot_f32(const float* x, const float* y, size_t n) {
  double sum = 0;
  for (size_t at = 0; at < n; at += kDotBlock) sum += dot_block(x + at, y + at, std::min(kDotBlock, n - at));
  return sum;
}

double sum_f32(const float* x, size_t n) {
  double sum = 0;
  for (size_t at = 0; at < n; at += kDotBlock) sum += sum_block(x + at, std::min(kDotBlock, n - at));
  return sum;
}

size_t first_nonfinite_f32(const float* x, float scale, size_t n) {
  constexpr size_t kBlock = 4096;
  for (size_t at = 0; at < n; at += kBlock) {
    const size_t length = std::min(kBlock, n - at);
    if (!has_nonfinite(x + at, scale, length)) continue;
    for (size_t i = at; i < at + length; ++i) {
      if (has_nonfinite(x + i, scale, 1)) return i;
    }
  }
  return n;
}

SMB_CLONES void adagrad_f32(float* __restrict s, float* __restrict g, const Adagrad& how, size_t n) {
  const float rate = how.rate, scale = how.scale, epsilon = how.epsilon;
  for (size_t i = 0; i < n; ++i) {
    const float q = scale * g[i];
    const float least = q * q;
    const float more = s[i] + least;
    const float sum = more > least ? more : least;
    racy::store(s + i, sum);
    g[i] = rate * (q / (std::sqrt(sum) + epsilon));  // rate * q may overflow
  }
}

namespace {

SMB_CLONES bool has_unsquarable(const float* x, float scale, size_t n) {
  int32_t largest = 0;
  for (size_t i = 0; i < n; ++i) {
    const float q = scale * x[i];
    largest = std::max(largest, magnitude(q * q));
  }
  return largest >= kInfinity;
}

}  // namespace

size_t first_unsquarable_f32(const float* x, float scale, size_t n) {
  if (!has_unsquarable(x, scale, n)) return n;
  size_t at = 0;
  while (!has_unsquarable(x + at, scale, 1)) ++at;
  return at;
}

}  // namespace smb
