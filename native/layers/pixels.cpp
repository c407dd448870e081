#include "pixels.hpp"

#include <algorithm>
#include <cstring>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#include <immintrin.h>
#define DATA_X86 1
#define DATA_CLONES __attribute__((target_clones("avx2", "default")))
#else
#define DATA_X86 0
#define DATA_CLONES
#endif

namespace data {
namespace {

constexpr size_t kLine = 16;   // floats of a cache line
constexpr size_t kBlock = 16;  // pixels

template <class T>
inline void affine_one(float* __restrict out, const T* __restrict in, size_t n, float mean, float scale) {
  for (size_t i = 0; i < n; ++i) out[i] = (float(in[i]) - mean) * scale;
}
template <class T>
inline void affine_each(float* __restrict out, const T* __restrict in, size_t n, const float* __restrict mean,
                        float scale) {
  for (size_t i = 0; i < n; ++i) out[i] = (float(in[i]) - mean[i]) * scale;
}

// A row of any number of channels. bytes has room for n values.
void write_row(const Row& row, float* const* out, uint8_t* bytes) {
  for (size_t c = 0; c < row.channels; ++c) {
    const uint8_t* in = row.in;
    if (row.channels > 1) {
      for (size_t i = 0; i < row.n; ++i) bytes[i] = row.in[i * row.channels + c];
      in = bytes;
    }
    if (row.mean_row) affine(out[c], in, row.n, row.mean_row + c * row.mean_plane, row.scale);
    else affine(out[c], in, row.n, row.mean_values[c], row.scale);
    if (row.flip) std::reverse(out[c], out[c] + row.n);
  }
}

#if DATA_X86

// Where the bytes of channel k stand in the three registers that hold 16 pixels of three channels, in order and
// turned round; -1 (which gives a zero) where they are in another of the registers.
struct Masks {
  alignas(16) int8_t at[2][3][3][kBlock];
  Masks() {
    for (int flip = 0; flip < 2; ++flip)
      for (int k = 0; k < 3; ++k)
        for (int part = 0; part < 3; ++part)
          for (int i = 0; i < 16; ++i) {
            const int byte = 3 * (flip ? 15 - i : i) + k - 16 * part;
            at[flip][k][part][i] = int8_t(byte >= 0 && byte < 16 ? byte : -1);
          }
  }
};
const Masks kMasks;

// Eight floats of a row, or of one that is turned round, whose first is at `at`.
template <bool flip>
__attribute__((target("avx2"))) inline __m256 floats_at(const float* row, size_t n, size_t at) {
  if (!flip) return _mm256_loadu_ps(row + at);
  return _mm256_permutevar8x32_ps(_mm256_loadu_ps(row + n - 8 - at), _mm256_setr_epi32(7, 6, 5, 4, 3, 2, 1, 0));
}

// Channel k of a row of three, at least a block of pixels; the last block goes over some of the one before again.
// each: a mean for each pixel.
template <bool flip, bool each>
__attribute__((target("avx2"))) void write_channel_of_3(const Row& row, size_t k, float* out) {
  const auto* masks = reinterpret_cast<const __m128i*>(kMasks.at[flip][k]);
  const __m128i mask0 = _mm_load_si128(masks), mask1 = _mm_load_si128(masks + 1), mask2 = _mm_load_si128(masks + 2);
  const size_t n = row.n;
  const uint8_t* const pixels = row.in;
  const float* const means = each ? row.mean_row + k * row.mean_plane : nullptr;
  const __m256 scale = _mm256_set1_ps(row.scale), mean = _mm256_set1_ps(each ? 0 : row.mean_values[k]);
  for (size_t i = 0; i < n; i += kBlock) {
    const size_t at = std::min(i, n - kBlock);
    const auto* in = reinterpret_cast<const __m128i*>(pixels + 3 * (flip ? n - kBlock - at : at));
    const __m128i bytes = _mm_or_si128(_mm_or_si128(_mm_shuffle_epi8(_mm_loadu_si128(in), mask0),
                                                    _mm_shuffle_epi8(_mm_loadu_si128(in + 1), mask1)),
                                       _mm_shuffle_epi8(_mm_loadu_si128(in + 2), mask2));
    const __m256 low = _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes));
    const __m256 high = _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8)));
    const __m256 low_mean = each ? floats_at<flip>(means, n, at) : mean;
    const __m256 high_mean = each ? floats_at<flip>(means, n, at + 8) : mean;
    _mm256_storeu_ps(out + at, _mm256_mul_ps(_mm256_sub_ps(low, low_mean), scale));
    _mm256_storeu_ps(out + at + 8, _mm256_mul_ps(_mm256_sub_ps(high, high_mean), scale));
  }
}

void write_row_of_3(const Row& row, float* const* out) {
  const auto write = row.flip ? (row.mean_row ? write_channel_of_3<true, true> : write_channel_of_3<true, false>)
                              : (row.mean_row ? write_channel_of_3<false, true> : write_channel_of_3<false, false>);
  for (size_t k = 0; k < 3; ++k) write(row, k, out[k]);
}

__attribute__((target("avx2"))) void stream_avx2(float* to, const float* from, size_t n) {
  for (size_t i = 0; i < n; i += 8) _mm256_stream_ps(to + i, _mm256_loadu_ps(from + i));
}

void stream_plain(float* to, const float* from, size_t n) {
  for (size_t i = 0; i < n; i += 4) _mm_stream_ps(to + i, _mm_loadu_ps(from + i));
}

bool has_avx2() {
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx2");
}

const bool kAvx2 = has_avx2();

// False where nothing is written: it is for three channels, a block of pixels or more, and AVX2.
bool row_of_3(const Row& row, float* const* out) {
  if (!kAvx2 || row.channels != 3 || row.n < kBlock) return false;
  write_row_of_3(row, out);
  return true;
}

// n floats, whole lines, to an aligned target and past the caches.
void stream(float* to, const float* from, size_t n) { (kAvx2 ? stream_avx2 : stream_plain)(to, from, n); }

void stream_end() { _mm_sfence(); }

#else

bool row_of_3(const Row&, float* const*) { return false; }
void stream(float* to, const float* from, size_t n) { std::memcpy(to, from, n * sizeof *to); }
void stream_end() {}

#endif

}  // namespace

DATA_CLONES void affine(float* out, const uint8_t* in, size_t n, float mean, float scale) {
  affine_one(out, in, n, mean, scale);
}
DATA_CLONES void affine(float* out, const float* in, size_t n, float mean, float scale) {
  affine_one(out, in, n, mean, scale);
}
DATA_CLONES void affine(float* out, const uint8_t* in, size_t n, const float* mean, float scale) {
  affine_each(out, in, n, mean, scale);
}
DATA_CLONES void affine(float* out, const float* in, size_t n, const float* mean, float scale) {
  affine_each(out, in, n, mean, scale);
}

Planes::Planes(float* out, size_t plane, size_t channels, size_t width, bool past)
    : past_(past), bytes_(width), planes_(channels), targets_(channels) {
  const size_t room = width + 2 * kLine;
  if (past) buffers_.resize(channels * room);
  for (size_t c = 0; c < channels; ++c) {
    float* const to = out + c * plane;
    const size_t over = reinterpret_cast<uintptr_t>(to) / sizeof *to % kLine;
    planes_[c] = {to, 0, (kLine - over) % kLine, buffers_.data() + (past ? c * room : 0)};
  }
}

void Planes::write(const Row& row) {
  for (size_t c = 0; c < row.channels; ++c)
    targets_[c] = past_ ? planes_[c].buffer + planes_[c].held : planes_[c].to;
  if (!row_of_3(row, targets_.data())) write_row(row, targets_.data(), bytes_.data());
  for (Plane& plane : planes_) {
    if (past_) push(plane, row.n);
    else plane.to += row.n;
  }
}

// n more floats stand behind those held. There is room for a line more behind any that a buffer holds.
void Planes::push(Plane& plane, size_t n) {
  const float* from = plane.buffer;
  plane.held += n;
  if (plane.head) {
    const size_t head = std::min(plane.head, plane.held);
    std::memcpy(plane.to, from, head * sizeof *from);
    plane.to += head;
    plane.head -= head;
    plane.held -= head;
    from += head;
  }
  const size_t done = plane.held / kLine * kLine;
  stream(plane.to, from, done);
  plane.to += done;
  plane.held -= done;
  std::memmove(plane.buffer, from + done, kLine * sizeof *from);  // of a fixed size: it is inlined
}

void Planes::finish() {
  if (!past_) return;
  for (Plane& plane : planes_) {
    std::memcpy(plane.to, plane.buffer, plane.held * sizeof *plane.to);
    plane.held = 0;
  }
  stream_end();
}

}  // namespace data
