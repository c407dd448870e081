#include "shadow.hpp"

#include <algorithm>

namespace smb::net {

float* Shadows::find(uint64_t segment, size_t begin, size_t count) {
  const auto found = chunks_.find({segment, begin / kChunkFloats});
  const size_t first = begin % kChunkFloats;
  if (found == chunks_.end() || first < found->second.first || first + count > found->second.end) return nullptr;
  return found->second.values.get() + first;
}

bool Shadows::fits(uint64_t segment, size_t begin) const {
  return bytes() + kChunkBytes <= limit_ || chunks_.count({segment, begin / kChunkFloats}) != 0;
}

float* Shadows::keep(uint64_t segment, size_t begin, size_t count) {
  Chunk& chunk = chunks_[{segment, begin / kChunkFloats}];
  if (!chunk.values) chunk.values.reset(new float[kChunkFloats]);
  const size_t first = begin % kChunkFloats;
  const bool touches = first <= chunk.end && chunk.first <= first + count && chunk.end != 0;
  chunk.first = touches ? std::min(chunk.first, first) : first;
  chunk.end = touches ? std::max(chunk.end, first + count) : first + count;
  return chunk.values.get() + first;
}

float* Shadows::zeroed(uint64_t segment, size_t begin) {
  Chunk& chunk = chunks_[{segment, begin / kChunkFloats}];
  if (!chunk.values) chunk.values.reset(new float[kChunkFloats]());
  return chunk.values.get() + begin % kChunkFloats;
}

void Shadows::forget(uint64_t segment) {
  chunks_.erase(chunks_.lower_bound({segment, 0}), chunks_.upper_bound({segment, SIZE_MAX}));
}

}  // namespace smb::net
