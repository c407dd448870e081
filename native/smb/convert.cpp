// float32 to and from the two 16-bit floating types.
#include <cstring>

#include "common/clones.hpp"
#include "kernels.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace smb {
namespace {

inline uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// Round to nearest even by adding half a unit of the last kept place, less one where that place is even.
inline uint16_t bfloat16_of(uint32_t bits) {
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const uint32_t quiet = (bits >> 16) | 0x40u;  // rounding could carry a NaN into infinity
  return static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? quiet : rounded);
}

uint16_t float16_of(float value) {
  const uint32_t bits = bits_of(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u | ((magnitude >> 13) & 0x1ffu));
  if (magnitude >= 0x47800000u) return static_cast<uint16_t>(sign | 0x7c00u);  // 65536 and above
  if (magnitude < 0x38800000u) {
    // Below 2^-14 the unit of the result is 2^-24 everywhere: let the adder of 0.5 round to it.
    const float shifted = float_of(magnitude) + 0.5f;
    return static_cast<uint16_t>(sign | (bits_of(shifted) - bits_of(0.5f)));
  }
  const uint32_t odd = (magnitude >> 13) & 1u;
  // Rebias the exponent by 127 - 15; a carry out of the mantissa rightly raises it, up to infinity.
  return static_cast<uint16_t>(sign | ((magnitude - 0x38000000u + 0xfffu + odd) >> 13));
}

float float_of_float16(uint16_t half) {
  const uint32_t sign = (half & 0x8000u) << 16;
  const uint32_t magnitude = half & 0x7fffu;
  if (magnitude > 0x7c00u) return float_of(sign | 0x7fc00000u | (magnitude << 13));
  if (magnitude == 0x7c00u) return float_of(sign | 0x7f800000u);
  if (magnitude < 0x0400u) return float_of(sign | bits_of(static_cast<float>(magnitude) * 0x1p-24f));
  return float_of(sign | ((magnitude << 13) + 0x38000000u));
}

void to_float16_plain(uint16_t* dst, const float* src, size_t n) {
  for (size_t i = 0; i < n; ++i) dst[i] = float16_of(src[i]);
}

void from_float16_plain(float* dst, const uint16_t* src, size_t n) {
  for (size_t i = 0; i < n; ++i) dst[i] = float_of_float16(src[i]);
}

#if defined(__x86_64__)

__attribute__((target("avx,f16c"))) void to_float16_f16c(uint16_t* dst, const float* src, size_t n) {
  size_t i = 0;
  for (; i + 8 <= n; i += 8) {
    const __m128i half = _mm256_cvtps_ph(_mm256_loadu_ps(src + i), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(dst + i), half);
  }
  to_float16_plain(dst + i, src + i, n - i);
}

__attribute__((target("avx,f16c"))) void from_float16_f16c(float* dst, const uint16_t* src, size_t n) {
  size_t i = 0;
  for (; i + 8 <= n; i += 8) {
    const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(src + i));
    _mm256_storeu_ps(dst + i, _mm256_cvtph_ps(half));
  }
  from_float16_plain(dst + i, src + i, n - i);
}

bool has_f16c() {
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx") && __builtin_cpu_supports("f16c");
}

#endif

}  // namespace

SMB_CLONES void to_bfloat16(uint16_t* __restrict dst, const float* __restrict src, size_t n) {
  for (size_t i = 0; i < n; ++i) dst[i] = bfloat16_of(bits_of(src[i]));
}

SMB_CLONES void from_bfloat16(float* __restrict dst, const uint16_t* __restrict src, size_t n) {
  for (size_t i = 0; i < n; ++i) dst[i] = float_of(static_cast<uint32_t>(src[i]) << 16);
}

void to_float16(uint16_t* dst, const float* src, size_t n) {
#if defined(__x86_64__)
  static const bool fast = has_f16c();
  if (fast) return to_float16_f16c(dst, src, n);
#endif
  to_float16_plain(dst, src, n);
}

void from_float16(float* dst, const uint16_t* src, size_t n) {
#if defined(__x86_64__)
  static const bool fast = has_f16c();
  if (fast) return from_float16_f16c(dst, src, n);
#endif
  from_float16_plain(dst, src, n);
}

}  // namespace smb
