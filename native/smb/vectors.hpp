// Vector operations on segments where they lie, as passes. All ranges were checked by the caller.
#pragma once

#include <memory>
#include <vector>

#include "kernels.hpp"
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

// A look at a gradient in another segment, so that nothing moves where part of it is no number.
class GradientLook final : public Pass {
 public:
  GradientLook(const Region& region, size_t offset, size_t count, const Region& gradient, float scale)
      : Pass(region, offset, count), gradient_(gradient), scale_(scale) {}
  Turn prepare(const Piece& piece, size_t* bad) override;
  bool ordered() const override { return true; }
  bool moves() const override { return false; }
  Turn attempt(const Piece&, Ahead*) override { return Turn::done; }
  Turn insist(const Piece&, int64_t) override { return Turn::done; }

 private:
  const Region& gradient_;
  float scale_;
};

// Adagrad's step: sums += g^2, then region -= rate g / (sqrt(sums) + epsilon), chunk by chunk. The same elements of three
// segments belong together. One lock at a time: the chunk of the sums is left before the region's is taken, and what
// came out of it is kept meanwhile.
class AdagradPass final : public Pass {
 public:
  AdagradPass(const Region& region, size_t offset, size_t count, const Region& sums, const Region& gradient,
              const Adagrad& how);
  Turn prepare(const Piece& piece, size_t* bad) override;
  bool ordered() const override { return true; }
  Turn attempt(const Piece& piece, Ahead* ahead) override;
  Turn insist(const Piece& piece, int64_t deadline) override;

 private:
  template <class Take>
  Turn move(const Piece& piece, const Take& take);
  std::unique_ptr<float[]>& kept(const Piece& piece) { return kept_[piece.chunk - first_chunk()]; }
  const Region& sums_;
  const Region& gradient_;
  const Adagrad how_;
  std::vector<std::unique_ptr<float[]>> kept_;  // steps that the sums know and the region has yet to make
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
