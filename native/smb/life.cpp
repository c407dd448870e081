#include "life.hpp"

#include <signal.h>
#include <sys/mman.h>

#include <cerrno>
#include <climits>
#include <system_error>

namespace smb {
namespace {

constexpr size_t kBytes = 4096;
constexpr int64_t kLongNs = int64_t{3600} * 1000000000;

}  // namespace

Life::Life(int fd, bool keep) : keeping_(keep), generation_(fork_generation()) {
  void* at = mmap(nullptr, kBytes, keep ? PROT_READ | PROT_WRITE : PROT_READ, MAP_SHARED, fd, 0);
  if (at == MAP_FAILED) throw std::system_error(errno, std::generic_category(), "mmap of the life word");
  word_ = static_cast<Word*>(at);
  if (!keep) return;
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);  // signals are the main thread's
  const int failed = pthread_create(&thread_, nullptr, keep_word, this);
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (failed) {
    munmap(word_, kBytes);
    throw std::system_error(failed, std::generic_category(), "start of the life thread");
  }
  while (started_.load(std::memory_order_acquire) == 0) futex_wait(&started_, 0, kLongNs);
}

void* Life::keep_word(void* life) {
  Life& self = *static_cast<Life*>(life);
  ThreadIdentity& me = this_thread();
  enter_pending(*self.word_, me);
  self.word_->store(me.tid, std::memory_order_release);
  self.started_.store(1, std::memory_order_release);
  futex_wake(&self.started_, 1);
  while (self.stop_.load(std::memory_order_acquire) == 0) futex_wait(&self.stop_, 0, kLongNs);
  self.word_->store(FUTEX_OWNER_DIED, std::memory_order_release);
  futex_wake(self.word_, INT_MAX);
  clear_pending(me);
  return nullptr;
}

void Life::close() {
  if (!keeping_ || generation_ != fork_generation()) return;
  keeping_ = false;
  stop_.store(1, std::memory_order_release);
  futex_wake(&stop_, 1);
  pthread_join(thread_, nullptr);
}

Life::~Life() {
  close();
  munmap(word_, kBytes);
}

}  // namespace smb
