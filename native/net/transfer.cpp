#include "transfer.hpp"

#include <algorithm>
#include <cstring>

#include "moves.hpp"
#include "smb/kernels.hpp"

namespace smb::net {
namespace {

constexpr size_t kPageLines = 64;  // a whole piece: with fewer lines of a page the kernel's copy waits for the others

}  // namespace

void ClientStream::reset() {
  sequence = acknowledged = 0;
  shadows.clear();
}

void ClientStream::begin_anew(uint64_t segment) {
  shadows.forget(segment);
  owed.forget(segment);
}

void ClientStream::forget(uint64_t segment) {
  begin_anew(segment);
  stats.erase(segment);
}

Transfer::Transfer(ClientStream& stream, const Order& order) : stream_(stream), order_(order), window_(stream.window) {
  expect(Stage::header, &header_, sizeof header_);
  if (order.operation == kRead || carries_elements(order.operation)) {
    const size_t per_chunk = kChunkBytes / order.item;
    span_ = order.operation == kRead && order.stripes == 1 ? kReadBytes / kChunkBytes : 1;
    const size_t chunk = order.offset / per_chunk;  // of the larger segment
    first_ = chunk / order.stripes + (chunk % order.stripes > order.stripe ? 1 : 0);
    if (order.count) {
      const size_t last = (order.offset + order.count - 1) / per_chunk;
      const size_t end = last >= order.stripe ? (last - order.stripe) / order.stripes + 1 : 0;
      pieces_ = end > first_ ? (end - first_ + span_ - 1) / span_ : 0;
    } else {
      pieces_ = order.operation == kWrite && order.last == kCounted ? 1 : 0;  // only counts the version
    }
  } else {
    pieces_ = 1;
  }
}

Transfer::Flight Transfer::piece(size_t index) const {
  Flight flight;
  flight.last = index + 1 == pieces_ ? order_.last : uint8_t{kMore};
  flight.wire = order_.wire;
  if (order_.count == 0) return flight;
  const size_t per_chunk = kChunkBytes / order_.item;
  const size_t chunk = first_ + index * span_;
  const size_t larger = (chunk * order_.stripes + order_.stripe) * per_chunk;  // where it begins in the larger segment
  const size_t from = std::max(order_.offset, larger);
  const size_t to = std::min(order_.offset + order_.count, larger + span_ * per_chunk);
  flight.begin = chunk * per_chunk + (from - larger);
  flight.count = to - from;
  flight.at = from - order_.offset;
  return flight;
}

bool Transfer::finished() const {
  if (!flights_.empty()) return false;
  return stopping_ ? !open_ : next_ == pieces_;
}

void Transfer::restart() {
  begun_ = 0;
  out_bytes_ = out_done_ = 0;
  expect(Stage::header, &header_, sizeof header_);
}

void Transfer::give_up() { stopping_ = true; }

bool Transfer::may_begin() const {
  if (begun_ < flights_.size()) return true;  // to be sent again
  if (flights_.size() >= window_) return false;
  return stopping_ ? open_ : next_ < pieces_;
}

// The next frame to send; false when there is none now.
bool Transfer::begin() {
  if (begun_ == flights_.size()) {
    Flight flight;
    if (stopping_) {
      flight.last = kUncounted;
    } else {
      flight = piece(next_);
      if (!encode_piece(flight)) {
        stopping_ = true;
        return may_begin() && begin();
      }
      ++next_;
    }
    if (is_update(order_.operation)) {
      flight.sequence = ++stream_.sequence;
      open_ = carries_elements(order_.operation) && flight.last == kMore;
    }
    flights_.push_back(std::move(flight));
  }
  Flight& flight = flights_[begun_++];
  flight.number = ++stream_.number;
  write_head(flight);
  return true;
}

// Whether the piece's values, as they would be added, hold no NaN or Inf; else bad says where the first one is.
bool Transfer::is_finite(const Flight& flight) {
  const float scale = order_.operation == kAccumulate ? static_cast<float>(order_.scalar) : 1.0f;
  const size_t wrong = first_nonfinite_f32(floats_at(flight), scale, flight.count);
  if (wrong == flight.count) return true;
  const size_t per_chunk = kChunkBytes / order_.item;
  bad = {flight.at + wrong, (order_.offset + flight.at) / per_chunk};
  return false;
}

// Quantises the values where the wire asks for it. False: they hold a NaN. In float32 the daemon looks for those, while
// it has the piece in its cache, and moves nothing from it on.
bool Transfer::encode_piece(Flight& flight) {
  if (order_.operation != kAccumulate && order_.operation != kExchange) return true;
  const bool adds = order_.operation == kAccumulate;
  if (flight.wire == kWireFloat32) {
    if (!adds) flight.wire = kMoved;
    return true;
  }
  if (!is_finite(flight)) return false;
  const float* values = floats_at(flight);
  const std::shared_ptr<Buffer> values_to_send = Buffer::take(flight.count * sizeof(float));
  float* v = values_to_send->floats();
  if (adds) {
    scaled_sum(v, values, static_cast<float>(order_.scalar), stream_.owed.zeroed(order_.segment, flight.begin),
               flight.count);
  } else {
    const float* shadow = stream_.shadows.find(order_.segment, flight.begin, flight.count);
    if (!shadow) {
      flight.wire = kAnew;
      return true;
    }
    difference(v, values, shadow, flight.count);
  }
  flight.encoded = Buffer::take(wire_bytes(flight.wire, flight.count));
  encode(flight.wire, flight.encoded->data(), v, flight.count);
  return true;
}

char* Transfer::elements_of(const Flight& flight) const {
  return flight.encoded ? flight.encoded->data() : order_.data + flight.at * order_.item;
}

size_t Transfer::bytes_of(const Flight& flight) const {
  return flight.encoded || order_.operation == kExchange ? wire_bytes(flight.wire, flight.count)
                                                         : flight.count * order_.item;
}

void Transfer::write_head(Flight& flight) {
  const size_t head = net::head_bytes(order_.operation);
  const size_t elements = carries_elements(order_.operation) ? bytes_of(flight) : 0;
  const Header header = header_of(order_.operation, kGood, flight.number, head + elements);
  std::memcpy(head_.data(), &header, sizeof header);
  char* at = head_.data() + sizeof header;
  switch (order_.operation) {
    case kRead: {
      const ReadHead fields{order_.segment, flight.begin, flight.count};
      std::memcpy(at, &fields, head);
      break;
    }
    case kWrite:
    case kAccumulate:
    case kExchange: {
      const double scalar = flight.encoded && order_.operation == kAccumulate ? 1.0 : order_.scalar;
      const UpdateHead fields{order_.segment, flight.sequence, stream_.acknowledged, flight.begin,
                              flight.count,   flight.last,     flight.wire,          scalar};
      std::memcpy(at, &fields, head);
      break;
    }
    case kAccumulateFrom: {
      const FromHead fields{order_.segment, flight.sequence, stream_.acknowledged,
                            order_.source,  order_.offset,   order_.scalar};
      std::memcpy(at, &fields, head);
      break;
    }
    default: {
      const uint64_t field = order_.operation == kVersionOf ? order_.segment : stream_.acknowledged;
      std::memcpy(at, &field, head);
    }
  }
  head_bytes_ = sizeof header + head;
  out_elements_ = elements ? elements_of(flight) : nullptr;
  if (pieces_ > 1 && elements && !flight.encoded) fetch_pages(out_elements_, elements, kPageLines);
  out_bytes_ = head_bytes_ + elements;
  out_done_ = 0;
}

size_t Transfer::outgoing(iovec parts[2]) {
  if (out_done_ == out_bytes_ && (!may_begin() || !begin())) return 0;
  size_t count = 0;
  if (out_done_ < head_bytes_) parts[count++] = {head_.data() + out_done_, head_bytes_ - out_done_};
  if (out_bytes_ > head_bytes_) {
    const size_t done = std::max(out_done_, head_bytes_) - head_bytes_;
    parts[count++] = {const_cast<char*>(out_elements_) + done, out_bytes_ - head_bytes_ - done};
  }
  return count;
}

void Transfer::sent(size_t bytes) {
  out_done_ += bytes;
  if (out_done_ == out_bytes_ && out_elements_) stream_.stats[order_.segment].bytes_sent += out_bytes_ - head_bytes_;
}

}  // namespace smb::net
