// Vector operations on segments where they lie, as passes. All ranges were checked by the caller.
#pragma once

#include <vector>

#include "operations.hpp"

namespace smb {

class ScalePass final : public LockedPass {
 public:
  ScalePass(const Region& region, size_t offset, size_t count, float factor)
      : LockedPass(region, offset, count), factor_(factor) {}

 private:
  void move(const Piece& piece, Ahead* ahead) override;
  float factor_;
};

class FillPass final : public LockedPass {
 public:
  FillPass(const Region& region, size_t offset, size_t count, float value)
      : LockedPass(region, offset, count), value_(value) {}

 private:
  void move(const Piece& piece, Ahead* ahead) override;
  float value_;
};

// Takes another segment's elements, from its element 0 on, whole per chunk of it.
class CopySegmentPass final : public LockedPass {
 public:
  CopySegmentPass(const Region& region, size_t offset, size_t count, const Region& source)
      : LockedPass(region, offset, count), source_(source) {}
  Turn prepare(const Piece& piece, size_t* bad) override;

 private:
  void move(const Piece& piece, Ahead* ahead) override;
  const Region& source_;
};

// The sum of x[i] y[i], or of x[i], over whole segments, in float64. Chunks are summed by themselves and their sums added
// in order: the same bits whatever the number of threads. Takes no lock; each chunk is whole.
class SumPass final : public Pass {
 public:
  // y: nullptr for the plain sum; may be x itself.
  SumPass(const Region& x, const Region* y, size_t count);
  Turn attempt(const Piece& piece, Ahead* ahead) override;
  Turn insist(const Piece& piece, int64_t deadline) override;
  double sum() const;

 private:
  template <class Take>
  Turn add(const Piece& piece, const Take& take);
  const Region* y_;
  std::vector<double> sums_;  // of each chunk
};

}  // namespace smb
