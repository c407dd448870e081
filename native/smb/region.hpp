// A segment as mapped into this process: control words and payload, and the locks on them.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "robust.hpp"

namespace smb {

constexpr size_t kChunkBytes = 256 * 1024;

// The control mapping. Nothing in it is used as address, length, index or bound: whoever may map it may
// write nonsense there, and must gain no more than wrong numbers and waiting.
struct alignas(64) ControlHead {
  std::atomic<uint64_t> version;     // completed updates
  alignas(64) Word version_watched;  // someone may sleep on version
};

struct alignas(64) ChunkWords {  // a cache line each: neighbours don't disturb one another
  Word lock;                     // owner's thread id, FUTEX_WAITERS, FUTEX_OWNER_DIED
  Word sequence;                 // odd while the chunk is being written
};

constexpr size_t kHeadBytes = 4096;
static_assert(sizeof(ControlHead) <= kHeadBytes && sizeof(ChunkWords) == 64);

// Elements [begin, begin + count) of the segment, all in one chunk.
struct Piece {
  size_t chunk;
  size_t begin;
  size_t count;
};

class Region {
 public:
  // Maps bytes of payload and the control words that go with them. Throws std::system_error.
  Region(int control_fd, int payload_fd, size_t bytes, size_t item, bool readonly);
  ~Region();
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;

  static size_t chunk_count(size_t bytes) { return (bytes + kChunkBytes - 1) / kChunkBytes; }
  static size_t control_bytes(size_t bytes) { return kHeadBytes + chunk_count(bytes) * sizeof(ChunkWords); }

  // Makes the pages present and writable (readable in a read-only mapping) with so many threads; huge: asks for huge
  // ones wherever the segment fills them. Throws std::system_error.
  void prefault(size_t threads, bool huge) const;

  size_t chunks() const { return chunk_count(bytes_); }
  size_t per_chunk() const { return kChunkBytes / item_; }
  Piece piece(size_t chunk, size_t offset, size_t count) const {
    const size_t first = std::max(offset, chunk * per_chunk());
    const size_t last = std::min(offset + count, (chunk + 1) * per_chunk());
    return {chunk, first, last - first};
  }

  ControlHead& head() const { return *static_cast<ControlHead*>(control_); }
  ChunkWords& words(size_t chunk) const {
    return reinterpret_cast<ChunkWords*>(static_cast<char*>(control_) + kHeadBytes)[chunk];
  }
  char* at(size_t element) const { return static_cast<char*>(payload_) + element * item_; }
  size_t item() const { return item_; }
  size_t bytes() const { return bytes_; }
  bool readonly() const { return readonly_; }
  bool overlaps(const void* data, size_t bytes) const;

  // Counts one finished update and wakes those who wait for it; returns the version after it.
  uint64_t count_update() const;
  // Sleeps until the version is at least wanted or for_ns have passed; may return early. No watcher's
  // mark can be left in a read-only mapping, so there it polls.
  void await_version(uint64_t wanted, int64_t for_ns) const;

  // Marks the chunk as being written; finish_write makes it whole again. Also mends a word that a dead
  // writer left odd. The caller holds the chunk's lock.
  void begin_write(size_t chunk) const;
  void finish_write(size_t chunk) const;

 private:
  void* control_ = nullptr;
  void* payload_ = nullptr;
  size_t bytes_;
  size_t item_;
  bool readonly_;
};

// Locks that dead owners left and sequence words left odd are set right; returns how many chunks.
// gone(tid) says whether a thread that holds a lock is dead for certain.
template <class Gone>
size_t repair(const Region& region, const Gone& gone) {
  size_t mended = 0;
  ThreadIdentity& me = this_thread();
  for (size_t k = 0; k < region.chunks(); ++k) {
    ChunkWords& words = region.words(k);
    uint32_t seen = words.lock.load(std::memory_order_relaxed);
    const uint32_t owner = owner_of(seen);
    const bool left_odd = words.sequence.load(std::memory_order_acquire) & 1;
    if (owner == 0 && !left_odd && !(seen & FUTEX_OWNER_DIED)) continue;
    if (owner != 0) {
      if (!gone(owner)) continue;
      // The kernel could not mark it (its page was unmapped first, or the word is forged): do it.
      const uint32_t died = (seen & FUTEX_WAITERS) | FUTEX_OWNER_DIED;
      if (!words.lock.compare_exchange_strong(seen, died)) continue;
    }
    if (!lock_try(words.lock, me)) continue;
    if (words.sequence.load(std::memory_order_relaxed) & 1) {
      region.begin_write(k);
      region.finish_write(k);
    }
    unlock(words.lock, me);
    ++mended;
  }
  return mended;
}

}  // namespace smb
