// How increments travel: float32, bfloat16, float16, or int8 with a float32 scale for each 256 elements.
#pragma once

#include <cstddef>
#include <cstdint>

namespace smb::net {

enum Wire : uint8_t {
  kWireFloat32 = 0,
  kWireBfloat16 = 1,
  kWireFloat16 = 2,
  kWireInt8 = 3,
  kAnew = 4,   // float32 that also starts the shadow
  kMoved = 5,  // float32 answered by the worker's values as they are after the move, not by d
  kWires = 6
};

constexpr size_t kScaleBlock = 256;

// Bytes of n elements. kAnew and kMoved travel as float32.
size_t wire_bytes(uint8_t wire, size_t n);

// values to the wire; what is beyond the wire's range becomes its largest value. values hold no NaN.
void encode(uint8_t wire, void* out, const float* values, size_t n);
// Back. The peer decides what is in there: look for NaN and Inf before the result is used.
void decode(uint8_t wire, float* values, const void* in, size_t n);

// out = scale * a + b; out = a - b; a += b; a -= b. n elements, no overlap.
void scaled_sum(float* out, const float* a, float scale, const float* b, size_t n);
void difference(float* out, const float* a, const float* b, size_t n);
void add(float* a, const float* b, size_t n);
void subtract(float* a, const float* b, size_t n);
// d = alpha (x - g), into out.
void increment(float* out, const float* x, const float* g, float alpha, size_t n);
// d = alpha (x - g); x = d; g += d.
void push(float* x, float* g, float alpha, size_t n);
// Sum of x^2.
double square_sum(const float* x, size_t n);

}  // namespace smb::net
