#include "leveldb.hpp"

#include <array>
#include <cstring>

namespace leveldb {
namespace {

using Tables = std::array<std::array<uint32_t, 256>, 8>;

// tables[k][b]: what byte b gives when k more bytes follow it, so that eight are looked up at once.
Tables make_tables() {
  Tables tables{};
  for (uint32_t b = 0; b < 256; ++b) {
    uint32_t crc = b;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ (crc & 1 ? 0x82f63b78u : 0);
    tables[0][b] = crc;
  }
  for (size_t k = 1; k < 8; ++k)
    for (size_t b = 0; b < 256; ++b) tables[k][b] = (tables[k - 1][b] >> 8) ^ tables[0][tables[k - 1][b] & 0xff];
  return tables;
}

bool varint32(const uint8_t*& at, const uint8_t* end, uint32_t& value) {
  value = 0;
  for (int shift = 0; shift < 35; shift += 7) {
    if (at == end) return false;
    const uint8_t byte = *at++;
    value |= uint32_t(byte & 0x7f) << shift;
    if (!(byte & 0x80)) return true;
  }
  return false;
}

uint32_t little(const uint8_t* at, size_t bytes) {
  uint32_t value = 0;
  for (size_t i = 0; i < bytes; ++i) value |= uint32_t(at[i]) << (8 * i);
  return value;
}

// A copy from `distance` bytes back, which may overlap what it writes.
bool repeat(std::string& out, size_t distance, size_t length, size_t want) {
  if (!distance || distance > out.size() || length > want - out.size()) return false;
  for (size_t i = 0; i < length; ++i) out.push_back(out[out.size() - distance]);
  return true;
}

// One element of the stream; `tag` is behind us.
bool element(uint8_t tag, const uint8_t*& at, const uint8_t* end, size_t want, std::string& out) {
  const size_t left = size_t(end - at);
  if ((tag & 3) == 0) {
    size_t length = tag >> 2;
    if (length >= 60) {
      const size_t bytes = length - 59;
      if (left < bytes) return false;
      length = little(at, bytes);
      at += bytes;
    }
    ++length;
    if (length > size_t(end - at) || length > want - out.size()) return false;
    out.append(reinterpret_cast<const char*>(at), length);
    at += length;
    return true;
  }
  const size_t bytes = (tag & 3) == 1 ? 1 : (tag & 3) == 2 ? 2 : 4;
  if (left < bytes) return false;
  const size_t low = little(at, bytes);
  at += bytes;
  if (bytes == 1) return repeat(out, low | size_t(tag >> 5) << 8, 4 + (tag >> 2 & 7), want);
  return repeat(out, low, 1 + (tag >> 2), want);
}

}  // namespace

uint32_t crc32c(uint32_t crc, const uint8_t* at, size_t n) {
  static const Tables t = make_tables();
  crc = ~crc;
  for (; n >= 8; n -= 8, at += 8) {
    const uint32_t low = crc ^ little(at, 4);
    crc = t[7][low & 0xff] ^ t[6][low >> 8 & 0xff] ^ t[5][low >> 16 & 0xff] ^ t[4][low >> 24] ^
          t[3][at[4]] ^ t[2][at[5]] ^ t[1][at[6]] ^ t[0][at[7]];
  }
  for (; n; --n, ++at) crc = (crc >> 8) ^ t[0][(crc ^ *at) & 0xff];
  return ~crc;
}

bool snappy(const uint8_t* at, size_t n, size_t limit, std::string& out) {
  const uint8_t* end = at + n;
  uint32_t want;
  out.clear();
  // An element of three bytes gives at most 64: a longer promise is a lie, and not worth the memory.
  if (!varint32(at, end, want) || want > limit || want > n * 64) return false;
  out.reserve(want);
  while (at != end) {
    const uint8_t tag = *at++;
    if (!element(tag, at, end, want, out)) return false;
  }
  return out.size() == want;
}

Block::Block(const uint8_t* at, size_t n) : at_(at), end_(at) {
  if (n < 4) {
    whole_ = false;
    return;
  }
  const size_t restarts = little(at + n - 4, 4);
  if (restarts > (n - 4) / 4) whole_ = false;
  else end_ = at + n - 4 - 4 * restarts;
}

bool Block::next(Entry& entry) {
  if (!whole_ || at_ == end_) return false;
  uint32_t shared, rest, size;
  whole_ = varint32(at_, end_, shared) && varint32(at_, end_, rest) && varint32(at_, end_, size) &&
           shared <= entry.key.size() && rest <= size_t(end_ - at_) && size <= size_t(end_ - at_) - rest;
  if (!whole_) return false;
  entry.key.resize(shared);
  entry.key.append(reinterpret_cast<const char*>(at_), rest);
  entry.value = at_ + rest;
  entry.size = size;
  at_ += size_t(rest) + size;
  return true;
}

}  // namespace leveldb
