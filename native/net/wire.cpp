#include "wire.hpp"

#include <algorithm>
#include <cfloat>
#include <cstring>

#include "common/clones.hpp"
#include "common/racy.hpp"
#include "smb/kernels.hpp"

namespace smb::net {
namespace {

constexpr size_t kBlock = 1024;
constexpr float kMaxFloat16 = 65504.0f;
constexpr float kMaxBfloat16 = 3.3895313892515355e38f;
constexpr float kRounder = 12582912.0f;  // 1.5 * 2^23: adding it rounds a small float to a whole number, ties to even
constexpr float kLeastScaled = 1e-30f;   // below it 1 / scale would overflow: such a block is sent as zeros

SMB_CLONES void clamp(float* __restrict out, const float* __restrict values, float limit, size_t n) {
  for (size_t i = 0; i < n; ++i) out[i] = std::min(std::max(values[i], -limit), limit);
}

template <class To>
void encode_clamped(uint16_t* out, const float* values, float limit, size_t n, const To& to) {
  float clamped[kBlock];
  for (size_t at = 0; at < n; at += kBlock) {
    const size_t length = std::min(kBlock, n - at);
    clamp(clamped, values + at, limit, length);
    to(out + at, clamped, length);
  }
}

// The largest magnitude, found among the bits: they are ordered as the values are, and a maximum of whole numbers
// vectorises, which one of floats does not.
SMB_CLONES float largest(const float* values, size_t n) {
  int32_t most = 0;
  for (size_t i = 0; i < n; ++i) {
    int32_t bits;
    std::memcpy(&bits, values + i, sizeof bits);
    most = std::max(most, bits & 0x7fffffff);
  }
  float value;
  std::memcpy(&value, &most, sizeof value);
  return value;
}

SMB_CLONES void round_block(int8_t* __restrict out, const float* __restrict values, float inverse, size_t n) {
  for (size_t i = 0; i < n; ++i) {
    const float shifted = std::min(std::max(values[i] * inverse, -127.0f), 127.0f) + kRounder;
    int32_t bits;
    std::memcpy(&bits, &shifted, sizeof bits);
    out[i] = static_cast<int8_t>(bits - 0x4b400000);  // kRounder's bits
  }
}

void encode_int8(char* out, const float* values, size_t n) {
  for (size_t at = 0; at < n; at += kScaleBlock) {
    const size_t length = std::min(kScaleBlock, n - at);
    const float most = std::min(largest(values + at, length), FLT_MAX);
    const float scale = most < kLeastScaled ? 0.0f : most / 127.0f;
    std::memcpy(out, &scale, sizeof scale);
    out += sizeof scale;
    if (scale == 0.0f) {
      std::memset(out, 0, length);
    } else {
      round_block(reinterpret_cast<int8_t*>(out), values + at, 1.0f / scale, length);
    }
    out += length;
  }
}

SMB_CLONES void scale_block(float* __restrict values, const int8_t* __restrict in, float scale, size_t n) {
  for (size_t i = 0; i < n; ++i) values[i] = scale * static_cast<float>(in[i]);
}

void decode_int8(float* values, const char* in, size_t n) {
  for (size_t at = 0; at < n; at += kScaleBlock) {
    const size_t length = std::min(kScaleBlock, n - at);
    float scale;
    std::memcpy(&scale, in, sizeof scale);
    in += sizeof scale;
    scale_block(values + at, reinterpret_cast<const int8_t*>(in), scale, length);
    in += length;
  }
}

}  // namespace

size_t wire_bytes(uint8_t wire, size_t n) {
  switch (wire) {
    case kWireBfloat16:
    case kWireFloat16: return 2 * n;
    case kWireInt8: return n + (n + kScaleBlock - 1) / kScaleBlock * sizeof(float);
    default: return 4 * n;
  }
}

void encode(uint8_t wire, void* out, const float* values, size_t n) {
  switch (wire) {
    case kWireBfloat16: return encode_clamped(static_cast<uint16_t*>(out), values, kMaxBfloat16, n, to_bfloat16);
    case kWireFloat16: return encode_clamped(static_cast<uint16_t*>(out), values, kMaxFloat16, n, to_float16);
    case kWireInt8: return encode_int8(static_cast<char*>(out), values, n);
    default: std::memcpy(out, values, 4 * n);
  }
}

void decode(uint8_t wire, float* values, const void* in, size_t n) {
  switch (wire) {
    case kWireBfloat16: return from_bfloat16(values, static_cast<const uint16_t*>(in), n);
    case kWireFloat16: return from_float16(values, static_cast<const uint16_t*>(in), n);
    case kWireInt8: return decode_int8(values, static_cast<const char*>(in), n);
    default: std::memcpy(values, in, 4 * n);
  }
}

SMB_CLONES void scaled_sum(float* __restrict out, const float* __restrict a, float scale, const float* __restrict b,
                           size_t n) {
  for (size_t i = 0; i < n; ++i) out[i] = scale * a[i] + b[i];
}

SMB_CLONES void difference(float* __restrict out, const float* __restrict a, const float* __restrict b, size_t n) {
  for (size_t i = 0; i < n; ++i) out[i] = a[i] - b[i];
}

SMB_CLONES void add(float* __restrict a, const float* __restrict b, size_t n) {
  for (size_t i = 0; i < n; ++i) racy::store(a + i, a[i] + b[i]);
}

SMB_CLONES void subtract(float* __restrict a, const float* __restrict b, size_t n) {
  for (size_t i = 0; i < n; ++i) a[i] -= b[i];
}

SMB_CLONES void increment(float* __restrict out, const float* __restrict x, const float* __restrict g, float alpha,
                          size_t n) {
  for (size_t i = 0; i < n; ++i) out[i] = alpha * (x[i] - g[i]);
}

SMB_CLONES void push(float* __restrict x, float* __restrict g, float alpha, size_t n) {
  for (size_t i = 0; i < n; ++i) {
    const float center = g[i];
    const float d = alpha * (x[i] - center);
    x[i] = d;
    racy::store(g + i, center + d);
  }
}

double square_sum(const float* x, size_t n) { return dot_f32(x, x, n); }

}  // namespace smb::net
