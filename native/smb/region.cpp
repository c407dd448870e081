#include "region.hpp"

#include <sys/mman.h>

#include <cerrno>
#include <climits>
#include <system_error>

#include "common/racy.hpp"
#include "pool.hpp"

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#define MADV_POPULATE_WRITE 23
#endif

namespace smb {
namespace {

constexpr size_t kPage = 4096;
constexpr size_t kHugePage = size_t{2} << 20;
constexpr int64_t kPollNs = 2000000;

size_t pages_up(size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

void* map_whole(int fd, size_t bytes, bool readonly, const char* what) {
  void* at = mmap(nullptr, pages_up(bytes), readonly ? PROT_READ : PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (at == MAP_FAILED) throw std::system_error(errno, std::generic_category(), what);
  return at;
}

// Kernels before 5.14 lack the advice: touch each page instead, changing nothing.
void touch(char* at, size_t bytes, bool readonly) {
  for (size_t i = 0; i < bytes; i += kPage) {
    if (readonly) {
      static_cast<void>(*const_cast<volatile char*>(at + i));
    } else {
      __atomic_fetch_add(at + i, 0, __ATOMIC_RELAXED);
    }
  }
}

int populate(char* at, size_t bytes, bool readonly) {
  if (bytes == 0) return 0;
  if (madvise(at, bytes, readonly ? MADV_POPULATE_READ : MADV_POPULATE_WRITE) == 0) return 0;
  if (errno != EINVAL) return errno;
  touch(at, bytes, readonly);
  return 0;
}

}  // namespace

Region::Region(int control_fd, int payload_fd, size_t bytes, size_t item, bool readonly)
    : bytes_(bytes), item_(item), readonly_(readonly) {
  control_ = map_whole(control_fd, control_bytes(bytes), readonly, "mmap of the control words");
  try {
    payload_ = map_whole(payload_fd, bytes, readonly, "mmap of the payload");
  } catch (...) {
    munmap(control_, pages_up(control_bytes(bytes)));
    throw;
  }
}

Region::~Region() {
  munmap(control_, pages_up(control_bytes(bytes_)));
  munmap(payload_, pages_up(bytes_));
}

void Region::prefault(size_t threads, bool huge) const {
  constexpr size_t kStep = kHugePage;  // one page table's worth: threads don't share tables
  // Not for the rest: a page beyond the segment's end would take memory that nobody has counted.
  const size_t filled = bytes_ / kHugePage * kHugePage;
  if (huge && filled && madvise(payload_, filled, MADV_HUGEPAGE) != 0) {
    throw std::system_error(errno, std::generic_category(), "asking for huge pages");
  }
  std::atomic<int> failed{populate(static_cast<char*>(control_), pages_up(control_bytes(bytes_)), readonly_)};
  std::atomic<size_t> next{0};
  const size_t whole = pages_up(bytes_);
  const size_t steps = (whole + kStep - 1) / kStep;
  run_parts(std::min(threads, steps), [&](size_t) {
    for (size_t i; failed.load() == 0 && (i = next.fetch_add(1)) < steps;) {
      const size_t begin = i * kStep;
      const int error = populate(static_cast<char*>(payload_) + begin, std::min(kStep, whole - begin), readonly_);
      if (error) failed.store(error);
    }
  });
  if (failed.load()) throw std::system_error(failed.load(), std::generic_category(), "pre-faulting");
}

bool Region::overlaps(const void* data, size_t bytes) const {
  const auto begin = reinterpret_cast<uintptr_t>(data);
  const auto mine = reinterpret_cast<uintptr_t>(payload_);
  return begin < mine + bytes_ && mine < begin + bytes;
}

uint64_t Region::count_update() const {
  ControlHead& control = head();
  const uint64_t after = control.version.fetch_add(1, std::memory_order_seq_cst) + 1;
  // A watcher marks, looks at the version again and only then sleeps, so it or we see the other.
  if (control.version_watched.load(std::memory_order_seq_cst) && control.version_watched.exchange(0)) {
    futex_wake(&control.version, INT_MAX);
  }
  return after;
}

void Region::await_version(uint64_t wanted, int64_t for_ns) const {
  ControlHead& control = head();
  if (readonly_) {
    for_ns = std::min(for_ns, kPollNs);
  } else {
    control.version_watched.store(1, std::memory_order_seq_cst);
  }
  const uint64_t seen = control.version.load(std::memory_order_seq_cst);
  if (seen >= wanted) return;
  // The futex is the low half of the version (this is a little-endian machine, see the static_assert).
  futex_wait(&control.version, static_cast<uint32_t>(seen), for_ns);
}

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "await_version sleeps on the version's low half");

void Region::begin_write(size_t chunk) const {
  Word& sequence = words(chunk).sequence;
  racy::announce(sequence, sequence.load(std::memory_order_relaxed) | 1u);
}

void Region::finish_write(size_t chunk) const {
  Word& sequence = words(chunk).sequence;
  sequence.store((sequence.load(std::memory_order_relaxed) | 1u) + 1u, std::memory_order_release);
}

}  // namespace smb
