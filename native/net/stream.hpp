// The daemon's end of a stream: what one client thread asks for over its connections, one after the other.
#pragma once

#include <atomic>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "buffers.hpp"
#include "frames.hpp"
#include "line.hpp"
#include "moves.hpp"
#include "shadow.hpp"
#include "smb/passes.hpp"
#include "table.hpp"

namespace smb::net {

// A reply to an update; kept until the client says that it has it.
struct Answer {
  uint64_t sequence = 0;
  uint16_t operation = 0;
  Refusal refusal;
  uint64_t version = 0;
  std::shared_ptr<Buffer> elements;
  size_t bytes = 0;  // of the elements
};
using AnswerPtr = std::shared_ptr<const Answer>;

struct StreamOptions {
  double rate = 0;  // requests a second; 0: any
  double burst = 0;
  size_t window = 16;  // replies kept at most
  size_t shadow_limit = 0;  // bytes
  double patience = 60;  // seconds that an operation waits for one lock
};

struct StreamCounters {
  std::atomic<uint64_t> applied{0}, acknowledged{0}, held{0}, bytes_in{0}, bytes_out{0}, operations{0}, throttled{0};
  std::atomic<uint64_t> shadow_bytes{0};
  std::atomic<int64_t> last_seen{0};  // monotonic_ns
  std::atomic<int64_t> staleness{-1};  // others' updates between the last exchange and this stream's update before it
};

class Stream {
 public:
  // Called about each second while an operation waits for a chunk's lock: segment, chunk, holder, seconds.
  using OnStuck = std::function<void(uint64_t, size_t, uint32_t, double)>;

  Stream(std::shared_ptr<Table> table, const StreamOptions& options, OnStuck on_stuck);

  // Answers data requests until a frame comes that is none: true, with its header. False: the peer ended the
  // stream. Throws LineError, or Refusal once the table is revoked. Two threads may be here at once: the sequence
  // lets each piece be applied once.
  bool serve(Line& line, Header* header);

  // The reply frame to one data request whose body is there. Throws Refusal once the table is revoked, and for a
  // frame that is no data request.
  std::string handle(const Header& header, const char* body);

  StreamCounters counters;

 private:
  struct Checked {
    Entry entry;
    Refusal refusal;
  };

  bool is_data(const Header& header) const;
  void take_turn(Line* line);
  void count_in(const Request& request);
  Checked check(const Request& request) const;
  Refusal check_update(const Request& request, const Entry& entry) const;

  void answer(Line& line, Request& request);
  void answer_read(Line& line, const Request& request, const Entry& entry);
  bool send_in_place(Line& line, const Entry& entry, size_t offset, size_t count, iovec* parts, size_t* left,
                     char* out);
  Refusal read_piece(uint64_t segment, const Entry& entry, size_t offset, size_t count, char* out);

  // The elements are in a buffer, or yet to be received from an arrival; there they stay when it is not taken.
  AnswerPtr update(const Request& request, const Checked& checked, const std::shared_ptr<Buffer>& elements,
                   Arrival* arrival);
  AnswerPtr in_sequence(const Request& request);
  void settle(uint64_t acknowledged);
  uint64_t counted(const Request& request, const Region& region);
  Refusal apply(const Request& request, const Entry& entry, const std::shared_ptr<Buffer>& elements, Arrival* arrival,
                Answer& answer);
  Refusal write(const Request& request, const Entry& entry, const std::shared_ptr<Buffer>& elements, Arrival* arrival);
  Refusal exchange(const Request& request, const Entry& entry, const std::shared_ptr<Buffer>& elements, Answer& answer);
  Refusal exchange_quantised(const Request& request, const Entry& entry, Buffer& elements, Answer& answer);
  Refusal accumulate(const Request& request, const Entry& entry, std::shared_ptr<Buffer> elements);
  Refusal accumulate_from(const Request& request, const Entry& entry);
  Refusal run(Pass& pass, uint64_t segment, const char* verb);
  Refusal simple(const Request& request, const Entry& entry, uint64_t* value);

  void send(Line& line, uint16_t operation, uint64_t number, const Refusal& refusal, const void* body, size_t bytes,
            const void* elements = nullptr, size_t more = 0);

  const std::shared_ptr<Table> table_;
  const StreamOptions options_;
  const OnStuck on_stuck_;
  std::mutex mutex_;  // of all below; held while an update is applied
  std::deque<AnswerPtr> kept_;
  Refusal failed_;  // of the operation under way: its later pieces are refused too
  Shadows shadows_;
  std::map<uint64_t, uint64_t> seen_;  // segment: its version after this stream's last update
  double tokens_ = 0;
  int64_t filled_ = 0;
};

}  // namespace smb::net
