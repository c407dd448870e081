#include "mapping.hpp"

#include <cmath>
#include <stdexcept>

#include "bind.hpp"
#include "operations.hpp"

namespace smb {
namespace {

constexpr double kSignalsEvery = 0.05;
constexpr double kStuckEvery = 1.0;

// What the waiting thread does between its tries; knows the Python object's callbacks.
class Waiter {
 public:
  // life: null where the daemon's death is not to end the operation.
  Waiter(PyObject* self, std::shared_ptr<Life> life) : self_(self), life_(std::move(life)) {}

  bool operator()(size_t chunk, uint32_t owner, double seconds) {
    if (life_ && !life_->alive()) {
      daemon_died = true;
      return false;
    }
    waited = seconds;
    holder = owner;
    if (seconds < last_seconds_) forget_progress();
    last_seconds_ = seconds;
    if (owner != 0 && seconds < next_visit_) return true;
    next_visit_ = seconds + kSignalsEvery;
    const PyGILState_STATE state = PyGILState_Ensure();
    const bool go_on = visit(chunk, owner, seconds);
    PyGILState_Release(state);
    return go_on;
  }

  bool daemon_died = false;
  double waited = 0;
  uint32_t holder = 0;

 private:
  void forget_progress() {
    next_visit_ = 0;
    next_call_ = kStuckEvery;
  }

  // With the GIL: signals, the callbacks, the end of patience. False with or without an error set.
  bool visit(size_t chunk, uint32_t owner, double seconds) {
    if (PyErr_CheckSignals() != 0) return false;
    if (owner == 0) {
      if (!call("on_torn", Py_BuildValue("(n)", static_cast<Py_ssize_t>(chunk)))) return false;
    } else if (seconds >= next_call_) {
      next_call_ += kStuckEvery;
      if (!call("on_stuck", Py_BuildValue("(nId)", static_cast<Py_ssize_t>(chunk), owner, seconds))) return false;
    }
    return seconds < patience();
  }

  bool call(const char* attribute, PyObject* arguments) {
    PyObject* callback = PyObject_GetAttrString(self_, attribute);
    PyObject* result = nullptr;
    if (callback == Py_None) {
      result = Py_NewRef(Py_None);
    } else if (callback && arguments) {
      result = PyObject_Call(callback, arguments, nullptr);
    }
    Py_XDECREF(callback);
    Py_XDECREF(arguments);
    Py_XDECREF(result);
    return result != nullptr;
  }

  double patience() {
    PyObject* value = PyObject_GetAttrString(self_, "patience");
    const double seconds = value ? PyFloat_AsDouble(value) : -1;
    Py_XDECREF(value);
    return seconds;
  }

  PyObject* self_;
  const std::shared_ptr<Life> life_;  // kept: the mapping may follow another daemon meanwhile
  double last_seconds_ = 0;
  double next_visit_ = 0;
  double next_call_ = kStuckEvery;
};

void raise_nonfinite(const Pass& pass, const Outcome& outcome, const char* verb) {
  PyObject* type = error_class("NonFinite");
  if (type == nullptr) return;
  const Stripe& stripe = pass.stripe();
  const size_t element = pass.at({outcome.chunk, outcome.element, 1});  // of the caller's array
  const size_t number = outcome.chunk * stripe.of + stripe.index;
  PyObject* message = PyUnicode_FromFormat(
      "%s: element %zu of the values is NaN or Inf (element %zu of the segment, chunk %zu); "
      "the %zu chunks before it%s were done, nothing from it on",
      verb, element, pass.from() + element, number, pass.moves() ? outcome.moved : 0,
      stripe.of == 1 ? "" : " that lie there");
  PyObject* error = message ? PyObject_CallOneArg(type, message) : nullptr;
  if (error) {
    PyObject* chunk = PyLong_FromSize_t(number);
    PyObject* index = PyLong_FromSize_t(element);
    if (chunk && index && PyObject_SetAttrString(error, "chunk", chunk) == 0 &&
        PyObject_SetAttrString(error, "element", index) == 0) {
      PyErr_SetObject(type, error);
    }
    Py_XDECREF(chunk);
    Py_XDECREF(index);
  }
  Py_XDECREF(error);
  Py_XDECREF(message);
  Py_DECREF(type);
}

// An operation that has begun ends in its own memory, whatever becomes of the daemon, where another may follow.
bool has_on_dead(PyObject* self) {
  PyObject* on_dead = PyObject_GetAttrString(self, "on_dead");
  if (on_dead == nullptr) PyErr_Clear();
  Py_XDECREF(on_dead);
  return on_dead != nullptr && on_dead != Py_None;
}

void raise_gave_up(const Pass& pass, const Outcome& outcome, const Waiter& waiter, const char* verb) {
  if (PyErr_Occurred()) return;
  const size_t chunks = pass.end_chunk() - pass.first_chunk();
  if (waiter.daemon_died) {
    raise("TransportError", "%s: the daemon died while it ran (%zu of %zu chunks were done)", verb, outcome.moved,
          chunks);
    return;
  }
  PyObject* seconds = PyUnicode_FromFormat("%d", static_cast<int>(waiter.waited));
  if (seconds == nullptr) return;
  // With chunks done it is no longer a request that may be made again.
  const char* type = outcome.moved ? "TransportError" : "WaitTimeout";
  if (waiter.holder) {
    raise(type, "%s: thread %u has held the lock of chunk %zu for %U s (%zu of %zu chunks were done)", verb,
          waiter.holder, outcome.chunk, seconds, outcome.moved, chunks);
  } else {
    raise(type, "%s: chunk %zu was left half-written and not mended for %U s (%zu of %zu chunks were done)", verb,
          outcome.chunk, seconds, outcome.moved, chunks);
  }
  Py_DECREF(seconds);
}

}  // namespace

NativeMapping::NativeMapping(int control_fd, int payload_fd, size_t count, const char* dtype, bool readonly,
                             std::shared_ptr<Life> life)
    : count(count), dtype(dtype_of_name(dtype)), life(std::move(life)) {
  if (this->dtype.size == 0) throw std::invalid_argument("no such element type");
  identify(payload_fd);
  region = std::make_shared<Region>(control_fd, payload_fd, count * this->dtype.size, this->dtype.size, readonly);
}

bool NativeMapping::usable() const {
  if (!region) {
    raise("Closed", "the mapping was closed");
    return false;
  }
  if (!life || life->alive()) return true;
  if (!find_next_daemon()) return false;
  if (region && life->alive()) return true;
  raise("TransportError", "the daemon died; the segment's last values can still be rescued from the mapping");
  return false;
}

// Calls on_dead, where there is one. False with the error that it raised.
bool NativeMapping::find_next_daemon() const {
  const pybind11::object self = pybind11::cast(this, pybind11::return_value_policy::reference);
  if (!has_on_dead(self.ptr())) return true;
  PyObject* on_dead = PyObject_GetAttrString(self.ptr(), "on_dead");
  if (on_dead == nullptr) return false;
  PyObject* result = PyObject_CallNoArgs(on_dead);
  Py_DECREF(on_dead);
  Py_XDECREF(result);
  return result != nullptr;
}

void NativeMapping::identify(int payload_fd) {
  struct stat payload;
  if (fstat(payload_fd, &payload) != 0) return;
  device = payload.st_dev;
  inode = payload.st_ino;
}

void NativeMapping::replace(int control_fd, int payload_fd, std::shared_ptr<Life> next) {
  const bool readonly = region && region->readonly();
  region = std::make_shared<Region>(control_fd, payload_fd, count * dtype.size, dtype.size, readonly);
  identify(payload_fd);
  life = std::move(next);
}

bool NativeMapping::writable() const {
  if (!usable()) return false;
  if (!region->readonly()) return true;
  raise("NotPermitted", "the segment is attached read-only");
  return false;
}

bool NativeMapping::float32(const char* verb) const {
  if (dtype == kFloat32) return true;
  raise("TypeMismatch", "%s: needs a segment of float32, this one holds %s", verb, name_of(dtype));
  return false;
}

bool NativeMapping::in_range(const char* verb, Py_ssize_t offset, size_t n) const {
  if (offset >= 0 && static_cast<size_t>(offset) <= count && n <= count - static_cast<size_t>(offset)) return true;
  raise("RangeError", "%s: %zu elements at offset %zd run past the segment (%zu elements)", verb, n, offset, count);
  return false;
}

bool NativeMapping::same_dtype(const char* verb, const Array& array) const {
  if (array.dtype == dtype) return true;
  raise("TypeMismatch", "%s: the segment holds %s, the array %s", verb, name_of(dtype), name_of(array.dtype));
  return false;
}

bool NativeMapping::apart(const char* verb, const Array& array) const {
  if (!region->overlaps(array.data, array.bytes())) return true;
  raise("RequestError", "%s: the array lies in the segment itself", verb);
  return false;
}

bool NativeMapping::perform(PyObject* self, Pass& pass, size_t threads, const char* verb, bool watch_life) {
  if (this_thread().held) {
    raise("RequestError", "%s: this thread holds a chunk's lock already", verb);
    return false;
  }
  const bool one_chunk = pass.end_chunk() - pass.first_chunk() == 1;
  const bool keep_gil = one_chunk && pass.count * dtype.size <= kKeepGilBytes;
  Outcome outcome;
  if (keep_gil && run_quickly(pass, outcome) && outcome.kind == Outcome::done) return true;
  Waiter waiter(self, watch_life && !has_on_dead(self) ? life : nullptr);
  if (outcome.kind == Outcome::done) {
    const GilRelease released(true);
    if (keep_gil || !one_chunk || !run_quickly(pass, outcome)) {
      outcome = run_pass(pass, threads, std::ref(waiter));
    }
  }
  if (outcome.kind == Outcome::done) return true;
  if (outcome.kind == Outcome::refused) {
    raise_nonfinite(pass, outcome, verb);
  } else {
    raise_gave_up(pass, outcome, waiter, verb);
  }
  return false;
}

}  // namespace smb
