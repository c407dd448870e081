#include "shadow.hpp"

#include <algorithm>

#include "buffers.hpp"

namespace smb::net {

float* Shadows::find(uint64_t segment, size_t begin, size_t count) {
  const auto found = chunks_.find({segment, begin / kChunkFloats});
  const size_t first = begin % kChunkFloats;
  if (found == chunks_.end() || first < found->second.first || first + count > found->second.end) return nullptr;
  return found->second.values.get() + first;
}

bool Shadows::fits(uint64_t segment, size_t begin) const {
  if (chunks_.count({segment, begin / kChunkFloats}) != 0) return true;
  return bytes() + kChunkBytes <= limit_ && Memory::fits(kChunkBytes);
}

Shadows::Chunk& Shadows::chunk(uint64_t segment, size_t begin, bool zeroed) {
  Chunk& chunk = chunks_[{segment, begin / kChunkFloats}];
  if (!chunk.values) {
    chunk.values.reset(zeroed ? new float[kChunkFloats]() : new float[kChunkFloats]);
    Memory::took(kChunkBytes);
  }
  return chunk;
}

float* Shadows::keep(uint64_t segment, size_t begin, size_t count) {
  Chunk& known = chunk(segment, begin, false);
  const size_t first = begin % kChunkFloats;
  const bool touches = first <= known.end && known.first <= first + count && known.end != 0;
  known.first = touches ? std::min(known.first, first) : first;
  known.end = touches ? std::max(known.end, first + count) : first + count;
  return known.values.get() + first;
}

float* Shadows::zeroed(uint64_t segment, size_t begin) {
  return chunk(segment, begin, true).values.get() + begin % kChunkFloats;
}

void Shadows::forget(uint64_t segment) {
  const size_t before = bytes();
  chunks_.erase(chunks_.lower_bound({segment, 0}), chunks_.upper_bound({segment, SIZE_MAX}));
  Memory::gave(before - bytes());
}

void Shadows::clear() {
  Memory::gave(bytes());
  chunks_.clear();
}

}  // namespace smb::net
