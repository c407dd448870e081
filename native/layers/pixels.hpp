// Interleaved bytes to planes of floats: pointers and counts, no Python.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace data {

// out[i] = (in[i] - mean) * scale, and with a mean for each value. out overlaps nothing.
void affine(float* out, const uint8_t* in, size_t n, float mean, float scale);
void affine(float* out, const float* in, size_t n, float mean, float scale);
void affine(float* out, const uint8_t* in, size_t n, const float* mean, float scale);
void affine(float* out, const float* in, size_t n, const float* mean, float scale);

// What each row of an image goes through: out = (in - mean) * scale, for each channel, perhaps turned round.
struct Row {
  const uint8_t* in;        // n pixels of so many channels
  size_t n, channels;
  const float* mean_row;    // the mean's pixels at the first one's place; nullptr: mean_values instead
  size_t mean_plane;        // floats from one channel of the mean image to the next
  const float* mean_values; // one a channel
  float scale;
  bool flip;
};

// Writes rows one below the other to planes of `plane` floats at `out`, one a channel.
//
// Past the caches when `past`: what is written then does not push out what others work on, and memory is not
// read before it is written. Complete after finish(), for this thread's later stores and messages too.
class Planes {
 public:
  Planes(float* out, size_t plane, size_t channels, size_t width, bool past);
  void write(const Row& row);
  void finish();

 private:
  // The end of a plane as far as it is written: `held` floats that fill no line yet stand in `buffer`.
  struct Plane {
    float* to;
    size_t held, head;  // head: floats up to the first whole line
    float* buffer;
  };
  void push(Plane& plane, size_t n);

  bool past_;
  std::vector<float> buffers_;
  std::vector<uint8_t> bytes_;  // a row's channels, each on its own
  std::vector<Plane> planes_;
  std::vector<float*> targets_;
};

}  // namespace data
