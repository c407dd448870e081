// One stripe of a larger segment: of every `of` chunks of it, the one at `index`, packed into a segment of its own.
#pragma once

#include <cstddef>

namespace smb {

struct Stripe {
  size_t index = 0;
  size_t of = 1;

  // How many of the larger segment's elements before `element` lie in this stripe; per_chunk elements a chunk.
  size_t before(size_t element, size_t per_chunk) const {
    const size_t chunk = element / per_chunk;
    const size_t whole = (chunk + of - 1 - index) / of;  // chunks of this stripe that end before `element`
    return whole * per_chunk + (chunk % of == index ? element % per_chunk : 0);
  }

  // Where the stripe's element lies in the larger segment.
  size_t whole_index(size_t element, size_t per_chunk) const {
    const size_t chunk = element / per_chunk;
    return (chunk * of + index) * per_chunk + element % per_chunk;
  }
};

}  // namespace smb
