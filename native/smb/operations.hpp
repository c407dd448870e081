// The operations on a segment as passes. All ranges were checked by the caller.
#pragma once

#include <cstdint>

#include "passes.hpp"

namespace smb {

// One chunk's worth of memory of the calling thread's own.
char* chunk_scratch();
// Copies elements [begin, begin + count), whole per chunk, with a few retries; false when a writer was at one of them.
bool copy_pieces(const Region& source, size_t begin, size_t count, char* out);

// Takes a chunk's lock, or says false within microseconds.
bool lock_soon(Word& lock, ThreadIdentity& me);

// A write under the chunk's lock.
class LockedPass : public Pass {
 public:
  using Pass::Pass;
  Turn attempt(const Piece& piece, Ahead* ahead) final;
  Turn insist(const Piece& piece, int64_t deadline) final;

 protected:
  virtual void move(const Piece& piece, Ahead* ahead) = 0;

 private:
  Turn finish(const Piece& piece, Ahead* ahead, ThreadIdentity& me);
};

class WritePass final : public LockedPass {
 public:
  WritePass(const Region& region, size_t offset, size_t count, const void* source);
  bool repeatable() const override { return true; }

 private:
  void move(const Piece& piece, Ahead* ahead) override;
  const char* source_;
  bool stream_;
};

class ExchangePass final : public LockedPass {
 public:
  ExchangePass(const Region& region, size_t offset, size_t count, float* local, float alpha);
  Turn prepare(const Piece& piece, size_t* bad) override;
  bool ordered() const override { return true; }
  bool repeatable() const override { return true; }

 private:
  void move(const Piece& piece, Ahead* ahead) override;
  float* local_;
  float alpha_;
};

class AccumulatePass final : public LockedPass {
 public:
  AccumulatePass(const Region& region, size_t offset, size_t count, const float* source, float scale);
  Turn prepare(const Piece& piece, size_t* bad) override;
  bool ordered() const override { return true; }
  bool repeatable() const override { return true; }

 private:
  void move(const Piece& piece, Ahead* ahead) override;
  const float* source_;
  float scale_;
};

// Accumulates another segment, from its element 0 on: each piece is first copied out of it, whole per chunk.
class AccumulateSegmentPass final : public LockedPass {
 public:
  AccumulateSegmentPass(const Region& region, size_t offset, size_t count, const Region& source, float scale);
  Turn prepare(const Piece& piece, size_t* bad) override;
  bool ordered() const override { return true; }

 private:
  void move(const Piece& piece, Ahead* ahead) override;
  const Region& source_;
  float scale_;
};

// A read without a lock: copies, and copies again when a writer was at the chunk meanwhile.
class ReadPass final : public Pass {
 public:
  // settle_for_torn: where a dead writer left a chunk half-written, take it as it is.
  ReadPass(const Region& region, size_t offset, size_t count, void* out, bool settle_for_torn = false);
  bool repeatable() const override { return true; }
  Turn attempt(const Piece& piece, Ahead* ahead) override;
  Turn insist(const Piece& piece, int64_t deadline) override;
  size_t torn() const { return torn_; }

 private:
  char* out_;
  bool stream_;
  bool settle_for_torn_;
  size_t torn_ = 0;
};

}  // namespace smb
