// "Does the daemon live": one word that the kernel marks when the daemon's process ends, however it ends.
#pragma once

#include <pthread.h>

#include <cstddef>

#include "robust.hpp"

namespace smb {

// The daemon's side maps the memfd writable and starts a thread that sleeps with the word as its pending
// robust entry; a client maps it read-only and loads the word in every operation.
class Life {
 public:
  // Maps the first page of fd. keep: be the one whose life it tells. Throws std::system_error.
  Life(int fd, bool keep);
  ~Life();
  Life(const Life&) = delete;
  Life& operator=(const Life&) = delete;

  bool alive() const {
    const uint32_t seen = word_->load(std::memory_order_acquire);
    return !(seen & FUTEX_OWNER_DIED) && owner_of(seen) != 0;
  }

  // Ends the keeper's thread and marks the word; twice is fine. In a forked child it does nothing:
  // the thread is not there, and the word is the parent's.
  void close();

 private:
  static void* keep_word(void* life);

  Word* word_;
  bool keeping_;
  uint64_t generation_;
  pthread_t thread_{};
  Word stop_{0};
  Word started_{0};
};

}  // namespace smb
