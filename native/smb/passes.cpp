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
      : pass_(pass),
        threads_(threads),
        next_(pass.first_chunk()),
        passed_(pass.ordered() ? pass.end_chunk() - pass.first_chunk() : 0) {}

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
  // Takes chunks in ascending order; the check of the next one goes along with the move of this one. One that somebody
  // else is at is passed over and done when it is found free: no time is lost, whether its holder works or lies still.
  void work() {
    size_t clear = pass_.first_chunk();  // all before it have passed their checks, as far as this thread knows
    std::vector<size_t> busy;
    Ahead now = claim(), next, after;
    while (now.piece.count != 0) {
      const Turn checked = now.fine ? Turn::done : check(now.piece);
      if (!await_turn(now.piece.chunk, clear)) break;
      if (next.piece.count == 0) next = claim();
      if (after_is_wanted(next)) after = claim();
      next.then = &after;
      const bool pass_over = next.piece.count != 0 && pass_.repeatable() && held(now.piece.chunk);
      if (checked == Turn::busy || pass_over || !attempt(now.piece, &next)) busy.push_back(now.piece.chunk);
      if (pass_.repeatable()) revisit(busy, next);
      now = next;
      next = after;
      after = {};
    }
    defer(busy);
  }

  bool held(size_t chunk) const {
    return owner_of(pass_.region.words(chunk).lock.load(std::memory_order_relaxed)) != 0;
  }

  // Whether the piece after next will be needed early, checked: next may still be held when its turn comes.
  bool after_is_wanted(const Ahead& next) const {
    return next.piece.count != 0 && pass_.ordered() && pass_.repeatable() && held(next.piece.chunk);
  }

  bool attempt(const Piece& piece, Ahead* ahead) {
    if (pass_.attempt(piece, ahead) != Turn::done) return false;
    moved_.fetch_add(1, std::memory_order_relaxed);
    return true;
  }

  // Does those of the chunks, all of them checked, that are free by now.
  void revisit(std::vector<size_t>& busy, Ahead& next) {
    const auto done = [&](size_t chunk) { return !held(chunk) && attempt(pass_.piece(chunk), &next); };
    busy.erase(std::remove_if(busy.begin(), busy.end(), done), busy.end());
  }

  // The next piece that nobody has; an empty one when there is none, or none that will be moved.
  Ahead claim() {
    if (bad_chunk_.load(std::memory_order_relaxed) != kNone) return {};
    const size_t chunk = next_.fetch_add(1, std::memory_order_relaxed);
    if (chunk >= pass_.end_chunk()) return {};
    return {pass_.piece(chunk), pass_.ordered() ? &passed(chunk) : nullptr};
  }

  std::atomic<bool>& passed(size_t chunk) { return passed_[chunk - pass_.first_chunk()]; }

  // The check of a piece, and what follows from it for all threads.
  Turn check(const Piece& piece) {
    size_t bad = 0;
    const Turn checked = pass_.prepare(piece, &bad);
    if (!pass_.ordered()) return checked;
    if (checked == Turn::refused) {
      stop_at(piece.chunk, bad);
    } else {
      passed(piece.chunk).store(true, std::memory_order_release);
    }
    return checked;
  }

  // Void when somebody else has passed the chunk meanwhile: then it may have been moving under the check.
  void stop_at(size_t chunk, size_t bad) {
    const std::lock_guard<std::mutex> guard(mutex_);
    if (passed(chunk).load(std::memory_order_acquire) || bad_chunk_.load() <= chunk) return;
    bad_element_ = bad;
    bad_chunk_.store(chunk, std::memory_order_release);
  }

  // Waits until the chunk and every earlier one have passed their checks, so that at a bad one nothing later has
  // moved. clear is what the caller knows of them. False: this chunk or an earlier one is bad.
  bool await_turn(size_t chunk, size_t& clear) {
    if (!pass_.ordered()) return true;
    for (int spins = 0;; ++spins) {
      while (clear <= chunk && passed(clear).load(std::memory_order_acquire)) ++clear;
      if (clear > chunk) return true;
      if (bad_chunk_.load(std::memory_order_acquire) <= chunk) return false;
      if (spins <= kTurnSpins) {
        pause();
      } else if (pass_.repeatable()) {
        check(pass_.piece(clear));  // its thread is late: it may have lost its processor
      } else {
        sched_yield();
      }
    }
  }

  void defer(const std::vector<size_t>& busy) {
    if (busy.empty()) return;
    const std::lock_guard<std::mutex> guard(mutex_);
    deferred_.insert(deferred_.end(), busy.begin(), busy.end());
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

  // One round over the deferred chunks: those that are free are done; where none is, the first is waited for, and goes
  // last if in vain. False: one was refused.
  bool sweep(Outcome& outcome) {
    std::vector<size_t> left;
    for (const size_t chunk : deferred_) {
      const Turn turn = held(chunk) ? Turn::busy : settle(chunk, false, outcome);
      if (turn == Turn::refused) return false;
      if (turn != Turn::done) left.push_back(chunk);
    }
    if (left.size() == deferred_.size()) {
      const Turn turn = settle(left.front(), true, outcome);
      if (turn == Turn::refused) return false;
      if (turn != Turn::done) left.push_back(left.front());
      left.erase(left.begin());
    }
    deferred_ = left;
    return true;
  }

  // Does a deferred chunk; checks it before, unless what its check found still holds.
  Turn settle(size_t chunk, bool wait, Outcome& outcome) {
    const Piece piece = pass_.piece(chunk);
    size_t bad = 0;
    const bool checked = pass_.repeatable() && (!pass_.ordered() || passed(chunk).load(std::memory_order_relaxed));
    Turn turn = checked ? Turn::done : pass_.prepare(piece, &bad);
    if (turn == Turn::refused) outcome = {Outcome::refused, chunk, bad, moved_.load()};
    if (turn != Turn::done) return turn;
    turn = wait ? pass_.insist(piece, monotonic_ns() + kSliceNs) : pass_.attempt(piece, nullptr);
    if (turn == Turn::done) moved_.fetch_add(1, std::memory_order_relaxed);
    return turn;
  }

  Pass& pass_;
  const size_t threads_;
  std::atomic<size_t> next_;
  std::vector<std::atomic<bool>> passed_;  // which chunks' checks found nothing
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
