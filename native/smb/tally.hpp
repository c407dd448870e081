// What the clients of a segment did there, told by themselves: a line a session in the control file's head page.
// The daemon reads it for `smb top`; as everything in a mapping, it is no more than numbers to look at.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "region.hpp"

namespace smb {

struct alignas(64) TallyLine {
  std::atomic<uint64_t> session;  // 0: free
  std::atomic<uint64_t> operations;
  std::atomic<uint64_t> bytes_in;   // into the segment
  std::atomic<uint64_t> bytes_out;  // out of it
  std::atomic<uint64_t> stale;      // updates by others between the last two exchanges, plus 1; 0: none yet
};

constexpr size_t kTallyLines = (kHeadBytes - sizeof(ControlHead)) / sizeof(TallyLine);
static_assert(sizeof(TallyLine) == 64 && kTallyLines >= 60);

inline TallyLine& tally_line(const Region& region, size_t index) {
  return reinterpret_cast<TallyLine*>(reinterpret_cast<char*>(&region.head()) + sizeof(ControlHead))[index];
}

// A mapping's own line, when it has one. Any thread; the numbers may be a little behind one another.
class Tally {
 public:
  // Takes the session's line, or a free one; false where there is none or the mapping is read-only.
  bool claim(const Region& region, uint64_t session) {
    index_ = kTallyLines;
    if (region.readonly() || session == 0) return false;
    session_ = session;
    index_ = find(region, session);
    for (size_t i = 0; i < kTallyLines && index_ == kTallyLines; ++i) {
      uint64_t free = 0;
      if (tally_line(region, i).session.compare_exchange_strong(free, session)) index_ = i;
    }
    seen_.store(region.head().version.load());
    return index_ < kTallyLines;
  }

  // So many bytes went into the segment and out of it.
  void moved(const Region& region, size_t in, size_t out) {
    TallyLine* line = mine(region);
    if (line == nullptr) return;
    line->operations.fetch_add(1, std::memory_order_relaxed);
    if (in) line->bytes_in.fetch_add(in, std::memory_order_relaxed);
    if (out) line->bytes_out.fetch_add(out, std::memory_order_relaxed);
  }

  // An update of ours was counted as this version.
  void updated() { seen_.fetch_add(1, std::memory_order_relaxed); }

  // The same of an exchange: the updates since ours before it are others'.
  void exchanged(const Region& region, uint64_t version) {
    const uint64_t since = version - seen_.exchange(version, std::memory_order_relaxed);
    TallyLine* line = mine(region);
    if (line) line->stale.store(std::min<uint64_t>(std::max<uint64_t>(since, 1), kMost), std::memory_order_relaxed);
  }

  // The daemon's: the line of a session that is over or detached is free again.
  static void forget(const Region& region, uint64_t session) {
    const size_t index = find(region, session);
    if (region.readonly() || session == 0 || index == kTallyLines) return;
    TallyLine& line = tally_line(region, index);
    for (auto* number : {&line.operations, &line.bytes_in, &line.bytes_out, &line.stale}) number->store(0);
    line.session.store(0);
  }

 private:
  static size_t find(const Region& region, uint64_t session) {
    for (size_t i = 0; i < kTallyLines; ++i) {
      if (tally_line(region, i).session.load(std::memory_order_relaxed) == session) return i;
    }
    return kTallyLines;
  }

  // Its line, as long as the daemon has not given it to somebody else and the memory is the same.
  TallyLine* mine(const Region& region) const {
    if (index_ == kTallyLines) return nullptr;
    TallyLine& line = tally_line(region, index_);
    return line.session.load(std::memory_order_relaxed) == session_ ? &line : nullptr;
  }

  static constexpr uint64_t kMost = uint64_t{1} << 62;

  size_t index_ = kTallyLines;  // in private memory: not to be had from the mapping
  uint64_t session_ = 0;
  std::atomic<uint64_t> seen_{0};
};

}  // namespace smb
