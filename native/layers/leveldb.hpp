// What a LevelDB table's blocks are made of: Snappy, CRC-32C, prefix-compressed entries. No Python.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace leveldb {

// CRC-32C (Castagnoli) of n bytes, going on from `crc` (0 at the start).
uint32_t crc32c(uint32_t crc, const uint8_t* at, size_t n);

// Unpack Snappy's raw format. False when the bytes are none, or would give more than `limit` bytes.
bool snappy(const uint8_t* at, size_t n, size_t limit, std::string& out);

// One entry: the key is put together from the entries before it, the value lies in the block.
struct Entry {
  std::string key;
  const uint8_t* value = nullptr;
  size_t size = 0;
};

// Goes through the entries of one block, reading [at, at + n) only.
class Block {
 public:
  Block(const uint8_t* at, size_t n);
  // The next entry; false at the end or when the block is broken (see whole()).
  bool next(Entry& entry);
  bool whole() const { return whole_; }

 private:
  const uint8_t* at_;
  const uint8_t* end_;
  bool whole_ = true;
};

}  // namespace leveldb
