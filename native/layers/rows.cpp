#include "rows.hpp"

#include <cmath>

namespace layers {
namespace {

// k + alpha * sum; rounding may leave a sum of squares just below zero. NaN stays NaN.
inline __attribute__((always_inline)) float scale_of(double sum, float alpha, float k) {
  return k + alpha * static_cast<float>(sum < 0.0 ? 0.0 : sum);
}

// s^-beta for the exponents that networks use, by square roots alone; anything else goes to powf.
enum class Power { half, three_quarters, one, any };

Power kind_of(float beta) {
  if (beta == 0.5f) return Power::half;
  if (beta == 0.75f) return Power::three_quarters;
  if (beta == 1.0f) return Power::one;
  return Power::any;
}

template <Power kind>
inline __attribute__((always_inline)) float inverse_power(float s, float beta) {
  if (kind == Power::half) return 1.0f / std::sqrt(s);
  if (kind == Power::one) return 1.0f / s;
  if (kind == Power::three_quarters) {
    const float root = std::sqrt(s);
    return 1.0f / (root * std::sqrt(root));
  }
  return std::pow(s, -beta);
}

template <Power kind>
inline __attribute__((always_inline)) void normalise(float* __restrict y, const float* __restrict x,
                                                     const double* __restrict sum, size_t n, float alpha,
                                                     float beta, float k) {
  for (size_t i = 0; i < n; ++i) {
    const float s = scale_of(sum[i], alpha, k);
    y[i] = x[i] * inverse_power<kind>(s, beta);
  }
}

template <Power kind>
inline __attribute__((always_inline)) void gradient(float* __restrict direct, float* __restrict ratio,
                                                    const float* __restrict x, const float* __restrict dy,
                                                    const double* __restrict sum, size_t n, float alpha,
                                                    float beta, float k) {
  for (size_t i = 0; i < n; ++i) {
    const float s = scale_of(sum[i], alpha, k);
    const float q = dy[i] * inverse_power<kind>(s, beta);
    direct[i] = q;
    ratio[i] = q * x[i] / s;
  }
}

}  // namespace

LAYERS_CLONES void row_enter_square(double* __restrict sum, const float* __restrict in, size_t n) {
  for (size_t i = 0; i < n; ++i) {
    const double a = in[i];
    sum[i] += a * a;
  }
}

LAYERS_CLONES void row_leave_square(double* __restrict sum, const float* __restrict out, size_t n) {
  for (size_t i = 0; i < n; ++i) {
    const double b = out[i];
    sum[i] -= b * b;
  }
}

LAYERS_CLONES void row_slide_square(double* __restrict sum, const float* __restrict in,
                                    const float* __restrict out, size_t n) {
  for (size_t i = 0; i < n; ++i) {
    const double a = in[i], b = out[i];
    sum[i] += a * a - b * b;
  }
}

LAYERS_CLONES void row_enter(double* __restrict sum, const float* __restrict in, size_t n) {
  for (size_t i = 0; i < n; ++i) sum[i] += in[i];
}

LAYERS_CLONES void row_leave(double* __restrict sum, const float* __restrict out, size_t n) {
  for (size_t i = 0; i < n; ++i) sum[i] -= out[i];
}

LAYERS_CLONES void row_window(double* __restrict out, const double* __restrict in, size_t n, size_t window) {
  for (size_t i = 0; i < n; ++i) out[i] = in[i];
  for (size_t j = 1; j < window; ++j) {
    for (size_t i = 0; i < n; ++i) out[i] += in[i + j];
  }
}

LAYERS_CLONES void row_normalise(float* __restrict y, const float* __restrict x, const double* __restrict sum,
                                 size_t n, const Lrn& lrn) {
  const float alpha = lrn.alpha, beta = lrn.beta, k = lrn.k;
  switch (kind_of(beta)) {
    case Power::half:
      return normalise<Power::half>(y, x, sum, n, alpha, beta, k);
    case Power::three_quarters:
      return normalise<Power::three_quarters>(y, x, sum, n, alpha, beta, k);
    case Power::one:
      return normalise<Power::one>(y, x, sum, n, alpha, beta, k);
    case Power::any:
      return normalise<Power::any>(y, x, sum, n, alpha, beta, k);
  }
}

LAYERS_CLONES void row_gradient(float* __restrict direct, float* __restrict ratio, const float* __restrict x,
                                const float* __restrict dy, const double* __restrict sum, size_t n,
                                const Lrn& lrn) {
  const float alpha = lrn.alpha, beta = lrn.beta, k = lrn.k;
  switch (kind_of(beta)) {
    case Power::half:
      return gradient<Power::half>(direct, ratio, x, dy, sum, n, alpha, beta, k);
    case Power::three_quarters:
      return gradient<Power::three_quarters>(direct, ratio, x, dy, sum, n, alpha, beta, k);
    case Power::one:
      return gradient<Power::one>(direct, ratio, x, dy, sum, n, alpha, beta, k);
    case Power::any:
      return gradient<Power::any>(direct, ratio, x, dy, sum, n, alpha, beta, k);
  }
}

LAYERS_CLONES void row_combine(float* __restrict dx, const float* __restrict direct, const float* __restrict x,
                               const double* __restrict sum, float factor, size_t n) {
  for (size_t i = 0; i < n; ++i) dx[i] = direct[i] - factor * x[i] * static_cast<float>(sum[i]);
}

}  // namespace layers
