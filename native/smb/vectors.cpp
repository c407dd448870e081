#include "vectors.hpp"

#include <algorithm>

namespace smb {
namespace {

constexpr size_t kFloats = kChunkBytes / sizeof(float);

struct alignas(64) Scratch {
  float x[kFloats];
  float y[kFloats];
};

Scratch& own() {
  thread_local std::unique_ptr<Scratch> scratch;
  if (!scratch) scratch.reset(new Scratch);  // not zeroed
  return *scratch;
}

}  // namespace

void ScalePass::move(const Piece& piece, Ahead*) {
  scale_f32(reinterpret_cast<float*>(region.at(piece.begin)), factor_, piece.count);
}

void FillPass::move(const Piece& piece, Ahead*) {
  fill_f32(reinterpret_cast<float*>(region.at(piece.begin)), value_, piece.count);
}

Turn CopySegmentPass::prepare(const Piece& piece, size_t*) {
  return copy_pieces(source_, piece.begin - offset, piece.count, chunk_scratch()) ? Turn::done : Turn::busy;
}

void CopySegmentPass::move(const Piece& piece, Ahead*) {
  copy_bytes(region.at(piece.begin), chunk_scratch(), piece.count * region.item());
}

namespace {

float* scratch() { return reinterpret_cast<float*>(chunk_scratch()); }

Turn take_gradient(const Region& gradient, float scale, const Piece& piece, size_t* bad) {
  if (!copy_pieces(gradient, piece.begin, piece.count, chunk_scratch())) return Turn::busy;
  const size_t at = first_unsquarable_f32(scratch(), scale, piece.count);
  if (at == piece.count) return Turn::done;
  *bad = piece.begin + at;
  return Turn::refused;
}

}  // namespace

Turn GradientLook::prepare(const Piece& piece, size_t* bad) { return take_gradient(gradient_, scale_, piece, bad); }

AdagradPass::AdagradPass(const Region& region, size_t offset, size_t count, const Region& sums, const Region& gradient,
                         const Adagrad& how)
    : Pass(region, offset, count),
      sums_(sums),
      gradient_(gradient),
      how_(how),
      kept_(end_chunk() - first_chunk()) {}

Turn AdagradPass::prepare(const Piece& piece, size_t* bad) {
  return kept(piece) ? Turn::done : take_gradient(gradient_, how_.scale, piece, bad);
}

template <class Take>
Turn AdagradPass::move(const Piece& piece, const Take& take) {
  ThreadIdentity& me = this_thread();
  std::unique_ptr<float[]>& step = kept(piece);
  if (!step) {
    Word& lock = sums_.words(piece.chunk).lock;
    if (!take(lock, me)) return Turn::busy;
    sums_.begin_write(piece.chunk);
    adagrad_f32(reinterpret_cast<float*>(sums_.at(piece.begin)), scratch(), how_, piece.count);
    sums_.finish_write(piece.chunk);
    unlock(lock, me);
  }
  Word& lock = region.words(piece.chunk).lock;
  if (!take(lock, me)) {
    if (!step) {
      step.reset(new float[piece.count]);
      std::copy_n(scratch(), piece.count, step.get());
    }
    return Turn::busy;
  }
  region.begin_write(piece.chunk);
  accumulate_f32(reinterpret_cast<float*>(region.at(piece.begin)), step ? step.get() : scratch(), -1.0f, piece.count);
  region.finish_write(piece.chunk);
  unlock(lock, me);
  step.reset();
  return Turn::done;
}

Turn AdagradPass::attempt(const Piece& piece, Ahead*) { return move(piece, lock_soon); }

Turn AdagradPass::insist(const Piece& piece, int64_t deadline) {
  return move(piece, [=](Word& lock, ThreadIdentity& me) { return lock_until(lock, me, deadline); });
}

SumPass::SumPass(const Region& x, const Region* y, size_t count) : Pass(x, 0, count), y_(y), sums_(end_chunk()) {}

template <class Take>
Turn SumPass::add(const Piece& piece, const Take& take) {
  Scratch& scratch = own();
  if (take(region, scratch.x) != Turn::done) return Turn::busy;
  double& sum = sums_[piece.chunk];
  if (y_ == nullptr) {
    sum = sum_f32(scratch.x, piece.count);
  } else if (y_ == &region) {
    sum = dot_f32(scratch.x, scratch.x, piece.count);
  } else {
    if (take(*y_, scratch.y) != Turn::done) return Turn::busy;
    sum = dot_f32(scratch.x, scratch.y, piece.count);
  }
  return Turn::done;
}

Turn SumPass::attempt(const Piece& piece, Ahead*) {
  return add(piece, [&](const Region& from, float* to) {
    return ReadPass(from, piece.begin, piece.count, to).attempt(piece, nullptr);
  });
}

Turn SumPass::insist(const Piece& piece, int64_t deadline) {
  return add(piece, [&](const Region& from, float* to) {
    return ReadPass(from, piece.begin, piece.count, to).insist(piece, deadline);
  });
}

double SumPass::sum() const {
  double sum = 0;
  for (const double part : sums_) sum += part;
  return sum;
}

}  // namespace smb
