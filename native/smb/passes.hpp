// One operation on a range of a segment, chunk by chunk: the order of checks and moves, and the waiting.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>

#include "region.hpp"
#include "stripe.hpp"

namespace smb {

// What a chunk's turn came to.
enum class Turn { done, busy, refused };

// A piece that a thread does next: whoever moves memory now may look at it, and at the one after it, on the way.
struct Ahead {
  Piece piece{};                        // empty: none
  std::atomic<bool>* passed = nullptr;  // where other threads look for what follows
  bool fine = false;  // looked at, and all of its values may be moved; otherwise it has yet to be prepared
  Ahead* then = nullptr;

  void looked(bool all_finite) {
    fine = all_finite;
    if (fine && passed) passed->store(true, std::memory_order_release);
  }
};

// An operation. Several threads may be in prepare/attempt of different chunks at once.
class Pass {
 public:
  Pass(const Region& region, size_t offset, size_t count) : region(region), offset(offset), count(count) {}
  virtual ~Pass() = default;

  // Looks at the caller's values for a piece before anything is moved. refused: *bad says which element of
  // the segment. Prepared in order: no chunk moves before all earlier ones have passed.
  virtual Turn prepare(const Piece&, size_t* bad) {
    static_cast<void>(bad);
    return Turn::done;
  }
  virtual bool ordered() const { return false; }
  // Whether prepare looks at the caller's own values alone: any thread may do so, and what it found holds until the
  // piece's turn comes.
  virtual bool repeatable() const { return false; }
  // Whether what is done to a piece changes anything.
  virtual bool moves() const { return true; }
  // Does the piece, or says busy within microseconds. ahead may be nullptr.
  virtual Turn attempt(const Piece&, Ahead* ahead) = 0;
  // The same, waiting until the deadline. Called by one thread alone.
  virtual Turn insist(const Piece&, int64_t deadline) = 0;

  // From now on the region is a stripe of a larger segment, and the caller's array begins at element `from` of
  // that: its pieces lie apart by the chunks of the other stripes.
  void spread(const Stripe& stripe, size_t from) {
    stripe_ = stripe;
    from_ = from;
  }
  // Where a piece begins in the caller's array; where the caller's array begins in the (larger) segment.
  size_t at(const Piece& piece) const {
    if (stripe_.of == 1) return piece.begin - offset;  // a division less in the smallest operations
    return stripe_.whole_index(piece.begin, region.per_chunk()) - from_;
  }
  size_t from() const { return stripe_.of == 1 ? offset : from_; }
  const Stripe& stripe() const { return stripe_; }

  Piece piece(size_t chunk) const { return region.piece(chunk, offset, count); }
  size_t first_chunk() const { return offset / region.per_chunk(); }
  size_t end_chunk() const { return (offset + count - 1) / region.per_chunk() + 1; }

  const Region& region;
  const size_t offset;  // in elements
  const size_t count;   // at least 1

 private:
  Stripe stripe_;
  size_t from_ = 0;
};

// Asked from the calling thread while it waits, some 100 times a second; false gives up.
// owner is the thread that holds the lock (0: nobody, the chunk was left half-written).
using StillWaiting = std::function<bool(size_t chunk, uint32_t owner, double seconds)>;

struct Outcome {
  enum Kind { done, refused, gave_up } kind = done;
  size_t chunk = 0;    // refused, gave_up: where
  size_t element = 0;  // refused: index in the segment
  size_t moved = 0;    // chunks that the operation was done on
};

// Runs the pass with up to so many threads. A busy chunk is left for later: the others go first.
Outcome run_pass(Pass& pass, size_t threads, const StillWaiting& still_waiting);

// The short way for a pass of one chunk: true when it is settled (outcome says how), false when busy.
bool run_quickly(Pass& pass, Outcome& outcome);

}  // namespace smb
