// The Python face of the data operations over sockets: the daemon's Table and Stream, the client's transfers.
#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include <cfloat>
#include <cmath>

#include "drive.hpp"
#include "smb/bind.hpp"
#include "smb/mapping.hpp"
#include "stream.hpp"

namespace py = pybind11;

namespace smb {
namespace {

using net::LineError;
using net::Refusal;

[[noreturn]] void throw_line_error(const LineError& error, const std::string& peer) {
  const std::string text = peer.empty() ? error.what : peer + ": " + error.what;
  if (error.kind == LineError::failed) {
    PyObject* value = Py_BuildValue("(is)", error.code, (text + ": " + std::strerror(error.code)).c_str());
    if (value) PyErr_SetObject(PyExc_OSError, value);
    Py_XDECREF(value);
  } else {
    PyErr_SetString(error.kind == LineError::late ? PyExc_TimeoutError : PyExc_ConnectionError, text.c_str());
  }
  throw py::error_already_set();
}

const char* class_of(uint16_t status) {
  switch (status) {
    case net::kRangeError: return "RangeError";
    case net::kTypeMismatch: return "TypeMismatch";
    case net::kNonFinite: return "NonFinite";
    case net::kOutOfMemory: return "OutOfMemory";
    case net::kNotPermitted: return "NotPermitted";
    case net::kWaitTimeout: return "WaitTimeout";
    case net::kProtocolError: return "ProtocolError";
    case net::kClosed: return "Closed";
    case net::kRequestError: return "RequestError";
    default: return "SmbError";
  }
}

[[noreturn]] void throw_refusal(const Refusal& refusal) {
  raise(class_of(refusal.status), "%s", refusal.message.c_str());
  throw py::error_already_set();
}

// The daemon's side -----------------------------------------------------------------------------------------

void add_segment(net::Table& table, uint64_t number, const NativeMapping& mapping, bool writable) {
  if (!mapping.region) {
    raise("Closed", "the mapping was closed");
    throw py::error_already_set();
  }
  table.add(number, {mapping.region, mapping.dtype, mapping.count, writable && !mapping.region->readonly()});
}

net::Stream::OnStuck called_with_the_gil(const py::object& callback) {
  if (callback.is_none()) return {};
  // Shared, so that copies of the function need no GIL; the last one goes with the Stream, in Python's hands.
  const auto call = std::make_shared<py::object>(callback);
  return [call](uint64_t segment, size_t chunk, uint32_t tid, double seconds) {
    const py::gil_scoped_acquire held;
    try {
      (*call)(segment, chunk, tid, seconds);
    } catch (py::error_already_set& error) {
      error.discard_as_unraisable("on_stuck");
    }
  };
}

std::unique_ptr<net::Stream> make_stream(std::shared_ptr<net::Table> table, double rate, double burst, size_t window,
                                         size_t shadow_limit, double patience, const py::object& on_stuck) {
  net::StreamOptions options;
  options.rate = rate;
  options.burst = burst > 0 ? burst : std::max(rate, 1.0);
  options.window = window;
  options.shadow_limit = shadow_limit;
  options.patience = patience;
  return std::make_unique<net::Stream>(std::move(table), options, called_with_the_gil(on_stuck));
}

py::object serve(net::Stream& stream, int fd, double idle_seconds) {
  net::Header header;
  bool control = false;
  std::optional<LineError> broken;
  std::optional<Refusal> refused;
  {
    const GilRelease released(true);
    try {
      net::Line line(fd, idle_seconds);
      control = stream.serve(line, &header);
    } catch (const LineError& error) {
      broken = error;
    } catch (const Refusal& refusal) {
      refused = refusal;
    }
  }
  if (broken) throw_line_error(*broken, "");
  if (refused) throw_refusal(*refused);
  if (!control) return py::none();
  return py::bytes(reinterpret_cast<const char*>(&header), sizeof header);
}

py::bytes handle(net::Stream& stream, const py::bytes& head, const py::buffer& body) {
  const py::buffer_info info = body.request();
  net::Header header;
  char* data = nullptr;
  Py_ssize_t size = 0;
  if (PyBytes_AsStringAndSize(head.ptr(), &data, &size) != 0) throw py::error_already_set();
  if (size != sizeof header) throw py::value_error("a header has 20 bytes");
  std::memcpy(&header, data, sizeof header);
  const size_t bytes = static_cast<size_t>(info.size * info.itemsize);
  if (bytes != header.length || !PyBuffer_IsContiguous(info.view(), 'C')) {
    throw py::value_error("the body is not what the header says");
  }
  std::string reply;
  std::optional<Refusal> refused;
  {
    const GilRelease released(true);
    try {
      reply = stream.handle(header, static_cast<const char*>(info.ptr));
    } catch (const Refusal& refusal) {
      refused = refusal;
    }
  }
  if (refused) throw_refusal(*refused);
  return py::bytes(reply);
}

void bind_daemon(py::module_& m) {
  using py::arg;
  py::class_<net::Table, std::shared_ptr<net::Table>>(m, "Table")
      .def(py::init<>())
      .def("add", add_segment, arg("number"), arg("mapping"), arg("writable"))
      .def("remove", &net::Table::remove, arg("number"), py::call_guard<py::gil_scoped_release>())
      .def("revoke", &net::Table::revoke, py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("revoked", &net::Table::revoked);
  py::class_<net::Stream> stream(m, "Stream");
  stream
      .def(py::init(&make_stream), arg("table"), py::kw_only(), arg("rate") = 0.0, arg("burst") = 0.0,
           arg("window") = 16, arg("shadow_limit") = size_t{1} << 30, arg("patience") = 60.0,
           arg("on_stuck") = py::none())
      .def("serve", serve, arg("fd"), arg("idle_seconds"))
      .def("handle", handle, arg("header"), arg("body"));
  const auto counter = [&stream](const char* name, std::atomic<uint64_t> net::StreamCounters::*field) {
    stream.def_property_readonly(name, [field](const net::Stream& self) { return (self.counters.*field).load(); });
  };
  counter("applied", &net::StreamCounters::applied);
  counter("acknowledged", &net::StreamCounters::acknowledged);
  counter("held", &net::StreamCounters::held);
  counter("bytes_in", &net::StreamCounters::bytes_in);
  counter("bytes_out", &net::StreamCounters::bytes_out);
  counter("operations", &net::StreamCounters::operations);
  counter("throttled", &net::StreamCounters::throttled);
  counter("shadow_bytes", &net::StreamCounters::shadow_bytes);
  stream.def_property_readonly("last_seen", [](const net::Stream& self) {
    return static_cast<double>(self.counters.last_seen.load()) * 1e-9;
  });
  stream.def_property_readonly("staleness", [](const net::Stream& self) { return self.counters.staleness.load(); });
  m.attr("MAX_DATA_BODY") = net::kMaxBody;
  py::dict heads;
  for (uint16_t code = 0; code < 64; ++code) {
    if (const size_t bytes = net::head_bytes(code)) heads[py::int_(code)] = bytes;
  }
  m.attr("DATA_HEADS") = heads;
  m.def("stream_memory", [] { return net::Memory::used(); });
  m.def("limit_stream_memory", &net::Memory::set_limit, arg("bytes"));
}

// The client's side -----------------------------------------------------------------------------------------

// A transfer and what keeps its memory: the user's array.
struct ArrayTransfer {
  py::object stream;  // kept alive
  Array array;
  std::optional<net::Transfer> transfer;
  const char* verb = "";
  size_t count = 0;    // of the segment
  std::string joined;  // a short frame for outgoing()
};

constexpr struct {
  const char* name;
  uint16_t operation;
} kVerbs[] = {{"read", net::kRead},          {"write", net::kWrite},
              {"accumulate", net::kAccumulate}, {"exchange", net::kExchange},
              {"accumulate_from", net::kAccumulateFrom}, {"version", net::kVersionOf},
              {"acknowledge", net::kAcknowledge}, {"count", net::kWrite}};

void need(bool fine) {
  if (!fine) throw py::error_already_set();
}

// What the mapping checks before its operations, with its messages.
void check_array(const ArrayTransfer& made, const net::Order& order, Py_ssize_t offset, DType dtype) {
  const Array& array = made.array;
  if (order.operation == net::kAccumulate || order.operation == net::kExchange) {
    if (dtype != kFloat32) {
      raise("TypeMismatch", "%s: needs a segment of float32, this one holds %s", made.verb, name_of(dtype));
      throw py::error_already_set();
    }
  }
  if (array.dtype != dtype) {
    raise("TypeMismatch", "%s: the segment holds %s, the array %s", made.verb, name_of(dtype), name_of(array.dtype));
    throw py::error_already_set();
  }
  const bool whole = order.stripes == 1;  // a stripe's range is checked against the larger segment by its caller
  if (offset >= 0 && (!whole || (static_cast<size_t>(offset) <= made.count &&
                                 array.count <= made.count - static_cast<size_t>(offset)))) {
    return;
  }
  raise("RangeError", "%s: %zu elements at offset %zd run past the segment (%zu elements)", made.verb, array.count,
        offset, made.count);
  throw py::error_already_set();
}

void check_scalar(const net::Order& order, double scalar) {
  if (order.operation == net::kExchange && !(scalar > 0 && scalar <= 1)) {
    raise("RequestError", "exchange: alpha is %R: must be above 0 and at most 1", py::float_(scalar).ptr());
    throw py::error_already_set();
  }
  if (order.operation != net::kExchange && !(std::fabs(scalar) <= FLT_MAX)) {
    raise("RequestError", "accumulate: scale is %R: must be a finite float32", py::float_(scalar).ptr());
    throw py::error_already_set();
  }
}

std::unique_ptr<ArrayTransfer> make_transfer(py::object stream, const char* verb, uint64_t segment,
                                             const py::object& array, Py_ssize_t offset, double scalar, size_t count,
                                             const char* dtype, uint8_t wire, bool counts, size_t stripe,
                                             size_t stripes, uint64_t source) {
  auto made = std::make_unique<ArrayTransfer>();
  net::Order order{};
  for (const auto& known : kVerbs) {
    if (std::strcmp(verb, known.name) == 0) {
      made->verb = known.name;
      order.operation = known.operation;
    }
  }
  const DType type = dtype_of_name(dtype);
  if (!order.operation || type.size == 0 || stripes == 0 || stripe >= stripes || wire >= net::kAnew) {
    throw py::value_error("no such operation, element type, wire type or stripe");
  }
  made->count = count;
  order.segment = segment;
  order.item = type.size;
  order.stripe = stripe;
  order.stripes = stripes;
  order.wire = wire;
  order.scalar = scalar;
  order.source = source;
  order.last = counts && stripes == 1 ? net::kCounted : net::kUncounted;
  if (!array.is_none()) {
    const bool changed = order.operation == net::kRead || order.operation == net::kExchange;
    need(made->array.take(array.ptr(), changed, made->verb));
    check_array(*made, order, offset, type);
    order.data = static_cast<char*>(made->array.data);
    order.count = made->array.count;
  } else if (offset < 0) {
    raise("RangeError", "%s: offset %zd", made->verb, offset);
    throw py::error_already_set();
  }
  order.offset = static_cast<size_t>(offset);
  if (order.operation >= net::kAccumulate && order.operation <= net::kAccumulateFrom) check_scalar(order, scalar);
  if (order.count == 0 && !array.is_none() && net::is_update(order.operation) && stripes == 1) {
    order.operation = net::kVersionOf;  // nothing to do, and the version is asked for
  }
  made->transfer.emplace(stream.cast<net::ClientStream&>(), order);
  made->stream = std::move(stream);
  return made;
}

[[noreturn]] void throw_nonfinite(const ArrayTransfer& self, size_t element, size_t chunk) {
  const py::object type = py::reinterpret_steal<py::object>(error_class("NonFinite"));
  const py::object error = type(py::str("{}: element {} of the values is NaN or Inf (chunk {}); the chunks before it "
                                        "were done, nothing from it on")
                                    .format(self.verb, element, chunk));
  error.attr("chunk") = chunk;
  error.attr("element") = element;
  PyErr_SetObject(type.ptr(), error.ptr());
  throw py::error_already_set();
}

// The version after a finished transfer, or what it came to.
uint64_t outcome(const ArrayTransfer& self) {
  const net::Transfer& transfer = *self.transfer;
  if (transfer.refusal()) throw_refusal(transfer.refusal());
  if (transfer.bad) throw_nonfinite(self, transfer.bad->first, transfer.bad->second);
  return transfer.version();
}

bool signal_waits() {
  const py::gil_scoped_acquire held;
  return PyErr_CheckSignals() != 0;
}

uint64_t run(ArrayTransfer& self, int fd, double timeout, const char* peer, bool ticking) {
  std::optional<LineError> broken;
  std::optional<std::string> nonsense;
  {
    const GilRelease released(true);
    try {
      self.transfer->restart();
      const double seconds = std::min(std::max(timeout, 0.0), 1e9);
      net::drive(*self.transfer, fd, ticking, static_cast<int64_t>(seconds * 1e9), signal_waits);
    } catch (const LineError& error) {
      broken = error;
    } catch (const net::Nonsense& error) {
      nonsense = error.what;
    }
  }
  need(!PyErr_Occurred());  // a signal's exception
  if (broken) throw_line_error(*broken, peer);
  if (nonsense) {
    raise("TransportError", "%s: %s", peer, nonsense->c_str());
    throw py::error_already_set();
  }
  return outcome(self);
}

// What is to be sent next, for a socket that Python drives: empty when there is nothing now. Valid until sent().
py::memoryview outgoing(ArrayTransfer& self) {
  constexpr size_t kRecord = 16384;  // of TLS: a head and few elements go in one
  iovec parts[2] = {};
  if (self.transfer->outgoing(parts) == 2 && parts[0].iov_len + parts[1].iov_len <= kRecord) {
    self.joined.assign(static_cast<char*>(parts[0].iov_base), parts[0].iov_len);
    self.joined.append(static_cast<char*>(parts[1].iov_base), parts[1].iov_len);
    parts[0] = {self.joined.data(), self.joined.size()};
  }
  const void* data = parts[0].iov_len ? parts[0].iov_base : "";
  return py::memoryview::from_memory(data, static_cast<ssize_t>(parts[0].iov_len));
}

py::memoryview incoming(ArrayTransfer& self) {
  const iovec room = self.transfer->incoming();
  return py::memoryview::from_memory(room.iov_base, static_cast<ssize_t>(room.iov_len));
}

template <class Take>
void take_reply(size_t bytes, const Take& take) {
  std::optional<std::string> nonsense;
  {
    const GilRelease released(bytes > kKeepGilBytes);
    try {
      take();
    } catch (const net::Nonsense& error) {
      nonsense = error.what;
    }
  }
  if (!nonsense) return;
  raise("TransportError", "%s", nonsense->c_str());
  throw py::error_already_set();
}

void received(ArrayTransfer& self, size_t bytes) {
  take_reply(bytes, [&] { self.transfer->received(bytes); });
}

void absorb(ArrayTransfer& self, const py::bytes& data) {
  const std::string_view bytes = data;
  take_reply(bytes.size(), [&] { self.transfer->absorb(bytes.data(), bytes.size()); });
}

py::tuple stats(const net::ClientStream& stream, uint64_t segment) {
  const auto found = stream.stats.find(segment);
  const net::WireStats& s = found == stream.stats.end() ? net::WireStats{} : found->second;
  return py::make_tuple(s.bytes_sent, s.bytes_received, s.squared_error, s.squared_sum);
}

void bind_client(py::module_& m) {
  using py::arg;
  py::class_<net::ClientStream>(m, "ClientStream")
      .def(py::init<size_t>(), arg("window") = 8)
      .def("reset", &net::ClientStream::reset)
      .def("forget", &net::ClientStream::forget, arg("segment"))
      .def("next_number", [](net::ClientStream& self) { return ++self.number; })
      .def("stats", stats, arg("segment"))
      .def_readonly("sequence", &net::ClientStream::sequence)
      .def_readonly("acknowledged", &net::ClientStream::acknowledged);
  py::class_<ArrayTransfer>(m, "Transfer")
      .def(py::init(&make_transfer), arg("stream"), arg("verb"), arg("segment"),
           arg("array") = py::none(), arg("offset") = 0, arg("scalar") = 1.0, arg("count") = 0,
           arg("dtype") = "float32", arg("wire") = 0, arg("counts") = true, arg("stripe") = 0, arg("stripes") = 1,
           arg("source") = 0)
      .def("drive", run, arg("fd"), arg("timeout"), arg("peer"), arg("ticking") = false)
      .def("restart", [](ArrayTransfer& self) { self.transfer->restart(); })
      .def("give_up", [](ArrayTransfer& self) { self.transfer->give_up(); })
      .def("outgoing", outgoing)
      .def("sent", [](ArrayTransfer& self, size_t bytes) { self.transfer->sent(bytes); }, arg("bytes"))
      .def("incoming", incoming)
      .def("received", received, arg("bytes"))
      .def("absorb", absorb, arg("data"))
      .def("outcome", outcome)
      .def_property_readonly("in_place", [](const ArrayTransfer& self) { return self.transfer->in_place(); })
      .def_property_readonly("expecting", [](const ArrayTransfer& self) { return self.transfer->expecting(); })
      .def_property_readonly("finished", [](const ArrayTransfer& self) { return self.transfer->finished(); });
}

// Increments as they travel, for a transport that moves them by itself --------------------------------------

void take_increments(Array& values, py::handle object, bool writable, Array& data, py::handle bytes, unsigned wire) {
  need(values.take(object.ptr(), writable, "values"));
  need(data.take(bytes.ptr(), !writable, "data"));
  if (values.dtype != kFloat32 || data.dtype.size != 1 || wire >= net::kAnew) {
    throw py::value_error("values must hold float32, data single bytes, and the wire type must be a known one");
  }
  if (data.bytes() == net::wire_bytes(static_cast<uint8_t>(wire), values.count)) return;
  PyErr_Format(PyExc_ValueError, "%zu bytes for %zu elements, they take %zu", data.bytes(), values.count,
               net::wire_bytes(static_cast<uint8_t>(wire), values.count));
  throw py::error_already_set();
}

void to_wire(py::object data, py::object values, unsigned wire) {
  Array out, in;
  take_increments(in, values, false, out, data, wire);
  const GilRelease released(in.bytes() > kKeepGilBytes);
  net::encode(static_cast<uint8_t>(wire), out.data, in.floats(), in.count);
}

void from_wire(py::object values, py::object data, unsigned wire) {
  Array out, in;
  take_increments(out, values, true, in, data, wire);
  const GilRelease released(out.bytes() > kKeepGilBytes);
  net::decode(static_cast<uint8_t>(wire), out.floats(), in.data, out.count);
}

void bind_wire(py::module_& m) {
  using py::arg;
  m.def(
      "wire_bytes", [](unsigned wire, size_t count) { return net::wire_bytes(static_cast<uint8_t>(wire), count); },
      arg("wire"), arg("count"));
  m.def("to_wire", to_wire, arg("data"), arg("values"), arg("wire"));
  m.def("from_wire", from_wire, arg("values"), arg("data"), arg("wire"));
}

}  // namespace

void bind_net(py::module_& m) {
  bind_daemon(m);
  bind_client(m);
  bind_wire(m);
}

}  // namespace smb
