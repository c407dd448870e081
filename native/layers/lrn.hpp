// Local response normalisation, forward and backward, over contiguous float32 (planes of NCHW).
#pragma once

#include <cstddef>

namespace layers {

// y = x * s^-beta with s = k + alpha * (sum of x^2 over a window of 2*half+1, zero outside).
// alpha is already divided by the number of elements in the window, as the layer's parameter asks.
struct Lrn {
  size_t half;
  float alpha;
  float beta;
  float k;
};

// Windows over channels. x, y, dy, dx: (batch, channels, area) floats, contiguous; they don't overlap.
// dx = dy * s^-beta - 2 alpha beta x * (sum over the window of dy * x * s^(-beta-1)).
void lrn_across_forward(const float* x, float* y, size_t batch, size_t channels, size_t area, const Lrn& lrn,
                        int threads);
void lrn_across_backward(const float* x, const float* dy, float* dx, size_t batch, size_t channels, size_t area,
                         const Lrn& lrn, int threads);

// Square windows within each plane. x, y, dy, dx: (planes, height, width) floats, contiguous.
void lrn_within_forward(const float* x, float* y, size_t planes, size_t height, size_t width, const Lrn& lrn,
                        int threads);
void lrn_within_backward(const float* x, const float* dy, float* dx, size_t planes, size_t height, size_t width,
                         const Lrn& lrn, int threads);

}  // namespace layers
