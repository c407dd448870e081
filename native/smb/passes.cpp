#include "passes.hpp"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <vector>

#include "common/pause.hpp"
#include "pool.hpp"

namespace smb {
namespace {

constexpr size_t kNone = SIZE_MAX;
constexpr int64_t kSliceNs = 10000000;
constexpr int kTurnSpins = 500;  // about 20 us, half the time of a chunk

class Run {
 public:
  Run(Pass& pass, size_t threads)
      : pass_(pass), threads_(threads), next_(pass.first_chunk()), cleared_(pass.first_chunk()) {}

  Outcome go(const StillWaiting& still_waiting) {
    run_parts(std::min(threads_, pass_.end_chunk() - pass_.first_chunk()), [this](size_t) { work(); });
    Outcome outcome;
    if (!catch_up(still_waiting, outcome)) return outcome;
    outcome.moved = moved_.load();
    if (bad_chunk_.load() != kNone) {
      outcome.kind = Outcome::refused;
      outcome.chunk = bad_chunk_.load();
      outcome.element = bad_element_;
    }
    return outcome;
  }

 private:
  // Takes chunks in ascending order; the check of the next one goes along with the move of this one.
  void work() {
    Ahead now = {claim()};
    while (now.piece.count != 0 && now.piece.chunk < bad_chunk_.load(std::memory_order_relaxed)) {
      size_t bad = 0;
      const Turn checked = now.fine ? Turn::done : pass_.prepare(now.piece, &bad);
      if (!take_turn(now.piece.chunk, checked, bad)) return;
      Ahead next = {claim()};
      if (checked != Turn::busy && pass_.attempt(now.piece, next.piece.count ? &next : nullptr) == Turn::done) {
        moved_.fetch_add(1, std::memory_order_relaxed);
      } else {
        defer(now.piece.chunk);
      }
      now = next;
    }
  }

  // The next piece that nobody has; an empty one when there is none.
  Piece claim() {
    const size_t chunk = next_.fetch_add(1, std::memory_order_relaxed);
    return chunk < pass_.end_chunk() ? pass_.piece(chunk) : Piece{chunk, 0, 0};
  }

  // Waits until every earlier chunk has passed its check, so that at a bad one nothing later has moved.
  // checked is what the caller found at this one. False: this chunk or an earlier one is bad.
  bool take_turn(size_t chunk, Turn checked, size_t bad) {
    if (!pass_.ordered()) return true;
    for (int spins = 0;; ++spins) {
      const size_t cleared = cleared_.load(std::memory_order_acquire);
      if (cleared > chunk) return true;
      if (bad_chunk_.load(std::memory_order_acquire) <= chunk) return false;
      if (cleared == chunk) {
        settle(chunk, checked, bad);
      } else if (spins > kTurnSpins) {
        help(cleared);
      } else {
        pause();
      }
    }
  }

  // Makes a check whose thread has it coming but is late: it may have lost its processor.
  void help(size_t chunk) {
    if (!pass_.repeatable()) {
      sched_yield();
      return;
    }
    size_t bad = 0;
    const Turn checked = pass_.prepare(pass_.piece(chunk), &bad);
    settle(chunk, checked, bad);
  }

  // What a check of the first chunk not yet cleared came to. Void when somebody else has cleared it
  // meanwhile: then the chunk may have been moving under the check.
  void settle(size_t chunk, Turn checked, size_t bad) {
    if (checked != Turn::refused) {
      cleared_.compare_exchange_strong(chunk, chunk + 1, std::memory_order_acq_rel);
      return;
    }
    const std::lock_guard<std::mutex> guard(mutex_);
    if (cleared_.load(std::memory_order_acquire) != chunk) return;
    bad_element_ = bad;
    bad_chunk_.store(chunk, std::memory_order_release);
  }

  void defer(size_t chunk) {
    const std::lock_guard<std::mutex> guard(mutex_);
    deferred_.push_back(chunk);
  }

  // The chunks that were busy, in turn until all are done; false when given up.
  bool catch_up(const StillWaiting& still_waiting, Outcome& outcome) {
    int64_t since = monotonic_ns();
    std::sort(deferred_.begin(), deferred_.end());
    while (!deferred_.empty()) {
      const size_t before = deferred_.size();
      if (!sweep(outcome)) return false;
      if (deferred_.size() < before) {
        since = monotonic_ns();
        continue;
      }
      const size_t chunk = deferred_.back();  // the one that was waited for
      const uint32_t owner = owner_of(pass_.region.words(chunk).lock.load(std::memory_order_relaxed));
      const double seconds = static_cast<double>(monotonic_ns() - since) * 1e-9;
      if (still_waiting(chunk, owner, seconds)) continue;
      outcome = {Outcome::gave_up, chunk, 0, moved_.load()};
      return false;
    }
    return true;
  }

  // One round over the deferred chunks: the first is waited for and goes last if in vain; the others are tried.
  bool sweep(Outcome& outcome) {
    std::vector<size_t> left;
    bool waited = false;
    for (const size_t chunk : deferred_) {
      const Piece piece = pass_.piece(chunk);
      size_t bad = 0;
      Turn turn = pass_.prepare(piece, &bad);
      if (turn == Turn::refused) {
        outcome = {Outcome::refused, chunk, bad, moved_.load()};
        return false;
      }
      if (turn == Turn::done) {
        turn = waited ? pass_.attempt(piece, nullptr) : pass_.insist(piece, monotonic_ns() + kSliceNs);
      }
      waited = true;
      if (turn == Turn::done) {
        moved_.fetch_add(1, std::memory_order_relaxed);
      } else {
        left.push_back(chunk);
      }
    }
    if (!left.empty() && left.front() == deferred_.front()) std::rotate(left.begin(), left.begin() + 1, left.end());
    deferred_ = left;
    return true;
  }

  Pass& pass_;
  const size_t threads_;
  std::atomic<size_t> next_;
  std::atomic<size_t> cleared_;
  std::atomic<size_t> bad_chunk_{kNone};
  size_t bad_element_ = 0;
  std::atomic<size_t> moved_{0};
  std::mutex mutex_;
  std::vector<size_t> deferred_;
};

}  // namespace

Outcome run_pass(Pass& pass, size_t threads, const StillWaiting& still_waiting) {
  return Run(pass, threads).go(still_waiting);
}

bool run_quickly(Pass& pass, Outcome& outcome) {
  const Piece piece = pass.piece(pass.first_chunk());
  size_t bad = 0;
  const Turn checked = pass.prepare(piece, &bad);
  if (checked == Turn::refused) {
    outcome = {Outcome::refused, piece.chunk, bad, 0};
    return true;
  }
  if (checked == Turn::busy || pass.attempt(piece, nullptr) != Turn::done) return false;
  outcome = {Outcome::done, 0, 0, 1};
  return true;
}

}  // namespace smb
