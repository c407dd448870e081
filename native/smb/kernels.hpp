// Vector kernels over plain memory: pointers and counts, no checks, no locks. n counts elements.
// Every instruction-set variant gives the same bits, and so does every split of the range.
#pragma once

#include <cstddef>
#include <cstdint>

namespace smb {

// dst[i] += scale * src[i]. The caller holds the locks of what dst lies in; dst and src don't overlap.
void accumulate_f32(float* dst, const float* src, float scale, size_t n);

// d = alpha (x[i] - g[i]); x[i] -= d; g[i] += d. One pass over both (Zhang et al. 2015, eq. 2 and 3).
// The caller holds the locks of what g lies in.
void exchange_f32(float* x, float* g, float alpha, size_t n);

// The same two, and in the same loop a look at n values that are to be moved next, and at n further ones unless that
// is nullptr: true when they (scaled) are all finite. Done by itself, that look costs a third of a move, since it waits for
// memory alone; here the memory system has it beside the other streams, and it costs a twentieth.
bool accumulate_looking_f32(float* dst, const float* src, float scale, size_t n, const float* ahead,
                            const float* further);
bool exchange_looking_f32(float* x, float* g, float alpha, size_t n, const float* ahead, const float* further);

// d[i] = alpha (x[i] - c[i]); x[i] -= d[i]. c is a private snapshot of the center.
void pull_f32(float* x, const float* c, float* d, float alpha, size_t n);

void scale_f32(float* x, float a, size_t n);
void fill_f32(float* x, float a, size_t n);

// Adagrad's step of a gradient q = scale g[i]: s[i] += q^2; g[i] = rate q / (sqrt(s[i]) + epsilon). In one pass; the caller
// holds the locks of what s lies in. A sum below q^2 (garbage, NaN) counts as q^2: |g[i]| ends at most |rate|.
struct Adagrad {
  float rate;
  float scale;
  float epsilon;
};
void adagrad_f32(float* s, float* g, const Adagrad& how, size_t n);
// Index of the first i for which the square of scale * x[i] is NaN or Inf, or n.
size_t first_unsquarable_f32(const float* x, float scale, size_t n);

// Sum of x[i] y[i] in float64, in 16 interleaved partial sums: the same bits on every machine.
// To split a long range keep the pieces at multiples of kDotBlock and add their sums in order.
constexpr size_t kDotBlock = size_t{1} << 16;
double dot_f32(const float* x, const float* y, size_t n);
double sum_f32(const float* x, size_t n);  // likewise

// Index of the first i with scale * x[i] NaN or Inf, or n. Reads x once; stops at the block that holds it.
size_t first_nonfinite_f32(const float* x, float scale, size_t n);

// Copies that a seqlock reader may watch. The streaming one writes past the caches (non-temporal
// stores) and ends with a store fence; it wins from kStreamBytes up, where the target would not stay
// in the cache anyway.
constexpr size_t kStreamBytes = size_t{8} << 20;
void copy_bytes(void* dst, const void* src, size_t bytes);
void stream_bytes(void* dst, const void* src, size_t bytes);

// float32 to and from the 16-bit types; round to nearest even, NaN stays NaN (quiet), sign kept.
void to_bfloat16(uint16_t* dst, const float* src, size_t n);
void from_bfloat16(float* dst, const uint16_t* src, size_t n);
void to_float16(uint16_t* dst, const float* src, size_t n);
void from_float16(float* dst, const uint16_t* src, size_t n);

}  // namespace smb
