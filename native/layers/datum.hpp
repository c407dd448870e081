// Datum records and the pixel transform of data layers: pointers and counts, no Python.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

namespace data {

struct Shape {
  int channels = 0, height = 0, width = 0;
  // Values in one image; the caller has checked that it fits an int (see fits()).
  size_t count() const { return size_t(channels) * height * width; }
  // True when every side is positive and the product is an int.
  bool fits() const;
  bool operator==(const Shape& o) const {
    return channels == o.channels && height == o.height && width == o.width;
  }
  std::string text() const;
};

// One record. The pixels point into the record, floats are copied (they are not contiguous there).
struct Datum {
  Shape shape;
  int32_t label = 0;
  bool encoded = false;
  const uint8_t* pixels = nullptr;
  size_t size = 0;
  std::vector<float> floats;
};

// Read a record in protobuf's wire format; unknown fields are skipped. Reads [at, at + n) only.
// False when the bytes are no Datum; `datum` is then undefined.
bool parse_datum(const uint8_t* at, size_t n, Datum& datum);

// What chance says of one image: mirror, row, column; how each is used depends on the image's size.
using Drawn = std::array<uint32_t, 3>;

// (x - mean) * scale over a crop of an image, perhaps mirrored; each image draws mirror, then row,
// then column from its own mt19937 stream, as far as they are random at all.
struct Transform {
  float scale = 1;
  bool mirror = false;       // flip a coin for each image
  int crop = 0;              // side of the square; 0: the whole image
  bool random_crop = false;  // else the centre
  std::vector<float> mean_values;  // none, one, or one a channel
  Shape mean_shape;                // of mean_image
  std::vector<float> mean_image;   // at the source's pixels, planar; empty: none
  std::mt19937 random;

  // What is wrong with an image of this shape for a top of shape `top`; empty when nothing is.
  std::string refuse(const Shape& image, const Shape& top) const;
  // One planar image into top.count() floats at `out`; refuse() has said nothing.
  void place(const uint8_t* pixels, const Shape& image, float* out);
  void place(const float* pixels, const Shape& image, float* out);
  // Draw for the next image: not in several threads at once.
  Drawn draw();
  // The same as place() for an image whose channels are interleaved, as decoders give it, and which has drawn
  // already: in any threads. past: past the caches (pixels.hpp).
  void place_interleaved(const uint8_t* pixels, const Shape& image, const Drawn& drawn, float* out, bool past) const;

 private:
  struct Cut { bool flip; int top, left, height, width; };
  Cut cut(const Shape& image, const Drawn& drawn) const;
  float mean_of(int channel) const;
  template <class T>
  void place_any(const T* pixels, const Shape& image, float* out);
};

}  // namespace data
