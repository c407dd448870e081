// One end of a stream socket, used by one thread, with every wait bounded.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>

namespace smb::net {

struct LineError {
  enum Kind { ended, late, failed } kind;
  int code;  // failed: errno
  const char* what;
};

class Line {
 public:
  // fd may block or not; a blocking one gets its timeouts set. The descriptor stays the caller's.
  Line(int fd, double idle_seconds);

  // The first bytes of a frame: false when the peer ended the stream before any. Throws LineError.
  bool receive_first(void* data, size_t size);
  // More of the frame, which must be whole within the idle time from its first bytes on. Throws LineError.
  void receive(void* data, size_t size);
  void skip(size_t size);
  // All of it; parts is changed. Throws LineError.
  void send(iovec* parts, size_t count);

  // Sleeps for so long or until the peer or another thread ends the stream.
  void rest(int64_t for_ns) const;

 private:
  size_t receive_some(char* data, size_t size, int64_t deadline);
  void await(short events, int64_t deadline, const char* what) const;

  const int fd_;
  const int64_t idle_ns_;
  int64_t deadline_ = 0;  // of the frame that is being received
  bool blocking_;
};

}  // namespace smb::net
