// What a piece does to its chunk, beyond the passes of the mapping.
#pragma once

#include <cstdint>

#include "line.hpp"
#include "smb/operations.hpp"

namespace smb::net {

// What goes through a segment waits for the address of each of its 4 KiB pages: these are asked for beforehand, and
// with each so many lines at its begin, from which the hardware goes on (the kernel copies 64 MiB in 8.3 ms instead of
// 9.5, and an exchange of a whole piece takes a twentieth less).
void fetch_pages(const char* data, size_t bytes, size_t lines);

// Elements that the kernel holds already, all of them: they can go straight to where they belong.
struct Arrival {
  const Line& line;
  bool taken = false;   // they were received
  bool broken = false;  // not all of them: what the kernel said to have it did not give
};

// A write without a copy in between. Holds the lock no longer than a writer that copies.
class ArrivalPass final : public LockedPass {
 public:
  ArrivalPass(const Region& region, size_t offset, size_t count, Arrival& arrival)
      : LockedPass(region, offset, count), arrival_(arrival) {}

 private:
  void move(const Piece& piece, Ahead* ahead) override;
  Arrival& arrival_;
};

// d = alpha (x - g); g += d, and d takes x's place.
class PushPass final : public LockedPass {
 public:
  PushPass(const Region& region, size_t offset, size_t count, float* values, float alpha)
      : LockedPass(region, offset, count), values_(values), alpha_(alpha) {}

 private:
  void move(const Piece& piece, Ahead* ahead) override;
  float* values_;
  float alpha_;
};

// The same with a d that the wire can carry: out = Q(alpha (x - g)), d its value; g += d, x -= d.
class QuantisedPass final : public LockedPass {
 public:
  // values: x; d: room for as many floats.
  QuantisedPass(const Region& region, size_t offset, size_t count, uint8_t wire, float* values, float* d, void* out,
                float alpha)
      : LockedPass(region, offset, count), wire_(wire), values_(values), d_(d), out_(out), alpha_(alpha) {}

 private:
  void move(const Piece& piece, Ahead* ahead) override;
  uint8_t wire_;
  float* values_;
  float* d_;
  void* out_;
  float alpha_;
};

}  // namespace smb::net
