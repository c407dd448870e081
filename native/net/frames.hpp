// The frames of the data operations, as smb/protocol.py and smb/records.py lay them out (a test compares both).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "smb/region.hpp"

namespace smb::net {

constexpr char kMagic[4] = {'S', 'M', 'B', '1'};
constexpr size_t kPieceBytes = kChunkBytes;        // of elements in one piece of an update: it lies in one chunk
constexpr size_t kReadBytes = size_t{1} << 20;     // of elements in one piece of a read
constexpr size_t kFailureBytes = 4 + (1 << 16);    // of a failure's body
constexpr uint32_t kMaxMessage = 4096;

enum Operation : uint16_t {
  kRead = 18,
  kWrite = 19,
  kAccumulate = 20,
  kExchange = 21,
  kAccumulateFrom = 22,
  kVersionOf = 23,
  kAcknowledge = 25,
};

// A reply's status: protocol.ERRORS.
enum Status : uint16_t {
  kGood = 0,
  kRequestError = 1,
  kRangeError = 2,
  kTypeMismatch = 5,
  kNonFinite = 6,
  kOutOfMemory = 7,
  kNotPermitted = 8,
  kWaitTimeout = 10,
  kProtocolError = 11,
  kClosed = 12,
};

// What the piece is to its operation.
enum Last : uint8_t { kMore = 0, kCounted = 1, kUncounted = 2 };

struct __attribute__((packed)) Header {
  char magic[4];
  uint16_t operation;
  uint16_t status;
  uint64_t number;
  uint32_t length;  // of the head and the elements behind it
};

struct __attribute__((packed)) ReadHead {
  uint64_t segment, offset, count;
};

// Write's head is this up to `last`; Accumulate's and Exchange's the whole.
struct __attribute__((packed)) UpdateHead {
  uint64_t segment, sequence, acknowledged, offset, count;
  uint8_t last, wire;
  double scalar;  // scale or alpha
};

struct __attribute__((packed)) FromHead {
  uint64_t segment, sequence, acknowledged, source, offset;
  double scale;
};

struct Request {
  Header header;
  union {
    char head[1];
    ReadHead read;
    UpdateHead update;
    FromHead from;
    uint64_t version_of;
    uint64_t acknowledge;
  };
};

static_assert(sizeof(Header) == 20 && sizeof(ReadHead) == 24 && sizeof(UpdateHead) == 50 && sizeof(FromHead) == 48);
static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "frames are little endian");

// Bytes of an operation's head; 0 for one that is not answered here.
inline size_t head_bytes(uint16_t operation) {
  switch (operation) {
    case kRead: return sizeof(ReadHead);
    case kWrite: return offsetof(UpdateHead, wire);
    case kAccumulate:
    case kExchange: return sizeof(UpdateHead);
    case kAccumulateFrom: return sizeof(FromHead);
    case kVersionOf:
    case kAcknowledge: return sizeof(uint64_t);
    default: return 0;
  }
}

inline bool is_update(uint16_t operation) { return operation >= kWrite && operation <= kAccumulateFrom; }
inline bool carries_elements(uint16_t operation) { return operation >= kWrite && operation <= kExchange; }

// The longest body of a data request.
constexpr size_t kMaxBody = sizeof(UpdateHead) + kPieceBytes;

inline Header header_of(uint16_t operation, uint16_t status, uint64_t number, size_t length) {
  Header header{{'S', 'M', 'B', '1'}, operation, status, number, static_cast<uint32_t>(length)};
  return header;
}

// Why something was refused; status kGood: it was not.
struct Refusal {
  uint16_t status = kGood;
  std::string message;
  explicit operator bool() const { return status != kGood; }
};

__attribute__((format(printf, 2, 3))) Refusal refuse(uint16_t status, const char* format, ...);

}  // namespace smb::net
