#include "line.hpp"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/time.h>

#include <algorithm>
#include <cerrno>

#include "smb/robust.hpp"

namespace smb::net {
namespace {

constexpr double kMaxSeconds = 1e9;
constexpr size_t kRoomBytes = size_t{1} << 20;  // a third of a large buffer
constexpr int64_t kSliceNs = 5000000000;  // after which a call that waits comes back to look at its deadline

int milliseconds(int64_t ns) {
  return static_cast<int>(std::min<int64_t>(std::max<int64_t>(ns, 0) / 1000000 + 1, 1000000));
}

// Takes away what was sent (negative: nothing); how many parts are left, moved to the front.
size_t unsent(iovec* parts, size_t count, ssize_t sent) {
  size_t left = static_cast<size_t>(std::max<ssize_t>(sent, 0)), first = 0;
  while (first < count && left >= parts[first].iov_len) left -= parts[first++].iov_len;
  if (first < count) parts[first] = {static_cast<char*>(parts[first].iov_base) + left, parts[first].iov_len - left};
  std::copy(parts + first, parts + count, parts);
  return count - first;
}

int64_t reply_deadline(const iovec* parts, size_t count) {
  int64_t deadline = monotonic_ns() + kReplyNs;
  for (size_t i = 0; i < count; ++i) deadline += static_cast<int64_t>(parts[i].iov_len) * kByteNs;
  return deadline;
}

}  // namespace

Line::Line(int fd, double idle_seconds)
    : fd_(fd), idle_ns_(static_cast<int64_t>(std::min(std::max(idle_seconds, 0.001), kMaxSeconds) * 1e9)) {
  const int flags = fcntl(fd, F_GETFL);
  if (flags < 0) throw LineError{LineError::failed, errno, "the socket"};
  blocking_ = !(flags & O_NONBLOCK);
  if (!blocking_) return;
  const int64_t slice = std::min(idle_ns_, kSliceNs);
  const timeval limit{slice / 1000000000, slice % 1000000000 / 1000};
  if (setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit) != 0 ||
      setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit) != 0) {
    throw LineError{LineError::failed, errno, "the socket's timeouts"};
  }
}

void Line::await(short events, int64_t deadline, const char* what) const {
  const int64_t left = deadline - monotonic_ns();
  if (left <= 0) throw LineError{LineError::late, 0, what};
  if (blocking_) return;  // the call itself waits, a slice at a time
  pollfd entry{fd_, events, 0};
  if (poll(&entry, 1, milliseconds(left)) < 0 && errno != EINTR) throw LineError{LineError::failed, errno, "poll"};
}

// deadline 0: a frame's first bytes; the frame's time runs from the first of them on.
size_t Line::receive_some(char* data, size_t size, int64_t deadline) {
  const bool first = deadline == 0;
  if (first) deadline = monotonic_ns() + idle_ns_;
  size_t got = 0;
  while (got < size) {
    const ssize_t more = recv(fd_, data + got, size - got, blocking_ ? MSG_WAITALL : MSG_DONTWAIT);
    if (more == 0) return got;
    if (more > 0) {
      if (first && got == 0) deadline_ = deadline = monotonic_ns() + kFrameNs;
      got += static_cast<size_t>(more);
      if (got == size) return got;
    } else if (errno == EINTR) {
      continue;
    } else if (errno != EAGAIN) {
      throw LineError{LineError::failed, errno, "receiving"};
    }
    await(POLLIN, deadline, got || !first ? "a frame's rest did not come in time" : "nothing came");
  }
  return got;
}

bool Line::receive_first(void* data, size_t size) {
  if (held_ && queued() == 0) release();
  const size_t got = receive_some(static_cast<char*>(data), size, 0);
  if (got == 0) return false;
  if (got < size) throw LineError{LineError::ended, 0, "the stream ended in a frame's header"};
  return true;
}

void Line::receive(void* data, size_t size) {
  if (receive_some(static_cast<char*>(data), size, deadline_) < size) {
    throw LineError{LineError::ended, 0, "the stream ended in a frame"};
  }
}

void Line::skip(size_t size) {
  char sink[8192];
  for (size_t length; size > 0; size -= length) {
    length = std::min(size, sizeof sink);
    receive(sink, length);
  }
}

size_t Line::queued() const {
  int bytes = 0;
  return ioctl(fd_, FIONREAD, &bytes) == 0 && bytes > 0 ? static_cast<size_t>(bytes) : 0;
}

bool Line::receive_queued(void* data, size_t size) const {
  for (size_t got = 0; got < size;) {
    const ssize_t more = recv(fd_, static_cast<char*>(data) + got, size - got, MSG_DONTWAIT);
    if (more == 0 || (more < 0 && errno != EINTR)) return false;
    if (more > 0) got += static_cast<size_t>(more);
  }
  return true;
}

// Unix sockets know no packets, which is fine.
void Line::hold() {
  const int on = 1;
  if (!held_) setsockopt(fd_, IPPROTO_TCP, TCP_CORK, &on, sizeof on);
  held_ = true;
}

void Line::release() {
  const int off = 0;
  if (held_) setsockopt(fd_, IPPROTO_TCP, TCP_CORK, &off, sizeof off);
  held_ = false;
}

void Line::await_room() const {
  const int64_t deadline = monotonic_ns() + kReplyNs + static_cast<int64_t>(kRoomBytes) * kByteNs;
  for (;;) {
    const int64_t left = deadline - monotonic_ns();
    if (left <= 0) throw LineError{LineError::late, 0, "the peer takes no replies"};
    pollfd entry{fd_, POLLOUT, 0};
    const int ready = poll(&entry, 1, milliseconds(left));
    if (ready > 0) return;
    if (ready < 0 && errno != EINTR) throw LineError{LineError::failed, errno, "poll"};
  }
}

size_t Line::send_some(iovec* parts, size_t count) const {
  msghdr message{};
  message.msg_iov = parts;
  message.msg_iovlen = count;
  const ssize_t sent = sendmsg(fd_, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
  return unsent(parts, count, sent);
}

void Line::send(iovec* parts, size_t count) {
  int64_t deadline = 0;  // counted from when the peer first takes less than all
  for (;;) {
    msghdr message{};
    message.msg_iov = parts;
    message.msg_iovlen = count;
    const ssize_t sent = sendmsg(fd_, &message, MSG_NOSIGNAL | (blocking_ ? 0 : MSG_DONTWAIT));
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0 && errno != EAGAIN) throw LineError{LineError::failed, errno, "sending"};
    count = unsent(parts, count, sent);
    if (count == 0) return;
    if (deadline == 0) deadline = reply_deadline(parts, count);
    await(POLLOUT, deadline, "the peer takes no replies");
  }
}

void Line::rest(int64_t for_ns) const {
  pollfd entry{fd_, 0, 0};
  poll(&entry, 1, milliseconds(for_ns));
}

}  // namespace smb::net
