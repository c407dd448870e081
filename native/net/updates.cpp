// Updates of a stream: checked against the table, put in sequence, applied once.
#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>

#include "moves.hpp"
#include "smb/kernels.hpp"
#include "stream.hpp"
#include "wire.hpp"

namespace smb::net {
namespace {

using ull = unsigned long long;

const char* verb_of(uint16_t operation) {
  switch (operation) {
    case kWrite: return "write";
    case kExchange: return "exchange";
    default: return "accumulate";
  }
}

AnswerPtr refused(const Request& request, Refusal refusal) {
  auto answer = std::make_shared<Answer>();
  answer->operation = request.header.operation;
  answer->refusal = std::move(refusal);
  return answer;
}

Refusal would_spoil(size_t element) {
  return refuse(kNonFinite, "exchange: element %zu of the segment would get NaN or Inf; nothing done from its chunk on",
                element);
}

Refusal check_scalar(const Request& request) {
  const double scalar = request.header.operation == kAccumulateFrom ? request.from.scale : request.update.scalar;
  if (request.header.operation == kExchange) {
    if (scalar > 0 && scalar <= 1) return {};
    return refuse(kRequestError, "exchange: alpha is %g: must be above 0 and at most 1", scalar);
  }
  if (std::fabs(scalar) <= FLT_MAX) return {};
  return refuse(kRequestError, "accumulate: scale is %g: must be a finite float32", scalar);
}

}  // namespace

Refusal Stream::check_update(const Request& request, const Entry& entry) const {
  const uint16_t operation = request.header.operation;
  const char* verb = verb_of(operation);
  const UpdateHead& head = request.update;
  if (!entry.writable) {
    return refuse(kNotPermitted, "%s: segment %llu is attached read-only", verb, static_cast<ull>(head.segment));
  }
  if (operation != kWrite) {
    if (entry.dtype != kFloat32) {
      return refuse(kTypeMismatch, "%s: needs a segment of float32, this one holds %s", verb, name_of(entry.dtype));
    }
    if (Refusal refusal = check_scalar(request)) return refusal;
    if (operation == kAccumulateFrom) return {};
    if (head.wire >= kWires || (head.wire >= kAnew && operation != kExchange)) {
      return refuse(kProtocolError, "%s: wire type %u is none of its own", verb, head.wire);
    }
  }
  if (head.offset > entry.count || head.count > entry.count - head.offset) {
    return refuse(kRangeError, "%s: %llu elements at offset %llu run past the segment (%zu elements)", verb,
                  static_cast<ull>(head.count), static_cast<ull>(head.offset), entry.count);
  }
  const size_t per_chunk = entry.region->per_chunk();
  if (head.last > kUncounted || (head.count == 0 && head.last == kMore)) {
    return refuse(kProtocolError, "%s: a piece of %llu elements with last %u", verb, static_cast<ull>(head.count),
                  head.last);
  }
  if (head.count > per_chunk - head.offset % per_chunk) {
    return refuse(kProtocolError, "%s: %llu elements at offset %llu do not lie in one chunk (%zu elements each)", verb,
                  static_cast<ull>(head.count), static_cast<ull>(head.offset), per_chunk);
  }
  const size_t bytes = operation == kWrite ? head.count * entry.dtype.size : wire_bytes(head.wire, head.count);
  const size_t given = request.header.length - head_bytes(operation);
  if (given == bytes && Memory::fits(bytes)) return {};
  if (given == bytes) {
    return refuse(kOutOfMemory, "%s: no room for %zu bytes: all streams hold %zu of %zu", verb, bytes, Memory::used(),
                  Memory::limit());
  }
  return refuse(kProtocolError, "%s: %zu bytes follow the head, its %llu elements take %zu", verb, given,
                static_cast<ull>(head.count), bytes);
}

// The remembered reply, or a refusal, when the piece is not the next one; else nullptr.
AnswerPtr Stream::in_sequence(const Request& request) {
  const uint64_t sequence = request.update.sequence, applied = counters.applied;
  if (request.update.acknowledged > applied || request.update.acknowledged >= sequence) {
    return refused(request, refuse(kProtocolError, "sequence %llu: acknowledges %llu, %llu are applied",
                                   static_cast<ull>(sequence), static_cast<ull>(request.update.acknowledged),
                                   static_cast<ull>(applied)));
  }
  settle(request.update.acknowledged);
  if (sequence <= applied) {
    for (const AnswerPtr& known : kept_) {
      if (known->sequence == sequence) return known;
    }
    return refused(request, refuse(kProtocolError, "sequence %llu: its reply was acknowledged before",
                                   static_cast<ull>(sequence)));
  }
  if (sequence != applied + 1) {
    return refused(request, refuse(kProtocolError, "sequence %llu: the next one is %llu", static_cast<ull>(sequence),
                                   static_cast<ull>(applied + 1)));
  }
  if (kept_.size() < options_.window) return nullptr;
  return refused(request, refuse(kProtocolError, "sequence %llu: %zu replies wait to be acknowledged, no more may",
                                 static_cast<ull>(sequence), kept_.size()));
}

AnswerPtr Stream::update(const Request& request, const Checked& checked, const std::shared_ptr<Buffer>& elements,
                         Arrival* arrival) {
  const std::lock_guard<std::mutex> guard(mutex_);
  if (AnswerPtr known = in_sequence(request)) return known;
  auto answer = std::make_shared<Answer>();
  answer->operation = request.header.operation;
  answer->sequence = request.update.sequence;
  const uint8_t last = request.header.operation == kAccumulateFrom ? uint8_t{kCounted} : request.update.last;
  const bool only_ends = last == kUncounted && request.header.operation != kAccumulateFrom && request.update.count == 0;
  if (checked.refusal) {
    answer->refusal = checked.refusal;
  } else if (failed_ && !only_ends) {
    answer->refusal = {failed_.status, "not done, an earlier piece of the operation was refused: " + failed_.message};
  } else {
    const Table::Pass pass(*table_);
    if (!pass.granted()) throw refuse(kClosed, "the session's access to its segments was revoked");
    answer->refusal = apply(request, checked.entry, elements, arrival, *answer);
    if (answer->refusal) {
      answer->elements.reset();
    } else {
      answer->version = last == kCounted ? counted(request, *checked.entry.region)
                                         : checked.entry.region->head().version.load(std::memory_order_acquire);
    }
  }
  if (last != kMore) {
    failed_ = {};
  } else if (answer->refusal && !failed_) {
    failed_ = answer->refusal;
  }
  counters.applied = answer->sequence;
  kept_.push_back(answer);
  counters.held = kept_.size();
  counters.shadow_bytes = shadows_.bytes();
  return answer;
}

// Ends an operation of this stream: the version after it.
uint64_t Stream::counted(const Request& request, const Region& region) {
  const uint64_t version = region.count_update();
  uint64_t& seen = seen_[request.update.segment];
  if (request.header.operation == kExchange && seen) {
    counters.staleness = static_cast<int64_t>(version - seen) - 1;
  }
  seen = version;
  return version;
}

Refusal Stream::apply(const Request& request, const Entry& entry, const std::shared_ptr<Buffer>& elements,
                      Arrival* arrival, Answer& answer) {
  const UpdateHead& head = request.update;
  if (request.header.operation == kAccumulateFrom) return accumulate_from(request, entry);
  if (head.count == 0) return {};
  const size_t item = entry.dtype.size;
  if (request.header.operation != kWrite) fetch_pages(entry.region->at(head.offset), head.count * item, 1);
  switch (request.header.operation) {
    case kWrite: return write(request, entry, elements, arrival);
    case kAccumulate: return accumulate(request, entry, elements);
    default: return exchange(request, entry, elements, answer);
  }
}

Refusal Stream::write(const Request& request, const Entry& entry, const std::shared_ptr<Buffer>& elements,
                      Arrival* arrival) {
  const UpdateHead& head = request.update;
  if (!arrival) {
    WritePass pass(*entry.region, head.offset, head.count, elements->data());
    return run(pass, head.segment, "write");
  }
  ArrivalPass pass(*entry.region, head.offset, head.count, *arrival);
  Refusal refusal = run(pass, head.segment, "write");
  // Not applied: the client sends the piece again over its next connection.
  if (arrival->broken) throw LineError{LineError::ended, 0, "the stream ended in a frame"};
  return refusal;
}

Refusal Stream::accumulate(const Request& request, const Entry& entry, std::shared_ptr<Buffer> elements) {
  const UpdateHead& head = request.update;
  if (head.wire != kWireFloat32) {
    const std::shared_ptr<Buffer> values = Buffer::take(head.count * sizeof(float));
    decode(head.wire, values->floats(), elements->data(), head.count);
    elements = values;
  }
  AccumulatePass pass(*entry.region, head.offset, head.count, elements->floats(), static_cast<float>(head.scalar));
  return run(pass, head.segment, "accumulate");
}

Refusal Stream::accumulate_from(const Request& request, const Entry& entry) {
  const FromHead& head = request.from;
  const Entry source = table_->find(head.source);
  if (!source.region) {
    return refuse(kClosed, "segment %llu is not attached in this session", static_cast<ull>(head.source));
  }
  if (source.dtype != kFloat32) {
    return refuse(kTypeMismatch, "accumulate: needs a source of float32, this one holds %s", name_of(source.dtype));
  }
  if (source.region == entry.region) return refuse(kRequestError, "accumulate: source and target are the same segment");
  if (head.offset > entry.count || source.count > entry.count - head.offset) {
    return refuse(kRangeError, "accumulate: %zu elements at offset %llu run past the segment (%zu elements)",
                  source.count, static_cast<ull>(head.offset), entry.count);
  }
  AccumulateSegmentPass pass(*entry.region, head.offset, source.count, *source.region, static_cast<float>(head.scale));
  return run(pass, head.segment, "accumulate");
}

Refusal Stream::exchange(const Request& request, const Entry& entry, const std::shared_ptr<Buffer>& elements,
                         Answer& answer) {
  const UpdateHead& head = request.update;
  answer.elements = elements;
  answer.bytes = wire_bytes(head.wire, head.count);
  float* values = elements->floats();
  if (head.wire == kMoved) {
    ExchangePass pass(*entry.region, head.offset, head.count, values, static_cast<float>(head.scalar));
    return run(pass, head.segment, "exchange");
  }
  if (head.wire != kWireFloat32 && head.wire != kAnew) return exchange_quantised(request, entry, *elements, answer);
  const size_t bad = first_nonfinite_f32(values, 1.0f, head.count);
  if (bad < head.count) {
    return would_spoil(head.offset + bad);
  }
  std::shared_ptr<Buffer> before;  // x, where a shadow of it is to be kept
  if (head.wire == kAnew) {
    if (!shadows_.fits(head.segment, head.offset)) {
      return refuse(kOutOfMemory, "exchange: no room for a shadow: %zu bytes of %zu, all streams hold %zu of %zu",
                    shadows_.bytes(), options_.shadow_limit, Memory::used(), Memory::limit());
    }
    before = Buffer::take(head.count * sizeof(float));
    std::memcpy(before->data(), values, head.count * sizeof(float));
  }
  PushPass pass(*entry.region, head.offset, head.count, values, static_cast<float>(head.scalar));
  Refusal refusal = run(pass, head.segment, "exchange");
  if (before && !refusal) {
    difference(shadows_.keep(head.segment, head.offset, head.count), before->floats(), values, head.count);
  }
  return refusal;
}

// q in, Q(d) out, in the same buffer. The shadow changes only when the move was made.
Refusal Stream::exchange_quantised(const Request& request, const Entry& entry, Buffer& elements, Answer&) {
  const UpdateHead& head = request.update;
  float* shadow = shadows_.find(head.segment, head.offset, head.count);
  if (!shadow) {
    return refuse(kRequestError, "exchange: no shadow of %llu elements at offset %llu: the first one sends float32",
                  static_cast<ull>(head.count), static_cast<ull>(head.offset));
  }
  const std::shared_ptr<Buffer> worker = Buffer::take(head.count * sizeof(float));
  const std::shared_ptr<Buffer> d = Buffer::take(head.count * sizeof(float));
  decode(head.wire, worker->floats(), elements.data(), head.count);
  add(worker->floats(), shadow, head.count);
  const size_t bad = first_nonfinite_f32(worker->floats(), 1.0f, head.count);
  if (bad < head.count) {
    return would_spoil(head.offset + bad);
  }
  QuantisedPass pass(*entry.region, head.offset, head.count, head.wire, worker->floats(), d->floats(), elements.data(),
                     static_cast<float>(head.scalar));
  Refusal refusal = run(pass, head.segment, "exchange");
  if (!refusal) std::memcpy(shadow, worker->floats(), head.count * sizeof(float));
  return refusal;
}

}  // namespace smb::net
