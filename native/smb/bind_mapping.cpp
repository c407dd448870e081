// The native base of smb.segment.Mapping, and Life.
#include <sys/mman.h>

#include <cmath>
#include <system_error>

#include "bind.hpp"
#include "mapping.hpp"
#include "operations.hpp"

namespace py = pybind11;

namespace smb {
namespace {

// read, write, accumulate and exchange are called at every step of training, a microsecond apart for small
// segments: they are plain METH_FASTCALL methods, which cost a third of what a pybind11 method costs.
constexpr size_t kMaxArguments = 6;

struct Arguments {
  const char* function;
  const char* names[kMaxArguments];
  size_t total;
  size_t required;
  PyObject* value[kMaxArguments] = {};

  bool spread(PyObject* const* args, Py_ssize_t positional, PyObject* keywords) {
    const size_t given = static_cast<size_t>(positional);
    if (given > total) {
      PyErr_Format(PyExc_TypeError, "%s() takes %zu arguments, got %zu", function, total, given);
      return false;
    }
    for (size_t i = 0; i < given; ++i) value[i] = args[i];
    const Py_ssize_t named = keywords ? PyTuple_GET_SIZE(keywords) : 0;
    for (Py_ssize_t i = 0; i < named; ++i) {
      if (!put(PyTuple_GET_ITEM(keywords, i), args[positional + i])) return false;
    }
    for (size_t i = 0; i < required; ++i) {
      if (value[i]) continue;
      PyErr_Format(PyExc_TypeError, "%s() lacks argument '%s'", function, names[i]);
      return false;
    }
    return true;
  }

  // The integer given as argument i, or fallback; *ok false with an error set.
  Py_ssize_t integer(size_t i, Py_ssize_t fallback, bool* ok) const {
    if (!value[i]) return fallback;
    const Py_ssize_t number = PyNumber_AsSsize_t(value[i], PyExc_OverflowError);
    if (number == -1 && PyErr_Occurred()) *ok = false;
    return number;
  }

  double real(size_t i, double fallback, bool* ok) const {
    if (!value[i]) return fallback;
    const double number = PyFloat_AsDouble(value[i]);
    if (number == -1.0 && PyErr_Occurred()) *ok = false;
    return number;
  }

 private:
  bool put(PyObject* name, PyObject* given) {
    for (size_t i = 0; i < total; ++i) {
      if (PyUnicode_CompareWithASCIIString(name, names[i]) != 0) continue;
      if (value[i]) break;
      value[i] = given;
      return true;
    }
    PyErr_Format(PyExc_TypeError, "%s() got an unexpected or doubled argument '%U'", function, name);
    return false;
  }
};

size_t thread_count(Py_ssize_t asked) { return static_cast<size_t>(std::max<Py_ssize_t>(asked, 1)); }

NativeMapping* mapping_of(PyObject* self) {
  try {
    return py::cast<NativeMapping*>(py::handle(self));
  } catch (const py::cast_error&) {
    PyErr_SetString(PyExc_TypeError, "not a Mapping");
    return nullptr;
  }
}

// The part of [offset, offset + n) that lies in this mapping: all of it, or a stripe's where the segment is one of several.
struct Range {
  Stripe stripe;
  size_t from = 0;   // offset as the caller gave it
  size_t begin = 0;  // in this mapping
  size_t count = 0;

  // Arguments first and first + 1 are stripe and stripes. False with an error set.
  bool take(const NativeMapping& mapping, const Arguments& given, size_t first, Py_ssize_t offset, size_t n) {
    bool ok = true;
    const Py_ssize_t index = given.integer(first, 0, &ok);
    const Py_ssize_t of = given.integer(first + 1, 1, &ok);
    if (!ok) return false;
    if (of == 1 && index == 0) {
      begin = static_cast<size_t>(offset);
      count = n;
      return mapping.in_range(given.function, offset, n);
    }
    if (index < 0 || index >= of || of > kMostStripes || offset < 0 || static_cast<size_t>(offset) > kMostElements) {
      raise("RequestError", "%s: no stripe %zd of %zd at offset %zd", given.function, index, of, offset);
      return false;
    }
    stripe = {static_cast<size_t>(index), static_cast<size_t>(of)};
    from = static_cast<size_t>(offset);
    const size_t per_chunk = mapping.region->per_chunk();
    begin = stripe.before(from, per_chunk);
    count = stripe.before(from + n, per_chunk) - begin;
    return mapping.in_range(given.function, static_cast<Py_ssize_t>(begin), count);
  }

  // The bytes of it, for the tally.
  size_t bytes(const Region& region) const { return count * region.item(); }

  // What an operation on this range is to return: a stripe's update is counted once all stripes are done.
  uint64_t finish(const Region& region, bool updated) const {
    return updated && stripe.of == 1 ? region.count_update() : region.head().version.load();
  }

 private:
  static constexpr Py_ssize_t kMostStripes = 1 << 16;
  static constexpr size_t kMostElements = size_t{1} << 48;
};

PyObject* version_object(uint64_t version) { return PyLong_FromUnsignedLongLong(version); }

PyObject* read(PyObject* self, PyObject* const* args, Py_ssize_t positional, PyObject* keywords) {
  Arguments given{"read", {"out", "offset", "threads", "stripe", "stripes"}, 5, 1};
  NativeMapping* mapping = mapping_of(self);
  bool ok = mapping && given.spread(args, positional, keywords) && mapping->usable();
  if (!ok) return nullptr;
  const Py_ssize_t offset = given.integer(1, 0, &ok);
  const Py_ssize_t threads = given.integer(2, 1, &ok);
  const std::shared_ptr<Region> region = mapping->region;
  Array out;
  Range range;
  if (!ok || !out.take(given.value[0], true, "read") || !mapping->same_dtype("read", out) ||
      !range.take(*mapping, given, 3, offset, out.count) || !mapping->apart("read", out)) {
    return nullptr;
  }
  if (range.count == 0) Py_RETURN_NONE;
  ReadPass pass(*region, range.begin, range.count, out.data);
  pass.spread(range.stripe, range.from);
  if (!mapping->perform(self, pass, thread_count(threads), "read")) return nullptr;
  mapping->tally.moved(*region, 0, range.bytes(*region));
  Py_RETURN_NONE;
}

PyObject* write(PyObject* self, PyObject* const* args, Py_ssize_t positional, PyObject* keywords) {
  Arguments given{"write", {"array", "offset", "threads", "stripe", "stripes"}, 5, 1};
  NativeMapping* mapping = mapping_of(self);
  bool ok = mapping && given.spread(args, positional, keywords) && mapping->writable();
  if (!ok) return nullptr;
  const Py_ssize_t offset = given.integer(1, 0, &ok);
  const Py_ssize_t threads = given.integer(2, 1, &ok);
  const std::shared_ptr<Region> region = mapping->region;
  Array source;
  Range range;
  if (!ok || !source.take(given.value[0], false, "write") || !mapping->same_dtype("write", source) ||
      !range.take(*mapping, given, 3, offset, source.count) || !mapping->apart("write", source)) {
    return nullptr;
  }
  if (range.count == 0) return version_object(range.finish(*region, false));
  WritePass pass(*region, range.begin, range.count, source.data);
  pass.spread(range.stripe, range.from);
  if (!mapping->perform(self, pass, thread_count(threads), "write")) return nullptr;
  const uint64_t version = range.finish(*region, true);
  mapping->tally.moved(*region, range.bytes(*region), 0);
  if (range.stripe.of == 1) mapping->tally.updated();
  return version_object(version);
}

PyObject* exchange(PyObject* self, PyObject* const* args, Py_ssize_t positional, PyObject* keywords) {
  Arguments given{"exchange", {"local", "alpha", "offset", "threads", "stripe", "stripes"}, 6, 2};
  NativeMapping* mapping = mapping_of(self);
  bool ok = mapping && given.spread(args, positional, keywords) && mapping->writable();
  if (!ok) return nullptr;
  const double alpha = given.real(1, 0, &ok);
  const Py_ssize_t offset = given.integer(2, 0, &ok);
  const Py_ssize_t threads = given.integer(3, 1, &ok);
  if (!ok) return nullptr;
  if (!(alpha > 0 && alpha <= 1)) {
    raise("RequestError", "exchange: alpha is %R: must be above 0 and at most 1", given.value[1]);
    return nullptr;
  }
  const std::shared_ptr<Region> region = mapping->region;
  Array local;
  Range range;
  if (!mapping->float32("exchange") || !local.take(given.value[0], true, "exchange") ||
      !mapping->same_dtype("exchange", local) || !range.take(*mapping, given, 4, offset, local.count) ||
      !mapping->apart("exchange", local)) {
    return nullptr;
  }
  if (range.count == 0) return version_object(range.finish(*region, false));
  ExchangePass pass(*region, range.begin, range.count, local.floats(), static_cast<float>(alpha));
  pass.spread(range.stripe, range.from);
  if (!mapping->perform(self, pass, thread_count(threads), "exchange")) return nullptr;
  const uint64_t version = range.finish(*region, true);
  mapping->tally.moved(*region, range.bytes(*region), range.bytes(*region));
  if (range.stripe.of == 1) mapping->tally.exchanged(*region, version);
  return version_object(version);
}

PyObject* accumulate_segment(PyObject* self, NativeMapping& mapping, const NativeMapping& source, float scale,
                             Py_ssize_t offset, size_t threads) {
  const std::shared_ptr<Region> to = mapping.region, from = source.region;
  if (!source.usable() || !source.float32("accumulate") || !mapping.in_range("accumulate", offset, source.count)) {
    return nullptr;
  }
  if (mapping.device == source.device && mapping.inode == source.inode) {
    raise("RequestError", "accumulate: source and target are the same segment");
    return nullptr;
  }
  AccumulateSegmentPass pass(*to, static_cast<size_t>(offset), source.count, *from, scale);
  if (!mapping.perform(self, pass, threads, "accumulate")) return nullptr;
  mapping.tally.moved(*to, source.count * to->item(), 0);
  mapping.tally.updated();
  return version_object(to->count_update());
}

PyObject* accumulate(PyObject* self, PyObject* const* args, Py_ssize_t positional, PyObject* keywords) {
  Arguments given{"accumulate", {"source", "scale", "offset", "threads", "stripe", "stripes"}, 6, 1};
  NativeMapping* mapping = mapping_of(self);
  bool ok = mapping && given.spread(args, positional, keywords) && mapping->writable();
  if (!ok) return nullptr;
  const float scale = static_cast<float>(given.real(1, 1.0, &ok));
  const Py_ssize_t offset = given.integer(2, 0, &ok);
  const size_t threads = thread_count(given.integer(3, 1, &ok));
  if (!ok || !mapping->float32("accumulate")) return nullptr;
  if (!std::isfinite(scale)) {
    raise("RequestError", "accumulate: scale is %R: must be a finite float32", given.value[1]);
    return nullptr;
  }
  if (py::isinstance<NativeMapping>(py::handle(given.value[0]))) {
    return accumulate_segment(self, *mapping, *mapping_of(given.value[0]), scale, offset, threads);
  }
  const std::shared_ptr<Region> region = mapping->region;
  Array source;
  Range range;
  if (!source.take(given.value[0], false, "accumulate") || !mapping->same_dtype("accumulate", source) ||
      !range.take(*mapping, given, 4, offset, source.count) || !mapping->apart("accumulate", source)) {
    return nullptr;
  }
  if (range.count == 0) return version_object(range.finish(*region, false));
  AccumulatePass pass(*region, range.begin, range.count, source.floats(), scale);
  pass.spread(range.stripe, range.from);
  if (!mapping->perform(self, pass, threads, "accumulate")) return nullptr;
  const uint64_t version = range.finish(*region, true);
  mapping->tally.moved(*region, range.bytes(*region), 0);
  if (range.stripe.of == 1) mapping->tally.updated();
  return version_object(version);
}

template <PyObject* (*method)(PyObject*, PyObject* const*, Py_ssize_t, PyObject*)>
void add_fast_method(py::handle type, const char* name, const char* doc) {
  static PyMethodDef definition;
  definition = {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(method)),
                METH_FASTCALL | METH_KEYWORDS, doc};
  PyObject* descriptor = PyDescr_NewMethod(reinterpret_cast<PyTypeObject*>(type.ptr()), &definition);
  if (descriptor == nullptr) throw py::error_already_set();
  type.attr(name) = py::reinterpret_steal<py::object>(descriptor);
}

void need(bool fine) {
  if (!fine) throw py::error_already_set();
}

// The last values without asking whether the daemon lives; returns how many chunks were half-written.
size_t rescue(py::object self, py::object out, Py_ssize_t offset) {
  NativeMapping& mapping = self.cast<NativeMapping&>();
  const std::shared_ptr<Region> region = mapping.region;
  if (!region) raise("Closed", "the mapping was closed");
  need(region != nullptr);
  Array array;
  need(array.take(out.ptr(), true, "rescue") && mapping.same_dtype("rescue", array) &&
       mapping.in_range("rescue", offset, array.count) && mapping.apart("rescue", array));
  if (array.count == 0) return 0;
  ReadPass pass(*region, static_cast<size_t>(offset), array.count, array.data, true);
  need(mapping.perform(self.ptr(), pass, 1, "rescue", false));
  return pass.torn();
}

// The first values, before anyone else knows the segment: no update, so the version stays 0.
void initialise(py::object self, py::object values, size_t threads) {
  NativeMapping& mapping = self.cast<NativeMapping&>();
  const std::shared_ptr<Region> region = mapping.region;
  need(mapping.writable());
  Array array;
  need(array.take(values.ptr(), false, "initial") && mapping.same_dtype("initial", array));
  if (array.count != mapping.count) {
    raise("RangeError", "initial: %zu elements for a segment of %zu", array.count, mapping.count);
    throw py::error_already_set();
  }
  WritePass pass(*region, 0, array.count, array.data);
  need(mapping.perform(self.ptr(), pass, threads, "initial"));
}

uint64_t version(const NativeMapping& mapping) {
  need(mapping.region || (raise("Closed", "the mapping was closed"), false));
  return mapping.region->head().version.load(std::memory_order_acquire);
}

// One update of which this mapping is a stripe is done everywhere.
uint64_t count_update(const NativeMapping& mapping) {
  need(mapping.writable());
  return mapping.region->count_update();
}

bool wait(NativeMapping& mapping, uint64_t wanted, double timeout) {
  constexpr int64_t kSlice = 200000000;
  need(mapping.usable());
  const int64_t deadline = monotonic_ns() + static_cast<int64_t>(std::min(std::max(timeout, 0.0), 1e9) * 1e9);
  for (;;) {
    const std::shared_ptr<Region> region = mapping.region;  // another one when the daemon was
    if (region->head().version.load(std::memory_order_acquire) >= wanted) return true;
    const int64_t left = deadline - monotonic_ns();
    if (left <= 0) return false;
    {
      const GilRelease released(true);
      region->await_version(wanted, std::min(left, kSlice));
    }
    need(PyErr_CheckSignals() == 0 && mapping.usable());
  }
}

// Session -> (operations, bytes in, bytes out, staleness or -1), as the clients tell it themselves.
py::dict tallies(const NativeMapping& mapping) {
  py::dict found;
  const std::shared_ptr<Region> region = mapping.region;
  for (size_t i = 0; region && i < kTallyLines; ++i) {
    const TallyLine& line = tally_line(*region, i);
    const uint64_t session = line.session.load(std::memory_order_relaxed);
    if (session == 0) continue;
    const int64_t stale = static_cast<int64_t>(std::min(line.stale.load(), uint64_t{1} << 62)) - 1;
    found[py::int_(session)] =
        py::make_tuple(line.operations.load(), line.bytes_in.load(), line.bytes_out.load(), stale);
  }
  return found;
}

size_t mend(NativeMapping& mapping, py::object tid_alive) {
  const std::shared_ptr<Region> region = mapping.region;
  need((mapping.region || (raise("Closed", "the mapping was closed"), false)) && !this_thread().held);
  if (region->readonly()) raise("NotPermitted", "repair: the segment is attached read-only");
  need(!region->readonly());
  return repair(*region, [&](uint32_t tid) {
    return tid_alive.is_none() ? !thread_exists(tid) : !tid_alive(tid).cast<bool>();
  });
}

py::list holders(const NativeMapping& mapping) {
  py::list found;
  need(mapping.region || (raise("Closed", "the mapping was closed"), false));
  for (size_t k = 0; k < mapping.region->chunks(); ++k) {
    const uint32_t owner = owner_of(mapping.region->words(k).lock.load(std::memory_order_relaxed));
    if (owner) found.append(py::make_tuple(k, owner));
  }
  return found;
}

// For tests: be a writer in the middle of a chunk, so that one can be killed or stopped there.
void hold_chunk(NativeMapping& mapping, size_t chunk, bool half_written) {
  need(mapping.writable());
  if (chunk >= mapping.region->chunks()) throw py::index_error("no such chunk");
  ThreadIdentity& me = this_thread();
  if (me.held || !lock_try(mapping.region->words(chunk).lock, me)) throw std::runtime_error("the lock is taken");
  if (half_written) mapping.region->begin_write(chunk);
}

void release_chunk(NativeMapping& mapping, size_t chunk) {
  need(mapping.writable());
  if (chunk >= mapping.region->chunks()) throw py::index_error("no such chunk");
  ThreadIdentity& me = this_thread();
  if (me.held != &mapping.region->words(chunk).lock) throw std::runtime_error("this thread does not hold it");
  if (mapping.region->words(chunk).sequence.load() & 1) mapping.region->finish_write(chunk);
  unlock(mapping.region->words(chunk).lock, me);
}

void prefault(NativeMapping& mapping, size_t threads, bool huge) {
  const std::shared_ptr<Region> region = mapping.region;
  const GilRelease released(true);
  region->prefault(threads, huge);
}

}  // namespace

void bind_mapping(py::module_& m) {
  using py::arg;
  py::register_exception_translator([](std::exception_ptr thrown) {
    try {
      if (thrown) std::rethrow_exception(thrown);
    } catch (const std::system_error& error) {
      PyObject* value = Py_BuildValue("(is)", error.code().value(), error.what());
      PyErr_SetObject(PyExc_OSError, value);
      Py_XDECREF(value);
    }
  });
  py::class_<Life, std::shared_ptr<Life>>(m, "Life")
      .def(py::init<int, bool>(), arg("fd"), arg("keep"))
      .def_property_readonly("alive", &Life::alive)
      .def("close", &Life::close, py::call_guard<py::gil_scoped_release>());
  py::class_<NativeMapping> type(m, "Mapping");
  type.def(py::init<int, int, size_t, const char*, bool, std::shared_ptr<Life>>(), arg("control_fd"),
           arg("payload_fd"), arg("count"), arg("dtype"), arg("readonly"), arg("life") = std::shared_ptr<Life>())
      .def_readonly("count", &NativeMapping::count)
      .def_property_readonly("dtype", [](const NativeMapping& self) { return name_of(self.dtype); })
      .def_property_readonly("version", version)
      .def("initialise", initialise, arg("values"), arg("threads") = 1)
      .def("count_update", count_update)
      .def("prefault", prefault, arg("threads") = 1, arg("huge") = false)
      .def("rescue", rescue, arg("out"), arg("offset") = 0)
      .def("wait", wait, arg("version"), arg("timeout"))
      .def("repair", mend, arg("tid_alive") = py::none())
      .def("holders", holders)
      .def("tally", [](NativeMapping& self, uint64_t session) {
        return self.region && self.tally.claim(*self.region, session);
      }, arg("session"))
      .def("tallies", tallies)
      .def("forget_tally", [](NativeMapping& self, uint64_t session) {
        if (self.region) Tally::forget(*self.region, session);
      }, arg("session"))
      .def("hold_chunk", hold_chunk, arg("chunk"), arg("half_written") = true)
      .def("release_chunk", release_chunk, arg("chunk"))
      .def("follow", &NativeMapping::follow, arg("life"))
      .def("replace", &NativeMapping::replace, arg("control_fd"), arg("payload_fd"), arg("life"))
      .def("close", [](NativeMapping& self) { self.region.reset(); });
  add_fast_method<read>(type, "read", "read(out, offset=0, threads=1, stripe=0, stripes=1)");
  add_fast_method<write>(type, "write", "write(array, offset=0, threads=1, stripe=0, stripes=1) -> version");
  add_fast_method<exchange>(type, "exchange",
                            "exchange(local, alpha, offset=0, threads=1, stripe=0, stripes=1) -> version");
  add_fast_method<accumulate>(type, "accumulate",
                              "accumulate(source, scale=1.0, offset=0, threads=1, stripe=0, stripes=1) -> version");
  bind_vectors(type);
  m.attr("CHUNK_BYTES") = kChunkBytes;
  m.attr("DTYPES") = py::make_tuple("float32", "float64", "float16", "int8", "int16", "int32", "int64", "uint8",
                                    "uint16", "uint32", "uint64", "bool");
  m.def("control_bytes", &Region::control_bytes, arg("payload_bytes"));
  m.def("thread_id", [] { return this_thread().tid; });
}

}  // namespace smb
