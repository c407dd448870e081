// What a Python Mapping holds, and the one way in which its operations are run.
#pragma once

#include <sys/stat.h>

#include <memory>

#include "buffer.hpp"
#include "life.hpp"
#include "passes.hpp"
#include "tally.hpp"

namespace smb {

// Base of smb.segment.Mapping. The Python object carries on_stuck, on_torn, on_dead and patience, so that the
// garbage collector sees the callbacks; they are looked up when there is something to call them for.
class NativeMapping {
 public:
  NativeMapping(int control_fd, int payload_fd, size_t count, const char* dtype, bool readonly,
                std::shared_ptr<Life> life);

  // False with Closed or TransportError set. Where the daemon is dead and there is an on_dead, that may find the
  // next one (follow) or bring other memory (replace): take the region afterwards.
  bool usable() const;
  bool writable() const;  // and NotPermitted
  bool float32(const char* verb) const;
  // False with RangeError set; offset as Python gave it.
  bool in_range(const char* verb, Py_ssize_t offset, size_t n) const;
  bool same_dtype(const char* verb, const Array& array) const;
  bool apart(const char* verb, const Array& array) const;

  // Runs the pass; the caller keeps its region mapped. False with the error set that says why it was not done, or not wholly.
  bool perform(PyObject* self, Pass& pass, size_t threads, const char* verb, bool watch_life = true);

  // The next daemon has taken this memory over.
  void follow(std::shared_ptr<Life> next) { life = std::move(next); }
  // The next daemon has other memory under this name. Throws std::system_error.
  void replace(int control_fd, int payload_fd, std::shared_ptr<Life> next);

  std::shared_ptr<Region> region;  // none once closed; an operation under way keeps it mapped
  const size_t count;
  const DType dtype;
  Tally tally;  // what this client did, for the daemon to read
  std::shared_ptr<Life> life;
  dev_t device = 0;  // with inode: which memory this is, whatever descriptor it came by
  ino_t inode = 0;

 private:
  bool find_next_daemon() const;
  void identify(int payload_fd);
};

}  // namespace smb
