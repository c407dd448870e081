// Access to payload that a reader without a lock may look at while a writer changes it, and to a worker's own
// values that one of its threads may check while another moves them.
//
// A reader copies first and asks the chunk's sequence word afterwards whether the copy is good, so what
// it reads during a write is thrown away. In C++'s terms that is a data race on plain floats. On the
// machines this runs on, plain loads and stores of aligned words do not tear below a word and vectorise,
// which relaxed atomics do not; so the product uses plain accesses, and the build under the thread
// sanitizer uses relaxed atomics for what readers load and for what writers store (a writer's own loads stay
// plain: writers exclude each other by the lock, and a missing lock must be reported). See Boehm, "Can seqlocks
// get along with programming language memory models?", 2012, for both forms and for settle.
#pragma once

#include <atomic>
#include <cstdint>

namespace smb::racy {

template <class T>
inline T load(const T* p) {
#if defined(__SANITIZE_THREAD__)
  T value;
  __atomic_load(p, &value, __ATOMIC_RELAXED);
  return value;
#else
  return *p;
#endif
}

template <class T>
inline void store(T* p, T value) {
#if defined(__SANITIZE_THREAD__)
  __atomic_store(p, &value, __ATOMIC_RELAXED);
#else
  *p = value;
#endif
}

// Makes the sequence word odd before a write: no store of the write may move before it.
inline void announce(std::atomic<uint32_t>& sequence, uint32_t odd) {
#if defined(__SANITIZE_THREAD__)
  sequence.exchange(odd, std::memory_order_acq_rel);
#else
  sequence.store(odd, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_release);
#endif
}

// The sequence word after a copy: no load of the copy may move behind it. The thread sanitizer knows no
// fences, so there it is a read-modify-write that changes nothing (needs a writable mapping).
inline uint32_t settle(std::atomic<uint32_t>& sequence) {
#if defined(__SANITIZE_THREAD__)
  return sequence.fetch_add(0, std::memory_order_acq_rel);
#else
  std::atomic_thread_fence(std::memory_order_acquire);
  return sequence.load(std::memory_order_relaxed);
#endif
}

}  // namespace smb::racy
