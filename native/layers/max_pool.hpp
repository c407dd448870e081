// Max pooling, forward and backward, over float32 images that lie as planes (NCHW) or with their channels last.
#pragma once

#include <cstddef>
#include <cstdint>

namespace layers {

// The instruction sets that the kernels are made for: the same values from each.
enum class Machine { avx512, avx2, plain };

bool has(Machine machine);
Machine best_machine();

// How windows are laid over images of (height, width). Each reaches into the image; what lies outside of it
// takes no part. A window has at most 256 places.
struct Windows {
  size_t height, width;
  size_t rows, columns;  // how many windows
  size_t kernel_h, kernel_w;
  size_t stride_h, stride_w;
  size_t pad_h, pad_w;
  Machine machine;  // one that `has` says yes to
};

// x: (batch, height, width, channels) where `last`, else (batch, channels, height, width); y alike with
// (rows, columns). won: as y, where in its window, i kernel_w + j, the winner stands; null when nobody asks.
// The first of equal values wins, and NaN over every number (the last NaN, like torch's kernel).
void max_pool_forward(const float* x, float* y, uint8_t* won, size_t batch, size_t channels, bool last,
                      const Windows& windows, int threads);

// dx = for each value the sum of dy over the windows that it won, in their order; dy, won and dx lie like y and x.
void max_pool_backward(const float* dy, const uint8_t* won, float* dx, size_t batch, size_t channels, bool last,
                       const Windows& windows, int threads);

}  // namespace layers
