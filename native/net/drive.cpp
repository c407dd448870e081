#include "drive.hpp"

#include <linux/tcp.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "line.hpp"
#include "smb/robust.hpp"

namespace smb::net {
namespace {

constexpr int64_t kSliceNs = 200000000;
constexpr int64_t kAskNs = 20000000;
constexpr size_t kLowWater = 64 << 10;  // at least, or a quarter of what is expected
constexpr uint32_t kNearUs = 500;  // of the quickest round trip: three pieces under way then are 1.5 GB/s at least
constexpr size_t kFewPieces = 3;
constexpr size_t kSmallReply = 8192;  // bytes for which one call more costs more than a copy
constexpr int64_t kFarewellNs = 5000000000;  // for the replies under way after an interrupt

// Bytes moved; 0 when it would block.
size_t moved(ssize_t result, const char* what) {
  if (result >= 0) return static_cast<size_t>(result);
  if (errno == EAGAIN || errno == EINTR) return 0;
  throw LineError{LineError::failed, errno, what};
}

// Bytes received; 0 when it would block.
size_t receive_into(int fd, void* room, size_t size, int flags) {
  const ssize_t result = recv(fd, room, size, flags);
  if (result == 0) throw LineError{LineError::ended, 0, "the daemon ended the stream"};
  return moved(result, "receiving");
}

// By way of a buffer.
size_t receive_through(Transfer& transfer, int fd, char* buffer, size_t size, int flags) {
  const size_t bytes = receive_into(fd, buffer, size, flags);
  transfer.absorb(buffer, bytes);
  return bytes;
}

// As many whole elements as have come; of less than one, its bytes to where the rest is waited for.
size_t receive_whole(Transfer& transfer, int fd, int flags) {
  constexpr size_t kItem = sizeof(float);
  int queued = 0;
  if (transfer.held() || ioctl(fd, FIONREAD, &queued) != 0 || queued < static_cast<int>(kItem)) {
    char few[kItem];
    return receive_through(transfer, fd, few, kItem - transfer.held(), flags);
  }
  const iovec room = transfer.incoming();
  const size_t length = std::min(room.iov_len, static_cast<size_t>(queued) / kItem * kItem);
  const size_t bytes = receive_into(fd, room.iov_base, length, flags);
  if (bytes % kItem) throw LineError{LineError::failed, EIO, "receiving what is there"};
  if (bytes) transfer.received(bytes);
  return bytes;
}

size_t receive(Transfer& transfer, int fd, int flags) {
  const iovec room = transfer.incoming();
  if (transfer.is_single() && room.iov_len <= kSmallReply) {
    // A reply and what begins it in one call: where its elements go is known only with its header.
    char came[kSmallReply];
    return receive_through(transfer, fd, came, sizeof came, flags);
  }
  if (transfer.in_place()) return receive_whole(transfer, fd, flags);
  const size_t bytes = receive_into(fd, room.iov_base, room.iov_len, flags);
  if (bytes) transfer.received(bytes);
  return bytes;
}

// waiting: whether the socket had no room for all of it.
size_t send(Transfer& transfer, int fd, bool* waiting) {
  iovec parts[2];
  const size_t count = transfer.outgoing(parts);
  *waiting = false;
  if (count == 0) return 0;
  size_t whole = 0;
  for (size_t i = 0; i < count; ++i) whole += parts[i].iov_len;
  msghdr message{};
  message.msg_iov = parts;
  message.msg_iovlen = count;
  const size_t bytes = moved(sendmsg(fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL), "sending");
  if (bytes) transfer.sent(bytes);
  *waiting = bytes < whole;
  return bytes;
}

// Lets poll sleep until a good part of what is expected has come: a wake for each packet costs more than its copy.
class LowWater {
 public:
  explicit LowWater(int fd) : fd_(fd) {}
  ~LowWater() { set(1); }
  LowWater(const LowWater&) = delete;
  LowWater& operator=(const LowWater&) = delete;

  // Unix sockets know none, which is fine.
  void set(size_t expected) {
    const int bytes = static_cast<int>(std::min(expected, std::max(kLowWater, expected / 4)));
    if (bytes != now_) setsockopt(fd_, SOL_SOCKET, SO_RCVLOWAT, &bytes, sizeof bytes);
    now_ = bytes;
  }

 private:
  const int fd_;
  int now_ = 1;
};

// Whether the other end is on this host or next to it, where few pieces under way keep both ends busy.
bool is_near(int fd) {
  tcp_info info{};
  socklen_t size = sizeof info;
  return getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &size) != 0 || info.tcpi_min_rtt < kNearUs;
}

// While pieces are sent, packets leave when they are full, so that a piece's end and the next one's begin share one.
class Cork {
 public:
  Cork(int fd, bool wanted) : fd_(fd), on_(wanted && set(TCP_CORK, 1)) {}
  ~Cork() {
    if (on_) set(TCP_CORK, 0);
  }
  Cork(const Cork&) = delete;
  Cork& operator=(const Cork&) = delete;

  // Before the daemon's answer is waited for: what was sent since leaves, full or not.
  void push() {
    if (on_ && sent_) set(TCP_NODELAY, 1);
    sent_ = false;
  }
  void sent(size_t bytes) { sent_ = sent_ || bytes != 0; }

 private:
  bool set(int option, int value) const {  // Unix sockets know neither
    return setsockopt(fd_, IPPROTO_TCP, option, &value, sizeof value) == 0;
  }

  const int fd_;
  const bool on_;
  bool sent_ = false;
};

}  // namespace

void drive(Transfer& transfer, int fd, bool ticking, int64_t timeout_ns, const std::function<bool()>& interrupted) {
  int64_t deadline = monotonic_ns() + timeout_ns, asked = deadline - timeout_ns;
  bool given_up = false;
  LowWater water(fd);
  // What an exchange has under way, the daemon keeps for a repetition: as much as its core's cache can hold.
  if (transfer.exchanges_wide()) transfer.keep_under_way(is_near(fd) ? kFewPieces : SIZE_MAX);
  Cork cork(fd, transfer.sends_pieces());
  while (!transfer.finished()) {
    bool waiting = false;
    const size_t out = send(transfer, fd, &waiting);
    cork.sent(out);
    if (transfer.finished()) break;  // what was to be sent holds a NaN, and nothing is under way
    // What a single piece has just asked for is not there yet: to look would be two calls for nothing. It is waited
    // for by the call that takes it, or by poll.
    const bool early = out && transfer.is_single(), wait = early && ticking && !waiting;
    if (wait && !given_up) deadline = monotonic_ns() + timeout_ns;
    const size_t in = transfer.expecting() && (wait || !early) ? receive(transfer, fd, wait ? 0 : MSG_DONTWAIT) : 0;
    if ((in || (out && !wait)) && !given_up) deadline = 0;  // counted from the next time that nothing moves
    if (in || (out && !early)) continue;
    cork.push();
    const int64_t now = monotonic_ns();
    if (deadline == 0) deadline = now + timeout_ns;
    if (now >= deadline) throw LineError{LineError::late, 0, "nothing moved"};
    const size_t expected = transfer.expecting() ? transfer.incoming().iov_len : 1;
    water.set(expected > kLowWater / 4 ? expected : 1);  // not worth two calls for less
    pollfd entry{fd, static_cast<short>((waiting ? POLLOUT : 0) | POLLIN), 0};
    const timespec slice{0, std::min(kSliceNs, deadline - now)};
    const int ready = ppoll(&entry, 1, &slice, nullptr);
    if (ready < 0 && errno != EINTR) throw LineError{LineError::failed, errno, "poll"};
    if (ready > 0 && now - asked < kAskNs) continue;
    asked = now;
    if (!given_up && interrupted()) {
      given_up = true;
      transfer.give_up();
      deadline = monotonic_ns() + std::min(timeout_ns, kFarewellNs);
    }
  }
}

}  // namespace smb::net
