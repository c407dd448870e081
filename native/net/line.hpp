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

// A frame that has begun is to be whole, and a reply taken, within so long, however the bytes drip: the stranger's
// slowest allowed line is 64 KiB/s.
constexpr int64_t kFrameNs = 10000000000;
constexpr int64_t kReplyNs = 30000000000;
constexpr int64_t kByteNs = 1000000000 / (64 << 10);

class Line {
 public:
  // idle_seconds: how long the first byte of a frame is waited for. fd may block or not; a blocking one gets its
  // timeouts set. The descriptor stays the caller's.
  Line(int fd, double idle_seconds);
  ~Line() { release(); }
  Line(const Line&) = delete;
  Line& operator=(const Line&) = delete;

  // The first bytes of a frame: false when the peer ended the stream before any. Throws LineError.
  bool receive_first(void* data, size_t size);
  // So much more of the frame is to come in all: bounds the time that it may take.
  void expect(size_t bytes) { deadline_ += static_cast<int64_t>(bytes) * kByteNs; }
  // More of the frame. Throws LineError.
  void receive(void* data, size_t size);
  void skip(size_t size);
  // How many bytes have come and can be received at once.
  size_t queued() const;
  // Of them, so many, without waiting. False: fewer came after all, and the stream is of no more use.
  bool receive_queued(void* data, size_t size) const;
  // All of it; parts is changed. Throws LineError.
  void send(iovec* parts, size_t count);
  // From now on packets leave when they are full, so that a frame's end and the next one's begin share one. What is
  // left leaves at release(), or when a frame is waited for that has not begun, or by the kernel after 200 ms.
  void hold();
  void release();
  // Until the socket has much room again: a third of its buffer. Throws LineError.
  void await_room() const;
  // What the socket has room for now, without waiting; parts then holds the rest, and how many there are is
  // returned. An error shows at the next send.
  size_t send_some(iovec* parts, size_t count) const;

  // Sleeps for so long or until the peer or another thread ends the stream.
  void rest(int64_t for_ns) const;

 private:
  size_t receive_some(char* data, size_t size, int64_t deadline);
  void await(short events, int64_t deadline, const char* what) const;

  const int fd_;
  const int64_t idle_ns_;
  int64_t deadline_ = 0;  // of the frame that is being received
  bool blocking_;
  bool held_ = false;
};

}  // namespace smb::net
