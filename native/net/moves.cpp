#include "moves.hpp"

#include "wire.hpp"

namespace smb::net {

// A piece lies in one chunk, so each pass is one move.
void PushPass::move(const Piece& piece, Ahead*) {
  push(values_, reinterpret_cast<float*>(region.at(piece.begin)), alpha_, piece.count);
}

void ArrivalPass::move(const Piece& piece, Ahead*) {
  arrival_.taken = true;
  arrival_.broken = !arrival_.line.receive_queued(region.at(piece.begin), piece.count * region.item());
}

void QuantisedPass::move(const Piece& piece, Ahead*) {
  float* center = reinterpret_cast<float*>(region.at(piece.begin));
  increment(d_, values_, center, alpha_, piece.count);
  encode(wire_, out_, d_, piece.count);
  decode(wire_, d_, out_, piece.count);
  add(center, d_, piece.count);
  subtract(values_, d_, piece.count);
}

}  // namespace smb::net
