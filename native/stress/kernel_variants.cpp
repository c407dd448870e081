// Prints a fingerprint of what every kernel makes of fixed inputs. Built for several instruction sets, all must
// print the same (tests/native).
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

#include "smb/kernels.hpp"

namespace {

uint64_t fingerprint(const void* data, size_t bytes) {
  uint64_t hash = 14695981039346656037u;  // FNV-1a
  for (size_t i = 0; i < bytes; ++i) hash = (hash ^ static_cast<const unsigned char*>(data)[i]) * 1099511628211u;
  return hash;
}

template <class T>
void show(const char* name, const std::vector<T>& values) {
  std::printf("%s %016llx\n", name, static_cast<unsigned long long>(fingerprint(values.data(), values.size() * sizeof(T))));
}

std::vector<float> numbers(unsigned seed, size_t n) {
  std::mt19937 dice(seed);
  std::vector<float> values(n);
  for (float& value : values) value = static_cast<float>(static_cast<double>(dice()) / 1e9 - 2.0);
  return values;
}

// Any bits but NaN's, whose payload is not promised.
std::vector<float> any_bits(unsigned seed, size_t n) {
  std::mt19937 dice(seed);
  std::vector<float> values(n);
  for (float& value : values) {
    uint32_t bits = dice();
    if ((bits & 0x7fffffff) > 0x7f800000) bits &= 0xff800000;
    std::memcpy(&value, &bits, sizeof bits);
  }
  return values;
}

}  // namespace

int main() {
  constexpr size_t kCount = 100003;  // no multiple of any vector width
  std::vector<float> x = numbers(1, kCount), g = numbers(2, kCount), d(kCount);
  smb::exchange_f32(x.data(), g.data(), 0.3f, kCount);
  show("exchange x", x);
  show("exchange g", g);
  smb::accumulate_f32(x.data(), g.data(), -0.7f, kCount);
  show("accumulate", x);
  smb::pull_f32(x.data(), g.data(), d.data(), 0.3f, kCount);
  show("pull x", x);
  show("pull d", d);
  smb::scale_f32(x.data(), 1.3f, kCount);
  show("scale", x);
  show("dot", std::vector<double>{smb::dot_f32(x.data(), g.data(), kCount)});
  const std::vector<float> any = any_bits(3, kCount);
  std::vector<uint16_t> half(kCount);
  smb::to_float16(half.data(), any.data(), kCount);
  show("to float16", half);
  smb::from_float16(d.data(), half.data(), kCount);
  show("from float16", d);
  smb::to_bfloat16(half.data(), any.data(), kCount);
  show("to bfloat16", half);
  smb::from_bfloat16(d.data(), half.data(), kCount);
  show("from bfloat16", d);
  std::printf("nonfinite %zu\n", smb::first_nonfinite_f32(any.data(), 1.0f, kCount));
  return 0;
}
