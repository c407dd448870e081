// Operations on short rows of floats, each compiled for several instruction sets and chosen at load time.
#pragma once

#include <cstddef>

#include "lrn.hpp"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define LAYERS_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define LAYERS_CLONES
#endif

namespace layers {

// Window sums run in double: entering and leaving values cancel exactly but for 2^-53 of the largest, where
// float sums would drift along the channels.

// sum[i] += in[i]^2
void row_enter_square(double* sum, const float* in, size_t n);
// sum[i] -= out[i]^2
void row_leave_square(double* sum, const float* out, size_t n);
// sum[i] += in[i]^2 - out[i]^2
void row_slide_square(double* sum, const float* in, const float* out, size_t n);
// sum[i] += in[i]
void row_enter(double* sum, const float* in, size_t n);
// sum[i] -= out[i]
void row_leave(double* sum, const float* out, size_t n);
// out[i] = sum of in[i .. i+window-1]; in has n+window-1 values
void row_window(double* out, const double* in, size_t n, size_t window);

// y[i] = x[i] * (k + alpha sum[i])^-beta
void row_normalise(float* y, const float* x, const double* sum, size_t n, const Lrn& lrn);
// direct[i] = dy[i] s^-beta; ratio[i] = dy[i] x[i] s^(-beta-1)
void row_gradient(float* direct, float* ratio, const float* x, const float* dy, const double* sum, size_t n,
                  const Lrn& lrn);
// dx[i] = direct[i] - factor * x[i] * sum[i]
void row_combine(float* dx, const float* direct, const float* x, const double* sum, float factor, size_t n);

}  // namespace layers
