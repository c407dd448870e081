#include "moves.hpp"

#include "wire.hpp"

namespace smb::net {

void fetch_pages(const char* data, size_t bytes, size_t lines) {
  constexpr size_t kPage = 4096, kLine = 64;
  for (size_t page = 0; page < bytes; page += kPage) {
    for (size_t line = 0; line < lines; ++line) __builtin_prefetch(data + page + line * kLine, 0, 2);
  }
}

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
