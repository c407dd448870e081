#include "datum.hpp"

#include <algorithm>
#include <climits>
#include <cstring>

#include "pixels.hpp"

namespace data {
namespace {

struct Wire {
  const uint8_t* at;
  const uint8_t* end;

  size_t left() const { return size_t(end - at); }

  bool varint(uint64_t& value) {
    value = 0;
    for (int shift = 0; shift < 64; shift += 7) {
      if (at == end) return false;
      const uint8_t byte = *at++;
      value |= uint64_t(byte & 0x7f) << shift;
      if (!(byte & 0x80)) return true;
    }
    return false;
  }

  bool block(const uint8_t*& start, size_t& size) {
    uint64_t n;
    if (!varint(n) || n > left()) return false;
    start = at;
    size = size_t(n);
    at += n;
    return true;
  }

  bool skip(unsigned wire_type) {
    uint64_t value;
    const uint8_t* start;
    size_t size;
    switch (wire_type) {
      case 0: return varint(value);
      case 1: return advance(8);
      case 2: return block(start, size);
      case 5: return advance(4);
      default: return false;  // groups: no Datum has any
    }
  }

  bool advance(size_t n) {
    if (left() < n) return false;
    at += n;
    return true;
  }
};

float float_at(const uint8_t* at) {
  float value;
  std::memcpy(&value, at, sizeof value);
  return value;
}

bool read_floats(const uint8_t* start, size_t size, std::vector<float>& floats) {
  if (size % 4) return false;
  for (size_t i = 0; i < size; i += 4) floats.push_back(float_at(start + i));
  return true;
}

// The tags of Datum: field number * 8 + wire type.
enum Tag : uint64_t {
  kChannels = 8, kHeight = 16, kWidth = 24, kData = 34, kLabel = 40, kFloat = 53, kFloats = 50, kEncoded = 56
};

bool read_field(uint64_t tag, Wire& wire, Datum& datum) {
  uint64_t value = 0;
  const uint8_t* start = nullptr;
  size_t size = 0;
  switch (tag) {
    case kChannels: if (!wire.varint(value)) return false; datum.shape.channels = int32_t(value); return true;
    case kHeight: if (!wire.varint(value)) return false; datum.shape.height = int32_t(value); return true;
    case kWidth: if (!wire.varint(value)) return false; datum.shape.width = int32_t(value); return true;
    case kLabel: if (!wire.varint(value)) return false; datum.label = int32_t(value); return true;
    case kEncoded: if (!wire.varint(value)) return false; datum.encoded = value != 0; return true;
    case kData: return wire.block(datum.pixels, datum.size);
    case kFloats: return wire.block(start, size) && read_floats(start, size, datum.floats);
    case kFloat:
      if (wire.left() < 4) return false;
      datum.floats.push_back(float_at(wire.at));
      return wire.advance(4);
    default: return (tag >> 3) != 0 && wire.skip(unsigned(tag & 7));
  }
}

}  // namespace

bool Shape::fits() const {
  if (channels <= 0 || height <= 0 || width <= 0) return false;
  const int64_t plane = int64_t(height) * width;  // below 2^62
  return plane <= INT_MAX && plane * channels <= INT_MAX;
}

std::string Shape::text() const {
  return std::to_string(channels) + "x" + std::to_string(height) + "x" + std::to_string(width);
}

bool parse_datum(const uint8_t* at, size_t n, Datum& datum) {
  datum.shape = Shape();
  datum.label = 0;
  datum.encoded = false;
  datum.pixels = nullptr;
  datum.size = 0;
  datum.floats.clear();
  Wire wire{at, at + n};
  uint64_t tag;
  while (wire.at != wire.end) {
    if (!wire.varint(tag) || !read_field(tag, wire, datum)) return false;
  }
  return true;
}

std::string Transform::refuse(const Shape& image, const Shape& top) const {
  if (!image.fits()) return "has the impossible shape " + image.text();
  if (crop && (image.height < crop || image.width < crop))
    return "is " + image.text() + ", smaller than crop_size " + std::to_string(crop);
  if (image.channels != top.channels || (!crop && !(image == top)))
    return "is " + image.text() + ", but the first of its batch gives " + top.text() +
           " (a batch holds one size unless crop_size cuts it)";
  if (!mean_image.empty() && !(image == mean_shape))
    return "is " + image.text() + ", but the mean file is " + mean_shape.text();
  if (mean_values.size() > 1 && mean_values.size() != size_t(image.channels))
    return "has " + std::to_string(image.channels) + " channels, but there are " +
           std::to_string(mean_values.size()) + " mean_values (give 1 or one a channel)";
  return "";
}

Drawn Transform::draw() {
  Drawn drawn{};
  if (mirror) drawn[0] = uint32_t(random());
  if (crop && random_crop) {
    drawn[1] = uint32_t(random());
    drawn[2] = uint32_t(random());
  }
  return drawn;
}

Transform::Cut Transform::cut(const Shape& image, const Drawn& drawn) const {
  Cut cut;
  cut.flip = mirror && drawn[0] % 2;
  cut.height = crop ? crop : image.height;
  cut.width = crop ? crop : image.width;
  cut.top = (image.height - cut.height) / 2;
  cut.left = (image.width - cut.width) / 2;
  if (crop && random_crop) {
    cut.top = int(drawn[1] % unsigned(image.height - cut.height + 1));
    cut.left = int(drawn[2] % unsigned(image.width - cut.width + 1));
  }
  return cut;
}

float Transform::mean_of(int channel) const {
  if (mean_values.empty()) return 0;
  return mean_values[mean_values.size() == 1 ? 0 : size_t(channel)];
}

template <class T>
void Transform::place_any(const T* pixels, const Shape& image, float* out) {
  const Cut part = cut(image, draw());
  const bool rows = crop || part.flip;  // else a channel is one run
  const size_t run = rows ? size_t(part.width) : size_t(part.height) * part.width;
  const int runs = rows ? part.height : 1;
  for (int c = 0; c < image.channels; ++c) {
    const float mean = mean_of(c);
    for (int r = 0; r < runs; ++r, out += run) {
      const size_t from = (size_t(c) * image.height + part.top + r) * image.width + part.left;
      if (mean_image.empty()) affine(out, pixels + from, run, mean, scale);
      else affine(out, pixels + from, run, mean_image.data() + from, scale);
      if (part.flip) std::reverse(out, out + run);
    }
  }
}

void Transform::place_interleaved(const uint8_t* pixels, const Shape& image, const Drawn& drawn, float* out,
                                  bool past) const {
  const Cut part = cut(image, drawn);
  const size_t channels = size_t(image.channels), width = size_t(part.width);
  std::vector<float> means;
  for (int c = 0; c < image.channels; ++c) means.push_back(mean_of(c));
  Planes planes(out, part.height * width, channels, width, past);
  for (int r = 0; r < part.height; ++r) {
    const size_t at = (size_t(part.top) + r) * image.width + part.left;
    planes.write({pixels + at * channels, width, channels, mean_image.empty() ? nullptr : mean_image.data() + at,
                  size_t(image.height) * image.width, means.data(), scale, part.flip});
  }
  planes.finish();
}

void Transform::place(const uint8_t* pixels, const Shape& image, float* out) { place_any(pixels, image, out); }
void Transform::place(const float* pixels, const Shape& image, float* out) { place_any(pixels, image, out); }

}  // namespace data
