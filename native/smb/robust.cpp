#include "robust.hpp"

#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <ctime>
#include <stdexcept>

namespace smb {
namespace {

std::atomic<uint64_t> generation{1};

thread_local ThreadIdentity identity;

void count_fork() { generation.fetch_add(1, std::memory_order_relaxed); }

struct ForkCounter {
  ForkCounter() { pthread_atfork(nullptr, nullptr, count_fork); }
};
const ForkCounter fork_counter;

void identify(ThreadIdentity& me) {
  size_t length = 0;
  me.tid = static_cast<uint32_t>(syscall(SYS_gettid));
  if (syscall(SYS_get_robust_list, 0, &me.robust, &length) != 0 || me.robust == nullptr) {
    throw std::runtime_error("get_robust_list failed: the kernel or the C library lacks robust futexes");
  }
  me.held = nullptr;
  me.generation = fork_generation();
}

}  // namespace

int64_t monotonic_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return int64_t{now.tv_sec} * 1000000000 + now.tv_nsec;
}

void futex_wait(const void* word, uint32_t seen, int64_t for_ns) {
  if (for_ns <= 0) return;
  const timespec limit{for_ns / 1000000000, for_ns % 1000000000};
  syscall(SYS_futex, word, FUTEX_WAIT, seen, &limit, nullptr, 0);
}

void futex_wake(const void* word, int count) { syscall(SYS_futex, word, FUTEX_WAKE, count, nullptr, nullptr, 0); }

uint64_t fork_generation() { return generation.load(std::memory_order_relaxed); }

ThreadIdentity& this_thread() {
  ThreadIdentity& me = identity;
  if (me.generation != fork_generation()) identify(me);
  return me;
}

// The kernel adds futex_offset (glibc's, chosen for its own mutexes) to an entry to find the word.
void enter_pending(Word& word, ThreadIdentity& me) {
  char* entry = reinterpret_cast<char*>(&word) - me.robust->futex_offset;
  me.robust->list_op_pending = reinterpret_cast<robust_list*>(entry);
  // Only this thread and the kernel that buries it look: program order is enough.
  std::atomic_signal_fence(std::memory_order_seq_cst);
}

void clear_pending(ThreadIdentity& me) {
  std::atomic_signal_fence(std::memory_order_seq_cst);
  me.robust->list_op_pending = nullptr;
}

bool lock_try(Word& word, ThreadIdentity& me) {
  enter_pending(word, me);
  uint32_t seen = 0;
  while (owner_of(seen) == 0) {
    // FUTEX_WAITERS stays: others may sleep on a word whose owner died.
    const uint32_t taken = me.tid | (seen & FUTEX_WAITERS);
    if (word.compare_exchange_strong(seen, taken, std::memory_order_acquire, std::memory_order_relaxed)) {
      me.held = &word;
      return true;
    }
  }
  clear_pending(me);
  return false;
}

bool lock_until(Word& word, ThreadIdentity& me, int64_t deadline) {
  enter_pending(word, me);
  uint32_t seen = word.load(std::memory_order_relaxed);
  for (;;) {
    if (owner_of(seen) == 0) {
      // We may have been the one that unlock() woke: the next sleeper depends on our unlock.
      if (!word.compare_exchange_weak(seen, me.tid | FUTEX_WAITERS, std::memory_order_acquire,
                                      std::memory_order_relaxed)) {
        continue;
      }
      me.held = &word;
      return true;
    }
    if (!(seen & FUTEX_WAITERS)) {
      if (!word.compare_exchange_weak(seen, seen | FUTEX_WAITERS, std::memory_order_relaxed)) continue;
      seen |= FUTEX_WAITERS;
    }
    const int64_t left = deadline - monotonic_ns();
    if (left <= 0) break;
    futex_wait(&word, seen, left);
    seen = word.load(std::memory_order_relaxed);
  }
  clear_pending(me);
  return false;
}

void unlock(Word& word, ThreadIdentity& me) {
  // Killed between these two lines, the kernel finds our pending entry free and wakes a waiter for us.
  const uint32_t old = word.exchange(0, std::memory_order_release);
  if (old & FUTEX_WAITERS) futex_wake(&word, 1);
  clear_pending(me);
  me.held = nullptr;
}

bool thread_exists(uint32_t tid) { return syscall(SYS_tkill, tid, 0) == 0 || errno != ESRCH; }

}  // namespace smb
