#include "operations.hpp"

#include <time.h>

#include <memory>
#include <new>

#include "common/pause.hpp"
#include "common/racy.hpp"
#include "kernels.hpp"

namespace smb {
namespace {

// Where there is nothing else to do: longer than a small operation holds a chunk.
constexpr int kLockSpins = 200;
constexpr int kReadTries = 3;
constexpr int64_t kReadPauseNs = 50000;
constexpr int64_t kReaderLocksNs = 5000000;

// Copies elements [begin, begin + count), all in one chunk, if no writer is at it. The copy may be garbage
// unless this returns true.
bool copy_whole(const Region& region, size_t begin, size_t count, void* out, bool stream) {
  Word& sequence = region.words(begin / region.per_chunk()).sequence;
  const uint32_t before = sequence.load(std::memory_order_acquire);
  if (before & 1) return false;
  (stream ? stream_bytes : copy_bytes)(out, region.at(begin), count * region.item());
  return racy::settle(sequence) == before;
}

// A chunk that is marked as being written though nobody holds it was left by a dead writer: the next holder
// makes it even, and a reader that may write is as good a holder as any.
void mend_orphan(const Region& region, size_t chunk) {
  ChunkWords& words = region.words(chunk);
  if (region.readonly() || !(words.sequence.load(std::memory_order_acquire) & 1)) return;
  ThreadIdentity& me = this_thread();
  if (owner_of(words.lock.load(std::memory_order_acquire)) != 0 || !lock_try(words.lock, me)) return;
  if (words.sequence.load(std::memory_order_relaxed) & 1) {
    region.begin_write(chunk);
    region.finish_write(chunk);
  }
  unlock(words.lock, me);
}

bool copy_with_retries(const Region& region, size_t begin, size_t count, void* out, bool stream) {
  for (int i = 0; i < kReadTries; ++i) {
    if (copy_whole(region, begin, count, out, stream)) return true;
    mend_orphan(region, begin / region.per_chunk());
  }
  return false;
}

void nap() {
  const timespec length{0, kReadPauseNs};
  nanosleep(&length, nullptr);
}

float* scratch() { return reinterpret_cast<float*>(chunk_scratch()); }

Turn check(const float* values, float scale, const Piece& piece, size_t* bad) {
  const size_t at = first_nonfinite_f32(values, scale, piece.count);
  if (at == piece.count) return Turn::done;
  *bad = piece.begin + at;
  return Turn::refused;
}

// Moves what it takes to look at what is ahead, one piece or two at once; returns how many elements have moved.
// Only a look at all of a piece is of use: chunks but the first and the last are of one length.
template <class MoveLooking>
size_t move_looking(const Piece& piece, Ahead* ahead, const MoveLooking& move) {
  const auto wanted = [&](const Ahead* one) { return one && one->piece.count && !one->fine; };
  while (ahead && !wanted(ahead)) ahead = ahead->then;
  if (!ahead || ahead->piece.count > piece.count) return 0;
  const size_t count = ahead->piece.count;
  Ahead* further = wanted(ahead->then) && ahead->then->piece.count == count ? ahead->then : nullptr;
  const bool fine = move(count, ahead->piece, further ? &further->piece : nullptr);
  ahead->looked(fine);
  if (further) further->looked(fine);
  return count;
}

}  // namespace

bool lock_soon(Word& lock, ThreadIdentity& me) {
  for (int i = 0;; ++i) {
    if (owner_of(lock.load(std::memory_order_relaxed)) == 0 && lock_try(lock, me)) return true;
    if (i == kLockSpins) return false;
    pause();
  }
}

char* chunk_scratch() {
  struct Free {
    void operator()(void* p) const { ::operator delete[](p, std::align_val_t{64}); }
  };
  thread_local std::unique_ptr<void, Free> buffer;
  if (!buffer) buffer.reset(::operator new[](kChunkBytes, std::align_val_t{64}));
  return static_cast<char*>(buffer.get());
}

bool copy_pieces(const Region& source, size_t begin, size_t count, char* out) {
  for (size_t done = 0; done < count;) {
    const size_t border = (begin / source.per_chunk() + 1) * source.per_chunk();
    const size_t length = std::min(count - done, border - begin);
    if (!copy_with_retries(source, begin, length, out + done * source.item(), false)) return false;
    begin += length;
    done += length;
  }
  return true;
}

Turn LockedPass::finish(const Piece& piece, Ahead* ahead, ThreadIdentity& me) {
  region.begin_write(piece.chunk);
  move(piece, ahead);
  region.finish_write(piece.chunk);
  unlock(region.words(piece.chunk).lock, me);
  return Turn::done;
}

Turn LockedPass::attempt(const Piece& piece, Ahead* ahead) {
  ThreadIdentity& me = this_thread();
  return lock_soon(region.words(piece.chunk).lock, me) ? finish(piece, ahead, me) : Turn::busy;
}

Turn LockedPass::insist(const Piece& piece, int64_t deadline) {
  ThreadIdentity& me = this_thread();
  return lock_until(region.words(piece.chunk).lock, me, deadline) ? finish(piece, nullptr, me) : Turn::busy;
}

WritePass::WritePass(const Region& region, size_t offset, size_t count, const void* source)
    : LockedPass(region, offset, count),
      source_(static_cast<const char*>(source)),
      stream_(count * region.item() >= kStreamBytes) {}

void WritePass::move(const Piece& piece, Ahead*) {
  const char* from = source_ + at(piece) * region.item();
  (stream_ ? stream_bytes : copy_bytes)(region.at(piece.begin), from, piece.count * region.item());
}

ExchangePass::ExchangePass(const Region& region, size_t offset, size_t count, float* local, float alpha)
    : LockedPass(region, offset, count), local_(local), alpha_(alpha) {}

Turn ExchangePass::prepare(const Piece& piece, size_t* bad) {
  return check(local_ + at(piece), 1.0f, piece, bad);
}

void ExchangePass::move(const Piece& piece, Ahead* ahead) {
  float* center = reinterpret_cast<float*>(region.at(piece.begin));
  float* local = local_ + at(piece);
  const size_t done = move_looking(piece, ahead, [&](size_t n, const Piece& next, const Piece* further) {
    return exchange_looking_f32(local, center, alpha_, n, local_ + at(next), further ? local_ + at(*further) : nullptr);
  });
  exchange_f32(local + done, center + done, alpha_, piece.count - done);
}

AccumulatePass::AccumulatePass(const Region& region, size_t offset, size_t count, const float* source, float scale)
    : LockedPass(region, offset, count), source_(source), scale_(scale) {}

Turn AccumulatePass::prepare(const Piece& piece, size_t* bad) {
  return check(source_ + at(piece), scale_, piece, bad);
}

void AccumulatePass::move(const Piece& piece, Ahead* ahead) {
  float* target = reinterpret_cast<float*>(region.at(piece.begin));
  const float* source = source_ + at(piece);
  const size_t done = move_looking(piece, ahead, [&](size_t n, const Piece& next, const Piece* further) {
    const float* last = further ? source_ + at(*further) : nullptr;
    return accumulate_looking_f32(target, source, scale_, n, source_ + at(next), last);
  });
  accumulate_f32(target + done, source + done, scale_, piece.count - done);
}

AccumulateSegmentPass::AccumulateSegmentPass(const Region& region, size_t offset, size_t count, const Region& source,
                                             float scale)
    : LockedPass(region, offset, count), source_(source), scale_(scale) {}

Turn AccumulateSegmentPass::prepare(const Piece& piece, size_t* bad) {
  if (!copy_pieces(source_, piece.begin - offset, piece.count, chunk_scratch())) return Turn::busy;
  return check(scratch(), scale_, piece, bad);
}

void AccumulateSegmentPass::move(const Piece& piece, Ahead*) {
  accumulate_f32(reinterpret_cast<float*>(region.at(piece.begin)), scratch(), scale_, piece.count);
}

ReadPass::ReadPass(const Region& region, size_t offset, size_t count, void* out, bool settle_for_torn)
    : Pass(region, offset, count),
      out_(static_cast<char*>(out)),
      stream_(count * region.item() >= kStreamBytes),
      settle_for_torn_(settle_for_torn) {}

Turn ReadPass::attempt(const Piece& piece, Ahead*) {
  char* to = out_ + at(piece) * region.item();
  return copy_with_retries(region, piece.begin, piece.count, to, stream_) ? Turn::done : Turn::busy;
}

// Where writers leave no gap, a reader that may write queues for the lock; one that may not goes on trying.
Turn ReadPass::insist(const Piece& piece, int64_t deadline) {
  ThreadIdentity& me = this_thread();
  Word& lock = region.words(piece.chunk).lock;
  char* to = out_ + at(piece) * region.item();
  const int64_t lock_at = deadline - kReaderLocksNs;
  do {
    if (attempt(piece, nullptr) == Turn::done) return Turn::done;
    if (!region.readonly() && monotonic_ns() >= lock_at && lock_until(lock, me, deadline)) {
      copy_bytes(to, region.at(piece.begin), piece.count * region.item());
      unlock(lock, me);
      return Turn::done;
    }
    nap();
  } while (monotonic_ns() < deadline);
  if (!settle_for_torn_ || owner_of(lock.load(std::memory_order_relaxed)) != 0) return Turn::busy;
  copy_bytes(to, region.at(piece.begin), piece.count * region.item());
  ++torn_;
  return Turn::done;
}

}  // namespace smb
