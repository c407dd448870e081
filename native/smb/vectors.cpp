#include "vectors.hpp"

#include <memory>

#include "kernels.hpp"

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
