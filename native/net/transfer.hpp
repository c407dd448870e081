// The client's end of a stream: one operation of the user as pieces under way, without any I/O of its own.
#pragma once

#include <algorithm>
#include <array>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include <sys/uio.h>

#include "buffers.hpp"
#include "frames.hpp"
#include "shadow.hpp"
#include "smb/buffer.hpp"
#include "wire.hpp"

namespace smb::net {

struct WireStats {
  uint64_t bytes_sent = 0, bytes_received = 0;  // of elements
  double squared_error = 0, squared_sum = 0;    // of what was quantised here: sum (v - Q(v))^2 and sum v^2
};

// What a client thread's operations share, over all its connections. Used by one thread.
struct ClientStream {
  explicit ClientStream(size_t window) : window(window) {}
  void reset();
  // Both ends agree on nothing any more: the next exchange sends float32, and nothing is owed.
  void begin_anew(uint64_t segment);
  void forget(uint64_t segment);

  const size_t window;        // pieces under way at most
  uint64_t number = 0;        // of the last request
  uint64_t sequence = 0;      // of the last update's piece that was begun
  uint64_t acknowledged = 0;  // all replies up to this sequence have come
  Shadows shadows{SIZE_MAX};
  Shadows owed{SIZE_MAX};  // what quantised accumulates have yet to bring
  std::map<uint64_t, WireStats> stats;
};

// What the user asked for; checked by the caller against the segment's size and type.
struct Order {
  uint16_t operation;
  uint64_t segment;
  char* data = nullptr;  // the user's elements; kept alive by the caller
  size_t count = 0;      // of them
  size_t offset = 0;     // in the segment, or with stripes in the larger one
  size_t item = 1;       // bytes of an element
  size_t stripe = 0, stripes = 1;
  uint8_t wire = kWireFloat32;
  double scalar = 0;
  uint8_t last = kCounted;
  uint64_t source = 0;
};

// A reply that makes no sense: the connection is of no more use.
struct Nonsense {
  std::string what;
};

class Transfer {
 public:
  Transfer(ClientStream& stream, const Order& order);

  // A new connection: what has no reply is sent again.
  void restart();
  // At most so many pieces under way from now on, and no more than the stream's window.
  void keep_under_way(size_t most) { window_ = std::min(stream_.window, most); }
  // No more pieces after those begun; the daemon is told. The replies under way are still to be taken.
  void give_up();
  bool finished() const;

  // What is to be sent next, 0 to 2 parts; sent() says how much of it went out.
  size_t outgoing(iovec parts[2]);
  void sent(size_t bytes);
  // Where the next bytes of the replies go; received() says how many came. Throws Nonsense.
  iovec incoming();
  void received(size_t bytes);
  // The same for bytes that lie elsewhere.
  void absorb(const char* data, size_t bytes);
  // Whether the next bytes replace the user's values: whole elements alone go to incoming(), others through absorb(),
  // or a connection that ends in the middle of one would leave it of old and new bytes.
  bool in_place() const {
    return stage_ == Stage::elements && order_.operation == kExchange && flights_.front().wire == kMoved;
  }
  // Bytes of an element that absorb() waits to see whole.
  size_t held() const { return held_bytes_; }
  bool expecting() const { return begun_ > 0; }
  bool is_single() const { return pieces_ <= 1; }
  // Whether it has pieces that are, with their replies too, a chunk's worth of bytes each.
  bool exchanges_wide() const {
    return pieces_ > 1 && order_.operation == kExchange && order_.wire == kWireFloat32;
  }
  bool sends_pieces() const { return pieces_ > 1 && carries_elements(order_.operation); }

  uint64_t version() const { return version_; }
  const Refusal& refusal() const { return refusal_; }
  // Where the values hold a NaN: the index in the user's array, and the chunk (of the larger segment).
  std::optional<std::pair<size_t, size_t>> bad;

 private:
  struct Flight {
    uint64_t sequence = 0, number = 0;
    size_t begin = 0, count = 0;  // elements of the segment
    size_t at = 0;                // index in the user's array
    uint8_t wire = kWireFloat32, last = kMore;
    std::shared_ptr<Buffer> encoded;
  };
  enum class Stage { header, head, elements, failure };

  Flight piece(size_t index) const;
  bool may_begin() const;
  bool begin();
  bool encode_piece(Flight& flight);
  bool is_finite(const Flight& flight);
  void write_head(Flight& flight);
  char* elements_of(const Flight& flight) const;
  float* floats_at(const Flight& flight) const { return reinterpret_cast<float*>(order_.data) + flight.at; }
  size_t bytes_of(const Flight& flight) const;

  void take_header();
  void take_reply();
  void take_failure(const Flight& flight);
  void expect(Stage stage, void* room, size_t bytes);
  void apply_reply(Flight& flight);
  void apply_exchange(const Flight& flight);
  void settle_owed(const Flight& flight);
  void measure(const Flight& flight, const float* wanted, const float* carried);

  ClientStream& stream_;
  const Order order_;
  size_t window_;      // pieces under way at most
  size_t first_ = 0;   // the first piece's chunk, here
  size_t span_ = 1;    // chunks a piece
  size_t pieces_ = 0;  // of the whole operation
  size_t next_ = 0;    // the piece to begin next
  bool stopping_ = false;
  bool open_ = false;  // the daemon waits for a piece that ends the operation

  std::deque<Flight> flights_;  // begun, without a reply
  size_t begun_ = 0;            // how many of them were begun on this connection

  std::array<char, sizeof(Header) + sizeof(UpdateHead)> head_{};
  size_t head_bytes_ = 0, out_bytes_ = 0, out_done_ = 0;  // of the frame that is being sent
  const char* out_elements_ = nullptr;

  Stage stage_ = Stage::header;
  Header header_{};
  uint64_t reply_version_ = 0;
  std::shared_ptr<Buffer> reply_;
  std::string failure_;
  char* in_ = nullptr;
  size_t in_left_ = 0;
  std::array<char, sizeof(float)> held_{};
  size_t held_bytes_ = 0;

  uint64_t version_ = 0;
  Refusal refusal_;
};

}  // namespace smb::net
