// A transfer's replies: taken in order, applied to the user's values.
#include <algorithm>
#include <cstring>

#include "smb/kernels.hpp"
#include "transfer.hpp"

namespace smb::net {

iovec Transfer::incoming() { return {in_, in_left_}; }

void Transfer::expect(Stage stage, void* room, size_t bytes) {
  stage_ = stage;
  in_ = static_cast<char*>(room);
  in_left_ = bytes;
  held_bytes_ = 0;
}

void Transfer::absorb(const char* data, size_t bytes) {
  while (bytes) {
    if (!expecting()) throw Nonsense{"more than the reply that was asked for"};
    size_t part = std::min(in_left_, bytes);
    if (in_place() && (held_bytes_ || part < sizeof(float))) {
      part = std::min(sizeof(float) - held_bytes_, bytes);
      std::memcpy(held_.data() + held_bytes_, data, part);
      held_bytes_ += part;
      if (held_bytes_ == sizeof(float)) {
        std::memcpy(in_, held_.data(), sizeof(float));
        held_bytes_ = 0;
        received(sizeof(float));
      }
    } else {
      if (in_place()) part -= part % sizeof(float);
      std::memcpy(in_, data, part);
      received(part);
    }
    data += part;
    bytes -= part;
  }
}

void Transfer::received(size_t bytes) {
  in_ += bytes;
  in_left_ -= bytes;
  if (in_left_) return;
  const Flight& flight = flights_.front();
  switch (stage_) {
    case Stage::header: return take_header();
    case Stage::head:
      if (order_.operation != kExchange || flight.count == 0) return take_reply();
      // Straight to where they belong: the daemon has the piece, so what was sent is not needed again.
      if (flight.wire == kMoved) return expect(Stage::elements, floats_at(flight), flight.count * sizeof(float));
      if (!reply_) reply_ = Buffer::take(kPieceBytes);
      return expect(Stage::elements, reply_->data(), wire_bytes(flight.wire, flight.count));
    default: take_reply();
  }
}

void Transfer::take_header() {
  const Flight& flight = flights_.front();
  const auto wrong = [](const std::string& what) { throw Nonsense{what}; };
  if (std::memcmp(header_.magic, kMagic, sizeof kMagic) != 0) wrong("a reply does not start with SMB1");
  const bool lost = header_.status != kGood && header_.number == 0;  // the daemon lost our framing
  if (!lost && (header_.number != flight.number || header_.operation != order_.operation)) {
    wrong("answer to request " + std::to_string(header_.number) + " instead of " + std::to_string(flight.number));
  }
  size_t expected = sizeof reply_version_;
  if (order_.operation == kRead) expected = flight.count * order_.item;
  if (order_.operation == kAcknowledge) expected = 0;
  if (order_.operation == kExchange) expected += wire_bytes(flight.wire, flight.count);
  if (header_.status != kGood ? header_.length < 4 || header_.length > kFailureBytes : header_.length != expected) {
    wrong("a reply of " + std::to_string(header_.length) + " bytes");
  }
  if (header_.status != kGood) {
    failure_.resize(header_.length);
    expect(Stage::failure, failure_.data(), failure_.size());
  } else if (order_.operation == kRead) {
    expect(Stage::elements, order_.data + flight.at * order_.item, expected);
  } else if (expected) {
    expect(Stage::head, &reply_version_, sizeof reply_version_);
  } else {
    take_reply();
  }
}

// A whole reply is there: it is the first flight's.
void Transfer::take_reply() {
  Flight flight = std::move(flights_.front());
  flights_.pop_front();
  --begun_;
  if (flight.sequence) stream_.acknowledged = flight.sequence;
  if (stage_ == Stage::failure) {
    take_failure(flight);
  } else {
    version_ = reply_version_;
    apply_reply(flight);
  }
  expect(Stage::header, &header_, sizeof header_);
}

void Transfer::take_failure(const Flight& flight) {
  if (header_.number == 0) throw Nonsense{failure_.substr(4)};
  const bool ours = header_.status == kNonFinite && !flight.encoded && flight.count;
  // For a narrow wire NaN is looked for here, while earlier pieces are under way: what becomes of these comes first.
  const bool first = !refusal_ && (!bad || flight.at < bad->first);
  if (first && !(ours && !is_finite(flight))) refusal_ = {header_.status, failure_.substr(4)};
  // What both ends believe may be the reason, where values overflowed: the next exchange begins anew.
  if (flight.encoded) stream_.begin_anew(order_.segment);
  stopping_ = true;
}

void Transfer::apply_reply(Flight& flight) {
  if (flight.count == 0) return;
  WireStats& stats = stream_.stats[order_.segment];
  if (order_.operation == kRead) stats.bytes_received += flight.count * order_.item;
  if (order_.operation == kAccumulate && flight.encoded) settle_owed(flight);
  if (order_.operation != kExchange) return;
  stats.bytes_received += wire_bytes(flight.wire, flight.count);
  apply_exchange(flight);
}

// W_x -= d, and the shadow follows: S += what was sent, S -= d.
void Transfer::apply_exchange(const Flight& flight) {
  if (flight.wire == kMoved) return;  // received into the user's values
  float* local = floats_at(flight);
  if (!flight.encoded) {
    accumulate_f32(local, reply_->floats(), -1.0f, flight.count);
    float* kept = stream_.shadows.keep(order_.segment, flight.begin, flight.count);
    std::memcpy(kept, local, flight.count * sizeof(float));
    return;
  }
  float* shadow = stream_.shadows.find(order_.segment, flight.begin, flight.count);
  const std::shared_ptr<Buffer> wanted = Buffer::take(flight.count * sizeof(float));
  const std::shared_ptr<Buffer> carried = Buffer::take(flight.count * sizeof(float));
  difference(wanted->floats(), local, shadow, flight.count);
  decode(flight.wire, carried->floats(), flight.encoded->data(), flight.count);
  add(shadow, carried->floats(), flight.count);
  measure(flight, wanted->floats(), carried->floats());
  decode(flight.wire, carried->floats(), reply_->data(), flight.count);
  subtract(shadow, carried->floats(), flight.count);
  subtract(local, carried->floats(), flight.count);
}

// owed = (scale * source + owed) - what was sent.
void Transfer::settle_owed(const Flight& flight) {
  float* owed = stream_.owed.zeroed(order_.segment, flight.begin);
  const std::shared_ptr<Buffer> carried = Buffer::take(flight.count * sizeof(float));
  const std::shared_ptr<Buffer> wanted = Buffer::take(flight.count * sizeof(float));
  scaled_sum(wanted->floats(), floats_at(flight), static_cast<float>(order_.scalar), owed, flight.count);
  decode(flight.wire, carried->floats(), flight.encoded->data(), flight.count);
  measure(flight, wanted->floats(), carried->floats());
  difference(owed, wanted->floats(), carried->floats(), flight.count);
}

void Transfer::measure(const Flight& flight, const float* wanted, const float* carried) {
  const std::shared_ptr<Buffer> error = Buffer::take(flight.count * sizeof(float));
  difference(error->floats(), wanted, carried, flight.count);
  WireStats& stats = stream_.stats[order_.segment];
  stats.squared_error += square_sum(error->floats(), flight.count);
  stats.squared_sum += square_sum(wanted, flight.count);
}

}  // namespace smb::net
