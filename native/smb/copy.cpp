// Copies: through the caches, and past them.
#include <cstring>

#include "common/racy.hpp"
#include "kernels.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace smb {
namespace {

#if defined(__x86_64__) && !defined(__SANITIZE_THREAD__)

constexpr size_t kLine = 64;
constexpr size_t kPageLines = 64;
constexpr size_t kGroup = 4 * kPageLines;

// The offset of the k-th line to be copied. Four pages go side by side, two lines of each in turn: the hardware fetches
// ahead within every one of them, and the wait at a page's end is shared (from 64 MiB up 10 to 20% less time).
inline size_t place(size_t k, size_t lines) {
  if (k >= lines / kGroup * kGroup) return k * kLine;
  const size_t in = k % kGroup;
  return (k - in + in / 2 % 4 * kPageLines + in / 8 * 2 + in % 2) * kLine;
}

// Whole cache lines to an aligned target; a line is written at once, so it need not be read first.
__attribute__((target("avx512f"))) void stream_lines_avx512(char* dst, const char* src, size_t lines) {
  for (size_t k = 0; k < lines; ++k) {
    const size_t at = place(k, lines);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(dst + at), _mm512_loadu_si512(src + at));
  }
}

__attribute__((target("avx2"))) void stream_lines_avx2(char* dst, const char* src, size_t lines) {
  for (size_t k = 0; k < lines; ++k) {
    const size_t at = place(k, lines);
    const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(src + at));
    const __m256i b = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(src + at + 32));
    _mm256_stream_si256(reinterpret_cast<__m256i*>(dst + at), a);
    _mm256_stream_si256(reinterpret_cast<__m256i*>(dst + at + 32), b);
  }
}

void stream_lines_plain(char* dst, const char* src, size_t lines) {
  for (size_t k = 0; k < lines; ++k) {
    const size_t at = place(k, lines);
    for (size_t j = at; j < at + kLine; j += 16) {
      const __m128i a = _mm_loadu_si128(reinterpret_cast<const __m128i*>(src + j));
      _mm_stream_si128(reinterpret_cast<__m128i*>(dst + j), a);
    }
  }
}

using StreamLines = void (*)(char*, const char*, size_t);

StreamLines choose_stream_lines() {
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f")) return stream_lines_avx512;
  if (__builtin_cpu_supports("avx2")) return stream_lines_avx2;
  return stream_lines_plain;
}

#endif

}  // namespace

#if defined(__SANITIZE_THREAD__)

void copy_bytes(void* dst, const void* src, size_t bytes) {
  const auto step = [&](auto* to, const auto* from) {
    const size_t n = bytes / sizeof *to;
    for (size_t i = 0; i < n; ++i) racy::store(to + i, racy::load(from + i));
  };
  // The words of the kernels, so that the sanitizer sees accesses of one size.
  const auto odd = (reinterpret_cast<uintptr_t>(dst) | reinterpret_cast<uintptr_t>(src) | bytes) % sizeof(uint32_t);
  if (odd) return step(static_cast<char*>(dst), static_cast<const char*>(src));
  step(static_cast<uint32_t*>(dst), static_cast<const uint32_t*>(src));
}

#else

void copy_bytes(void* dst, const void* src, size_t bytes) { std::memcpy(dst, src, bytes); }

#endif

#if defined(__x86_64__) && !defined(__SANITIZE_THREAD__)

void stream_bytes(void* dst, const void* src, size_t bytes) {
  static const StreamLines stream_lines = choose_stream_lines();
  char* to = static_cast<char*>(dst);
  const char* from = static_cast<const char*>(src);
  // The fence before keeps these stores behind the caller's sequence word: non-temporal stores are not
  // ordered with the stores around them.
  _mm_sfence();
  const size_t head = (kLine - reinterpret_cast<uintptr_t>(to) % kLine) % kLine;
  if (bytes <= head + kLine) {
    std::memcpy(to, from, bytes);
    return;
  }
  std::memcpy(to, from, head);
  const size_t lines = (bytes - head) / kLine;
  stream_lines(to + head, from + head, lines);
  const size_t done = head + lines * kLine;
  std::memcpy(to + done, from + done, bytes - done);
  _mm_sfence();
}

#else

void stream_bytes(void* dst, const void* src, size_t bytes) { copy_bytes(dst, src, bytes); }

#endif

}  // namespace smb
