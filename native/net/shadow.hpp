// Copies of parts of segments, chunk by chunk: what both ends of a wire know of the worker's values, and what
// the client still owes the daemon.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <utility>

#include "smb/region.hpp"

namespace smb::net {

constexpr size_t kChunkFloats = kChunkBytes / sizeof(float);

// One interval of each chunk can be known. Both ends keep and find the same intervals in the same order, so they
// agree on what is known.
class Shadows {
 public:
  explicit Shadows(size_t limit_bytes) : limit_(limit_bytes) {}
  ~Shadows() { clear(); }
  Shadows(const Shadows&) = delete;
  Shadows& operator=(const Shadows&) = delete;

  // Elements [begin, begin + count) of the segment, all in one chunk, or nullptr when not all of them are known.
  float* find(uint64_t segment, size_t begin, size_t count);
  // Whether keep() of elements in begin's chunk stays within this one's limit and the process's.
  bool fits(uint64_t segment, size_t begin) const;
  // The same, known from now on, to be filled by the caller.
  float* keep(uint64_t segment, size_t begin, size_t count);
  // The same, where what was never kept is zero.
  float* zeroed(uint64_t segment, size_t begin);

  void forget(uint64_t segment);
  void clear();
  size_t bytes() const { return chunks_.size() * kChunkBytes; }

 private:
  struct Chunk {
    std::unique_ptr<float[]> values;
    size_t first = 0, end = 0;  // what is known, in elements of the chunk
  };
  Chunk& chunk(uint64_t segment, size_t begin, bool zeroed);

  std::map<std::pair<uint64_t, size_t>, Chunk> chunks_;
  const size_t limit_;
};

}  // namespace smb::net
