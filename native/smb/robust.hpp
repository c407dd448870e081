// Locks in shared memory that the kernel takes from the dead, and the word that says a process lives.
//
// A lock is a futex word that holds its owner's thread id. Before a thread takes one it enters the word
// as the pending entry of its robust list (a private structure that glibc registered with the kernel),
// so when the thread dies, by kill -9 too, the kernel marks the word FUTEX_OWNER_DIED and wakes a waiter.
// No pointer lies in shared memory. All threads must live in one PID namespace.
#pragma once

#include <linux/futex.h>

#include <atomic>
#include <cstddef>
#include <cstdint>

struct robust_list_head;

namespace smb {

using Word = std::atomic<uint32_t>;
static_assert(Word::is_always_lock_free && sizeof(Word) == 4, "the kernel shares these words");

int64_t monotonic_ns();

// Waits while *word == seen, at most for_ns. Returns on a wake, a change, a signal or the timeout.
void futex_wait(const void* word, uint32_t seen, int64_t for_ns);
void futex_wake(const void* word, int count);

// What the kernel knows of the calling thread. Read again after fork: the child is another thread.
struct ThreadIdentity {
  uint32_t tid = 0;
  robust_list_head* robust = nullptr;
  const Word* held = nullptr;  // one lock at a time: the pending entry is one word
  uint64_t generation = 0;
};
ThreadIdentity& this_thread();

// How many forks lie between this process and the one that loaded the library, plus one.
uint64_t fork_generation();

inline uint32_t owner_of(uint32_t word) { return word & FUTEX_TID_MASK; }

// Takes word if nobody has it. The thread must hold none.
bool lock_try(Word& word, ThreadIdentity& me);
// Waits for word until deadline (monotonic_ns). False: not taken.
bool lock_until(Word& word, ThreadIdentity& me, int64_t deadline);
void unlock(Word& word, ThreadIdentity& me);

// True while a thread of this id exists in our PID namespace (a zombie counts as existing).
bool thread_exists(uint32_t tid);

// Enters word as the calling thread's own for as long as it lives; see Life.
void enter_pending(Word& word, ThreadIdentity& me);
void clear_pending(ThreadIdentity& me);

}  // namespace smb
