#include "stream.hpp"

#include <time.h>

#include <algorithm>
#include <cstring>

#include "smb/operations.hpp"
#include "smb/robust.hpp"

namespace smb::net {
namespace {

constexpr size_t kSmallRead = 8192;  // bytes that are sent from the thread's own stack
constexpr size_t kSmallWrite = 8192;  // bytes for which asking what has come costs more than a copy

constexpr size_t kHoldBytes = size_t{128} << 10;  // from here on a packet less is worth the calls that it takes

Refusal revoked() { return refuse(kClosed, "the session's access to its segments was revoked"); }

}  // namespace

Stream::Stream(std::shared_ptr<Table> table, const StreamOptions& options, OnStuck on_stuck)
    : table_(std::move(table)),
      options_(options),
      on_stuck_(std::move(on_stuck)),
      shadows_(options.shadow_limit),
      tokens_(options.burst),
      filled_(monotonic_ns()) {}

// Whether the frame is answered here: a request of ours that is not longer than any of them.
bool Stream::is_data(const Header& header) const {
  const size_t head = head_bytes(header.operation);
  return std::memcmp(header.magic, kMagic, sizeof kMagic) == 0 && head != 0 && header.status == 0 &&
         header.length <= (carries_elements(header.operation) ? kMaxBody : head);
}

// Token bucket: who asks too often waits, at no one else's cost.
void Stream::take_turn(Line* line) {
  if (options_.rate <= 0) return;
  int64_t wait_ns = 0;
  {
    const std::lock_guard<std::mutex> guard(mutex_);
    const int64_t now = monotonic_ns();
    tokens_ = std::min(options_.burst, tokens_ + static_cast<double>(now - filled_) * 1e-9 * options_.rate);
    filled_ = now;
    tokens_ -= 1;
    if (tokens_ < 0) wait_ns = static_cast<int64_t>(-tokens_ / options_.rate * 1e9);
  }
  if (wait_ns == 0) return;
  counters.throttled.fetch_add(1, std::memory_order_relaxed);
  if (line) {
    line->release();
    return line->rest(wait_ns);
  }
  const timespec length{wait_ns / 1000000000, wait_ns % 1000000000};
  nanosleep(&length, nullptr);
}

void Stream::count_in(const Request& request) {
  counters.operations.fetch_add(1, std::memory_order_relaxed);
  counters.bytes_in.fetch_add(sizeof(Header) + request.header.length, std::memory_order_relaxed);
  counters.last_seen.store(monotonic_ns(), std::memory_order_relaxed);
}

bool Stream::serve(Line& line, Header* header) {
  Request request;
  for (;;) {
    if (!line.receive_first(&request.header, sizeof(Header))) return false;
    if (table_->revoked()) throw revoked();
    if (!is_data(request.header)) {
      *header = request.header;
      return true;
    }
    take_turn(&line);
    count_in(request);
    answer(line, request);
  }
}

void Stream::answer(Line& line, Request& request) {
  const Header& header = request.header;
  const size_t head = head_bytes(header.operation);
  line.expect(header.length);
  if (header.length < head) {
    line.skip(header.length);
    const Refusal refusal = refuse(kProtocolError, "operation %u: a body of %u bytes, its head has %zu",
                                   header.operation, header.length, head);
    return send(line, header.operation, header.number, refusal, nullptr, 0);
  }
  line.receive(request.head, head);
  Checked checked = check(request);
  if (!is_update(header.operation)) {
    if (!checked.refusal && header.operation == kRead) return answer_read(line, request, checked.entry);
    uint64_t value = 0;
    if (!checked.refusal) checked.refusal = simple(request, checked.entry, &value);
    return send(line, header.operation, header.number, checked.refusal, &value,
                header.operation == kVersionOf ? sizeof value : 0);
  }
  std::shared_ptr<Buffer> elements;
  const size_t bytes = header.length - head;
  Arrival arrival{line};
  bool arrives = false;
  if (checked.refusal) {
    line.skip(bytes);
  } else if (header.operation == kWrite && bytes > kSmallWrite && line.queued() >= bytes) {
    arrives = true;
  } else if (bytes) {
    elements = Buffer::take(bytes);
    line.receive(elements->data(), bytes);
  }
  const AnswerPtr answer = update(request, checked, elements, arrives ? &arrival : nullptr);
  if (arrives && !arrival.taken) line.skip(bytes);
  send(line, answer->operation, header.number, answer->refusal, &answer->version, sizeof answer->version,
       answer->elements ? answer->elements->data() : nullptr, answer->bytes);
}

std::string Stream::handle(const Header& header, const char* body) {
  if (table_->revoked()) throw revoked();
  Request request;
  request.header = header;
  const size_t head = head_bytes(header.operation);
  if (!is_data(header) || header.length < head) {
    throw refuse(kProtocolError, "operation %u with a body of %u bytes is no data request", header.operation,
                 header.length);
  }
  take_turn(nullptr);
  count_in(request);
  std::memcpy(request.head, body, head);
  Checked checked = check(request);
  std::string elements;  // what follows the reply's head
  uint64_t value = 0;
  AnswerPtr answer;
  if (is_update(header.operation)) {
    std::shared_ptr<Buffer> values;
    const size_t bytes = header.length - head;
    if (!checked.refusal && bytes) {
      values = Buffer::take(bytes);
      std::memcpy(values->data(), body + head, bytes);
    }
    answer = update(request, checked, values, nullptr);
    checked.refusal = answer->refusal;
    value = answer->version;
  } else if (!checked.refusal && header.operation == kRead) {
    elements.resize(request.read.count * checked.entry.dtype.size);
    checked.refusal =
        read_piece(request.read.segment, checked.entry, request.read.offset, request.read.count, elements.data());
  } else if (!checked.refusal) {
    checked.refusal = simple(request, checked.entry, &value);
  }
  std::string frame(sizeof(Header), '\0');
  if (checked.refusal) {
    const std::string& text = checked.refusal.message;
    const uint32_t length = static_cast<uint32_t>(std::min<size_t>(text.size(), kMaxMessage));
    frame.append(reinterpret_cast<const char*>(&length), sizeof length).append(text, 0, length);
  } else if (answer || header.operation == kVersionOf) {
    frame.append(reinterpret_cast<const char*>(&value), sizeof value);
    if (answer && answer->elements) frame.append(answer->elements->data(), answer->bytes);
  } else {
    frame += elements;
  }
  const Header reply =
      header_of(header.operation, checked.refusal.status, header.number, frame.size() - sizeof(Header));
  std::memcpy(frame.data(), &reply, sizeof reply);
  counters.bytes_out.fetch_add(frame.size(), std::memory_order_relaxed);
  return frame;
}

void Stream::send(Line& line, uint16_t operation, uint64_t number, const Refusal& refusal, const void* body,
                  size_t bytes, const void* elements, size_t more) {
  uint32_t length = 0;
  iovec parts[4];
  size_t count = 1;
  const auto put = [&](const void* data, size_t size) {
    if (size) parts[count++] = {const_cast<void*>(data), size};
  };
  if (refusal) {
    length = static_cast<uint32_t>(std::min<size_t>(refusal.message.size(), kMaxMessage));
    put(&length, sizeof length);
    put(refusal.message.data(), length);
  } else {
    put(body, bytes);
    put(elements, more);
  }
  size_t total = 0;
  for (size_t i = 1; i < count; ++i) total += parts[i].iov_len;
  Header header = header_of(operation, refusal.status, number, total);
  parts[0] = {&header, sizeof header};
  line.send(parts, count);
  counters.bytes_out.fetch_add(sizeof header + total, std::memory_order_relaxed);
}

// A request against the table, before anything is allocated for it.
Stream::Checked Stream::check(const Request& request) const {
  Checked checked;
  const uint16_t operation = request.header.operation;
  if (operation == kAcknowledge) return checked;
  const uint64_t segment = request.read.segment;  // the first field of every other head
  checked.entry = table_->find(segment);
  const Entry& entry = checked.entry;
  if (!entry.region) {
    checked.refusal = refuse(kClosed, "segment %llu is not attached in this session",
                             static_cast<unsigned long long>(segment));
  } else if (is_update(operation)) {
    checked.refusal = check_update(request, entry);
  } else if (operation == kRead) {
    const ReadHead& read = request.read;
    if (read.offset > entry.count || read.count > entry.count - read.offset) {
      checked.refusal = refuse(kRangeError, "read: %llu elements at offset %llu run past the segment (%zu elements)",
                               static_cast<unsigned long long>(read.count),
                               static_cast<unsigned long long>(read.offset), entry.count);
    } else if (read.count == 0 || read.count > kReadBytes / entry.dtype.size) {
      checked.refusal = refuse(kProtocolError, "read: a piece of %llu elements, 1 to %zu are allowed",
                               static_cast<unsigned long long>(read.count), kReadBytes / entry.dtype.size);
    }
  }
  return checked;
}

// Sends the range chunk by chunk. Straight from the mapping a chunk could tear, so it is copied out whole first, or
// sent under its lock.
void Stream::answer_read(Line& line, const Request& request, const Entry& entry) {
  const ReadHead& head = request.read;
  const size_t item = entry.dtype.size, total = head.count * item;
  const size_t per_chunk = entry.region->per_chunk();
  Header header = header_of(kRead, kGood, request.header.number, total);
  alignas(64) char own[kSmallRead];
  std::shared_ptr<Buffer> room;
  if (total > sizeof own) room = Buffer::take(std::min(total, kPieceBytes));
  char* out = room ? room->data() : own;
  if (total >= kHoldBytes) line.hold();
  for (size_t done = 0; done < head.count;) {
    const size_t at = head.offset + done;
    const size_t length = std::min(head.count - done, per_chunk - at % per_chunk);
    iovec parts[2] = {{&header, sizeof header}, {entry.region->at(at), length * item}};
    if (done) parts[0] = parts[1];
    size_t left = done ? 1 : 2;
    if (room) line.await_room();  // what does not fit is copied under the lock: let it fit
    if (!send_in_place(line, entry, at, length, parts, &left, out)) {
      const Refusal refusal = read_piece(head.segment, entry, at, length, out);
      if (refusal && done == 0) return send(line, kRead, header.number, refusal, nullptr, 0);
      if (refusal) throw LineError{LineError::late, 0, "a read's later chunk could not be had"};
      parts[left - 1].iov_base = out;
    }
    if (left) line.send(parts, left);
    done += length;
  }
  counters.bytes_out.fetch_add(sizeof header + total, std::memory_order_relaxed);
}

// Under the chunk's lock, when nobody has it: sends what the socket has room for, at once, and copies the rest to
// out. Saves the copy of a large read; holds the lock no longer than a writer does. False: nothing was done.
bool Stream::send_in_place(Line& line, const Entry& entry, size_t offset, size_t count, iovec* parts, size_t* left,
                           char* out) {
  const Region& region = *entry.region;
  if (region.readonly() || count * region.item() <= kSmallRead) return false;
  const Table::Pass pass(*table_);
  if (!pass.granted()) throw revoked();
  fetch_pages(region.at(offset), count * region.item(), 4);
  const size_t chunk = offset / region.per_chunk();
  ChunkWords& words = region.words(chunk);
  ThreadIdentity& me = this_thread();
  if (owner_of(words.lock.load(std::memory_order_relaxed)) != 0 || !lock_try(words.lock, me)) return false;
  if (words.sequence.load(std::memory_order_relaxed) & 1) {  // a dead writer's: as whole as it will be
    region.begin_write(chunk);
    region.finish_write(chunk);
  }
  *left = line.send_some(parts, *left);
  if (*left) {
    iovec& rest = parts[*left - 1];
    std::memcpy(out, rest.iov_base, rest.iov_len);
    rest.iov_base = out;
  }
  unlock(words.lock, me);
  return true;
}

Refusal Stream::read_piece(uint64_t segment, const Entry& entry, size_t offset, size_t count, char* out) {
  const Table::Pass pass(*table_);
  if (!pass.granted()) throw revoked();
  ReadPass read(*entry.region, offset, count, out);
  return run(read, segment, "read");
}

// What changes nothing.
Refusal Stream::simple(const Request& request, const Entry& entry, uint64_t* value) {
  if (request.header.operation == kVersionOf) {
    *value = entry.region->head().version.load(std::memory_order_acquire);
    return {};
  }
  const std::lock_guard<std::mutex> guard(mutex_);
  if (request.acknowledge > counters.applied) {
    return refuse(kProtocolError, "acknowledge: sequence %llu is not applied yet (%llu are)",
                  static_cast<unsigned long long>(request.acknowledge),
                  static_cast<unsigned long long>(counters.applied.load()));
  }
  settle(request.acknowledge);
  return {};
}

// Forgets what the client has. An old connection's late frame may name less than is known: nothing to do.
void Stream::settle(uint64_t acknowledged) {
  if (acknowledged > counters.acknowledged) counters.acknowledged = acknowledged;
  while (!kept_.empty() && kept_.front()->sequence <= acknowledged) kept_.pop_front();
  counters.held = kept_.size();
}

Refusal Stream::run(Pass& pass, uint64_t segment, const char* verb) {
  Outcome outcome;
  double waited = 0, next_call = 1;
  const auto still_waiting = [&](size_t chunk, uint32_t owner, double seconds) {
    if (seconds < waited) next_call = 1;  // another chunk is waited for
    waited = seconds;
    if (on_stuck_ && owner && seconds >= next_call) {
      next_call += 1;
      on_stuck_(segment, chunk, owner, seconds);
    }
    return seconds < options_.patience && !table_->revoked();
  };
  const bool one_chunk = pass.end_chunk() - pass.first_chunk() == 1;
  if (!one_chunk || !run_quickly(pass, outcome)) outcome = run_pass(pass, 1, still_waiting);
  if (outcome.kind == Outcome::done) return {};
  if (outcome.kind == Outcome::refused) {
    return refuse(kNonFinite, "%s: element %zu of the segment would get NaN or Inf; nothing done from its chunk on",
                  verb, outcome.element);
  }
  if (table_->revoked()) throw revoked();
  return refuse(kWaitTimeout, "%s: the lock of chunk %zu was not to be had for %.0f s", verb, outcome.chunk, waited);
}

}  // namespace smb::net
